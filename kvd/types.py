"""Small frozen values that every room shares: keys, members, descriptors. Checked once, on construction."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvd import arguments, limits
from kvd.errors import UsageError


class Outcome(IntEnum):
    """What a lookup of one chunk says. A miss is a result, not an exception."""

    HIT = 0
    PENDING = 1  # a writer holds a reservation for it
    MISS = 2


@dataclass(frozen=True, slots=True)
class Member:
    """Which part of a family: `index` as the family's split numbers its objects (`kvd.layout.shards`).

    Those that make a family complete come first; optional ones (windows and states of a hybrid) have higher numbers.
    """

    index: int
    size_bytes: int
    heads: tuple[int, int] = (0, 0)  # [begin, end) of KV heads, (0, 0): all
    layers: tuple[int, int] = (0, 0)  # [begin, end) of layers, (0, 0): all of the group

    def __post_init__(self) -> None:
        if type(self.index) is not int or type(self.size_bytes) is not int:
            number = arguments.count("index", self.index, 0, limits.members_per_family_max - 1, "member")
            object.__setattr__(self, "index", number)
            object.__setattr__(self, "size_bytes", arguments.size("size_bytes", self.size_bytes))
        if not 0 <= self.index < limits.members_per_family_max:
            raise UsageError(
                f"member index {self.index} is outside 0 … {limits.members_per_family_max - 1}",
                code="member", index=self.index,
            )  # fmt: skip
        if not 0 < self.size_bytes <= limits.object_bytes_max:
            raise UsageError(
                f"object size {self.size_bytes} B is outside 1 … {limits.object_bytes_max}",
                code="size", size_bytes=self.size_bytes,
            )  # fmt: skip
        for name, pair in (("heads", self.heads), ("layers", self.layers)):
            if type(pair) is not tuple or len(pair) != 2:
                raise arguments.refusal(name, pair, "give a pair (begin, end); (0, 0): all", "range")
            begin, end = pair
            if type(begin) is not int or type(end) is not int or not 0 <= begin <= end <= 0xFFFF:
                raise arguments.refusal(
                    name, pair, "give integers 0 <= begin <= end <= 65535; (0, 0): all", "range"
                )


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Enough to read one family with no copy, valid only for this epoch and generation."""

    epoch: int
    entry: int
    generation: int
