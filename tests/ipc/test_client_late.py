"""What nobody waits for any more: it is done, the thread that sees to it ends, and nothing hangs on that thread."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from limits_world import WAIT_S, stopped, until_reserved
from restart_world import until

import kvd
from kvd.clientlib.calls import Calls
from kvd.shm.messages import Sq


def nobody_sees_to_it() -> bool:
    return not any(thread.name == "kvd-late" for thread in threading.enumerate())


def run(script: str, *arguments: str) -> int:
    """A program that hangs fails the test, and does not hang it."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    return subprocess.run([sys.executable, "-c", script, *arguments], timeout=WAIT_S, env=env).returncode


def test_the_thread_that_takes_answers_nobody_reads_ends_with_the_last(daemon: Any) -> None:
    """Fails if what was answered stays noted: its thread wakes up fifty times a second while the store lives."""
    running = daemon()
    with kvd.connect(running.socket) as store:
        with stopped(running):
            for _ in range(1000):
                store.calls.post(Sq.PING, b"")
            assert not nobody_sees_to_it()
        until(nobody_sees_to_it, "the end of the thread")
        assert not store.calls._posted


def test_a_program_ends_that_holds_many_reservations(daemon: Any) -> None:
    """Fails if a thread is started for what the end of the interpreter gives back: it never runs, its starter waits."""
    running = daemon()
    script = """
import sys
import kvd
from limits_world import chain_of, namespace
store = kvd.connect(sys.argv[1])
ns = namespace(store)
held = [ns.reserve(chain_of(ns, 1, seed), nbytes=64) for seed in range(700)]
"""
    assert run(script, running.socket) == 0
    until_reserved(running, 0)


def test_a_store_that_is_closed_in_the_middle_of_its_own_work_is_closed(daemon: Any) -> None:
    """Fails if close waits, with the lock of whom it interrupted, for a thread that needs it. A finaliser or a signal
    handler closes wherever it runs; here it runs where a collection may.
    """
    running = daemon()
    script = """
import os, signal, sys
import kvd
from limits_world import chain_of, namespace
store = kvd.connect(sys.argv[1], deadline_s=0.2)
ns = namespace(store)
ns.reserve(chain_of(ns, 1), nbytes=64).abort()
os.kill(int(sys.argv[2]), signal.SIGSTOP)
with store.calls._changed:
    try:
        ns.reserve(chain_of(ns, 1), nbytes=64, deadline_s=0.01)
    except kvd.UnavailableError:
        assert store.calls._collector is not None
        store.close()
        sys.exit(7)
"""
    try:
        assert run(script, running.socket, str(running.pid)) == 7
    finally:
        os.kill(running.pid, signal.SIGCONT)


class NarrowRings:
    """Rings with room for two messages, and a finaliser that posts in the middle of the first submission."""

    def __init__(self) -> None:
        self.calls: Calls | None = None
        self.sent: list[bytes] = []

    def submit(self, _type: int, _op: int, payload: bytes, /) -> int:
        if len(self.sent) == 2:
            return 0
        self.sent.append(payload)
        if len(self.sent) == 1:
            assert self.calls is not None
            self.calls.post(Sq.ABORT, b"from the finaliser")
        return 1

    def poll(self, _frames_max: int, /) -> list[tuple[int, int, bytes]]:
        return []

    def wait(self, _wake_fd: int, _timeout_ns: int, _stir_fd: int, /) -> int:
        return 1

    def may_sleep(self) -> bool:
        return True

    def awake(self) -> None:
        return


def test_what_a_finaliser_gives_back_while_something_is_sent_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what was sent is taken from the head of the queue unseen: it is what the finaliser had no room for."""
    monkeypatch.setattr(Calls, "_collect_if_due", lambda _calls: None)
    rings = NarrowRings()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = rings.calls = Calls(rings, ours)
        calls.post(Sq.ABORT, b"first")
        calls._due.append((Sq.ABORT, b"third"))
        assert [payload for _, payload in calls._due] == [b"from the finaliser", b"third"]
        assert set(rings.sent) == {b"first"}
        calls.close()
