"""Errors that people make: each is one typed error that names thing and value and says what to do, and harms nobody.

Elsewhere: object too large, pool full of leases, lease after release, spoiled bytes (test_client.py); unknown
configuration keys, pool larger than the machine, memlock too small, malformed control frames (test_control.py); a chunk
that is not a multiple of the block (tests/unit/layout/test_layout_chain.py); clients killed (tests/faults).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvd
from kvd import limits
from kvd.clientlib.calls import Calls
from kvd.clientlib.control import Control
from kvd.config import Config, PoolConfig, resolve
from kvd.errors import (
    CapacityError,
    CompatibilityError,
    ConfigError,
    KvdError,
    LifecycleError,
    ProtocolError,
    UnavailableError,
    UsageError,
)
from kvd.layout.chain import check_chunk_tokens
from kvd.probe import memory
from kvd.server.app import check_host
from kvd.shm.messages import Cq, Sq
from kvd.wire import messages as wire

CHUNK = 16
SIZE = 4096
NOBODY = 65534
MANIFEST: dict[str, Any] = {
    "model": "m",
    "revision": "r1",
    "dtype": "bfloat16",
    "fixed": "*",
    "tenant": "",
    "salt": "",
}


def check(error: KvdError, code: str, *said: str, retry: kvd.Retry = kvd.Retry.NEVER) -> None:
    """An error has this code and advice, and its text has all these parts."""
    assert (error.code, error.retry) == (code, retry)
    for part in said:
        assert part in str(error), str(error)


@pytest.fixture
def store(daemon: Any) -> Any:
    with kvd.connect(daemon(pool={"size": "16MiB"}).socket) as opened:
        yield opened


def published(store: kvd.Store, seed: int = 1) -> tuple[kvd.Namespace, kvd.Chain]:
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(array("I", [seed, *range(2 * CHUNK - 1)]), CHUNK)
    with ns.reserve(chain, nbytes=SIZE) as writes:
        writes.fill([bytes([seed]) * SIZE] * 2)
        writes.publish()
    return ns, chain


# --- no daemon, or not for us


def test_no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "kvd.sock")
    with pytest.raises(UnavailableError) as caught:
        kvd.connect(path)
    retry = kvd.Retry.REATTACH
    check(caught.value, "KVD-UNAVAILABLE-NO-DAEMON", path, "start the daemon", "KVD_SOCKET", retry=retry)
    monkeypatch.setenv("KVD_SOCKET", path + "x")
    with pytest.raises(UnavailableError, match=r"kvd\.sockx"):
        kvd.connect()


def test_a_socket_that_a_dead_daemon_left(daemon: Any) -> None:
    running = daemon(pool={"size": "8MiB"})
    running.kill()
    with pytest.raises(UnavailableError) as caught:
        kvd.connect(running.socket)
    check(
        caught.value, "KVD-UNAVAILABLE-NO-DAEMON", running.socket, "nobody listens", "kvd serve",
        retry=kvd.Retry.REATTACH,
    )  # fmt: skip


def test_a_path_that_is_too_long() -> None:
    with pytest.raises(UsageError) as caught:
        kvd.connect("/tmp/" + "x" * 120)
    check(caught.value, "KVD-USAGE-SOCKET", "107")


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_a_socket_that_this_user_may_not_open(daemon: Any) -> None:
    running = daemon(pool={"size": "8MiB"})
    os.chmod(running.directory, 0o755)
    code = f"""
import os, kvd, kvd.clientlib.store
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
try:
    kvd.connect({running.socket!r})
except kvd.UsageError as error:
    print(error.code, error.retry, error.fields["uid"], error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert said.startswith(f"KVD-USAGE-DENIED never {NOBODY} ")
    assert running.socket in said
    assert "access.uids" in said
    assert running.call("clients") == []


def test_a_client_of_another_version(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = daemon(pool={"size": "8MiB"})
    monkeypatch.setattr(wire, "PROTOCOL_MIN", 7)
    monkeypatch.setattr(wire, "PROTOCOL_MAX", 9)
    with pytest.raises(CompatibilityError) as caught:
        kvd.connect(running.socket)
    check(caught.value, "KVD-COMPAT-PROTOCOL", kvd.__version__, "7 … 9")


def test_something_else_listens(tmp_path: Path) -> None:
    """A service that is no kvd closes the connection, or says what is no frame."""
    path = str(tmp_path / "other.sock")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        with pytest.raises(UnavailableError) as silent:
            kvd.connect(path, deadline_s=0.1)
        check(silent.value, "KVD-UNAVAILABLE-DEADLINE", path, "deadline", retry=kvd.Retry.REATTACH)


# --- the host


def test_dev_shm_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "file_system_free_bytes", lambda: 64 << 20)
    config = Config(pool=PoolConfig.model_validate({"size": "1GiB", "backing": "posix"}))
    with pytest.raises(CapacityError) as caught:
        check_host(config, resolve(config, 1 << 34, "this machine"))
    check(
        caught.value, "KVD-CAPACITY-DEV-SHM", str(1 << 30), str(64 << 20), "remount", "memfd",
        retry=kvd.Retry.AFTER,
    )  # fmt: skip


def test_a_pool_larger_than_the_control_group(tmp_path: Path) -> None:
    """The machine has enough, the container does not: the limit's file is named."""
    group = tmp_path / "sys/fs/cgroup/kvd"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 1 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/kvd/inner\n")
    (group / "memory.max").write_text(f"{1 << 30}\n")
    facts = memory.memory(tmp_path)
    with pytest.raises(ConfigError) as caught:
        resolve(
            Config(pool=PoolConfig.model_validate({"size": "2GiB"})), facts.bound_bytes, facts.bound_source
        )
    check(caught.value, "KVD-CONFIG-POOL-SIZE", str(2 << 30), str(1 << 30), "kvd/memory.max", "80%")


# --- the caller's values


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, 2, -3], ["2", "-3"]),
        ([1 << 32], ["0", str(1 << 32)]),
        ([1.5], ["float"]),
        (["7"], ["str"]),
        (np.array([1, -1], np.int64), ["1", "-1"]),
        (np.array([0.5]), ["'d'", "uint32"]),
        ("prompt", ["str"]),
    ],
)
def test_token_ids_that_cannot_be(tokens: Any, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        kvd.Chain(kvd.Manifest(**MANIFEST).root, CHUNK, "sha256").extend(tokens)
    assert caught.value.code.startswith("KVD-USAGE")
    for part in said:
        assert part in str(caught.value)


def test_a_chunk_that_is_not_a_multiple_of_the_block() -> None:
    with pytest.raises(UsageError) as caught:
        check_chunk_tokens(100, block_tokens=16)
    check(caught.value, "KVD-USAGE-CHUNK", "100", "16 tokens", "nearest is 96")


CALLS: dict[str, tuple[Callable[[kvd.Namespace, kvd.Chain], Any], str, list[str]]] = {
    "no chunk": (lambda ns, chain: ns.reserve(chain[:0], nbytes=SIZE), "KVD-USAGE-EMPTY", ["no chunk"]),
    "no size": (lambda ns, chain: ns.reserve(chain), "KVD-USAGE-MEMBERS", ["nbytes=", "members="]),
    "size 0": (lambda ns, chain: ns.reserve(chain, nbytes=0), "KVD-USAGE-SIZE", ["0 B"]),
    "split": (lambda ns, chain: ns.reserve(chain, nbytes=SIZE, split=4096), "KVD-USAGE-SPLIT", ["4096"]),
    "chunk 0": (lambda ns, chain: ns.chain([1, 2], 0), "KVD-USAGE-CHUNK", ["0", "1 …"]),
    "algorithm": (lambda ns, chain: ns.chain([1], 16, algorithm="md5"), "KVD-USAGE-ALGORITHM", ["md5", "sha256"]),
    "identities": (lambda ns, chain: ns.chain_of(b"x" * 33, 16), "KVD-USAGE-IDENTITY", ["33", "32"]),
    "batch": (
        lambda ns, chain: ns.reserve(ns.chain_of(bytes(32 * 4097), 16), nbytes=SIZE),
        "KVD-USAGE-BATCH", ["4097", str(limits.batch_items_max), "several"],
    ),
    "source": (
        lambda ns, chain: ns.reserve(ns.chain(list(range(16)), 16), nbytes=SIZE)[0].fill(b"short"),
        "KVD-USAGE-SIZE", ["5 B", f"{SIZE} B"],
    ),
    "destination": (lambda ns, chain: ns.acquire(chain).copy_to([bytearray(9)]), "KVD-USAGE-SIZE", ["9 B"]),
    "descriptor": (lambda ns, chain: ns.adopt(b"x" * 23, chain), "KVD-USAGE-ARGUMENT", ["23", "24"]),
}  # fmt: skip


def test_calls_that_cannot_be_right(store: kvd.Store) -> None:
    """Refused by name; the store goes on, and nothing stays reserved."""
    ns, chain = published(store)
    for name, (call, code, said) in CALLS.items():
        with pytest.raises(UsageError) as caught:
            call(ns, chain)
        check(caught.value, code, *said)
        del caught
        assert ns.match(chain) == 2, name
        assert store.status()["core"]["pool"]["reserved_bytes"] == 0, name


def test_writing_to_a_published_view(store: kvd.Store) -> None:
    """What is published never changes, neither through leases nor through what was writable before."""
    ns, chain = published(store)
    with ns.acquire(chain) as leases:
        with leases[0].view as view, pytest.raises(TypeError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="read-only"):
            leases[0].array(np.uint8, (SIZE,))[0] = 1
        assert bytes(leases[0].view) == b"\1" * SIZE
    fresh = ns.chain(array("I", [9, *range(CHUNK - 1)]), CHUNK)
    with ns.reserve(fresh, nbytes=SIZE) as writes:
        writes.fill([b"\2" * SIZE])
        writes.publish()
        with pytest.raises(LifecycleError) as caught:
            writes[0].view[0] = 1
        check(caught.value, "KVD-LIFECYCLE-RESERVATION-OVER", "item 0", "published")
        with pytest.raises(LifecycleError):
            writes[0].fill(b"\3" * SIZE)


def test_more_leases_than_a_client_has_room_for(daemon: Any) -> None:
    running = daemon(pool={"size": "16MiB", "families_max": 256}, clients={"hazards_max": 64})
    with kvd.connect(running.socket) as store:
        ns = store.namespace(kvd.Manifest(**MANIFEST))
        chain = ns.chain(array("I", range(100 * CHUNK)), CHUNK)
        with ns.reserve(chain, nbytes=SIZE) as writes:
            writes.fill([b"\1" * SIZE] * len(chain))
            writes.publish()
        with pytest.raises(CapacityError) as caught:
            ns.acquire(chain)
        check(caught.value, "KVD-CAPACITY-LEASES", "64", "clients.hazards_max", retry=kvd.Retry.AFTER)
        assert store.native.held == 0
        with ns.acquire(chain[:64]) as leases:
            assert len(leases) == 64


def test_a_store_that_was_closed(store: kvd.Store) -> None:
    ns, chain = published(store)
    store.close()
    for call in (lambda: ns.match(chain), lambda: ns.acquire(chain), lambda: store.fetch(chain[0])):
        with pytest.raises(UsageError) as caught:
            call()
        check(caught.value, "KVD-USAGE-CLOSED", "connect again")
    with pytest.raises(KvdError):
        ns.reserve(chain, nbytes=SIZE)


@pytest.mark.slow
def test_a_program_that_ends_without_closing(daemon: Any) -> None:
    """Nothing is lost: it ends as it would have, and what it held comes back."""
    running = daemon(pool={"size": "64MiB"})
    code = f"""
import kvd
store = kvd.connect({running.socket!r})
ns = store.namespace(kvd.Manifest(**{MANIFEST!r}))
writes = ns.reserve(ns.chain(list(range(64)), 16), nbytes=65536)
view = writes[0].view
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
    while running.call("clients"):
        pass
    assert running.call("status")["core"]["pool"]["reserved_bytes"] == 0


# --- hostile clients


def frame(kind: int, payload_bytes: int, flags: int = 0, payload: bytes = b"") -> bytes:
    return (
        payload_bytes.to_bytes(4, "little") + kind.to_bytes(2, "little") + flags.to_bytes(2, "little")
        + bytes(8) + payload
    )  # fmt: skip


HOSTILE = {  # what is in the ring, and where the cursor says it ends
    "cursor beyond the ring": (b"", 1 << 40),
    "cursor between two words": (b"", 20),
    "frame longer than what is there": (frame(Sq.PING, 4096), 64),
    "frame longer than the ring": (frame(Sq.PING, 0xFFFFFFF0), 64),
    "flags nobody knows": (frame(Sq.PING, 0, flags=7), 16),
    "pad that leaves the ring": (frame(0xFFFF, 0), 16),
    "message nobody knows": (frame(99, 0), 16),
    "ping with a payload": (frame(Sq.PING, 8, payload=b"12345678"), 24),
    "reserve cut short": (frame(Sq.RESERVE, 8, payload=bytes(8)), 24),
    "reserve of nothing": (frame(Sq.RESERVE, 56, payload=bytes(56)), 72),
    "publish whose count lies": (frame(Sq.PUBLISH, 16, payload=bytes(12) + b"\xff" * 4), 32),
    "abort cut short": (frame(Sq.ABORT, 8, payload=bytes(8)), 24),
}


def test_hostile_ring_contents_end_their_client_only(daemon: Any) -> None:
    """Each is disconnected and told why; its neighbour reads and writes on."""
    running = daemon(pool={"size": "16MiB"}, clients={"max": 32})
    with kvd.connect(running.socket) as good:
        ns, chain = published(good)
        leases = ns.acquire(chain)
        for number, (name, (content, tail)) in enumerate(HOSTILE.items(), 1):
            control = Control(running.socket, name="bad", role="engine", deadline_s=5)
            _, fds = control.attach(wire.Attach(), deadline_s=5)
            with mmap.mmap(fds[1], 0) as region:
                ring = int.from_bytes(region[32:40], "little")
                region[ring : ring + len(content)] = content
                region[192:200] = tail.to_bytes(8, "little")
            os.write(fds[2], b"\1")
            with pytest.raises(ProtocolError) as caught:
                while True:
                    control.request(wire.Call("health", {}), wire.Result, deadline_s=5)
            check(caught.value, "KVD-PROTOCOL-RING")
            for fd in fds:
                os.close(fd)
            control.close()
            assert running.call("status")["counters"]["client_protocol_errors"] == number, name
            published(good, seed=number + 1)
        assert [bytes(lease.view) for lease in leases] == [b"\1" * SIZE] * 2
        leases.release()
        assert running.call("status")["core"]["pool"]["reserved_bytes"] == 0


def test_hazards_that_name_nothing_harm_nobody(daemon: Any) -> None:
    """A client may write any hazard: at worst it holds what it could have leased."""
    running = daemon(pool={"size": "16MiB"})
    with kvd.connect(running.socket) as good:
        ns, chain = published(good)
        control = Control(running.socket, name="bad", role="engine", deadline_s=5)
        _, fds = control.attach(wire.Attach(), deadline_s=5)
        with mmap.mmap(fds[1], 0) as region:
            hazards = int.from_bytes(region[72:80], "little")
            region[128:132] = b"\xff" * 4
            for at, word in enumerate((1 << 63 | 5, 0xFFFFFFFF, 9 << 32 | 1, 1 << 32 | 0x7FFFFFFF)):
                region[hazards + 8 * at : hazards + 8 * at + 8] = word.to_bytes(8, "little")
        assert running.call("clear")["families"] == 2
        assert sum(row["leases"] for row in running.call("clients")) == 0
        assert ns.match(chain) == 0
        published(good)
        for fd in fds:
            os.close(fd)
        control.close()


def test_attaching_takes_no_memory_that_the_daemon_left_alone(daemon: Any) -> None:
    """A pool that is populated when it is used stays empty, although clients map ahead what is there."""
    running = daemon(pool={"size": "64MiB", "populate": "lazy"})

    def backed_bytes() -> int:
        found = 0
        for one in Path(f"/proc/{running.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # connections come and go
                if "kvd-pool" in os.readlink(one):
                    found = max(found, 512 * os.stat(one).st_blocks)
        return found

    with kvd.connect(running.socket) as store:
        published(store)
        store.present_session.mapper.join()
        assert 0 < backed_bytes() < 8 << 20


class SlowRings:
    """Rings of a daemon that answers when the test says so."""

    def __init__(self) -> None:
        self.asked: queue.Queue[int] = queue.Queue()
        self.answers: queue.Queue[tuple[int, int, bytes]] = queue.Queue()
        self.changed = threading.Event()

    def submit(self, type: int, op: int, payload: bytes, /) -> int:
        self.asked.put(op)
        return 1

    def answer(self, op: int) -> None:
        self.answers.put((Cq.PONG, op, b""))
        self.changed.set()

    def poll(self, frames_max: int, /) -> list[tuple[int, int, bytes]]:
        self.changed.clear()
        return [self.answers.get() for _ in range(self.answers.qsize())]

    def wait(self, wake_fd: int, timeout_ns: int, stir_fd: int, /) -> int:
        return int(self.changed.wait(timeout_ns / 1e9))

    def may_sleep(self) -> bool:
        return self.answers.empty()

    def awake(self) -> None:
        return


@pytest.mark.slow
def test_a_call_that_is_not_answered_does_not_hold_up_another() -> None:
    """One thread waits for both; the other has its answer at once, not when the first gives up."""
    rings = SlowRings()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        calls = Calls(rings, ours)
        results: list[object] = []

        def ask(deadline_s: float) -> None:
            try:
                results.append(calls.call(Sq.PING, b"", deadline_s))
            except UnavailableError as error:
                results.append(error)

        first = threading.Thread(target=ask, args=(3,))
        first.start()
        rings.asked.get(timeout=5)
        second = threading.Thread(target=ask, args=(60,))
        second.start()
        rings.answer(rings.asked.get(timeout=5))
        second.join(2)
        assert results == [(Cq.PONG, b"")]
        first.join()
        assert isinstance(results[1], UnavailableError)
