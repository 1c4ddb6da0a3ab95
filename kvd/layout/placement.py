"""Placement: on which host an object is kept, as pure functions of its identity.

Pure. Two policies behind one interface. Both need nothing but the list of hosts: no table, no master.

*Uniform* hashes each object by itself: even load, but the chunks of one window lie anywhere. When a host leaves, only
what it held moves (rendezvous hashing).

*Attention-aware* places by (head group, position window). Hosts are dealt out in columns, one for each head group,
so that a head group is kept where its rank runs; within a column all chunks of a position window go to one host,
chosen by the identity of the window's first chunk. A window of W tokens that is read at any position spans at most two
position windows if W is at most `window_tokens`, so one layer's read touches at most two hosts a head group. Columns
follow the places in the list: a host that leaves is replaced where it stood, and only what it held moves. Taken out of
the middle, it shifts the columns behind it, and nearly everything moves.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvd.errors import UsageError
from kvd.layout.chain import check_chunk_tokens

HOSTS_MAX: Final = 4096


class Placement(Protocol):
    """Host (by number) of the part of a chunk that belongs to one head group."""

    def host(self, identities: Sequence[bytes], chunk: int, head_group: int) -> int: ...


def _weight(key: bytes, host: str) -> bytes:
    return hashlib.sha256(b"kvd-place-v1\0" + struct.pack("<I", len(key)) + key + host.encode()).digest()


def rendezvous(key: bytes, hosts: Sequence[str]) -> int:
    """The host that weighs most for `key`, by number. Adding or removing another host does not move the key."""
    return max(range(len(hosts)), key=lambda number: _weight(key, hosts[number]))


def _check(hosts: Sequence[str], head_groups: int) -> tuple[str, ...]:
    if not 0 < len(hosts) <= HOSTS_MAX or len(set(hosts)) != len(hosts):
        raise UsageError(f"{len(hosts)} hosts; allowed: 1 … {HOSTS_MAX} different names", code="placement")
    if isinstance(head_groups, bool) or not isinstance(head_groups, int) or head_groups < 1:
        raise UsageError(f"head_groups is {head_groups!r}; allowed: 1 or more", code="placement")
    return tuple(hosts)


class Uniform:
    """Every object by itself."""

    def __init__(self, hosts: Sequence[str], *, head_groups: int = 1) -> None:
        self.hosts = _check(hosts, head_groups)
        self.head_groups = head_groups

    def host(self, identities: Sequence[bytes], chunk: int, head_group: int) -> int:
        """By identity and head group."""
        return rendezvous(identities[chunk] + struct.pack("<H", head_group), self.hosts)


class AttentionAware:
    """By (head group, position window)."""

    def __init__(
        self, hosts: Sequence[str], *, head_groups: int, window_tokens: int, chunk_tokens: int
    ) -> None:
        self.hosts = _check(hosts, head_groups)
        self.head_groups = head_groups
        check_chunk_tokens(chunk_tokens)
        if window_tokens < chunk_tokens or window_tokens % chunk_tokens:
            raise UsageError(
                f"window_tokens {window_tokens} is not a multiple of the chunk of {chunk_tokens} tokens",
                code="placement", window_tokens=window_tokens,
            )  # fmt: skip
        self.window_chunks = window_tokens // chunk_tokens

    def column(self, head_group: int) -> list[int]:
        """Hosts that keep one head group: every head_groups-th, or one shared host where there are fewer."""
        if not 0 <= head_group < self.head_groups:
            raise UsageError(
                f"head group {head_group} is outside 0 … {self.head_groups - 1}", code="placement"
            )
        if len(self.hosts) < self.head_groups:
            return [head_group % len(self.hosts)]
        return list(range(head_group, len(self.hosts), self.head_groups))

    def host(self, identities: Sequence[bytes], chunk: int, head_group: int) -> int:
        """By the first chunk of the position window, within the column of the head group."""
        column = self.column(head_group)
        anchor = identities[chunk - chunk % self.window_chunks]
        return column[rendezvous(anchor, [self.hosts[number] for number in column])]


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a stretch of a prefix: chunks [begin, end) of `identities`, each head group by its rank's host."""

    identities: Sequence[bytes]
    begin: int
    end: int
    reader_hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a placement makes of a list of reads. Bytes are counted in parts (chunk x head group) of equal size."""

    parts: int
    crossing: int
    hosts_touched_max: int
    hosts_touched_mean: float

    @property
    def crossing_share(self) -> float:
        """Share of the bytes that come from another host than the reader's."""
        return self.crossing / self.parts if self.parts else 0.0


def traffic(placement: Placement, reads: Iterable[Read]) -> Traffic:
    """Count the parts that cross hosts, and the hosts that one head group's read touches."""
    parts = crossing = groups = touched_sum = touched_max = 0
    for read in reads:
        for head_group, reader in enumerate(read.reader_hosts):
            owners = [
                placement.host(read.identities, chunk, head_group) for chunk in range(read.begin, read.end)
            ]
            parts += len(owners)
            crossing += sum(owner != reader for owner in owners)
            touched = len(set(owners))
            touched_max = max(touched_max, touched)
            touched_sum += touched
            groups += 1
    return Traffic(parts, crossing, touched_max, touched_sum / groups if groups else 0.0)
