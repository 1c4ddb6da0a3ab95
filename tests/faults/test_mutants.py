"""Each safety mechanism is left out once, and a concrete story must then go wrong: a test that cannot fail is a defect.

Native mechanisms are left out of the testing build by name (kvd/shm/native/mutants.hpp), those of the daemon's and the
client's Python code by replacing them (inject/sitecustomize.py, and below).
"""

from __future__ import annotations

import errno
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

import native_build
import pytest
import single_step
from clients_of_faults import READ, WRITTEN
from faults_world import CHUNKS, MANIFEST, SIZE, chain_of, injected, namespace, publish, space, until

import kvd
from kvd.clientlib import leases as leases_module

pytestmark = pytest.mark.slow
HERE = Path(__file__).resolve().parent

STORIES = {  # mechanism -> what must go wrong without it
    "REVALIDATE": ["paused_reader"],
    "GENERATION": ["paused_reader"],
    "HAZARD_SCAN": ["leased_family"],
    "EXPORTS": ["released_under_a_view"],
    "IDENTITY": ["equal_tags"],
    "OWNER_CHECK": ["foreign_publish"],
    "RING_BOUNDS": ["hostile_tail", "hostile_length"],
}
FENCES = {  # mechanism -> the step just before it
    "READER_FENCE": ("fenced_reader", "lease.hazard"),
    "DAEMON_FENCE": ("fenced_daemon", "evict.marked"),
}

ELSEWHERE = {  # mechanism -> the tests that leave it out, because they need a daemon that is restarted
    "REVOKED": "ipc/test_restart.py",
}


def play(library: Path, story: str, mutant: str) -> str:
    command = native_build.command(library, str(HERE / "mutant_scenarios.py"), story)
    done = subprocess.run(
        command, env={**os.environ, "KVD_MUTANT": mutant}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("mechanism", "story"), [(name, story) for name, stories in STORIES.items() for story in stories]
)
def test_a_native_mechanism_left_out_is_seen(library: Path, mechanism: str, story: str) -> None:
    assert play(library, story, "") == "safe"
    wrong = play(library, story, mechanism)
    print(f"without {mechanism}: {wrong}")
    assert wrong
    assert wrong != "safe"


@pytest.mark.parametrize("mechanism", FENCES)
def test_the_fences_are_executed(library: Path, mechanism: str) -> None:
    """That they are needed is proven by tests/model/test_lease_protocol.py::test_omission_is_found."""
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip(f"looks at x86-64 instructions, this is {platform.machine()}; tests/model has the proof")
    story, step = FENCES[mechanism]
    counts = {}
    for mutant in ("", mechanism):
        command = native_build.command(library, str(HERE / "mutant_scenarios.py"), story)
        env = {**os.environ, "KVD_MUTANT": mutant, "KVD_STOP_AT": step}
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
        try:
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            # From the step before the fence to the step after it are some hundred instructions.
            counts[mutant] = single_step.count_fences(process.pid, 2000)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            pytest.skip(f"ptrace is not allowed here ({error}); tests/model has the proof")
        finally:
            process.kill()
            process.wait()
    assert counts == {"": 1, mechanism: 0}


def test_every_native_mechanism_has_a_story() -> None:
    """The names are those of the build, so that a new mechanism cannot be forgotten here."""
    source = (native_build.ROOT / "kvd/shm/native/mutants.hpp").read_text()
    assert set(re.findall(r'^KVD_MUTANT\(\w+, "(\w+)"\)', source, re.MULTILINE)) == {
        *STORIES, *FENCES, *ELSEWHERE,
    }  # fmt: skip
    for name, tests in ELSEWHERE.items():
        assert f'"{name}"' in (native_build.ROOT / "tests" / tests).read_text()


# --- mechanisms in Python


def daemon_without(daemon: Any, omit: str, **options: Any) -> Any:
    return daemon(
        pool={"size": "16MiB"}, clients={"max": 2},
        env=injected(FAULTS_OMIT=omit), **options,
    )  # fmt: skip


def published_before_death(running: Any, ns: kvd.Namespace, child: Any) -> bool:
    """Whether what a writer had pushed as published when it was killed is there."""
    one = child("filled", running.socket, stop_at="push.visible:2")
    one.wait_stopped()
    assert space(running)["reserved"] == CHUNKS * SIZE  # the daemon has answered, and sleeps
    one.resume()
    one.wait_stopped()
    one.kill()
    until(lambda: len(running.call("clients")) == 1, "the dead writer's slot")
    return ns.match(chain_of(ns, WRITTEN)) == CHUNKS


def reclaimed(running: Any, ns: kvd.Namespace, child: Any) -> bool:
    """Whether the space that a dead writer was filling is free again."""
    one = child("half", running.socket)
    one.wait_stopped()
    assert space(running)["reserved"] == CHUNKS * SIZE
    one.kill()
    until(lambda: len(running.call("clients")) == 1, "the dead writer's slot")
    return space(running)["reserved"] == 0


def kept_while_it_lives(running: Any, ns: kvd.Namespace, child: Any) -> bool:
    """Whether a stopped writer without sockets keeps its slots."""
    one = child("unplugged", running.socket)
    assert one.line() == "unplugged"
    one.wait_stopped()
    until(lambda: all(row["state"] != "attached" or row["name"] != "unplugged" for row in running.call("clients")),
          "seen as left")  # fmt: skip
    return space(running)["reserved"] == CHUNKS * SIZE


@pytest.mark.parametrize(
    ("omit", "holds"),
    [("drain", published_before_death), ("reclaim", reclaimed), ("pidfd", kept_while_it_lives)],
)
def test_a_mechanism_of_the_daemon_left_out_is_seen(daemon: Any, child: Any, omit: str, holds: Any) -> None:
    for left_out in ("", omit):
        running = daemon_without(daemon, left_out)
        running.expected_codes.add(70)  # books that disagree may stop it
        with kvd.connect(running.socket, client="observer") as store:
            assert holds(running, namespace(store), child) is (left_out == "")


def test_b3_releasing_by_a_rebuilt_key_is_seen(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end by what they are; with a key built again, without its salt, nothing is released."""
    running = daemon(pool={"size": "16MiB"})

    def lease_and_release(store: kvd.Store) -> int:
        ns = namespace(store)
        if not ns.match(chain_of(ns, READ)):
            publish(ns, chain_of(ns, READ))
        leases = ns.acquire(chain_of(ns, READ))
        leases._chain = chain_of(store.namespace(kvd.Manifest(**{**MANIFEST, "salt": "another"})), READ)
        leases.release()
        return space(running)["leases"]

    def by_key(self: Any) -> None:
        store._keep = self  # type: ignore[attr-defined]
        store.native.acquire(self._chain.identities).release()

    with kvd.connect(running.socket) as store:
        assert lease_and_release(store) == 0
        monkeypatch.setattr(leases_module.Leases, "release", by_key)
        assert lease_and_release(store) == CHUNKS
