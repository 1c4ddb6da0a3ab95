"""Doctor's verdicts, one finding at a time: level, what was found, and the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kvctl_answers import CLIENT, GIB, STATUS

from kvd import config as configuration
from kvd.config import Config, PoolConfig, parse_amount
from kvd.errors import ConfigError, UnavailableError
from kvd.kvctl import checks, doctor
from kvd.kvctl.checks import Answered, Check, Facts, Level
from kvd.probe.hugepages import HugePageFacts
from kvd.probe.kernel import KernelFacts
from kvd.probe.memory import MemoryFacts
from kvd.probe.numa import Node
from kvd.probe.process import ProcessLimits
from kvd.probe.unixsocket import Kind, SocketFacts
from kvd.version import VERSION

KERNEL = KernelFacts("6.12.0", "x86_64", True, True, True, True, True)
LIMITS = ProcessLimits(None, None, 1 << 20, 1 << 20, False)
DOCTOR = {"memory_bound_bytes": 128 * GIB, "memory_bound_source": "this control group (/x)"}


def of(config: Config, **changes: Any) -> Facts:
    """A healthy host of 128 GiB without a daemon, as `config` finds it."""
    facts = Facts(
        socket=SocketFacts("/run/kvd/kvd.sock", Kind.ABSENT), daemon=None,
        daemon_error=UnavailableError("no daemon", code="no-daemon"), config=config, config_file="/etc/kvd/kvd.toml",
        config_error=None, sizes=configuration.resolve(config, 128 * GIB, "this machine"),
        memory=MemoryFacts(128 * GIB, 120 * GIB, 128 * GIB, "this machine"), swap_bytes=8 * GIB, overcommit_mode=0,
        own=LIMITS, of_daemon=None, huge=HugePageFacts("advise", 0, 0, 0), shm_free_bytes=64 * GIB,
        nodes=(Node(0, 128 * GIB, (0, 1)),), kernel=KERNEL, native_error="",
    )  # fmt: skip
    return replace(facts, **changes)


def pool(**options: Any) -> Config:
    return Config(pool=PoolConfig(**{"size": parse_amount("64GiB"), **options}))


def running(
    status: dict[str, Any] = STATUS, clients: tuple[dict[str, Any], ...] = (), **changes: Any
) -> dict[str, Any]:
    """What to change in the facts when a daemon answers."""
    settings = {key: value for key, value, *_ in pool().describe()}
    answered = Answered(VERSION, 4711, 1, 1, status, DOCTOR, settings, list(clients))
    socket = SocketFacts("/run/kvd/kvd.sock", Kind.SOCKET, 0o660, 100, 100, True)
    values = {"daemon": answered, "daemon_error": None, "of_daemon": LIMITS, "socket": socket}
    return {**values, **changes}


def check(facts: Facts, name: str) -> Check:
    found = {one.name: one for one in checks.all_checks(facts)}
    assert (found[name].level is Level.OK) or found[name].advice, "a finding without a way out"
    return found[name]


def test_a_healthy_host_with_a_daemon_is_all_ok() -> None:
    found = checks.all_checks(of(pool(), **running()))
    assert {one.level for one in found} == {Level.OK}, found
    assert {one.name for one in found} == {
        "socket", "daemon", "version", "config", "library", "memory", "memlock", "huge pages", "/dev/shm", "NUMA",
        "open files", "overcommit", "kernel",
    }  # fmt: skip


def test_a_refused_connection_is_told_with_who_held_them() -> None:
    """Fails if an operator is not told which process to look at, or is told for ever."""
    last = {"ago_s": 3.2, "uid": 1000, "held": 80, "holders": [{"pid": 5, "connections": 78}]}
    section = {"open": 80, "of_one_user_max": 80, "refused": 12, "last_refused": last}
    found = check(of(pool(), **running({**STATUS, "connections": section})), "connections")
    assert found.level is Level.WARN
    for part in ("12 refused", "3 s ago", "user 1000", "80 were open", "pid 5 (78)"):
        assert part in found.found
    assert "access.connections_per_uid" in found.advice
    section["last_refused"] = {**last, "ago_s": 7200.0}
    late = checks.all_checks(of(pool(), **running({**STATUS, "connections": section})))
    assert "connections" not in {one.name for one in late}


def test_a_daemon_whose_socket_file_is_gone_is_named() -> None:
    """Fails if doctor sends people to start a daemon that cannot start while the lost one lives."""
    for socket in (SocketFacts("/s", Kind.ABSENT), SocketFacts("/s", Kind.SOCKET, 0o660, 0, 0, True)):
        facts = of(pool(), socket=socket, owner_pid=77, owner_state="S: sleeping")
        found = check(facts, "socket")
        assert (found.level, found.advice) == (Level.FAIL, "kill -TERM 77, then start the daemon")
        assert "pid 77 runs but its socket file" in found.found
        assert check(facts, "daemon").found == "pid 77 (S: sleeping): runs and cannot be reached"


def test_a_daemon_that_is_stopped_is_named_with_its_state() -> None:
    late = UnavailableError("no answer within 5 s", code="deadline")
    socket = SocketFacts("/s", Kind.SOCKET, 0o660, 0, 0, True)
    facts = of(pool(), socket=socket, daemon_error=late, owner_pid=77, owner_state="T: stopped")
    found = check(facts, "daemon")
    assert (found.level, found.found) == (Level.FAIL, "pid 77 (T: stopped): no answer within 5 s")
    assert found.advice == "it is stopped or frozen: kill -CONT 77 lets it go on"
    facts = of(pool(), socket=socket, daemon_error=late, owner_pid=77, owner_state="R: running")
    assert "overloaded" in check(facts, "daemon").advice


def test_without_a_daemon_only_socket_and_daemon_fail() -> None:
    found = checks.all_checks(of(pool()))
    assert {one.name for one in found if one.level is not Level.OK} == {"socket", "daemon"}


@pytest.mark.parametrize(
    ("socket", "words"),
    [
        (SocketFacts("/s", Kind.ABSENT), ("not there", "start the daemon")),
        (SocketFacts("/s", Kind.NO_DIRECTORY), ("directory", "makes the last part")),
        (SocketFacts("/s", Kind.HIDDEN), ("closed to this user", "group")),
        (SocketFacts("/s", Kind.OTHER), ("no socket", "remove this file")),
        (SocketFacts("/s", Kind.SOCKET, 0o660, 0, 42, False), ("may not connect", "group 42")),
        (SocketFacts("/s", Kind.SOCKET, 0o660, 0, 0, True), ("stale", "next start")),
    ],
)
def test_each_state_of_the_socket_has_its_way_out(socket: SocketFacts, words: tuple[str, str]) -> None:
    found = check(of(pool(), socket=socket), "socket")
    assert found.level is Level.FAIL
    assert words[0] in found.found
    assert words[1] in found.advice


def test_a_socket_that_everybody_may_open_is_a_warning() -> None:
    socket = SocketFacts("/s", Kind.SOCKET, 0o666, 0, 0, True)
    assert check(of(pool(), **running(socket=socket)), "socket").level is Level.WARN


def test_a_daemon_that_does_not_answer_is_not_called_absent() -> None:
    socket = SocketFacts("/s", Kind.SOCKET, 0o660, 0, 0, True)
    error = UnavailableError("did not answer before the deadline", code="deadline")
    found = check(of(pool(), socket=socket, daemon_error=error), "daemon")
    assert found.level is Level.FAIL
    assert "frozen" in found.advice
    assert check(of(pool(), socket=socket, daemon_error=error), "socket").level is Level.OK


@pytest.mark.parametrize(
    ("state", "level"), [("degraded", Level.WARN), ("failed", Level.FAIL), ("starting", Level.OK)]
)
def test_health_of_the_daemon(changed: Any, state: str, level: Level) -> None:
    parts = {"population": {"state": state, "reason": "no memory left"}}
    status = changed({"health": {"state": state, "restarts": 0, "parts": parts}})
    found = check(of(pool(), **running(status)), "daemon")
    assert found.level is level
    assert "population" in found.found
    assert "no memory left" in found.found


def test_versions_that_differ_warn_and_layouts_that_differ_fail() -> None:
    facts = of(pool(), **running())
    assert facts.daemon is not None
    assert check(replace(facts, daemon=replace(facts.daemon, version="0.0.9")), "version").level is Level.WARN
    found = check(replace(facts, daemon=replace(facts.daemon, layout=2)), "version")
    assert found.level is Level.FAIL
    assert "layout 2" in found.found


def test_a_wrong_configuration_is_told_in_its_own_words() -> None:
    error = ConfigError("kvd.toml: pool.size = 'x' is not allowed", code="value")
    facts = of(pool(), config_error=error, sizes=None)
    assert "pool.size = 'x'" in check(facts, "config").found
    assert check(facts, "config").level is Level.FAIL
    assert check(facts, "memory").level is Level.WARN


def test_a_daemon_that_runs_with_other_values_than_the_file_is_told() -> None:
    config = pool(huge_pages="never").model_copy(
        update={"origin": configuration.Origin(keys={"pool.huge_pages": "/etc/kvd/kvd.toml"})}
    )
    found = check(of(config, **running()), "config")
    assert found.level is Level.WARN
    assert "pool.huge_pages = auto (file: never)" in found.found
    assert check(of(config, **running(config_file="")), "config").level is Level.OK


def test_memory_that_is_too_little_now_or_for_ever(changed: Any) -> None:
    little = MemoryFacts(128 * GIB, 10 * GIB, 128 * GIB, "this machine")
    assert check(of(pool(), memory=little), "memory").level is Level.WARN
    half = changed({"pool.population.populated_bytes": 32 * GIB})
    assert check(of(pool(), **running(half, memory=little)), "memory").level is Level.WARN
    assert check(of(pool(), **running(memory=little)), "memory").level is Level.OK
    ended = changed({"pool.population.error": "no memory for 64 MiB"})
    assert check(of(pool(), **running(ended)), "memory").level is Level.FAIL


def test_a_pool_above_the_limit_of_the_daemons_control_group_fails() -> None:
    facts = of(pool(), **running())
    assert facts.daemon is not None
    small = {"memory_bound_bytes": 8 * GIB, "memory_bound_source": "this control group (/y)"}
    found = check(replace(facts, daemon=replace(facts.daemon, doctor=small)), "memory")
    assert found.level is Level.FAIL
    assert "/y" in found.found


SMALL_LOCK = replace(LIMITS, memlock_soft_bytes=8 << 20)


@pytest.mark.parametrize(
    ("lock", "limits", "swap_bytes", "level"),
    [
        ("auto", SMALL_LOCK, 8 * GIB, Level.WARN),
        ("auto", SMALL_LOCK, 0, Level.OK),
        ("yes", SMALL_LOCK, 0, Level.FAIL),
        ("no", SMALL_LOCK, 8 * GIB, Level.OK),
        ("auto", replace(SMALL_LOCK, may_lock=True), 8 * GIB, Level.OK),
        ("yes", replace(LIMITS, memlock_soft_bytes=64 * GIB), 8 * GIB, Level.OK),
        ("auto", None, 8 * GIB, Level.WARN),
    ],
)
def test_memlock(lock: str, limits: ProcessLimits | None, swap_bytes: int, level: Level) -> None:
    found = check(of(pool(lock=lock), own=limits, swap_bytes=swap_bytes), "memlock")
    assert found.level is level
    assert level is not Level.FAIL or "LimitMEMLOCK=infinity" in found.advice


def test_a_running_daemon_is_judged_by_its_own_limits_and_by_what_it_got(changed: Any) -> None:
    unlocked = changed({"pool.population.locked": False, "pool.population.lock_refused": "EPERM"})
    assert check(of(pool(), **running(unlocked, of_daemon=SMALL_LOCK)), "memlock").level is Level.WARN
    assert check(of(pool(), **running(of_daemon=SMALL_LOCK)), "memlock").level is Level.OK


@pytest.mark.parametrize(
    ("option", "huge", "level"),
    [
        ("auto", HugePageFacts("never", 0, 0, 0), Level.WARN),
        ("auto", HugePageFacts("advise", 0, 0, 0), Level.OK),
        ("never", HugePageFacts("never", 0, 0, 0), Level.OK),
        ("hugetlb", HugePageFacts("never", 32_768, 32_767, 0), Level.FAIL),
        ("hugetlb", HugePageFacts("never", 32_768, 32_768, 0), Level.OK),
        ("hugetlb", HugePageFacts("never", 0, 0, 32_768), Level.OK),
    ],
)
def test_huge_pages_before_the_start(option: str, huge: HugePageFacts, level: Level) -> None:
    found = check(of(pool(huge_pages=option), huge=huge), "huge pages")
    assert found.level is level
    assert level is not Level.FAIL or "vm.nr_hugepages=32768" in found.advice


def test_huge_pages_that_a_running_daemon_did_not_get(changed: Any) -> None:
    none = changed({"pool.population.huge_bytes": 0})
    off = check(of(pool(), **running(none, huge=HugePageFacts("never", 0, 0, 0))), "huge pages")
    assert "shmem_enabled" in off.advice
    fragmented = check(of(pool(), **running(none)), "huge pages")
    assert "fragmented" in fragmented.advice
    facts = of(pool(), **running(none))
    assert facts.daemon is not None
    lazy = replace(facts.daemon, settings={**facts.daemon.settings, "pool.populate": "lazy"})
    assert check(replace(facts, daemon=lazy), "huge pages").level is Level.OK
    starting = changed({"pool.population.huge_bytes": 0, "pool.population.done": False})
    assert check(of(pool(), **running(starting)), "huge pages").level is Level.OK


def test_dev_shm_matters_for_named_memory_only() -> None:
    assert check(of(pool(), shm_free_bytes=0), "/dev/shm").level is Level.OK
    for free_bytes in (None, 63 * GIB):
        assert check(of(pool(backing="posix"), shm_free_bytes=free_bytes), "/dev/shm").level is Level.FAIL
    assert check(of(pool(backing="posix")), "/dev/shm").level is Level.OK


def test_numa_nodes_that_are_uneven_are_a_warning() -> None:
    even = (Node(0, 64 * GIB, (0,)), Node(1, 64 * GIB, (1,)))
    assert "2 nodes" in check(of(pool(), nodes=even), "NUMA").found
    uneven = (Node(0, 112 * GIB, (0,)), Node(1, 16 * GIB, (1,)))
    assert check(of(pool(), nodes=uneven), "NUMA").level is Level.WARN


def test_open_files_must_do_for_the_daemon_and_for_a_client() -> None:
    # 64 clients × 4 + 64 segments × 2 + 64 = 448 for the daemon, 64 + 64 = 128 for a client.
    assert check(of(pool(), own=replace(LIMITS, open_files_hard=448)), "open files").level is Level.OK
    assert "448" in check(of(pool(), own=replace(LIMITS, open_files_hard=447)), "open files").advice
    assert check(of(pool(), own=replace(LIMITS, open_files_soft=128)), "open files").level is Level.OK
    assert "ulimit -n" in check(of(pool(), own=replace(LIMITS, open_files_soft=127)), "open files").advice


def test_strict_overcommit_is_a_warning() -> None:
    assert check(of(pool(), overcommit_mode=2), "overcommit").level is Level.WARN


@pytest.mark.parametrize(
    ("lacking", "level", "word"),
    [
        ("pidfd", Level.FAIL, "pidfd_open"), ("memfd_seals", Level.FAIL, "seals"), ("pid_visible", Level.FAIL, "/proc"),
        ("peer_pidfd", Level.WARN, "pid namespace"), ("populate", Level.WARN, "slowly"),
    ],
)  # fmt: skip
def test_features_of_the_kernel(lacking: str, level: Level, word: str) -> None:
    found = check(of(pool(), kernel=replace(KERNEL, **{lacking: False})), "kernel")
    assert found.level is level
    assert word in found.found + found.advice


def test_a_native_part_that_does_not_load_fails() -> None:
    found = check(of(pool(), native_error="undefined symbol"), "library")
    assert found.level is Level.FAIL
    assert "undefined symbol" in found.found


# -- the command


def test_doctor_works_without_a_daemon_and_exits_with_1(kvctl: Any, tmp_path: Any) -> None:
    path = tmp_path / "kvd.sock"
    kvctl.against(UnavailableError(f"no daemon at {path}", code="no-daemon"))
    text = kvctl("--socket", str(path), "doctor", code=1)
    assert f"{path} is not there" in text
    assert "→ start the daemon" in text
    assert "2 failures" in text
    answer = kvctl.json("doctor", "--socket", str(path), code=1)
    assert answer["ok"] is False
    assert {one["level"] for one in answer["checks"] if one["name"] in ("socket", "daemon")} == {"FAIL"}


def test_doctor_reports_a_broken_configuration_and_goes_on(kvctl: Any, tmp_path: Any) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text("[pool]\nsise = 1\n")
    kvctl.against(UnavailableError("no daemon", code="no-daemon"))
    text = kvctl("doctor", "--config", str(path), code=1)
    assert "unknown key pool.sise" in text
    assert "kernel" in text


def test_gather_takes_the_socket_of_the_configuration(kvctl: Any, tmp_path: Any) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(f'[server]\nsocket = "{tmp_path}/other.sock"\n[pool]\nsize = "64MiB"\n')
    kvctl.against(doctor=DOCTOR, config=[["pool.size", "64 MiB", "default", ""]])
    facts = doctor.gather(None, path, 5.0)
    assert kvctl.daemon.path == f"{tmp_path}/other.sock"
    assert facts.daemon is not None
    assert facts.daemon.settings == {"pool.size": "64 MiB"}
    assert facts.sizes is not None
    assert facts.sizes.pool_bytes == 64 << 20


def test_clients_that_block_reclaim_are_named_with_the_way_out() -> None:
    blocking = {**CLIENT, "blocks_reclaim_s": 754.0}
    left = {**blocking, "pid": 901, "blocks_reclaim_s": 900.0, "state": "disconnected"}
    found = [
        one
        for one in checks.all_checks(of(pool(), **running(clients=(CLIENT, blocking, left))))
        if one.name == "clients"
    ]
    assert [one.level for one in found] == [Level.WARN, Level.WARN]
    longest, other = found
    for part in ("pid 901", "left", "for 900 s"):
        assert part in longest.found
    assert "pid 900 (vllm-engine, user 1000) has held memory" in other.found
    assert "5 leases on 3 MiB" in other.found
    assert "kill 900" in other.advice
