"""The unit files as systemd reads them, and the daemon with somebody who plays the service manager."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.clientlib.control import Control
from kvd.config import Config

pytestmark = pytest.mark.slow  # most start a daemon or systemd's tools

UNITS = Path(__file__).parents[2] / "systemd"
ANALYZE = shutil.which("systemd-analyze")


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed (package systemd)")
def test_systemd_accepts_the_units(tmp_path):
    """With the user and the command that installing would have made, systemd has nothing to say."""
    for name in ("kvd.service", "kvd.socket"):
        text = (UNITS / name).read_text().replace("/usr/bin/kvd", sys.executable)
        for key in ("User", "Group", "SocketUser", "SocketGroup"):
            text = text.replace(f"\n{key}=kvd\n", f"\n{key}=daemon\n")
        text = "\n".join(line for line in text.splitlines() if not line.startswith("Documentation=")) + "\n"
        (tmp_path / name).write_text(text)
    result = subprocess.run(
        [ANALYZE, "verify", "--man=no", str(tmp_path / "kvd.service"), str(tmp_path / "kvd.socket")],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    said = [line for line in result.stderr.splitlines() if "kvd" in line]
    assert said == []
    assert result.returncode == 0


@pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not installed (package systemd)")
def test_the_service_is_confined():
    result = subprocess.run(
        [ANALYZE, "security", "--offline=yes", str(UNITS / "kvd.service")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    overall = next(line for line in result.stdout.splitlines() if "Overall exposure level" in line)
    assert float(overall.rpartition(": ")[2].split()[0]) < 3.0, overall


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="systemd-sysusers is not installed")
def test_users_and_directories_are_made(tmp_path):
    for tool, name in (("systemd-sysusers", "kvd.sysusers"), ("systemd-tmpfiles", "kvd.tmpfiles")):
        root = tmp_path / tool
        (root / "etc").mkdir(parents=True)
        (root / "etc/passwd").write_text(
            "root:x:0:0::/root:/bin/sh\nkvd:x:0:0::/:/bin/false\n" if "tmp" in tool else ""
        )
        (root / "etc/group").write_text("root:x:0:\nkvd:x:0:\n" if "tmp" in tool else "")
        action = ["--create"] if "tmp" in tool else []
        result = subprocess.run(
            [tool, f"--root={root}", *action, str(UNITS / name)], capture_output=True, text=True, timeout=60
        )
        assert result.returncode == 0, result.stderr
    assert "kvd:" in (tmp_path / "systemd-sysusers/etc/passwd").read_text()
    assert (tmp_path / "systemd-tmpfiles/run/kvd").stat().st_mode & 0o777 == 0o755


def test_the_unit_and_the_code_agree():
    unit = (UNITS / "kvd.service").read_text()
    assert "Type=notify" in unit
    assert "WatchdogSec=" in unit
    assert "LimitMEMLOCK=infinity" in unit
    stop_s = next(float(row[1]) for row in Config().describe() if row[0] == "server.stop_timeout_s")
    assert float(unit.split("TimeoutStopSec=")[1].split()[0]) > stop_s
    assert "ListenStream=/run/kvd/kvd.sock" in (UNITS / "kvd.socket").read_text()


class Manager:
    """Starts a daemon as systemd would: notify socket, watchdog, sockets passed from descriptor 3 on."""

    def __init__(
        self, directory: Path, passed: list[socket.socket], names: str = "kvd.socket", **env: str
    ) -> None:
        self.notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notify.bind(str(directory / "notify"))
        self.notify.settimeout(20)
        fds = [sock.fileno() for sock in passed]
        # LISTEN_PID is the pid of the very process: set after the fork, before the exec.
        code = (
            "import os, sys\n"
            f"high = [os.dup2(fd, 100 + n) for n, fd in enumerate({fds})]\n"
            "[os.dup2(fd, 3 + n) for n, fd in enumerate(high)]\n"
            "os.environ['LISTEN_PID'] = str(os.getpid())\n"
            "command = [sys.executable, '-m', 'kvd.server.main', 'serve', '-c', sys.argv[1]]\n"
            "os.execv(sys.executable, command)\n"
        )
        (directory / "c.toml").write_text('[pool]\nsize = "8MiB"\n[server]\nlog_format = "json"\n')
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "LISTEN_"))
        }
        self.log = directory / "log"
        manager = {
            "NOTIFY_SOCKET": str(directory / "notify"),
            "LISTEN_FDS": str(len(fds)),
            "LISTEN_FDNAMES": names,
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(directory / "c.toml")],
                env={**clean, **manager, **env},
                pass_fds=fds,
                stderr=log,
            )

    def until(self, line: str) -> list[str]:
        """All lines up to the message with this one."""
        lines = []
        while True:
            lines += self.notify.recv(4096).decode().splitlines()
            if line in lines:
                return lines

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def manager(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(passed, **options):
            one = Manager(tmp_path, passed, **options)
            stack.callback(one.notify.close)
            stack.callback(lambda: one.process.poll() is not None or one.process.kill() or one.process.wait())
            return one

        yield start


def listening(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(path))
    sock.listen()
    return sock


def test_readiness_watchdog_and_a_passed_socket(manager, tmp_path):
    path = tmp_path / "s"
    with listening(path) as sock:
        one = manager([sock], WATCHDOG_USEC="900000")
        lines = one.until("READY=1")
        assert f"MAINPID={one.process.pid}" in lines
        assert any(line.startswith("STATUS=") and "pool 8 MiB" in line for line in lines)
        assert {"WATCHDOG=1"} <= set(one.until("WATCHDOG=1"))
        with contextlib.closing(Control(str(path), name="x", role="admin", deadline_s=10)) as control:
            assert control.welcome.pid == one.process.pid
        assert one.stop() == 0
        assert "STOPPING=1" in one.until("STOPPING=1")
        assert path.exists()
        # The socket is systemd's: it stays, and the next daemon serves those who came meanwhile.
        with socket.socket(socket.AF_UNIX) as early:
            early.connect(str(path))


def test_without_a_watchdog_none_is_petted(manager, tmp_path):
    with listening(tmp_path / "s") as sock:
        one = manager([sock])
        lines = one.until("READY=1")
        assert one.stop() == 0
        assert "WATCHDOG=1" not in lines + one.until("STOPPING=1")


def test_one_of_several_sockets_is_chosen_by_name(manager, tmp_path):
    with listening(tmp_path / "other") as other, listening(tmp_path / "s") as sock:
        one = manager([other, sock], names="other.socket:kvd.socket")
        one.until("READY=1")
        with contextlib.closing(
            Control(str(tmp_path / "s"), name="x", role="admin", deadline_s=10)
        ) as control:
            assert control.welcome.pid == one.process.pid
        assert one.stop() == 0


@pytest.mark.parametrize("kind", ["datagram", "file", "inet"])
def test_what_is_no_listening_unix_socket_is_refused_by_name(manager, tmp_path, kind):
    with contextlib.ExitStack() as stack:
        if kind == "datagram":
            passed = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        elif kind == "inet":
            passed = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        else:
            passed = stack.enter_context((tmp_path / "file").open("w"))
        one = manager([passed])
        assert one.process.wait(30) == 69
        assert "service manager passed descriptor 3" in one.log.read_text()
        assert "Traceback" not in one.log.read_text()
