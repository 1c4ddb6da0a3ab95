"""A keeper process that dies, is slow, or cannot be reached for a moment: the daemon waits for none and loses nothing.

The keeper is the other end of a socket pair, held by the test; time is the test's.
"""

import errno
import os
import socket

import pytest

from kvd.errors import UnavailableError
from kvd.server import keeper, keeping
from kvd.server.keeping import BEHIND_MAX_S, PAUSE_MAX_S, KeeperProcess


class Timer:
    def __init__(self, at_s, call, args):
        self.at_s, self.call, self.args = at_s, call, args
        self.cancelled = False

    def cancel(self):
        self.cancelled = True


class Loop:
    """Time, timers and readers."""

    def __init__(self):
        self.now_s, self.timers, self.readers = 1000.0, [], {}

    def time(self):
        return self.now_s

    def call_later(self, seconds, call, *args):
        self.timers.append(Timer(self.now_s + seconds, call, args))
        return self.timers[-1]

    def add_reader(self, fd, call, *args):
        self.readers[fd] = (call, args)

    def remove_reader(self, fd):
        return self.readers.pop(fd, None) is not None

    @property
    def waiting(self):
        return [timer for timer in self.timers if not timer.cancelled]

    def next(self):
        """The next timer, at its time; how long that took."""
        timer = min(self.waiting, key=lambda one: one.at_s)
        self.timers.remove(timer)
        began_s, self.now_s = self.now_s, max(self.now_s, timer.at_s)
        timer.call(*timer.args)
        return self.now_s - began_s


class Host:
    """Starts keepers that the test reads for, or cannot start them."""

    def __init__(self, monkeypatch, path):
        self.loop, self.told, self.ends, self.can_start = Loop(), [], [], True
        monkeypatch.setattr(KeeperProcess, "_start", self._start)
        self.keep = KeeperProcess(str(path / "keeper.sock"))
        self.fd = os.memfd_create("region")

    def _start(self, *_):
        if not self.can_start:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setblocking(False)
        self.ends.append(theirs)
        return ours

    def watch(self):
        self.keep.watch(self.loop, lambda call, *args: call(*args), lambda *told: self.told.append(told))
        assert self.told.pop() == ("ok", "")

    def die(self):
        """The newest keeper ends, and the loop sees it."""
        self.ends[-1].close()
        ((call, args),) = self.loop.readers.values()
        call(*args)

    def heard(self):
        """What the newest keeper was told since the last time."""
        found = []
        while True:
            try:
                data, fds = keeper.receive(self.ends[-1])
            except BlockingIOError:
                return found
            assert len(fds) == data.startswith(b"store")
            for fd in fds:
                os.close(fd)
            found.append(data.decode())

    def hear_all(self):
        found = self.heard()
        while self.loop.waiting:
            self.loop.next()
            found += self.heard()
        return found

    def store_until_full(self):
        """Names that it took, then one that it did not."""
        number = 0
        while not self.loop.waiting:
            number += 1
            self.keep.store(f"kvd-client-{number}", self.fd)
        return number

    def close(self):
        self.keep.close()
        for end in self.ends:
            end.close()
        os.close(self.fd)


@pytest.fixture
def host(monkeypatch, tmp_path):
    one = Host(monkeypatch, tmp_path)
    yield one
    one.close()


def test_one_that_dies_again_and_again_is_started_ever_more_seldom(host):
    """Fails if the pause begins anew each time: it was started 40 times a second, when the host had no memory."""
    host.keep.store("kvd-meta-1", host.fd)
    host.watch()
    pauses_s = []
    for _ in range(9):
        host.die()
        pauses_s.append(host.loop.next())
    assert pauses_s == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    host.loop.now_s += PAUSE_MAX_S + 1
    host.die()
    assert host.loop.next() == 0, "the last one lived long: the next one comes at once"


def test_one_that_dies_before_it_has_everything_has_not_lived_long(host):
    """Fails if the time of the one before counts for it: it would be started without a pause for ever."""
    host.watch()
    host.die()
    host.loop.next()
    assert host.told[-1] == ("ok", "")
    host.loop.now_s += PAUSE_MAX_S + 1
    host.store_until_full()
    pauses_s = []
    for _ in range(5):
        host.die()
        pauses_s.append(host.loop.next())
    assert pauses_s == [0, 1, 2, 4, 8]
    assert host.told[-1][0] == "degraded"


def test_one_that_cannot_be_started_is_tried_ever_more_seldom(host):
    host.watch()
    host.can_start = False
    host.die()
    assert [host.loop.next() for _ in range(5)] == [0, 1, 2, 4, 8]
    assert host.told[-1][0] == "degraded"
    host.can_start = True
    host.loop.next()
    assert host.told[-1] == ("ok", "")


def test_one_that_dies_while_it_is_given_all_stops_nothing(host):
    """Fails if the timer of the hand-over survives its keeper: it used a closed socket, which ended the daemon."""
    host.watch()
    count = host.store_until_full()
    for number in range(count + 1, 2 * count):
        host.keep.store(f"kvd-client-{number}", host.fd)
    host.die()
    host.loop.next()  # the next one is given what fits
    host.can_start = False
    host.die()
    assert len(host.loop.waiting) == 1
    host.loop.next()  # and cannot be started
    assert len(host.loop.waiting) == 1
    host.can_start = True
    host.told.clear()
    host.loop.next()
    assert len(host.loop.waiting) == 1, "two chains of hand-overs"
    told = host.hear_all()
    assert told == [f"store kvd-client-{number}" for number in range(1, 2 * count)]
    assert host.told == [("ok", "")]


def test_what_it_does_not_take_now_waits_and_holds_nobody_up(host):
    """Fails if `store` waits (an attach held the loop for 5 s), or forgets what was not taken."""
    host.keep.store("kvd-meta-1", host.fd)
    host.watch()
    assert host.heard() == ["store kvd-meta-1"]
    count = host.store_until_full()
    host.keep.remove("kvd-client-1")
    host.keep.store("kvd-gone", host.fd)
    host.keep.remove("kvd-gone")
    began_s = host.loop.now_s
    while host.loop.now_s - began_s <= 2 * BEHIND_MAX_S:
        host.loop.next()
    assert [state for state, _ in host.told] == ["degraded"]
    assert host.hear_all() == [
        *(f"store kvd-client-{number}" for number in range(1, count + 1)),
        "remove kvd-client-1",
    ]
    assert [state for state, _ in host.told] == ["degraded", "ok"]


def test_want_of_memory_is_not_its_death(host, monkeypatch):
    """Fails if every OSError counts as death: what was not kept was missing in the next restart, with health ok."""
    host.watch()
    wants = [errno.ENOBUFS, errno.ENOMEM, errno.ETOOMANYREFS]
    real = keeper.send

    def send(*args):
        if wants:
            raise OSError(wants[-1], os.strerror(wants.pop()))
        real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(keeping.keeper, "send", send)
        host.keep.store("kvd-client-1", host.fd)
        assert len(wants) == 2
        assert host.hear_all() == ["store kvd-client-1"]
        # The same while a new one is given everything.
        wants.extend([errno.ENOBUFS] * 20)
        host.die()
        host.loop.next()
        assert host.hear_all() == ["store kvd-client-1"]
    assert not wants
    assert host.told[-1] == ("ok", "")


def test_meta_is_given_last(host):
    host.keep.store("kvd-meta-1", host.fd)
    host.keep.store("kvd-client-1", host.fd)
    host.watch()
    host.die()
    host.loop.next()
    assert host.hear_all() == ["store kvd-client-1", "store kvd-meta-1"]


def test_before_it_is_watched_what_is_not_taken_is_an_error(host):
    host.ends[-1].close()
    with pytest.raises(UnavailableError, match="did not take kvd-meta-1"):
        host.keep.store("kvd-meta-1", host.fd)
