"""Recording in the daemon: a file of what real rings and a real table did, replayed to the same state; its bounds."""

import errno
import os
import stat
import time

import msgpack
import pytest

from kvd.core.core import Core
from kvd.core.trace import Replay
from kvd.errors import CapacityError, UsageError
from kvd.server import trace as traces
from kvd.server.trace import Tracer


def values_of(path):
    with path.open("rb") as source:
        return list(msgpack.Unpacker(source, raw=False, strict_map_key=False, max_buffer_size=1 << 30))


def replay_of(path):
    replay = Replay()
    for value in values_of(path):
        assert not replay.done, "values after the end"
        replay.take(value)
    return replay


def finish(tracer):
    """Until the writer has ended."""
    tracer._last[0].thread.join(10)
    status = tracer.status()
    assert status["written"]
    return status


def test_what_clients_do_is_recorded_and_replays(world, keys, tmp_path):
    here = world()
    client = here.attach()
    client.store(keys(20), size=100_000)
    tracer = Tracer(here.domain)
    plain = here.domain.core
    assert tracer.status() == {"recording": False}
    path = tmp_path / "one.trace"
    assert tracer.start(str(path))["recording"]
    other = here.attach()
    for seed in range(12):
        other.store(keys(10, seed), size=300_000)
    other.reserve(keys(5, 99), size=70_000)
    here.runner.tick()
    status = tracer.stop()
    assert here.domain.core is plain
    assert type(plain) is Core
    recorded = plain.statistics()
    client.store(keys(3, 55), size=4096)  # no longer on record
    status = finish(tracer)
    assert status["ended"] == "stopped"
    assert status["error"] == ""
    replay = replay_of(path)
    assert replay.difference == ""
    assert replay.events == status["events"] > 40
    assert replay.core.statistics() == recorded
    assert replay.kinds["Evicted"] > 0
    assert stat.S_IMODE(path.stat().st_mode) & 0o007 == 0
    assert path.stat().st_size == status["bytes"]


def test_one_at_a_time_and_in_new_files_only(world, tmp_path):
    tracer = Tracer(world().domain)
    taken = tmp_path / "taken"
    taken.write_text("something")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    for path, text in (
        (str(taken), "File exists"), (str(link), "File exists"), ("relative", "no absolute path"),
        (str(tmp_path / "a\0b"), "no absolute path"), (str(tmp_path / "none" / "x"), "No such file"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=text):
            tracer.start(path)
    assert taken.read_text() == "something"
    with pytest.raises(UsageError, match="limit_bytes is"):
        tracer.start(str(tmp_path / "x"), 5)
    with pytest.raises(UsageError, match="no trace is recorded"):
        tracer.stop()
    tracer.start(str(tmp_path / "first"))
    with pytest.raises(UsageError, match="recorded already"):
        tracer.start(str(tmp_path / "second"))
    tracer.close()
    assert finish(tracer)["ended"] == "the daemon ended"
    assert replay_of(tmp_path / "first").ended == "the daemon ended"
    assert not (tmp_path / "second").exists()


def test_the_limit_ends_the_recording_and_nothing_else(world, keys, tmp_path):
    """Fails if the queue or the file grows without bound, or if serving depends on the recording."""
    here = world()
    client = here.attach()
    tracer = Tracer(here.domain)
    path = tmp_path / "small"
    tracer.start(str(path), traces.LIMIT_BYTES_MIN)
    for seed in range(60):
        client.store(keys(64, seed), size=4096)
    status = finish(tracer)
    assert not status["recording"]
    assert status["ended"] == f"the limit of {traces.LIMIT_BYTES_MIN} B is reached"
    assert path.stat().st_size <= traces.LIMIT_BYTES_MIN + 200
    replay = replay_of(path)
    assert replay.difference == ""
    assert replay.ended == status["ended"]
    assert (
        here.domain.core.statistics()["families"] == 2048 or here.domain.core.counters["published"] == 60 * 64
    )


def test_a_state_that_is_larger_than_the_limit_is_refused(world, keys, tmp_path):
    here = world()
    client = here.attach()
    for seed in range(60):
        client.store(keys(64, seed), size=1024)
    tracer = Tracer(here.domain)
    path = tmp_path / "x"
    with pytest.raises(CapacityError, match="state at the start takes"):
        tracer.start(str(path), traces.LIMIT_BYTES_MIN)
    assert not path.exists()
    assert type(here.domain.core) is Core


def test_a_disk_that_is_full_ends_the_recording(world, keys, tmp_path, monkeypatch):
    here = world()
    client = here.attach()
    tracer = Tracer(here.domain)
    path = str(tmp_path / "x")
    real = os.write

    def full(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}") == path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(traces.os, "write", full)
    tracer.start(path)
    recording = tracer._recording
    give_up = time.monotonic() + 10
    while not recording.error:  # the writer's thread has met it
        assert time.monotonic() < give_up
    client.store(keys(4))
    status = finish(tracer)
    assert status["error"] == "No space left on device"
    assert "cannot be written" in status["ended"]
    assert client.store(keys(4, 1)) == [0] * 4


def test_a_disk_that_is_slow_ends_the_recording(world, keys, tmp_path, monkeypatch):
    """Fails if the queue is not bounded in bytes."""
    here = world()
    client = here.attach()
    tracer = Tracer(here.domain)
    monkeypatch.setattr(traces, "QUEUED_BYTES_MAX", 20_000)
    tracer.start(str(tmp_path / "x"))
    recording = tracer._recording
    recording.written_bytes -= 10**6  # as if so much were still on its way
    client.store(keys(64))
    assert not tracer.status()["recording"]
    assert finish(tracer)["ended"] == "the disk is behind by 20000 B"
