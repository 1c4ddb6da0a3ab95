"""kvctl as an operator runs it: a process of its own against a real daemon, in pipes and on terminals.

The shapes that `tests/unit/kvctl` plays are compared with the real answers here.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvd

CHUNK, SIZE = 16, 100_000
Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.slow


def kvctl(socket_path: str, *args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of one command in a pipe."""
    done = subprocess.run(
        [sys.executable, "-m", "kvd.kvctl.main", *args], env=environment(socket_path, env), text=True,
        capture_output=True, timeout=60, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def environment(socket_path: str, more: dict[str, str] | None = None) -> dict[str, str]:
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith("KVD_") and k not in ("COLUMNS", "FORCE_COLOR")
    }
    return {**clean, "KVD_SOCKET": socket_path, **(more or {})}


def on_terminal(socket_path: str, columns: int, *args: str) -> str:
    """What a terminal of so many columns gets, with its escape sequences."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "kvd.kvctl.main", *args], stdin=slave, stdout=slave, stderr=slave,
        env=environment(socket_path, {"TERM": "xterm-256color"}),
    )  # fmt: skip
    os.close(slave)
    out = b""
    with contextlib.suppress(OSError):  # EIO: the other end is closed
        while data := os.read(master, 65536):
            out += data
    os.close(master)
    process.wait(30)
    return out.decode().replace("\r\n", "\n")


@pytest.fixture
def running(daemon: Any) -> Any:
    return daemon()


@pytest.fixture
def run(running: Any) -> Run:
    return lambda *args, **options: kvctl(running.socket, *args, **options)


@pytest.fixture
def store(running: Any) -> Iterator[kvd.Store]:
    with kvd.connect(running.socket, client="test-engine") as opened:
        yield opened


def fill(store: kvd.Store, chunks: int, model: str = "llama", request: str | None = None) -> tuple[Any, Any]:
    """A namespace and a chain of published chunks, each with a byte of its own."""
    manifest = kvd.Manifest(model=model, revision="r1", dtype="bfloat16", tenant="acme", salt="", fixed="*")
    ns = store.namespace(manifest)
    chain = ns.chain(list(range(chunks * CHUNK)), chunk_tokens=CHUNK)
    with ns.reserve(chain, nbytes=SIZE, request=request) as writes:
        for number, write in enumerate(writes):
            write.view[:] = bytes([number]) * SIZE
        writes.publish()
    return ns, chain


def test_status_clients_and_ls_of_a_daemon_in_use(run: Run, store: kvd.Store) -> None:
    ns, chain = fill(store, 8)
    leases = ns.acquire(chain[:3])
    code, out, err = run("status")
    assert (code, err) == (0, "")
    for part in (f"kvd {kvd.__version__} ok", "64 MiB in 1 segment", "8 families of", "1 of 64 attached, 3 leases",
                 "100% of 3 chunks found", "8 objects (800 KiB) published", "acme", "llama@"):  # fmt: skip
        assert part in out, out
    code, out, _ = run("clients")
    assert code == 0
    row = out.splitlines()[2].split()
    assert row[:3] == ["0", str(os.getpid()), "write"]
    assert row[-1] == "test-engine"
    code, out, _ = run("ls", "1")
    assert [line.split()[0] for line in out.splitlines()[2:]] == [key.hex() for key in chain]
    leases.release()


def test_json_of_the_daemon_has_what_the_unit_tests_play(run: Run, store: kvd.Store) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "kvctl"))
    import kvctl_answers

    fill(store, 1)
    missing = differences(kvctl_answers.STATUS, json.loads(run("status", "--json")[1]))
    missing += differences(kvctl_answers.CLIENT, json.loads(run("clients", "--json")[1])[0])
    assert missing == []


def differences(played: Any, real: Any, at: str = "") -> list[str]:
    """Keys and types of `played` that `real` does not have."""
    if isinstance(played, dict):
        if at == ".health.parts":
            return []
        return [
            line
            for key, value in played.items()
            for line in (
                differences(value, real[key], f"{at}.{key}") if key in real else [f"{at}.{key} is missing"]
            )
        ]
    if isinstance(played, list):
        return differences(played[0], real[0], f"{at}[0]") if real else [f"{at} is empty"]
    number = (int, float)
    same = isinstance(real, type(played)) or (isinstance(real, number) and isinstance(played, number))
    return [] if same else [f"{at} is {type(real).__name__}, played as {type(played).__name__}"]


def test_inspect_verifies_bytes_and_damage_is_withdrawn(run: Run, store: kvd.Store) -> None:
    ns, chain = fill(store, 4)
    key = chain[1].hex()
    code, out, _ = run("inspect", key[:12], "--verify")
    assert (code, "intact" in out, key in out) == (0, True, True)
    member = json.loads(run("inspect", key, "--json")[1])["members"][0]
    # A client with write access can spoil published bytes: that is what the checksum is for.
    spoiled = store.native.writable(member["place"], SIZE)
    spoiled.view[17] ^= 1
    code, out, _ = run("inspect", key, "--verify")
    assert code == 1
    assert "DAMAGED" in out
    assert "The daemon found the same and took it out of use" in out
    assert ns.match(chain) == 1, "with all that lay behind it"
    code, _, err = run("inspect", key)
    assert (code, "KVD-USAGE-NOT-FOUND" in err) == (1, True)


def test_why_tells_what_was_found_and_why_the_rest_was_not(run: Run, store: kvd.Store) -> None:
    ns, _ = fill(store, 4, request="r-16")
    longer = ns.chain(list(range(6 * CHUNK)), chunk_tokens=CHUNK)
    assert ns.match(longer, request="r-17") == 4
    with ns.reserve(longer[4:], nbytes=SIZE, request="r-17"):
        pass  # what the request missed before is not "being written" because it goes on to write it
    code, out, _ = run("why", "r-17")
    assert (code, out.splitlines()[0]) == (0, "r-17: found 4 of 6 chunks; chunk 4 was never stored here")
    assert longer[4].hex()[:16] in out
    assert run("clear")[0] == 0
    assert ns.match(longer, request="r-18") == 0
    first = run("why", "r-18")[1].splitlines()[0]
    assert first.startswith("r-18: found 0 of 6 chunks; chunk 0 was evicted (clear, ")
    assert "published 4 objects" in run("why", "r-16")[1].splitlines()[0]
    assert run("why", "r-99")[0] == 1


def test_pins_and_leases_survive_clear_which_says_so(run: Run, store: kvd.Store) -> None:
    ns, chain = fill(store, 8)
    other, other_chain = fill(store, 2, model="qwen")
    leases = ns.acquire(chain[:3])
    assert run("pin", chain[4].hex(), "--kind", "hard")[0] == 0
    code, out, _ = run("clear", "--namespace", "1")
    assert code == 1
    assert "dropped 3 families" in out
    assert "kvctl unpin" in out
    assert (ns.match(chain), other.match(other_chain)) == (5, 2)
    assert run("unpin", chain[4].hex())[0] == 0
    code, out, _ = run("clear")
    assert code == 1
    assert "dropped 4 families" in out
    assert "kept 3 families, 300 KiB: leased" in out
    assert f" {os.getpid()} " in out
    assert "test-engine" in out
    leases.release()
    assert run("clear")[0] == 0
    assert ns.match(chain) == 0


def test_hard_pins_above_their_cap_are_refused(daemon: Any) -> None:
    one = daemon(eviction={"pinned_share": 0.0})
    with kvd.connect(one.socket) as store:
        _, chain = fill(store, 1)
        code, _, err = kvctl(one.socket, "pin", chain[0].hex(), "--kind", "hard")
        assert (code, "KVD-CAPACITY-PINS" in err) == (4, True)
        assert kvctl(one.socket, "pin", chain[0].hex())[0] == 0


# Python may live where only root can read: everything is loaded before the process becomes somebody else.
AS_NOBODY = """
import contextlib, io, os, sys
from kvd.kvctl.main import app
def run(*args):
    try: app(list(args), prog_name="kvctl")
    except SystemExit as end: return end.code or 0
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for command in ("status", "health", "doctor", "clients", "clear"): run(command)
    run("--socket", "/nowhere", "status")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.exit(run(*sys.argv[1:]))
"""


def as_nobody(socket_path: str, *args: str) -> tuple[int, str, str]:
    """As `kvctl`, run by the user 65534."""
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, *args], env=environment(socket_path), text=True, capture_output=True,
        timeout=60, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_user_who_is_no_administrator_may_look_and_not_change(daemon: Any) -> None:
    one = daemon(server={"socket_mode": "0666"})
    one.directory.chmod(0o755)
    assert as_nobody(one.socket, "status")[0] == 0
    code, _, err = as_nobody(one.socket, "clear")
    assert (code, "KVD-USAGE-DENIED" in err, "access.admin_uids" in err) == (4, True, True)
    code, out, _ = as_nobody(one.socket, "doctor")
    assert (code, "every user of this machine may connect" in out) == (0, True)
    os.chmod(one.socket, 0o600)
    code, _, err = as_nobody(one.socket, "status")
    assert (code, err.count("\n"), "KVD-USAGE-DENIED" in err) == (4, 1, True)
    code, out, _ = as_nobody(one.socket, "doctor")
    assert (code, "this user may not connect" in out) == (1, True)


def test_health_and_stop(run: Run, running: Any) -> None:
    assert run("health")[:2] == (0, "ok\n")
    code, out, _ = run("stop")
    assert (code, f"stopping pid {running.pid}" in out) == (0, True)
    assert running.wait() == 0
    for command in ("status", "health", "stop"):
        code, out, err = run(command)
        assert (code, out, err.count("\n")) == (3, "", 1)
        assert "KVD-UNAVAILABLE-NO-DAEMON" in err
        assert "kvd serve" in err


def test_a_frozen_daemon_is_a_timeout_and_not_a_hang(run: Run, running: Any) -> None:
    os.kill(running.pid, signal.SIGSTOP)
    try:
        code, _, err = run("--timeout", "0.3", "status")
        assert (code, "KVD-UNAVAILABLE-DEADLINE" in err, "kvctl doctor" in err) == (3, True, True)
        code, out, _ = run("doctor", "--timeout", "0.3")
        assert (code, "frozen" in out, f"kill -CONT {running.pid}" in out) == (1, True, True)
    finally:
        os.kill(running.pid, signal.SIGCONT)


def test_doctor_of_a_daemon_that_runs_and_of_one_that_crashed(run: Run, running: Any) -> None:
    code, out, _ = run("doctor", "--config", str(running.config), "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0, out
    for name in ("socket", "daemon", "version", "config", "library", "memory", "kernel"):
        assert checks[name]["level"] == "OK", checks[name]
    assert "as the daemon runs" in checks["config"]["found"]
    running.config.write_text(running.config.read_text().replace('"64MiB"', '"128MiB"'))
    code, out, _ = run("doctor", "--config", str(running.config))
    assert (code, "pool.size = 64 MiB (file: 128 MiB)" in out) == (0, True)
    running.kill()
    code, out, _ = run("doctor", "--config", str(running.config))
    assert code == 1
    assert "stale, nobody listens" in out
    assert "kernel" in out


def test_a_daemon_of_another_protocol_is_refused_by_name(tmp_path: Path) -> None:
    """A server that answers the handshake as a later release would."""
    from kvd.errors import CompatibilityError
    from kvd.wire import frames
    from kvd.wire import messages as wire

    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        asking = subprocess.Popen(
            [sys.executable, "-m", "kvd.kvctl.main", "status"], env=environment(path), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        listener.settimeout(30)
        with listener.accept()[0] as peer:
            peer.recv(4096)
            error = CompatibilityError(
                "the client speaks protocol 1, the daemon (kvd 9.0) 7 … 8", code="protocol"
            )
            peer.sendall(frames.encode(wire.Error.of(error).to_map(0)))
            out, err = asking.communicate(timeout=30)
    assert (asking.returncode, out) == (4, "")
    assert "kvd 9.0" in err
    assert "[KVD-COMPAT-PROTOCOL]" in err


@pytest.mark.parametrize("columns", [80, 120])
def test_terminals_get_colour_and_nothing_wider_than_they_are(
    run: Run, running: Any, store: kvd.Store, columns: int
) -> None:
    import re

    _, chain = fill(store, 3)
    key = chain[0].hex()
    for args in (
        ["status"],
        ["clients"],
        ["ls"],
        ["ls", "1"],
        ["inspect", key],
        ["doctor"],
        ["config", "check"],
    ):
        shown = on_terminal(running.socket, columns, *args)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
        assert "\x1b" not in plain
        assert max(map(len, plain.splitlines())) <= columns, args
        assert "Traceback" not in plain
        assert key[:16] in plain or args[0] not in ("inspect",)
    assert "\x1b[" in on_terminal(running.socket, columns, "status")
    assert "\x1b" not in run("status", env={"TERM": "xterm-256color"})[1]


def test_output_that_cannot_be_written_is_a_line(running: Any) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "kvd.kvctl.main", "status"], env=environment(running.socket), stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n"), "No space left" in done.stderr) == (5, 1, True)


def test_an_ascii_locale_is_no_traceback(run: Run) -> None:
    code, out, err = run("doctor", env={"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert code in (0, 1)
    assert "Traceback" not in out + err
    assert "kernel" in out


def test_completion_knows_the_commands(run: Run) -> None:
    env = {"_KVCTL_COMPLETE": "complete_bash", "COMP_WORDS": "kvctl st", "COMP_CWORD": "1"}
    code, out, _ = run(env=env)
    assert (code, out.split()) == (0, ["status", "stop"])
