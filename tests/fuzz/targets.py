"""What is fuzzed: each target takes bytes, and may end only by returning or by the errors that are its contract.

    frames    the control socket: bytes in any pieces → messages or ProtocolError
    payloads  the payloads of ring messages, both directions
    config    a configuration file → Config or ConfigError
    ring      what a client writes into its region → served or disconnected; the books stay right, others unharmed
    meta      META, CLIENT and POOL as a client reads them, damaged or of another version → an error, a miss, or bytes
    adopt     META as a later daemon takes it over, damaged → refused, dropped or adopted; the new table works
    restart   all that a daemon left, damaged, and the next daemon (restarts.py) → adopted or dropped with a reason

Used by fuzz.py (random, or guided by coverage with atheris) and test_fuzz.py. What they do natively is fuzzed a second
time without Python by tests/native/fuzz_*.cpp. `SEEDS` are inputs that make sense, to start from.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import mmap
import os
import random
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "unit" / "shm")]

import msgpack  # noqa: E402
import structlog  # noqa: E402
from shm_world import World  # noqa: E402

from kvd.config import Config  # noqa: E402
from kvd.errors import ConfigError, ProtocolError  # noqa: E402
from kvd.shm import _native, messages  # noqa: E402
from kvd.shm.layout import OFFSETS, SIZES  # noqa: E402
from kvd.types import Member  # noqa: E402
from kvd.wire import frames as wire_frames  # noqa: E402
from kvd.wire import messages as wire  # noqa: E402

EDIT = struct.Struct("<IBQ")  # offset, width 1 … 8 (its low three bits + 1), value
OPEN_ERRORS = (RuntimeError, ValueError, OSError)  # of opening regions that cannot be right
READ_ERRORS = (RuntimeError, ValueError, IndexError, BufferError)


# --- bytes that are parsed


def frames(data: bytes) -> None:
    """The first byte says into which pieces the rest is cut."""
    decoder = wire_frames.Decoder()
    step = 1 + data[0] if data else 1
    try:
        for at in range(1, len(data), step):
            for message in decoder.feed(data[at : at + step]):
                with contextlib.suppress(ProtocolError):
                    wire.parse_ask(message)
    except ProtocolError:
        return


PARSERS: tuple[Callable[[bytes], object], ...] = (
    messages.parse_reserve, messages.parse_publish, messages.parse_abort, messages.parse_reserved,
    messages.parse_published, messages.parse_error,
)  # fmt: skip


def payloads(data: bytes) -> None:
    """The first byte chooses the parser."""
    if data:
        with contextlib.suppress(ProtocolError):
            PARSERS[data[0] % len(PARSERS)](data[1:])


def config(data: bytes) -> None:
    """A file, and half of it as the value of an environment variable."""
    fd = os.memfd_create("config")
    try:
        os.write(fd, data)
        path = Path(f"/proc/self/fd/{fd}")
        with contextlib.suppress(ConfigError):
            Config.load(path, {}).describe()
        text = data[len(data) // 2 :].decode("utf-8", "replace")
        for name in ("KVD_POOL_SIZE", "KVD_ACCESS_UIDS", "KVD_CLIENTS_LEASED_MAX"):
            with contextlib.suppress(ConfigError):
                Config.load(None, {name: text}).describe()
    finally:
        os.close(fd)


# --- what a client can write


class Server:
    """A domain with one good client, and a slot in which a hostile one is put for each input."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        make = _server_world()
        further = (
            len(inspect.signature(make).parameters) - 3
        )  # sections of the configuration, as they are by default
        self.world = make(self.loop, {}, {"max": 3}, *[{} for _ in range(further)])
        self.world.guard = self.guard
        self.good = self.world.attach(name="good")
        self.inputs = 0

    def guard(self, call: Callable[..., None], *args: object) -> None:
        call(*args)

    def serve(self, client: Any) -> None:
        self.world.runner.drain(client)
        for _ in range(10_000):
            if not client.draining:
                return
            self.loop.run_until_complete(asyncio.sleep(0))
        raise AssertionError("one input keeps the daemon busy for ever")


def _server_world() -> Any:
    """The world of tests/unit/server: its file has the name of every conftest, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location("server_conftest", HERE.parent / "unit/server/conftest.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.World


@cache
def server() -> Server:
    # What it says of thousands of hostile clients is not wanted.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    return Server()


def ring(data: bytes) -> None:
    """Edits of the region, then frames: 0xFF, u16 bytes …, or type, u16 bytes, payload. Then it is served and dies."""
    one = server()
    hostile = one.world.attach(name="hostile")
    client = hostile.client
    namespaces = one.world.domain.namespaces
    namespaces.tell(client.peer, one.world.namespace)  # or nothing that it reserves would go further
    try:
        with mmap.mmap(client.region_fd, 0) as region:
            for kind, payload in pieces(data):
                if kind == 0xFF:
                    for at, width, value in edits(payload, len(region)):
                        region[at : at + width] = value.to_bytes(8, "little")[:width]
                else:
                    with contextlib.suppress(ValueError, RuntimeError):
                        hostile.native.submit(kind % 8, kind, payload)
            one.serve(client)
            with contextlib.suppress(*READ_ERRORS):
                hostile.native.poll(64)
        one.world.domain.table.held(client.slot)
        one.world.runner.tick()
    finally:
        one.world.clients._on_exit(client)
        namespaces.let_go(client.peer)
        one.world.attached.remove(hostile)
        hostile.close()
    one.inputs += 1
    key = one.inputs.to_bytes(8, "little") + bytes(24)
    if one.inputs % 64 == 0:
        one.world.domain.core.validate()
        one.good.store([key])
        assert one.good.native.match(key) == 1, "the other client is served as before"


def pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(kind, payload) of each piece: kind u8, u16 bytes, payload."""
    at = 0
    while at + 3 <= len(data):
        kind, size = struct.unpack_from("<BH", data, at)
        yield kind, data[at + 3 : at + 3 + size]
        at += 3 + size


def edits(data: bytes, size: int) -> Iterator[tuple[int, int, int]]:
    """(offset, width, value) of each edit that lies within `size` bytes; offsets beyond are folded into it."""
    for offset, width, value in EDIT.iter_unpack(data[: len(data) // EDIT.size * EDIT.size]):
        width = width % 8 + 1
        yield offset % (size - 8), width, value


# --- what a client, or a later daemon, reads


class Reading:
    """A world of some families, and META, CLIENT and POOL of it as bytes, to be damaged again and again."""

    def __init__(self) -> None:
        self.world = World(families=32)
        rng = random.Random(5)
        self.keys = b"".join(rng.randbytes(32) for _ in range(24))
        self.world.put(self.keys)
        self.world.evict(3, 9)
        region, fd = self.world.region(0)
        self.region = region
        self.images = [read_all(self.world.meta), read_all(fd)]

    def damaged(self, number: int, data: bytes) -> int:
        """A copy of META (0) or CLIENT (1) with edits, as a descriptor."""
        image = bytearray(self.images[number])
        for at, width, value in edits(data, len(image)):
            image[at : at + width] = value.to_bytes(8, "little")[:width]
        fd = os.memfd_create("damaged", os.MFD_ALLOW_SEALING)
        os.write(fd, image)
        return fd


def read_all(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


@cache
def reading() -> Reading:
    return Reading()


def meta(data: bytes) -> None:
    """The first byte splits the edits between META and CLIENT. Then all that a client does, on what came of them."""
    one = reading()
    middle = (len(data) - 1) * (data[0] if data else 0) // 255 // EDIT.size * EDIT.size + 1 if data else 0
    fds = [one.damaged(0, data[1:middle]), one.damaged(1, data[middle:])]
    try:
        client = _native.Client(fds[0], fds[1], [one.world.segment], False)
    except OPEN_ERRORS:
        return
    finally:
        for fd in fds:
            os.close(fd)
    for use in (_match, _lease, _fetch, _adopt_leases, _rings):
        with contextlib.suppress(*READ_ERRORS):
            use(client, one.keys)
    with contextlib.suppress(*READ_ERRORS):
        client.close()


def _match(client: _native.Client, keys: bytes) -> None:
    client.match(keys)
    client.present(keys)


def _lease(client: _native.Client, keys: bytes) -> None:
    with client.acquire_each(keys) as batch:
        for lease in batch:
            for member in (0, 1, 127):
                with contextlib.suppress(*READ_ERRORS):
                    _touch_all(lease.view(member))
                    lease.heads(member)
        batch.columns(0)


def _touch_all(view: memoryview) -> None:
    """Read every byte: one that is not there ends the process."""
    assert view.readonly
    bytes(view)


def _fetch(client: _native.Client, keys: bytes) -> None:
    for at in range(0, len(keys), 32):
        lease = client.fetch(keys[at : at + 32])
        if lease is not None:
            _touch_all(lease.view())
            lease.release()


def _adopt_leases(client: _native.Client, keys: bytes) -> None:
    with client.acquire(keys) as batch:
        exported = batch.export()
        client.adopt(exported).release()


def _rings(client: _native.Client, _keys: bytes) -> None:
    client.submit(4, 1, b"")
    client.poll(16)
    client.counters()


def adopt(data: bytes) -> None:
    """META is damaged, then taken over; what was taken over is looked up, evicted and written anew."""
    from test_adopt import Next

    one = reading()
    later = Next(one.world)
    try:
        for at, width, value in edits(data, len(later.map)):
            later.map[at : at + width] = value.to_bytes(8, "little")[:width]
        try:
            later.adopt()
        except (*OPEN_ERRORS, MemoryError):
            return
        found = memoryview(later.table.scan(0, one.world.families)).cast("I")
        for entry in found:
            for member in later.table.entry(entry)["members"]:
                bytes(later.table.memory(0, member["place"] & 0xFFFFFFFFFFFF, member["size_bytes"]))
        later.found(one.keys)
        out = later.table.evict(bytes(found), False)
        assert len(out.freed) == len(bytes(found)), "nobody holds anything"
    finally:
        later.close()


def restart(data: bytes) -> None:
    """See restarts.py: imported only here, since what is imported is what atheris instruments, for minutes."""
    import restarts

    restarts.restart(data)


def _seed_restart() -> list[bytes]:
    import restarts

    return restarts.seeds()


# --- to start from


def _seed_frames() -> list[bytes]:
    hello = wire.Hello((wire.PROTOCOL_MIN, wire.PROTOCOL_MAX), "0.1.0", wire.LAYOUT_VERSION, "fuzz", "engine")
    asks = [hello, wire.Attach("default", "write"), wire.Call("ls", {"limit": 3}), wire.Detach()]
    framed = b"".join(wire_frames.encode(ask.to_map(number + 1)) for number, ask in enumerate(asks))
    return [b"\xff" + framed, b"\x02" + framed, b"\x00" + wire_frames.encode({"id": 1, "t": "call"})]


def _reserve(keys: bytes = bytes(range(32)) * 2) -> bytes:
    ask = messages.Reserve(7, 1, 0, 1, False, messages.NO_PARENT, (Member(0, 4096),), keys)
    return bytes(messages.pack_reserve(ask))


def _publish() -> bytes:
    return bytes(messages.pack_publish(1, 0, array("Q", [7, 7]), b"\1\1"))


def _piece(kind: int, payload: bytes) -> bytes:
    return struct.pack("<BH", kind, len(payload)) + payload


def _seed_ring() -> list[bytes]:
    write = _piece(1, _reserve()) + _piece(2, _publish()) + _piece(3, struct.pack("<QII", 1, 0, 2))
    client = OFFSETS["ClientHeader"]
    tails = [
        EDIT.pack(client[name], 7, value)
        for name in ("sq_tail", "cq_head", "touch_tail")
        for value in (8, 1 << 40)
    ]
    return [
        write,
        write + _piece(0xFF, b"".join(tails)),
        *[_piece(4, b"") + _piece(0xFF, tail) for tail in tails],
    ]


def _seed_meta() -> list[bytes]:
    """Each field of each structure once, of the header and of the first rows."""
    header = OFFSETS["MetaHeader"]
    image = reading().images[0]
    found = [b"\xff"]
    for name, at in header.items():
        found.append(b"\xff" + EDIT.pack(at, 3, 0xFFFFFFFF) + EDIT.pack(at, 7, 1))
        if name.endswith("_offset"):
            found.append(b"\xff" + EDIT.pack(at, 7, len(image)))
    for table, structure in (
        ("entries", "Entry"),
        ("records", "Record"),
        ("cold", "Cold"),
        ("segments", "Segment"),
    ):
        if f"{table}_offset" not in header or structure not in OFFSETS:
            continue
        (begin,) = struct.unpack_from("<Q", image, header[f"{table}_offset"])
        for at in OFFSETS[structure].values():
            place = begin + SIZES[structure] * 2 + at
            found.append(b"\xff" + EDIT.pack(place, 3, 0x7FFFFFFF) + EDIT.pack(place + 4, 1, 0x1234))
    for at in OFFSETS["ClientHeader"].values():
        found.append(b"\x00" + EDIT.pack(at, 7, 1 << 33))
    return found


TARGETS: dict[str, Callable[[bytes], None]] = {
    "frames": frames, "payloads": payloads, "config": config, "ring": ring, "meta": meta, "adopt": adopt,
    "restart": restart,
}  # fmt: skip
SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "frames": _seed_frames,
    "payloads": lambda: [
        b"\0" + _reserve(),
        b"\1" + _publish(),
        b"\5" + msgpack.packb({"code": "KVD-USAGE"}),
    ],
    "config": lambda: [
        b'[pool]\nsize = "80%"\n[clients]\nmax = 3\nleased_max = "none"\n',
        b'[access]\nuids = [1, 2]\n[server]\nsocket = "/run/x"\nstop_timeout_s = 1.5\n',
        b"[objects]\nstrict_duplicates = true\nverify_sample = 10\n[eviction]\npolicy = 'lru'\n",
    ],
    "ring": _seed_ring,
    "meta": _seed_meta,
    "adopt": lambda: [seed[1:] for seed in _seed_meta() if seed[0]],
    "restart": _seed_restart,
}
