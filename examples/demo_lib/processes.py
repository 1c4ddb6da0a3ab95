"""The daemon and the worker processes of the demo: started, watched, and always ended.

Runs in the parent, on its main thread, plus one timer thread for each worker's deadline. Invariant: whatever happens
in the parent short of SIGKILL (an exception, Ctrl-C, SIGTERM turned into SystemExit), no process started here
outlives the `with` block that started it. Children are in sessions of their own, so that Ctrl-C reaches the
parent alone and the order of the end is ours: workers first, then the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import kvd
from demo_lib.protocol import Job
from kvd.errors import UnavailableError

EXAMPLES = Path(__file__).resolve().parent.parent
PYTHON = (
    sys.executable,
    "-P",
)  # -P: the installed kvd, not a source tree that happens to be the current folder
READY_DEADLINE_S = 60.0
STOP_DEADLINE_S = 15.0
POLL_S = 0.02
WORKER_DEADLINE_S = 600.0
COUNTERS_DEADLINE_S = 5.0
LOG_TAIL_LINES = 25


class DemoError(Exception):
    """The demo cannot go on; the text says which part failed and shows the end of its log."""


class Listener(Protocol):
    """Who is told what a worker does."""

    def step(self, text: str) -> None: ...

    def note(self, text: str) -> None: ...


class Daemon:
    """A running daemon that belongs to this demo."""

    def __init__(self, process: subprocess.Popen[bytes], socket: Path, log: Path) -> None:
        self._process = process
        self.socket = socket
        self.log = log

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Return once a client can attach. Raises DemoError if the daemon exits or takes too long."""
        give_up = time.monotonic() + READY_DEADLINE_S
        while True:
            try:
                with self.connect():
                    return
            except UnavailableError as error:
                reason = str(error)
            with contextlib.suppress(
                subprocess.TimeoutExpired
            ):  # the pause between two tries ends early on exit
                code = self._process.wait(timeout=POLL_S)
                raise DemoError(f"the daemon exited with code {code} before it was ready\n{tail(self.log)}")
            if time.monotonic() > give_up:
                raise DemoError(
                    f"no client could attach within {READY_DEADLINE_S:.0f} s: {reason}\n{tail(self.log)}"
                )

    def connect(self) -> Any:
        """The demo's own client, for looking at the daemon's counters."""
        return kvd.connect(socket=str(self.socket), client="demo", deadline_s=1.0)

    def bytes_read(self, at_least: int = 0) -> int:
        """Bytes that clients leased for reading, as the daemon counts them; waits a little for `at_least`.

        Reading does not involve the daemon: it looks at the clients' own counters in shared memory now and then.
        """
        give_up = time.monotonic() + COUNTERS_DEADLINE_S
        with self.connect() as store:
            while True:
                counted = counted_bytes_read(store.status())
                if counted >= at_least or time.monotonic() > give_up:
                    return counted
                time.sleep(POLL_S)

    def stop(self) -> int:
        """End the daemon in order, by force if need be; its exit code (negative: the signal it died of)."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(timeout=STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def counted_bytes_read(status: Mapping[str, Any]) -> int:
    """The daemon's counter of bytes that clients leased for reading, out of its status."""
    return int(status["lookups"]["bytes_viewed"])


@contextlib.contextmanager
def daemon(folder: Path, pool_bytes: int) -> Iterator[Daemon]:
    """A daemon of our own with its socket, config and log in `folder`, ready to attach; stopped at the end.

    Raises DemoError if it does not become ready, or does not stop in order after everything else went well.
    """
    socket, log, config = folder / "kvd.sock", folder / "kvd.log", folder / "kvd.toml"
    config.write_text(config_text(socket, pool_bytes))
    # KVD_* variables are stronger than the file, and whoever runs the demo may have some for a daemon of theirs.
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVD_")}
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*PYTHON, "-m", "kvd.server.main", "serve", "--config", str(config)],
            stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file, env=env, start_new_session=True,
        )  # fmt: skip
    running = Daemon(process, socket, log)
    try:
        running.wait_ready()
        yield running
    except BaseException:
        running.stop()
        raise
    code = running.stop()
    if code != 0:
        raise DemoError(f"the daemon ended with code {code} when asked to stop\n{tail(log)}")


def config_text(socket: Path, pool_bytes: int) -> str:
    """The daemon's configuration for this demo: everything of it lives in the socket's folder."""
    server = f'[server]\nsocket = "{socket}"\nruntime_dir = "{socket.parent}"\n'
    return f"{server}\n[pool]\nsize = {pool_bytes}\n"


def run_worker(job: Job, listener: Listener, log: Path) -> dict[str, Any]:
    """Run one worker to its end; its result. Raises DemoError if it fails or misses its deadline."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",  # everything is on this machine; a slow network must not matter
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            [*PYTHON, "-m", "demo_lib.worker", job.to_json()],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log_file,
            env=env, start_new_session=True,
        )  # fmt: skip
    overdue = threading.Event()

    def end_overdue() -> None:
        overdue.set()
        process.kill()

    timer = threading.Timer(WORKER_DEADLINE_S, end_overdue)
    timer.daemon = True
    timer.start()
    try:
        result = _listen(process, listener)
        code = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    if overdue.is_set():
        raise DemoError(f"the {job.role} process took longer than {WORKER_DEADLINE_S:.0f} s\n{tail(log)}")
    if code != 0 or result is None:
        raise DemoError(f"the {job.role} process ended with code {code}\n{tail(log)}")
    return result


def _listen(process: subprocess.Popen[bytes], listener: Listener) -> dict[str, Any] | None:
    """Pass the worker's steps and notes on until it closes its output; the result, if it sent one."""
    assert process.stdout is not None
    result: dict[str, Any] | None = None
    with process.stdout:
        for line in process.stdout:
            message = json.loads(line)
            match message:
                case {"step": str(text)}:
                    listener.step(text)
                case {"note": str(text)}:
                    listener.note(text)
                case {"result": dict(values)}:
                    result = values
                case _:
                    raise DemoError(f"a worker said {message!r}, which is not part of the demo's protocol")
    return result


def kvctl(socket: Path, *arguments: str, capture: bool = False) -> str:
    """Run a kvctl command against the demo's daemon; its output if captured, else it goes where ours goes."""
    done = subprocess.run(
        [*PYTHON, "-m", "kvd.kvctl.main", *arguments],
        env=os.environ | {"KVD_SOCKET": str(socket)}, timeout=30, check=False, text=True,
        stdout=subprocess.PIPE if capture else None, stderr=subprocess.STDOUT if capture else None,
    )  # fmt: skip
    if done.returncode != 0:
        raise DemoError(f"kvctl {' '.join(arguments)} ended with code {done.returncode}\n{done.stdout or ''}")
    return done.stdout or ""


def end_on_sigterm() -> None:
    """Make SIGTERM unwind the stack like any exception, so that every `with` block ends what it started."""

    def unwind(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, unwind)


def tail(log: Path) -> str:
    """The last lines of a log, indented, or a word that there are none."""
    try:
        lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    except OSError as error:
        return f"  (no log: {error})"
    return "\n".join(f"  | {line}" for line in lines) or "  (its log is empty)"
