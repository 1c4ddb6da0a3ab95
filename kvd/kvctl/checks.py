"""What doctor checks: facts in, verdicts out.

Called by `kvd.kvctl.doctor`. Nothing here asks the machine, so that every verdict can be tested. Each check
says what was found, what that means for kvd, and, unless it is well, the way out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from kvd import limits
from kvd.config import Config, Sizes, format_size
from kvd.errors import KvdError, UnavailableError
from kvd.kvctl.output import count
from kvd.probe import leftovers
from kvd.probe.hugepages import HugePageFacts
from kvd.probe.kernel import KernelFacts
from kvd.probe.leftovers import Leftover
from kvd.probe.memory import MemoryFacts
from kvd.probe.numa import Node
from kvd.probe.process import ProcessLimits
from kvd.probe.unixsocket import Kind, SocketFacts
from kvd.version import VERSION

FDS_PER_CLIENT: Final = 4
FDS_SPARE: Final = 64
HUGE_PAGE_BYTES: Final = 2 * limits.MIB
HUGE_SHARE_GOOD: Final = 0.9
REFUSED_RECENTLY_S: Final = 3600.0


class Level(StrEnum):
    """How a check came out."""

    OK = "OK"
    WARN = "WARN"  # kvd works, worse than it could
    FAIL = "FAIL"  # kvd does not start, or cannot be used by this user


@dataclass(frozen=True, slots=True)
class Check:
    """One verdict. `advice` is empty when all is well."""

    name: str
    level: Level
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """What the daemon said: the answers of these calls, `settings` of `config` (option -> value)."""

    version: str
    pid: int
    layout: int
    layout_here: int
    status: dict[str, Any]
    doctor: dict[str, Any]
    settings: dict[str, str]
    clients: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that doctor looks at. `daemon` is None when it did not answer, `daemon_error` says why."""

    socket: SocketFacts
    daemon: Answered | None
    daemon_error: KvdError | None
    config: Config
    config_file: str
    config_error: KvdError | None
    sizes: Sizes | None
    memory: MemoryFacts
    swap_bytes: int
    overcommit_mode: int | None
    own: ProcessLimits | None
    of_daemon: ProcessLimits | None
    huge: HugePageFacts
    shm_free_bytes: int | None
    nodes: tuple[Node, ...]
    kernel: KernelFacts
    native_error: str
    leftovers: tuple[Leftover, ...] = ()
    owner_pid: int | None = None  # of the daemon that holds the lock of this socket, answers or not
    owner_state: str = ""
    options: str = ""  # that doctor was given and that its advice must carry: " --config FILE"


def _ok(name: str, found: str) -> Check:
    return Check(name, Level.OK, found)


def _warn(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.WARN, found, advice)


def _fail(name: str, found: str, advice: str) -> Check:
    return Check(name, Level.FAIL, found, advice)


def all_checks(facts: Facts) -> list[Check]:
    """Every check, those about the daemon first."""
    return [
        _socket(facts),
        *_daemon(facts),
        *_restart(facts),
        *_connections(facts),
        *_clients(facts),
        _config(facts),
        _library(facts),
        _memory(facts),
        _memlock(facts),
        _huge_pages(facts),
        _dev_shm(facts),
        _numa(facts),
        _open_files(facts),
        _overcommit(facts),
        *_kernel(facts.kernel),
    ]


def _restart(facts: Facts) -> list[Check]:
    """What a daemon that is gone left, and whom the present one waits for. Nothing to say of neither."""
    found: list[Check] = []
    if facts.leftovers:
        what = "; ".join(f"{item.path}: {item.what}" for item in facts.leftovers)
        found.append(
            _warn("left behind", what, f"start the daemon to use it again, or kvctl purge{facts.options}")
        )
    section = facts.daemon.status.get("restart", {}) if facts.daemon is not None else {}
    if section.get("dropped_reason"):
        found.append(
            _warn(
                "restart",
                f"kept memory was dropped: {section['dropped_reason']}",
                "the pool begins empty; nothing to do",
            )
        )
    if section.get("waiting_for"):
        who = ", ".join(
            f"pid {row['pid']} ({count(row['leases'], 'lease')}, {row['leased_bytes']} B, "
            f"{count(row['being_written'], 'slot')})"
            for row in section["waiting_for"]
        )
        found.append(
            _warn(
                "restart",
                f"clients of the daemon before hold memory: {who}",
                "they let go with their next calls, or end",
            )
        )
    return found


def _connections(facts: Facts) -> Iterator[Check]:
    """That somebody was refused a connection not long ago, and who held them. Nothing to say of nobody."""
    section = facts.daemon.status.get("connections", {}) if facts.daemon is not None else {}
    last = section.get("last_refused")
    if last is None or last["ago_s"] > REFUSED_RECENTLY_S:
        return
    holders = ", ".join(f"pid {row['pid']} ({row['connections']})" for row in last["holders"])
    yield _warn(
        "connections",
        f"{section['refused']} refused since the daemon started, the last {last['ago_s']:.0f} s ago, of user "
        f"{last['uid']}; {last['held']} were open then (one user may have {section['of_one_user_max']}), most "
        f"of them: {holders}",
        "close stores and Admin connections that are not used any more, or raise access.connections_per_uid or "
        "clients.max",
    )


def _clients(facts: Facts) -> Iterator[Check]:
    """Clients that hold memory which was to be reused, the longest first. Nothing to say of none."""
    rows = facts.daemon.clients if facts.daemon is not None else []
    blocking = [row for row in rows if row["blocks_reclaim_s"] is not None]
    for row in sorted(blocking, key=lambda row: -row["blocks_reclaim_s"]):
        left = "" if row["state"] == "attached" else ", which left and lives on"
        yield _warn(
            "clients",
            f"pid {row['pid']} ({row['name']}, user {row['uid']}){left} has held memory that was to be reused for "
            f"{row['blocks_reclaim_s']:.0f} s: {count(row['leases'], 'lease')} on {format_size(row['leased_bytes'])}",
            "it comes back when that process releases its leases (finish or abort its requests) or ends: "
            f"kill {row['pid']}, if it hangs; clients.leased_max and clients.leased_over bound what one may hold",
        )


def _pool_bytes(facts: Facts) -> int | None:
    """Bytes of the pool that runs, or of the one that would be started."""
    if facts.daemon is not None:
        return int(facts.daemon.status["pool"]["size_bytes"])
    return None if facts.sizes is None else facts.sizes.pool_bytes


def _setting(facts: Facts, option: str) -> str:
    """An option as the daemon runs with it, or as it would be started."""
    if facts.daemon is not None:
        return facts.daemon.settings.get(option, "")
    section, _, key = option.partition(".")
    return str(getattr(getattr(facts.config, section), key))


def _socket(facts: Facts) -> Check:
    socket, error = facts.socket, facts.daemon_error
    start = (
        "start the daemon (systemctl start kvd, or kvd serve), or point KVD_SOCKET or --socket at its socket"
    )
    is_lost = isinstance(error, UnavailableError) and error.code == "KVD-UNAVAILABLE-NO-DAEMON"
    if is_lost and facts.owner_pid is not None and socket.kind in (Kind.ABSENT, Kind.SOCKET):
        found, _, advice = leftovers.socket_is_gone(socket.path, facts.owner_pid).partition(": ")
        return _fail("socket", found, advice)
    match socket.kind:
        case Kind.ABSENT:
            return _fail("socket", f"{socket.path} is not there", start)
        case Kind.NO_DIRECTORY:
            return _fail(
                "socket",
                f"the directory of {socket.path} is not there",
                f"{start}; either makes the last part of its directory, if this user may",
            )
        case Kind.HIDDEN:
            return _fail(
                "socket",
                f"a directory above {socket.path} is closed to this user",
                "add this user to the daemon's group, then log in again",
            )
        case Kind.OTHER:
            return _fail(
                "socket",
                f"{socket.path} is no socket",
                "point KVD_SOCKET or --socket at the daemon's socket, or remove this file",
            )
    owner = f"{socket.path}, mode {socket.mode:04o}, owner {socket.uid}:{socket.gid}"
    if not socket.may_connect:
        return _fail(
            "socket",
            f"{owner}: this user may not connect",
            f"add this user to group {socket.gid} and log in again, or set server.socket_mode",
        )
    if is_lost:
        return _fail(
            "socket",
            f"{owner}: stale, nobody listens",
            "the next start of the daemon replaces it: systemctl start kvd, or kvd serve",
        )
    if socket.mode & 0o007:
        return _warn(
            "socket",
            f"{owner}: every user of this machine may connect",
            'any of them can read the cache and spoil it: server.socket_mode = "0660"',
        )
    return _ok("socket", owner)


def _daemon(facts: Facts) -> Iterator[Check]:
    if facts.daemon is None:
        error = facts.daemon_error
        lost = error is None or error.code == "KVD-UNAVAILABLE-NO-DAEMON"
        text = error.message if error is not None and not lost else "not running"
        if lost and facts.owner_pid is not None:
            text = "runs and cannot be reached"
        advice = "see socket" if lost else "its log says more: journalctl -u kvd"
        if error is not None and error.code == "KVD-UNAVAILABLE-DEADLINE":
            advice = "it is stopped, frozen or overloaded: look at its process state and log; systemctl restart kvd"
            if facts.owner_state.startswith("T"):
                advice = f"it is stopped or frozen: kill -CONT {facts.owner_pid} lets it go on"
        if facts.owner_pid is not None:
            text = f"pid {facts.owner_pid}{f' ({facts.owner_state})' if facts.owner_state else ''}: {text}"
        yield _fail("daemon", text, advice)
        return
    daemon = facts.daemon
    health = daemon.status["health"]
    ill = [
        f"{name} {part['state']} {part['reason']}".strip()
        for name, part in health["parts"].items()
        if part["state"] != "ok"
    ]
    level = {"ok": Level.OK, "starting": Level.OK, "degraded": Level.WARN}.get(health["state"], Level.FAIL)
    found = f"pid {daemon.pid}, {health['state']}" + (f": {'; '.join(ill)}" if ill else "")
    yield Check("daemon", level, found, "" if level is Level.OK else "see its log: journalctl -u kvd")
    if daemon.version == VERSION and daemon.layout == daemon.layout_here:
        yield _ok("version", f"daemon and kvctl are {VERSION}, layout {daemon.layout}")
        return
    skew = f"daemon {daemon.version} (layout {daemon.layout}), kvctl {VERSION} (layout {daemon.layout_here})"
    if daemon.layout != daemon.layout_here:
        yield _fail(
            "version", skew, "clients of this release cannot attach: install one release on both sides"
        )
    else:
        yield _warn("version", skew, "they work together; restart the daemon after an upgrade")


def _config(facts: Facts) -> Check:
    error = facts.config_error
    if error is not None:
        return Check(
            "config", Level.FAIL, error.message.replace("\n", "; "), "mend it, then: kvctl config check"
        )
    pool = f", pool {format_size(facts.sizes.pool_bytes)}" if facts.sizes is not None else ""
    if facts.daemon is None:
        return _ok("config", f"{facts.config_file or 'no file: defaults and environment'}{pool}")
    if not facts.config_file:
        return _ok("config", "no file found from here; the daemon runs with what it was started with")
    running = facts.daemon.settings
    differ = [
        f"{key} = {running[key]} (file: {value})"
        for key, value, source, _ in facts.config.describe()
        if source == facts.config_file and running.get(key, value) != value
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        found = f"{facts.config_file}; the daemon runs with {', '.join(differ[:3])}{more}"
        return _warn("config", found, "restart the daemon to apply the file, if it is the daemon's")
    return _ok("config", f"{facts.config_file}{pool}, as the daemon runs")


def _library(facts: Facts) -> Check:
    if facts.native_error:
        return _fail(
            "library",
            f"the native part cannot be loaded: {facts.native_error}",
            "install it again for this Python: pip install --force-reinstall kvd",
        )
    return _ok("library", f"client library {VERSION} loads")


def _memory(facts: Facts) -> Check:
    memory, wanted = facts.memory, _pool_bytes(facts)
    # A daemon lives in a control group of its own; it knows its bound better than this process.
    bound, source = memory.bound_bytes, memory.bound_source
    if facts.daemon is not None:
        bound, source = facts.daemon.doctor["memory_bound_bytes"], facts.daemon.doctor["memory_bound_source"]
    found = f"{source} has {format_size(bound)}, {format_size(memory.available_bytes)} available"
    if wanted is None:
        return _warn("memory", found, "the size of the pool is not known: see config")
    found += f", pool {format_size(wanted)}"
    if facts.daemon is not None:
        populated = facts.daemon.status["pool"]["population"]
        if populated["error"]:
            return _fail("memory", f"{found}: {populated['error']}", "make pool.size smaller")
        missing = wanted - populated["populated_bytes"]
        if wanted > bound:
            return _fail(
                "memory",
                found,
                "the kernel will end the daemon when the pool fills this limit; make pool.size smaller",
            )
        if missing > memory.available_bytes:
            return _warn(
                "memory",
                found,
                f"{format_size(missing)} of it are still to come and will not fit; make pool.size smaller",
            )
        return _ok("memory", found)
    if wanted > memory.available_bytes:
        return _warn(
            "memory", found, "less is available than the pool will take: free some, or make pool.size smaller"
        )
    return _ok("memory", found)


def _memlock(facts: Facts) -> Check:
    wanted = _pool_bytes(facts)
    if facts.daemon is not None:
        population = facts.daemon.status["pool"]["population"]
        if population["locked"]:
            return _ok("memlock", "the pool is locked in memory")
    if _setting(facts, "pool.lock") == "no":
        return _ok("memlock", 'pool.lock = "no": the pool is not to be locked')
    held = facts.of_daemon or facts.own
    whose = (
        "the daemon" if facts.of_daemon is not None else "this shell (a service has its own: LimitMEMLOCK)"
    )
    if held is None:
        return _warn("memlock", "limits cannot be read from /proc", "mount /proc")
    if held.may_lock or held.memlock_soft_bytes is None:
        return _ok("memlock", f"unlimited for {whose}")
    found = f"{format_size(held.memlock_soft_bytes)} for {whose}"
    if wanted is not None and held.memlock_soft_bytes >= wanted and facts.daemon is None:
        return _ok("memlock", found)
    way = "systemd: LimitMEMLOCK=infinity; shell: ulimit -l unlimited; container: --ulimit memlock=-1"
    if _setting(facts, "pool.lock") == "yes":
        return _fail("memlock", found, f'pool.lock = "yes" needs the whole pool: {way}')
    if not facts.swap_bytes:
        return _ok("memlock", f"{found}; there is no swap, so nothing can be swapped out")
    return _warn("memlock", found, f"the pool may be swapped out and be slow: {way}; or turn swap off")


def _huge_pages(facts: Facts) -> Check:
    huge, chosen = facts.huge, _setting(facts, "pool.huge_pages")
    offered = (
        f"shmem_enabled = {huge.shmem_enabled or 'unknown'}, {huge.hugetlb_free_count} of "
        f"{huge.hugetlb_total_count} reserved pages free"
    )
    advise = (
        "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled (as root; at boot: "
        "transparent_hugepage_shmem=advise)"
    )
    if facts.daemon is not None:
        pool = facts.daemon.status["pool"]
        population = pool["population"]
        obtained = population["huge_bytes"] / max(1, pool["size_bytes"])
        if _setting(facts, "pool.populate") == "lazy":
            return _ok("huge pages", f"not measured: pages come when first used; {offered}")
        if obtained >= HUGE_SHARE_GOOD or not population["done"]:
            return _ok("huge pages", f"{obtained:.0%} of the pool; {offered}")
        if chosen == "never":
            return _ok("huge pages", 'pool.huge_pages = "never"')
        fragmented = 'memory was fragmented: reserve pages (vm.nr_hugepages), pool.huge_pages = "hugetlb"'
        advice = fragmented if huge.thp_possible else advise
        return _warn(
            "huge pages",
            f"{obtained:.0%} of the pool; {offered}",
            f"large copies lose time on small pages: {advice}; then restart the daemon",
        )
    match chosen:
        case "never":
            return _ok("huge pages", 'pool.huge_pages = "never"')
        case "hugetlb":
            wanted = _pool_bytes(facts) or 0
            needed = -(-wanted // HUGE_PAGE_BYTES)
            if huge.hugetlb_free_count + huge.hugetlb_overcommit_count < needed:
                return _fail(
                    "huge pages",
                    f"{offered}, {needed} needed",
                    f'sysctl -w vm.nr_hugepages={needed} soon after boot, or pool.huge_pages = "auto"',
                )
            return _ok("huge pages", f"{offered}, {needed} needed")
    if huge.thp_possible:
        return _ok("huge pages", offered)
    return _warn("huge pages", offered, f"large copies will lose time on small pages: {advise}")


def _dev_shm(facts: Facts) -> Check:
    free_bytes = facts.shm_free_bytes
    text = "no mount" if free_bytes is None else f"{format_size(free_bytes)} free"
    if _setting(facts, "pool.backing") != "posix":
        return _ok("/dev/shm", f'{text}; not used (pool.backing = "memfd")')
    wanted = _pool_bytes(facts) or 0
    if facts.daemon is None and (free_bytes or 0) < wanted:
        return _fail(
            "/dev/shm",
            f"{text}, the pool needs {format_size(wanted)}",
            'mount -o remount,size=… /dev/shm (container: --shm-size), or pool.backing = "memfd"',
        )
    return _ok("/dev/shm", text)


def _numa(facts: Facts) -> Check:
    if len(facts.nodes) < 2:
        return _ok("NUMA", "one node: nothing to place")
    listed = ", ".join(f"{node.number}: {format_size(node.memory_bytes)}" for node in facts.nodes)
    least, most = min(n.memory_bytes for n in facts.nodes), max(n.memory_bytes for n in facts.nodes)
    if 2 * least < most:
        return _warn(
            "NUMA",
            f"uneven nodes: {listed}",
            "segments go to all nodes alike; when the small one is full the rest comes from others",
        )
    return _ok("NUMA", f"{len(facts.nodes)} nodes ({listed}); segments are spread over them")


def _open_files(facts: Facts) -> Check:
    segments = len(facts.sizes.segments_bytes) if facts.sizes is not None else 0
    clients = facts.config.clients.max
    if facts.daemon is not None:
        segments, clients = (
            len(facts.daemon.status["pool"]["segments"]),
            facts.daemon.status["clients"]["max"],
        )
    daemon_needs = FDS_PER_CLIENT * clients + 2 * segments + FDS_SPARE
    client_needs = segments + FDS_SPARE
    held, own = facts.of_daemon or facts.own, facts.own
    if held is None or own is None:
        return _warn("open files", "limits cannot be read from /proc", "mount /proc")
    found = f"limit {own.open_files_soft or 'none'} here, {held.open_files_hard or 'none'} for the daemon"
    if held.open_files_hard is not None and held.open_files_hard < daemon_needs:
        return _warn(
            "open files",
            found,
            f"{count(clients, 'client')} and {count(segments, 'segment')} need {daemon_needs}: "
            f"LimitNOFILE={2 * daemon_needs}",
        )
    if own.open_files_soft is not None and own.open_files_soft < client_needs:
        return _warn(
            "open files",
            found,
            f"a client of {count(segments, 'segment')} needs {client_needs}: ulimit -n {2 * client_needs}",
        )
    return _ok("open files", found)


def _overcommit(facts: Facts) -> Check:
    mode = facts.overcommit_mode
    if mode == 2:
        return _warn(
            "overcommit",
            "vm.overcommit_memory = 2",
            "the whole pool counts from the start: raise vm.overcommit_ratio if it does not fit",
        )
    return _ok("overcommit", f"vm.overcommit_memory = {'unknown' if mode is None else mode}")


def _kernel(kernel: KernelFacts) -> Iterator[Check]:
    name = f"Linux {kernel.release}, {kernel.machine}"
    lacking = [
        word
        for word, there in (
            ("pidfd_open (Linux 5.3)", kernel.pidfd),
            ("memfd with seals (Linux 5.1)", kernel.memfd_seals),
            ("/proc", kernel.pid_visible),
        )
        if not there
    ]
    if lacking:
        yield _fail(
            "kernel",
            f"{name} lacks {', '.join(lacking)}",
            "use a newer kernel, or let the container's seccomp profile allow these calls",
        )
        return
    worse = []
    if not kernel.peer_pidfd:
        worse.append("no SO_PEERPIDFD (Linux 6.5): clients must share the daemon's pid namespace (hostPID)")
    if not kernel.populate:
        worse.append("no MADV_POPULATE_WRITE (Linux 5.14): the pool is populated slowly")
    if worse:
        yield _warn("kernel", name, "; ".join(worse))
    else:
        yield _ok("kernel", f"{name}: pidfd, peer pidfd, memfd seals, populate")
