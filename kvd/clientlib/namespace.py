"""Namespace: the door to the objects of one manifest. Batches first; a miss is a result.

Local and lock-free: chain, match, lookup, acquire, adopt. Through the daemon, with a deadline: reserve (and publish, in
`Writes`). Each of those has a twin that ends in `_async`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

from kvd import arguments, limits
from kvd.clientlib import calls
from kvd.clientlib.caches import EngineCache
from kvd.clientlib.chain import Chain
from kvd.clientlib.families import Families, FamilyLeases, group_number, not_of, rank_of
from kvd.clientlib.leases import Leases
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.clientlib.writes import Writes, check_members, none_to_write
from kvd.errors import CompatibilityError, LifecycleError, UsageError
from kvd.layout.geometry import Geometry
from kvd.layout.manifest import Manifest
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Objects, Part, Rank, Split
from kvd.layout.states import StateLayout
from kvd.shm import messages
from kvd.shm.layout import DESCRIPTOR
from kvd.shm.messages import Cq, Reserve, Sq
from kvd.types import Member

if TYPE_CHECKING:
    from kvd.clientlib.session import Session
    from kvd.clientlib.store import Store


class Namespace:
    """Objects of one manifest, as this client sees them."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self.manifest = manifest
        self._geometry: str | None = None  # fingerprint of the first one used, where the manifest names none
        self._families: dict[tuple[str, int], Families] = {}
        self._recent: tuple[Geometry, Families] | None = None  # spares computing the fingerprint
        self._caches: dict[tuple[str, int, Rank], EngineCache] = {}

    def chain(
        self,
        tokens: Any,
        chunk_tokens: int = 256,
        *,
        algorithm: str = "sha256",
        extras: Sequence[bytes] | None = None,
    ) -> Chain:
        """The identities of a prompt's whole chunks. `chain.extend(more)` later hashes only what is new.

        `tokens`: ids as an array of integers (fastest: u32), a numpy array or a list. `extras`: bytes an engine adds to
        each chunk (image hash, adapter). `algorithm`: "sha256", or "xxh3_128" for prompts you trust.
        """
        return Chain(self.manifest.root, chunk_tokens, algorithm).extend(tokens, extras)

    def chain_hashes(self, hashes: Any, hash_bytes: int, chunk_tokens: int) -> Chain:
        """The identities of chunks that an engine named by hashes of its own."""
        return Chain(self.manifest.root, chunk_tokens, "sha256").extend_hashes(hashes, hash_bytes)

    def chain_of(self, identities: bytes, chunk_tokens: int) -> Chain:
        """A chain of identities that are known already (n × 32 bytes), e.g. handed over by a scheduler."""
        return Chain.of_identities(self.manifest.root, chunk_tokens, identities)

    # -- reading ------------------------------------------------------------------------------------------

    def match(
        self,
        chain: Chain,
        geom: Geometry | None = None,
        *,
        prompt_tokens: int | None = None,
        request: str | None = None,
    ) -> int:
        """How many leading chunks are here. Microseconds; no daemon, no lease, no protection.

        Without a geometry: families that are whole. With one: the usable prefix, by the rule of each group, whatever
        split wrote the chunks, and never the chunk of the prompt's last token (`prompt_tokens`, where the chain was
        made of hashes or identities and cannot know it).
        """
        if not isinstance(chain, Chain):
            raise _no_chain(chain)
        number = self._store.request(request)
        found = self._match(chain, geom, prompt_tokens, number)
        if found < len(chain) and self._store.renew():
            found = self._match(chain, geom, prompt_tokens, number)
        return found

    def _match(self, chain: Chain, geom: Geometry | None, prompt_tokens: int | None, number: int) -> int:
        try:
            if geom is None:
                return self._store.native.match(chain.identities, number)
            families = self.families(geom, chain.chunk_tokens)
            return families.match(self._store.native, families.asked(chain, prompt_tokens), number)
        except NATIVE as error:
            raise translate(error) from None

    @overload
    def acquire(self, chain: Chain, geom: None = None, *, request: str | None = None) -> Leases: ...
    @overload
    def acquire(
        self, chain: Chain, geom: Geometry, *, prompt_tokens: int | None = None, request: str | None = None
    ) -> FamilyLeases: ...
    def acquire(
        self,
        chain: Chain,
        geom: Geometry | None = None,
        *,
        prompt_tokens: int | None = None,
        request: str | None = None,
    ) -> Leases:
        """Leases on the leading chunks that are here; `len()` says how many. Use as a context manager.

        With a geometry: on what the usable prefix needs (`FamilyLeases`), as `match` finds it.
        """
        if not isinstance(chain, Chain):
            raise _no_chain(chain)
        number = self._store.request(request)
        leases = self._acquire(chain, geom, prompt_tokens, number)
        if len(leases) < len(chain) and self._store.renew():
            leases.release()
            leases = self._acquire(chain, geom, prompt_tokens, number)
        return leases

    def _acquire(self, chain: Chain, geom: Geometry | None, prompt_tokens: int | None, number: int) -> Leases:
        store = self._store
        try:
            if geom is None:
                native = store.native.acquire(chain.identities, number)
                return Leases(native, chain, verify=store.verify_reads, report=store.report_damage)
            families = self.families(geom, chain.chunk_tokens)
            asked = families.asked(chain, prompt_tokens)
            return families.acquire(
                store.native, asked, number, verify=store.verify_reads, report=store.report_damage
            )
        except NATIVE as error:
            raise translate(error) from None

    @overload
    def adopt(self, exported: bytes, chain: Chain, geom: None = None) -> Leases: ...
    @overload
    def adopt(self, exported: bytes, chain: Chain, geom: Geometry) -> FamilyLeases: ...
    def adopt(self, exported: bytes, chain: Chain, geom: Geometry | None = None) -> Leases:
        """Take own leases on what another process of this request exported, before it lets go of its own.

        With a geometry, `chain` is the usable prefix: `chain[:leases.usable_chunks]` of the process that exported.
        Raises LifecycleError naming the first chunk that changed meanwhile, or is not of this chain; then nothing is
        held.
        """
        if not isinstance(chain, Chain):
            raise _no_chain(chain)
        given = arguments.buffer("exported", exported, "give the bytes of leases.export()")
        families = None if geom is None else self.families(geom, chain.chunk_tokens)
        count, broken = divmod(given.nbytes, DESCRIPTOR.size)
        held: Chain = chain[:count] if families is None else chain[families.rule.first_needed(len(chain)) :]
        if len(held) != count and not broken:
            raise not_of(chain, count)
        try:
            native = self._store.native.adopt(exported, held.identities)
            if len(native) != len(native.mask) and self._store.renew():
                native = self._store.native.adopt(exported, held.identities)
        except NATIVE as error:
            raise translate(error) from None
        if len(native) != len(native.mask):
            missing = native.mask.index(0)
            native.release()
            raise LifecycleError(
                f"chunk {missing} of the exported leases is gone, or not of this chain: its generation or epoch has "
                "passed, or it was acquired for another prompt",
                code="adopt", chunk=missing,
            )  # fmt: skip
        verify, report = self._store.verify_reads, self._store.report_damage
        if families is None:
            return Leases(native, chain, verify=verify, report=report)
        return families.adopted(native, chain, verify=verify, report=report)

    # -- what the bytes mean ------------------------------------------------------------------------------

    def families(self, geom: Geometry, chunk_tokens: int) -> Families:
        """What is known of a geometry at one chunk size; made once. Raises CompatibilityError(geometry)."""
        recent = self._recent
        if recent is not None and recent[0] is geom and recent[1].chunk_tokens == chunk_tokens:
            return recent[1]
        arguments.instance("geom", geom, Geometry, _GEOMETRY)
        # Equal geometries are made anew by every request of some engines: they are one.
        fingerprint = geom.fingerprint
        found = self._families.get((fingerprint, chunk_tokens))
        if found is None:
            self._check_geometry(geom)
            found = self._families[fingerprint, chunk_tokens] = Families(geom, chunk_tokens)
            self._geometry = fingerprint
        self._recent = (geom, found)
        return found

    def _check_geometry(self, geom: Geometry) -> None:
        """One namespace has one geometry: that of its manifest, or else the first that is used here."""
        named = self.manifest.extra.get("geometry", self._geometry)
        if named is not None and named != geom.fingerprint:
            by = "the manifest names" if "geometry" in self.manifest.extra else "this namespace is used with"
            raise CompatibilityError(
                f"{by} geometry {named}, this one is {geom.fingerprint}: another geometry is another namespace; name "
                'it in the manifest with extra={"geometry": geom.fingerprint}',
                code="geometry", known=str(named), given=geom.fingerprint,
            )  # fmt: skip

    def register(
        self,
        layout: PagedLayout | StateLayout,
        tensors: Sequence[Any],
        *,
        geom: Geometry,
        group: str | int | None = None,
        split: Split | None = None,
        rank: int | Rank | None = None,
        name: str = "kv",
    ) -> EngineCache:
        """Register the tensors in which an engine rank keeps one group, for `Writes.gather` and `FamilyLeases.scatter`.

        `tensors`: torch tensors on the CPU, numpy arrays, or flat buffers, in the order of the layout's letters; each
        is compared with the layout. `group`: by name ("full", "window 4096", "state") or number, where there are more.
        `split` and `rank` say which rank this is; without them the layout's first_layer, first_head and extents do.
        Raises CompatibilityError(paged) for a layout that is not of this geometry, that does not describe the tensors,
        or that is not the one registered under this name before (until that cache is closed).
        """
        arguments.instance("geom", geom, Geometry, _GEOMETRY)
        if not isinstance(layout, PagedLayout | StateLayout):
            raise arguments.refusal("layout", layout, "give a kvd.PagedLayout, or a StateLayout for states")
        arguments.text("name", name)
        arguments.length("tensors", tensors, "give a list of tensors, in the order of the layout's letters")
        if split is not None:
            arguments.instance("split", split, Split, "give a kvd.Split")
        elif rank is not None:
            raise arguments.refusal("rank", rank, "give split= too: a rank is one of a split's", "split")
        self._check_geometry(geom)
        number = group_number(geom, group)
        key = (name, number, rank_of(rank) or Rank())
        known = self._caches.get(key)
        if known is not None:
            if type(known.layout) is not type(layout):
                raise CompatibilityError(
                    f"a {type(known.layout).__name__} is registered as {name!r}, not a {type(layout).__name__}",
                    code="paged",
                )
            known.layout.check_same(layout)  # type: ignore[arg-type]
        cache = EngineCache(
            geom, number, layout, tensors, split or Split(), rank_of(rank) or Rank(), self._forget
        )
        self._caches[key] = cache
        self._geometry = geom.fingerprint  # not before: what is refused is not used
        return cache

    def _forget(self, cache: EngineCache) -> None:
        for key, known in list(self._caches.items()):
            if known is cache:
                del self._caches[key]

    # -- writing ------------------------------------------------------------------------------------------

    def reserve(
        self,
        chain: Chain,
        nbytes: int | None = None,
        *,
        members: Sequence[Member] | None = None,
        family_members: int | None = None,
        geom: Geometry | None = None,
        split: int | Split = 0,
        rank: int | Rank | None = None,
        groups: Sequence[str | int] | None = None,
        skip_pending: bool = False,
        request: str | None = None,
        deadline_s: float | None = None,
    ) -> Writes:
        """Reserve a slot for every chunk of `chain` that is not present: one object of `nbytes`, or these `members`, or
        with `geom` the objects of a `split` (a `kvd.Split`; without one: of a single rank) that `rank` stores (a number
        is a tensor rank; None: those of all ranks).

        Without `geom`, `split` is a number of the caller's own, 0 … 65,535, which is recorded with the families.
        `family_members`: how many members, numbered first, make a chunk complete (default: all that are written here).
        `groups`: only these groups of the geometry; states are usually stored at some boundaries only.
        `skip_pending`: leave out what another client is writing. Raises CapacityError (pool full of leased, pinned or
        unwritten data; object too large), UnavailableError (daemon gone, deadline), UsageError.
        """
        wanted = self._wanted(chain, nbytes, members, family_members, geom, split, rank, groups)
        limit = self._limit_s(deadline_s, skip_pending)
        if not wanted.parts:
            return wanted.writes(self._store.present_session, chain, limit, none_to_write())
        end_s = time.monotonic() + limit
        session = self._store.session()
        number = session.number(self.manifest, limit)
        payload = self._payload(chain, wanted, skip_pending, self._store.request(request), number)
        answer = session.calls.call(Sq.RESERVE, payload, end_s - time.monotonic())
        return wanted.writes(session, chain, limit, calls.expect(Cq.RESERVED, answer))

    async def reserve_async(
        self,
        chain: Chain,
        nbytes: int | None = None,
        *,
        members: Sequence[Member] | None = None,
        family_members: int | None = None,
        geom: Geometry | None = None,
        split: int | Split = 0,
        rank: int | Rank | None = None,
        groups: Sequence[str | int] | None = None,
        skip_pending: bool = False,
        request: str | None = None,
        deadline_s: float | None = None,
    ) -> Writes:
        """As `reserve`, without blocking the loop: `async with await ns.reserve_async(...) as writes`."""
        wanted = self._wanted(chain, nbytes, members, family_members, geom, split, rank, groups)
        limit = self._limit_s(deadline_s, skip_pending)
        if not wanted.parts:
            return wanted.writes(self._store.present_session, chain, limit, none_to_write())
        end_s = time.monotonic() + limit
        session = await self._store.session_async()
        number = await session.number_async(self.manifest, limit)
        payload = self._payload(chain, wanted, skip_pending, self._store.request(request), number)
        answer = await session.calls.call_async(Sq.RESERVE, payload, end_s - time.monotonic())
        return wanted.writes(session, chain, limit, calls.expect(Cq.RESERVED, answer))

    def _wanted(
        self,
        chain: Chain,
        nbytes: int | None,
        members: Sequence[Member] | None,
        family_members: int | None,
        geom: Geometry | None,
        split: int | Split,
        rank: int | Rank | None,
        groups: Sequence[str | int] | None,
    ) -> _Wanted:
        if not isinstance(chain, Chain):
            raise _no_chain(chain)
        if not len(chain):
            raise UsageError("there is nothing to reserve: the chain has no chunk", code="empty")
        if geom is not None:
            if nbytes is not None or members is not None or family_members is not None:
                raise UsageError(
                    "a geometry says what the members are: give geom=, or nbytes=, or members=",
                    code="members",
                )
            return self._wanted_of(self.families(geom, chain.chunk_tokens), split, rank, groups)
        if rank is not None or groups is not None or isinstance(split, Split):
            raise UsageError("rank=, groups= and a Split mean something only with geom=", code="members")
        parts = check_members(members, nbytes)
        code = arguments.count("split", split, 0, 0xFFFF, "split")
        complete = len(parts)
        if family_members is not None:
            complete = arguments.count(
                "family_members", family_members, 1, limits.members_per_family_max, "members"
            )
        elif max(m.index for m in parts) >= complete:
            raise UsageError(
                f"members {[m.index for m in parts]} are not 0 … {complete - 1}: say with family_members= how many "
                "make a chunk complete",
                code="members",
            )  # fmt: skip
        return _Wanted(parts, complete, code)

    @staticmethod
    def _wanted_of(
        families: Families,
        split: int | Split,
        rank: int | Rank | None,
        groups: Sequence[str | int] | None,
    ) -> _Wanted:
        if not isinstance(split, Split):
            if isinstance(split, bool) or not isinstance(split, int) or split != 0:
                raise arguments.refusal(
                    "split", split, "with geom= give a kvd.Split, such as Split(tp=4)", "split"
                )
            split = Split()
        objects, one = families.objects(split), rank_of(rank)
        parts: Sequence[Part] = objects.parts
        if one is not None:
            parts = objects.writes(tp_rank=one.tp, pp_rank=one.pp, cp_rank=one.cp)
        if groups is not None:
            if isinstance(groups, str | bytes) or not isinstance(groups, Sequence | set | frozenset):
                raise arguments.refusal(
                    "groups", groups, "give a list of names or numbers of groups", "group"
                )
            chosen = {group_number(families.geometry, group) for group in groups}
            parts = [part for part in parts if part.group in chosen]
        members = tuple(part.member for part in parts)
        return _Wanted(members, objects.mandatory_count, objects.split.code, families, objects)

    def _limit_s(self, deadline_s: float | None, skip_pending: bool) -> float:
        """Seconds that a reservation may take; checks what is neither of the chain nor of its members."""
        arguments.flag("skip_pending", skip_pending)
        return self._store.deadline_s if deadline_s is None else arguments.seconds("deadline_s", deadline_s)

    @staticmethod
    def _payload(chain: Chain, wanted: _Wanted, skip_pending: bool, request: int, number: int) -> bytes:
        calls.check_batch(len(chain), len(wanted.parts))
        return messages.pack_reserve(
            Reserve(
                request, number, wanted.split, wanted.complete, skip_pending, chain.parent, wanted.parts,
                bytes(chain.identities),
            )
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Namespace {self.manifest.model} {self.manifest.short}>"


_GEOMETRY = "give a kvd.Geometry, such as Geometry.from_hf_config(config, dtype=...)"


def _no_chain(chain: object) -> UsageError:
    return arguments.refusal("chain", chain, "give a chain of this namespace: ns.chain(tokens, chunk_tokens)")


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a reservation asks for, for each chunk."""

    parts: tuple[Member, ...]
    complete: int
    split: int
    families: Families | None = None
    objects: Objects | None = None

    def writes(self, session: Session, chain: Chain, limit_s: float, answer: bytes) -> Writes:
        """The reservation that the daemon's answer made: it belongs to that daemon, whoever follows it."""
        return Writes(
            session.native, session.calls, chain, self.parts, limit_s, answer, self.families, self.objects
        )
