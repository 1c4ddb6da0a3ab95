"""Refusals at the control socket: counted one by one, told at a bounded rate, bounded whoever is refused."""

from structlog.testing import capture_logs

from kvd.errors import CapacityError, ProtocolError
from kvd.server import refusals
from kvd.server.peer import Peer


def peer(pid=1, uid=7):
    return Peer(pid, uid, uid, (), None, 0)


def test_one_line_an_interval_says_how_many_there_were():
    now_s = [100.0]
    held = [peer(5), peer(5), peer(6), peer(9, uid=8)]
    one = refusals.Refusals(lambda: now_s[0], lambda: held)
    full = CapacityError("full", code="connections", uid=7)
    with capture_logs() as lines:
        for _ in range(4):
            one.connection(peer(11), full)
    (line,) = lines
    assert (line["event"], line["uid"], line["pid"], line["count"]) == ("connection_refused", 7, 11, 1)
    assert line["held_by"] == [{"pid": 5, "connections": 2}, {"pid": 6, "connections": 1}]
    with capture_logs() as lines:  # the first is of another user: a line of its own
        one.connection(peer(9, uid=8), CapacityError("full", code="connections"))
        now_s[0] += refusals.LINE_INTERVAL_S
        one.connection(peer(11), full)
    other, late = lines
    assert (other["uid"], late["count"]) == (8, 4)
    assert one.connections_count == 6
    now_s[0] += 3
    one.connection(peer(11), full)  # not told, and yet it is the last one now
    assert one.last() == {"ago_s": 0.0, "uid": 7, "held": 3, "holders": line["held_by"]}
    now_s[0] += 3
    assert one.last() == {"ago_s": 3.0, "uid": 7, "held": 3, "holders": line["held_by"]}


def test_what_is_remembered_is_bounded_and_garbage_is_told_of_once():
    one = refusals.Refusals(lambda: 1.0, list)
    assert one.last() is None
    error = ProtocolError("no frame", code="frame")
    with capture_logs() as lines:
        for uid in range(2 * refusals.LINES_KNOWN_MAX):
            one.protocol_error(peer(uid=uid), error)
            one.protocol_error(peer(uid=uid), error)
    assert one.protocol_errors_count == 4 * refusals.LINES_KNOWN_MAX
    assert len(one._lines) == refusals.LINES_KNOWN_MAX
    assert len(lines) == 2 * refusals.LINES_KNOWN_MAX
    assert lines[0]["code"] == "KVD-PROTOCOL-FRAME"
