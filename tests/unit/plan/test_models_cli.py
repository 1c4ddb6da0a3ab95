"""`kvctl plan` for real models, and the options that contradict one another or would be ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from kvd.kvctl.main import app as kvctl
from kvd.kvctl.plan import app

CONFIGS = Path(__file__).parents[4] / "shared" / "configs"
needs_configs = pytest.mark.skipif(
    not CONFIGS.is_dir(), reason="no model configurations in ../shared/configs"
)
CAPACITY = "capacity --prefixes 100 --prefix-tokens 8192 --hosts 4 --dram 512GiB"
GEMMA = "breakeven --prefix-tokens 8192 --bandwidth 5GiB/s --config {}/gemma-3-27b-partial.json"
NETWORK = "network --rate 200/s --hit 0.75 --bytes 1GiB --link 400Gbit"
SAMPLES = "--prefill-sample 1024=60ms --prefill-sample 8192=700ms --prefill-sample 32768=6s"


def run(line: str, *more: str) -> Result:
    return CliRunner().invoke(app, [*line.split(), *more])


def ledgers(line: str) -> dict[str, Any]:
    result = run(line, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["ledgers"]
    assert isinstance(found, dict)
    return found


def config(name: str) -> str:
    return f"--config {CONFIGS / name}.json"


@needs_configs
def test_a_hybrid_keeps_a_snapshot_a_prefix() -> None:
    line = f"{CAPACITY} {config('qwen3-next-80b-a3b')}"
    found = ledgers(line)
    assert found["Capacity"]["answers"]["prefix_bytes"] == (192 << 20) + 77_856_768
    assert found["Objects and metadata"]["answers"]["snapshots_count"] == 100
    assert found["Objects and metadata"]["answers"]["objects_count"] == 100 * (32 + 1)
    more = ledgers(f"{line} --snapshots 2")
    assert more["Capacity"]["answers"]["prefix_bytes"] == (192 << 20) + 2 * 77_856_768
    text = run(line).stdout
    assert "one prefix, state" in text
    assert "1 state snapshot a prefix" in text


@needs_configs
def test_a_windowed_model_is_weighed_by_what_is_read() -> None:
    line = GEMMA.format(CONFIGS)
    exact = ledgers(f"{line} --prefill-saved 600ms")["Break-even"]
    assert exact["answers"]["worth_it"]
    assert exact["inputs"]["size_bytes"] == 8_192 * 81_920 + 1_023 * 425_984
    chunked = ledgers(f"{line} --prefill-saved 600ms --chunk-tokens 256")["Break-even"]
    assert chunked["inputs"]["size_bytes"] == 8_192 * 81_920 + 1_024 * 425_984
    found = ledgers(f"{line} --chunk-tokens 256 {SAMPLES}")["Break-even length"]["answers"][
        "break_even_tokens"
    ]
    assert found % 256 == 0


@needs_configs
@pytest.mark.parametrize(
    ("name", "tp", "members"), [("deepseek-v3", 8, 1), ("llama-3.1-8b", 16, 8), ("gemma-3-1b", 4, 2)]
)
def test_members_come_from_the_geometry(name: str, tp: int, members: int) -> None:
    found = ledgers(f"{CAPACITY} {config(name)} --tp {tp}")["Objects and metadata"]["answers"]
    assert found["objects_count"] == 3_200 * members


@needs_configs
def test_pipeline_stages_cut_chunks_too() -> None:
    found = ledgers(f"{CAPACITY} {config('llama-3.1-8b')} --tp 2 --pp 4")["Objects and metadata"]["answers"]
    assert found["objects_count"] == 3_200 * 8
    uneven = run(f"{CAPACITY} {config('llama-3.1-8b')} --pp 3").stdout
    assert "one object, mean" in uneven


@needs_configs
def test_a_model_of_states_only(tmp_path: Path) -> None:
    name = config("mamba2-class-default")
    assert ledgers(f"{CAPACITY} {name}")["Capacity"]["answers"]["prefix_bytes"] == 273_678_336
    load = ledgers(f"breakeven --prefix-tokens 8192 --bandwidth 5GiB/s --prefill-saved 600ms {name}")
    assert load["Break-even"]["inputs"]["size_bytes"] == 273_678_336
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    for cache in ("core", "lru"):
        refused = run(f"chunk --trace {trace} {name} --cache {cache}")
        assert refused.exit_code == 2
        assert "keeps states only (261 MiB a snapshot)" in refused.stderr
        assert "kvctl plan capacity" in " ".join(refused.stderr.split())


@needs_configs
def test_a_sweep_loads_windows_in_part_and_leaves_snapshots_out(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 8_192, "output_length": 1, "hash_ids": list(range(16))}
    trace.write_text("".join(json.dumps({**line, "timestamp": n}) + "\n" for n in range(2)))
    sweep = f"chunk --trace {trace} --chunk-tokens 512 --cache lru"
    result = run(f"{sweep} {config('gemma-3-27b-partial')} --tp 4", "--json")
    row = json.loads(result.stdout)["rows"][0]
    # 8,176 tokens are used: of the window 7,153 … 8,175, which lie in the last 3 chunks.
    assert row["fetched_bytes"] == 16 * 512 * 81_920 + 3 * 512 * 425_984
    assert row["fetched_in_vain_bytes"] == 16 * 81_920 + (3 * 512 - 1_023) * 425_984
    assert row["objects_peak_count"] == 16 * 8
    objects = 16 * 4 + 3 * 4
    assert row["load_p50_ns"] == objects * 10_000 + -(-row["fetched_bytes"] * 10**9 // (20 << 30))
    assert "of a window only the last are read" in result.stdout
    assert "state snapshots are left out" in run(f"{sweep} {config('qwen3-next-80b-a3b')}").stdout


@needs_configs
def test_groups_are_what_the_config_says() -> None:
    refused = run(f"{CAPACITY} {config('gemma-3-1b')} --groups 2")
    assert refused.exit_code == 2
    assert "the config says which groups there are" in refused.stderr
    assert run(f"{CAPACITY} {config('smollm2-135m')} --tp 2").exit_code == 2
    assert "--tp = 2 with --config" in run(f"{CAPACITY} {config('smollm2-135m')} --tp 2").stderr


def test_by_hand_groups_and_shards_multiply() -> None:
    found = ledgers(f"{CAPACITY} --bytes-per-token 131072 --tp 4 --groups 2")["Objects and metadata"][
        "answers"
    ]
    assert (found["objects_count"], found["object_bytes"]) == (3_200 * 8, 256 * 131_072 // 8)


HAND = f"{CAPACITY} --bytes-per-token 131072"
LOAD = "breakeven --bytes 1GiB --bandwidth 20GiB/s"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (f"{HAND} --snapshots 1", "--snapshots = 1, but no states are kept"),
        (f"{HAND} --dtype float16", "--dtype = float16 without --config"),
        (f"{HAND} --pp 2", "--pp = 2 without --config"),
        (f"{HAND} --chunk-tokens 9000", "--chunk-tokens = 9000 is more than a prefix"),
        (f"{HAND} --tp 3", "--tp × --groups = 3 does not divide"),
        (f"{HAND} --spare-hosts 4", "--spare-hosts = 4 of --hosts = 4"),
        (f"{HAND} --usable 0", "--usable = 0 must be greater than 0"),
        (f"{HAND} --usable 80", "did you mean 80%?"),
        (f"{NETWORK} --store-bytes 1GiB", "--store-bytes = 1GiB without --store-rate"),
        (f"{NETWORK} --efficiency 0", "--efficiency = 0 must be greater than 0"),
        (f"{NETWORK} --replicas 2", "--replicas = 2 without --store-rate"),
        (f"{NETWORK} --store-rate 1/s --hosts 2 --replicas 3", "--replicas = 3 with --hosts = 2"),
        (f"{LOAD} --prefill-saved 1s --socket /x", "--socket = /x without --measure"),
        (f"{LOAD} --prefill-saved 1s --measure --lookup 0 --h2d 0", "nothing is left to measure"),
        (f"{LOAD} --prefill-saved 1s --bytes-per-token 5", "without a length"),
        (f"{LOAD} --prefill-saved 1s --chunk-tokens 256", "--chunk-tokens = 256 without the model"),
        (f"{LOAD} --prefill-saved 1s --prefix-tokens 5", "--prefix-tokens = 5 with --prefill-saved"),
        (f"{LOAD} --prefill-saved 1s {SAMPLES}", "the samples say nothing"),
        (f"{LOAD} --prefill-saved 1s --hidden 60ms", "--hidden = 60 ms is more than load"),
        (
            "breakeven --bandwidth 1GiB/s --prefill-saved 1s --prefix-tokens 100 --bytes-per-token 5 --chunk-tokens 16",
            "--prefix-tokens = 100 with --chunk-tokens = 16: kvd keeps whole chunks, the rest is computed",
        ),
        ("route --host warm", "nothing is known of its time to the first token"),
        ("route --host warm:itl=20ms,session", "at least one of queue, lookup, load, prefill, handoff"),
        ("route --host a:queue=1s --session-margin 5ms", "no --host holds the session"),
    ],
)  # fmt: skip
def test_what_contradicts_or_would_be_ignored_is_refused(line: str, says: str) -> None:
    result = run(line)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--cache lru --policy slru", "--policy = slru with --cache lru"),
        ("--publish-time 1us", "--publish-time = 1us with --cache core"),
        ("--chunk-tokens 96", "--chunk-tokens = 96"),
        ("--bandwidth 0", "--bandwidth = 0 is below 1"),
    ],
)
def test_a_sweep_refuses_what_it_would_ignore(options: str, says: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    result = run(f"chunk --trace {trace} --bytes-per-token 1000 {options}")
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("network --rate 200/s", "--hit"),
        (HAND.replace("100", "many"), "'many'"),
        (f"{HAND} --what", "--what"),
        ("route", "--host"),
    ],
)
def test_what_the_parser_refuses_is_json_too(line: str, says: str) -> None:
    result = run(line, "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "KVD-USAGE-OPTION"
    assert says in error["message"]
    plain = run(line)
    assert plain.exit_code == 2
    assert says in plain.stderr


def test_fields_of_json_errors_are_named_as_options() -> None:
    error = json.loads(run(f"{HAND} --replicas 0", "--json").stdout)["error"]
    assert error["fields"]["field"] == "--replicas"
    assert error["message"].startswith("--replicas = 0 is below 1")


def test_an_answer_of_no_is_an_answer() -> None:
    for line in (f"{HAND} --replicas 4 --dram 1GiB", f"{LOAD} --prefill-saved 1ms", f"{NETWORK} --links 1"):
        assert run(line).exit_code == 0
    assert "Exit code 0: an answer was computed" in " ".join(run("capacity --help").stdout.split())


def test_an_overloaded_network_is_told_before_little_is_refused() -> None:
    result = run(f"{NETWORK} --links 1 --latency 50ms")
    assert result.exit_code == 0
    assert "1 link cannot carry it" in result.stdout
    assert "the queue grows without end" in result.stdout
    stores = "network --rate 0/s --hit 0 --bytes 1GiB --link 400Gbit --store-rate 50/s --latency 50ms"
    assert "nothing crosses" not in run(stores).stdout
    found = ledgers(f"{NETWORK} --links 9 --latency 50ms")["Loads in flight (Little's law)"]
    assert found["answers"]["in_flight_mean"] == 7.5
    assert found["steps"][0]["label"] == "capacity"
    assert "load of the busiest direction" in found["steps"][0]["expression"]


def test_a_cut_matrix_shows_its_last_host() -> None:
    text = run(f"{NETWORK} --hosts 8 --hot .3").stdout
    assert "host7" in text
    assert "(6 of 8, the rest like the last)" in " ".join(text.split())
    assert "host6" in run(f"{NETWORK} --hosts 7").stdout


def test_help_says_what_hidden_is() -> None:
    assert "Time of load and copy that overlaps with compute" in " ".join(
        CliRunner().invoke(kvctl, ["plan", "breakeven", "--help"]).stdout.split()
    )
