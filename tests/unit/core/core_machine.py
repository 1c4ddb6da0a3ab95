"""A hypothesis machine that lets clients, operators and time loose on a Core in a world of dictionaries.

Beside `Core.validate()` after every step, the machine knows from its own plain model what each answer must be,
that nothing held, pinned hard or written behind leaves, that what leaves by policy leaves nothing reachable
behind, and that everything comes back in the end. The pool and the index are far too small for what is written:
the usual state is that every reservation evicts.
"""

from __future__ import annotations

import hypothesis.strategies as st
from core_world import MIB, World, chain, key8
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.core import events as ev
from kvd.core.core import CoreConfig
from kvd.errors import Retry
from kvd.types import Member

CHAINS = 5
CHAIN_LENGTH = 12
CLIENTS = 3
SIZES = (100 * 1024, 300 * 1024, 3 * MIB // 2, 3 * MIB)
POLICY_REASONS = (ev.Reason.SPACE, ev.Reason.WINDOW, ev.Reason.ENTRIES, ev.Reason.RECORDS, ev.Reason.PARTIAL)

chains = st.integers(0, CHAINS - 1)
clients = st.integers(0, CLIENTS - 1)
positions = st.integers(0, CHAIN_LENGTH - 1)
requests = st.integers(0, 4)


class Watched(World):
    """A world that also watches what leaves."""

    def __init__(self, **options: object) -> None:
        self.published_at: dict[bytes, int] = {}
        self.behind_live: dict[int, bytes] = {}  # reservation -> its parent, if that was there
        self.pinned_hard: list[list[bytes]] = []
        self.clock = 0
        super().__init__(**options)  # type: ignore[arg-type]

    def _do_publish(self, effect: ev.DoPublish) -> ev.Published:
        before = set(self.index)
        answer = super()._do_publish(effect)
        for at in range(len(effect.records)):
            key = effect.keys[32 * at : 32 * at + 32]
            if key in self.index and key not in before and key not in self.published_at:
                self.clock += 1
                self.published_at[key] = self.clock
        return answer

    def _do_evict(self, effect: ev.DoEvict) -> ev.Evicted:
        answer = super()._do_evict(effect)
        reason, left = self.evictions[-1]
        if reason is ev.Reason.LIMBO:
            return answer  # their keys left before, and may be there again by now
        withdrawn = [self.families[entry].key for entry in ev_column(answer.held)] if effect.withdraw else []
        gone_at = {key: self.published_at.pop(key) for key in (*left, *withdrawn) if key in self.published_at}
        if reason is not ev.Reason.WITHDRAW:
            prefix_pinned = {key for pin in self.pinned_hard for key in pin}
            assert not prefix_pinned & set(left), "a family that is pinned hard left"
            if effect.withdraw:  # abandoned: it leaves whoever writes behind it
                gone = set(left) | set(withdrawn)
                self.behind_live = {n: key for n, key in self.behind_live.items() if key not in gone}
            assert not set(self.behind_live.values()) & set(left), "a family that somebody writes behind left"
        if reason in POLICY_REASONS and not effect.withdraw:
            self._check_suffixes(gone_at, set(ev_column(answer.held)))
        return answer

    def _check_suffixes(self, gone_at: dict[bytes, int], held: set[int]) -> None:
        """Whoever lies behind what left, in one unbroken chain published in order, has left too, or is held."""
        for key, entry in self.index.items():
            at, one = self.published_at[key], key
            if entry in held:
                continue
            while (parent := self.parents.get(one)) is not None:
                parent_at = gone_at.get(parent) or self.published_at.get(parent)
                if parent_at is None or parent_at > at:
                    break
                assert parent not in gone_at, "a prefix left before its suffix"
                at, one = parent_at, parent


def ev_column(buffer: ev.Buffer) -> list[int]:
    return list(memoryview(buffer).cast("B").cast("I"))


class CoreMachine(RuleBasedStateMachine):
    """Rules are what the world may do to a core; the model is `items`: reservation -> state of each item."""

    policy = "slru"

    @initialize(strict=st.booleans(), grace=st.booleans())
    def start(self, strict: bool, grace: bool) -> None:
        config = CoreConfig(
            policy=self.policy, strict_duplicates=strict, evict_batch_families=4, ghosts=16, journal_requests=3,
            partial_grace_ns=10**9 if grace else 0, partial_idle_ns=2 * 10**9 if grace else 0, hard_pin_share=0.3,
        )  # fmt: skip
        self.world = Watched(
            families_max=22,
            records_max=28,
            segments=[6 * MIB, 5 * MIB],
            config=config,
            ready=False,
            clients=CLIENTS,
        )
        self.world.do(ev.SegmentReady(0, 0, 6 * MIB))
        self.ready = False
        self.strict = strict
        self.items: dict[int, tuple[int, list[bool]]] = {}  # reservation -> client, which items are live
        self.last_written = 0
        self.counters = dict(self.world.core.counters)

    # -- writing -------------------------------------------------------------------------------------------------------

    def members(self, name: int, choice: int) -> tuple[Member, ...]:
        """Chains 0 … 2 have one member a family, the others two (chain 4 a third that is optional)."""
        if name < 3:
            return (Member(0, SIZES[name]),)
        both = (Member(0, SIZES[0]), Member(1, SIZES[1]))
        if name == 4:
            optional = (Member(7, SIZES[0]),)
            return (both, both[:1], optional, both[1:] + optional)[choice]
        return (both, both[:1], both[1:], both[::-1])[choice]

    @rule(
        client=clients, name=chains, begin=positions, count=st.integers(1, 6), choice=st.integers(0, 3),
        skip=st.booleans(), request=requests,
    )  # fmt: skip
    def reserve(
        self, client: int, name: int, begin: int, count: int, choice: int, skip: bool, request: int
    ) -> None:
        world = self.world
        keys = chain(name, min(count, CHAIN_LENGTH - begin), begin)
        parent = chain(name, 1, begin - 1)[0] if begin else None
        members = self.members(name, choice)
        expected = [self.expected(key, member.index, skip) for key in keys for member in members]
        parent_there = parent is not None and parent in world.index
        reply = world.reserve(
            client, keys, members=members, parent=parent, family_members=1 if name < 3 else 2, request=request,
            namespace=name % 2, skip_pending=skip,
        )  # fmt: skip
        if isinstance(reply, ev.ErrorReply):
            self.check_refusal(reply, parent_there or any(key in world.index for key in keys))
            return
        assert list(reply.statuses) == expected
        granted = [status == ev.ReserveStatus.GRANTED for status in reply.statuses]
        assert [place != ev.NO_PLACE for place in reply.places] == granted
        assert bool(reply.reservation) == any(granted)
        if reply.reservation:
            self.items[reply.reservation] = (client, granted)
            world.fill(reply.reservation)
            if parent_there and parent is not None:
                world.behind_live[reply.reservation] = parent

    def expected(self, key: bytes, member: int, skip: bool) -> int:
        world = self.world
        entry = world.index.get(key)
        if entry is not None and member in world.families[entry].members:
            return ev.ReserveStatus.PRESENT
        if skip and any(
            live and keys[at // len(members)] == key and members[at % len(members)].index == member
            for number, (_, states) in self.items.items()
            for keys, members, _, _ in [world.reservations[number]]
            for at, live in enumerate(states)
        ):
            return ev.ReserveStatus.PENDING
        return ev.ReserveStatus.GRANTED

    def check_refusal(self, reply: ev.ErrorReply, own_prefix: bool) -> None:
        """Room is refused only while something keeps it; a writer's own prefix does not leave for its suffix."""
        assert "CAPACITY" in reply.error.code
        world = self.world
        kept = (
            own_prefix
            or any(world.hazards.values())
            or self.items
            or self.pinned()
            or world.core.statistics()["families_limbo"]
        )
        assert kept or not self.ready or reply.error.retry is Retry.NEVER, reply.error

    @rule(client=clients, name=chains, begin=positions, count=st.integers(1, 6), request=requests)
    def write(self, client: int, name: int, begin: int, count: int, request: int) -> None:
        """Reserve and publish at once, as most writers do."""
        self.reserve(client, name, begin, count, 0, False, request)
        number = max(self.items, default=0)
        if number > self.last_written:
            self.last_written = number
            count = len(self.items[number][1])
            self.publish_items(number, 0, count, bytes([1]) * count)

    @rule(client=clients, name=chains, count=st.integers(4, CHAIN_LENGTH), request=requests)
    def write_on(self, client: int, name: int, count: int, request: int) -> None:
        """Go on where the chain ends, as a conversation does."""
        there = self.world.touch(client, chain(name, CHAIN_LENGTH), request)
        if there < CHAIN_LENGTH:
            self.write(client, name, there, count, request)

    @rule(client=clients, name=chains, upto=positions, request=requests)
    def reserve_on(self, client: int, name: int, upto: int, request: int) -> None:
        """Begin to write behind what is there, and leave it at that for now."""
        there = self.world.touch(client, chain(name, upto + 1), request)
        if there < CHAIN_LENGTH:
            self.reserve(client, name, there, 1, 0, False, request)

    @precondition(lambda self: self.items)
    @rule(data=st.data(), include=st.integers(0, 63), partly=st.booleans())
    def publish(self, data: st.DataObject, include: int, partly: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.items)))
        first, count = 0, len(self.items[number][1])
        if partly:
            first = data.draw(st.integers(0, count - 1))
            count = data.draw(st.integers(1, count - first))
        wanted = bytes(1 if not partly or include >> at % 6 & 1 else 0 for at in range(count))
        self.publish_items(number, first, count, wanted)

    def publish_items(self, number: int, first: int, count: int, wanted: bytes) -> None:
        client, states = self.items[number]
        keys, members, _, _ = self.world.reservations[number]
        expected = []
        there = {
            (family.key, m) for family in self.world.families.values() if not family.limbo for m in family.members
        }  # fmt: skip
        for at in range(first, first + count):
            item = (keys[at // len(members)], members[at % len(members)].index)
            if not wanted[at - first]:
                expected.append({ev.PublishStatus.SKIPPED})
            elif not states[at]:
                expected.append({ev.PublishStatus.GONE})
            elif item in there:
                expected.append({ev.PublishStatus.DIFFERS if self.strict else ev.PublishStatus.PRESENT})
            else:
                expected.append({ev.PublishStatus.PUBLISHED, ev.PublishStatus.NO_INDEX})
                there.add(item)
        statuses = self.world.publish(client, number, first, count, include=wanted, checksum=number)
        for at, (status, allowed) in enumerate(zip(statuses, expected, strict=True), start=first):
            assert status in allowed, (status, allowed)
            if status != ev.PublishStatus.SKIPPED:
                states[at] = False
            if status == ev.PublishStatus.PUBLISHED:
                assert self.world.has(keys[at // len(members)])
        self.over(number)

    def over(self, number: int) -> None:
        if not any(self.items[number][1]):
            del self.items[number]
            self.world.behind_live.pop(number, None)

    @rule(client=clients, older=st.integers(0, 5))
    def publish_what_is_not_mine(self, client: int, older: int) -> None:
        number = max(self.world.reservations, default=1) - older
        if number not in self.items or self.items[number][0] != client:
            before = dict(self.world.index)
            assert set(self.world.publish(client, number)) <= {ev.PublishStatus.GONE}
            assert self.world.index == before

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.items)))
        client, states = self.items[number]
        first = data.draw(st.integers(0, len(states)))
        count = data.draw(st.integers(0, len(states) - first))
        assert self.world.abort(client, number, first, count) == sum(states[first : first + count])
        states[first : first + count] = [False] * count
        self.over(number)

    @rule(client=clients)
    def die(self, client: int) -> None:
        mine = [number for number, (owner, _) in self.items.items() if owner == client]
        for number in mine:
            self.world.behind_live.pop(number, None)
            del self.items[number]
        self.world.gone(client)
        self.world.attach(client)

    # -- reading -------------------------------------------------------------------------------------------------------

    @rule(client=clients, name=chains, count=st.integers(1, CHAIN_LENGTH), request=requests)
    def touch(self, client: int, name: int, count: int, request: int) -> None:
        self.world.touch(client, chain(name, count), request)

    @precondition(lambda self: self.world.index)
    @rule(client=clients, data=st.data(), count=st.integers(1, 3))
    def hold(self, client: int, data: st.DataObject, count: int) -> None:
        keys = sorted(self.world.index)
        at = data.draw(st.integers(0, len(keys) - 1))
        self.world.hold(client, keys[at : at + count])

    @rule(client=clients)
    def release(self, client: int) -> None:
        self.world.hazards[client].clear()

    # -- operating -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.world.index)
    @rule(data=st.data(), kind=st.sampled_from([ev.PinKind.SOFT, ev.PinKind.HARD]))
    def pin(self, data: st.DataObject, kind: ev.PinKind) -> None:
        keys = [data.draw(st.sampled_from(sorted(self.world.index)))]
        if isinstance(self.world.pin(keys, kind), ev.AdminReply) and kind is ev.PinKind.HARD:
            self.world.pinned_hard.append(keys)

    @precondition(lambda self: self.pinned())
    @rule()
    def unpin_all(self) -> None:
        self.world.unpin(list(self.world.index))
        self.world.pinned_hard.clear()
        assert not self.pinned()

    def pinned(self) -> bool:
        return bool(self.world.pool("pinned_bytes") or self.world.pool("soft_pinned_bytes"))

    @rule(namespace=st.sampled_from([None, 0, 1]))
    def clear(self, namespace: int | None) -> None:
        result = self.world.clear(namespace)
        kept = result["kept"]
        assert isinstance(kept, dict)
        assert set(kept) <= {"leased", "pinned", "reserved"}
        if (
            not any(self.world.hazards.values())
            and not self.items
            and not self.pinned()
            and namespace is None
        ):
            assert not kept
            assert not self.world.index

    @precondition(lambda self: self.world.index)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.world.index)))
        behind = self.known_behind(key)
        self.world.withdraw([key])
        assert not self.world.has(key)
        assert not behind & set(self.world.index), "something behind a withdrawn family can be found"
        pins = (
            self.world.pinned_hard
        )  # what is left of a pinned prefix stays pinned, but only the core knows how much
        pins[:] = [pin for pin in pins if set(pin) <= set(self.world.index)]
        for number, parent in list(self.world.behind_live.items()):
            if parent not in self.world.index:
                del self.world.behind_live[number]

    def known_behind(self, key: bytes) -> set[bytes]:
        """Families that lie behind this one in an unbroken chain that was published in order."""
        world = self.world
        found = {key}
        for other in sorted(world.index, key=lambda one: world.published_at[one]):
            parent = world.parents.get(other)
            if parent in found and world.published_at[parent] < world.published_at[other]:
                found.add(other)
        return found

    @rule(seconds=st.sampled_from([0.01, 2.0]))
    def tick(self, seconds: float) -> None:
        self.world.sleep(seconds)
        self.world.tick()

    @precondition(lambda self: not self.ready)
    @rule()
    def more_memory(self) -> None:
        self.ready = True
        self.world.do(ev.SegmentReady(1, 0, 2 * MIB))
        self.world.do(ev.SegmentReady(1, 2 * MIB, 5 * MIB))

    @rule(name=chains, at=positions, full=st.booleans())
    def full_buckets(self, name: int, at: int, full: bool) -> None:
        keys = set(chain(name, 1, at))
        self.world.no_index = self.world.no_index | keys if full else self.world.no_index - keys

    # -- always --------------------------------------------------------------------------------------------------------

    @invariant()
    def books_agree_with_the_world(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.check_content()
        statistics = world.core.statistics()
        assert statistics["families"] == len(world.index)
        assert statistics["families_limbo"] == sum(family.limbo for family in world.families.values())
        assert statistics["reservations"] == len(self.items)
        assert statistics["records"] == len(world.records) + len(world.pending)
        assert world.pool("usable_bytes") - world.pool("free_bytes") - sum(
            slab.size_class.slab_frames * 2 * MIB - slab.size_class.slab_slots * slab.size_class.slot_bytes
            for slab in world.core._books.slots.slabs()
        ) == sum(world.pool(name) for name in ("used_bytes", "reserved_bytes", "limbo_bytes"))
        counters = world.core.counters
        assert all(counters[name] >= value for name, value in self.counters.items()), "a counter fell"
        self.counters = dict(counters)

    @invariant()
    def misses_are_explained(self) -> None:
        if not hasattr(self, "world"):
            return
        for number in list(self.items)[:1]:
            keys, members, _, _ = self.world.reservations[number]
            live = self.items[number][1].index(True)
            cause = self.world.core.miss_cause(key8(keys[live // len(members)]), self.world.now_ns)
            assert cause == "being written"

    def teardown(self) -> None:
        """Everybody goes; nothing is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        world.behind_live.clear()
        world.pinned_hard.clear()
        for client in range(CLIENTS):
            world.gone(client)
        world.unpin(list(world.index))
        result = world.clear()
        assert result["kept"] == {}
        world.tick()
        statistics = world.core.statistics()
        assert not world.index
        assert not world.slots
        for name in (
            "families",
            "families_promised",
            "families_limbo",
            "families_partial",
            "records",
            "runs",
            "reservations",
        ):
            assert statistics[name] == 0, name
        assert world.pool("free_bytes") == world.pool("usable_bytes") == world.pool("free_frames_bytes")
        assert all(total == {"families": 0, "bytes": 0} for total in statistics["namespaces"].values())  # type: ignore[attr-defined]


class LruMachine(CoreMachine):
    """The same under another policy."""

    policy = "lru"


class ValueMachine(CoreMachine):
    """And under the third."""

    policy = "value"
