"""Fixtures of the fault tests: the testing build, and client processes that end with their test."""

import pytest
from faults_world import Child, until
from native_build import testing_library


@pytest.fixture(scope="session")
def library():
    """The native extension in which steps and omissions can be named."""
    return testing_library()


@pytest.fixture
def child(library):
    """child(role, socket, stop_at="", mutant="") -> Child."""
    started = []

    def start(role, socket, **options):
        started.append(Child(library, role, socket, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def other_leaves():
    """other_leaves(daemon, clients): until only so many clients are left, as soon as row B1 wants it."""

    def wait(daemon, clients=1):
        from faults_world import BACK_WITHIN_S

        until(lambda: len(daemon.call("clients")) == clients, "the dead client's slot", BACK_WITHIN_S)

    return wait
