"""Fixtures that start real daemons.

`daemon(**options)` starts one in its own temporary directory, waits until it says READY to a service manager (no
sleeping, no polling) and returns a `Daemon`. At the end of the test every daemon is stopped; one that does not end by
itself, or ends with an error nobody asked for, fails the test and shows its log.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvd.clientlib.control import Control
from kvd.wire import messages as wire

READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
SERVE = ["-m", "kvd.server.main", "serve", "--config"]


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="run soak tests at full length")
    parser.addoption("--seconds", type=float, default=60.0, help="with --long: length of each stress test")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="soak-length form, only with --long"))


class Daemon:
    """A daemon process: `socket`, `pid`, `config` (path of its file), `log`; `stop()`, `kill()`, `call(method)`."""

    def __init__(
        self,
        directory: Path,
        options: dict,
        env: dict,
        wait: bool,
        program: list[str],
        pass_fds: tuple[int, ...] = (),
    ) -> None:
        self.directory = directory
        self.socket = str(directory / "kvd.sock")
        self.config = directory / "kvd.toml"
        self.log = directory / "log"
        self.expected_codes = {0}
        options = {key: dict(value) for key, value in options.items()}
        options.setdefault("server", {})
        options["server"] = {
            "socket": self.socket, "runtime_dir": str(directory), "log_format": "json", "stop_timeout_s": 10,
            **options["server"],
        }  # fmt: skip
        options["pool"] = {"size": "64MiB", **options.get("pool", {})}
        self.config.write_text(to_toml(options))
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self.notify.bind(str(directory / "notify"))
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KVD_", "LISTEN_", "WATCHDOG_"))
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, *program, str(self.config)],
                env={**clean, "NOTIFY_SOCKET": str(directory / "notify"), **env},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=pass_fds,
            )  # fmt: skip
        self.pid = self.process.pid
        self.notifications = []
        if wait:
            self.wait_notified("READY=1")

    def wait_notified(self, line: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until the daemon has told the service manager this line. Fails at once when the daemon ends instead."""
        self.notify.settimeout(0.25)
        for _ in range(int(timeout_s / 0.25)):
            if any(line in message for message in self.notifications):
                return
            try:
                self.notifications.append(self.notify.recv(4096).decode().splitlines())
            except TimeoutError:
                if self.process.poll() is not None:
                    break
        pytest.fail(f"daemon said no {line}, exit code {self.process.poll()}:\n{self.log_text()}")

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def admin(self, name: str = "test") -> Control:
        """A new admin connection."""
        return Control(self.socket, name=name, role="admin", deadline_s=10)

    def call(self, method: str, **params):
        """One administrative call on a connection of its own."""
        with contextlib.closing(self.admin()) as control:
            return control.request(wire.Call(method, params), wire.Result, deadline_s=10).result

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM and wait. Returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def kill(self) -> int:
        """SIGKILL and wait."""
        self.expected_codes.add(-signal.SIGKILL)
        self.process.kill()
        return self.wait()

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Until the process has ended by itself."""
        return self.process.wait(timeout_s)

    def finish(self) -> None:
        """End of the test."""
        try:
            code = self.stop()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"daemon {self.pid} did not stop:\n{self.log_text()}")
        finally:
            self.notify.close()
        if code not in self.expected_codes:
            pytest.fail(f"daemon {self.pid} ended with {code}:\n{self.log_text()}")


def to_toml(options: dict) -> str:
    lines = []
    for section, keys in options.items():
        lines.append(f"[{section}]")
        for key, value in keys.items():
            text = f'"{value}"' if isinstance(value, str) else str(value).lower()
            lines.append(f"{key} = {text}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def daemon():
    """Factory: daemon(pool={"size": "128MiB"}, env={...}, wait=True, directory=None, program=SERVE) -> Daemon.

    `program` is what follows the interpreter, the configuration file comes last.
    """
    with contextlib.ExitStack() as stack:

        def start(*, env=None, wait=True, directory=None, program=SERVE, pass_fds=(), **options) -> Daemon:
            if directory is None:
                # Short, because the kernel allows 107 bytes for a socket's path.
                directory = Path(tempfile.mkdtemp(prefix="kvd-"))
                stack.callback(shutil.rmtree, directory, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                (directory / "notify").unlink()
            one = Daemon(directory, options, env or {}, wait, program, pass_fds)
            stack.callback(one.finish)
            return one

        yield start
