"""What doctor asks of the host: another machine's files, and sockets in every state."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvd.probe import kernel, leftovers, process, unixsocket
from kvd.probe.unixsocket import Kind

LIMITS = """\
Limit                     Soft Limit           Hard Limit           Units
Max cpu time              unlimited            unlimited            seconds
Max open files            1024                 524288               files
Max locked memory         8388608              unlimited            bytes
"""


def put(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.mark.parametrize(
    ("capabilities", "may_lock"), [("0000000000004000", True), ("000001ffffffbfff", False)]
)
def test_limits_of_a_process(tmp_path: Path, capabilities: str, may_lock: bool) -> None:
    put(tmp_path, "proc/42/limits", LIMITS)
    put(tmp_path, "proc/42/status", f"Name:\tkvd\nCapEff:\t{capabilities}\n")
    found = process.limits(42, tmp_path)
    assert found == process.ProcessLimits(8 << 20, None, 1024, 524_288, may_lock)


def test_what_a_process_does(tmp_path: Path) -> None:
    put(tmp_path, "proc/42/stat", "42 (a) name) T 1 42 42\n")
    assert process.state(42, tmp_path) == "T: stopped"
    assert process.state(43, tmp_path) == ""


def test_keepers_that_listen_elsewhere(tmp_path: Path) -> None:
    """Only sockets that listen, by the whole name of their file."""
    rows = "".join(
        f"0: 00000002 00000000 {flags} 0005 01 {number} {path}\n"
        for number, (flags, path) in enumerate(
            [
                ("00010000", "/run/a b/keeper.sock"), ("00000000", "/run/c/keeper.sock"),
                ("00010000", "/run/kvd/keeper.sock"), ("00010000", "@keeper.sock"), ("00010000", "/x/housekeeper.sock"),
            ]
        )
    )  # fmt: skip
    put(tmp_path, "unix", f"Num RefCount Protocol Flags Type St Inode Path\n{rows}1: 2 0 00010000 1 1 9\n")
    assert leftovers.other_keepers("/run/kvd", tmp_path / "unix") == ["/run/a b/keeper.sock"]


def test_limits_of_a_process_that_is_gone(tmp_path: Path) -> None:
    assert process.limits(42, tmp_path) is None


def test_limits_of_this_process_are_those_that_the_kernel_tells() -> None:
    import resource

    found = process.limits()
    assert found is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert (found.open_files_soft, found.open_files_hard) == tuple(
        None if value == resource.RLIM_INFINITY else value for value in (soft, hard)
    )


def test_swap_and_overcommit(tmp_path: Path) -> None:
    assert (kernel.swap_bytes(tmp_path), kernel.overcommit_mode(tmp_path)) == (0, None)
    put(tmp_path, "proc/meminfo", "MemTotal: 10 kB\nSwapTotal:      2048 kB\n")
    put(tmp_path, "proc/sys/vm/overcommit_memory", "2\n")
    assert (kernel.swap_bytes(tmp_path), kernel.overcommit_mode(tmp_path)) == (2 << 20, 2)


def test_features_are_found_by_trying_and_leave_no_descriptor_behind() -> None:
    before = os.listdir("/proc/self/fd")
    found = kernel.facts()
    assert os.listdir("/proc/self/fd") == before
    assert found.release == os.uname().release
    assert found.pidfd is True  # the tests of this repository need these
    assert found.memfd_seals is True
    assert kernel.facts(Path("/nowhere")).pid_visible is False


@pytest.mark.parametrize("feature", ["pidfd", "memfd_seals"])
def test_a_call_that_a_filter_refuses_is_a_missing_feature(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, {"pidfd": "pidfd_open", "memfd_seals": "memfd_create"}[feature], refused)
    assert getattr(kernel.facts(), feature) is False


def test_sockets_in_every_state(tmp_path: Path) -> None:
    path = tmp_path / "s"
    assert unixsocket.facts(str(path)).kind is Kind.ABSENT
    assert unixsocket.facts(str(tmp_path / "no" / "s")).kind is Kind.NO_DIRECTORY
    path.write_text("")
    assert unixsocket.facts(str(path)).kind is Kind.OTHER
    path.unlink()
    path.symlink_to("nowhere")
    assert unixsocket.facts(str(path)).kind is Kind.OTHER
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o640)
        found = unixsocket.facts(str(path))
    assert (found.kind, found.mode, found.uid, found.may_connect) == (Kind.SOCKET, 0o640, os.getuid(), True)


def test_a_directory_that_is_closed_to_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: str) -> os.stat_result:
        raise PermissionError

    # As root no directory is closed, so that the kernel's answer is played.
    monkeypatch.setattr(os, "stat", refused)
    found = unixsocket.facts(str(tmp_path / "s"))
    monkeypatch.undo()
    assert found.kind is Kind.HIDDEN
