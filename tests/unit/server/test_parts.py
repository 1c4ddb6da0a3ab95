"""The small parts: supervision, metrics, service manager, names, peers, population."""

import asyncio
import errno
import json
import os
import resource
import socket
from pathlib import Path

import pytest

from kvd.config import ClientsConfig, Config, PoolConfig, ServerConfig, parse_listen, resolve
from kvd.errors import CapacityError, ConfigError, InvariantError, UnavailableError, UsageError
from kvd.probe import numa
from kvd.server import app, logs, metrics, named, notify
from kvd.server.peer import boot_id, identify, start_ticks
from kvd.server.population import Population
from kvd.server.supervise import Supervisor
from kvd.shm import pool, segments

# --- supervision


async def test_a_task_that_dies_is_started_again_and_health_says_so(monkeypatch):
    monkeypatch.setattr(asyncio, "sleep", lambda _s: _nothing())
    fatal = []
    supervisor = Supervisor(fatal.append)
    runs = []
    healed = asyncio.Event()

    async def task():
        runs.append(supervisor.health["job"].state)
        if len(runs) < 3:
            raise ValueError("once more")
        healed.set()
        await asyncio.Event().wait()

    supervisor.start("job", task, restart=True)
    await healed.wait()
    assert runs == ["ok", "degraded", "degraded"]
    assert (supervisor.restarts, supervisor.state, fatal) == (2, "degraded", [])
    await supervisor.stop()


@pytest.mark.parametrize(("error", "restart"), [(ValueError("x"), False), (InvariantError("books"), True)])
async def test_what_cannot_be_restarted_stops_the_daemon(error, restart):
    stopped = asyncio.Event()
    supervisor = Supervisor(lambda _error: stopped.set())

    async def task():
        raise error

    supervisor.start("job", task, restart=restart)
    await stopped.wait()
    assert supervisor.state == "failed"
    await supervisor.stop()


async def _nothing():
    return None


def test_the_worst_part_is_the_state():
    supervisor = Supervisor(lambda _error: None)
    assert supervisor.state == "ok"
    supervisor.set_health("a", "ok")
    supervisor.set_health("b", "starting")
    assert supervisor.state == "starting"
    supervisor.set_health("c", "failed", "why")
    assert supervisor.state == "failed"


# --- metrics


def test_exposition_escapes_and_keeps_integers():
    series = [
        metrics.Series("kvd_x_total", "counter", "a\nb", [({}, 3)]),
        metrics.Series("kvd_y", "gauge", "y", [({"name": 'q"\\\n'}, 0.5), ({"name": "z"}, 2.0)]),
    ]
    assert metrics.exposition(series) == (
        "# HELP kvd_x_total a\\nb\n# TYPE kvd_x_total counter\nkvd_x_total 3\n"
        '# HELP kvd_y y\n# TYPE kvd_y gauge\nkvd_y{name="q\\"\\\\\\n"} 0.5\nkvd_y{name="z"} 2\n'
    )


@pytest.mark.parametrize(
    "text", ["9464", "localhost", ":9464", "h:x", "h:70000", "h:-1", "h:٣", "::1:9464", "[]:9464", "a b:1"]
)
def test_listen_addresses_are_checked_with_the_configuration(text):
    with pytest.raises(ConfigError, match=r"server\.metrics_listen") as caught:
        Config.load(None, {"KVD_SERVER_METRICS_LISTEN": text})
    assert "127.0.0.1:9464" in caught.value.message


def test_loopback_is_recognised():
    assert parse_listen("[::1]:9464") == ("::1", 9464)
    assert metrics.is_loopback("::1")
    assert metrics.is_loopback("127.0.0.9")
    assert not metrics.is_loopback("0.0.0.0")


async def scrape(server, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_responder_answers_and_refuses():
    healthy = [True]
    server = metrics.MetricsServer("127.0.0.1:0", lambda: "kvd_up 1\n", lambda: (healthy[0], "state"))
    await server.start()
    running = asyncio.create_task(server.run())
    answer = await scrape(server, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nkvd_up 1\n")
    assert (await scrape(server, b"HEAD /metrics HTTP/1.1\r\n\r\n")).endswith(b"\r\n\r\n")
    assert b" 200 " in await scrape(server, b"GET /health HTTP/1.0\r\n\r\n")
    healthy[0] = False
    assert b" 503 " in await scrape(server, b"GET /health HTTP/1.0\r\n\r\n")
    assert b" 404 " in await scrape(server, b"GET / HTTP/1.1\r\n\r\n")
    assert b" 405 " in await scrape(server, b"POST /metrics HTTP/1.1\r\n\r\n")
    assert b" 400 " in await scrape(server, b"nonsense\r\n\r\n")
    assert await scrape(server, b"GET /" + b"x" * 20_000) == b""
    running.cancel()


async def test_a_slow_scraper_is_dropped(monkeypatch):
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.01)
    server = metrics.MetricsServer("127.0.0.1:0", lambda: "", lambda: (True, ""))
    await server.start()
    running = asyncio.create_task(server.run())
    assert await scrape(server, b"GET /metr") == b""
    running.cancel()


async def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = metrics.MetricsServer(f"127.0.0.1:{taken.getsockname()[1]}", lambda: "", lambda: (True, ""))
        with pytest.raises(ConfigError, match="cannot be used"):
            await server.start()


# --- service manager


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock, {"NOTIFY_SOCKET": str(tmp_path / "notify")}


def test_notifications(manager):
    sock, env = manager
    notify.Notifier(env).ready("all\nwell")
    assert sock.recv(4096).decode() == f"READY=1\nMAINPID={os.getpid()}\nSTATUS=all well"


def test_without_a_manager_nothing_happens():
    notifier = notify.Notifier({})
    notifier.ready("x")
    assert not notifier.active


def test_a_manager_that_does_not_read_cannot_block(manager):
    notifier = notify.Notifier(manager[1])
    for _ in range(10_000):
        notifier.status("x" * 100)


def test_the_watchdog_is_petted_only_while_the_loop_turns(manager, monkeypatch):
    """A thread that pets whatever the loop does would keep a stuck daemon alive for ever."""
    sock, env = manager
    now = [100.0]
    monkeypatch.setattr(notify.time, "monotonic", lambda: now[0])
    watchdog = notify.Watchdog(notify.Notifier(env), {**env, "WATCHDOG_USEC": "6000000"})
    waited = iter([False, False, True])

    def wait(_seconds):
        now[0] += 2.5  # nobody calls beat
        return next(waited)

    monkeypatch.setattr(watchdog._stop, "wait", wait)
    watchdog._run()
    sock.setblocking(False)
    assert sock.recv(100) == b"WATCHDOG=1"
    assert sock.recv(100) == b"WATCHDOG=1"
    with pytest.raises(BlockingIOError):
        sock.recv(100)


def test_a_watchdog_for_another_process_is_not_ours():
    assert (
        notify.Watchdog(notify.Notifier({}), {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "1"}).interval_s is None
    )
    assert notify.Watchdog(notify.Notifier({}), {"WATCHDOG_USEC": "junk"}).interval_s is None
    assert notify.Watchdog(notify.Notifier({}), {"WATCHDOG_USEC": "3000000"}).interval_s == 3.0


def test_sockets_for_another_process_are_not_ours():
    assert notify.listening_socket({"LISTEN_PID": "1", "LISTEN_FDS": "1"}) is None
    assert notify.listening_socket({}) is None


# --- names


def config(tmp_path, **pool_options):
    return Config(server=ServerConfig(runtime_dir=str(tmp_path)), pool=PoolConfig(**pool_options))


def test_one_socket_one_daemon(tmp_path):
    path = str(tmp_path / "s")
    first = named.SocketFile(path, {})
    with pytest.raises(UnavailableError, match=f"pid {os.getpid()}") as caught:
        named.SocketFile(path, {})
    assert caught.value.code == "KVD-UNAVAILABLE-IN-USE"
    first.release()
    named.SocketFile(path, {}).release()


def test_only_ones_own_socket_file_is_removed(tmp_path):
    path = tmp_path / "s"
    held = named.SocketFile(str(path), {})
    path.touch()
    held.bound()
    path.rename(tmp_path / "old")
    path.touch()
    held.remove()
    assert path.exists()


def test_memory_left_by_a_crashed_daemon_is_removed_by_the_next(tmp_path):
    """The lock ended with its holder, so the names in the file are nobody's."""
    name = f"/kvd-test-{os.getpid()}"
    os.close(segments.create_named(name, 4096).fd)
    (tmp_path / "memory.lock").write_text(f"4242\n{json.dumps([name, '/not-ours'])}\n")
    memory = named.NamedMemory(config(tmp_path, backing="posix"))
    names = memory.create(2)
    assert not os.path.exists("/dev/shm" + name)
    assert names == [f"/kvd-{os.getpid()}-0", f"/kvd-{os.getpid()}-1"]
    with pytest.raises(UnavailableError):
        named.NamedMemory(config(tmp_path, backing="posix")).create(1)
    memory.remove()
    memory.remove()


def test_the_last_part_of_the_sockets_directory_is_made(tmp_path):
    """Fails if a fresh host has to be prepared for `kvd serve`, or if a narrow umask shuts the other users out."""
    old_mask = os.umask(0o077)
    try:
        held = named.SocketFile(str(tmp_path / "run" / "s"), {})
    finally:
        os.umask(old_mask)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o755
    held.remove()
    named.SocketFile(str(tmp_path / "run" / "s"), {}).remove()


def test_a_directory_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    """With a place that can be; a directory whose parent is missing, too, is more likely a wrong name: not made."""
    path = tmp_path / "absent" / "too" / "s"
    with pytest.raises(UsageError, match=r"create its directory.*server\.socket or KVD_SOCKET") as caught:
        named.SocketFile(str(path), {"XDG_RUNTIME_DIR": "/nonexistent", "HOME": str(tmp_path)})
    assert f"KVD_SOCKET={tmp_path}/.kvd/kvd.sock" in caught.value.message
    assert not path.parent.parent.exists()

    def denied(_path, _mode):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(UsageError, match=r"absent cannot be made: Permission denied; .*KVD_SOCKET"):
        named.SocketFile(str(tmp_path / "absent" / "s"), {})


# --- peers


def test_the_kernel_says_who_the_peer_is():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = identify(ours)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.getuid(), os.getgid())
    assert peer.start_ticks == start_ticks("self") > 0
    assert not peer.exited()
    peer.close()
    assert peer.exited()


def test_a_dead_peer_is_seen():
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    pidfd = os.pidfd_open(pid)
    peer = identify(ours)
    peer.close()
    peer.pidfd = pidfd
    os.waitpid(pid, 0)
    assert peer.exited()
    peer.close()
    ours.close()
    theirs.close()


def test_boot_id():
    assert len(boot_id()) == 16


# --- population


async def populated(pool_config, size_bytes, break_at=None, monkeypatch=None):
    parts = [pool.create_segment(n, size_bytes, hugetlb=False) for n in range(2)]
    ready, pages = [], []
    population = Population(
        asyncio.get_running_loop(), parts, pool_config, lambda *step: ready.append(step),
        lambda number, kind: pages.append((number, kind)), lambda call, *args: call(*args),
    )  # fmt: skip
    if break_at is not None:
        real = pool.Mapping.populate

        def populate(self, begin, end):
            if begin >= break_at:
                raise CapacityError("no memory for it", code="populate")
            real(self, begin, end)

        monkeypatch.setattr(pool.Mapping, "populate", populate)
    population.start()
    return population, parts, ready, pages


@pytest.mark.parametrize("threads", [1, 3])
async def test_every_range_is_announced_once_and_only_when_backed(threads, monkeypatch):
    monkeypatch.setattr(pool, "POPULATE_STEP_BYTES", 2 << 20)
    population, parts, ready, pages = await populated(
        PoolConfig(populate_threads=threads, lock="no"), 9 << 20
    )
    await population.first_ready()
    await population.run()
    assert sorted(ready) == [
        (n, at, min(at + (2 << 20), 9 << 20)) for n in range(2) for at in range(0, 9 << 20, 2 << 20)
    ]
    progress = population.progress
    assert (progress.populated_bytes, progress.segments_bytes, progress.done) == (
        18 << 20,
        [9 << 20] * 2,
        True,
    )
    assert [number for number, _ in pages] == [0, 1]
    for part in parts:
        assert os.fstat(part.fd).st_blocks * 512 == 9 << 20


async def test_missing_memory_ends_population_and_what_there_is_serves(monkeypatch):
    monkeypatch.setattr(pool, "POPULATE_STEP_BYTES", 2 << 20)
    population, _, ready, _ = await populated(
        PoolConfig(populate_threads=1, lock="no"), 8 << 20, break_at=4 << 20, monkeypatch=monkeypatch
    )
    await population.first_ready()
    await population.run()
    assert ready == [(0, 0, 2 << 20), (0, 2 << 20, 4 << 20)]
    assert population.progress.error.code == "KVD-CAPACITY-POPULATE"
    assert population.progress.as_dict()["error"] == "no memory for it"


async def test_without_any_memory_the_start_fails(monkeypatch):
    population, _, ready, _ = await populated(
        PoolConfig(populate_threads=1, lock="no"), 4 << 20, break_at=0, monkeypatch=monkeypatch
    )
    with pytest.raises(CapacityError, match="no memory for it"):
        await population.first_ready()
    await population.run()
    assert ready == []


async def test_segments_are_spread_over_nodes_and_workers_ask_for_them(monkeypatch):
    nodes = (numa.Node(0, 1 << 30, (0,)), numa.Node(2, 1 << 30, (1,)))
    monkeypatch.setattr(numa, "nodes", lambda: nodes)
    preferred = []
    monkeypatch.setattr(pool, "prefer_node", lambda node: preferred.append(node) or True)
    population, _, _, _ = await populated(PoolConfig(populate_threads=1, lock="no"), 2 << 20)
    await population.run()
    assert population.progress.segments_node == [0, 2]
    assert preferred == [0, 2]


async def test_lazy_population_serves_at_once():
    population, parts, ready, _ = await populated(PoolConfig(populate="lazy", lock="no"), 4 << 20)
    await population.first_ready()
    assert ready == [(0, 0, 4 << 20), (1, 0, 4 << 20)]
    assert os.fstat(parts[0].fd).st_blocks == 0


# --- logs


def test_a_log_reader_that_does_not_read_holds_nobody_up(monkeypatch):
    """Written where it is said, the line that no longer fits the pipe would stop the whole daemon."""
    monkeypatch.setattr(logs, "LINES_MAX", 64)
    read_fd, write_fd = os.pipe()
    with open(write_fd, "w") as stream, open(read_fd) as reader:
        logs.configure("json", "info", stream)
        log = logs.get("x")
        said = 0
        while not logs.dropped_count():
            log.info("line", number=said, filler="x" * 500)
            said += 1
            assert said < 100_000
        rows = [json.loads(reader.readline())]
        while rows[-1]["event"] != "log_lines_dropped":
            rows.append(json.loads(reader.readline()))
        numbers = [row["number"] for row in rows[:-1]]
        assert rows[-1]["total"] == said - len(numbers) > 0
        assert numbers == sorted(set(numbers)), "what was not dropped is there, in order"
        log.info("again")
        assert json.loads(reader.readline())["event"] == "again"


def test_json_logs_are_one_object_a_line_and_survive_a_closed_stream(capsys):
    class Broken:
        def isatty(self):
            return False

        def write(self, _text):
            raise BrokenPipeError

        def flush(self):
            raise BrokenPipeError

    import io

    stream = io.StringIO()
    logs.configure("auto", "info", stream)
    logs.get("x").info("event", key="ab\n")
    logs.get("x").debug("unseen")
    logs.audit("pin", uid=3, pid=4, key="ff")
    logs.drain()
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["key"], first["component"], first["level"]) == (
        "event",
        "ab\n",
        "x",
        "info",
    )
    assert (second["audit"], second["uid"], second["component"]) == (True, 3, "audit")
    logs.configure("json", "error", stream)
    logs.get("x").info("unseen")
    logs.audit("stop", uid=3, pid=4)
    logs.drain()
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["event", "pin", "stop"]
    logs.configure("json", "info", Broken())
    logs.get("x").error("nobody reads this")
    logs.configure("console", "warning", stream)


def test_too_few_descriptors_for_the_clients_are_refused_at_the_start(monkeypatch):
    """Found out when the last client attaches, it is the daemon's end or that client's; found now, it has a way out."""
    config = Config(clients=ClientsConfig(max=64))
    sizes = resolve(config, 8 << 30, "the test")
    wanted = app.descriptors_wanted(config, sizes)
    assert wanted > 4 * 64 + 2 * len(sizes.segments_bytes)
    for limit, refused in ((wanted - 1, True), (wanted, False), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _what, limit=limit: (limit, limit))
        if refused:
            with pytest.raises(
                ConfigError, match=rf"need {wanted} descriptors, the process may have {limit}"
            ):
                app.check_host(config, sizes)
        else:
            app.check_host(config, sizes)
