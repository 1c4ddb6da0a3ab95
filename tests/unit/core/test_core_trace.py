"""Traces of the pure core: what is recorded replays to the same state, and a difference is found at its event."""

import random
import typing
from array import array

import msgpack
import pytest
from core_world import MIB, World, chain

from kvd.core import events as ev
from kvd.core import snapshot
from kvd.core.core import Core, CoreConfig
from kvd.core.policy import policy_names
from kvd.core.trace import CHECK_EVENTS, EVENTS, Replay, TracedCore, decode_event, encode_event
from kvd.errors import CapacityError, CompatibilityError, InvariantError, ProtocolError, UnavailableError
from kvd.types import Member


def some_life(world, steps, seed):
    """Writes, reads, deaths and administration, in a pool that is too small for them."""
    rng = random.Random(seed)
    for _ in range(steps):
        name, client = rng.randrange(6), rng.randrange(2)
        begin = rng.randrange(5)
        parent = chain(name, 1, begin - 1)[0] if begin else None
        members = (Member(0, MIB), Member(1, MIB // 2, (0, 4), (2, 9)))[: 1 + name % 2]
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                reply = world.reserve(
                    client,
                    chain(name, 3, begin),
                    members=members,
                    parent=parent,
                    request=name,
                    skip_pending=bool(begin),
                )
                if isinstance(reply, ev.ReservedReply) and reply.reservation and rng.random() < 0.8:
                    world.fill(reply.reservation)
                    world.publish(client, reply.reservation)
            case 4 | 5:
                world.touch(client, chain(name, 4), request=1 + rng.randrange(5))
            case 6:
                world.hazards[client].clear()
                world.hold(client, chain(name, 2))
            case 7:
                world.sleep(1.5)
                world.tick()
            case 8 if world.index:
                key = rng.choice(sorted(world.index))
                rng.choice((world.withdraw, lambda keys: world.pin(keys, ev.PinKind.SOFT), world.unpin))(
                    [key]
                )
            case 9 if rng.random() < 0.3:
                world.gone(client)
                world.attach(client)


def traced_world(seed=1, before=60, config=None):
    """A world with a past, and from now on a traced core: world, records."""
    world = World(
        families_max=40, records_max=50, segments=[8 * MIB, 6 * MIB], audit=False,
        config=config or CoreConfig(journal_requests=3, ghosts=8),
    )  # fmt: skip
    some_life(world, before, seed)
    records = []
    world.core = TracedCore(
        world.core, lambda record: records.append(record) is None, "default", world.now_ns
    )
    return world, records


def replayed(records):
    replay = Replay()
    for record in records:
        replay.take(msgpack.unpackb(record, raw=False, strict_map_key=False))
        if replay.done:
            break
    return replay


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", policy_names)
def test_a_trace_replays_to_the_same_state(seed, policy):
    world, records = traced_world(seed, config=CoreConfig(policy=policy, ghosts=8))
    some_life(world, 120, seed + 100)
    world.core.end("stopped")
    replay = replayed(records)
    assert replay.difference == ""
    assert replay.ended == "stopped"
    assert replay.events == world.core.traced_events > 100
    assert replay.core.statistics() == world.core.statistics()
    assert replay.core.why(3, world.now_ns) == world.core.why(3, world.now_ns)
    assert snapshot.pack(replay.core._books) == snapshot.pack(world.core._books)
    replay.core.validate()


def test_state_is_the_same_after_a_way_there_and_back():
    """Byte for byte, from an empty core to one with everything that books can hold."""
    empty = Core(CoreConfig(), 4, 4, [2 * MIB])
    world, _ = traced_world(3, before=200)
    books = world.core._books
    books.forest._class_set_rows[1 << 100] = 0  # more size classes than a machine word has bits
    world.withdraw(chain(0, 1)) if chain(0, 1)[0] in world.index else None
    for one in (empty._books, books):
        packed = snapshot.pack(one)
        assert snapshot.pack(snapshot.unpack(packed)) == packed
    again = Core.over(snapshot.unpack(snapshot.pack(world.core._books)))
    again.validate()
    assert again.statistics() == world.core.statistics()


@pytest.mark.parametrize("change", ["time", "field", "dropped", "effects", "state"])
def test_a_change_is_found(change):
    """Fails if effects, numbers of events or digests are not compared."""
    world, records = traced_world(2)
    some_life(world, 150, 5)
    world.core.end("stopped")
    values = [msgpack.unpackb(record, raw=False, strict_map_key=False) for record in records]
    at = next(n for n, value in enumerate(values) if n > 10 and value[0] == "event" and value[3] == "Publish")
    if change == "time":
        next(v for v in values[2:] if v[3] == "Touched")[2] += 10**12
    elif change == "field":
        values[at][4][2] += 1000  # the reservation
    elif change == "dropped":
        del values[at]
    elif change == "effects":
        values[at][-1] ^= 1
    else:
        values[1][1] = values[1][1].replace(b"probation", b"probatiom") + b""
        values[1][2] = "0" * 16
    replay = Replay()
    if change == "dropped":
        with pytest.raises(ProtocolError, match="has a hole"):
            [replay.take(value) for value in values]
        return
    for value in values:
        replay.take(value)
        if replay.done:
            break
    assert replay.difference
    if change in ("field", "effects"):
        assert replay.events == values[at][1]
        assert f"event {values[at][1]} (Publish)" in replay.difference


def test_the_state_is_compared_now_and_then():
    world, records = traced_world()
    for _ in range(CHECK_EVENTS):
        world.tick()
    values = [msgpack.unpackb(one, raw=False, strict_map_key=False) for one in records]
    assert values[-1][:2] == ["check", CHECK_EVENTS]
    values[-1][2] = "0" * 16
    replay = Replay()
    [replay.take(value) for value in values]
    assert replay.difference.startswith(f"after event {CHECK_EVENTS}: statistics differ")


def test_what_stops_the_core_is_on_record():
    """The event that broke an invariant is the last one, and breaks it again."""
    world, records = traced_world()
    with pytest.raises(InvariantError, match="attached already"):
        world.core.step(world.now_ns, ev.ClientAttached(0, 1, "twice", True))
    world.core.end("the daemon ended")
    replay = replayed(records)
    assert replay.difference == ""
    assert "the core stopped here: InvariantError: client 0 is attached already" in replay.ended
    assert msgpack.unpackb(records[-1])[2] == ""


def test_a_trace_begins_and_ends_between_operations():
    world, _ = traced_world()
    while not world.index:
        some_life(world, 10, 9)
    world.hazards = {client: set() for client in world.hazards}
    world.do(ev.Clear(99, None))
    assert world.later
    with pytest.raises(UnavailableError, match="a clear, or the end of a large client, is going on"):
        TracedCore(world.core, lambda _: True, "default", 0)
    world.again()
    TracedCore(world.core, lambda _: True, "default", 0)
    with pytest.raises(CapacityError, match="more than the limit"):
        TracedCore(world.core, lambda record: len(record) < 1000, "default", 0)


def test_every_event_has_a_form():
    assert set(EVENTS.values()) == set(typing.get_args(ev.Event))
    member = Member(3, MIB, (1, 2), (3, 4))
    reserve = ev.Reserve(1, 2, 3, 4, bytes(32), 5, (member,), 6, 7, True, array("I", [9]), b"\0", 8)
    restored = decode_event(*encode_event(reserve))
    assert restored == reserve._replace(entries=array("I", [9]).tobytes())
    touch = ev.Touch(1, 2, 3, 4, 5, 6, 7, 8, 1, 9)
    assert decode_event(*encode_event(ev.Touched(1, [touch]))) == ev.Touched(1, [touch])
    assert decode_event(*encode_event(ev.Pin(1, b"", ev.PinKind.HARD))).kind is ev.PinKind.HARD


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ([{"other": 1}], ProtocolError, "is no trace of kvd"),
        ([7], ProtocolError, "is no trace of kvd"),
        ([{"kvd-trace": 1, "kvd": "0.0.0"}], CompatibilityError, "of kvd 0.0.0"),
        ([None, ["event", 1, 2, "Tick", [], 0]], ProtocolError, "does not begin with a state"),
        ([None, ["state", b"\x93\xa1x\xa2os\xa1y", ""]], ProtocolError, "cannot be read"),
        ([None, ["state", b"\xc0", ""]], ProtocolError, "not that of a core"),
        ([None, 5], ProtocolError, "cannot be read"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(values, error, text):
    """A file from anywhere makes no object but those of a core, and raises nothing else."""
    _, records = traced_world()
    header = msgpack.unpackb(records[0])
    replay = Replay()
    with pytest.raises(error, match=text):
        for value in values:
            replay.take(header if value is None else value)


@pytest.mark.slow
def test_damaged_states_raise_nothing_else():
    _, records = traced_world()
    header, state = (msgpack.unpackb(one, raw=False, strict_map_key=False) for one in records[:2])
    rng = random.Random(7)
    for _ in range(300):
        packed = bytearray(state[1])
        for _ in range(rng.randrange(1, 4)):
            packed[rng.randrange(len(packed))] = rng.randrange(256)
        replay = Replay()
        replay.take(header)
        try:
            replay.take(["state", bytes(packed), state[2]])
        except (ProtocolError, InvariantError):
            continue
        assert replay.difference or bytes(packed) == state[1]
