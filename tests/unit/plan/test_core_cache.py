"""The real core behind the sweep: equal to the plain reference where nothing leaves, near it where something does."""

from __future__ import annotations

import random

import pytest
from typer.testing import CliRunner

from kvd.kvctl.plan import app
from kvd.kvctl.plan_core import CoreCache, core_factory
from kvd.plan.chunk import RecordedRequest, ReferenceLru, SweepSetup, sweep
from kvd.plan.footprint import Footprint

BLOCK = 512


def conversations(seed: int, count: int) -> list[RecordedRequest]:
    """Prompts that grow turn by turn: each conversation shares its beginning with some others."""
    rng = random.Random(seed)
    chains: list[list[int]] = [[rng.randrange(1 << 20) for _ in range(4)] for _ in range(6)]
    requests, fresh = [], 1 << 20
    for number in range(count):
        chain = rng.choice(chains)
        chain += range(fresh, fresh + rng.randint(1, 6))
        fresh += 6
        requests.append(RecordedRequest(number * 100, len(chain) * BLOCK, 10, tuple(chain)))
        if len(chain) > 60:
            chains[chains.index(chain)] = chain[:4]
    return requests


@pytest.mark.parametrize("members", [1, 4])
def test_without_a_limit_the_core_keeps_everything(members: int) -> None:
    setup = SweepSetup(footprint=Footprint.by_hand(1024, members), trace_block_tokens=BLOCK)
    trace = conversations(3, 120)
    core = sweep(trace, [256, 512], setup, core_factory(members))
    plain = sweep(trace, [256, 512], setup, ReferenceLru)
    for mine, theirs in zip(core.rows, plain.rows, strict=True):
        assert (mine.usable_tokens, mine.objects_written_count) == (
            theirs.usable_tokens,
            theirs.objects_written_count,
        )
        assert mine.objects_evicted_count == 0
        assert mine.metadata_cpu_ns > 0
    assert "own core decides" in core.assumptions[0]
    assert "least recently used" in plain.assumptions[0]


def test_names_may_be_hashes_of_64_bits() -> None:
    setup = SweepSetup(footprint=Footprint.by_hand(1024), trace_block_tokens=BLOCK)
    ids = (2**64 - 1, 5, 2**64 - 2)
    trace = [RecordedRequest(number, 3 * BLOCK, 1, ids) for number in range(2)]
    for row in sweep(
        trace, [BLOCK // 8, BLOCK], setup, core_factory(1)
    ).rows:  # a part of a block has a longer name
        assert row.objects_written_count == 3 * BLOCK // row.chunk_tokens
        assert row.requests_hit_count == 1


def test_at_its_limit_the_core_evicts_and_stays_near_the_reference() -> None:
    capacity = 128
    setup = SweepSetup(
        footprint=Footprint.by_hand(1024),
        trace_block_tokens=BLOCK,
        capacity_bytes=capacity * BLOCK * 1024,
    )
    trace = conversations(4, 200)
    (mine,) = sweep(trace, [BLOCK], setup, core_factory(1, "lru")).rows
    (theirs,) = sweep(trace, [BLOCK], setup, ReferenceLru).rows
    assert 0 < mine.objects_peak_count <= capacity
    assert mine.objects_written_count - mine.objects_evicted_count <= capacity
    assert mine.objects_evicted_count > 0
    assert mine.usable_tokens >= 0.9 * theirs.usable_tokens


def test_a_chain_is_found_up_to_what_left() -> None:
    cache = CoreCache(8, 2, "lru")
    assert cache.publish([1, 2, 3, 4], 0).stored_count == 4
    assert cache.match([1, 2, 9], 1) == 2
    done = cache.publish([11, 12, 13, 14, 15, 16], 2)
    assert done.stored_count == 6
    assert done.evicted_count == 2
    assert cache.families_count == 8
    assert cache.match([1, 2, 3, 4], 3) == 2, "suffixes leave first"
    assert cache.cpu_ns > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cache", "arc"], "core, lru"),
        (["--policy", "fifo"], "slru, lru"),
        (["--tp", "64", "--groups", "3"], "192 members"),
    ],
)
def test_what_cannot_be_replayed_is_refused(options: list[str], said: str, tmp_path: object) -> None:
    trace = f"{tmp_path}/trace.jsonl"
    with open(trace, "w") as out:
        out.write('{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n')
    result = CliRunner().invoke(app, ["chunk", "--trace", trace, "--bytes-per-token", "1024", *options])
    assert result.exit_code == 2
    assert said in result.stderr


def test_measuring_without_a_daemon_is_refused_with_the_way_out(tmp_path: object) -> None:
    line = ["breakeven", "--bytes", "1GiB", "--prefill-saved", "700ms"]
    result = CliRunner().invoke(app, line)
    assert result.exit_code == 2
    assert "--bandwidth RATE" in result.stderr
    result = CliRunner().invoke(app, [*line, "--measure", "--socket", f"{tmp_path}/none.sock"])
    assert result.exit_code == 2
    assert "start the daemon" in result.stderr
