"""The daemon put together: what exists, in which order it comes up, and how it goes down.

Owns the event loop's objects and the exit. Called by `kvd.server.main` once a process. Order of starting: the
socket (a second daemon is refused before it takes memory), META and POOL, population, then serving from the first
usable range on. Order of stopping: no new connections, state draining, answers that fit go out, state closed, clients
see EOF, named memory and socket file are removed; a timer of its own ends the process after `server.stop_timeout_s`
whatever happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvd import limits
from kvd.config import Config, Sizes, format_size
from kvd.core import events as ev
from kvd.errors import CapacityError, ConfigError, KvdError
from kvd.probe import hugepages, memory
from kvd.server import adoption, control, control_file, domain, keeping, logs, named
from kvd.server.admin import Admin
from kvd.server.blockers import Blockers
from kvd.server.clients import Clients
from kvd.server.events import Events, loopback
from kvd.server.ghosts import Ghosts
from kvd.server.metrics import MetricsServer, exposition
from kvd.server.notify import Notifier, Watchdog, listening_socket
from kvd.server.peer import boot_id, start_ticks
from kvd.server.population import Population
from kvd.server.report import Report
from kvd.server.runner import Runner
from kvd.server.supervise import Supervisor
from kvd.server.turns import Turns
from kvd.server.verifier import Verifier
from kvd.shm import pool
from kvd.shm.layout import MetaState
from kvd.version import VERSION

TICK_S: Final = 1.0
TICK_LATE_S: Final = 5.0
POPULATION_LATE_S: Final = 60.0  # the first huge pages of a full machine take that long
VERIFY_LATE_S: Final = 30.0
DESCRIPTORS_OWN: Final = 64  # loop, logs, META, names, keeper, metrics and those who scrape
EXIT_OK: Final = 0
EXIT_BROKEN: Final = 70
EXIT_STOP_TIMEOUT: Final = 75
DOMAIN: Final = "default"

_log = logs.get("daemon")


class MonotonicClock:
    """CLOCK_MONOTONIC, as clients read it."""

    now_ns = staticmethod(time.monotonic_ns)


class App:
    """One daemon."""

    def __init__(self, config: Config, sizes: Sizes, env: Mapping[str, str]) -> None:
        self.config = config
        self.sizes = sizes
        self._env = env
        self._stopping = asyncio.Event()
        self._exit_code = EXIT_OK
        self._stop_reason = ""
        self._loop = asyncio.get_running_loop()
        self.notifier = Notifier(env)
        self.watchdog = Watchdog(self.notifier, env)
        self.supervisor = Supervisor(self.fatal)
        self._status_line = ""
        self._populated_bytes = -1

    # --- life

    async def run(self) -> int:
        """Start, serve until told to stop, stop. Returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        for note in self.sizes.notes:
            _log.warning("configuration", note=note)
        listener, own_path = self._listen()
        names = named.NamedMemory(self.config)
        try:
            self._build(listener, names)
            await self._start()
            await self._stopping.wait()
            await self._stop()
        finally:
            self._bound_exit()
            listener.close()
            if own_path is not None:
                own_path.remove()
            names.remove()
        return self._exit_code

    def stop(self, reason: str) -> None:
        """Begin to stop; the second call ends the process at once."""
        if self._stopping.is_set():
            _log.warning("stopping_at_once", reason=reason)
            os._exit(EXIT_STOP_TIMEOUT)
        _log.info("stopping", reason=reason)
        self._stop_reason = reason
        self._bound_exit()
        self._stopping.set()

    def fatal(self, error: BaseException) -> None:
        """Something happened that must not: say so and stop. The cache is disposable, a wrong answer is not."""
        _log.error("fatal", reason=f"{type(error).__name__}: {error}", exc_info=error)
        self._exit_code = EXIT_BROKEN
        self.supervisor.set_health("daemon", "failed", str(error))
        if not self._stopping.is_set():
            self.stop("fatal")

    def _bound_exit(self) -> None:
        """From now on the process ends within the bound, by a thread that depends on nothing else."""
        if not getattr(self, "_bounded", False):
            self._bounded = True
            timer = threading.Timer(self.config.server.stop_timeout_s, os._exit, (EXIT_STOP_TIMEOUT,))
            timer.daemon = True
            timer.start()

    # --- starting

    def _listen(self) -> tuple[socket.socket, named.SocketFile | None]:
        passed = listening_socket(self._env)
        if passed is not None:
            _log.info("listening", socket=passed.getsockname(), passed_by="service manager")
            return passed, None
        path = self.config.server.socket
        held = named.SocketFile(path, self._env)
        try:
            listener = control_file.bind(path, int(self.config.server.socket_mode, 8))
        except KvdError:
            held.release()
            raise
        held.bound()
        _log.info("listening", socket=path)
        return listener, held

    def _build(self, listener: socket.socket, names: named.NamedMemory) -> None:
        config = self.config
        check_host(config, self.sizes)
        identity = domain.ProcessIdentity(
            boot_id(),
            os.getpid(),
            start_ticks("self"),
            int.from_bytes(os.urandom(8), "little") | 1,
            int.from_bytes(os.urandom(8), "little"),
        )
        posix_names = names.create(len(self.sizes.segments_bytes)) if config.pool.backing == "posix" else []
        self.keep = keeping.choose(config, self.sizes, self._env, self.notifier)
        started = adoption.start(
            self.keep, DOMAIN, config, self.sizes, identity, MonotonicClock(), posix_names,
            hugetlb=config.pool.huge_pages == "hugetlb",
        )  # fmt: skip
        self.domain = started.domain
        self.domain.namespaces.names_renewed = partial(adoption.keep_names, self.keep, started)
        self.sizes = self.domain.sizes
        guard = self.supervisor.guard
        self.clients = Clients(self._loop, self.domain, config, guard, self.keep, started.client_ids_from)
        self.ghosts = Ghosts(self._loop, self.domain, self.keep, started.ghosts, guard)
        self.runner = Runner(
            self._loop, self.domain, self.clients, leased_over=config.clients.leased_over, guard=guard
        )
        self.blockers = Blockers(self.domain, self.clients)
        self.verifier = Verifier(
            self._loop, self.domain, self.clients.by_slot.get, self.runner.withdraw, config.objects,
            self._verifying,
        )  # fmt: skip
        self.population = Population(
            self._loop, self.domain.segments, config.pool, self._segment_ready, self._pages_measured, guard
        )
        self.report = Report(
            config, self.domain, self.clients, self.runner, self.population.progress, self.supervisor,
            self.verifier, self.blockers,
        )  # fmt: skip
        turns = Turns(self._loop, guard)
        self.admin = Admin(
            self.domain, self.runner, self.report, self.verifier, config, self._stop_asked, turns
        )
        self.control = control.Control(
            self._loop,
            listener,
            self.domain,
            self.clients,
            self.admin,
            config.access,
            turns,
            guard,
        )
        self.events = (
            Events(self._loop, self.domain, config.events, self.supervisor) if config.events.listen else None
        )
        self.report.events = self.events
        self.report.control = self.control
        self.report.restart = lambda: {**started.outcome.as_dict(), "waiting_for": self.ghosts.rows()}
        self.control.ghosts = self.ghosts
        self.metrics = (
            MetricsServer(config.server.metrics_listen, self._render_metrics, self._healthy)
            if config.server.metrics_listen
            else None
        )

    async def _start(self) -> None:
        if self.metrics is not None:
            await self.metrics.start()
            host, port = self.metrics.address
            _log.info("metrics", host=host, port=port)
            if not self.metrics.loopback:
                _log.warning("metrics_not_on_loopback", address=self.config.server.metrics_listen)
            self.supervisor.start("metrics", self.metrics.run, restart=True)
        if self.events is not None:
            self.events.start()
            if not (loopback(self.events.address) and loopback(self.events.replay_address)):
                _log.warning("events_not_on_loopback", address=self.events.address)
        self.keep.watch(self._loop, self.supervisor.guard, partial(self.supervisor.set_health, "keeper"))
        self.supervisor.set_health("population", "starting")
        self.population.start()
        self.supervisor.start("population", self._populate, restart=False, ends=True)
        await self.population.first_ready()
        self.domain.table.set_state(MetaState.SERVING)
        self.supervisor.set_health("daemon", "ok")
        self.supervisor.start("tick", self._tick, restart=False)
        self.supervisor.start("verify", self.verifier.run, restart=True)
        self.control.start()
        self.ghosts.start()
        self.watchdog.start()
        _calm_collector()
        self._status_line = self.report.line()
        self.notifier.ready(self._status_line)
        _log.info(
            "serving", version=VERSION, pid=os.getpid(), epoch=f"{self.domain.identity.epoch:016x}",
            pool=format_size(self.sizes.pool_bytes), segments=len(self.sizes.segments_bytes),
            families_max=self.sizes.families_max, meta=format_size(self.domain.table.meta_bytes),
        )  # fmt: skip

    def _segment_ready(self, segment: int, begin_bytes: int, end_bytes: int) -> None:
        progress, part = self.population.progress, self.domain.segments[segment]
        kind = pool.PageKind.HUGETLB if part.hugetlb else pool.PageKind.SMALL
        self.domain.table.set_segment(segment, progress.segments_bytes[segment], kind, part.inode)
        self.domain.step(ev.SegmentReady(segment, begin_bytes, end_bytes))

    def _pages_measured(self, segment: int, kind: pool.PageKind) -> None:
        self.report.page_kinds[segment] = kind
        self.domain.table.set_segment(
            segment,
            self.population.progress.segments_bytes[segment],
            kind,
            self.domain.segments[segment].inode,
        )

    async def _populate(self) -> None:
        await self.population.run()
        error = self.population.progress.error
        if error is None:
            self.supervisor.set_health("population", "ok")
        else:
            self.supervisor.set_health("population", "degraded", error.message)

    async def _tick(self) -> None:
        """Once a second: the loop proves that it turns, recency and leases are looked at, status is told."""
        while True:
            self.watchdog.beat()
            self.supervisor.beat("tick", TICK_LATE_S, late="failed")
            self._look_at_population()
            self.runner.tick()
            self.blockers.look()
            self.ghosts.tick()
            line = self.report.line()
            if line != self._status_line:
                self._status_line = line
                self.notifier.status(line)
            await asyncio.sleep(TICK_S)

    def _look_at_population(self) -> None:
        """Its threads are no tasks: that they get on shows in their progress."""
        progress = self.population.progress
        if progress.done:
            self.supervisor.rest("population")
        elif progress.populated_bytes != self._populated_bytes:
            self._populated_bytes = progress.populated_bytes
            self.supervisor.beat("population", POPULATION_LATE_S)

    def _verifying(self, busy: bool) -> None:
        if busy:
            self.supervisor.beat("verify", VERIFY_LATE_S)
        else:
            self.supervisor.rest("verify")

    # --- stopping

    def _stop_asked(self) -> None:
        self._loop.call_soon(self.stop, "asked by an administrator")

    async def _stop(self) -> None:
        deadline_s = time.monotonic() + self.config.server.stop_timeout_s / 2
        self.notifier.stopping()
        self.control.stop_accepting()
        self.population.stop()
        await self.supervisor.stop()
        self.verifier.close()
        if self._exit_code == EXIT_OK:
            await self._drain(deadline_s)
        # After a broken invariant the parts may refuse to be taken down in order; the process ends all the same.
        with contextlib.suppress(*(() if self._exit_code == EXIT_OK else (Exception,))):
            self.domain.table.set_state(MetaState.CLOSED)
            self.runner.flush_all()
            self.control.close()
            if self.events is not None:
                self.events.close()
        self.keep.close()
        self.watchdog.stop()
        self.notifier.send(STATUS="stopped", EXIT_STATUS=str(self._exit_code))
        _log.info("stopped", reason=self._stop_reason, exit_code=self._exit_code)

    async def _drain(self, deadline_s: float) -> None:
        """What clients pushed before now is answered, what peers are owed is sent, as far as they take it in time."""
        self.domain.table.set_state(MetaState.DRAINING)
        clients = list(self.clients.by_slot.values())
        for client in clients:
            self.runner.drain(client)
        while time.monotonic() < deadline_s:
            if any(client.draining for client in clients):
                await asyncio.sleep(0)
            elif any(connection.pending_bytes for connection in self.control.connections):
                await asyncio.sleep(0.005)
            else:
                return

    # --- being asked

    def _render_metrics(self) -> str:
        return exposition(self.report.series())

    def _healthy(self) -> tuple[bool, str]:
        state = self.supervisor.state
        return state in ("ok", "starting", "degraded"), state


def _calm_collector() -> None:
    """What exists now lives as long as the daemon: the cycle collector need not look at it again. What comes later is
    mostly freed by count, so that rare collections are enough and none of them stalls an operation for long.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def descriptors_wanted(config: Config, sizes: Sizes) -> int:
    """Open files when all clients are there, after a restart with as many that are still waited for."""
    # Root and the daemon's own user get in beyond what there is for all.
    per_uid = control.connections_per_uid(config.access, config.clients.max)
    connections = (
        config.clients.max + control.CONNECTIONS_SPARE + 2 * (per_uid + control.CONNECTIONS_RESERVED)
    )
    clients = config.clients.max * 3  # region, wake socket; region of one of before
    return DESCRIPTORS_OWN + 2 * connections + clients + 2 * len(sizes.segments_bytes)


def check_host(config: Config, sizes: Sizes) -> None:
    """What the machine must offer for this configuration. Raises ConfigError or CapacityError with the numbers."""
    if config.pool.lock == "yes":
        limit = memory.lock_limit()
        if not limit.privileged and limit.soft_bytes is not None and limit.soft_bytes < sizes.pool_bytes:
            raise ConfigError(
                f"pool.lock = \"yes\" needs RLIMIT_MEMLOCK of {sizes.pool_bytes} B, it is {limit.soft_bytes} B; raise "
                "it (systemd: LimitMEMLOCK=infinity; shell: ulimit -l unlimited), or set pool.lock = \"auto\"",
                code="memlock", key="pool.lock", limit_bytes=limit.soft_bytes, size_bytes=sizes.pool_bytes,
            )  # fmt: skip
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = descriptors_wanted(config, sizes)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raise ConfigError(
            f"clients.max = {config.clients.max} and {len(sizes.segments_bytes)} segments need {wanted} descriptors, "
            f"the process may have {soft}; raise the hard limit (systemd: LimitNOFILE=, shell: ulimit -Hn), or lower "
            "clients.max",
            code="descriptors", key="clients.max", value=str(config.clients.max), limit=soft, wanted=wanted,
        )  # fmt: skip
    if config.pool.backing == "posix":
        free_bytes = memory.file_system_free_bytes()
        if free_bytes is None or free_bytes < sizes.pool_bytes:
            raise CapacityError(
                f"pool.backing = \"posix\" needs {sizes.pool_bytes} B in /dev/shm, which has {free_bytes or 0} B free; "
                "enlarge it (mount -o remount,size=…), or use pool.backing = \"memfd\", which does not need it",
                code="dev-shm", free_bytes=free_bytes or 0, size_bytes=sizes.pool_bytes,
            )  # fmt: skip
    if config.pool.huge_pages == "hugetlb":
        facts = hugepages.facts()
        wanted_count = sizes.pool_bytes // limits.frame_bytes
        offered_bytes = (facts.hugetlb_free_count + facts.hugetlb_overcommit_count) * limits.frame_bytes
        if config.pool.backing == "posix":
            raise ConfigError(
                "pool.huge_pages = \"hugetlb\" needs pool.backing = \"memfd\"",
                code="value", key="pool.huge_pages", value="hugetlb",
            )  # fmt: skip
        if offered_bytes < sizes.pool_bytes:
            raise ConfigError(
                f"pool.huge_pages = \"hugetlb\" needs {wanted_count} free huge pages of 2 MiB; "
                f"there are {facts.hugetlb_free_count}; set vm.nr_hugepages, or pool.huge_pages = \"auto\"",
                code="hugepages", key="pool.huge_pages", value="hugetlb", free_count=facts.hugetlb_free_count,
            )  # fmt: skip


def run(
    config: Config,
    sizes: Sizes,
    env: Mapping[str, str],
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> int:
    """Run a daemon to its end; returns the exit code. Raises KvdError if it cannot start."""

    async def main() -> int:
        return await App(config, sizes, env).run()

    with contextlib.closing(asyncio.Runner(loop_factory=loop_factory)) as runner:
        return runner.run(main())
