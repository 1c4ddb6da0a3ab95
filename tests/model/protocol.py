"""The lease-and-evict protocol of shared memory as checkable programs, each with the omissions that must break it.

Owns: the programs of reader, matcher, writer and daemon around ONE entry, the claims they make, and the list of
omissions. `scenarios.py` puts them together. docs/design/lease-protocol.md explains each step: keep the two the same.

Words. `sg` is generation << 2 | state. `bits`, `rec[i]` and `pay[i]` carry the key that they were written for
(`tag(key, members)`), so that a reader can tell whose bytes it has, whatever the generation says. `haz_x` is client
x's hazard word: 0, or the generation that it holds. Words such as `reserve` and `publish` are messages on rings or
sockets: sent with release, awaited with acquire.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from .program import Await, Claim, Fence, If, IfGone, Let, Line, Load, Store, Thread

EMPTY, WRITING, READY, EVICTING = range(4)
STATES = ("EMPTY", "WRITING", "READY", "EVICTING")
OLD, NEW, OTHER = 1, 2, 3  # the key before the entry is reused, after, and after the next time


class Omission(StrEnum):
    """One step left out or moved. `test_lease_protocol.py` says in which scenario and models each is found."""

    NONE = "none"
    READER_FENCE = "the reader has no fence between its hazard and the second look at sg"
    DAEMON_FENCE = "the daemon has no fence between EVICTING and the scan"
    REVALIDATION = "the reader does not look at sg again"
    HAZARD_LATE = "the reader sets its hazard after the second look at sg"
    HAZARD_CLEARED_EARLY = "the reader clears its hazard with a relaxed store"
    KEY_CHECK = "the reader trusts the bucket and does not compare the key"
    READY_RELEASE = "READY is stored without release"
    SG_ACQUIRE = "the reader loads sg without acquire, both times"
    WRITING_FENCE = "there is no release fence between WRITING and the fields"
    MATCH_RECHECK = "a match does not look at sg again"
    MATCH_FENCE = "a match has no acquire fence before it looks at sg again"
    BIT_BEFORE_RECORD = "the present bit is set before the record is linked"
    BIT_RELEASE = "the present bit is stored without release"
    BIT_ACQUIRE = "the reader loads the present bits without acquire"
    NT_DRAIN = "the writer publishes without sfence after its non-temporal stores"
    FREE_BEFORE_SCAN = "the daemon frees and reuses without a scan"
    SCAN_BEFORE_MARK = "the daemon scans, then marks EVICTING"
    GENERATION_KEPT = "the generation does not grow on reuse"
    LIMBO_FORGOTTEN = "what was held at the first scan is never scanned again"
    ADOPT_BLINDLY = "the worker adopts without looking at sg"
    ADOPT_EVICTING = "the worker also adopts an entry that is EVICTING"
    ADOPT_FENCE = "the worker has no fence between its hazard and its look at sg"
    RELEASE_BEFORE_ACK = "the scheduler releases before the worker's answer"
    ADOPT_FROM_THE_DEAD = (
        "the worker takes EVICTING for held without asking whether the scheduler still lives"
    )
    ADOPT_ONE_SCAN = "the daemon frees after one clean scan although workers may adopt what is EVICTING"
    HIGH_WATER_LATE = "the reader raises its high-water mark after the fence"
    HIGH_WATER_EARLY = "the daemon reads the high-water mark before its fence"
    WRITER_GONE_EARLY = "a writer's memory is reused when its socket closes, not when it is dead"
    RING_NOT_DRAINED = "what a dead writer has published is given to another without draining its ring"
    REVOKED_CHECK = "a reader of an earlier daemon takes leases without asking whether it is revoked"
    RESTART_FENCE = "the next daemon has no fence between revoking and its scan"
    GHOST_NOT_SCANNED = "the next daemon does not look at the hazards of earlier clients"
    EVICTING_IS_FREE = "the next daemon takes what it finds EVICTING for free"
    DROPPED_ALIVE = "a client's hazards are dropped when its socket closes, not when it is dead"


class Limbo(StrEnum):
    """What the daemon does with an entry that it wanted to evict and found held."""

    REVERT = "revert"  # back to READY in the same generation; tried again later
    UNLINKED = "unlinked"  # as revert, but the bucket is cleared first: nobody new finds it
    STAY = "stay"  # stays EVICTING and is scanned again


def sg(generation: int, state: int) -> int:
    return generation << 2 | state


def tag(key: int, members: int) -> int:
    """What `bits` (members: the bit map), `rec[i]` and `pay[i]` (members: i) hold when written for `key`."""
    return key << 4 | members


def show(word: str, value: int) -> str:
    if word == "sg":
        return f"{value >> 2}|{STATES[value & 3]}"
    if word == "bits" or "[" in word:
        return f"{value & 15:#x} of key {value >> 4}" if value >> 4 else str(value)
    return str(value)


def not_ready(s: int) -> bool:
    return s & 3 != READY


NOBODY = Claim("the entry is freed while nobody holds it", lambda held: not any(held.values()))

# ---------------------------------------------------------------------------------------------------------- clients


def look_up(key: int, om: Omission) -> list[Line]:
    """Bucket, sg, key. Goes to 'end' on a miss."""
    order = "relaxed" if om is Omission.SG_ACQUIRE else "acquire"
    compare: list[Line] = [Load("k", "key"), If(lambda k: k != key, "end")]
    return [
        Load("b", "bucket", "acquire"),
        If(lambda b: b == 0, "end"),
        Load("s", "sg", order),
        If(not_ready, "end"),
        *([] if om is Omission.KEY_CHECK else compare),
    ]


def protect(haz: str, om: Omission) -> list[Line]:
    """Hazard, fence, second look. Goes to 'back off' if sg changed; afterwards the reader holds the entry."""
    order = "relaxed" if om is Omission.SG_ACQUIRE else "acquire"
    hazard: list[Line] = [Store(haz, lambda s: s >> 2)]
    high: list[Line] = [Store(f"high_{haz[-1]}", 1)]
    fence: list[Line] = [] if om is Omission.READER_FENCE else [Fence("seq_cst")]
    again: list[Line] = [Load("s2", "sg", order), If(lambda s, s2: s != s2, "back off")]
    match om:
        case Omission.REVALIDATION:
            again = []
        case Omission.HAZARD_LATE:
            return [*high, *again, *hazard, *fence, Let("held", 1)]
        case Omission.HIGH_WATER_LATE:
            return [*hazard, *fence, *high, *again, Let("held", 1)]
    return [*high, *hazard, *fence, *again, Let("held", 1)]


def let_go(haz: str, om: Omission) -> list[Line]:
    early = om is Omission.HAZARD_CLEARED_EARLY
    return [Let("held", 0), "back off", Store(haz, 0, "relaxed" if early else "release"), "end"]


def bits_of(key: int, om: Omission) -> Load:
    return Load(
        "bits",
        "bits",
        "relaxed" if om is Omission.BIT_ACQUIRE else "acquire",
        must=lambda bits: bits >> 4 == key,
        claim=f"protected by its hazard it must see the present bits of key {key}",
    )


def payload_of(key: int, place: int) -> Load:
    return Load(
        "p",
        f"pay[{place}]",
        must=lambda p: p == tag(key, place),
        claim=f"protected by its hazard it must read the complete payload of key {key}",
    )


def reader(name: str, key: int, om: Omission) -> Thread:
    """Takes a lease on `key`, reads the record and payload of its first member, lets go."""
    haz = f"haz_{name}"
    record = Load(
        "r",
        "rec[1]",
        must=lambda r: r == tag(key, 1),
        claim=f"protected by its hazard it must read a record of key {key}",
    )
    body: list[Line] = [bits_of(key, om), record, payload_of(key, 1)]
    return Thread(name, [*look_up(key, om), *protect(haz, om), *body, *let_go(haz, om)])


def walker(name: str, key: int, om: Omission) -> Thread:
    """Takes a lease on `key`, finds the records of all members present by walking the list, reads their payload."""
    haz = f"haz_{name}"
    found = Load(
        "h",
        "next",
        index="h",
        must=lambda h: h != 0,
        claim="a present bit without a linked record",
    )
    record = Load(
        "r",
        "rec",
        index="h",
        must=lambda r: r >> 4 == key,
        claim=f"a linked record must be one of key {key} and complete",
    )
    body: list[Line] = [
        bits_of(key, om),
        If(lambda bits: not bits & 2, "first only"),
        Load("h", "head"),
        "walk",
        record,
        If(lambda r: r & 15 == 2, "found"),
        found,
        If(lambda h: h != 0, "walk"),
        "found",
        payload_of(key, 2),
        "first only",
        payload_of(key, 1),
    ]
    return Thread(name, [*look_up(key, om), *protect(haz, om), *body, *let_go(haz, om)])


def matcher(name: str, key: int, om: Omission) -> Thread:
    """Asks whether `key` is present, without a lease. What it reports must be true of that key."""
    kept = Omission.NONE if om is Omission.KEY_CHECK else om
    fence: list[Line] = [] if om is Omission.MATCH_FENCE else [Fence("acquire")]
    again: list[Line] = [Load("s2", "sg"), If(lambda s, s2: s != s2, "end")]
    if om is Omission.MATCH_RECHECK:
        again = []
    verdict = Load(
        "done",
        f"verdict_{name}",
        must=lambda k, bits: k == key and bits >> 4 == key,
        claim=f"a match must report the present bits of key {key}",
    )
    return Thread(
        name, [*look_up(key, kept), Load("bits", "bits", "acquire"), *fence, *again, verdict, "end"]
    )


def writer(name: str, key: int, place: int, om: Omission) -> Thread:
    """Waits for a reservation, fills the payload with non-temporal stores, asks the daemon to publish."""
    drain: list[Line] = [] if om is Omission.NT_DRAIN else [Fence("sfence")]
    return Thread(
        name,
        [
            Await("reserve", lambda v: v == 1),
            Store(f"pay[{place}]", tag(key, place), "nt"),
            *drain,
            Store("publish", 1, "release"),
        ],
    )


# ----------------------------------------------------------------------------------------------------------- daemon


def scan(clients: list[str], mortal: str | None, om: Omission, gen: int, turn: int) -> list[Line]:
    """Looks for `gen` in the hazards of all clients below their marks: goes to 'held by X' or falls through."""
    lines: list[Line] = []
    for c in clients:
        skip = f"free of {c}, scan {turn} of generation {gen}"
        if c == mortal and om is Omission.DROPPED_ALIVE:
            lines += [Load("eof", f"eof_{c}", "acquire"), If(lambda eof: eof == 1, skip)]
        elif c == mortal:
            lines += [IfGone(c, skip)]
        if om is not Omission.HIGH_WATER_EARLY:
            lines += [Load(f"high_{c}", f"high_{c}", "acquire")]
        lines += [
            If(UNUSED[c], skip),
            Load("h", f"haz_{c}", "acquire"),
            If(lambda h: h == gen, f"{gen} held by {c}"),
            skip,
        ]
    return lines


UNUSED: dict[str, Callable[..., bool]] = {"a": lambda high_a: high_a == 0, "b": lambda high_b: high_b == 0}


def evict(
    clients: list[str], limbo: Limbo, om: Omission, mortal: str | None = None, gen: int = 1, scans: int = 1
) -> list[Line]:
    """Marks, fences, scans; waits for holders and tries again; falls through when the entry is free."""
    mark: list[Line] = [Store("sg", sg(gen, EVICTING))]
    fence: list[Line] = [] if om is Omission.DAEMON_FENCE else [Fence("seq_cst")]
    looks = [line for turn in range(scans) for line in scan(clients, mortal, om, gen, turn)]
    if om is Omission.FREE_BEFORE_SCAN:
        looks = []
    if om is Omission.HIGH_WATER_EARLY:
        mark = [*mark, *(Load(f"high_{c}", f"high_{c}", "acquire") for c in clients)]
    again, rescan, free = f"{gen} again", f"{gen} rescan", f"{gen} free"
    lines: list[Line] = [Store("bucket", 0)] if limbo is Limbo.UNLINKED else []
    if om is Omission.SCAN_BEFORE_MARK:
        lines += [again, *looks, *mark, *fence]
    else:
        lines += [again, *mark, *fence, rescan, *looks]
    lines += [goto(free)]
    for c in clients if looks else []:
        lines += [f"{gen} held by {c}"]
        if om is Omission.LIMBO_FORGOTTEN:
            lines += [goto("end")]
        if limbo is not Limbo.STAY:
            lines += [Store("sg", sg(gen, READY), "release")]
        back = again if limbo is not Limbo.STAY or om is Omission.SCAN_BEFORE_MARK else rescan
        released = Await(
            f"haz_{c}", lambda v: v != gen, c if c == mortal else None, back if c == mortal else None
        )
        lines += [released, goto(back)]
    return [*lines, free, NOBODY, Store("bucket", 0), Store("sg", sg(gen, EMPTY))]


def goto(label: str) -> If:
    return If(lambda: True, label)


def publish(gen: int, key: int, om: Omission, wide: bool = False) -> list[Line]:
    """Makes the entry a family of one member; its payload is complete. `wide`: the key has a second word."""
    return [
        Store("rec[1]", tag(key, 1)),
        Store("sg", sg(gen, WRITING)),
        *([] if om is Omission.WRITING_FENCE else [Fence("release")]),
        Store("key", key),
        *([Store("key_high", key)] if wide else []),
        Store("bits", tag(key, 1)),
        Store("sg", sg(gen, READY), "relaxed" if om is Omission.READY_RELEASE else "release"),
        Store("bucket", 1, "release"),
    ]


def reuse(
    om: Omission, by_writer: bool = False, gen: int = 2, key: int = NEW, wide: bool = False
) -> list[Line]:
    """Gives the freed entry and its memory to another key; the writer is a thread of its own, or the daemon."""
    payload: list[Line] = [Store("pay[1]", tag(key, 1))]
    if by_writer:
        payload = [Store("reserve", 1, "release"), Await("publish", lambda v: v == 1)]
    return [*payload, *publish(1 if om is Omission.GENERATION_KEPT else gen, key, om, wide), "end"]


def grow(om: Omission) -> list[Line]:
    """Reserves member 2, waits for its payload, links its record, sets its bit."""
    order = "relaxed" if om is Omission.BIT_RELEASE else "release"
    link: list[Line] = [
        Store("rec[2]", tag(OLD, 2)),
        Store("next[2]", 1),
        Store("head", 2, order),
    ]
    bit: list[Line] = [Store("bits", tag(OLD, 3), order)]
    steps = [*bit, *link] if om is Omission.BIT_BEFORE_RECORD else [*link, *bit]
    return [Store("reserve", 1, "release"), Await("publish", lambda v: v == 1), *steps]
