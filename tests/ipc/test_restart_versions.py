"""A daemon over memory of another layout version: dropped by a line that names both, never read as if it were its own.

The test is the service manager and puts another version into what it keeps: into the list of names, into the index
itself, into one of both. Whoever still reads the old memory reads on: nobody else gets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from restart_world import Child, Series, chain_of, manifest, payload, put, read

import kvd
from kvd.server.names import Names
from kvd.server.names import read as read_names
from kvd.shm.layout import LAYOUT_VERSION, OFFSETS

pytestmark = pytest.mark.slow


@pytest.fixture
def series(daemon: Any) -> Iterator[Series]:
    made = Series(daemon, manager=True, pool={"size": "16MiB"})
    yield made
    made.close()


@pytest.fixture
def child(series: Series) -> Iterator[Child]:
    made = Child(series.running.socket)
    yield made
    made.close()


def kept(series: Series, what: str) -> str:
    """The name under which the newest of this sort is kept."""
    return max(name for name in series.stored if name.startswith(f"kvd-{what}-"))


def replace(series: Series, name: str, fd: int) -> None:
    os.dup2(fd, series.stored[name])
    os.close(fd)


def other_names(series: Series, version: int) -> None:
    """The list of names as a daemon of that layout version had written it."""
    name = kept(series, "names")
    known = read_names(series.stored[name])
    other = Names(version, known.epoch, known.boot_id, "0.0.9")
    for number, encoded, label in known.namespaces:
        other.add_namespace(number, encoded, label)
    replace(series, name, other.fd)


def other_index(series: Series, version: int) -> None:
    """META with that version in its header, everything else as it is: all of it would read well as this version's."""
    name = kept(series, "meta")
    fd = series.stored[name]
    image = bytearray(os.pread(fd, os.fstat(fd).st_size, 0))
    at = OFFSETS["MetaHeader"]["version"]
    assert int.from_bytes(image[at : at + 4], "little") == LAYOUT_VERSION
    image[at : at + 4] = version.to_bytes(4, "little")
    copy = os.memfd_create("meta", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(copy, image)
    replace(series, name, copy)


DAMAGE: dict[str, tuple[Callable[[Series, int], None], ...]] = {
    "names": (other_names,), "index": (other_index,), "both": (other_names, other_index),
}  # fmt: skip


@pytest.mark.parametrize("version", [LAYOUT_VERSION - 1, LAYOUT_VERSION + 1], ids=["older", "newer"])
@pytest.mark.parametrize("where", DAMAGE)
def test_another_version_is_dropped_naming_both(
    series: Series, child: Child, where: str, version: int
) -> None:
    """Fails (an adopted pool) if the version in the names or that in META is not compared."""
    assert child.say("put", 1, 8) == "done"
    assert child.say("lease", 1, 8) == "8"
    series.kill()
    for damage in DAMAGE[where]:
        damage(series, version)
    series.start()
    restart = series.restart()
    assert not restart["adopted"]
    reason = restart["dropped_reason"]
    assert str(version) in reason, reason
    assert str(LAYOUT_VERSION) in reason.replace(str(version), "", 1), reason
    if where != "index":
        assert f"layout version {version} (kvd 0.0.9)" in reason
        assert f"layout version {LAYOUT_VERSION} (kvd {kvd.__version__})" in reason
    else:
        assert f"layout_version is {version}, expected {LAYOUT_VERSION}" in reason
    (line,) = [line for line in series.running.log_text().splitlines() if '"kept_memory_dropped"' in line]
    assert reason.split(",")[0] in line
    assert series.status()["core"]["families"] == 0
    with kvd.connect(series.running.socket) as store:
        ns = store.namespace(manifest())
        assert ns.match(chain_of(ns, 1, 8)) == 0
        for name in range(2, 40):
            chain = put(ns, name, 16)  # several times the pool
        assert read(ns, chain) == [payload(39, at) for at in range(16)]
    assert child.say("check", 1) == "True"


def test_the_same_version_is_adopted_through_the_same_copies(series: Series, child: Child) -> None:
    """What the others do with another version, with this one: it is the version alone that drops."""
    assert child.say("put", 1, 8) == "done"
    series.kill()
    other_names(series, LAYOUT_VERSION)
    other_index(series, LAYOUT_VERSION)
    series.start()
    restart = series.restart()
    assert (restart["adopted"], restart["families"]) == (True, 8), restart
