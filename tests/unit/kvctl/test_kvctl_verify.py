"""`kvctl verify` against played answers: waits for the end of the walk, says what was found, exit codes."""

from __future__ import annotations

from typing import Any

import pytest
from kvctl_answers import KEY

from kvd.kvctl import verify as module
from kvd.kvctl.exits import ExitCode

WALK: dict[str, Any] = {
    "number": 3, "namespace": None, "rate_bytes_s": 1 << 30, "progress": 1.0, "objects": 1000, "bytes": 1 << 26,
    "damaged": 0, "left": 0, "keys": [], "stopped": False, "took_s": 1.5, "ended_s": 0.0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.0)


def ended(**changes: Any) -> dict[str, Any]:
    return {"running": None, "last": {**WALK, **changes}, "sample_every": 1000}


@pytest.mark.parametrize("damaged", [0, 2])
def test_the_end_of_the_walk_decides_the_exit_code(kvctl: Any, damaged: int) -> None:
    last = {"damaged": damaged, "keys": [KEY] if damaged else []}
    kvctl.against(verify={"started": True, **WALK}, verify_status=ended(**last))
    text = kvctl("verify", code=int(damaged > 0))
    assert "done in 1.5 s: 1,000 objects (64 MiB) intact" in text
    assert ("damaged and withdrawn: 2 objects" in text) == bool(damaged)
    assert (KEY in text) == bool(damaged)
    assert kvctl.json("verify", code=int(damaged > 0))["damaged"] == damaged


def test_a_walk_that_goes_on_is_followed_and_said_to_be_another(kvctl: Any) -> None:
    kvctl.against(verify={"started": False, **WALK}, verify_status=ended())
    assert "walk number 3 goes on already" in kvctl("verify")


def test_stop_and_detach_do_not_wait(kvctl: Any) -> None:
    stopped = {**WALK, "stopped": True}
    kvctl.against(verify={"started": True, **WALK}, verify_stop={**ended(stopped=True), "ended": stopped})
    assert "walk number 3 goes on" in kvctl("verify", "--detach")
    assert "stopped in 1.5 s" in kvctl("verify", "--stop")
    kvctl.against(verify_stop={"running": None, "last": None, "sample_every": 0, "ended": None})
    assert "nothing was verified" in kvctl("verify", "--stop", code=ExitCode.NO)


def test_to_stop_what_does_not_go_on_shows_no_other_walk(kvctl: Any) -> None:
    """Fails if an earlier walk is shown as what was stopped, and if two options that contradict are taken."""
    kvctl.against(verify_stop={**ended(ended_s=7.0), "ended": None})
    text = kvctl("verify", "--stop", code=ExitCode.NO)
    assert "no walk goes on; the last one, number 3, was done 7.0 s ago" in text
    assert "intact" not in text
    assert "give one of them" in kvctl("verify", "--stop", "--detach", code=ExitCode.USAGE)


def test_status_says_that_a_walk_was_cut_short(kvctl: Any, changed: Any) -> None:
    last = {**WALK, "stopped": True, "progress": 0.25, "objects": 1, "ended_s": 7.0}
    text = kvctl.against(status=changed({"verify.last": last}))("status")
    assert "last walk cut short 7.0 s ago at 25% of the index, 1 object intact" in text
    assert "last walk 0.0 s ago" in kvctl.against(status=changed({"verify.last": WALK}))("status")


def test_a_rate_that_is_none_is_refused_by_name(kvctl: Any) -> None:
    assert "--rate = fast is not allowed" in kvctl("verify", "--rate", "fast", code=ExitCode.USAGE)


def test_status_shows_the_walk_and_what_was_damaged(kvctl: Any, changed: Any) -> None:
    status = changed({"verify.running": {**WALK, "progress": 0.5}, "counters.verify_damaged": 1})
    text = kvctl.against(status=status)("status")
    assert (
        "walk: 50% of the index, 1,000 objects (64 MiB) intact; 1 object found damaged and withdrawn" in text
    )
    assert "verified" not in kvctl.against(status=changed({}))("status")
