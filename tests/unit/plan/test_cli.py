"""`kvctl plan`: tables, JSON, pictures, and refusals with exit code 2 and no traceback."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from kvd.kvctl import plan_tables
from kvd.kvctl.plan import app
from kvd.shm import layout

CAPACITY = (
    "capacity --prefixes 32768 --prefix-tokens 8192 --bytes-per-token 131072 --replicas 2 --hosts 128 "
    "--dram 512GiB --usable 0.8 --tp 4"
)
NETWORK = "network --rate 200/s --hit 0.75 --bytes 1GiB --link 400Gbit --efficiency 0.65 --store-rate 50/s --replicas 2"
BREAKEVEN = "breakeven --bytes 1GiB --bandwidth 20GiB/s --lookup 2ms --h2d 40ms --sync 8ms"
SAMPLES = "--prefill-sample 1024=60ms --prefill-sample 8192=700ms --prefill-sample 32768=6s"
ROUTE = "route --host warm:queue=800ms,lookup=2ms,load=98ms,session --host cold:queue=10ms,prefill=300ms"


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns. In a pipe nothing is wrapped."""
    monkeypatch.setattr(plan_tables, "console", lambda: Console(file=sys.stdout, width=80, highlight=False))


def run(line: str, *more: str) -> Result:
    return CliRunner().invoke(app, [*line.split(), *more])


def answers(line: str, ledger: str) -> dict[str, Any]:
    result = run(line, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["ledgers"][ledger]["answers"]
    assert isinstance(found, dict)
    return found


def test_capacity_prints_the_arithmetic_and_what_follows() -> None:
    result = run(CAPACITY)
    assert result.exit_code == 0
    for text in ("32 TiB", "64 TiB", "51.2 TiB", "-12.8 TiB", "160 hosts", "4,194,304 objects", "2 GiB",
                 "Assumed:", "It does not fit"):  # fmt: skip
        assert text in result.stdout
    assert answers(CAPACITY, "Capacity")["hosts_min"] == 160
    assert answers(CAPACITY, "Objects and metadata")["objects_count"] == 4_194_304


def test_capacity_takes_the_bytes_of_a_token_from_a_config(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "vocab_size": 128256,
    }))  # fmt: skip
    line = CAPACITY.replace("--bytes-per-token 131072", f"--config {config}")
    assert answers(line, "Capacity")["unique_bytes"] == 32 << 40


def test_own_metadata_comes_from_a_benchmark(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text('{"metadata_bytes_per_object": 399.5}')
    assert answers(f"{CAPACITY} --bench {bench}", "Objects and metadata")[
        "own_metadata_bytes"
    ] == 1_048_576 * (400 + 3 * layout.SIZES["Record"])
    for text in (
        "[]",
        "{}",
        '{"metadata_bytes_per_object": "x"}',
        '{"metadata_bytes_per_object": NaN}',
        "nope",
    ):
        bench.write_text(text)
        result = run(f"{CAPACITY} --bench {bench}")
        assert (result.exit_code, "--bench" in result.stderr) == (2, True)


def test_network_prints_the_matrix_and_that_it_is_a_bound() -> None:
    result = run(NETWORK, "--latency", "50ms")
    assert result.exit_code == 0
    for text in ("150 GiB/s", "46.57 GiB/s", "30.27 GiB/s", "5 links", "100 GiB/s", "a bound, not an SLO verdict",
                 "GiB/s from row to column", "7.5 requests"):  # fmt: skip
        assert text in result.stdout
    matrix = json.loads(run(NETWORK, "--json").stdout)["matrix"]
    assert matrix == {"nodes": ["cache", "engines"], "bytes_per_s": [[0, 150 << 30], [100 << 30, 0]]}


def test_large_matrices_are_cut_and_say_so(narrow: None) -> None:
    result = run(f"{NETWORK} --hosts 20 --local 5% --hot 0.3")
    assert result.exit_code == 0
    assert "(6 of 20, the rest like the last)" in result.stdout
    assert max(map(len, result.stdout.split("Assumed:")[0].splitlines())) <= 80


@pytest.mark.parametrize(("saved", "verdict"), [("700ms", "is worth it"), ("60ms", "is not worth it")])
def test_breakeven(saved: str, verdict: str) -> None:
    result = run(f"{BREAKEVEN} --prefill-saved {saved}")
    assert result.exit_code == 0
    assert f"Loading {verdict}: it costs 100 ms and saves {saved.removesuffix('ms')} ms" in result.stdout


def test_breakeven_length_from_samples() -> None:
    line = (
        f"breakeven --bandwidth 20GiB/s --lookup 2ms --prefix-tokens 8192 --bytes-per-token 131072 {SAMPLES}"
    )
    assert answers(line, "Break-even")["load_ns"] == 50_000_000
    assert answers(line, "Break-even length")["break_even_tokens"] < 100


def test_route() -> None:
    result = run(ROUTE)
    assert result.exit_code == 0
    assert "Send it to cold: 310 ms" in result.stdout
    limited = "route --host warm:queue=800ms,itl=20ms --host [::1]:70:queue=10ms,itl=60ms --itl-limit 50ms"
    assert answers(limited, "Routing")["chosen"] == "warm"


def test_a_length_says_what_it_leaves_out() -> None:
    """What overlaps, and a queue that reuse avoids, make loading pay earlier: the length is a bound, and says so."""
    line = f"{BREAKEVEN} --prefix-tokens 8192 --bytes-per-token 131072 {SAMPLES}"
    plain = json.loads(run(line, "--json").stdout)["ledgers"]["Break-even length"]
    for option in ("--hidden 45ms", "--queue-cold 1s"):
        found = json.loads(run(f"{line} {option}", "--json").stdout)["ledgers"]["Break-even length"]
        assert found["answers"] == plain["answers"]
        assert any("no longer than this" in said for said in found["assumptions"])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 10 * n,
            "input_length": 1_024 + 512 * n,
            "output_length": 5,
            "hash_ids": list(range(2 + n)),
        }
        for n in range(6)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_chunk(trace: Path, narrow: None) -> None:
    line = f"chunk --trace {trace} --bytes-per-token 1000 --chunk-tokens 512 --chunk-tokens 1024 --tp 2"
    result = run(line)
    assert result.exit_code == 0
    assert "chunks of 512 tokens skip" in result.stdout
    assert max(map(len, result.stdout.split("Assumed:")[0].splitlines())) <= 80
    rows = json.loads(run(line, "--json").stdout)["rows"]
    assert [row["chunk_tokens"] for row in rows] == [512, 1024]
    assert rows[0]["usable_tokens"] == 512 * (2 + 3 + 4 + 5 + 6)
    assert rows[0]["objects_peak_count"] == 14
    few = json.loads(run(line, "--json", "--requests-max", "2").stdout)["rows"]
    assert few[0]["usable_tokens"] == 1_024


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [CAPACITY, f"{CAPACITY} --shared-tokens 600", NETWORK, f"{NETWORK} --hosts 4 --links 9",
     f"{BREAKEVEN} --prefill-saved 700ms", f"{BREAKEVEN} --prefix-tokens 8192 --bytes-per-token 131072 {SAMPLES}",
     ROUTE, "chunk"],
)  # fmt: skip
def test_plots_are_pictures(line: str, tmp_path: Path, trace: Path) -> None:
    picture = tmp_path / "plan.png"
    if line == "chunk":
        line = f"chunk --trace {trace} --bytes-per-token 1000 --chunk-tokens 512 --chunk-tokens 1024"
    result = run(line, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width >= 800
    assert height >= 500
    assert len(data) > 5_000


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (CAPACITY.replace("32768", "-1"), "--prefixes = -1 is below 1"),
        (CAPACITY.replace("32768", "many"), "'many'; allowed: a whole number"),
        (CAPACITY.replace("512GiB", "512Gib"), "--dram = '512Gib': unknown unit 'Gib'"),
        (CAPACITY.replace("512GiB", "512ZiB"), "--dram = '512ZiB': unknown unit 'ZiB'"),
        (CAPACITY.replace("0.8", "80"), "--usable = '80' is above 1"),
        (CAPACITY.replace("131072", "0"), "--bytes-per-token = 0 is below 1"),
        (CAPACITY.replace("--bytes-per-token 131072", ""), "bytes per token are not known"),
        (f"{CAPACITY} --config x.json", "two answers to one question"),
        (CAPACITY.replace("--bytes-per-token 131072", "--config /no/such.json"), "No such file"),
        (f"{CAPACITY} --replicas 200", "--replicas = 200 with --hosts = 128"),
        (f"{CAPACITY} --tp 0", "--tp = 0 is below 1"),
        (f"{CAPACITY} --plot plan.pdf", "allowed: a file name that ends in .png"),
        (f"{CAPACITY} --plot /no/such/folder/plan.png", "no such folder"),
        (NETWORK.replace("400Gbit", "400Gb"), "write bit or B"),
        (NETWORK.replace("200/s", "200"), "--rate = '200': no unit"),
        (f"{NETWORK} --local 0.5", "--local = 50 % without a number of hosts"),
        (f"{NETWORK} --hot 0", "--hot = 0 % without a number of hosts"),
        (BREAKEVEN, "the prefill saved is not known"),
        (f"{BREAKEVEN} --prefill-saved -3ms", "--prefill-saved = '-3ms' is below 0"),
        (f"{BREAKEVEN} --prefill-saved 3ms --prefix-tokens 5 --bytes-per-token 5", "5 tokens × 5 B = 25 B"),
        (f"{BREAKEVEN} --prefill-sample 8192:700ms", "allowed: TOKENS=TIME"),
        (f"{BREAKEVEN} --prefill-sample 8192=700ms", "prefill was sampled at 1 length"),
        ("breakeven --bandwidth 20GiB/s --prefill-saved 1s", "the bytes to load are not known"),
        ("route --host warm:queue=1s,queue=2s", "queue is given twice"),
        ("route --host warm:speed=1s", "unknown part 'speed=1s'"),
        ("route --host :queue=1s", "has 0 characters"),
        ("route --host a:queue=0 --host a:queue=0", "given twice"),
        ("chunk --trace /no/such.jsonl --bytes-per-token 1", "No such file"),
        ("chunk --trace . --bytes-per-token 1", "Is a directory"),
    ],
)
def test_refusals(line: str, says: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


def test_what_the_user_wrote_is_told_as_it_is() -> None:
    """A path that looks like a field of a plan."""
    result = run("chunk --bytes-per-token 1 --trace", "/no/such/hosts = 3.jsonl")
    assert "--trace = /no/such/hosts = 3.jsonl: No such file" in " ".join(result.stderr.split())


def test_refusals_in_json_are_json() -> None:
    result = run(CAPACITY.replace("512GiB", "512ZiB"), "--json")
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["code"] == "KVD-USAGE-UNIT"
    assert error["fields"] == {"field": "--dram", "value": "512ZiB", "unit": "ZiB"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is not a JSON object"),
        ("\xff\xfe", "line 1 is not JSON"),
        ('{"timestamp": 0}', "line 1: input_length is missing; allowed: a whole number"),
        ('{"timestamp": 0, "input_length": "5", "output_length": 1, "hash_ids": []}', "input_length = '5'"),
        (
            '{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": []}',
            "input tokens = -5 is below 1",
        ),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [true]}', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}', "hash_ids names -1"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": {}}', "hash_ids is a dict"),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [18446744073709551616]}',
            "hash_ids names 18446744073709551616; allowed: whole numbers in 0 … 18446744073709551615",
        ),
        (
            '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}',
            "line 1: request at 0 ms: 2 block ids for 5 tokens",
        ),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_a_bad_trace_is_refused_by_line_and_field(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(line.encode("latin-1") + b"\n")
    result = run(f"chunk --trace {path} --bytes-per-token 1 --chunk-tokens 512")
    assert result.exit_code == 2
    assert says in result.stderr
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (CAPACITY.replace("--prefixes 32768", "--prefixes ٣"), "whole number"),
        (CAPACITY.replace("--bytes-per-token 131072", f"--config {'a' * 5000}"), "File name too long"),
        (CAPACITY.replace("--bytes-per-token 131072", "--config /dev/zero"), "no plain file"),
        (CAPACITY + " --bench /dev/zero", "no plain file"),
        (
            "breakeven --bytes-per-token 1024 --prefix-tokens 256 --bandwidth 1bit/s --prefill-sample 1024=100ms "
            "--prefill-sample 8192=2s",
            "allowed: 1 B/s and more",
        ),
    ],
)
def test_what_would_hang_or_be_taken_for_something_else_is_refused(line: str, says: str) -> None:
    result = run(line)
    assert result.exit_code == 2
    assert says in " ".join(result.output.split())


def test_a_pipe_is_no_benchmark(tmp_path: Path) -> None:
    """Fails by waiting for ever if the file is opened before it is looked at."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = run(CAPACITY + f" --bench {pipe}")
    assert (result.exit_code, "no plain file" in result.output) == (2, True)


def test_a_window_smaller_than_the_engines_block_is_refused(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 128,
                    "num_key_value_heads": 2, "sliding_window": 128})
    )  # fmt: skip
    result = run(f"chunk --trace {trace} --config {config} --engine-block 256 --chunk-tokens 512")
    assert result.exit_code == 2
    assert "window of 128 tokens is smaller" in " ".join(result.output.split())
