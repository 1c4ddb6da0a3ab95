"""Commands against answers of a daemon: what people read, what programs read, and the exit codes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kvctl_answers import CLIENT, KEY, OTHER, ROOT, STATUS

from kvd.errors import (
    CapacityError,
    CompatibilityError,
    ConfigError,
    CorruptionError,
    InvariantError,
    KvdError,
    UnavailableError,
    UsageError,
)
from kvd.kvctl import exits
from kvd.kvctl.exits import ExitCode

ENTRY = {
    "entry": 0, "key": KEY, "namespace": 1, "depth": 0, "size_bytes": 102_400, "idle_s": 2.5, "pin": "none",
    "missing": 0, "members_count": 1, "generation": 1, "state": "ready",
}  # fmt: skip
MEMBER = {
    "member": 0, "record": 0, "place": 0, "size_bytes": 100_000, "checksum": "419cff8c757ced46", "heads": [0, 0],
    "layers": [0, 4], "segment": 0, "offset": 4096,
}  # fmt: skip
TOUCH = {
    "kind": "match", "age_ns": 8_400_000_000, "asked": 16, "matched": 12, "missed_key8": "2ef59633b7df1335",
    "missed_because": "evicted (space, 3.9 min ago)", "took_ns": 701, "bytes": 0,
}  # fmt: skip
WHY = {
    "known": True, "first_age_ns": 9_000_000_000, "last_age_ns": 8_000_000_000, "touches_count": 1, "touches": [TOUCH],
    "granted": 4, "present": 0, "pending": 0, "reserved_bytes": 409_600, "evicted_families": 0, "evicted_bytes": 0,
    "published": 4, "aborted": 0, "writing_ns": 1_500_000, "errors": [],
}  # fmt: skip


# -- status, health, clients


def test_status_says_what_an_operator_asks_first(kvctl: Any) -> None:
    text = kvctl("status")
    for part in ("kvd 0.1.0 ok", "pid 4711", "up 3 h 5 min", "/run/kvd/kvd.sock", "64 GiB in 64 segments",
                 "100% huge pages", "locked", "48 GiB used (75%)", "12,345 families of 1,048,576 (1.2%)",
                 "3 of 64 attached", "none yet", "llama-3-8b@5b65c0d18bcd"):  # fmt: skip
        assert part in text
    assert "refused" not in text


def test_status_shows_what_is_not_well(kvctl: Any, changed: Any) -> None:
    status = changed({
        "state": "degraded", "version": "0.0.9",
        "health": {"state": "degraded", "restarts": 2,
                   "parts": {"daemon": {"state": "ok", "reason": ""},
                             "metrics": {"state": "failed", "reason": "port taken"}}},
        "pool.population.done": False, "pool.population.populated_bytes": 32 << 30, "pool.population.huge_bytes": 0,
        "pool.population.locked": False, "pool.population.lock_refused": "Cannot allocate memory",
        "clients.disconnected": 1, "counters.capacity_refusals": 7, "core.families_partial": 3,
    })  # fmt: skip
    text = kvctl.against(status=status)("status")
    for part in ("degraded", "metrics is failed: port taken", "2 restarts", "50% populated, 7.1 GiB/s, 4.5 s to go",
                 "not locked", "1 left but alive", "7 reservations without room", "3 incomplete",
                 "install the same release"):  # fmt: skip
        assert part in text
    assert "daemon is" not in text
    assert "small pages" not in text


def test_one_of_a_thing_is_no_plural(kvctl: Any, changed: Any) -> None:
    status = changed({
        "lookups.lookups": 1, "lookups.keys_asked": 1, "counters.granted": 1, "counters.published": 1,
        "counters.duplicates": 1, "counters.capacity_refusals": 1, "counters.client_protocol_errors": 1,
        "counters.clients_killed": 1, "counters.control_connections_refused": 1, "counters.pin_refusals": 1,
    })  # fmt: skip
    text = " ".join(kvctl.against(status=status)("status").split())
    for part in ("of 1 chunk found in 1 lookup", "1 object (", "1 duplicate", "1 reservation without room", "1 pin",
                 "1 peer for malformed messages", "1 client killed for what it leased", "1 connection,"):  # fmt: skip
        assert part in text
    for plural in (
        "1 chunks",
        "1 objects",
        "1 duplicates",
        "1 reservations",
        "1 pins",
        "1 peers",
        "1 connections",
    ):
        assert f" {plural}" not in text


def test_ls_takes_all_or_a_limit(kvctl: Any) -> None:
    assert "give one of them" in kvctl("ls", "1", "--all", "--limit", "3", code=ExitCode.USAGE)


def test_a_file_that_is_no_trace_is_named(kvctl: Any, tmp_path: Path) -> None:
    """Fails if the values of a file are refused without its name: of several, nobody knows which."""
    file = tmp_path / "x.trace"
    file.write_bytes(b"\x93\x01\x02\x03")
    assert f"kvctl: {file}: " in kvctl("trace", "replay", str(file), code=ExitCode.ERROR)


def test_status_of_a_lazy_pool_does_not_guess_about_pages(kvctl: Any, changed: Any) -> None:
    status = changed({"pool.population.populated_bytes": 0, "pool.population.huge_bytes": 0})
    text = kvctl.against(status=status)("status")
    assert "pages come when first used" in text
    assert "small pages" not in text


def test_status_says_that_population_ended_early(kvctl: Any, changed: Any) -> None:
    status = changed({"pool.population.error": "no memory", "pool.population.populated_bytes": 1 << 30})
    assert "only 1 GiB populated" in kvctl.against(status=status)("status")


def test_json_is_the_answer_of_the_daemon_itself(kvctl: Any, changed: Any) -> None:
    assert kvctl.json("status") == changed({})
    assert kvctl.json("clients") == [CLIENT]


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("starting", 0), ("degraded", 0), ("failed", 1)])
def test_health_is_an_exit_code_for_probes(kvctl: Any, state: str, code: int) -> None:
    part = {"state": state, "reason": "it broke"}
    kvctl.against(health={"state": state, "restarts": 0, "parts": {"tick": part}})
    text = kvctl("health", code=code)
    assert text.startswith(f"{state}\n")
    assert ("it broke" in text) == (state != "ok")


def test_clients_marks_those_that_left_and_those_over_their_limit(kvctl: Any) -> None:
    rows = [
        CLIENT, {**CLIENT, "slot": 1, "state": "disconnected"},
        {**CLIENT, "slot": 2, "state": "disconnected", "hostile": True, "over_lease_limit": True},
    ]  # fmt: skip
    lines = kvctl.against(clients=rows)("clients").splitlines()
    assert [word in line for line, word in zip(lines[2:5], ("write", "left", "refused"), strict=True)] == [
        True
    ] * 3
    assert "3 MiB !" in lines[4]
    assert "75%" in lines[2]
    assert "leased_max" in lines[5]
    assert "lives" in lines[6]
    assert kvctl.against(clients=[])("clients") == "no clients\n"


# -- ls and inspect


def test_ls_pages_until_the_limit_and_says_that_there_is_more(kvctl: Any) -> None:
    def page(namespace: int, start: int, limit: int) -> dict[str, Any]:
        # The daemon may give fewer than it was asked for, and goes on where it says.
        count, following = {0: (2, 7), 7: (1000, 9), 9: (498, 20)}[start]
        assert (namespace, limit) == (1, min(1000, {0: 1500, 7: 1498, 9: 498}[start]))
        return {"families": [ENTRY] * count, "next": following}

    answer = kvctl.against(ls=page).json("ls", "1", "--limit", "1500")
    assert (len(answer["families"]), answer["more"]) == (1500, True)


def test_ls_shows_whole_keys_where_a_program_may_read_them(kvctl: Any) -> None:
    rows = [ENTRY, {**ENTRY, "key": OTHER, "missing": 1, "members_count": 4, "pin": "hard"}]
    text = kvctl.against(ls={"families": rows, "next": None})("ls", "llama-3-8b@5b65c0d18bcd")
    assert KEY in text
    assert OTHER in text
    assert "3 of 4" in text
    assert "hard" in text
    assert "more with" not in text


@pytest.mark.parametrize("name", ["1", "llama-3-8b@5b65c0d18bcd", ROOT, ROOT[:8], ROOT[:8].upper()])
def test_a_namespace_is_named_by_number_label_or_root(kvctl: Any, name: str) -> None:
    kvctl.against(ls={"families": [], "next": None})("ls", name)
    assert kvctl.daemon.calls[-1] == ("ls", {"namespace": 1, "start": 0, "limit": 100})


def test_an_unknown_namespace_is_not_found_and_the_known_ones_are_named(kvctl: Any) -> None:
    text = kvctl("ls", "llama", code=ExitCode.NO)
    assert "no namespace 'llama'" in text
    assert "1 (llama-3-8b@5b65c0d18bcd)" in text
    assert "KVD-USAGE-NOT-FOUND" in text


def test_inspect_shows_the_holders_by_name(kvctl: Any) -> None:
    kvctl.against(inspect={**ENTRY, "members": [MEMBER], "split": {"tp": 4}, "holders": [0]})
    text = kvctl("inspect", KEY[:8])
    for part in (
        KEY,
        "llama-3-8b@",
        "vllm-engine (pid 900)",
        "tp 4",
        "0x1000",
        "0-3",
        "419cff8c757ced46",
        "97.7 KiB",
    ):
        assert part in text
    assert kvctl.json("inspect", KEY)["holders"] == [{"slot": 0, "pid": 900, "name": "vllm-engine"}]


class Lease:
    """A lease whose bytes are as `damaged` says."""

    released = 0

    def __init__(self, damaged: bool) -> None:
        self.damaged = damaged

    def verify(self, member: int) -> None:
        if self.damaged and member == 1:
            raise CorruptionError(
                "bytes do not match", code="checksum", member=member, found="0" * 16, withdrawn=False
            )

    def release(self) -> None:
        Lease.released += 1


@pytest.mark.parametrize("damaged", [False, True])
def test_verify_reads_every_member_and_damage_is_exit_code_1(
    kvctl: Any, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    class Store:
        def __enter__(self) -> Store:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def fetch(self, identity: bytes, member: int) -> Lease:
            assert identity.hex() == KEY
            return Lease(damaged)

    monkeypatch.setattr("kvd.clientlib.store.connect", lambda *_, **options: Store())
    members = [MEMBER, {**MEMBER, "member": 1}]
    kvctl.against(inspect={**ENTRY, "members": members, "split": {}, "holders": []})
    Lease.released = 0
    text = kvctl("inspect", KEY, "--verify", code=int(damaged))
    assert Lease.released == 1, "one lease for all members: damage in one takes the family out of the index"
    assert text.count("intact") == (1 if damaged else 2)
    assert (f"kvctl withdraw {KEY[:16]}" in text) == damaged
    verdicts = [
        member["verified"] for member in kvctl.json("inspect", KEY, "--verify", code=int(damaged))["members"]
    ]
    assert verdicts == [True, not damaged]


# -- why


def test_why_answers_in_its_first_line(kvctl: Any) -> None:
    text = kvctl.against(why=WHY)("why", "r-17")
    first = text.splitlines()[0]
    assert first == (
        "r-17: found 12 of 16 chunks; chunk 12 was evicted (space, 3.9 min ago); published 4 objects"
    )
    # The first 8 bytes of the missing key, in the order in which keys are shown everywhere else.
    assert "3513dfb73396f52e evicted (space, 3.9 min ago)" in text
    assert "match 701 ns, write 1.5 ms" in text


def test_why_sends_a_number_and_never_the_request_id(kvctl: Any) -> None:
    kvctl.against(why=WHY)("why", "r-17")
    method, params = kvctl.daemon.calls[-1]
    assert method == "why"
    assert isinstance(params["request"], int)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"touches": [{**TOUCH, "missed_because": "never stored here"}], "published": 0},
         "r: found 12 of 16 chunks; chunk 12 was never stored here"),
        ({"touches": [{**TOUCH, "missed_because": "being written"}], "published": 0},
         "r: found 12 of 16 chunks; chunk 12 was being written by somebody"),
        ({"touches": [TOUCH, {**TOUCH, "matched": 16, "missed_key8": "", "missed_because": ""},
                      {**TOUCH, "kind": "acquire", "asked": 4, "matched": 4}], "published": 0},
         "r: found 16 of 16 chunks"),
        ({"touches": [], "published": 1}, "r: looked nothing up; published 1 object"),
        ({"touches": [], "published": 0, "errors": [{"age_ns": 5, "message": "pool full"}]},
         "r: looked nothing up; 1 error, last: pool full"),
    ],
)  # fmt: skip
def test_why_headlines(kvctl: Any, changes: dict[str, Any], line: str) -> None:
    assert kvctl.against(why={**WHY, **changes})("why", "r").splitlines()[0] == line


def test_why_of_an_unknown_request_says_what_is_kept(kvctl: Any) -> None:
    text = kvctl.against(why={"known": False, "requests_kept_max": 4096})("why", "nope", code=ExitCode.NO)
    assert "nothing is known" in text
    assert "4,096" in text


# -- changes


def test_pin_and_unpin(kvctl: Any) -> None:
    kvctl.against(pin={"pins_added": 1, "pinned_bytes": 2048}, unpin={"pins_removed": 0, "pinned_bytes": 0})
    assert "pinned (hard); 2 KiB" in kvctl("pin", KEY, "--kind", "hard")
    assert kvctl.daemon.calls == [("pin", {"key": KEY, "kind": "hard"})]
    assert "no pin ends at" in kvctl("unpin", KEY, code=ExitCode.NO)


def test_clear_says_what_stays_and_who_holds_it(kvctl: Any) -> None:
    kept = {"leased": {"families": 3, "bytes": 307_200}, "pinned": {"families": 2, "bytes": 204_800}}
    clear = {"families": 11, "bytes": 1_126_400, "kept": kept, "limbo_families": 1}
    kvctl.against(clear=clear, clients=[CLIENT, {**CLIENT, "slot": 1, "name": "idle", "leases": 0}])
    text = kvctl("clear", "-n", "1", code=ExitCode.NO)
    for part in ("dropped 11 families, 1.07 MiB", "kept 3 families, 300 KiB: leased", "kvctl unpin", "vllm-engine",
                 "1 family withdrawn before, still held"):  # fmt: skip
        assert part in text
    assert "idle" not in text
    assert kvctl.daemon.deadline_s == 120
    answer = kvctl.json("clear", code=ExitCode.NO)
    assert [holder["name"] for holder in answer["holders"]] == ["vllm-engine"]
    assert kvctl.daemon.calls[-2] == ("clear", {})


def test_clear_that_drops_everything_asks_nobody_else(kvctl: Any) -> None:
    kvctl.against(clear={"families": 1, "bytes": 5, "kept": {}, "limbo_families": 0})
    assert kvctl("clear") == "dropped 1 family, 5 B\n"
    assert kvctl.daemon.calls == [("clear", {})]


def test_withdraw_names_the_readers_that_keep_the_memory(kvctl: Any) -> None:
    kvctl.against(withdraw={"families": 2, "bytes": 4096, "held_families": 1, "held_bytes": 2048})
    text = kvctl("withdraw", KEY)
    assert "withdrawn: 3 families; 4 KiB free now" in text
    assert "vllm-engine" in text


def test_stop_says_when_it_will_be_over(kvctl: Any) -> None:
    kvctl.against(stop={"stopping": True, "stop_timeout_s": 10})
    assert kvctl("stop") == "stopping pid 4711; it ends within 10 s\n"


# -- options that all share


def test_the_socket_before_or_behind_the_command_and_from_the_environment(
    kvctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_SOCKET", "/env")
    kvctl("status")
    assert (kvctl.daemon.path, kvctl.daemon.deadline_s) == ("/env", 5)
    kvctl("--socket", "/before", "--timeout", "7", "status")
    assert (kvctl.daemon.path, kvctl.daemon.deadline_s) == ("/before", 7)
    kvctl("--socket", "/before", "--timeout", "7", "status", "--socket", "/behind", "--timeout", "8")
    assert (kvctl.daemon.path, kvctl.daemon.deadline_s) == ("/behind", 8)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "1e9"])
def test_a_timeout_that_cannot_be_is_refused_by_name(kvctl: Any, value: str) -> None:
    assert f"--timeout = {float(value):g} is not allowed" in kvctl(
        "status", "--timeout", value, code=ExitCode.USAGE
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnavailableError("no daemon at /x: start it", code="no-daemon"), ExitCode.UNAVAILABLE),
        (UnavailableError("did not answer", code="deadline"), ExitCode.UNAVAILABLE),
        (UsageError("this user may not", code="denied"), ExitCode.REFUSED),
        (CompatibilityError("protocols differ", code="protocol"), ExitCode.REFUSED),
        (CapacityError("pins are full", code="pins"), ExitCode.REFUSED),
        (UsageError("no such key", code="not-found"), ExitCode.NO),
        (ConfigError("wrong", code="value"), ExitCode.NO),
        (UsageError("a key is hex", code="key"), ExitCode.USAGE),
        (InvariantError("books", code="x"), ExitCode.ERROR),
        (KvdError("else"), ExitCode.ERROR),
    ],
)
def test_an_error_is_one_line_with_its_code_and_an_exit_code(
    kvctl: Any, error: KvdError, code: ExitCode
) -> None:
    text = kvctl.against(error)("status", code=code)
    assert text.count("\n") == 1
    assert text.startswith(f"kvctl: {error.message}")
    assert text.endswith(f"[{error.code}]\n")
    assert kvctl.json("status", code=code)["error"]["code"] == error.code


def test_an_error_that_says_nothing_to_do_gets_an_advice() -> None:
    assert "kvctl doctor" in exits.line(UnavailableError("did not answer", code="deadline"))


def test_an_answer_of_another_shape_is_a_line_that_names_the_release(kvctl: Any) -> None:
    text = kvctl.against(status={"version": "9"})("status", code=ExitCode.ERROR)
    assert text.count("\n") == 1
    assert "unexpected KeyError" in text
    assert "install the same release" in text


def test_the_connection_is_closed_whatever_happens(kvctl: Any) -> None:
    kvctl.against(status=UsageError("no", code="x"))("status", code=ExitCode.USAGE)
    assert kvctl.daemon.closed == 1


def test_an_interrupt_is_130(kvctl: Any) -> None:
    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    kvctl.against(status=interrupted)("status", code=ExitCode.INTERRUPTED)


@pytest.mark.slow
def test_every_command_has_help_json_and_fits_80_columns(kvctl: Any) -> None:
    top = kvctl("--help")
    listed = top.partition("Commands:")[2].partition("Exit codes:")[0].splitlines()
    commands = [line.split()[0] for line in listed if line.strip()]
    assert {"status", "clients", "ls", "inspect", "why", "pin", "unpin", "clear", "doctor", "bench", "config", "plan",
            "stop", "health", "version"} <= set(commands)  # fmt: skip
    for code in ExitCode:
        assert f"\n    {code.value} " in top
    for command in commands:
        text = kvctl(command, "--help")
        assert command in ("bench", "config", "plan", "trace") or "--json" in text
        assert max(map(len, text.splitlines())) <= 80
    assert "local" in kvctl("bench", "--help")


def test_a_mistyped_command_is_answered_with_the_nearest(kvctl: Any) -> None:
    text = kvctl("statsu", code=ExitCode.USAGE)
    assert "Did you mean 'status'" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("command", "loads", "spares"),
    [
        ("version", "kvd.kvctl.version", "kvd.clientlib.store"),
        ("plan --help", "kvd.kvctl.plan", "kvd.kvctl.doctor"),
    ],
)
@pytest.mark.slow
def test_a_command_loads_its_own_module_only(command: str, loads: str, spares: str) -> None:
    program = (
        "import sys; from kvd.kvctl.main import app\n"
        "try: app(sys.argv[1:], prog_name='kvctl')\n"
        "except SystemExit: pass\n"
        "print('\\n'.join(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()], capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    assert loads in modules
    assert spares not in modules
    assert command != "version" or not {"rich", "numpy", "kvd.shm._native"} & set(modules)


# -- config check


def test_config_check_shows_values_and_where_they_were_set(kvctl: Any, tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text('[pool]\nsize = "64MiB"\n')
    text = kvctl("config", "check", str(path))
    row = next(line for line in text.splitlines() if line.startswith("pool.size"))
    assert row.split()[1:4] == ["64", "MiB", str(path)]
    assert "valid. Pool of 64 MiB in 1 segment" in text
    answer = kvctl.json("config", "check", str(path))
    assert answer["pool_bytes"] == 64 << 20
    assert {"key": "pool.size", "value": "64 MiB", "set_by": str(path)}.items() <= next(
        option for option in answer["options"] if option["key"] == "pool.size"
    ).items()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('[pool]\nsise = "1GiB"\n', ("unknown key pool.sise", "did you mean 'size'", "KVD-CONFIG-UNKNOWN")),
        ('[pool]\nsize = "9999TiB"\n', ("pool.size", "KVD-CONFIG-POOL-SIZE")),
        ("[pool\n", ("is not TOML", "KVD-CONFIG-FILE")),
    ],
)
def test_config_check_names_what_is_wrong(
    kvctl: Any, tmp_path: Path, text: str, parts: tuple[str, ...]
) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(text)
    shown = kvctl("config", "check", str(path), code=ExitCode.NO)
    for part in (*parts, str(path)):
        assert part in shown
    assert kvctl.json("config", "check", str(path), code=ExitCode.NO)["error"]["code"].startswith(
        "KVD-CONFIG"
    )


def test_what_clients_call_themselves_cannot_steer_the_terminal(kvctl: Any, changed: Any) -> None:
    """Fails if answers are printed as they come: a daemon of another release may not have made them printable."""
    evil = "\x1b]0;owned\x07\x9b31m\u202e[bold]"
    rows = [{**STATUS["namespaces"][0], "label": evil, "tenant": evil}]
    kvctl.against(
        status=changed({"namespaces": rows}),
        namespaces={"namespaces": rows, "next": None},
        clients=[{**CLIENT, "name": evil, "blocks_reclaim_s": 5.0}],
        pin=UsageError(f"what is {evil}", code="key"),
    )
    shown = [
        kvctl("status"),
        kvctl("ls"),
        kvctl("clients"),
        kvctl("ls", "--json"),
        kvctl("clients", "--json"),
    ]
    shown.append(kvctl("pin", "ab" * 8, code=2))
    for text in shown:
        assert "owned" in text
        assert "[bold]" in text, "markup is text"
        assert not set(text) & set("\x1b\x07\x9b\u202e")


def test_many_namespaces_come_in_pages(kvctl: Any, changed: Any) -> None:
    row = STATUS["namespaces"][0]

    def page(start: int, limit: int) -> dict[str, Any]:
        numbers = range(start, min(start + limit, 2501))
        return {
            "namespaces": [{**row, "number": n, "label": f"l{n}", "root": f"{n:064x}"} for n in numbers],
            "next": numbers.stop if numbers.stop < 2501 else None,
        }

    kvctl.against(namespaces=page, status=changed({"namespaces_count": 2500}))
    assert len(kvctl.json("ls")) == 2500
    assert "2,498 more hold less: kvctl ls shows all" in kvctl("status")


def test_why_needs_a_request_that_is_text(kvctl: Any) -> None:
    assert "REQUEST is empty" in kvctl("why", "", code=2)
    assert "UTF-8" in kvctl("why", "a\udcff", code=2)
    assert not kvctl.daemon.calls


def test_bytes_that_are_no_text_are_refused_by_name(kvctl: Any) -> None:
    """Fails if they reach the wire: an unexpected UnicodeEncodeError was told as a difference of releases."""
    said = kvctl("pin", "ab\udcffcdef0", code=2)
    assert "key = 'ab\\udcffcdef0' is not UTF-8" in said
    assert "release" not in said
