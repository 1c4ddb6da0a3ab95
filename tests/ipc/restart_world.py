"""Daemons that follow one another over the same memory, with each sort of keeper; clients in processes of their own."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvd
from kvd.probe import leftovers

CHUNK = 16
SIZE = 64 << 10
ROOT = Path(__file__).resolve().parents[2]


# As the service manager does: the stored descriptors from 3 on, for the very process that follows.
PASS = """
import fcntl, os, sys
high = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 500) for fd in sys.argv[1].split(",") if fd]
for number, fd in enumerate(high, 3):
    os.dup2(fd, number)
    os.close(fd)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(high)))
os.execv(sys.executable, [sys.executable, "-m", "kvd.server.main", "serve", "--config", sys.argv[2]])
"""


def manifest() -> kvd.Manifest:
    return kvd.Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", salt="", fixed="*")


def chain_of(ns: kvd.Namespace, name: int, count: int = 1) -> kvd.Chain:
    """A chain of so many chunks that no other name has."""
    return ns.chain(array.array("I", [name] * (count * CHUNK)), CHUNK)


def payload(name: int, at: int, size: int = SIZE) -> bytes:
    return bytes([name % 251, at % 251]) * (size // 2)


def put(ns: kvd.Namespace, name: int, count: int = 1, size: int = SIZE) -> kvd.Chain:
    chain = chain_of(ns, name, count)
    with ns.reserve(chain, nbytes=size) as writes:
        writes.fill([payload(name, at, size) for at in range(count)])
        assert writes.publish() == [kvd.Published.PUBLISHED] * count
    return chain


def read(ns: kvd.Namespace, chain: kvd.Chain) -> list[bytes]:
    with ns.acquire(chain) as leases:
        for lease in leases:
            lease.verify()
        return [bytes(lease.view) for lease in leases]


def until(found: Any, what: str, seconds: float = 10.0) -> Any:
    """Ask again until the answer is true. A bound, not a pause: what is waited for happens in another process."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        answer = found()
        if answer:
            return answer
        time.sleep(0.002)
    raise AssertionError(f"{what} did not happen within {seconds} s")


class Series:
    """Daemons one after the other in one directory. `manager` plays the service manager, else a keeper keeps."""

    def __init__(self, daemon: Any, *, manager: bool = False, **options: Any) -> None:
        self._daemon = daemon
        self.manager = manager
        self.options = {"restart": {"keep": "service-manager" if manager else "keeper"}, **options}
        self.directory: Path | None = None
        self.stored: dict[str, int] = {}
        self.env: dict[str, str] = {}
        self.running = self.start()

    def start(self, **options: Any) -> Any:
        """The next daemon."""
        merged = {**self.options, **options}
        if not self.manager:
            self.running = self._daemon(directory=self.directory, env=self.env, **merged)
        else:
            self.running = self._daemon(
                directory=self.directory, env={**self.env, "LISTEN_FDNAMES": ":".join(self.stored)}, wait=False,
                program=["-c", PASS, ",".join(map(str, self.stored.values()))],
                pass_fds=tuple(self.stored.values()), **merged,
            )  # fmt: skip
            self._until_ready()
        self.directory = self.running.directory
        return self.running

    def _until_ready(self) -> None:
        self.running.notify.settimeout(20)
        while not any("READY=1" in lines for lines in self.running.notifications):
            self.take()

    def take(self) -> None:
        """One message of the daemon; stores and removes what it says."""
        data, ancillary, _, _ = self.running.notify.recvmsg(
            4096, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
        )
        lines = data.decode().splitlines()
        self.running.notifications.append(lines)
        fields = dict(line.partition("=")[::2] for line in lines)
        fds = array.array("i")
        for _, _, rights in ancillary:
            fds.frombytes(rights)
        if "FDSTORE" in fields:
            (self.stored[fields["FDNAME"]],) = fds
        if "FDSTOREREMOVE" in fields:
            fd = self.stored.pop(fields["FDNAME"], None)
            if fd is not None:
                os.close(fd)

    def settle(self) -> None:
        """Take all that the daemon has said so far."""
        self.running.notify.settimeout(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.take()

    def kill(self) -> None:
        self.running.kill()
        if self.manager:
            self.settle()

    def stop(self) -> None:
        assert self.running.stop() == 0
        if self.manager:
            self.settle()

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.running.call("status")
        return status

    def restart(self) -> dict[str, Any]:
        """The restart section of the status."""
        section: dict[str, Any] = self.status()["restart"]
        return section

    def close(self) -> None:
        self.running.stop()  # a keeper listens to one at a time
        for fd in self.stored.values():
            os.close(fd)
        self.stored = {}
        if self.directory is not None:
            keeper = leftovers.dial_keeper(leftovers.keeper_path(str(self.directory)))
            if keeper is not None:
                with keeper:
                    keeper.send(leftovers.END)
                    with contextlib.suppress(ConnectionError):
                        keeper.recv(1)


class Child:
    """A client in a process of its own that does what it is told, line by line."""

    def __init__(self, path: str, library: str = "", **env: str) -> None:
        program = [sys.executable, str(Path(__file__).with_name("restart_client.py")), path]
        if library:
            program = [
                sys.executable, str(ROOT / "tests/native_build.py"), library,
                str(Path(__file__).with_name("restart_client.py")), path,
            ]  # fmt: skip
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **env}
        )
        self.pid = self.process.pid
        assert self.heard() == "attached"

    def say(self, *words: object) -> str:
        self.tell(*words)
        return self.heard()

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def heard(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
