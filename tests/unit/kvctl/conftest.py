"""A daemon made of answers, and kvctl run against it in this process."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from kvd.kvctl import session
from kvd.kvctl.main import app

# The answers beside this file are imported by their name, here and in the tests.
sys.path.insert(0, str(Path(__file__).parent))

from kvctl_answers import CLIENT, NAMESPACES, STATUS


class Daemon:
    """Answers by method: a value, an exception to raise, or a function of the parameters."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = {
            "status": STATUS,
            "clients": [CLIENT],
            "namespaces": NAMESPACES,
            **copy.deepcopy(answers),
        }
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.deadline_s = 0.0
        self.path = ""
        self.closed = 0
        self.welcome = SimpleNamespace(pid=4711, version="0.1.0", layout=1)

    def call(self, method: str, **params: Any) -> Any:
        self.calls.append((method, params))
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return copy.deepcopy(answer(**params) if callable(answer) else answer)

    def close(self) -> None:
        self.closed += 1

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Kvctl:
    """Runs commands in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.daemon = Daemon({})

    def against(self, error: Exception | None = None, **answers: Any) -> Kvctl:
        """From now on the daemon answers like this, or cannot be connected to."""
        self.daemon = Daemon(answers)

        def open_admin(path: str, deadline_s: float) -> Daemon:
            self.daemon.path, self.daemon.deadline_s = path, deadline_s
            if error is not None:
                raise error
            return self.daemon

        self._monkeypatch.setattr(session, "open_admin", open_admin)
        return self

    def __call__(self, *args: str, code: int = 0) -> str:
        """What it prints, standard error behind standard output."""
        result = CliRunner().invoke(app, list(args), prog_name="kvctl")
        assert result.exit_code == code, (result.output, result.exception)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.stdout + result.stderr

    def json(self, *args: str, code: int = 0) -> Any:
        """What it prints with --json, decoded."""
        return json.loads(self(*args, "--json", code=code))


@pytest.fixture
def kvctl(monkeypatch: pytest.MonkeyPatch) -> Kvctl:
    """kvctl against a daemon made of answers."""
    for name in ("KVD_SOCKET", "KVD_CONFIG", "COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return Kvctl(monkeypatch).against()


@pytest.fixture
def changed() -> Callable[..., dict[str, Any]]:
    """A status with some values replaced: changed({"pool.population.done": False})."""

    def make(changes: dict[str, Any]) -> dict[str, Any]:
        status = copy.deepcopy(STATUS)
        for path, value in changes.items():
            *steps, last = path.split(".")
            at = status
            for step in steps:
                at = at[step]
            at[last] = value
        return status

    return make
