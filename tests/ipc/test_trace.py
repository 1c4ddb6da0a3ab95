"""kvctl trace against a real daemon: recorded while clients write, replayed without a daemon to the same state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvd
from kvd.clientlib.store import Admin

pytestmark = pytest.mark.slow
CHUNK, SIZE = 16, 300_000


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvd.kvctl.main", *args]


def kvctl(*args: str, code: int = 0) -> str:
    done = subprocess.run(command(*args), text=True, capture_output=True, timeout=60, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def write(socket: str, prompts: range) -> None:
    with kvd.connect(socket) as store:
        manifest = kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="acme", salt="", fixed="*")
        space = store.namespace(manifest)
        for prompt in prompts:
            chain = space.chain([prompt * 1000 + token for token in range(CHUNK * 20)], chunk_tokens=CHUNK)
            with space.reserve(chain, nbytes=SIZE) as writes:
                for one in writes:
                    one.view[:] = bytes([prompt]) * SIZE
                writes.publish()


def until_recording(socket: str) -> None:
    admin = Admin(socket)
    while not admin.call("trace_status")["recording"]:
        os.sched_yield()
    admin.close()


def test_recorded_under_load_and_replayed_without_a_daemon(daemon: Any, tmp_path: Path) -> None:
    running = daemon()
    write(running.socket, range(3))
    file = tmp_path / "load.trace"
    recorder = subprocess.Popen(
        command("trace", "record", "--seconds", "60", "--socket", running.socket, "--json", str(file)), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    until_recording(running.socket)
    write(running.socket, range(3, 20))
    recorder.send_signal(signal.SIGINT)  # ends the recording, not the file
    recorder.communicate(timeout=30)
    status = running.call("trace_status")
    assert (status["recording"], status["ended"], status["error"]) == (False, "stopped", "")
    assert json.loads(kvctl("status", "--socket", running.socket, "--json"))["health"]
    statistics = running.call("status")
    running.stop()
    result = json.loads(kvctl("trace", "replay", "--json", str(file)))
    assert result["equal"]
    assert result["events"] == status["events"] > 50
    assert result["ended"] == "stopped"
    assert result["kinds"]["Evicted"] > 0
    assert result["statistics"]["pool"] == statistics["core"]["pool"]
    text = kvctl("trace", "replay", str(file))
    assert "equal: effects of every event" in text
    upto = json.loads(kvctl("trace", "replay", "--upto", "7", "--json", str(file)))
    assert (upto["events"], upto["ended"]) == (7, "stopped here")


def test_what_a_killed_daemon_left_replays_as_far_as_it_goes(daemon: Any, tmp_path: Path) -> None:
    running = daemon()
    file = tmp_path / "killed.trace"
    running.call("trace_start", path=str(file))
    write(running.socket, range(2))
    running.kill()
    with file.open("ab") as cut:
        cut.truncate(file.stat().st_size - 3)
    result = json.loads(kvctl("trace", "replay", "--json", str(file)))
    assert result["equal"]
    assert result["ended"] == "without an end: the daemon was killed"


def test_a_daemon_that_stops_ends_its_trace(daemon: Any, tmp_path: Path) -> None:
    running = daemon()
    file = tmp_path / "stopped.trace"
    running.call("trace_start", path=str(file))
    write(running.socket, range(2))
    running.stop()
    result = json.loads(kvctl("trace", "replay", "--json", str(file)))
    assert result["equal"]
    assert result["ended"] == "the daemon ended"
    assert result["checks"] >= 1


def test_a_difference_is_named_by_its_event(daemon: Any, tmp_path: Path) -> None:
    running = daemon()
    file = tmp_path / "one.trace"
    kvctl("trace", "record", "--seconds", "0.01", "--socket", running.socket, str(file))
    running.call("trace_start", path=str(tmp_path / "two.trace"))
    write(running.socket, range(2))
    running.stop()
    kvctl("trace", "replay", str(file))
    data = bytearray((tmp_path / "two.trace").read_bytes())
    at = data.rindex(b"\xa7Reserve")
    data[at : at + 8] = b"\xa7Reservf"
    (tmp_path / "bad.trace").write_bytes(data)
    done = subprocess.run(
        command("trace", "replay", str(tmp_path / "bad.trace")), text=True, capture_output=True, timeout=60
    )
    assert done.returncode == 5
    assert "an event 'Reservf' of this trace cannot be read" in done.stderr
    assert kvctl("trace", "replay", str(tmp_path / "none"), code=2) == ""


def test_a_file_that_the_daemon_cannot_make_is_refused_by_name(daemon: Any, tmp_path: Path) -> None:
    running = daemon()
    done = subprocess.run(
        command("trace", "record", "--socket", running.socket, str(tmp_path / "no" / "x")), text=True,
        capture_output=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "the daemon cannot make" in done.stderr
