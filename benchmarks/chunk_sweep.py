"""The planner's chunk-size sweep on the recorded conversation trace, through the real core and the plain reference.

Prints one row a chunk size: the share of prefill skipped under either cache, objects, metadata CPU measured in this
run, and bytes fetched in vain. The capacity is a share of the trace's unique bytes.

    python benchmarks/chunk_sweep.py [--trace FILE] [--requests 3000] [--capacity 20] [--json FILE]

Exit code 1 if the core skips less than the reference by more than 2 points at any size.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvd.kvctl.plan_core import core_factory
from kvd.kvctl.plan_trace import read_trace
from kvd.plan.chunk import ReferenceLru, SweepSetup, sweep
from kvd.plan.footprint import Footprint

default_trace = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
block_tokens = 512
bytes_per_token = 131_072
sizes = (128, 256, 512, 1024, 2048, 4096)
tolerance = 0.02


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, default=default_trace)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--capacity", type=int, default=20, help="per cent of the unique bytes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"skipped: the trace {options.trace} is not here")
        return 0
    requests = list(read_trace(options.trace, options.requests))
    unique = len({block for request in requests for block in request.block_ids})
    capacity = max(sizes[-1], unique * block_tokens * options.capacity // 100) * bytes_per_token
    setup = SweepSetup(
        footprint=Footprint.by_hand(bytes_per_token), trace_block_tokens=block_tokens, capacity_bytes=capacity,
    )  # fmt: skip
    core = sweep(requests, sizes, setup, core_factory(1))
    plain = sweep(requests, sizes, setup, ReferenceLru)
    print(f"{len(requests)} requests, {unique} unique blocks, room for {options.capacity} % of them")
    print(
        f"{'chunk':>6}{'core':>8}{'reference':>11}{'objects':>10}{'CPU s':>8}{'us/object':>11}{'in vain GiB':>13}"
    )
    worse, rows = 0, []
    for mine, theirs in zip(core.rows, plain.rows, strict=True):
        share, reference = float(mine.usable_share), float(theirs.usable_share)
        worse += share < reference - tolerance
        rows.append(
            {
                "chunk_tokens": mine.chunk_tokens,
                "core": share,
                "reference": reference,
                "metadata_cpu_ns": mine.metadata_cpu_ns,
                "objects_written": mine.objects_written_count,
            }
        )
        print(
            f"{mine.chunk_tokens:>6}{share:>8.2%}{reference:>11.2%}{mine.objects_peak_count:>10,}"
            f"{mine.metadata_cpu_ns / 1e9:>8.2f}{mine.metadata_cpu_ns / 1e3 / mine.objects_written_count:>11.2f}"
            f"{mine.fetched_in_vain_bytes / (1 << 30):>13.1f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
