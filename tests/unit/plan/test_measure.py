"""`kvctl plan breakeven --measure` on a daemon: what it tells, and what it leaves there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

import kvd
from kvd.kvctl.plan import app
from kvd.kvctl.plan_measure import measure


@pytest.mark.slow
def test_measuring_again_and_again_leaves_one_empty_namespace(daemon: Any) -> None:
    running = daemon()
    for _ in range(3):
        assert measure(running.socket, 10.0).chunks > 0
    with kvd.connect(running.socket) as store:
        status = store.status()
        assert status["core"]["families"] == 0
        assert len(store.call("namespaces")["namespaces"]) == 1


@pytest.mark.slow
def test_measured_rates_are_told_as_measured(daemon: Any) -> None:
    running = daemon()
    line = [
        "breakeven", "--measure", "--socket", running.socket, "--prefill-saved", "7s", "--prefix-tokens", "8192",
        "--chunk-tokens", "256", "--bytes-per-token", "1024",
    ]  # fmt: skip
    text = " ".join(CliRunner().invoke(app, line).stdout.split())
    assert "copied into blocks of host memory at" in text
    assert "GB/s" not in text
    assert "measured just now" in text
    assert "these are 32 chunks, in proportion" in text
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    measured = found["measured"]
    inputs = found["ledgers"]["Break-even"]["inputs"]
    assert inputs["measured"] == ["bandwidth", "lookup", "copy"]
    assert inputs["lookup_ns"] == -(-measured["lookup_ns"] * 32 // measured["chunks"])
