"""Who was refused at the control socket, and why: counted, kept for doctor, and said in the log at a bounded rate.

Owned by `Control`; event-loop thread only. A peer that is refused can come again without end, so that what it leaves
is bounded: numbers, the last refusal, and one line of the log a user and kind in LINE_INTERVAL_S, with how many there
were since the line before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from kvd.errors import KvdError, ProtocolError
from kvd.server import logs
from kvd.server.peer import Peer

LINE_INTERVAL_S: Final = 10.0
LINES_KNOWN_MAX: Final = 256  # users and kinds whose last line is remembered
HOLDERS_SHOWN_MAX: Final = 3

_log = logs.get("control")


@dataclass(slots=True)
class _Line:
    """When a user's last line of one kind was written, and how many refusals it has not told of."""

    written_s: float
    untold_count: int = 0


@dataclass(frozen=True, slots=True)
class _Last:
    at_s: float
    uid: int
    held_count: int
    holders: list[dict[str, int]]


class Refusals:
    """Counts them. `now_s` is the loop's clock; `peers` are those that are connected."""

    def __init__(self, now_s: Callable[[], float], peers: Callable[[], Iterable[Peer]]) -> None:
        self.connections_count = 0
        self.protocol_errors_count = 0
        self._now_s = now_s
        self._peers = peers
        self._lines: OrderedDict[tuple[str, int], _Line] = OrderedDict()
        self._last: _Last | None = None

    def connection(self, peer: Peer, error: KvdError) -> None:
        """A connection found no room: said with the processes that hold most of them."""
        self.connections_count += 1
        count = self._to_tell("connection_refused", peer.uid)
        if not count:  # who holds them was looked up for the line before: a flood of refusals stays cheap
            if self._last is not None and self._last.uid == peer.uid:
                self._last = replace(self._last, at_s=self._now_s())
            return
        pids = [one.pid for one in self._peers() if error.fields.get("uid", one.uid) == one.uid]
        holders = [
            {"pid": pid, "connections": held} for pid, held in Counter(pids).most_common(HOLDERS_SHOWN_MAX)
        ]
        self._last = _Last(self._now_s(), peer.uid, len(pids), holders)
        _log.warning(
            "connection_refused", uid=peer.uid, pid=peer.pid, count=count, reason=error.message, held_by=holders
        )  # fmt: skip

    def protocol_error(self, peer: Peer, error: ProtocolError) -> None:
        """A peer said what is no message, or none at all."""
        self.protocol_errors_count += 1
        count = self._to_tell("malformed_messages", peer.uid)
        if count:
            _log.warning(
                "malformed_messages", uid=peer.uid, pid=peer.pid, count=count, code=error.code, reason=error.message
            )  # fmt: skip

    def last(self) -> dict[str, object] | None:
        """The last connection that was refused: how long ago, whose, and who held how many then; None: none was."""
        last = self._last
        if last is None:
            return None
        return {
            "ago_s": round(self._now_s() - last.at_s, 1),
            "uid": last.uid,
            "held": last.held_count,
            "holders": last.holders,
        }

    def _to_tell(self, kind: str, uid: int) -> int:
        """How many refusals a line that is written now stands for; 0: it is too early for one."""
        now_s, known = self._now_s(), (kind, uid)
        line = self._lines.get(known)
        if line is not None and now_s - line.written_s < LINE_INTERVAL_S:
            line.untold_count += 1
            return 0
        if line is None and len(self._lines) >= LINES_KNOWN_MAX:
            self._lines.popitem(last=False)
        self._lines[known] = _Line(now_s)
        self._lines.move_to_end(known)
        return 1 + (line.untold_count if line is not None else 0)
