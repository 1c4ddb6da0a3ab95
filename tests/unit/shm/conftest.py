"""Fixtures of the shared-memory tests: a domain in miniature, and keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random

import pytest
from shm_world import SEED, World


@pytest.fixture
def make_world() -> Iterator[Callable[..., World]]:
    worlds: list[World] = []

    def make(*, families: int = 64, hazards: int = 256) -> World:
        worlds.append(World(families=families, hazards=hazards))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    return make_world()


@pytest.fixture
def keys() -> bytes:
    """Forty keys of 32 bytes."""
    return Random(SEED).randbytes(40 * 32)
