"""Names, memory, exit codes, stop and metrics of real daemons; failure rows by name."""

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from raw import MANIFEST, Raw, ask_until_the_end, client_process, end
from typer.testing import CliRunner

import kvd
from kvd.clientlib.control import Control
from kvd.errors import UnavailableError
from kvd.kvctl.main import app as kvctl
from kvd.wire import messages as wire

pytestmark = pytest.mark.slow  # each starts a daemon


# --- names, memory, exit


def serve(config, env=None) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVD_", "NOTIFY_"))}
    command = [sys.executable, "-m", "kvd.server.main", "serve", "--config", str(config)]
    return subprocess.run(command, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=60)


def test_d12_a_second_daemon_is_refused_by_name(daemon):
    one = daemon()
    second = serve(one.config)
    assert second.returncode == 69
    assert one.socket in second.stderr
    assert f"pid {one.pid}" in second.stderr
    assert "Traceback" not in second.stderr
    assert one.call("health")["state"] == "ok"


def test_d12_a_foreign_listener_is_not_displaced(daemon, tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(path)
        foreign.listen()
        config = tmp_path / "kvd.toml"
        config.write_text(f'[server]\nsocket = "{path}"\n[pool]\nsize = "4MiB"\n')
        refused = serve(config)
        assert refused.returncode == 69
        assert "another daemon listens" in refused.stderr
    (tmp_path / "file").write_text("precious")
    config.write_text(f'[server]\nsocket = "{tmp_path}/file"\n[pool]\nsize = "4MiB"\n')
    assert serve(config).returncode == 69
    assert (tmp_path / "file").read_text() == "precious"


def test_b10_cycles_leave_nothing_behind(daemon):
    """TERM and KILL in turns: /dev/shm as before, the stale socket replaced, no lock stuck."""
    before = set(os.listdir("/dev/shm"))
    directory = None
    for round_number in range(6):
        one = daemon(directory=directory, pool={"size": "8MiB"})
        directory = one.directory
        kvd.connect(one.socket).close()
        code = one.stop() if round_number % 2 else one.kill()
        assert code == (0 if round_number % 2 else -signal.SIGKILL)
    assert set(os.listdir("/dev/shm")) == before
    assert not os.path.exists(one.socket)


def test_named_memory_is_removed_at_exit_and_after_a_crash(daemon):
    before = set(os.listdir("/dev/shm"))
    one = daemon(pool={"size": "8MiB", "backing": "posix", "segment_size": "4MiB"})
    assert len(set(os.listdir("/dev/shm")) - before) == 2
    kvd.connect(one.socket).close()
    one.kill()
    assert len(set(os.listdir("/dev/shm")) - before) == 2
    two = daemon(directory=one.directory, pool={"size": "8MiB", "backing": "posix"})
    assert "stale_memory_removed" in two.log_text()
    assert len(set(os.listdir("/dev/shm")) - before) == 1
    assert two.stop() == 0
    assert set(os.listdir("/dev/shm")) == before


def test_a_daemon_whose_socket_file_was_removed_is_named_by_all_who_look_for_it(daemon):
    """Fails if the next start, kvctl stop and doctor send people to one another, and nobody says whom to end."""
    one = daemon()
    os.unlink(one.socket)
    cure = f"kill -TERM {one.pid}, then start the daemon"
    second = serve(one.config, {})
    assert second.returncode == 69
    assert cure in second.stderr
    stop = CliRunner().invoke(kvctl, ["stop", "--socket", one.socket])
    assert stop.exit_code == 3
    assert cure in stop.output
    told = CliRunner().invoke(kvctl, ["doctor", "--json", "--socket", one.socket])
    found = {row["name"]: row for row in json.loads(told.output)["checks"]}
    assert found["socket"]["advice"] == cure
    assert f"pid {one.pid} (" in found["daemon"]["found"]
    assert one.stop() == 0


@pytest.mark.parametrize(
    ("text", "env", "code", "said"),
    [
        ('[pool]\nsize = "100TiB"', {}, 78, ["pool.size", "this machine"]),
        ('[pool]\nsizz = "1GiB"', {}, 78, ["pool.sizz", "did you mean 'size'", "kvd.toml"]),
        ("", {"KVD_POOL_SIZE": "lots"}, 78, ["KVD_POOL_SIZE", "'lots'"]),
        ('[pool]\nhuge_pages = "hugetlb"\nsize = "50%"', {}, 78, ["huge pages", "vm.nr_hugepages"]),
        ('[server]\nsocket = "/nonexistent/x/kvd.sock"', {}, 69, ["/nonexistent/x", "KVD_SOCKET"]),
        ('[server]\nmetrics_listen = "9464"', {}, 78, ["server.metrics_listen", "host:port"]),
    ],
)
def test_what_cannot_start_says_why(tmp_path, text, env, code, said):
    config = tmp_path / "kvd.toml"
    head = "" if "socket" in text else f'[server]\nsocket = "{tmp_path}/s"\n'
    if "[server]" in text and head:
        text, head = text.replace("[server]\n", head), ""
    config.write_text(head + text + "\n")
    result = serve(config, {"KVD_POOL_SIZE": "16MiB", **env} if "size" not in text else env)
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for part in said:
        assert part in result.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to drop CAP_IPC_LOCK by changing the user")
def test_memlock_too_small_is_named(tmp_path):
    code = """
import os, resource, sys
from kvd.config import Config, PoolConfig, resolve
from kvd.errors import ConfigError
from kvd.server.app import check_host
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
config = Config(pool=PoolConfig(size="64MiB", lock="yes"))
try:
    check_host(config, resolve(config, 1 << 34, "x"))
except ConfigError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    for part in ("RLIMIT_MEMLOCK", "67108864", "65536", "LimitMEMLOCK", "KVD-CONFIG-MEMLOCK"):
        assert part in said


# --- stop


def test_c12_a_frozen_client_cannot_hold_up_the_stop(daemon):
    one = daemon(server={"stop_timeout_s": 3})
    frozen = client_process(one.socket, "leases = ns.reserve(chain, 4096)")
    frozen.send_signal(signal.SIGSTOP)
    silent = Raw(one.socket)
    silent.hello()
    silent.send(*[wire.Call("metrics", {}).to_map(n) for n in range(1, 40)])
    before = time.monotonic()
    assert one.stop() == 0
    assert time.monotonic() - before < 3.5
    end(frozen)


def test_clients_see_the_end(daemon):
    """META says closed, the connection ends, what the daemon owes is sent first."""
    one = daemon()
    control = Control(one.socket, name="x", role="engine", deadline_s=5)
    _, fds = control.attach(wire.Attach(), deadline_s=5)
    with contextlib.closing(one.admin()) as admin:
        assert admin.request(wire.Call("stop", {}), wire.Result, deadline_s=5).result["stopping"]
    with pytest.raises(UnavailableError):
        ask_until_the_end(control)
    assert one.wait() == 0
    with mmap.mmap(fds[0], 4096, prot=mmap.PROT_READ) as meta:
        assert int.from_bytes(meta[192:196], "little") == 3
    for fd in fds:
        os.close(fd)
    control.close()


def test_stop_during_population_does_not_wait_for_it(daemon):
    one = daemon(pool={"size": "2GiB", "populate_threads": 1})
    before = time.monotonic()
    assert one.stop() == 0
    assert time.monotonic() - before < 5


BROKEN = """
import sys
from kvd.errors import InvariantError
from kvd.server import main, runner
real = runner.Runner._reserve
def broken(self, client, op, ask):
    if ask.members[0].size_bytes == 4242:
        raise InvariantError("entry 7 is used twice", code="entries")
    real(self, client, op, ask)
runner.Runner._reserve = broken
sys.argv = ["kvd", "serve", "--config", sys.argv[1]]
main.main()
"""


def test_a_broken_invariant_stops_the_daemon(daemon):
    """B6: no part goes on with wrong books; clients see the end, the exit code says why, the socket is removed."""
    one = daemon(program=["-c", BROKEN])
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    with pytest.raises(UnavailableError):
        ns.reserve(ns.chain(list(range(64)), chunk_tokens=16), 4242)
    one.expected_codes = {70}
    assert one.wait() == 70
    assert "entry 7 is used twice" in one.log_text()
    assert not os.path.exists(one.socket)
    store.close()


def test_b6_a_background_task_that_dies_ends_the_daemon(daemon):
    patched = BROKEN.replace("runner.Runner._reserve = broken", "runner.Runner.tick = lambda self: 1 / 0")
    one = daemon(program=["-c", patched], wait=False)
    one.expected_codes = {70}
    assert one.wait() == 70
    assert "ZeroDivisionError" in one.log_text()
    assert not os.path.exists(one.socket)


# --- metrics


def test_e5_every_series_is_there_from_the_start(daemon):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    one = daemon(server={"metrics_listen": f"127.0.0.1:{port}"})

    def scrape():
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line[0] != "#"
        }

    first = scrape()
    assert first["kvd_published_total"] == 0
    assert first['kvd_evicted_families_total{reason="space"}'] == 0
    store = kvd.connect(one.socket)
    ns = store.namespace(kvd.Manifest(**MANIFEST))
    chain = ns.chain(list(range(64)), chunk_tokens=16)
    with ns.reserve(chain, 4096) as writes:
        writes.fill([b"\5" * 4096] * len(chain))
        writes.publish()
    second = scrape()
    assert second["kvd_published_total"] == 4
    assert second["kvd_clients_attached"] == 1
    assert set(second) == set(first)
    assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).read() == b"ok\n"
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/nothing", timeout=10)
    store.close()


def test_an_idle_daemon_costs_next_to_nothing(daemon):
    """8 attached clients that do nothing: at most 0.5 % of a processor over 3 s (ticks of the kernel: 10 ms)."""
    one = daemon()
    stores = [kvd.connect(one.socket) for _ in range(8)]

    def cpu_s():
        with open(f"/proc/{one.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    pidfd = os.pidfd_open(one.pid)
    before = cpu_s()
    import select

    assert select.select([pidfd], [], [], 3.0) == (
        [],
        [],
        [],
    )  # a wait of 3 s that the daemon's end would cut short
    used = cpu_s() - before
    os.close(pidfd)
    assert used <= 0.03, f"{used} s of 3 s"
    for store in stores:
        store.close()
