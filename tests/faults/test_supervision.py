"""Background tasks of a real daemon are killed and stopped: nothing ends silently (field rows B6, C1, house rule).

A task that can be started again is, and health says so; of any other the daemon dies with exit code 70; one that
stands still shows in health while it does, whoever asks. Without the watch of kvd/server/supervise.py each daemon here
would go on saying "ok".
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from faults_world import chain_of, namespace, publish, until

import kvd

pytestmark = pytest.mark.slow
INJECT = str(Path(__file__).parent / "inject_tasks")
HEALTH_WITHIN_S = 10.0


def broken(daemon: Any, what: str, **options: Any) -> Any:
    return daemon(env={"PYTHONPATH": INJECT, "FAULTS_TASK": what}, **options)


def address(running: Any) -> str:
    """Where the daemon said that it answers scrapes."""
    rows = map(json.loads, running.log_text().splitlines())
    return next(f"http://127.0.0.1:{row['port']}" for row in rows if row["event"] == "metrics")


def part(running: Any, name: str) -> Any:
    return running.call("health")["parts"][name]


def scraped(running: Any) -> bytes:
    """The metrics, nothing while nobody listens: a task counts as restarted just before it does."""
    with (
        contextlib.suppress(urllib.error.URLError),
        urllib.request.urlopen(address(running) + "/metrics", timeout=5) as answer,
    ):
        text: bytes = answer.read()
        return text
    return b""


@pytest.mark.parametrize("how", ["raise", "return", "cancel"])
@pytest.mark.parametrize("task", ["verify", "metrics"])
def test_a_task_that_can_be_started_again_is(daemon: Any, how: str, task: str) -> None:
    running = broken(daemon, f"{how}:{task}", server={"metrics_listen": "127.0.0.1:0"})
    assert part(running, task)["state"] == "ok"
    os.kill(running.pid, signal.SIGUSR1)
    health = until(lambda: (now := running.call("health"))["restarts"] and now, "restarted", HEALTH_WITHIN_S)
    assert (health["state"], health["parts"][task]) == (
        "degraded",
        {"state": "degraded", "reason": "restarted"},
    )
    assert "task_died" in running.log_text()
    assert b"kvd_task_restarts_total 1\n" in until(lambda: scraped(running), "metrics, listening again")
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        publish(ns, chain_of(ns, 1))
        assert running.call("verify")["started"]
        until(lambda: running.call("verify_status")["last"], "a walk after the restart")


@pytest.mark.parametrize("how", ["raise", "return", "cancel"])
def test_of_a_task_that_cannot_the_daemon_dies(daemon: Any, how: str) -> None:
    running = broken(daemon, f"{how}:tick")
    running.expected_codes.add(70)
    os.kill(running.pid, signal.SIGUSR1)
    assert running.wait() == 70
    assert not os.path.exists(running.socket)


def test_a_clock_that_stands_still_is_a_failed_daemon(daemon: Any) -> None:
    """Under a service manager the watchdog then ends it (tests/ipc/test_systemd.py); without one, health tells."""
    running = broken(daemon, "stall:tick", server={"metrics_listen": "127.0.0.1:0"})
    url = address(running) + "/health"
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert answer.status == 200
    os.kill(running.pid, signal.SIGUSR1)
    until(lambda: part(running, "tick")["state"] == "failed", "a failed tick", HEALTH_WITHIN_S)
    assert "no sign of life" in part(running, "tick")["reason"]
    with pytest.raises(urllib.error.HTTPError, match="503"):
        urllib.request.urlopen(url, timeout=5)


def test_population_that_stands_still_shows(daemon: Any) -> None:
    """Its first step is in use; what comes after never does."""
    running = broken(daemon, "stall:population", pool={"size": "256MiB", "populate_threads": 1})
    until(lambda: "no sign of life" in part(running, "population")["reason"], "health", HEALTH_WITHIN_S)
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        assert publish(ns, chain_of(ns, 1))


def test_a_checksum_that_never_ends_shows_and_hinders_nobody(daemon: Any) -> None:
    running = broken(daemon, "stall:verify-worker")
    with kvd.connect(running.socket) as store:
        ns = namespace(store)
        publish(ns, chain_of(ns, 1))
        running.call("verify")
        until(lambda: "no sign of life" in part(running, "verify")["reason"], "health", HEALTH_WITHIN_S)
        assert running.call("health")["state"] == "degraded"
        publish(ns, chain_of(ns, 2))
