"""Namespace: the door to the objects of one manifest. Batches first; a miss is a result.

Local and lock-free: chain, match, lookup, acquire, adopt. Through the daemon, with a deadline: reserve (and publish, in
`Writes`). Each of those has a twin that ends in `_async`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvd import limits
from kvd.clientlib import calls
from kvd.clientlib.chain import Chain
from kvd.clientlib.leases import Leases
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.clientlib.writes import Writes, check_members
from kvd.errors import LifecycleError, UsageError
from kvd.layout.manifest import Manifest
from kvd.shm import messages
from kvd.shm.messages import Cq, Reserve, Sq
from kvd.types import Member

if TYPE_CHECKING:
    from kvd.clientlib.store import Store


class Namespace:
    """Objects of one manifest, as this client sees them."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store = store
        self.manifest = manifest
        self._number: int | None = None

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

    def match(self, chain: Chain, *, request: str | None = None) -> int:
        """How many leading chunks are here, whole. Microseconds; no daemon, no lease, no protection."""
        try:
            return self._store.native.match(chain.identities, self._store.request(request))
        except NATIVE as error:
            raise translate(error) from None

    def acquire(self, chain: Chain, *, request: str | None = None) -> Leases:
        """Leases on the leading chunks that are here; `len()` says how many. Use as a context manager."""
        try:
            native = self._store.native.acquire(chain.identities, self._store.request(request))
        except NATIVE as error:
            raise translate(error) from None
        return Leases(native, chain, verify=self._store.verify_reads)

    def adopt(self, exported: bytes, chain: Chain) -> Leases:
        """Take own leases on what another process of this request exported, before it lets go of its own.

        Raises LifecycleError naming the first chunk that changed meanwhile: then nothing is held.
        """
        try:
            native = self._store.native.adopt(exported)
        except NATIVE as error:
            raise translate(error) from None
        if len(native) != len(native.mask):
            missing = native.mask.index(0)
            native.release()
            raise LifecycleError(
                f"chunk {missing} of the exported leases is gone: its generation or epoch has passed",
                code="adopt", chunk=missing,
            )  # fmt: skip
        return Leases(native, chain, verify=self._store.verify_reads)

    def reserve(
        self,
        chain: Chain,
        nbytes: int | None = None,
        *,
        members: Sequence[Member] | None = None,
        family_members: int | None = None,
        split: int = 0,
        skip_pending: bool = False,
        request: str | None = None,
        deadline_s: float | None = None,
    ) -> Writes:
        """Reserve a slot for every chunk of `chain` that is not present: one object of `nbytes`, or these `members`.

        `family_members`: how many members make a chunk complete (default: as many as are written here).
        `skip_pending`: leave out what another client is writing. Raises CapacityError (pool full of leased, pinned or
        unwritten data; object too large), UnavailableError (daemon gone, deadline), UsageError.
        """
        parts, payload = self._reservation(
            chain, nbytes, members, family_members, split, skip_pending, self._store.request(request),
            self._store.namespace_number(self),
        )  # fmt: skip
        limit = self._store.deadline_s if deadline_s is None else deadline_s
        answer = self._store.calls.call(Sq.RESERVE, payload, limit)
        reserved = calls.expect(Cq.RESERVED, answer)
        return Writes(self._store.native, self._store.calls, chain, parts, limit, reserved)

    async def reserve_async(
        self,
        chain: Chain,
        nbytes: int | None = None,
        *,
        members: Sequence[Member] | None = None,
        family_members: int | None = None,
        split: int = 0,
        skip_pending: bool = False,
        request: str | None = None,
        deadline_s: float | None = None,
    ) -> Writes:
        """As `reserve`, without blocking the loop: `async with await ns.reserve_async(...) as writes`."""
        number = await self._store.namespace_number_async(self)
        parts, payload = self._reservation(
            chain, nbytes, members, family_members, split, skip_pending, self._store.request(request), number
        )
        limit = self._store.deadline_s if deadline_s is None else deadline_s
        answer = await self._store.calls.call_async(Sq.RESERVE, payload, limit)
        reserved = calls.expect(Cq.RESERVED, answer)
        return Writes(self._store.native, self._store.calls, chain, parts, limit, reserved)

    def _reservation(
        self,
        chain: Chain,
        nbytes: int | None,
        members: Sequence[Member] | None,
        family_members: int | None,
        split: int,
        skip_pending: bool,
        request: int,
        number: int,
    ) -> tuple[tuple[Member, ...], bytes]:
        parts = check_members(members, nbytes)
        if not len(chain):
            raise UsageError("there is nothing to reserve: the chain has no chunk", code="empty")
        complete = len(parts) if family_members is None else family_members
        if family_members is None and max(m.index for m in parts) >= complete:
            raise UsageError(
                f"members {[m.index for m in parts]} are not 0 … {complete - 1}: say with family_members= how many make "
                "a chunk complete",
                code="members",
            )  # fmt: skip
        if not 0 < complete <= limits.members_per_family_max:
            raise UsageError(
                f"family_members is {complete}; allowed: 1 … {limits.members_per_family_max} members that make a chunk "
                "complete (higher member numbers are optional)",
                code="members", family_members=complete,
            )  # fmt: skip
        calls.check_batch(len(chain), len(parts))
        message = Reserve(
            request, number, split, complete, skip_pending, chain.parent, parts, bytes(chain.identities)
        )  # fmt: skip
        return parts, messages.pack_reserve(message)

    def __repr__(self) -> str:
        return f"<Namespace {self.manifest.model} {self.manifest.short}>"
