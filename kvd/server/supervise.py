"""Every background task is watched: if one dies or stands still, health turns bad; a dead one is started again, or the
daemon exits.

Owns the tasks and the health of the daemon's parts; event-loop thread only. A part is "ok", "starting", "degraded"
(it works with less) or "failed". A part that has promised a sign of life (`beat`) and gave none in time is shown as
stalled for as long as that lasts, by whoever asks: nothing has to run for it. Invariants: a task's exception is never
lost; a task that ends, or is cancelled by somebody else, counts as dead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvd.errors import InvariantError
from kvd.server import logs

Guard = Callable[..., None]
"""guard(call, *args): run a callback of the loop; what it raises may have left the books wrong: the daemon stops."""

_BACKOFF_MAX_S: Final = 30.0
_log = logs.get("supervise")


@dataclass(frozen=True, slots=True)
class Health:
    """State of one part, and why it is not ok."""

    state: str
    reason: str = ""


class Supervisor:
    """Runs the background tasks; `health` is what kvctl and the metrics show."""

    def __init__(self, fatal: Callable[[BaseException], None]) -> None:
        self._fatal = fatal
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._restarts: dict[str, int] = {}
        self._beats: dict[str, tuple[float, float, str]] = {}  # part -> when, within, state if late
        self._stopping = False
        self.health: dict[str, Health] = {}

    def guard(self, call: Callable[..., None], *args: object) -> None:
        """Run a callback of the loop (a Guard)."""
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - reported, and the daemon stops
            self._fatal(error)

    def set_health(self, part: str, state: str, reason: str = "") -> None:
        """Say how a part is; a change for the worse is logged."""
        before = self.health.get(part, Health("ok"))
        self.health[part] = Health(state, reason)
        if state != before.state and state in ("degraded", "failed"):
            _log.warning("part_unhealthy", part=part, state=state, reason=reason)

    def beat(self, part: str, within_s: float, late: str = "degraded") -> None:
        """A sign of life; the next is to come within this time, or the part is in the state `late` until it does."""
        self._beats[part] = (time.monotonic(), within_s, late)

    def rest(self, part: str) -> None:
        """No sign of life is to be expected of this part for now."""
        self._beats.pop(part, None)

    def parts(self) -> dict[str, Health]:
        """How every part is at this moment, those that stand still included."""
        now_s = time.monotonic()
        found = dict(self.health)
        for part, (last_s, within_s, late) in self._beats.items():
            if now_s - last_s > within_s and found.get(part, Health("ok")).state != "failed":
                found[part] = Health(late, f"no sign of life for {now_s - last_s:.0f} s")
        return found

    @property
    def state(self) -> str:
        """The worst state of all parts."""
        states = {item.state for item in self.parts().values()}
        return next((state for state in ("failed", "starting", "degraded") if state in states), "ok")

    @property
    def restarts(self) -> int:
        """How often a task had to be started again."""
        return sum(self._restarts.values())

    def start(
        self, name: str, run: Callable[[], Awaitable[None]], *, restart: bool, ends: bool = False
    ) -> None:
        """Run a task; when it dies, run it again after a growing pause, or (restart=False) stop the daemon.

        `ends`: the task may return when its work is done; of any other that would be a death.
        """
        self.health.setdefault(name, Health("ok"))
        self._tasks[name] = asyncio.get_running_loop().create_task(
            self._watch(name, run, restart, ends), name=name
        )

    async def _watch(self, name: str, run: Callable[[], Awaitable[None]], restart: bool, ends: bool) -> None:
        pause_s = 0.1
        while True:
            try:
                await self._once(run, ends)
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, it is reported and acted upon
                self.rest(name)
                self.set_health(name, "failed", f"{type(error).__name__}: {error}")
                _log.error("task_died", task=name, exc_info=error)
                if not restart or isinstance(error, InvariantError):
                    self._fatal(error)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _BACKOFF_MAX_S)
            self._restarts[name] = self._restarts.get(name, 0) + 1
            self.set_health(name, "degraded", "restarted")

    async def _once(self, run: Callable[[], Awaitable[None]], ends: bool) -> None:
        """Run a task to its end; raises what it died of."""
        try:
            await run()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._stopping or task is None:
                raise
            task.uncancel()
            raise RuntimeError("cancelled, and not by the supervisor") from None
        if not ends:
            raise RuntimeError("returned, and it must not")

    async def stop(self) -> None:
        """Cancel all tasks and wait for them."""
        self._stopping = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
