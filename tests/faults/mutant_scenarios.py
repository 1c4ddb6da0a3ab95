"""One concrete story for each safety mechanism of the native code: SCENARIO, on the testing build.

Each plays daemon and clients over a miniature domain (tests/unit/shm/shm_world.py) and ends by printing "safe" or what
went wrong. With the mechanism left out (KVD_MUTANT) the same story must go wrong. Object n is filled with byte n.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
from array import array
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
sys.path.append(str(Path(__file__).resolve().parent.parent / "unit" / "shm"))

import native_build
from shm_world import OBJECT_BYTES, World, numbers, u32, u64

from kvd.shm import _native

A, B = bytes([1]) * 32, bytes([2]) * 32
ONE_OBJECT = array("H", [0, 8, 4, 36]).tobytes()


def object_of(number: int) -> bytes:
    return bytes([number]) * OBJECT_BYTES


def rewrite(world: World, entry: int, number: int, key: bytes) -> None:
    """Entry and memory of object 0, which has left, are given to another key and filled with `number`."""
    world.table.reserve(0, 1, u32(0), u64(0), u64(OBJECT_BYTES), bytes(1), ONE_OBJECT)
    world.table.memory(0, 0, OBJECT_BYTES)[:] = object_of(number)
    status, *_ = world.table.publish(0, key, bytes(1), 0, 1, u32(0), u64(5), u32(entry))
    assert status == b"\0"


def paused_reader(world: World) -> str:
    """A reader stops between finding A and storing its hazard; A leaves, B takes its place; the reader goes on."""
    _, fd = world.region()
    fds = [world.meta, fd, world.segment]
    world.put(A)
    command = native_build.command(Path(_native.__file__), __file__, "reader", *map(str, fds))
    reader = subprocess.Popen(
        command, pass_fds=fds, stdout=subprocess.PIPE, env={**os.environ, "KVD_STOP_AT": "lease.found"}
    )
    assert os.WIFSTOPPED(os.waitpid(reader.pid, os.WUNTRACED)[1])
    assert world.evict(0) == ([0], [])
    rewrite(world, 0, 9, B)
    reader.send_signal(signal.SIGCONT)
    said, _ = reader.communicate(timeout=60)
    read = json.loads(said)
    if read is None or bytes.fromhex(read) == object_of(0):
        return "safe"
    return f"under key A a reader got {read[:16]}…, which is B's"


def reader(meta: int, region: int, segment: int) -> None:
    """The reader of `paused_reader`: what it gets for A, null for a miss."""
    client = _native.Client(meta, region, [segment], False)
    leases = client.acquire(A)
    print(json.dumps(bytes(leases[0].view()).hex() if len(leases) else None), flush=True)


def leased_family(world: World) -> str:
    """A is leased and looked at while the daemon wants its place."""
    _, client = world.client()
    world.put(A)
    leases = client.acquire(A)
    view = leases[0].view()
    freed, _ = world.evict(0)
    if freed:
        rewrite(world, 0, 9, B)
    return "safe" if bytes(view) == object_of(0) else "bytes changed under a lease"


def released_under_a_view(world: World) -> str:
    """A lease is released while a view of it lives; the daemon wants its place."""
    _, client = world.client()
    world.put(A)
    leases = client.acquire(A)
    view = leases[0].view()
    with contextlib.suppress(BufferError):
        leases.release()
    freed, _ = world.evict(0)
    if freed:
        rewrite(world, 0, 9, B)
    return "safe" if bytes(view) == object_of(0) else "bytes changed under a view"


def equal_tags(world: World) -> str:
    """Another key falls into the same buckets under the same tag."""
    _, client = world.client()
    world.put(A)
    twin = A[:16] + bytes([7]) * 16
    if client.match(twin) or len(client.acquire(twin)) or client.fetch(twin) is not None:
        return "a key that was never stored is answered with another key's bytes"
    return "safe" if client.match(A) == 1 else "A is not found"


def foreign_publish(world: World) -> str:
    """Client 1 publishes what client 0 reserved and is still filling."""
    world.client(0)
    _, other = world.client(1)
    world.reserve([0], owner=0)
    world.table.memory(0, 0, OBJECT_BYTES)[: OBJECT_BYTES // 2] = object_of(9)[: OBJECT_BYTES // 2]
    try:
        world.table.publish(1, A, bytes(1), 0, 1, u32(0), u64(5), u32(0))
    except RuntimeError:
        return "safe" if other.match(A) == 0 else "refused and visible all the same"
    return "half-written bytes of another client are visible"


def hostile_tail(world: World) -> str:
    """A client sets its cursor far beyond what it wrote."""
    region, fd = world.region()
    with mmap.mmap(fd, 4096) as header:
        header[192:200] = (1 << 40).to_bytes(8, "little")
    try:
        frames = region.pop(4)
    except ValueError:
        return "safe"
    return f"{len(frames)} frames that nobody sent were believed"


def hostile_length(world: World) -> str:
    """A frame claims to go on past the end of its ring, into the ring of answers."""
    region, fd = world.region()
    with mmap.mmap(fd, 0) as memory:
        ring, other = (int.from_bytes(memory[at : at + 8], "little") for at in (32, 40))
        memory[ring : ring + 16] = (other - ring + 64).to_bytes(4, "little") + b"\4\0\0\0" + bytes(8)
        memory[other : other + 8] = b"answers!"
        memory[192:200] = (64).to_bytes(8, "little")
    try:
        frames = region.pop(1)
    except ValueError:
        return "safe"
    return f"a frame of {len(frames[0][2])} bytes was read past the end of its ring"


def fenced_reader(world: World) -> str:
    """Only for the fences: stops before the fence (KVD_STOP_AT=lease.hazard), then ends."""
    _, client = world.client()
    world.put(A)
    return "safe" if len(client.acquire(A)) == 1 else "not found"


def fenced_daemon(world: World) -> str:
    """Only for the fences: stops before the fence (KVD_STOP_AT=evict.marked), then ends."""
    world.client()
    world.put(A)
    return "safe" if numbers(world.table.evict(u32(0), False).freed) == [0] else "not freed"


SCENARIOS = (
    paused_reader, leased_family, released_under_a_view, equal_tags, foreign_publish, hostile_tail,
    hostile_length, fenced_reader, fenced_daemon,
)  # fmt: skip

if __name__ == "__main__":
    if sys.argv[1] == "reader":
        reader(*map(int, sys.argv[2:]))
    else:
        print({one.__name__: one for one in SCENARIOS}[sys.argv[1]](World()))
