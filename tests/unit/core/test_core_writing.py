"""Reserve, publish, abort: every answer, and every refusal by name."""

from __future__ import annotations

from array import array

import pytest
from core_world import MIB, World, chain, key8, key_of

from kvd import limits
from kvd.core import events as ev
from kvd.core import space
from kvd.core.core import Core, CoreConfig
from kvd.errors import InvariantError, KvdError, Retry
from kvd.types import Member

G, P, N = ev.ReserveStatus.GRANTED, ev.ReserveStatus.PRESENT, ev.ReserveStatus.PENDING
S = ev.PublishStatus
TWO = (Member(0, 4096), Member(1, 4096))
THREE = tuple(Member(number, 4096) for number in range(3))
IDLE_S = CoreConfig().partial_idle_ns / 10**9 + 1


def reserved(reply: ev.ReservedReply | ev.ErrorReply) -> ev.ReservedReply:
    assert isinstance(reply, ev.ReservedReply), reply.error
    return reply


def refused(reply: ev.ReservedReply | ev.ErrorReply) -> KvdError:
    assert isinstance(reply, ev.ErrorReply)
    return reply.error


def test_items_are_family_major_and_each_member_has_its_size() -> None:
    world = World()
    members = (
        Member(0, 100_000, heads=(0, 4), layers=(0, 8)),
        Member(2, 700_000, heads=(4, 8), layers=(8, 16)),
    )
    event = ev.Reserve(
        0,
        9,
        0,
        0,
        b"".join(chain("a", 2)),
        ev.NONE,
        members,
        3,
        3,
        False,
        array("I", [ev.NONE] * 2),
        bytes(4),
    )
    do, reply = world.core.step(1, event)
    assert isinstance(do, ev.DoReserve)
    assert isinstance(reply, ev.ReservedReply)
    assert list(do.sizes) == [100_000, 700_000] * 2
    assert list(do.members) == [0, 2] * 2
    assert list(do.ranges) == [0, 4, 0, 8, 4, 8, 8, 16] * 2
    assert do.places == reply.places
    assert len(set(do.records)) == 4
    assert list(reply.statuses) == [G] * 4


def test_only_what_is_not_there_is_granted() -> None:
    world = World()
    two = (Member(0, 4096), Member(1, 8192))
    world.write(0, chain("a", 2), members=two[:1], family_members=2)
    reply = reserved(world.reserve(1, chain("a", 3), members=two, family_members=2))
    assert list(reply.statuses) == [P, G, P, G, G, G]
    assert [place == ev.NO_PLACE for place in reply.places] == [True, False, True, False, False, False]
    world.fill(reply.reservation)
    assert list(world.publish(1, reply.reservation)) == [S.GONE, 0, S.GONE, 0, 0, 0]
    assert world.touch(0, chain("a", 3)) == 3
    world.check_content()


def test_nothing_granted_is_no_reservation() -> None:
    world = World()
    world.write(0, chain("a", 3))
    reply = reserved(world.reserve(1, chain("a", 3)))
    assert reply.reservation == 0
    assert list(reply.statuses) == [P] * 3


def test_the_first_to_publish_wins() -> None:
    world = World()
    first, second = (reserved(world.reserve(client, chain("a", 2))) for client in (0, 1))
    world.fill(first.reservation)
    world.fill(second.reservation)
    assert list(world.publish(1, second.reservation, checksum=5)) == [S.PUBLISHED] * 2
    assert list(world.publish(0, first.reservation, checksum=5)) == [S.PRESENT] * 2
    assert world.core.counters["duplicates"] == 2
    assert world.core.counters["differs"] == 0
    assert world.pool("reserved_bytes") == 0


@pytest.mark.parametrize("strict", [False, True])
def test_other_bytes_under_the_same_key(strict: bool) -> None:
    world = World(config=CoreConfig(strict_duplicates=strict))
    reply = reserved(world.reserve(0, chain("a", 2)))
    world.write(1, chain("a", 2))
    statuses = list(world.publish(0, reply.reservation, checksum=0xBAD))
    assert statuses == [S.DIFFERS if strict else S.PRESENT] * 2
    assert world.core.counters["differs"] == 2
    notes = [note for note in world.notes if note.event == "duplicate_differs"]
    assert len(notes) == (2 if strict else 0)
    if strict:
        assert notes[0].fields["offered_checksum"] == f"{0xBAD:016x}"
        assert notes[0].fields["key8"] == f"{key8(chain('a', 1)[0]):016x}"


def test_publishing_twice_after_abort_or_for_another_does_nothing() -> None:
    world = World()
    reply = reserved(world.reserve(0, chain("a", 4)))
    world.fill(reply.reservation)
    assert list(world.publish(1, reply.reservation)) == [S.GONE] * 4, "another client's"
    assert list(world.publish(0, reply.reservation, 0, 2)) == [S.PUBLISHED] * 2
    assert list(world.publish(0, reply.reservation, 0, 3)) == [S.GONE, S.GONE, S.PUBLISHED]
    assert world.abort(0, reply.reservation, 3, 1) == 1
    assert list(world.publish(0, reply.reservation)) == [S.GONE] * 4, "over"
    assert list(world.publish(0, 10**12)) == [S.GONE], "never was"
    assert len(world.index) == 3


def test_full_buckets_are_an_ordinary_result() -> None:
    world = World()
    keys = chain("a", 3)
    world.no_index = {keys[1]}
    assert world.write(0, keys) == [S.PUBLISHED, S.NO_INDEX, S.PUBLISHED]
    assert world.pool("reserved_bytes") == 0
    assert world.core.counters["no_index"] == 1


def test_pending_is_by_member() -> None:
    world = World()
    two = (Member(0, 4096), Member(1, 4096))
    reserved(world.reserve(0, chain("a", 2), members=two[:1], family_members=2))
    reply = reserved(world.reserve(1, chain("a", 3), members=two, family_members=2, skip_pending=True))
    assert list(reply.statuses) == [N, G, N, G, G, G]
    both = reserved(world.reserve(1, chain("a", 2), members=two, family_members=2))
    assert list(both.statuses) == [G] * 4, "both may fill unless the caller asks to skip"
    world.abort(1, both.reservation)
    again = reserved(world.reserve(1, chain("a", 1), members=two[:1], family_members=2, skip_pending=True))
    assert list(again.statuses) == [N], "the first is still writing"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"members": ()}, "name at least one"),
        ({"members": (Member(0, 64), Member(0, 64))}, "each once"),
        ({"members": (Member(0, 64),), "family_members": 0}, "family of 0 members"),
        ({"members": (Member(0, 64),), "family_members": 129}, "1 … 128"),
        ({"namespace": limits.namespaces_max + 1}, "namespace 4097 is not known"),
        ({"size": 17 * MIB}, "does not fit the largest segment"),
        ({"keys": chain("a", limits.batch_items_max + 1)}, "at most 4096 go at once: split it"),
    ],
)
def test_a_batch_that_cannot_be_right_is_refused_by_name(options: dict[str, object], text: str) -> None:
    world = World()
    keys = options.pop("keys", chain("a", 1))
    error = refused(world.reserve(0, keys, **options))  # type: ignore[arg-type]
    assert text in error.message
    assert error.code.startswith("KVD-USAGE")
    assert world.core.counters["usage_refusals"] == 1
    assert world.core.statistics()["reservations"] == 0


def test_items_outside_the_reservation_are_refused() -> None:
    world = World()
    reply = reserved(world.reserve(0, chain("a", 2)))
    for event in (
        ev.Publish(0, 1, reply.reservation, 1, array("Q", [0, 0]), b"\1\1"),
        ev.Abort(0, 1, reply.reservation, 2, 1),
        ev.Abort(0, 1, reply.reservation, -1, 1),
    ):
        (answer,) = world.do(event)
        assert isinstance(answer, ev.ErrorReply)
        assert "are not within the 2 of" in answer.error.message


def test_read_only_clients_cannot_reserve() -> None:
    world = World(clients=1)
    world.attach(5, writable=False)
    said = refused(world.reserve(5, chain("a", 1))).message
    assert "attached read-only" in said
    assert 'access="write"' in said


def test_a_prefix_never_crosses_namespaces() -> None:
    world = World()
    world.write(0, chain("a", 1), namespace=1)
    error = refused(world.reserve(0, chain("a", 1, 1), parent=chain("a", 1)[0], namespace=2))
    assert "a prefix never crosses namespaces" in error.message


def test_what_could_never_fit_is_refused_at_once_and_evicts_nothing() -> None:
    world = World(segments=[8 * MIB], families_max=64, records_max=64)
    world.write(0, chain("a", 8), size=MIB)
    error = refused(world.reserve(0, chain("b", 9), size=MIB))
    assert error.retry is Retry.NEVER
    error = refused(world.reserve(0, chain("c", 65), size=64))
    assert error.retry is Retry.NEVER
    assert len(world.index) == 8
    world.pin(chain("a", 8)[:4], ev.PinKind.HARD)
    error = refused(world.reserve(0, chain("b", 5), size=MIB))
    assert error.retry is Retry.AFTER
    assert error.fields["pinned_bytes"] == 4 * MIB
    assert len(world.index) == 8


@pytest.mark.parametrize(
    ("families_max", "records_max", "reason"), [(16, 99, "entries"), (99, 16, "records")]
)
def test_a_full_index_makes_room_by_itself(families_max: int, records_max: int, reason: str) -> None:
    world = World(families_max=families_max, records_max=records_max)
    world.write(0, chain("a", 10))
    assert world.write(0, chain("b", 10)) == [0] * 10
    assert world.core.counters[f"evicted_{reason}"] == 4
    assert [world.has(key) for key in chain("a", 10)] == [True] * 6 + [False] * 4, "from the tail"


def test_an_entry_is_promised_so_that_publish_cannot_fail_for_want_of_one() -> None:
    world = World(families_max=8, records_max=99)
    first = reserved(world.reserve(0, chain("a", 6)))
    error = refused(world.reserve(1, chain("b", 3)))
    assert error.fields["reserved_bytes"] == 6 * 64 * 1024
    second = reserved(world.reserve(1, chain("b", 2)))
    for client, reply in ((1, second), (0, first)):
        world.fill(reply.reservation)
        assert set(world.publish(client, reply.reservation)) == {0}


@pytest.mark.parametrize("interleaved", [False, True])
def test_ranks_write_their_members_of_the_same_families(interleaved: bool) -> None:
    world = World()
    two = (Member(0, 4096), Member(1, 300_000))
    keys = chain("tp", 6)
    if interleaved:
        replies = [
            reserved(world.reserve(client, keys, members=two[client : client + 1], family_members=2))
            for client in (0, 1)
        ]
        for client, reply in enumerate(replies):
            assert world.touch(1, keys) == 0, "a family is complete with all its members"
            world.fill(reply.reservation)
            assert set(world.publish(client, reply.reservation)) == {0}
    else:
        for client in (0, 1):
            assert world.touch(1, keys) == 0
            assert world.write(client, keys, members=two[client : client + 1], family_members=2) == [0] * 6
    assert world.touch(1, keys) == 6
    assert world.core.counters["families_published"] == 6
    assert world.core.statistics()["families_partial"] == 0


def test_half_a_prefix_that_nobody_goes_on_with_leaves_in_time() -> None:
    """Fails without `tick`: half of what a dead engine's ranks published kept an engine with another split from writing
    it for as long as there was room.
    """
    world = World()
    two = (Member(0, 4096), Member(1, 4096))
    idle_ns = world.core.config.partial_idle_ns
    half, whole, being_written = chain("half", 4), chain("whole", 3), chain("written", 2)
    world.write(0, half, members=two[:1], family_members=2)
    world.write(0, whole, members=two, family_members=2)
    world.now_ns += idle_ns - 1_000_000
    world.tick()
    assert world.core.statistics()["families_partial"] == 4, "the other rank may be slow"
    world.write(0, being_written, members=two[:1], family_members=2)
    pending = reserved(world.reserve(1, being_written, members=two[1:], family_members=2))
    world.now_ns += idle_ns + 1_000_000
    world.tick()
    reason, left = world.evictions[-1]
    assert (reason, sorted(left)) == (ev.Reason.PARTIAL, sorted(half))
    assert world.core.statistics()["families_partial"] == 2, "somebody is writing the rest of these"
    assert world.touch(1, whole) == 3
    world.fill(pending.reservation)
    assert set(world.publish(1, pending.reservation)) == {0}
    assert world.touch(1, being_written) == 2
    # another split finds the place free
    three = tuple(Member(n, 4096) for n in range(3))
    assert world.write(1, half, members=three, family_members=3) == [0] * 12


def half_of(world: World, keys: list[bytes]) -> None:
    """What the first of two ranks stored before both died."""
    world.write(0, keys, members=TWO[:1], family_members=2)


def test_a_leased_half_leaves_the_index_and_its_bytes_when_it_is_let_go() -> None:
    """Fails if a half that somebody holds keeps its key: no engine with another split could ever write it."""
    world = World()
    half = chain("half", 2)
    half_of(world, half)
    world.hold(1, half[:1])
    world.sleep(IDLE_S)
    world.tick()
    assert not any(map(world.has, half))
    assert world.core.statistics()["families_limbo"] == 1
    assert world.write(1, half, members=THREE, family_members=3) == [0] * 6
    world.hazards[1].clear()
    world.tick()
    assert world.core.statistics()["families_limbo"] == 0
    world.check_content()


def test_who_goes_on_behind_a_half_does_not_keep_it() -> None:
    """Fails if a half stays as long as something is written behind it, or is being written there: under a prompt that
    every request begins with that is always, and the engine that writes it could never write the prompt itself.
    """
    world = World()
    half = chain("prompt", 2)
    half_of(world, half)
    last = None
    for request in range(1, int(IDLE_S) // 10 + 2):
        world.sleep(10)
        last = chain(("question", request), 1)
        world.write(1, last, members=THREE, family_members=3, parent=half[-1], request=request)
    being_written = chain("being written", 2)
    later = reserved(world.reserve(1, being_written, members=THREE, family_members=3, parent=half[-1]))
    world.tick()
    assert not any(map(world.has, half))
    assert last is not None
    assert world.has(last[0]), "what is behind it is whole, and another's"
    world.fill(later.reservation)
    assert set(world.publish(1, later.reservation)) == {0}
    assert world.write(1, half, members=THREE, family_members=3) == [0] * 6
    assert world.touch(1, half + last) == 3
    assert world.touch(1, half + being_written) == 4
    behind = world.core._books.forest
    parents = {behind.parent[behind.run_of[world.index[keys[0]]]] for keys in (last, being_written)}
    assert parents == {behind.run_of[world.index[half[-1]]]}, "they lie behind it again"
    world.check_content()


def test_one_half_that_must_stay_does_not_keep_the_others() -> None:
    """Fails if the first in the row that is leased, pinned, read or being completed stands before all behind it."""
    world = World()
    pinned, completed, leased, idle = (chain(name, 2) for name in ("pinned", "completed", "leased", "idle"))
    for keys in (pinned, completed, leased, idle):
        half_of(world, keys)
    world.pin(pinned[1:], ev.PinKind.HARD)
    world.hold(1, leased)
    pending = reserved(world.reserve(1, completed, members=TWO[1:], family_members=2))
    world.sleep(IDLE_S)
    world.tick()
    assert [all(map(world.has, keys)) for keys in (pinned, completed, leased, idle)] == [
        True,
        True,
        False,
        False,
    ]
    world.fill(pending.reservation)
    assert set(world.publish(1, pending.reservation)) == {0}
    assert world.touch(1, completed) == 2
    world.unpin(pinned)
    world.sleep(IDLE_S)
    world.tick()
    assert not any(map(world.has, pinned))
    assert all(map(world.has, completed))


def test_a_member_that_comes_gives_the_others_their_time() -> None:
    """Fails if the age of a half counts from its first member."""
    world = World()
    keys = chain("three", 2)
    for member in THREE:
        assert world.write(0, keys, members=(member,), family_members=3) == [0, 0]
        world.sleep(IDLE_S - 2)
        world.tick()
    assert world.touch(1, keys) == 2


def test_halves_in_the_middle_of_a_run_leave_alone() -> None:
    world = World()
    keys = chain("mixed", 9)
    half_of(world, keys)
    for whole in (keys[:1], keys[3:5], keys[6:7]):
        world.write(1, whole, members=TWO[1:], family_members=2)
    world.sleep(IDLE_S)
    world.tick()
    assert [world.has(key) for key in keys] == [at in (0, 3, 4, 6) for at in range(9)]
    assert world.touch(1, keys) == 1
    world.write(0, keys, members=TWO, family_members=2)
    assert world.touch(1, keys) == 9
    world.check_content()


def test_many_abandoned_halves_leave_in_short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails without the bound on what one tick lets leave: a dead engine's whole pool would stop everybody else."""
    monkeypatch.setattr(space, "partial_families_max", 8)
    world = World()
    for name in range(5):
        half_of(world, chain(name, 6))
    world.sleep(IDLE_S)
    left = []
    while world.index:
        world.tick()
        left.append(len(world.evictions[-1][1]))
    assert left == [8, 8, 8, 6]


def test_a_run_that_must_stay_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if each of its halves is tried again: so many plans of so many families took most of a second."""
    world = World(segments=[4 * MIB], config=CoreConfig(partial_grace_ns=0))
    half = chain("half", 32)
    half_of(world, half)
    reserved(world.reserve(1, chain("behind", 1), members=TWO, family_members=2, parent=half[-1]))
    plans = []
    subtree = space.Space.subtree

    def counted(self: space.Space, starts: dict[int, int], reason: ev.Reason) -> space.Plan:
        plans.append(reason)
        return subtree(self, starts, reason)

    monkeypatch.setattr(space.Space, "subtree", counted)
    refused(world.reserve(1, chain("large", 3), size=MIB))
    assert plans.count(ev.Reason.PARTIAL) == 1
    assert all(map(world.has, half))


def test_optional_members_do_not_make_a_family_partial() -> None:
    world = World()
    members = (Member(0, 4096), Member(1, 4096), Member(5, 70_000))
    world.write(0, chain("a", 2), members=members[:2], family_members=2)
    assert world.core.statistics()["families_partial"] == 0
    world.write(1, chain("a", 3), members=members[2:], family_members=2)
    assert world.core.statistics()["families_partial"] == 1, "the third has nothing but its optional member"
    world.write(0, chain("a", 3), members=members[:2], family_members=2)
    assert world.core.statistics()["families_partial"] == 0
    assert world.touch(1, chain("a", 3)) == 3


def test_reserving_waits_for_memory_and_finds_it_segment_by_segment() -> None:
    world = World(segments=[4 * MIB, 4 * MIB], ready=False)
    assert refused(world.reserve(0, chain("a", 1))).retry is Retry.AFTER
    world.do(ev.SegmentReady(1, 0, 2 * MIB))
    assert world.write(0, chain("a", 1)) == [0]
    world.do(ev.SegmentReady(0, 0, 4 * MIB))
    world.do(ev.SegmentReady(1, 2 * MIB, 4 * MIB))
    assert world.write(0, chain("big", 1), size=4 * MIB) == [0]


def test_the_turn_is_kept() -> None:
    """Fails if anything could happen between a question and its answer, or an answer could come twice."""
    world = World()
    reply = reserved(world.reserve(0, chain("a", 1)))
    core = world.core
    (ask,) = core.step(1, ev.Publish(0, 1, reply.reservation, 0, array("Q", [0]), b"\1"))
    assert isinstance(ask, ev.DoPublish)
    with pytest.raises(InvariantError, match="Tick came while an answer was waited for"):
        core.step(2, ev.Tick())
    with pytest.raises(InvariantError, match="nobody waits for"):
        core.step(2, ev.Published(ask.token + 1, b"\0", ask.entries, b"\0", 1))


def test_events_of_clients_that_are_not_there_stop_the_daemon() -> None:
    core = Core(CoreConfig(), 8, 8, [2 * MIB])
    core.step(1, ev.SegmentReady(0, 0, 2 * MIB))
    event = ev.Reserve(
        0, 1, 0, 0, key_of("a"), ev.NONE, (Member(0, 64),), 0, 1, False, array("I", [ev.NONE]), b"\0"
    )
    with pytest.raises(InvariantError, match="client 0 is not attached"):
        core.step(1, event)
    core.step(1, ev.ClientAttached(0, 1, "a", True))
    with pytest.raises(InvariantError, match="attached already"):
        core.step(1, ev.ClientAttached(0, 1, "a", True))
    with pytest.raises(InvariantError, match="the table knows a family 3"):
        core.step(1, event._replace(entries=array("I", [3])))
    assert core.step(1, ev.ClientGone(7)) == [ev.Gone(7)], "it may have gone before it was attached"
