"""A daemon for measurements: its own socket, configuration and CPU; gone when the block ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvd
from kvd.errors import KvdError, UnavailableError

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Bench:
    """A running daemon."""

    socket: str
    pid: int

    def connect(self, name: str, **options: Any) -> kvd.Store:
        """A client of it."""
        return kvd.connect(self.socket, client=name, deadline_s=30.0, **options)

    def status(self) -> dict[str, Any]:
        """What `kvctl status --json` shows."""
        with kvd.Admin(self.socket) as admin:
            answer = admin.call("status")
        assert isinstance(answer, dict)
        return answer

    def cpu_seconds(self) -> float:
        """CPU time that the daemon has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int:
        """Resident memory of the daemon beyond the pool: its heap and code, META, client regions."""
        total, counted = 0, False
        for line in Path(f"/proc/{self.pid}/smaps").read_text().splitlines():
            head = line.split(maxsplit=5)
            if "-" in head[0] and not head[0].endswith(":"):
                counted = not (len(head) > 5 and "kvd-pool" in head[5])
            elif counted and head[0] == "Rss:":
                total += int(head[1]) << 10
        return total


@contextmanager
def running(cpu: int | None, **settings: Any) -> Iterator[Bench]:
    """Start a daemon with these settings (`pool_size="1GiB"` is `[pool] size`), wait until it serves, stop it."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        path = os.path.join(folder, "kvd.sock")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KVD_")}
        environment |= {
            "KVD_SERVER_SOCKET": path,
            "KVD_SERVER_RUNTIME_DIR": folder,
            "KVD_SERVER_LOG_LEVEL": "warning",
        }
        environment |= {f"KVD_{name.upper()}": str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "kvd.server.main", "serve"]
        log_path = os.path.join(folder, "log")
        with open(log_path, "wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            if cpu is not None:
                os.sched_setaffinity(process.pid, {cpu})
            _await_serving(path, process, log_path)
            yield Bench(path, process.pid)
        finally:
            _stop(process)


def _await_serving(path: str, process: subprocess.Popen[bytes], log_path: str) -> None:
    end = time.monotonic() + START_DEADLINE_S
    while True:
        if process.poll() is not None:
            raise UnavailableError(
                f"the daemon ended with status {process.returncode}: {Path(log_path).read_text()[-2000:]}",
                code="bench",
            )
        try:
            with kvd.Admin(path) as admin:
                pool = admin.call("status")["pool"]
            if pool["population"]["done"]:
                return
        except (KvdError, KeyError):
            if time.monotonic() > end:
                raise
        if time.monotonic() > end:
            raise UnavailableError(
                f"the daemon did not populate its pool in {START_DEADLINE_S:g} s", code="bench"
            )
        time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
