"""What a client knows of one geometry at one chunk size: rules for the native matcher, objects of the splits it met.

Owns no memory; made by a Namespace, one for each geometry and chunk size, and kept with it. For any thread. The rules
and the numbering of members are those of kvd.layout, which is the reference.

    families of a chain ──native walk──▶ longest usable prefix ──required──▶ chunks [first, usable) to lease
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvd import arguments
from kvd.clientlib.caches import check_each_once, rows_of
from kvd.clientlib.leases import Lease, Leases, Report
from kvd.errors import CompatibilityError, LifecycleError, UsageError
from kvd.layout import chain as reference
from kvd.layout.family import RULE_NUMBERS, Completeness
from kvd.layout.geometry import Geometry
from kvd.layout.shards import Objects, Rank, Split
from kvd.shm._native import FamilyRules

if TYPE_CHECKING:
    from kvd.clientlib.caches import BlockIds, EngineCache, Read
    from kvd.clientlib.chain import Chain
    from kvd.shm._native import Client, LeaseBatch

_PRESENT = struct.Struct("<QQHBBI")  # docs/design/shm.md: present[2], split, members_count, ready, 0
_LOW = (1 << 64) - 1


class Families:
    """See the module."""

    def __init__(self, geometry: Geometry, chunk_tokens: int) -> None:
        self.geometry = geometry
        self.chunk_tokens = chunk_tokens
        self.rule = Completeness(geometry, chunk_tokens)
        self._rules = FamilyRules(chunk_tokens, [(RULE_NUMBERS[g.rule], g.window) for g in geometry.groups])
        self._objects: dict[int, Objects] = {}

    def objects(self, split: Split | int) -> Objects:
        """The objects of one chunk under a split. Raises UsageError(split) where the model cannot be cut so."""
        code = split if isinstance(split, int) else split.code
        found = self._objects.get(code)
        if found is None:
            found = self._objects[code] = Objects(self.geometry, Split.from_code(code), self.chunk_tokens)
        return found

    def asked(self, chain: Chain, prompt_tokens: int | None) -> Chain:
        """The chunks of a chain that its prompt may reuse: all but those that hold its last token."""
        if chain.start:
            raise UsageError(
                "with a geometry a chain is matched from its beginning: windows and states count from there",
                code="chain-slice", start=chain.start,
            )  # fmt: skip
        most = chain.usable_chunks
        if prompt_tokens is not None:
            arguments.count("prompt_tokens", prompt_tokens, 0, 1 << 62)
            most = min(len(chain), reference.usable_chunks(prompt_tokens, self.chunk_tokens))
        asked: Chain = chain[:most]
        return asked

    def match(self, native: Client, asked: Chain, request: int) -> int:
        """The longest usable prefix in chunks."""
        while True:
            usable, unknown = native.match_family(asked.identities, self._rules, request)
            if unknown < 0:
                return usable
            self._learn(unknown)

    def acquire(
        self, native: Client, asked: Chain, request: int, *, verify: bool, report: Report | None = None
    ) -> FamilyLeases:
        """Leases on what the longest usable prefix needs."""
        while True:
            batch, usable, unknown = native.acquire_family(asked.identities, self._rules, request)
            if unknown < 0:
                return FamilyLeases(batch, asked, self, usable, verify=verify, report=report)
            batch.release()
            self._learn(unknown)

    def adopted(
        self, batch: LeaseBatch, chain: Chain, *, verify: bool, report: Report | None = None
    ) -> FamilyLeases:
        """Leases that another process exported for the prefix `chain`, checked against the rules once more.

        Raises LifecycleError when they are not, or no longer, what the prefix needs; then nothing is held.
        """
        leases = FamilyLeases(batch, chain, self, len(chain), verify=verify, report=report)
        if not leases.suffice():
            batch.release()
            raise not_of(chain, len(batch))
        return leases

    def _learn(self, code: int) -> None:
        masks = self.rule.group_masks(code)  # None: no split of this model has that code
        self._rules.add(code, [(mask & _LOW, mask >> 64) for mask in masks or ()])


class FamilyLeases(Leases):
    """Leases on what a usable prefix needs: the chunks `first_chunk` … `usable_chunks` − 1 of its chain.

    `first_chunk` is 0 wherever a layer attends to everything. Item i is chunk first_chunk + i.
    """

    __slots__ = ("_families", "_present", "first_chunk", "usable_chunks")

    def __init__(
        self,
        native: LeaseBatch,
        chain: Chain,
        families: Families,
        usable: int,
        *,
        verify: bool,
        report: Report | None = None,
    ) -> None:
        self.usable_chunks = usable
        self.first_chunk = families.rule.first_needed(usable)
        super().__init__(native, chain[self.first_chunk : usable], verify=verify, report=report)
        self._families = families
        self._present: list[tuple[int, int]] | None = None

    @property
    def tokens_count(self) -> int:
        """Tokens of the usable prefix."""
        return self.usable_chunks * self._families.chunk_tokens

    def chunks(self, group: str | int | None = None) -> range:
        """The chunks of which a group needs its members: what `scatter` copies."""
        first = self._families.rule.first_chunk(
            group_number(self._families.geometry, group), self.usable_chunks
        )
        return range(first, self.usable_chunks)

    def suffice(self) -> bool:
        """Whether these families have every member that the prefix needs."""
        present = self._families_present()
        try:
            needed = self._families.rule.required(
                self.usable_chunks, [0] * self.first_chunk + [code for _, code in present]
            )
        except UsageError:
            return False
        return all(
            bits & wanted == wanted
            for (bits, _), wanted in zip(present, needed[self.first_chunk :], strict=True)
        )

    def scatter(self, cache: EngineCache, block_ids: BlockIds, *, chunks: range | None = None) -> int:
        """Copy objects into the engine's blocks, whatever split wrote them; returns the bytes copied.

        `cache` says which group, layers and heads this rank keeps. `block_ids` holds the blocks of each chunk of
        `chunks` in turn (default: `self.chunks(cache.group)`); of a state cache its one slot a chunk. One native call
        for each member and split. Raises CompatibilityError naming what cannot be put into this cache.
        """
        check_cache(cache)
        cache.check_open()
        cache.check_geometry(self._families.geometry)
        needed = self.chunks(cache.group)
        todo = (
            needed
            if chunks is None
            else arguments.instance("chunks", chunks, range, "give a range of chunks")
        )
        if todo.step != 1 or (todo and not (needed.start <= todo.start and todo.stop <= needed.stop)):
            raise UsageError(
                f"chunks {todo} are not within {needed}, which this prefix needs of the group", code="chunks"
            )
        present = self._families_present()
        by_split: dict[int, list[int]] = {}
        for number in todo:
            by_split.setdefault(present[number - self.first_chunk][1], []).append(number - todo.start)
        # All of it is looked at before the first byte moves.
        work: list[tuple[Read, list[tuple[memoryview, ...]], Any]] = []
        for code, rows in by_split.items():
            numbers = [todo.start + row for row in rows]
            for read in cache.reads(self._families, code):
                copies = read.copies
                if len(by_split) > 1 and not work:
                    every = rows_of(block_ids, copies.blocks_per_chunk, len(todo), range(len(todo)))
                    check_each_once(every, copies.native.blocks_count)
                ids = rows_of(block_ids, copies.blocks_per_chunk, len(todo), rows)
                work.append((read, read.views(self, numbers), ids))
        return sum(read.scatter(cache, views, ids) for read, views, ids in work)

    async def scatter_async(
        self, cache: EngineCache, block_ids: BlockIds, *, chunks: range | None = None
    ) -> int:
        """As `scatter`, on a worker thread, so that it overlaps with the loop's other work."""
        return await asyncio.to_thread(self.scatter, cache, block_ids, chunks=chunks)

    def member_views(self, numbers: Sequence[int], member: int, size_bytes: int) -> list[memoryview]:
        """Views of one member of several chunks (numbers in the chain), each of the size that the geometry says."""
        views: list[memoryview] = []
        for number in numbers:
            at = number - self.first_chunk
            lease: Lease = self[at]
            views.append(lease.member_view(member))
            if views[-1].nbytes != size_bytes:
                raise CompatibilityError(
                    f"chunk {number}, member {member} has {views[-1].nbytes} B, the geometry says {size_bytes}: it was "
                    'written under another geometry; name it in the manifest with extra={"geometry": geom.fingerprint}',
                    code="geometry", chunk=number, member=member,
                )  # fmt: skip
        return views

    def _families_present(self) -> list[tuple[int, int]]:
        """(present bits, split code) of each family, read once under its lease."""
        if self._present is None:
            self._present = [
                (low | high << 64, code)
                for low, high, code, _, _, _ in _PRESENT.iter_unpack(self._native.present())
            ]
        return self._present


def not_of(chain: Chain, leases: int) -> LifecycleError:
    """The error for adopted leases that do not belong to a chain."""
    return LifecycleError(
        f"{leases} adopted leases are not what a prefix of {len(chain)} chunks needs; hand over the chain they were "
        "acquired for, with a geometry chain[:leases.usable_chunks]",
        code="adopt", leases=leases, chunks=len(chain),
    )  # fmt: skip


def group_number(geometry: Geometry, name: str | int | None) -> int:
    """The number of a group by its name ("full", "window 4096", "state"), its rule, or its number."""
    groups = geometry.groups
    if name is None and len(groups) == 1:
        return 0
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < len(groups):
        return name
    found = [
        n for n, group in enumerate(groups) if isinstance(name, str) and name in (group.name, str(group.rule))
    ]
    if len(found) == 1:
        return found[0]
    if name is not None and not isinstance(name, str | int):
        raise arguments.refusal("group", name, "give the name or the number of a group", "group")
    known = ", ".join(f"{n}: {group.name!r}" for n, group in enumerate(groups))
    raise UsageError(
        f"group {name!r} is not one of this geometry, or not the only one; allowed by name or number: {known}",
        code="group", group=str(name),
    )  # fmt: skip


def check_cache(cache: object) -> None:
    """Raises UsageError for what is no registered cache."""
    if not hasattr(cache, "check_open"):
        raise arguments.refusal("cache", cache, "give what ns.register(layout, tensors, geom=...) returned")


def rank_of(rank: int | Rank | None) -> Rank | None:
    """A rank as given: a number is a tensor rank. Raises UsageError for what is neither."""
    if rank is None or isinstance(rank, Rank):
        return rank
    return Rank(arguments.count("rank", rank, 0, 0xFFFF, "rank"))
