"""The namespaces of a domain: who asked for which, their numbers, and which of them can be forgotten.

Owns the records and their numbers (1 … `limits.namespaces_max`, given out again when a namespace is forgotten), and the
list of names that the next daemon reads. Event-loop thread only. What a client wrote into a manifest is made printable
and short here, once, before anybody is shown it.

    (unknown) --register--> known, held by who asked --its last holder is gone--> idle
        ^                                                                         |
        '----- a new one finds no number left; nothing is stored in it -----------'

Invariant: a namespace is forgotten only when no family is in it and nobody who was told its number can still use it: a
holder is let go of when its connection is closed and its client, which may have reservations, is gone. Only who was
told a number may write under it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

from kvd import limits
from kvd.errors import CapacityError, InvariantError, KvdError
from kvd.layout.manifest import Manifest
from kvd.server import logs
from kvd.server.names import Names
from kvd.wire.messages import printable

SHOWN_CHARS_MAX = 96  # of model, tenant and label: a page of them fits a frame whatever is in them
FORGOTTEN_AT_ONCE_MAX = 64  # so that a new namespace at the bound does not look at all of them each time

Process = tuple[int, int]
"""A process: pid and when it started."""

_Key = TypeVar("_Key", bound=Hashable)
_log = logs.get("namespaces")


@dataclass(eq=False, slots=True)
class NamespaceRecord:
    """A namespace that a client registered: number in RESERVE, root of its chain. Its texts are for people."""

    number: int
    root: bytes
    label: str
    model: str
    tenant: str
    owner: Process | None = None  # who brought it up
    uid: int | None = None  # on whose account
    holders: set[Hashable] = field(default_factory=set)  # who was told the number and may use it


def shown(text: str) -> str:
    """`text` as it is shown: printable, and cut where it is too long."""
    safe = printable(text[: SHOWN_CHARS_MAX + 1])
    return safe if len(safe) <= SHOWN_CHARS_MAX else safe[: SHOWN_CHARS_MAX - 1] + "…"


class Namespaces:
    """See the module. `is_used(number)` says whether families are in a namespace."""

    def __init__(self, is_used: Callable[[int], bool]) -> None:
        self._is_used = is_used
        self.by_root: dict[bytes, NamespaceRecord] = {}  # the oldest first
        self.by_number: dict[int, NamespaceRecord] = {}
        self.names: Names | None = None  # what the next daemon over this memory must know
        self.names_renewed: Callable[[Names], None] = _nothing  # it was written anew, to another file
        self.forgotten_count = 0
        self._fresh = 1
        self._returned: list[int] = []  # a heap
        self._owned: Counter[Process] = Counter()
        self._of_uid: Counter[int] = Counter()
        self._held: dict[Hashable, set[int]] = {}

    def __len__(self) -> int:
        return len(self.by_root)

    def restore(self, known: list[tuple[int, bytes, str]]) -> None:
        """What an earlier daemon knew, under its numbers: (number, manifest, label). Once, before anything else."""
        if self.by_root:
            raise InvariantError("namespaces are restored before any is registered", code="restore")
        for number, encoded, label in sorted(known):
            self._returned.extend(range(self._fresh, number))
            self._fresh = number + 1
            self._add(number, Manifest.decode(encoded), label, None, None)

    def register(
        self,
        encoded: bytes,
        label: str,
        owner: Process | None = None,
        holder: Hashable | None = None,
        *,
        uid: int | None = None,
    ) -> NamespaceRecord:
        """The record of this manifest, new or known. Raises UsageError(encoding), CapacityError(namespaces).

        `owner` is the process that asks, `uid` its user: neither brings up more than its share. `holder` may use the
        number until `let_go`. None: nobody's, a user without a share of its own, nobody.
        """
        manifest = Manifest.decode(encoded)
        record = self.by_root.get(manifest.root)
        if record is None:
            if owner is not None and self._owned[owner] >= limits.namespaces_per_process_max:
                self._make_room_of_process(owner)
            if uid is not None and self._of_uid[uid] >= limits.namespaces_per_uid_max:
                self._make_room_of_user(uid)
            if len(self.by_root) >= limits.namespaces_max:
                self._make_room()
            number = self._number()
            try:
                if self.names is not None:
                    self.names.add_namespace(number, encoded, label)
            except CapacityError:
                heapq.heappush(self._returned, number)
                raise
            record = self._add(number, manifest, label, owner, uid)
            self._renew_names()
        elif (
            record.owner is None and record.uid is None
        ):  # known from before a restart: from now on it is theirs
            self._own(record, owner, uid)
        if holder is not None:
            self.tell(holder, record.number)
        return record

    def tell(self, holder: Hashable, number: int) -> None:
        """This holder is told this number, which there is."""
        self.by_number[number].holders.add(holder)
        self._held.setdefault(holder, set()).add(number)

    def may_use(self, holder: Hashable, number: int) -> bool:
        """Whether this holder was told this number."""
        return number in self._held.get(holder, ())

    def let_go(self, holder: Hashable) -> None:
        """This holder cannot use the numbers any more that it was told."""
        for number in self._held.pop(holder, ()):
            self.by_number[number].holders.discard(holder)

    # --- inside

    def _add(
        self, number: int, manifest: Manifest, label: str, owner: Process | None, uid: int | None
    ) -> NamespaceRecord:
        fields = manifest.fields()
        record = NamespaceRecord(
            number,
            manifest.root,
            shown(label),
            shown(str(fields["model"])),
            shown(str(fields["tenant"])),
        )
        self.by_root[record.root] = record
        self.by_number[number] = record
        self._own(record, owner, uid)
        return record

    def _own(self, record: NamespaceRecord, owner: Process | None, uid: int | None) -> None:
        record.owner, record.uid = owner, uid
        if owner is not None:
            self._owned[owner] += 1
        if uid is not None:
            self._of_uid[uid] += 1

    def _number(self) -> int:
        if self._returned:
            return heapq.heappop(self._returned)
        self._fresh += 1
        return self._fresh - 1

    def _make_room(self) -> None:
        if not self._forget_some(lambda record: True):
            raise CapacityError(
                f"all {limits.namespaces_max} namespaces hold data or belong to clients that live; kvctl clear drops "
                "the data of one, kvctl ls shows them",
                code="namespaces", namespaces_max=limits.namespaces_max,
            )  # fmt: skip

    def _make_room_of_process(self, owner: Process) -> None:
        if not self._forget_some(lambda record: record.owner == owner):
            raise CapacityError(
                f"process {owner[0]} brought up {self._owned[owner]} namespaces that are in use, as many as one may: "
                "namespaces are for models and tenants, not for requests",
                code="namespaces", namespaces_max=limits.namespaces_per_process_max,
            )  # fmt: skip

    def _make_room_of_user(self, uid: int) -> None:
        if not self._forget_some(lambda record: record.uid == uid):
            raise CapacityError(
                f"user {uid} brought up {self._of_uid[uid]} namespaces that are in use, as many as one may: "
                "namespaces are for models and tenants, not for requests; kvctl clear drops the data of one",
                code="namespaces", uid=uid, namespaces_max=limits.namespaces_per_uid_max,
            )  # fmt: skip

    def _forget_some(self, is_meant: Callable[[NamespaceRecord], bool]) -> int:
        """Forget the oldest of those meant that are idle and empty; returns how many."""
        found: list[NamespaceRecord] = []
        for record in self.by_root.values():
            if is_meant(record) and not record.holders and not self._is_used(record.number):
                found.append(record)
                if len(found) == FORGOTTEN_AT_ONCE_MAX:
                    break
        for record in found:
            self._forget(record)
        if found:
            _log.debug("namespaces_forgotten", count=len(found), namespaces=len(self.by_root))
        return len(found)

    def _forget(self, record: NamespaceRecord) -> None:
        if self.names is not None:  # first, so that no list ever names two namespaces by one number
            self.names.forget_namespace(record.number)
        del self.by_root[record.root]
        del self.by_number[record.number]
        heapq.heappush(self._returned, record.number)
        self.forgotten_count += 1
        if record.owner is not None:
            _less(self._owned, record.owner)
        if record.uid is not None:
            _less(self._of_uid, record.uid)

    def _renew_names(self) -> None:
        """A step of writing the list anew, when most of it is about namespaces that are forgotten.

        Never raises: when there is no memory for it, or nobody to keep it, the list that is there goes on.
        """
        if self.names is None:
            return
        following = None
        try:
            following = self.names.renew_some()
            if following is None:
                return
            self.names_renewed(following)
        except KvdError as error:
            if isinstance(error, InvariantError):
                raise
            _log.warning("names_not_renewed", reason=error.message)
            self.names.put_off()
            if following is not None:
                following.retire()
            return
        before, self.names = self.names, following
        before.retire()


def _less(counts: Counter[_Key], key: _Key) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def _nothing(_names: Names) -> None:
    return
