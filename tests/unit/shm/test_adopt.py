"""A new META built from an old one: each row of the table in docs/design/restart.md, and METAs that are damaged."""

from __future__ import annotations

import mmap
import os
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from shm_world import EPOCH, OBJECT_BYTES, World, numbers, u8, u32, u64

from kvd.shm import _native
from kvd.shm.layout import OFFSETS, SIZES, ClientState, EntryState

NONE = 0xFFFFFFFF
FRAME = 2 << 20


def key(keys: bytes, number: int) -> bytes:
    return keys[32 * number : 32 * number + 32]


class Next:
    """A daemon's tables started over those of a world. `old` is a writable copy of its META, to be damaged."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.old_fd = os.memfd_create("old", os.MFD_CLOEXEC)
        size = os.fstat(world.meta).st_size
        os.ftruncate(self.old_fd, size)
        with mmap.mmap(world.meta, size, mmap.MAP_SHARED, mmap.PROT_READ) as source:
            os.pwrite(self.old_fd, source[:], 0)
        self.map = mmap.mmap(self.old_fd, size)
        self.fds = [self.old_fd]
        self.adopted: dict[str, Any] = {}

    def at(self, table: str, row: int, structure: str, field: str = "") -> int:
        """Where a field lies in the old META."""
        begin = self.u64(OFFSETS["MetaHeader"][f"{table}_offset"])
        return begin + row * SIZES[structure] + (OFFSETS[structure][field] if field else 0)

    def u64(self, at: int) -> int:
        return int.from_bytes(self.map[at : at + 8], "little")

    def put(self, at: int, value: int, width: int) -> None:
        self.map[at : at + width] = value.to_bytes(width, "little")

    def entry(self, row: int, field: str, value: int, width: int) -> None:
        self.put(self.at("entries", row, "Entry", field), value, width)

    def record(self, row: int, field: str, value: int, width: int) -> None:
        self.put(self.at("records", row, "Record", field), value, width)

    def cold(self, row: int, parent: int, generation: int) -> None:
        self.put(self.at("cold", row, "Cold", "parent_entry"), parent, 4)
        self.put(self.at("cold", row, "Cold", "parent_generation"), generation, 4)

    def adopt(
        self, ghosts: dict[int, int] | None = None, *, kept: bytes = b"\1", slots: Any = None
    ) -> dict[str, Any]:
        """Build the new table. `ghosts`: old slot -> descriptor of its region."""
        old = _native.Adoption(self.old_fd)
        clients = self.world.clients
        meta = os.memfd_create("new", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.fds.append(meta)
        self.meta = meta
        self.table = _native.Table(
            meta, families_max=old.families_max, records_max=old.records_max,
            segment_bytes=[segment[0] for segment in old.segments], clients_max=2 * clients, epoch=EPOCH + 1,
            boot_id=old.boot_id, bucket_seed=7, pid=os.getpid(), start_ticks=1,
        )  # fmt: skip
        for segment, is_kept in enumerate(kept):
            if is_kept:
                self.table.map_segment(segment, self.world.segment)
        now = array("I", [NONE] * old.clients_max)
        for old_slot, fd in (ghosts or {}).items():
            now[old_slot] = clients + old_slot
            old.attach_ghost(self.table, old_slot, now[old_slot], fd)
        sizes = numbers64(old.sizes())
        # As the daemon says it: what is larger than a segment has no slot.
        placed = slots or (lambda size: (-(-size // 64) * 64, 1) if size <= FRAME else (0, 0))
        self.adopted = old.adopt(
            self.table, segments_kept=kept, slot_bytes=u64(*(placed(size)[0] for size in sizes)),
            slab_frames=u32(*(placed(size)[1] for size in sizes)), ghosts=now, frame_bytes=FRAME, namespaces_count=9,
        )  # fmt: skip
        self.table.set_state(1)
        return self.adopted

    def client(self, slot: int = 0) -> _native.Client:
        """A client of the new daemon."""
        fd = self.world.memfd("new client")
        region = _native.Region(
            fd, slot=slot, epoch=EPOCH + 1, sq_bytes=4096, cq_bytes=4096, touch_records=16, hazards_max=64
        )
        self.table.attach(slot, region, os.getpid(), 1, 200 + slot, 5)
        return _native.Client(self.meta, fd, [self.world.segment], False)

    def found(self, keys: bytes) -> list[int]:
        return numbers(self.table.probe(keys, b"\0")[0])

    def close(self) -> None:
        self.map.close()
        for fd in self.fds:
            os.close(fd)


def numbers64(column: bytes) -> list[int]:
    return list(memoryview(column).cast("Q"))


@pytest.fixture
def big(make_world: Callable[..., World]) -> World:
    """A world whose pool is a whole frame."""
    return make_world(families=FRAME // OBJECT_BYTES, hazards=64)


@pytest.fixture
def after(big: World) -> Iterator[Callable[[], Next]]:
    made: list[Next] = []

    def make() -> Next:
        made.append(Next(big))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ready_families_keep_number_generation_and_bytes(big: World, after: Any, keys: bytes) -> None:
    big.put(keys[: 32 * 8])
    big.evict(2)
    big.put(key(keys, 9), 2)  # generation 2 now
    one = after()
    adopted = one.adopt()
    assert (adopted["families"], adopted["damaged"], adopted["not_kept"]) == (8, 0, 0)
    assert one.found(keys[: 32 * 10]) == [0, 1, NONE, 3, 4, 5, 6, 7, NONE, 2]
    for entry in range(8):
        new, old = one.table.entry(entry), big.table.entry(entry)
        assert new == old
    client = one.client()
    lease = client.fetch(key(keys, 9))
    assert bytes(lease.view()) == bytes([2]) * OBJECT_BYTES
    assert one.table.evict(u32(2, 3), False).held == u32(2)


def test_the_new_table_goes_on_where_the_old_one_was(big: World, after: Any, keys: bytes) -> None:
    """Free numbers, records and slots are what nobody has; a generation never goes back."""
    big.put(keys[: 32 * 3])
    big.evict(1)
    one = after()
    adopted = one.adopt()
    assert numbers(adopted["free_entries"]) == [1]
    assert numbers(adopted["free_records"]) == [1]
    assert (adopted["entries_end"], adopted["records_end"]) == (3, 3)
    ((frame, slot_bytes, owners, free, fresh, reserved),) = adopted["slabs"]
    assert (frame, slot_bytes, reserved) == (0, OBJECT_BYTES, 0)
    assert numbers(owners)[:4] == [0, NONE, 2, NONE]
    assert numbers64(free) == [OBJECT_BYTES]
    assert fresh == FRAME // OBJECT_BYTES - 3
    one.table.reserve(
        0, 1, u32(1), u64(OBJECT_BYTES), u64(OBJECT_BYTES), b"\0", array("H", [0] * 4).tobytes()
    )
    one.table.publish(0, key(keys, 5), b"\0", 0, 1, u32(1), u64(1), u32(1), 3, u32(2))
    entry = one.table.entry(1)
    assert (entry["generation"], entry["namespace"], entry["parent"]) == (2, 3, (2, 1))


@pytest.mark.parametrize("state", [EntryState.EVICTING, EntryState.WRITING])
def test_a_daemon_that_died_between_two_states(
    big: World, after: Any, keys: bytes, state: EntryState
) -> None:
    """EVICTING is whole: nobody had reused it. WRITING is not believed, and its record is free."""
    big.put(keys[: 32 * 2])
    one = after()
    one.entry(1, "sg", 1 << 8 | state, 8)
    adopted = one.adopt()
    whole = state is EntryState.EVICTING
    assert one.found(keys[:64]) == [0, 1 if whole else NONE]
    assert one.table.entry(1)["generation"] == 1
    assert adopted["records_end"] == (2 if whole else 1)


def test_withdrawn_families_come_back_in_limbo(big: World, after: Any, keys: bytes) -> None:
    _, fd = big.region()
    client = _native.Client(big.meta, fd, [big.segment], False)
    big.put(keys[: 32 * 2])
    lease = client.fetch(key(keys, 1))
    assert big.evict(1, withdraw=True) == ([], [1])
    one = after()
    adopted = one.adopt({0: fd})
    assert (adopted["withdrawn"], numbers(adopted["limbo"])) == (1, [1])
    assert one.found(keys[:64]) == [0, NONE]
    assert numbers(one.table.evict(u32(1), True).held) == [1]
    lease.release()
    assert numbers(one.table.evict(u32(1), True).freed) == [1]


def test_a_ghost_holds_what_it_leased_and_leases_nothing_more(big: World, after: Any, keys: bytes) -> None:
    """Without `revoked` in the reader's second look it would take a lease that nobody honours (KVD_MUTANT=REVOKED)."""
    _, fd = big.region(1)
    client = _native.Client(big.meta, fd, [big.segment], True)
    big.put(keys[: 32 * 3])
    lease = client.fetch(key(keys, 0))
    view = lease.view()
    one = after()
    assert client.match(keys[:96]) == 3
    one.adopt({1: fd})
    assert one.table.held(5) == (1, OBJECT_BYTES)
    assert one.table.holders(0) == [5]
    assert client.lost
    assert client.match(keys[:96]) == 0
    assert len(client.acquire(keys[:96])) == 0
    assert len(client.acquire_each(keys[:96])) == 0
    assert client.fetch(key(keys, 1)) is None
    assert client.present(keys[:32]) == bytes(24)
    assert numbers(one.table.evict(u32(0, 1), False).freed) == [1]
    assert bytes(view) == bytes([0]) * OBJECT_BYTES
    client.retire()
    assert not client.left
    view.release()
    lease.release()
    assert client.left
    assert numbers(one.table.evict(u32(0), False).freed) == [0]
    one.table.detach(5)


def test_what_a_ghost_may_be_writing_is_reserved(big: World, after: Any, keys: bytes) -> None:
    """PENDING of a living client is quarantined under its ghost; of a dead one it is free."""
    _, fd = big.region(0)
    big.region(1)
    big.put(keys[:32])
    big.reserve([1, 2], owner=0)
    big.reserve([3], owner=1)
    one = after()
    adopted = one.adopt({0: fd})
    assert adopted["pending"] == 2
    assert numbers(adopted["ghost_slots"]) == [4, 4]
    assert numbers(adopted["ghost_records"]) == [1, 2]
    assert numbers64(adopted["ghost_places"]) == [OBJECT_BYTES, 2 * OBJECT_BYTES]
    assert adopted["records_end"] == 3
    ((_, _, owners, free, fresh, reserved),) = adopted["slabs"]
    assert (numbers(owners)[:3], free, reserved) == ([0, NONE, NONE], b"", 2)
    assert fresh == FRAME // OBJECT_BYTES - 3
    with pytest.raises(RuntimeError, match="not pending of owner 0"):
        one.table.publish(0, key(keys, 1), b"\0", 0, 1, u32(1), u64(1), u32(1))
    one.table.free_records(u32(1, 2))


def test_a_writable_view_keeps_a_retired_client_from_having_left(big: World, after: Any) -> None:
    _, fd = big.region(0)
    client = _native.Client(big.meta, fd, [big.segment], True)
    slot = client.writable(0, OBJECT_BYTES)
    view = slot.view
    client.retire()
    assert not client.left
    view[:] = bytes(OBJECT_BYTES)  # still its memory
    with pytest.raises(RuntimeError, match="daemon that this belonged to is gone"):
        client.writable(0, OBJECT_BYTES)
    view.release()
    del view, slot
    assert client.left


def families_with_parents(big: World, keys: bytes, parents: list[int], namespaces: list[int]) -> None:
    count = len(parents)
    big.reserve(list(range(count)))
    for number, (parent, namespace) in enumerate(zip(parents, namespaces, strict=True)):
        big.table.publish(
            0, key(keys, number), b"\0", 0, 1, u32(number), u64(1), u32(number), namespace, u32(parent)
        )


def test_runs_follow_parents(big: World, after: Any, keys: bytes) -> None:
    """0-1-2 then a fork to 3-4 and 5; 6 is of another namespace than its parent; 7 a root."""
    families_with_parents(big, keys, [NONE, 0, 1, 2, 3, 2, 5, NONE], [1, 1, 1, 1, 1, 1, 2, 1])
    adopted = after().adopt()
    sizes, parents = numbers(adopted["run_sizes"]), numbers(adopted["run_parents"])
    members, runs = numbers(adopted["members"]), []
    for size in sizes:
        runs.append(members[:size])
        members = members[size:]
    assert sorted(runs) == [[0, 1, 2], [3, 4], [5], [6], [7]]
    assert all(parent == NONE or parent < number for number, parent in enumerate(parents))
    named = {runs[n][0]: (runs[p][0] if p != NONE else None) for n, p in enumerate(parents)}
    assert named == {0: None, 3: 0, 5: 0, 6: None, 7: None}
    assert [numbers(adopted["run_of"])[entry] for run in runs for entry in run] == [
        n for n, run in enumerate(runs) for _ in run
    ]
    assert sum(numbers64(adopted["run_bytes"])) == 8 * OBJECT_BYTES


def test_a_long_chain_becomes_runs_of_a_bounded_length(make_world: Callable[..., World]) -> None:
    """Fails if a restored run may be longer than one that grew: to split it would stop the daemon for long."""
    count, most = (1 << 14) + 100, 1 << 14
    world = make_world(families=-(-count * OBJECT_BYTES // FRAME) * FRAME // OBJECT_BYTES, hazards=64)
    world.reserve(list(range(count)))
    keys = b"".join(number.to_bytes(32, "little") for number in range(1, count + 1))
    numbered = array("I", range(count)).tobytes()
    parents = array("I", [NONE, *range(count - 1)]).tobytes()
    world.table.publish(
        0, keys, bytes(count), 0, 1, numbered, array("Q", range(count)).tobytes(), numbered, 1, parents
    )
    one = Next(world)
    adopted = one.adopt()
    assert (numbers(adopted["run_sizes"]), numbers(adopted["run_parents"])) == ([most, 100], [NONE, 0])
    assert numbers(adopted["members"]) == list(range(count))
    one.close()


def test_a_batch_chains_its_families(big: World, keys: bytes) -> None:
    """`parents` may say: behind the family of the item before. A family that was there already is one, too."""
    big.put(key(keys, 1), 1)
    big.reserve([2, 3, 4])
    before = 0xFFFFFFFE
    big.table.publish(
        0, key(keys, 0) + key(keys, 1) + key(keys, 2), bytes(3), 3, 1, u32(2, 3, 4), u64(1, 2, 3), u32(7, 8, 9), 5,
        u32(NONE, before, before),
    )  # fmt: skip
    assert big.table.entry(7)["parent"] == (NONE, 0)
    assert big.table.entry(8)["parent"] == (1, 1)
    assert big.table.entry(8)["namespace"] == 5
    big.table.set_parents(u32(1), u32(7))
    assert big.table.entry(1)["parent"] == (7, 1)


def test_circles_and_parents_that_left_become_roots(big: World, after: Any, keys: bytes) -> None:
    families_with_parents(big, keys, [NONE, 0, 1, NONE, 3], [1] * 5)
    one = after()
    one.cold(0, 2, 1)  # 0 behind 2 behind 1 behind 0
    one.cold(4, 3, 9)  # a generation of 3 that is over
    adopted = one.adopt()
    assert sorted(numbers(adopted["members"])) == [0, 1, 2, 3, 4]
    assert sorted(numbers(adopted["run_sizes"])) == [1, 1, 3]
    assert numbers(adopted["run_parents"]) == [NONE] * 3
    one.cold(0, 0, 1)  # its own parent
    assert sorted(numbers(one.adopt()["run_sizes"])) == [1, 1, 3]


DAMAGE: dict[str, Callable[[Next], None]] = {
    "record of another entry": lambda one: one.record(1, "entry", 5, 4),
    "record not published": lambda one: one.record(1, "state", 1, 1),
    "record with an owner": lambda one: one.record(1, "owner", 0, 2),
    "member without a bit": lambda one: one.record(1, "member", 3, 1),
    "member that cannot be": lambda one: one.record(1, "member", 200, 1),
    "list in a circle": lambda one: one.record(1, "next", 1, 4),
    "list that leads nowhere": lambda one: one.record(1, "next", 1 << 30, 4),
    "no list": lambda one: one.entry(1, "record_first", NONE, 4),
    "bit without a record": lambda one: one.entry(1, "present", 3, 8),
    "no bits": lambda one: one.entry(1, "present", 0, 8),
    "no members": lambda one: one.entry(1, "members_count", 0, 1),
    "too many members": lambda one: one.entry(1, "members_count", 129, 1),
    "place outside its segment": lambda one: one.record(1, "place", FRAME, 8),
    "place in the last bytes": lambda one: one.record(1, "place", FRAME - 64, 8),
    "segment that is not there": lambda one: one.record(1, "place", 3 << 48, 8),
    "place that is no slot": lambda one: one.record(1, "place", OBJECT_BYTES + 64, 8),
    "size of no bytes": lambda one: one.record(1, "size_bytes", 0, 8),
    "size beyond everything": lambda one: one.record(1, "size_bytes", (1 << 64) - 64, 8),
    "namespace that nobody registered": lambda one: one.put(
        one.at("cold", 1, "Cold", "namespace_number"), 10, 4
    ),
}


def slots_of(size: int) -> tuple[int, int]:
    return (0, 0) if not 0 < size <= FRAME else (-(-size // 64) * 64, 1)


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_check_out_is_dropped_and_the_rest_stays(
    big: World, after: Any, keys: bytes, damage: str
) -> None:
    big.put(keys[: 32 * 4])
    one = after()
    DAMAGE[damage](one)
    adopted = one.adopt(slots=slots_of)
    assert (adopted["families"], adopted["damaged"]) == (3, 1)
    assert one.found(keys[: 32 * 4]) == [0, NONE, 2, 3]
    assert one.table.entry(1)["state"] == EntryState.EMPTY
    assert one.table.entry(1)["generation"] == 1


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_what_somebody_holds_ends_the_adoption(
    big: World, after: Any, keys: bytes, damage: str
) -> None:
    """Its memory would be given to others under the reader's eyes."""
    _, fd = big.region(0)
    client = _native.Client(big.meta, fd, [big.segment], False)
    big.put(keys[: 32 * 4])
    lease = client.fetch(key(keys, 1))
    one = after()
    DAMAGE[damage](one)
    with pytest.raises(RuntimeError, match="family 1 does not check out and is held"):
        one.adopt({0: fd}, slots=slots_of)
    lease.release()


def test_two_families_in_one_slot_are_both_dropped(big: World, after: Any, keys: bytes) -> None:
    big.put(keys[: 32 * 4])
    one = after()
    one.record(1, "place", 2 * OBJECT_BYTES, 8)
    adopted = one.adopt()
    assert (adopted["families"], adopted["damaged"]) == (2, 2)
    assert one.found(keys[: 32 * 4]) == [0, NONE, NONE, 3]


def test_two_entries_of_one_key_one_is_withdrawn(big: World, after: Any, keys: bytes) -> None:
    big.put(keys[: 32 * 2])
    one = after()
    at = one.at("entries", 0, "Entry", "identity"), one.at("entries", 1, "Entry", "identity")
    one.map[at[1] : at[1] + 32] = one.map[at[0] : at[0] + 32]
    adopted = one.adopt()
    assert (adopted["families"], adopted["withdrawn"], numbers(adopted["limbo"])) == (1, 1, [1])


def test_a_writer_in_the_slot_of_a_family_ends_the_adoption(big: World, after: Any, keys: bytes) -> None:
    _, fd = big.region(0)
    big.put(keys[: 32 * 2])
    big.reserve([2])
    one = after()
    one.record(2, "place", OBJECT_BYTES, 8)
    with pytest.raises(
        RuntimeError, match="record 2 is being written by a living client, in the slot of another"
    ):
        one.adopt({0: fd})
    one.record(2, "place", OBJECT_BYTES + 64, 8)
    with pytest.raises(RuntimeError, match="in a slot that cannot be"):
        one.adopt({0: fd})


def test_a_segment_that_was_not_kept_takes_its_families_along(big: World, after: Any, keys: bytes) -> None:
    """Even held ones: nobody gets that memory any more."""
    _, fd = big.region(0)
    client = _native.Client(big.meta, fd, [big.segment], False)
    big.put(keys[: 32 * 2])
    lease = client.fetch(key(keys, 1))
    big.reserve([5])
    adopted = after().adopt({0: fd}, kept=b"\0")
    assert (adopted["families"], adopted["not_kept"], adopted["pending"]) == (0, 2, 0)
    assert bytes(lease.view()) == bytes([1]) * OBJECT_BYTES


def test_slots_of_slabs_of_several_frames_are_found(make_world: Callable[..., World], keys: bytes) -> None:
    """Objects of 1.5 MiB lie in slabs of three frames, wherever those begin."""
    size = 3 << 19
    world = make_world(families=8 * FRAME // OBJECT_BYTES, hazards=64)
    first = FRAME
    places = [first, first + size, first + 3 * size, first + 4 * size + size]
    world.table.reserve(
        0, 1, u32(0, 1, 2, 3), u64(*places), u64(*[size] * 4), bytes(4), array("H", [0] * 16).tobytes()
    )
    world.table.publish(0, keys[: 32 * 4], bytes(4), 0, 1, u32(0, 1, 2, 3), u64(1, 2, 3, 4), u32(0, 1, 2, 3))
    one = Next(world)
    adopted = one.adopt(slots=lambda size: (size, 3))
    assert [(slab[0], numbers(slab[2])) for slab in adopted["slabs"]] == [
        (1, [0, 1, NONE, 2]),
        (4, [NONE, 3, NONE, NONE]),
    ]
    one.close()


@pytest.mark.parametrize(
    "field", ["magic", "version", "header_size", "buckets_count", "cold_offset", "meta_bytes"]
)
def test_a_header_that_does_not_add_up_is_refused(after: Any, field: str) -> None:
    one = after()
    at = OFFSETS["MetaHeader"][field]
    one.put(at, one.map[at] ^ 1, 1)
    with pytest.raises(RuntimeError, match="META: "):
        _native.Adoption(one.old_fd)


def test_a_table_with_less_room_is_refused(big: World, after: Any) -> None:
    one = after()
    old = _native.Adoption(one.old_fd)
    assert [row["state"] for row in old.clients] == []
    small = _native.Table(
        big.memfd("small"), families_max=64, records_max=64, segment_bytes=[FRAME], clients_max=4, epoch=2,
        boot_id=bytes(16), bucket_seed=7, pid=1, start_ticks=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="room for every number"):
        old.adopt(
            small, segments_kept=b"\1", slot_bytes=b"", slab_frames=b"", ghosts=u32(*[NONE] * 4), frame_bytes=FRAME,
            namespaces_count=0,
        )  # fmt: skip


def test_ghosts_are_told_apart_in_the_table(big: World, after: Any) -> None:
    """The next daemon after this one needs them, too."""
    _, fd = big.region(2)
    one = after()
    (row,) = _native.Adoption(one.old_fd).clients
    assert (row["slot"], row["state"], row["epoch"]) == (2, ClientState.ATTACHED, EPOCH)
    one.adopt({2: fd})
    second = _native.Adoption(one.meta)
    (again,) = second.clients
    assert again == {**row, "slot": 6, "state": ClientState.GHOST, "region_slot": 2}


def test_a_region_of_another_size_than_meta_says_is_refused(big: World, after: Any) -> None:
    big.region(2)
    with pytest.raises(RuntimeError, match="client region of 4096 bytes"):
        fd = big.memfd("wrong")
        os.ftruncate(fd, 4096)
        after().adopt({2: fd})


def test_optional_members_and_partial_families(big: World, after: Any, keys: bytes) -> None:
    big.reserve([0, 1, 2], members=u8(0, 1, 5))
    big.table.publish(
        0,
        key(keys, 0) + key(keys, 1) + key(keys, 0),
        u8(0, 1, 5),
        0,
        2,
        u32(0, 1, 2),
        u64(1, 2, 3),
        u32(0, 1),
    )
    adopted = after().adopt()
    assert adopted["missing_of"] == b"\1\1"
    assert numbers64(adopted["bytes_of"]) == [2 * OBJECT_BYTES, OBJECT_BYTES]
