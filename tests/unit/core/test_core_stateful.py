"""The core against a plain model, and proof that the model sees what it is there to see.

Each mutation leaves out one thing that keeps the core safe. The machine must fail under every one of them: a
mutation that goes unnoticed means that a real omission of that kind would too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from core_machine import CoreMachine, LruMachine, ValueMachine
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from kvd.core import forest
from kvd.core.administration import Administration
from kvd.core.columns import u32
from kvd.core.events import NONE
from kvd.core.forest import Forest
from kvd.core.leaving import Leaving
from kvd.core.policy import Lru, lists_count
from kvd.core.publishing import Publishing
from kvd.core.reservations import Pending, Reservation, Reservations
from kvd.core.reserving import Reserving
from kvd.core.slots import Slots
from kvd.core.space import Space
from kvd.errors import InvariantError

checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
thorough = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=checks,
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
hunt = settings(
    max_examples=300, stateful_step_count=60, deadline=None, suppress_health_check=checks, database=None,
    derandomize=True, phases=[Phase.generate], report_multiple_bugs=False,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CoreMachine, LruMachine, ValueMachine])
def test_core_agrees_with_a_plain_model(machine: type[CoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=thorough)


@pytest.mark.slow
def test_core_agrees_with_a_plain_model_where_every_path_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest, "path_runs_max", 2)
    monkeypatch.setattr(forest, "held_work_max", 3)
    run_state_machine_as_test(CoreMachine, settings=thorough)


Patch = Callable[[pytest.MonkeyPatch], None]
mutations: dict[str, Patch] = {}


def mutation(patch: Patch) -> Patch:
    mutations[patch.__name__] = patch
    return patch


@mutation
def slots_of_a_dead_client_are_not_freed(patch: pytest.MonkeyPatch) -> None:
    def client_gone(self: Publishing, client: int) -> None:
        books = self._books
        for number in list(books.reservations.of_client.get(client, ())):
            reservation = books.reservations.live[number]
            books.reservations.not_live(
                reservation, [at for at, live in enumerate(reservation.states) if live]
            )
            self._end(reservation)

    patch.setattr(Publishing, "client_gone", client_gone)


@mutation
def promised_entries_are_never_released(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publishing, "_end_promises", lambda self, reservation, families: None)


@mutation
def held_families_are_treated_as_gone(patch: pytest.MonkeyPatch) -> None:
    def keep_held(self: Leaving, plan: Any, held: Any, left: Any) -> None:
        self._books.forest.entries.give(held)
        for run, count in plan.cuts:
            self._books.forest.cut(run, count)

    patch.setattr(Leaving, "_keep_held", keep_held)


@mutation
def withdrawn_families_are_reused_while_held(patch: pytest.MonkeyPatch) -> None:
    honest = Leaving._withdraw_held

    def withdraw_held(self: Leaving, plan: Any, held: Any, left: Any) -> None:
        honest(self, plan, held, left)
        for entry in held:
            self._books.limbo.pop(entry)
        self._books.forest.entries.give(held)

    patch.setattr(Leaving, "_withdraw_held", withdraw_held)


@mutation
def limbo_is_never_tried_again(patch: pytest.MonkeyPatch) -> None:
    def retry_limbo(self: Leaving) -> Any:
        return 0
        yield

    patch.setattr(Leaving, "retry_limbo", retry_limbo)


@mutation
def children_are_not_taken_off_their_parent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Forest, "_unlink_child", lambda self, run: None)


@mutation
def prefixes_leave_before_their_suffixes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Space, "_may_leave", lambda self, run, planned: run not in self._forest.claims)


@mutation
def what_somebody_writes_behind_may_leave(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reserving, "_claim", lambda self, reservation: None)


@mutation
def an_item_can_be_published_twice(patch: pytest.MonkeyPatch) -> None:
    honest = Reservations.not_live

    def not_live(self: Reservations, reservation: Reservation, items: Any) -> None:
        honest(self, reservation, items)
        if reservation.live_count:
            for item in items:
                reservation.states[item] = 1

    patch.setattr(Reservations, "not_live", not_live)


@mutation
def other_clients_reservations_can_be_published(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publishing, "_find", lambda self, client, number: self._books.reservations.live.get(number))


@mutation
def the_slot_of_a_duplicate_is_lost(patch: pytest.MonkeyPatch) -> None:
    honest = Slots.give

    def give(self: Slots, places: Any, *, reserved: bool) -> None:
        if not reserved:
            honest(self, places, reserved=False)

    patch.setattr(Slots, "give", give)


@mutation
def pending_keys_stay_pending(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pending, "remove", lambda self, member, key8s: None)


@mutation
def families_pinned_hard_may_leave(patch: pytest.MonkeyPatch) -> None:
    def victims(self: Lru) -> Any:
        for head in range(lists_count):
            yield from self.runs(head)

    patch.setattr(Lru, "victims", victims)


@mutation
def clear_ignores_pins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Administration, "_cause_to_stay", lambda self, run, planned, stays: stays.get(run, ""))


@mutation
def unused_entries_are_lost_at_publication(patch: pytest.MonkeyPatch) -> None:
    honest = Forest.take_entries

    def take_entries(self: Forest, count: int) -> Any:
        return honest(self, min(count + 1, self.entries.free_count))

    patch.setattr(Forest, "take_entries", take_entries)


@mutation
def a_withdrawn_family_stays_known_to_reservations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reservations, "forget", lambda self, runs, entries: [])


@mutation
def a_grown_family_keeps_its_size(patch: pytest.MonkeyPatch) -> None:
    def add_member(self: Forest, entry: int, slot_bytes: int, class_set: int) -> None:
        missing = self.missing_of[entry] - 1
        if missing >= 0:
            self.missing_of[entry] = missing
            if not missing:
                self.partial.pop(entry, None)

    patch.setattr(Forest, "add_member", add_member)


@mutation
def an_entry_that_left_stays_used(patch: pytest.MonkeyPatch) -> None:
    honest = Forest.cut

    def cut(self: Forest, run: int, count: int) -> int:
        last = self.members[run][-1]
        size_bytes = honest(self, run, count)
        self.run_of[last] = run
        return size_bytes

    patch.setattr(Forest, "cut", cut)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(mutations))
def test_the_machine_sees_this_omission(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutations[name](monkeypatch)
    # What a broken patch would raise (TypeError, AttributeError) is not what a check raises.
    with pytest.raises((AssertionError, InvariantError, KeyError, IndexError, ValueError)):
        run_state_machine_as_test(CoreMachine, settings=hunt)


def test_mutations_name_what_exists() -> None:
    """A patch of something that was renamed would be a mutation of nothing."""
    assert len(mutations) >= 5
    assert u32(b"\xff\xff\xff\xff")[0] == NONE
