"""Families that were published before the family they lie behind, and reservations that wait for theirs.

A client may reserve the second part of a chain before it has published the first, and parts may be published
in any order. Who lies behind whom is known from the keys, but a place in the forest needs an entry; so what
came first is kept here until its prefix arrives. Bounded: what is forgotten is a root for ever, which costs a
worse order of eviction and nothing else. Owned by `Core`, used by the write path.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.reservations import Reservation

parents_max = 4096
children_max = 16  # of one parent


class Orphans:
    """By the first 8 bytes of the identity that is missing."""

    def __init__(self) -> None:
        self._children: OrderedDict[int, dict[int, int]] = OrderedDict()  # parent key8 -> child key8 -> entry
        self._reservations: dict[int, dict[int, None]] = {}  # parent key8 -> numbers

    def add_family(self, parent_key8: int, key8: int, entry: int) -> None:
        """This family lies behind one that is not there."""
        children = self._children.get(parent_key8)
        if children is None:
            if len(self._children) >= parents_max:
                self._children.popitem(last=False)
            children = self._children[parent_key8] = {}
        if len(children) < children_max or key8 in children:
            children[key8] = entry

    def add_reservation(self, parent_key8: int, number: int) -> None:
        """This reservation writes behind a family that is not there."""
        self._reservations.setdefault(parent_key8, {})[number] = None

    def await_family(self, reservation: Reservation, family: int) -> None:
        """This family of its chain is not there, and only others can still write it."""
        key8 = reservation.key8s[family]
        reservation.awaited.append(key8)
        self.add_reservation(key8, reservation.number)

    def end_reservation(self, parent_key8: int, number: int) -> None:
        """The reservation is over, or has its parent."""
        waiting = self._reservations.get(parent_key8)
        if waiting is not None:
            waiting.pop(number, None)
            if not waiting:
                del self._reservations[parent_key8]

    def awaited(self, key8s: Iterable[int]) -> list[int]:
        """Positions of those that somebody waits for."""
        children, reservations = self._children, self._reservations
        if not children and not reservations:
            return []
        return [at for at, key8 in enumerate(key8s) if key8 in children or key8 in reservations]

    def take(self, key8: int) -> tuple[dict[int, int], list[int]]:
        """Children (key8 -> entry, perhaps gone by now) and reservations that waited for this family."""
        return self._children.pop(key8, {}), list(self._reservations.pop(key8, ()))
