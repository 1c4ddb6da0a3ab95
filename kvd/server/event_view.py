"""What a subscriber of KV events is told: the families that are whole, from what was done to the index.

One thread's (the publisher's); touches nothing but its own columns. Fed with every publication and eviction in the
order in which they were performed, and with rows of a walk over the index where that order was lost. A family is named
by the low 64 bits of its identity, as engines name their blocks. Events are maps as vLLM's are:

    {"type": "BlockStored", "block_hashes": [u64 …], "parent_block_hash": u64 | nil, "token_ids": [], "block_size": 0,
     "lora_id": nil, "lora_name": nil, "medium": "CPU", "locality": "LOCAL", "ownership": "kvd", "namespace": str}
    {"type": "BlockRemoved", "block_hashes": [u64 …], "medium": "CPU", "locality": "LOCAL", "ownership": "kvd"}
    {"type": "AllBlocksCleared"}

Tokens and their number never reach the daemon: who asks for a prompt computes its identities (`kvd.Namespace.chain`).
The hashes of one BlockStored are a chain: each lies behind the one before it.

    unknown ── first member ──▶ missing n ── last mandatory member ──▶ told ── freed or withdrawn ──▶ unknown
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvd import limits
from kvd.core import events as ev

HASHES_MAX: Final = 4096  # of one event
_UNKNOWN: Final = 255
_PUBLISHED: Final = int(ev.PublishStatus.PUBLISHED)
_ID: Final = limits.identity_bytes

if limits.members_per_family_max >= _UNKNOWN:
    raise AssertionError("missing members and the mark for unknown fit a byte")


def short_hash(identity: bytes | memoryview) -> int:
    """The low 64 bits of an identity, read as one big-endian number."""
    return int.from_bytes(identity[_ID - 8 : _ID], "big")


@dataclass(frozen=True, slots=True)
class Row:
    """One entry as a walk over the index found it. `parent`: the entry it lies behind, `ev.NONE` for none."""

    entry: int
    key: bytes
    parent: int
    namespace: int
    missing: int  # mandatory members that are not there


class View:
    """See the module. `names(number)` gives the name of a namespace."""

    def __init__(self, families_max: int, names: Any) -> None:
        self._names = names
        self._hash = array("Q", bytes(8 * families_max))
        self._parent = array("Q", bytes(8 * families_max))
        self._missing = bytearray([_UNKNOWN]) * families_max
        self._namespace = array("H", bytes(2 * families_max))
        self._rooted = bytearray(families_max)  # 1: lies behind nothing
        self.told = 0

    def published(self, effect: ev.DoPublish, answer: ev.Published) -> Iterator[dict[str, Any]]:
        """Events of one publication."""
        whole: list[int] = []
        before = ev.NONE
        mandatory = effect.family_members
        for position, status in enumerate(answer.statuses):
            entry = int(memoryview(answer.entries)[position])
            if entry == ev.NONE:
                continue
            parent = effect.parents[position]
            behind = before if parent == ev.PREVIOUS else parent
            key = effect.keys[position * _ID : (position + 1) * _ID]
            if self._missing[entry] == _UNKNOWN or self._hash[entry] != short_hash(key):
                if status != _PUBLISHED:
                    continue  # of another turn: what made it comes, or came, in its own
                self._begin(entry, key, behind, effect.namespace, mandatory)
            if status == _PUBLISHED and effect.members[position] < mandatory and self._missing[entry]:
                self._missing[entry] -= 1
                if not self._missing[entry]:
                    whole.append(entry)
            if position + 1 < len(answer.statuses) and effect.parents[position + 1] == ev.PREVIOUS:
                before = entry
        yield from self._stored(whole)

    def _begin(self, entry: int, key: bytes, parent: int, namespace: int, missing: int) -> None:
        self._hash[entry] = short_hash(key)
        known = parent < len(self._hash) and self._missing[parent] != _UNKNOWN
        self._rooted[entry] = not known
        self._parent[entry] = self._hash[parent] if known else 0
        self._missing[entry] = missing
        self._namespace[entry] = namespace

    def evicted(self, effect: ev.DoEvict, answer: ev.Evicted) -> Iterator[dict[str, Any]]:
        """Events of one eviction: what is held and withdrawn is found no more, what is held and not comes back."""
        gone: list[int] = []
        for column in (answer.freed, answer.held) if effect.withdraw else (answer.freed,):
            for entry in memoryview(column).tolist():
                if self._missing[entry] == 0:
                    gone.append(self._hash[entry])
                self._missing[entry] = _UNKNOWN
        self.told -= len(gone)
        for first in range(0, len(gone), HASHES_MAX):
            yield _removed(gone[first : first + HASHES_MAX])
        if gone and effect.reason is ev.Reason.CLEAR and not self.told:
            yield {"type": "AllBlocksCleared"}

    # -- where the order was lost

    def forget(self) -> dict[str, Any]:
        """A walk begins: nothing is known."""
        self._missing = bytearray([_UNKNOWN]) * len(self._missing)
        self.told = 0
        return {"type": "AllBlocksCleared"}

    def walked(self, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
        """Events of some rows of a walk. What was published since it began may be among them again."""
        whole: list[int] = []
        for row in rows:
            known = self._missing[row.entry] != _UNKNOWN and self._hash[row.entry] == short_hash(row.key)
            if known and self._missing[row.entry] == 0:
                continue
            self._begin(row.entry, row.key, row.parent, row.namespace, row.missing)
            if not row.missing:
                whole.append(row.entry)
        yield from self._stored(whole)

    def snapshot(self) -> Iterator[dict[str, Any]]:
        """Everything that is whole, after a mark to forget all else."""
        yield {"type": "AllBlocksCleared"}
        told = [entry for entry, missing in enumerate(self._missing) if missing == 0]
        self.told -= len(told)
        yield from self._stored(told)

    # -- inside

    def _stored(self, entries: Sequence[int]) -> Iterator[dict[str, Any]]:
        """One event for each chain among these entries."""
        self.told += len(entries)
        hashes: list[int] = []
        first = last = ev.NONE
        for entry in entries:
            follows = (
                last != ev.NONE
                and not self._rooted[entry]
                and self._parent[entry] == self._hash[last]
                and self._namespace[entry] == self._namespace[last]
                and len(hashes) < HASHES_MAX
            )
            if hashes and not follows:
                yield self._stored_event(first, hashes)
                hashes = []
            if not hashes:
                first = entry
            hashes.append(self._hash[entry])
            last = entry
        if hashes:
            yield self._stored_event(first, hashes)

    def _stored_event(self, first: int, hashes: list[int]) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None if self._rooted[first] else self._parent[first],
            "token_ids": [],
            "block_size": 0,
            "lora_id": None,
            "lora_name": None,
            "medium": "CPU",
            "locality": "LOCAL",
            "ownership": "kvd",
            "namespace": self._names(self._namespace[first]),
        }


def _removed(hashes: list[int]) -> dict[str, Any]:
    return {
        "type": "BlockRemoved", "block_hashes": hashes, "medium": "CPU", "locality": "LOCAL", "ownership": "kvd",
    }  # fmt: skip
