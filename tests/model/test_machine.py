"""Litmus tests: the memory models allow and forbid what they should, so that a pass of the protocol means something.

Each row is a well-known two-thread pattern with the models that must show the odd outcome; all others must not.
"""

from __future__ import annotations

import pytest

from .machine import Model, explore
from .program import Await, Claim, Fence, If, Instr, Let, Load, Scenario, Store, Thread

TSO, PSO, WEAK = Model.TSO, Model.PSO, Model.WEAK


def store_buffering(fence: bool) -> Scenario:
    """Both threads store, then load the other's word: can both loads miss?"""

    def side(name: str, mine: str, other: str, out: str) -> Thread:
        middle: list[Instr] = [Fence("seq_cst")] if fence else []
        return Thread(name, [Store(mine, 1), *middle, Load("r", other), Store(out, lambda r: r + 1)])

    def final(words: object) -> str | None:
        assert isinstance(words, dict)
        return "both missed" if words["ra"] == words["rb"] == 1 else None

    words = {"x": 0, "y": 0, "ra": 0, "rb": 0}
    return Scenario("store buffering", words, [side("a", "x", "y", "ra"), side("b", "y", "x", "rb")], final)


def message_passing(
    flag: str = "relaxed", data: str = "relaxed", load: str = "relaxed", fence: str = ""
) -> Scenario:
    """Data, then a flag; the reader takes the flag, then the data: can it see the flag and old data?"""
    middle: list[Instr] = [Fence(fence)] if fence else []
    writer = Thread("writer", [Store("data", 1, data), *middle, Store("flag", 1, flag)])
    seen = Load("d", "data", must=lambda f, d: not f or d, claim="old data behind a new flag")
    reader = Thread("reader", [Load("f", "flag", load), seen])
    return Scenario("message passing", {"data": 0, "flag": 0}, [writer, reader])


def load_buffering(order: str) -> Scenario:
    """Both threads load, then store: can each see the other's store?"""

    def side(name: str, mine: str, other: str, out: str) -> Thread:
        return Thread(name, [Load("r", other), Store(mine, 1, order), Store(out, lambda r: r)])

    def final(words: object) -> str | None:
        assert isinstance(words, dict)
        return "both saw the future" if words["ra"] == words["rb"] == 1 else None

    words = {"x": 0, "y": 0, "ra": 0, "rb": 0}
    return Scenario("load buffering", words, [side("a", "x", "y", "ra"), side("b", "y", "x", "rb")], final)


def coherence() -> Scenario:
    """Two loads of one word never go back in time, in no model."""
    reader = [Load("a", "x"), Load("b", "x", must=lambda a, b: b >= a, claim="went back in time")]
    return Scenario("coherence", {"x": 0}, [Thread("w", [Store("x", 1), Store("x", 2)]), Thread("r", reader)])


LITMUS = [
    ("sb", store_buffering(False), {TSO, PSO, WEAK}),
    ("sb+seq_cst", store_buffering(True), set()),
    ("mp", message_passing(), {PSO, WEAK}),
    ("mp+release", message_passing(flag="release"), {WEAK}),
    ("mp+acquire", message_passing(load="acquire"), {PSO, WEAK}),
    ("mp+release+acquire", message_passing(flag="release", load="acquire"), set()),
    ("mp+release fence+acquire", message_passing(fence="release", load="acquire"), set()),
    ("mp+nt+release+acquire", message_passing("release", "nt", "acquire"), {TSO, PSO, WEAK}),
    ("mp+nt+release fence+acquire", message_passing("release", "nt", "acquire", "release"), {TSO, PSO, WEAK}),
    ("mp+nt+sfence+acquire", message_passing("release", "nt", "acquire", "sfence"), set()),
    ("lb", load_buffering("relaxed"), {WEAK}),
    ("lb+release", load_buffering("release"), set()),
    ("coherence", coherence(), set()),
]


@pytest.mark.parametrize("model", list(Model))
@pytest.mark.parametrize(
    ("scenario", "shown_by"), [row[1:] for row in LITMUS], ids=[row[0] for row in LITMUS]
)
def test_litmus(scenario: Scenario, shown_by: set[Model], model: Model) -> None:
    result = explore(scenario, model)
    assert (result.violation is not None) == (model in shown_by), str(result)


def test_a_thread_that_waits_for_ever_is_reported() -> None:
    result = explore(Scenario("stuck", {"x": 0}, [Thread("t", [Await("x", lambda v: v == 1)])]), TSO)
    assert result.violation == "stuck for ever: t"


def test_a_mortal_thread_dies_between_its_stores_and_its_stores_still_reach_memory() -> None:
    finals: set[tuple[int, int]] = set()

    def final(words: object) -> None:
        assert isinstance(words, dict)
        finals.add((words["x"], words["y"]))

    thread = Thread("t", [Load("r", "x"), Store("x", 1), Store("y", 1)], mortal=True)
    assert explore(Scenario("death", {"x": 0, "y": 0}, [thread], final), TSO).violation is None
    assert finals == {(0, 0), (1, 0), (1, 1)}


def test_a_claim_sees_what_living_threads_hold_and_the_trace_can_be_read() -> None:
    holder = Thread(
        "holder", [Load("r", "x"), If(lambda r: r == 0, "end"), Let("held", 1), Load("r", "y"), "end"]
    )
    claim = Claim("nobody holds", lambda held: not any(held.values()))
    result = explore(
        Scenario("claim", {"x": 0, "y": 0}, [holder, Thread("d", [Store("x", 1), claim, Store("y", 1)])]), TSO
    )
    assert result.violation == "d: nobody holds"
    assert [" ".join(line.split()) for line in result.trace] == [
        "d store x = 1 (relaxed)",
        "d ... x = 1 reaches memory",
        "holder load x = 1",
        "d VIOLATION d: nobody holds",
    ]


def test_a_state_space_that_is_too_large_is_not_taken_for_a_pass() -> None:
    with pytest.raises(RuntimeError, match="more than 3 states"):
        explore(store_buffering(False), WEAK, states_max=3)
