"""What the fault tests share: client processes on the testing build, and what the daemon says of its space."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import native_build
import pytest

import kvd

HERE = Path(__file__).resolve().parent
CHUNK_TOKENS = 16
CHUNKS = 4
SIZE = 64 << 10
BACK_WITHIN_S = 5.0  # row B1: everything a dead process held is back by then
STUCK_S = 30.0
MANIFEST: dict[str, Any] = {
    "model": "m",
    "revision": "r1",
    "dtype": "bfloat16",
    "fixed": "*",
    "tenant": "",
    "salt": "",
}


def chain_of(ns: kvd.Namespace, seed: int, chunks: int = CHUNKS) -> kvd.Chain:
    """A chain that only `seed` has."""
    return ns.chain(array("I", [seed, *range(chunks * CHUNK_TOKENS - 1)]), CHUNK_TOKENS)


def pattern(identity: bytes, size: int = SIZE, salt: int = 0) -> bytes:
    """The payload of a chunk: nothing else looks like it, wherever it is cut."""
    unit = bytes(byte ^ salt for byte in identity)
    return unit * (size // len(unit))


def namespace(store: kvd.Store) -> kvd.Namespace:
    return store.namespace(kvd.Manifest(**MANIFEST))


def publish(ns: kvd.Namespace, chain: kvd.Chain, size: int = SIZE, salt: int = 0) -> list[kvd.Published]:
    with ns.reserve(chain, nbytes=size) as writes:
        writes.fill([pattern(identity, size, salt) for identity in chain])
        return writes.publish()


def injected(**settings: str) -> dict[str, str]:
    """Environment of a daemon that reads inject/sitecustomize.py before anything else."""
    path = [str(HERE / "inject"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(path), **settings}


def until(condition: Callable[[], Any], what: str, within_s: float = STUCK_S) -> Any:
    """Ask until it is so; each look is a round trip to another process, nothing sleeps."""
    end_s = time.monotonic() + within_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end_s:
            pytest.fail(f"not within {within_s} s: {what}")


def space(daemon: Any) -> dict[str, int]:
    """What is in use: bytes used, reserved and in limbo, families, reservations, leases."""
    core = daemon.call("status")["core"]
    pool = core["pool"]
    return {
        "used": pool["used_bytes"], "reserved": pool["reserved_bytes"], "limbo": pool["limbo_bytes"],
        "families": core["families"], "partial": core["families_partial"], "reservations": core["reservations"],
        "leases": sum(row["leases"] for row in daemon.call("clients")),
    }  # fmt: skip


class Child:
    """A client process of clients_of_faults.py. `stop_at`: the named step at which it stops itself."""

    def __init__(self, library: Path, role: str, socket: str, *, stop_at: str = "", mutant: str = "") -> None:
        env = {**os.environ, "KVD_STOP_AT": stop_at, "KVD_MUTANT": mutant}
        self.process = subprocess.Popen(
            native_build.command(library, str(HERE / "clients_of_faults.py"), role, socket),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=env,
        )  # fmt: skip
        self.pid = self.process.pid
        self._said = b""

    def wait_stopped(self) -> None:
        """Until the process has stopped itself."""
        pid, status = os.waitpid(self.pid, os.WUNTRACED)
        assert pid == self.pid
        if not os.WIFSTOPPED(status):
            self.process.returncode = os.waitstatus_to_exitcode(status)
            pytest.fail(f"the client ended with {self.process.returncode} instead of stopping")

    def line(self) -> Any:
        """The next thing it says."""
        assert self.process.stdout is not None
        while b"\n" not in self._said:
            ready, _, _ = select.select([self.process.stdout], [], [], STUCK_S)
            data = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not data:
                pytest.fail(f"the client said {self._said!r} and no more, exit code {self.process.poll()}")
            self._said += data
        line, _, self._said = self._said.partition(b"\n")
        return json.loads(line)

    def tell(self, what: str = "go") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(what.encode() + b"\n")

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and until the process is gone."""
        self.process.kill()
        self.process.wait(STUCK_S)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def close(self) -> None:
        if self.process.returncode is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
