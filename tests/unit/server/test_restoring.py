"""A domain taken over from descriptors in this very process: the core of the next daemon knows what that of the last
one knew, and goes on with it. Omitting any column of `Restore`, slot, entry or record of it breaks `validate()`.
"""

from __future__ import annotations

import os
from array import array
from random import Random
from typing import Any

import pytest

from kvd.config import Config, resolve
from kvd.core import events as ev
from kvd.server import adoption
from kvd.server.domain import ProcessIdentity
from kvd.types import Member

GIB = 1 << 30
BOOT = bytes(range(16))
SHAPES = (
    (Member(0, 100_000),),
    (Member(0, 3 << 19),),
    (Member(0, 5_000), Member(1, 70_000)),
    (Member(0, 64),),
)


class Clock:
    now = 10**12

    def now_ns(self) -> int:
        self.now += 1000
        return self.now


class Kept:
    """Keeps in this process. The descriptors are copies, as those of another process are."""

    kind = "keeper"

    def __init__(self) -> None:
        self.kept: dict[str, int] = {}
        self.stored: dict[str, int] = {}

    def store(self, name: str, fd: int) -> None:
        assert name not in self.stored
        self.stored[name] = os.dup(fd)

    def taken(self, name: str, fd: int) -> None:
        assert os.fstat(self.stored[name]).st_ino == os.fstat(fd).st_ino

    def watch(self, *_: object) -> None: ...

    def remove(self, name: str) -> None:
        os.close(self.stored.pop(name))

    def close(self) -> None: ...

    def hand_over(self) -> None:
        self.kept = {name: os.dup(fd) for name, fd in self.stored.items()}


def start(kept: Kept, epoch: int, size: str = "24MiB") -> adoption.Started:
    config = Config.model_validate(
        {
            "pool": {"size": size, "segment_size": "8MiB", "families_max": 256, "records_max": 400},
            "clients": {"max": 4},
        }
    )
    identity = ProcessIdentity(BOOT, os.getpid(), 1, epoch, 99 * epoch)
    started = adoption.start(
        kept, "default", config, resolve(config, GIB, "test"), identity, Clock(), [], hugetlb=False
    )
    started.domain.performers.update(
        {kind: lambda effect: None for kind in (ev.ReservedReply, ev.PublishedReply)}
    )
    return started


def ready(started: adoption.Started) -> None:
    for segment in started.domain.segments:
        for begin in range(0, segment.size_bytes, 4 << 20):
            started.domain.step(ev.SegmentReady(segment.number, begin, begin + (4 << 20)))
            started.domain.core.validate()


class Writer:
    """Reserves and publishes at random, some of it never to an end."""

    def __init__(self, started: adoption.Started, random: Random) -> None:
        self.domain, self.random = started.domain, random
        self.domain.performers[ev.ReservedReply] = self._reserved
        self.domain.performers[ev.ErrorReply] = lambda effect: None
        self.domain.step(ev.ClientAttached(0, 1, "test", True))
        self.granted: tuple[int, bytes] = (0, b"")

    def _reserved(self, reply: ev.ReservedReply) -> None:
        self.granted = reply.reservation, reply.statuses

    def turn(self) -> None:
        shape = self.random.choice(SHAPES)
        name, count = self.random.randrange(12), self.random.randrange(1, 7)
        begin = self.random.randrange(3)
        keys = b"".join(
            Random(f"{name}/{SHAPES.index(shape)}/{at}").randbytes(32) for at in range(begin, begin + count)
        )
        before = Random(f"{name}/{SHAPES.index(shape)}/{begin - 1}").randbytes(32) if begin else bytes(32)
        members = bytes(member.index for member in shape)
        entries, present = self.domain.table.probe(before + keys, members)
        self.granted = 0, b""
        self.domain.step(
            ev.Reserve(
                client=0, op=1, request=name, namespace=1 + name % 2, keys=keys,
                parent_entry=int.from_bytes(entries[:4], "little") if begin else ev.NONE, members=shape, split=0,
                family_members=len(shape), skip_pending=False, entries=memoryview(entries[4:]).cast("I"),
                present=present[len(shape) :], parent_key8=int.from_bytes(before[:8], "little") if begin else 0,
            )
        )  # fmt: skip
        reservation, statuses = self.granted
        if not reservation:
            return
        include = bytes(self.random.random() < 0.9 for _ in statuses)
        checksums = array("Q", [1]) * len(statuses)
        self.domain.step(
            ev.Publish(0, 2, reservation, 0, checksums, include if any(include) else b"\1" * len(statuses))
        )


def facts(started: adoption.Started) -> dict[str, Any]:
    """What must be the same on both sides."""
    core = started.domain.core
    rows, after = core.families(None, 0, 10_000)
    assert after is None
    statistics: Any = core.statistics()
    return {
        "families": [replace_times(row) for row in rows],
        "table": [started.domain.table.entry(row.entry) | {"parent": None} for row in rows],
        "namespaces": {n: row for n, row in statistics["namespaces"].items() if row["families"]},
        "pinned": statistics["pool"]["pinned_bytes"],
        "used": statistics["pool"]["used_bytes"],
    }


def replace_times(row: Any) -> Any:
    return row._replace(touched_ns=0)


@pytest.mark.parametrize("seed", range(12))
def test_the_next_core_knows_what_the_last_one_knew(seed: int) -> None:
    print(f"seed {seed}")
    kept, random = Kept(), Random(seed)
    first = start(kept, 1)
    for number in (b"one", b"two"):
        first.domain.namespaces.register(encoded(number), "")
    ready(first)
    writer = Writer(first, random)
    for _ in range(random.randrange(5, 60)):
        writer.turn()
    first.domain.core.validate()
    first.domain.performers[ev.AdminReply] = lambda effect: None
    ready_entries = array("I", first.domain.table.scan(0, 256))
    if ready_entries:
        first.domain.step(ev.Pin(9, array("I", [random.choice(ready_entries)]), ev.PinKind.HARD))
    before = facts(first)
    for epoch in range(2, 5):
        kept.hand_over()
        following = start(kept, epoch)
        assert following.outcome.adopted, following.outcome.dropped_reason
        following.domain.core.validate()
        assert facts(following) == before
        ready(following)
        second = Writer(following, random)
        for _ in range(20):
            second.turn()
            following.domain.core.validate()
        before = facts(following)
    for name in list(kept.stored):
        kept.remove(name)


def encoded(salt: bytes) -> bytes:
    from kvd.layout.manifest import Manifest

    fields: dict[str, Any] = {"model": "m", "revision": "r", "dtype": "bfloat16", "tenant": "", "fixed": "*"}
    return Manifest(salt=salt.decode(), **fields).encode()


def test_a_pool_of_other_segments_keeps_those_that_fit() -> None:
    kept = Kept()
    first = start(kept, 1)
    ready(first)
    writer = Writer(first, Random(5))
    first.domain.namespaces.register(encoded(b"one"), "")
    first.domain.namespaces.register(encoded(b"two"), "")
    for _ in range(40):
        writer.turn()
    before = {row.entry for row in first.domain.core.families(None, 0, 10_000)[0]}
    kept.hand_over()
    following = start(kept, 2, "16MiB")
    assert following.outcome.adopted
    following.domain.core.validate()
    after = {row.entry for row in following.domain.core.families(None, 0, 10_000)[0]}
    assert after < before
    assert len(after) + following.outcome.dropped_segment + following.outcome.dropped_damaged == len(before)
    assert set(kept.stored) == {"kvd-meta-2", "kvd-names-2", "kvd-pool-0", "kvd-pool-1"}
    ready(following)
    for name in list(kept.stored):
        kept.remove(name)
