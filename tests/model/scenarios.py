"""The situations in which the checker runs the protocol: who is there, what may die, what must be true at the end.

Owns the threads and words of each scenario, and `SCENARIOS`, the table of all. Each takes the omission to try and what
the daemon does with an entry that it finds held.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from .program import Await, Fence, If, IfGone, Let, Line, Load, Scenario, Store, Thread
from .protocol import (
    EMPTY,
    EVICTING,
    NEW,
    NOBODY,
    OLD,
    OTHER,
    READY,
    WRITING,
    Limbo,
    Omission,
    bits_of,
    evict,
    goto,
    grow,
    let_go,
    look_up,
    matcher,
    payload_of,
    publish,
    reader,
    reuse,
    sg,
    show,
    tag,
    walker,
    writer,
)

ENTRY = {
    "bucket": 1,
    "sg": sg(1, READY),
    "key": OLD,
    "bits": tag(OLD, 1),
    "rec[1]": tag(OLD, 1),
    "pay[1]": tag(OLD, 1),
}
MESSAGES = {"reserve": 0, "publish": 0}


def hazards(*clients: str, held: str = "") -> dict[str, int]:
    """The hazard word and high-water mark of each client; `held` has a lease on generation 1 from the start."""
    return {f"{w}_{c}": int(c == held) for c in clients for w in ("haz", "high")}


def reused(words: Mapping[str, int]) -> str | None:
    """Nothing leaked: no hazard is left, and what was to be evicted has been, and was published anew."""
    left = [w for w, v in words.items() if w.startswith("haz_") and v]
    if left:
        return f"hazards left set at the end: {', '.join(left)}"
    if words["sg"] & 3 != READY or words["key"] != NEW or words["bucket"] != 1:
        return f"the entry leaked: it ends as {show('sg', words['sg'])} with key {words['key']}"
    return None


def two_readers(
    om: Omission, limbo: Limbo, keys: tuple[int, int] = (OLD, OLD), by_writer: bool = True
) -> Scenario:
    """Two readers take leases while the daemon evicts the entry and gives it to a writer for another key."""
    threads = [reader("a", keys[0], om), reader("b", keys[1], om)]
    if by_writer:
        threads.append(writer("writer", NEW, 1, om))
    daemon = [*evict(["b", "a"], limbo, om), *reuse(om, by_writer)]
    words = {**ENTRY, **hazards("a", "b"), **(MESSAGES if by_writer else {})}
    return Scenario("two readers", words, [*threads, Thread("daemon", daemon)], reused, show)


def match_and_evict(om: Omission, limbo: Limbo, key: int) -> Scenario:
    """A match without lease beside a reader, while the daemon evicts and reuses."""
    words = {**ENTRY, **hazards("a"), "verdict_m": 0}
    daemon = [*evict(["a"], limbo, om), *reuse(om)]
    threads = [reader("a", OLD, om), matcher("m", key, om), Thread("daemon", daemon)]
    return Scenario("match without lease", words, threads, reused, show)


def adoption(
    om: Omission,
    limbo: Limbo,
    order: tuple[str, str] = ("b", "a"),
    mortal: bool = False,
    lossless: bool = False,
) -> Scenario:
    """A scheduler `a` that holds a lease exports it, a worker `b` adopts it, while the daemon evicts and reuses.

    `order` is the order in which the daemon scans their hazards. With `mortal` the scheduler may die at any step.
    `lossless` is the variant that adopts from limbo too, at the price of a second scan and of a confirmation.
    """
    any_state = lossless or om is Omission.ADOPT_EVICTING
    confirm = lossless and om is not Omission.ADOPT_FROM_THE_DEAD
    release: list[Line] = [Let("held", 0), Store("haz_a", 0, "release")]
    wait: list[Line] = [
        Await("ack", lambda v: v == 1),
        *([Store("confirm", 1, "release")] if confirm else []),
    ]
    steps = [*release, *wait] if om is Omission.RELEASE_BEFORE_ACK else [*wait, *release]
    scheduler = Thread("a", [Store("export", 1, "release"), *steps], mortal=mortal, held=1)

    same_generation = Load(
        "s",
        "sg",
        "acquire",
        must=None if mortal else lambda s: s >> 2 == 1,
        claim="while the scheduler lives and holds, the worker must find the generation unchanged",
    )
    accepted = (sg(1, READY), sg(1, EVICTING)) if any_state else (sg(1, READY),)
    look: list[Line] = [same_generation]
    if limbo is not Limbo.STAY and not any_state:  # EVICTING passes by itself: the daemon will see a's hazard
        look += [
            If(lambda s: s != sg(1, EVICTING), "seen"),
            Await("sg", lambda v: v != sg(1, EVICTING)),
            goto("look"),
            "seen",
        ]
    look.append(If(lambda s: s not in accepted, "fail"))
    ack = Store("ack", 1, "release")
    confirmed: list[Line] = [ack, Await("confirm", lambda v: v == 1, "a", "fail")] if confirm else []
    worker: list[Line] = [
        Await("export", lambda v: v == 1, or_gone="a", goto="end"),
        Store("high_b", 1),
        Store("haz_b", 1),
        *([] if om is Omission.ADOPT_FENCE else [Fence("seq_cst")]),
        "look",
        *([] if om is Omission.ADOPT_BLINDLY else look),
        *confirmed,
        Let("held", 1),
        ack,
        bits_of(OLD, om),
        payload_of(OLD, 1),
        Let("held", 0),
        "fail",
        Store("haz_b", 0, "release"),
        ack,
        "end",
    ]
    scans = 2 if lossless and om is not Omission.ADOPT_ONE_SCAN else 1
    daemon = [*evict(list(order), limbo, om, "a" if mortal else None, scans=scans), *reuse(om)]
    words = {**ENTRY, **hazards("a", "b", held="a"), "export": 0, "ack": 0, "confirm": 0, "eof_a": 0}

    def final(words: Mapping[str, int]) -> str | None:
        return reused({**words, "haz_a": 0} if mortal else words)

    return Scenario(
        "adoption", words, [scheduler, Thread("b", worker), Thread("daemon", daemon)], final, show
    )


def dying_reader(om: Omission, limbo: Limbo) -> Scenario:
    """A reader holds a lease, closes its socket, still reads, and may die at any step; another reader comes by."""
    a = Thread(
        "a",
        [
            Store("eof_a", 1, "release"),
            bits_of(OLD, om),
            payload_of(OLD, 1),
            Let("held", 0),
            Store("haz_a", 0, "release"),
        ],
        mortal=True,
        held=1,
    )
    daemon = [*evict(["b", "a"], limbo, om, "a"), *reuse(om)]
    words = {**ENTRY, **hazards("a", "b", held="a"), "eof_a": 0}

    def final(words: Mapping[str, int]) -> str | None:
        return reused(
            {**words, "haz_a": 0}
        )  # a dead client's hazards stay set in its own region: it is unmapped

    return Scenario("dying reader", words, [a, reader("b", OLD, om), Thread("daemon", daemon)], final, show)


def reader_dies(om: Omission, limbo: Limbo) -> Scenario:
    """A reader may die at any step of taking, using and releasing a lease; its hazard must pin nothing afterwards."""
    a = Thread("a", reader("a", OLD, om).lines, mortal=True)
    daemon = [*evict(["b", "a"], limbo, om, "a"), *reuse(om)]
    words = {**ENTRY, **hazards("a", "b"), "eof_a": 0}

    def final(words: Mapping[str, int]) -> str | None:
        return reused({**words, "haz_a": 0})

    return Scenario("reader dies", words, [a, reader("b", OLD, om), Thread("daemon", daemon)], final, show)


def growing(om: Omission, limbo: Limbo) -> Scenario:
    """A family gets a second member while a reader walks its records; then it is evicted and reused."""
    words = {
        **ENTRY,
        "rec[2]": 0,
        "next[1]": 0,
        "next[2]": 0,
        "head": 1,
        "pay[2]": 0,
        **hazards("a"),
        **MESSAGES,
    }
    daemon = [*grow(om), *evict(["a"], limbo, om), *reuse(om)]
    threads = [walker("a", OLD, om), writer("writer", OLD, 2, om), Thread("daemon", daemon)]
    return Scenario("growing family", words, threads, reused, show)


def two_rounds(om: Omission, limbo: Limbo) -> Scenario:
    """One hazard word serves two leases in a row while the entry goes through three generations and keys."""
    threads = [Thread("a", [*retarget(reader("a", OLD, om).lines), *reader("a", NEW, om).lines])]
    daemon = [
        *evict(["a"], limbo, om),
        *reuse(om)[:-1],
        *evict(["a"], limbo, om, gen=2),
        *reuse(om, gen=3, key=OTHER),
    ]
    words = {**ENTRY, **hazards("a")}

    def final(words: Mapping[str, int]) -> str | None:
        return "the last key is missing" if words["key"] != OTHER else reused({**words, "key": NEW})

    return Scenario("two rounds", words, [*threads, Thread("daemon", daemon)], final, show)


def retarget(lines: Sequence[Line]) -> list[Line]:
    """The same program with labels of its own, so that another can follow it."""
    out: list[Line] = []
    for line in lines:
        match line:
            case str():
                out.append(f"first {line}")
            case If(condition=condition, goto=label):
                out.append(If(condition, f"first {label}"))
            case _:
                out.append(line)
    return out


def torn_key(om: Omission, limbo: Limbo) -> Scenario:
    """A key has several words. A match must not make a third key out of the old and the new one."""
    again: list[Line] = [Load("s2", "sg"), If(lambda s, s2: s != s2, "end")]
    lines: list[Line] = [
        *look_up(NEW, Omission.NONE),
        Load("k2", "key_high"),
        If(lambda k2: k2 != OLD, "end"),
        *([] if om is Omission.MATCH_FENCE else [Fence("acquire")]),
        *([] if om is Omission.MATCH_RECHECK else again),
        Load(
            "done",
            "verdict_m",
            must=lambda: False,
            claim="a match must not report a key that was never there",
        ),
        "end",
    ]
    words = {**ENTRY, "key_high": OLD, **hazards("a"), "verdict_m": 0}
    daemon = [*evict(["a"], limbo, om), *reuse(om, wide=True)]
    threads = [reader("a", OLD, om), Thread("m", lines), Thread("daemon", daemon)]
    return Scenario("torn key", words, threads, reused, show)


def dying_writer(om: Omission, limbo: Limbo) -> Scenario:
    """A writer may die at any step of filling and publishing; its memory then goes to another key."""
    fill = writer("w", OLD, 1, om).lines
    mortal = Thread("w", [fill[0], Store("eof_w", 1, "release"), *fill[1:]], mortal=True)
    poll: list[Line] = [Load("p", "publish", "acquire"), If(lambda p: p == 1, "published")]
    wait: list[Line] = [
        "poll",
        *poll,
        IfGone("w", "gone"),
        Await("publish", lambda v: v == 1, "w", "poll"),
        goto("poll"),
        "gone",
        *([] if om is Omission.RING_NOT_DRAINED else poll),
    ]
    if om is Omission.WRITER_GONE_EARLY:
        wait = [Await("eof_w", lambda v: v == 1, "w", "gone"), "gone", *poll]
    daemon: list[Line] = [
        Store("reserve", 1, "release"),
        *wait,
        *reuse(om)[:-1],
        goto("end"),
        "published",
        *publish(2, OLD, om),
        "end",
    ]
    empty = {**dict.fromkeys(ENTRY, 0), "sg": sg(1, EMPTY)}
    words = {**empty, **hazards("a", "b"), **MESSAGES, "eof_w": 0}

    def final(words: Mapping[str, int]) -> str | None:
        if words["publish"] and words["key"] != OLD and om is not Omission.WRITER_GONE_EARLY:
            return "a family was published and then given away"
        return reused({**words, "key": NEW})

    threads = [reader("a", OLD, om), reader("b", NEW, om), mortal, Thread("daemon", daemon)]
    return Scenario("dying writer", words, threads, final, show)


def elsewhere(lines: Sequence[Line]) -> list[Line]:
    """The same program on the words of another META."""
    own = {"bucket", "sg", "key", "bits", "rec[1]"}
    return [
        replace(line, word=f"new {line.word}")
        if isinstance(line, Load | Store | Await) and line.word in own
        else line
        for line in lines
    ]


def ghost(om: Omission) -> list[Line]:
    """A reader of the old META: as any other, and after its fence it asks whether it is revoked."""
    fence: list[Line] = [] if om is Omission.READER_FENCE else [Fence("seq_cst")]
    revoked: list[Line] = [Load("r", "revoked_a", "acquire"), If(lambda r: r == 1, "back off")]
    return [
        *look_up(OLD, om),
        Store("high_a", 1),
        Store("haz_a", lambda s: s >> 2),
        *fence,
        Load("s2", "sg", "acquire"),
        If(lambda s, s2: s != s2, "back off"),
        *([] if om is Omission.REVOKED_CHECK else revoked),
        Let("held", 1),
        bits_of(OLD, om),
        payload_of(OLD, 1),
        *let_go("haz_a", om),
    ]


def restart(om: Omission, limbo: Limbo, *, client_dies: bool = False) -> Scenario:
    """The daemon may die at any step of evicting and reusing. The next one takes over the memory: it revokes the old
    client, builds an index of its own from the old one, evicts what it adopted and gives the memory to another key.
    """
    mortal = "a" if client_dies else None
    old = [*evict(["a"], limbo, Omission.NONE, mortal), *reuse(Omission.NONE), Store("closed", 1, "release")]
    fences = Omission.DAEMON_FENCE if om is Omission.RESTART_FENCE else Omission.NONE
    scanned = [] if om is Omission.GHOST_NOT_SCANNED else ["a"]
    free = (EMPTY, WRITING, EVICTING) if om is Omission.EVICTING_IS_FREE else (EMPTY, WRITING)
    take: list[Line] = []
    for gen in (1, 2):
        take += [f"adopt {gen}", Store("new sg", sg(gen, READY), "release")]
        take += [*elsewhere(evict(scanned, limbo, fences, mortal, gen)), goto("reuse")]
    following: list[Line] = [
        Await("closed", lambda v: v == 1, "daemon", "gone"),
        "gone",
        Store("revoked_a", 1, "release"),
        *([] if om is Omission.RESTART_FENCE else [Fence("seq_cst")]),
        Load("o", "sg", "acquire"),
        If(lambda o: o & 3 in free, "free"),
        If(lambda o: o >> 2 == 2, "adopt 2"),
        *take,
        "free",
        NOBODY,
        "reuse",
        *elsewhere(reuse(Omission.NONE, gen=3, key=OTHER)),
    ]
    words = {**ENTRY, **hazards("a"), "revoked_a": 0, "closed": 0}
    words |= {f"new {word}": 0 for word in ("bucket", "sg", "key", "bits", "rec[1]")}
    a = Thread("a", ghost(om), mortal=client_dies)
    threads = [a, Thread("daemon", old, mortal=True), Thread("next", following)]

    def final(words: Mapping[str, int]) -> str | None:
        if words["haz_a"] and not client_dies:
            return "a hazard is left set at the end"
        if words["new sg"] != sg(3, READY) or words["pay[1]"] != tag(OTHER, 1):
            return f"the entry leaked: it ends as {show('sg', words['new sg'])}"
        return None

    return Scenario("restart", words, threads, final, show)


Build = Callable[[Omission, Limbo], Scenario]
SCENARIOS: dict[str, Build] = {
    "two readers of the old key": lambda om, limbo: two_readers(om, limbo, by_writer=False),
    "readers of the old and the new key, writer": lambda om, limbo: two_readers(om, limbo, (OLD, NEW)),
    "match of the old key": lambda om, limbo: match_and_evict(om, limbo, OLD),
    "match of the new key": lambda om, limbo: match_and_evict(om, limbo, NEW),
    "adoption, worker scanned first": lambda om, limbo: adoption(om, limbo),
    "adoption, scheduler scanned first": lambda om, limbo: adoption(om, limbo, ("a", "b")),
    "adoption, scheduler may die": lambda om, limbo: adoption(om, limbo, mortal=True),
    "adoption from limbo, worker scanned first": lambda om, limbo: adoption(om, limbo, lossless=True),
    "adoption from limbo, scheduler scanned first": lambda om, limbo: adoption(
        om, limbo, ("a", "b"), lossless=True
    ),
    "adoption from limbo, scheduler may die": lambda om, limbo: adoption(
        om, limbo, mortal=True, lossless=True
    ),
    "reader dies at any step of its lease": reader_dies,
    "dying reader": dying_reader,
    "dying writer": dying_writer,
    "two rounds": two_rounds,
    "match of a key of two words": torn_key,
    "growing family": growing,
    "restart": restart,
    "restart, the old client may die": lambda om, limbo: restart(om, limbo, client_dies=True),
}
