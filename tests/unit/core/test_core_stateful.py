"""The core against a plain model, and proof that the model sees what it is there to see."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
import pytest
from core_machine import CoreMachine, LruMachine

checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
thorough = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=checks, print_blob=True
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("machine", [CoreMachine, LruMachine])
def test_core_agrees_with_a_plain_model(machine: type[CoreMachine]) -> None:
    run_state_machine_as_test(machine, settings=thorough)
