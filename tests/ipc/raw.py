"""What the tests of the control socket and of the daemon's life share."""

import signal
import socket
import subprocess
import sys
import time

import pytest

from kvd.clientlib.control import Control
from kvd.wire import frames
from kvd.wire import messages as wire

MANIFEST = {"model": "m", "revision": "r1", "dtype": "bfloat16", "fixed": "*", "tenant": "", "salt": ""}
DEADLINE_S = 20.0


def until(condition, what: str):
    """Poll a condition through round trips to the daemon (each waits for its answer; no sleeping)."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
    pytest.fail(f"not within {DEADLINE_S} s: {what}")
    return None


def ask_until_the_end(control: Control) -> None:
    """Ask again and again, until the daemon ends the connection."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        control.request(wire.Call("health", {}), wire.Result, deadline_s=5)


class Raw:
    """A socket that says exactly what it is told."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(DEADLINE_S)
        self.sock.connect(path)
        self.decoder = frames.Decoder()
        self.waiting = []

    def send(self, *messages) -> None:
        self.sock.sendall(
            b"".join(item if isinstance(item, bytes) else frames.encode(item) for item in messages)
        )

    def receive(self):
        """The next message, None at EOF."""
        while not self.waiting:
            try:
                data = self.sock.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self.waiting += self.decoder.feed(data)
        return self.waiting.pop(0)

    def hello(self, **changes):
        self.send({**wire.Hello((1, 1), "0.1.0", 1, "raw", "engine").to_map(1), **changes})
        return self.receive()


def client_process(socket_path: str, body: str) -> subprocess.Popen:
    """A process that attaches, runs `body` (store, ns, chain), prints a line, and then waits for its stdin to close."""
    code = f"""
import sys, kvd
store = kvd.connect({socket_path!r})
ns = store.namespace(kvd.Manifest(**{MANIFEST!r}))
chain = ns.chain(list(range(64)), chunk_tokens=16)
{body}
print("ready", flush=True)
sys.stdin.read()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen, number: int = signal.SIGKILL) -> None:
    process.send_signal(number)
    process.wait(DEADLINE_S)
    process.stdin.close()
    process.stdout.close()
