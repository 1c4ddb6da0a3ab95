"""The list of names that the next daemon reads: what it says, and what becomes of it when it cannot be written anew."""

import errno
import os

import pytest

from kvd import limits
from kvd.errors import CapacityError, UnavailableError, UsageError
from kvd.layout.manifest import Manifest
from kvd.server import adoption, names
from kvd.server.keeping import Nobody
from kvd.server.namespaces import Namespaces

LONG_BYTES = 7000


def manifest_of(number):
    fields = {"model": "m", "revision": "r", "dtype": "bfloat16", "fixed": "*", "salt": ""}
    return Manifest(tenant=str(number), extra={"long": "x" * LONG_BYTES}, **fields).encode()


def made():
    spaces = Namespaces(lambda number: False)
    spaces.names = names.Names(1, 77, bytes(16), "test")
    return spaces


def same(spaces, fd):
    """Whether this file says what is known."""
    found = {number: Manifest.decode(encoded).root for number, encoded, _ in names.read(fd).namespaces}
    return found == {number: record.root for number, record in spaces.by_number.items()}


def use(spaces, count, first=0):
    for number in range(first, first + count):
        spaces.register(manifest_of(number), f"label {number}")
        yield number


@pytest.fixture
def few(monkeypatch):
    """So few namespaces that some are forgotten soon; copies of the last one must be made in many steps."""
    monkeypatch.setattr(limits, "namespaces_max", 96)
    monkeypatch.setattr(names, "FORGOTTEN_BYTES_MIN", 512 * limits.KIB)
    monkeypatch.setattr(names, "RENEWED_BYTES_STEP", 3 * LONG_BYTES)


@pytest.mark.slow
def test_it_says_what_is_known_at_any_time(few):
    """Fails if what is added or forgotten while another file is being written is not in that one too."""
    spaces = made()
    kept = spaces.register(manifest_of("kept"), "kept", None, "somebody")
    files = 0

    def renewed(following):
        nonlocal files
        files += 1
        assert same(spaces, following.fd)

    spaces.names_renewed = renewed
    for number in use(spaces, 400):
        if number % 20 == 0:
            assert same(spaces, spaces.names.fd)
        assert os.fstat(spaces.names.fd).st_size < 3 << 20
    assert files > 1
    assert ("kept", kept.number) in {
        (label, number) for number, _, label in names.read(spaces.names.fd).namespaces
    }


@pytest.mark.parametrize("newest", [False, True])
def test_what_is_forgotten_while_it_is_copied_stays_forgotten(few, newest):
    """Fails if it is not forgotten in the copy as well: what was copied already would come back after a restart."""
    one = names.Names(1, 77, bytes(16), "test")
    living = list(range(1, 61))
    for number in [*living, *living, *living]:
        one.add_namespace(number, manifest_of(number), "")
    following = None
    while following is None:
        following = one.renew_some()
        gone = living.pop(-1 if newest else 0)
        if following is None:
            one.forget_namespace(gone)
        else:
            living.append(gone)
    assert len(living) < 50
    for file in (one, following):
        assert [number for number, _, _ in names.read(file.fd).namespaces] == sorted(living)
        file.retire()


@pytest.mark.slow
def test_it_is_written_anew_in_steps(few, monkeypatch):
    """Fails if all of it is copied at once: at the bound that stopped the loop for half a second."""
    read_bytes = 0
    real = os.pread

    def pread(fd, size, at):
        nonlocal read_bytes
        read_bytes += size
        return real(fd, size, at)

    monkeypatch.setattr(names.os, "pread", pread)
    spaces = made()
    files = []
    spaces.names_renewed = files.append
    for _ in use(spaces, 400):
        assert read_bytes <= 4 * LONG_BYTES
        read_bytes = 0
    assert files


def test_a_manifest_has_a_bound():
    with pytest.raises(UsageError, match="at most 8192 B"):
        Manifest(
            model="m",
            revision="r",
            dtype="bfloat16",
            fixed="*",
            tenant="",
            salt="",
            extra={"long": "x" * 8192},
        )


@pytest.mark.slow
def test_no_memory_for_another_file_costs_nothing(few, monkeypatch):
    """Fails if a copy that cannot be ended is left: each namespace more leaked one, and was refused."""
    spaces = made()
    before = len(os.listdir("/proc/self/fd"))
    real, failures = os.pwrite, 0

    def pwrite(fd, data, at):
        nonlocal failures
        if fd != spaces.names.fd and at > 20 * LONG_BYTES:
            failures += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fd, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(names.os, "pwrite", pwrite)
        for _ in use(spaces, 500):
            pass
        assert 1 <= failures < 10, "tried again too often"
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    assert same(spaces, spaces.names.fd)
    files = []
    spaces.names_renewed = files.append
    for _ in use(spaces, 300, 500):
        pass
    assert files
    assert same(spaces, spaces.names.fd)


class Manager(Nobody):
    """Keeps copies, and sometimes does not answer."""

    def __init__(self):
        super().__init__()
        self.stored, self.fails = {}, ""

    def store(self, name, fd):
        assert name not in self.stored
        if self.fails and self.fails in name:
            raise UnavailableError(f"nobody took {name}", code="keep", name=name)
        self.stored[name] = os.dup(fd)

    def remove(self, name):
        if name in self.stored:
            os.close(self.stored.pop(name))


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["names", "meta"])
def test_a_set_that_is_not_kept_leaves_the_last_one_in_force(few, fails):
    """Fails if the list goes on in a file that nobody keeps: the next daemon would give its namespaces other names."""
    spaces, keep = made(), Manager()
    meta_fd = os.memfd_create("meta")

    class Domain:
        pass

    domain = Domain()
    domain.meta_fd, domain.namespaces = meta_fd, spaces
    started = adoption.Started(domain, adoption.Outcome("test"), 1)
    keep.store("kvd-names-1", spaces.names.fd)
    keep.store("kvd-meta-1", meta_fd)
    tried = []

    def renewed(following):
        tried.append(following)
        adoption.keep_names(keep, started, following)

    spaces.names_renewed = renewed
    before = len(os.listdir("/proc/self/fd"))
    keep.fails = fails
    for _ in use(spaces, 400):
        pass
    assert 1 <= len(tried) < 10
    assert set(keep.stored) == {"kvd-names-1", "kvd-meta-1"}
    assert started.number == 1
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # a copy may be in the making
    assert same(spaces, keep.stored["kvd-names-1"])
    keep.fails = ""
    failed = len(tried)
    for _ in use(spaces, 300, 400):
        pass
    assert len(tried) > failed
    assert set(keep.stored) == {f"kvd-names-{started.number}", f"kvd-meta-{started.number}"}
    assert started.number == 1 + len(tried), "a number that was tried is not used again"
    assert same(spaces, keep.stored[f"kvd-names-{started.number}"])


@pytest.mark.slow
def test_the_file_before_cannot_be_read(few):
    """Fails if it stays: kept a moment longer than the next one, it would be believed, and is written to no more."""
    spaces = made()
    old = os.dup(spaces.names.fd)
    files = []
    spaces.names_renewed = files.append
    for _ in use(spaces, 400):
        pass
    assert files
    with pytest.raises(Exception, match="cannot be read"):
        names.read(old)
    os.close(old)


def test_no_memory_for_a_name_is_refused_and_known_to_nobody(few, monkeypatch):
    spaces = made()
    with monkeypatch.context() as patched:
        patched.setattr(names.os, "pwrite", lambda fd, data, at: 3)
        with pytest.raises(CapacityError, match="no memory for a name"):
            spaces.register(manifest_of("x"), "")
    assert not len(spaces)
    assert spaces.register(manifest_of("y"), "").number == 1
    assert same(spaces, spaces.names.fd)
