"""Real daemons over their sockets: handshake, attach, death, hostility, permissions; failure rows by name."""

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from raw import DEADLINE_S, MANIFEST, Raw, ask_until_the_end, client_process, end, until

import kvd
from kvd import limits
from kvd.clientlib.control import Control
from kvd.errors import CapacityError, CompatibilityError, ProtocolError, UnavailableError, UsageError
from kvd.server.control import CONNECTIONS_RESERVED
from kvd.wire import frames
from kvd.wire import messages as wire

pytestmark = pytest.mark.slow  # each starts a daemon


# --- handshake


def test_versions_are_refused_naming_both(daemon):
    one = daemon()
    for changes, code, said in (
        ({"protocol": [7, 9], "version": "9.9"}, "KVD-COMPAT-PROTOCOL", ("9.9", "7 … 9", kvd.__version__)),
        ({"layout": 5, "version": "9.9"}, "KVD-COMPAT-LAYOUT", ("9.9", "layout 5", kvd.__version__)),
    ):
        raw = Raw(one.socket)
        answer = raw.hello(**changes)
        error = wire.parse_answer(answer)[1].exception()
        assert isinstance(error, CompatibilityError)
        assert error.code == code
        assert all(part in error.message for part in said)
        assert raw.receive() is None


def test_hello_comes_first_and_once(daemon):
    one = daemon()
    raw = Raw(one.socket)
    raw.send(wire.Attach().to_map(3))
    answer = raw.receive()
    assert (answer["t"], answer["id"], answer["error"]["code"]) == ("error", 3, "KVD-PROTOCOL-HANDSHAKE")
    assert raw.receive() is None
    raw = Raw(one.socket)
    assert raw.hello()["t"] == "welcome"
    assert raw.hello()["error"]["code"] == "KVD-PROTOCOL-HANDSHAKE"


def test_silence_ends_after_the_handshake_time(daemon):
    raw = Raw(daemon().socket)
    before = time.monotonic()
    answer = raw.receive()
    assert answer["id"] == 0
    assert "5 s" in answer["error"]["message"]
    assert raw.receive() is None
    assert 4 < time.monotonic() - before < 9


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\3\0\0\0\x93\1\2",
        b"\5\0\0\0\xdf\xff\xff\xff\xff",
    ],
)
def test_malformed_frames_end_their_connection_only(daemon, garbage):
    one = daemon()
    good = one.admin()
    raw = Raw(one.socket)
    assert raw.hello()["t"] == "welcome"
    raw.send(garbage)
    answer = raw.receive()
    assert (answer["t"], answer["id"], answer["error"]["code"]) == ("error", 0, "KVD-PROTOCOL-FRAME")
    assert raw.receive() is None
    assert good.request(wire.Call("health", {}), wire.Result, deadline_s=5).result["state"] in (
        "ok",
        "starting",
    )
    good.close()


def test_wrong_messages_are_answered_and_the_connection_stays(daemon):
    raw = Raw(daemon().socket)
    raw.hello()
    raw.send(
        {"t": "fly", "id": 8},
        {"t": "call", "id": 9, "method": "status"},
        {"t": "call", "id": 10, "method": 1, "params": {}},
    )
    for number, code in ((8, "TYPE"), (9, "MESSAGE"), (10, "MESSAGE")):
        answer = raw.receive()
        assert (answer["id"], answer["error"]["code"]) == (number, f"KVD-PROTOCOL-{code}")
    raw.send({"t": "call", "id": 11, "method": "health", "params": {}, "unknown": [1]})
    assert raw.receive()["result"]["state"] in ("ok", "starting")
    raw.send({"t": "call", "id": "x", "method": "health", "params": {}})
    assert raw.receive()["id"] == 0
    assert raw.receive() is None


def test_too_many_unanswered_requests_end_the_connection(daemon):
    raw = Raw(daemon().socket)
    raw.hello()
    raw.send(*[wire.Call("health", {}).to_map(n) for n in range(1, limits.requests_in_flight_max + 2)])
    answers = []
    while (answer := raw.receive()) is not None:
        answers.append(answer)
    assert answers[-1]["error"]["code"] == "KVD-PROTOCOL-IN-FLIGHT"


def test_a_peer_that_does_not_read_is_not_read(daemon):
    """Answers wait in a bounded queue; the daemon stays small and serves others."""
    one = daemon()
    raw = Raw(one.socket)
    raw.hello()
    raw.sock.settimeout(0.5)
    # Padded, so that what the daemon reads at once stays below the bound on unanswered requests.
    ask = frames.encode({**wire.Call("metrics", {}).to_map(1), "pad": bytes(4096)})
    with pytest.raises(TimeoutError):
        for _ in range(20_000):
            raw.sock.sendall(ask)
    status = one.call("status")
    assert status["private_bytes"] < 200 * limits.MIB


# --- attach


def test_what_a_client_gets_cannot_harm_the_others(daemon):
    """META is sealed against writing even when it is reopened; nothing can be resized under the daemon."""
    one = daemon(pool={"size": "16MiB", "segment_size": "4MiB"})
    control = Control(one.socket, name="x", role="engine", deadline_s=5)
    attached, fds = control.attach(wire.Attach(access="write"), deadline_s=5)
    assert len(fds) == 3 + len(attached.segments)
    assert attached.segments == [4 * limits.MIB] * 4
    meta, region, *segments = fds[0], fds[1], *fds[3:]
    with pytest.raises(PermissionError):
        mmap.mmap(meta, 4096)
    reopened = os.open(f"/proc/self/fd/{meta}", os.O_RDWR)
    with pytest.raises(PermissionError):
        mmap.mmap(reopened, 4096)
    os.close(reopened)
    for fd in (region, *segments):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    with pytest.raises(UsageError, match="attaches once"):
        control.request(wire.Attach(), wire.Attached, deadline_s=5)
    control.close()


def test_pure_readers_get_segments_that_cannot_be_written(daemon):
    one = daemon()
    control = Control(one.socket, name="x", role="engine", deadline_s=5)
    _, fds = control.attach(wire.Attach(access="read"), deadline_s=5)
    with pytest.raises(PermissionError):
        mmap.mmap(fds[3], 4096)
    control.close()


def test_more_segments_than_one_message_can_carry(daemon):
    one = daemon(pool={"size": "500MiB", "segment_size": "2MiB", "populate": "lazy"})
    control = Control(one.socket, name="x", role="engine", deadline_s=5)
    attached, fds = control.attach(wire.Attach(), deadline_s=5)
    assert len(attached.segments) == 250
    assert [os.fstat(fd).st_size for fd in fds[3:]] == attached.segments
    for fd in fds:
        os.close(fd)
    control.close()


def test_unknown_domain_and_roles_are_refused(daemon):
    one = daemon()
    with contextlib.closing(Control(one.socket, name="x", role="engine", deadline_s=5)) as control:
        with pytest.raises(UsageError, match="no domain 'other'"):
            control.request(wire.Attach(domain="other"), wire.Attached, deadline_s=5)
        with pytest.raises(UsageError, match="not attached"):
            control.request(wire.Detach(), wire.Detached, deadline_s=5)
    with contextlib.closing(one.admin()) as control, pytest.raises(UsageError, match="admin connection"):
        control.request(wire.Attach(), wire.Attached, deadline_s=5)


def test_slots_are_bounded_and_come_back(daemon):
    one = daemon(clients={"max": 1})
    first = kvd.connect(one.socket)
    with pytest.raises(CapacityError, match="all 1 client slots"):
        kvd.connect(one.socket)
    first.close()
    until(lambda: one.call("status")["clients"]["attached"] == 0, "slot free")
    kvd.connect(one.socket).close()


def test_a_namespace_has_one_number(daemon):
    one = daemon()
    control = one.admin()
    manifest = kvd.Manifest(**MANIFEST).encode()
    numbers = {
        control.request(wire.Namespace(manifest, "a"), wire.Namespaced, deadline_s=5).number for _ in range(3)
    }
    assert len(numbers) == 1
    with pytest.raises(UsageError):
        control.request(wire.Namespace(b"nonsense"), wire.Namespaced, deadline_s=5)
    control.close()


# --- death and disconnection


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_b9_a_killed_writer_leaves_nothing(daemon, number):
    """B1, B9: reservations come back when the pidfd fires; the keys are writable at once."""
    one = daemon()
    process = client_process(one.socket, "writes = ns.reserve(chain, 65536)")
    assert one.call("status")["core"]["pool"]["reserved_bytes"] == 4 * 65536
    end(process, number)
    until(lambda: one.call("status")["core"]["pool"]["reserved_bytes"] == 0, "reservations given back")
    assert one.call("clients") == []
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(64)), chunk_tokens=16)
    with ns.reserve(chain, 65536) as writes:
        for write in writes:
            write.view[:] = b"\5" * 65536
        writes.publish()
    assert ns.match(chain) == 4
    store.close()


def test_b2_a_killed_reader_leaves_no_lease(daemon):
    one = daemon()
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(64)), chunk_tokens=16)
    with ns.reserve(chain, 65536) as writes:
        writes.fill([b"\5" * 65536] * len(chain))
        writes.publish()
    process = client_process(one.socket, "leases = ns.acquire(chain)")
    assert sum(row["leases"] for row in one.call("clients")) == 4
    cleared = one.call("clear")
    assert cleared["families"] == 0
    end(process)
    until(lambda: len(one.call("clients")) == 1, "slot given back")
    assert one.call("clear")["families"] == 4
    store.close()


def test_a_closed_connection_is_not_a_dead_client(daemon):
    """Freed at EOF, a stopped writer could still write into a slot that belongs to another object."""
    one = daemon()
    process = client_process(
        one.socket,
        "writes = ns.reserve(chain, 65536)\nimport os\n"
        "[os.close(int(fd)) for fd in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + fd)"
        " and 'socket' in os.readlink('/proc/self/fd/' + fd)]",
    )
    (row,) = until(lambda: [r for r in one.call("clients") if r["state"] == "disconnected"], "disconnected")
    assert one.call("status")["core"]["pool"]["reserved_bytes"] == 4 * 65536
    assert row["pid"] == process.pid
    end(process)
    until(lambda: one.call("clients") == [], "gone")
    assert one.call("status")["core"]["pool"]["reserved_bytes"] == 0


def test_a_hostile_ring_ends_one_client_and_tells_it_why(daemon):
    one = daemon()
    good = kvd.connect(one.socket)
    control = Control(one.socket, name="bad", role="engine", deadline_s=5)
    _, fds = control.attach(wire.Attach(), deadline_s=5)
    with mmap.mmap(fds[1], 4096) as region:
        region[192:200] = (1 << 40).to_bytes(8, "little")
    with socket.socket(fileno=fds[2]) as wake:
        wake.send(b"\1")
        with pytest.raises(ProtocolError, match="hostile ring"):
            ask_until_the_end(control)
    assert one.call("status")["counters"]["client_protocol_errors"] == 1
    ns = good.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(64)), chunk_tokens=16)
    with ns.reserve(chain, 4096) as writes:
        writes.fill([b"\5" * 4096] * len(chain))
        writes.publish()
    assert ns.match(chain) == 4
    good.close()
    control.close()


def test_a_client_over_its_lease_limit_is_killed_if_so_configured(daemon):
    one = daemon(clients={"leased_max": "64KiB", "leased_over": "disconnect"})
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(64)), chunk_tokens=16)
    with ns.reserve(chain, 65536) as writes:
        writes.fill([b"\5" * 65536] * len(chain))
        writes.publish()
    process = client_process(one.socket, "leases = ns.acquire(chain)")
    assert process.wait(DEADLINE_S) == -signal.SIGKILL
    until(lambda: len(one.call("clients")) == 1, "slot given back")
    counters = one.call("status")["counters"]
    assert (counters["clients_killed"], counters["client_protocol_errors"]) == (1, 0)
    end(process)
    store.close()


def test_clients_that_come_and_go_leave_no_descriptor(daemon):
    """Orderly, killed, refused, never attached: the daemon has as many descriptors and mappings as before."""
    one = daemon(clients={"max": 2})
    kvd.connect(one.socket).close()
    until(lambda: one.call("clients") == [], "gone")

    def counts():
        with open(f"/proc/{one.pid}/maps") as maps:
            return len(os.listdir(f"/proc/{one.pid}/fd")), sum("kvd-client" in line for line in maps)

    before = until(lambda: one.call("health") and counts(), "counted")
    for _ in range(10):
        first, second = kvd.connect(one.socket), kvd.connect(one.socket)
        with pytest.raises(CapacityError):
            kvd.connect(one.socket)
        first.close()
        second.close()
        raw = Raw(one.socket)
        raw.hello(layout=9)
        raw.sock.close()
        until(lambda: one.call("clients") == [], "gone")
    end(client_process(one.socket, "writes = ns.reserve(chain, 4096)"))
    until(lambda: one.call("clients") == [], "gone")
    until(lambda: one.call("health") and counts() == before, f"{before} again, not {counts()}")


# --- who may


NOBODY = 65534


def as_nobody(code: str) -> str:
    """Run code in a process of another user; what it prints."""
    script = f"import os; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n{code}"
    # Imported before the user changes: the checkout may not be readable for nobody.
    imports = "import kvd\nfrom kvd.clientlib.control import Control\nfrom kvd.wire import messages as wire\n"
    return subprocess.run(
        [sys.executable, "-c", imports + script], capture_output=True, text=True, timeout=60
    ).stdout.strip()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_other_users_need_permission(daemon):
    closed = daemon()
    os.chmod(closed.directory, 0o755)
    ask = (
        "try:\n"
        "    c = Control({!r}, name='n', role='admin', deadline_s=5)\n"
        "    print(c.request(wire.Call({!r}, {{}}), wire.Result, deadline_s=5).result)\n"
        "except Exception as e:\n"
        "    print(e.code)"
    )
    assert as_nobody(ask.format(closed.socket, "health")) == "KVD-USAGE-DENIED"
    listed = daemon(server={"socket_mode": "0666"}, access={"uids": [12345]})
    os.chmod(listed.directory, 0o755)
    assert as_nobody(ask.format(listed.socket, "health")) == "KVD-USAGE-DENIED"
    by_group = daemon(server={"socket_mode": "0666"}, access={"gids": [NOBODY]})
    os.chmod(by_group.directory, 0o755)
    assert as_nobody(ask.format(by_group.socket, "health")).startswith("{")
    assert as_nobody(ask.format(by_group.socket, "stop")) == "KVD-USAGE-DENIED"
    assert as_nobody(ask.format(by_group.socket, "clear")) == "KVD-USAGE-DENIED"
    assert by_group.process.poll() is None
    admin = daemon(server={"socket_mode": "0666"}, access={"admin_uids": [NOBODY]})
    os.chmod(admin.directory, 0o755)
    assert "stopping" in as_nobody(ask.format(admin.socket, "stop"))
    assert admin.wait() == 0
    assert '"audit": true' in admin.log_text()


def test_one_user_has_so_many_connections_and_no_more(daemon):
    """Fails if connections are not counted by user, if a closed one is not given back, or if stores get those that are
    in reserve for the administration of root and the daemon's own user, which is this one.
    """
    one = daemon(access={"connections_per_uid": 5})

    def connect():
        return Control(one.socket, name="test", role="engine", deadline_s=10)

    kept = [connect() for _ in range(5)]
    with pytest.raises(CapacityError, match=r"access\.connections_per_uid") as caught:
        connect()
    assert caught.value.code == "KVD-CAPACITY-CONNECTIONS"
    assert caught.value.fields == {"uid": os.getuid(), "connections_max": 5}
    reserved = []
    with contextlib.ExitStack() as stack, pytest.raises(CapacityError):
        while len(reserved) <= CONNECTIONS_RESERVED:
            reserved.append(stack.enter_context(contextlib.closing(one.admin())))
            assert reserved[-1].request(wire.Call("health", {}), wire.Result, deadline_s=10).result
    assert len(reserved) == CONNECTIONS_RESERVED
    kept.pop().close()

    def again():
        with contextlib.suppress(CapacityError):
            kept.append(connect())
        return len(kept) == 5

    until(again, "the place of a connection that was closed")
    for store in kept:
        store.close()


def test_refused_connections_are_counted_and_told_with_who_holds_them(daemon):
    """Fails if a refusal leaves no trace; and if one line is written for each of them."""
    one = daemon(access={"connections_per_uid": 2})
    assert one.call("status")["counters"]["control_connections_refused"] == 0
    assert "kvd_control_connections_refused_total 0" in one.call("metrics")
    kept = [Control(one.socket, name="test", role="engine", deadline_s=10) for _ in range(2)]
    for _ in range(5):
        with pytest.raises(CapacityError):
            Control(one.socket, name="test", role="engine", deadline_s=10)
    status = one.call("status")
    assert status["counters"]["control_connections_refused"] == 5
    assert status["connections"]["refused"] == 5
    last = status["connections"]["last_refused"]
    # The one that is refused because it is no kvctl is connected itself at that moment.
    assert (last["uid"], last["held"]) == (os.getuid(), 3)
    assert last["holders"] == [{"pid": os.getpid(), "connections": 3}]
    lines = [line for line in one.log_text().splitlines() if "connection_refused" in line]
    assert len(lines) == 1
    assert f'"uid": {os.getuid()}' in lines[0]
    assert f'"pid": {os.getpid()}' in lines[0]
    for store in kept:
        store.close()


def test_idle_admin_connections_make_room_for_the_next_one(daemon):
    """Fails if connections that somebody forgot to close keep kvctl out: with more of them than there are in reserve,
    the one that was silent longest is closed after a time, and no other.
    """
    soon = "import sys; from kvd.server import control, main; control.ADMIN_IDLE_S = 3.0; "
    soon += "sys.argv[1:1] = ['serve', '--config']; main.main()"
    one = daemon(access={"connections_per_uid": 2}, program=["-c", soon])
    health = wire.Call("health", {})
    engine = Control(one.socket, name="engine", role="engine", deadline_s=10)
    idle = [one.admin() for _ in range(1 + CONNECTIONS_RESERVED)]
    idle[0].request(health, wire.Result, deadline_s=10)  # so that it is not the oldest

    def look():
        with contextlib.suppress(CapacityError):
            return one.call("health")
        return None

    assert look() is None
    assert until(look, "room for one more")["state"] in ("ok", "starting")
    closed = []
    for other in (engine, *idle):
        try:
            assert other.request(health, wire.Result, deadline_s=10).result
        except UnavailableError as error:
            closed.append((other, error.code))
    assert len(closed) == 1
    assert closed[0][0] not in (engine, idle[0])
    assert closed[0][1] == "KVD-UNAVAILABLE-IDLE"
    assert "idle_connection_closed" in one.log_text()
    for control in (engine, *idle):
        control.close()


def test_garbage_is_counted_and_told(daemon):
    """Fails if what breaks the protocol on the socket leaves no trace in counter, log and status."""
    one = daemon()
    for _ in range(3):
        raw = Raw(one.socket)
        raw.send(b"GET / HTTP/1.1\r\n\r\n")
        assert raw.receive()["error"]["code"] == "KVD-PROTOCOL-FRAME"
    raw = Raw(one.socket)
    raw.send(wire.Attach().to_map(3))
    assert raw.receive()["error"]["code"] == "KVD-PROTOCOL-HANDSHAKE"
    assert one.call("status")["counters"]["client_protocol_errors"] == 4
    assert "kvd_client_protocol_errors_total 4" in one.call("metrics")
    # The daemon answers before its log is on the disk.
    lines = until(
        lambda: [line for line in one.log_text().splitlines() if "malformed_messages" in line], "the line"
    )
    assert len(lines) == 1
    assert f'"uid": {os.getuid()}' in lines[0]
    assert f'"pid": {os.getpid()}' in lines[0]


def test_names_of_clients_are_shown_and_forgotten(daemon):
    """Through the socket: escapes are replaced, and who left leaves room for other namespaces (bound: 1,024 of one)."""
    one = daemon()
    evil = "\x1b]0;owned\x07"
    for round_ in range(3):
        with kvd.connect(one.socket) as store:
            for number in range(400):
                fields = {**MANIFEST, "tenant": f"{evil}{round_} {number}", "extra": {"pad": "y" * 500}}
                store.present_session.number(kvd.Manifest(**fields))
    status = one.call("status")
    assert status["namespaces_count"] <= 1024
    assert len(status["namespaces"]) == 100
    assert status["counters"]["namespaces_forgotten"] > 100
    page = one.call("namespaces", start=1, limit=1000)
    assert {row["tenant"][:11] for row in page["namespaces"]} == {"?]0;owned?0", "?]0;owned?1", "?]0;owned?2"}


@pytest.mark.parametrize(
    ("method", "params", "said"),
    [
        ("fly", {}, "no method 'fly'"),
        ("status", {"x": 1}, "does not know the parameter 'x'"),
        ("inspect", {}, "needs the parameter 'key'"),
        ("inspect", {"key": "abc"}, "at least the first 8"),
        ("inspect", {"key": "00" * 32}, "no family"),
        ("inspect", {"key": "00000000"}, "no family"),
        ("ls", {"limit": 0}, "limit is 1"),
        ("ls", {"limit": True}, "must be a int"),
        ("pin", {"key": "00" * 32, "kind": "iron"}, "soft or hard"),
        ("clear", {"namespace": 9}, "no namespace 9"),
    ],
)
def test_wrong_calls_are_refused_by_name(daemon, method, params, said):
    one = daemon()
    with pytest.raises(UsageError, match=said):
        one.call(method, **params)


def test_looking_and_pinning(daemon):
    one = daemon()
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(160)), chunk_tokens=16)
    with ns.reserve(chain, 4096) as writes:
        writes.fill([b"\5" * 4096] * len(chain))
        writes.publish()
    first = one.call("ls", limit=4)
    rest = one.call("ls", limit=100, start=first["next"])
    keys = [row["key"] for row in first["families"] + rest["families"]]
    assert len(set(keys)) == 10
    assert rest["next"] is None
    found = one.call("inspect", key=keys[3][:12])
    assert found["key"] == keys[3]
    assert found["members"][0]["size_bytes"] == 4096
    one.call("pin", key=keys[9], kind="hard")
    assert one.call("inspect", key=keys[9])["pin"] == "hard"
    assert one.call("clear")["families"] == 0
    one.call("unpin", key=keys[9])
    assert one.call("clear")["families"] == 10
    assert ns.match(chain) == 0
    store.close()
