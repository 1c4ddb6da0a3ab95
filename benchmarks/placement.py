"""Attention-aware placement beside uniform hashing, on the recorded conversation trace.

Every request reads its prompt's blocks once, head group by head group, each from the host where that group's rank
runs. A byte crosses if its owner is another host. "Anywhere": requests are dealt out to engine instances in turn. "By
prefix": a request goes to the instance whose ranks own its first window, the routing that placement is meant for. The
last two columns walk reads of a window (`--window` tokens) at many positions and count the hosts that one touches.

    python benchmarks/placement.py [--trace FILE] [--requests 600] [--json FILE]

Exit code 1 if a read of a window touches more than two hosts under attention-aware placement.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvd.layout import chain, placement
from kvd.layout.placement import AttentionAware, Read, Uniform

default_trace = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
block_tokens = 512
setups = ((1, 2), (1, 3), (1, 8), (2, 4), (2, 8), (4, 8), (4, 16), (8, 8), (8, 32))  # TP, hosts


def prompts(trace: Path, requests: int) -> list[list[bytes]]:
    """Identities of the blocks of each prompt: a trace's id stands for its whole prefix."""
    root = chain.chain_root(bytes(32), block_tokens)
    found: list[list[bytes]] = []
    with trace.open() as lines:
        for line in lines:
            ids = json.loads(line)["hash_ids"]
            found.append(chain.chain_from_hashes(root, [number.to_bytes(32, "little") for number in ids]))
            if len(found) == requests:
                break
    return found


def reads(all_prompts: list[list[bytes]], aware: AttentionAware, by_prefix: bool) -> list[Read]:
    """One read a prompt, with the hosts on which its ranks run."""
    instances = max(1, len(aware.hosts) // aware.head_groups)
    found: list[Read] = []
    for number, identities in enumerate(all_prompts):
        hosts = []
        for group in range(aware.head_groups):
            column = aware.column(group)
            own = aware.host(identities, 0, group) if by_prefix else column[number % instances % len(column)]
            hosts.append(own)
        found.append(Read(identities, 0, len(identities), tuple(hosts)))
    return found


def windows(all_prompts: list[list[bytes]], head_groups: int, length: int) -> list[Read]:
    """Reads of `length` chunks at several positions of each prompt."""
    return [
        Read(identities, begin, min(begin + length, len(identities)), tuple(range(head_groups)))
        for identities in all_prompts
        for begin in range(0, len(identities), 7)
    ]


def measure(
    all_prompts: list[list[bytes]], tp: int, hosts_count: int, window_tokens: int
) -> dict[str, float]:
    """All figures of one setup."""
    hosts = [f"host{number:02d}" for number in range(hosts_count)]
    aware = AttentionAware(hosts, head_groups=tp, window_tokens=window_tokens, chunk_tokens=block_tokens)
    uniform = Uniform(hosts, head_groups=tp)
    anywhere, by_prefix = reads(all_prompts, aware, False), reads(all_prompts, aware, True)
    looked = windows(all_prompts[:100], tp, window_tokens // block_tokens)
    return {
        "tp": tp, "hosts": hosts_count,
        "uniform": placement.traffic(uniform, anywhere).crossing_share,
        "uniform_by_prefix": placement.traffic(uniform, by_prefix).crossing_share,
        "aware": placement.traffic(aware, anywhere).crossing_share,
        "aware_by_prefix": placement.traffic(aware, by_prefix).crossing_share,
        "uniform_touched_max": placement.traffic(uniform, looked).hosts_touched_max,
        "aware_touched_max": placement.traffic(aware, looked).hosts_touched_max,
    }  # fmt: skip


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, default=default_trace)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--window", type=int, default=16_384)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"skipped: the trace {options.trace} is not here")
        return 0
    all_prompts = prompts(options.trace, options.requests)
    print(f"{len(all_prompts)} prompts, {sum(map(len, all_prompts))} blocks, window {options.window} tokens")
    print(
        "share of bytes that cross hosts           anywhere           by prefix      hosts a window touches, at most"
    )
    print(f"{'TP':>3}{'hosts':>6}{'1 - 1/hosts':>13}{'uniform':>14}{'aware':>9}{'uniform':>11}{'aware':>9}"
          f"{'uniform':>12}{'aware':>8}")  # fmt: skip
    rows = []
    for tp, hosts in setups:
        row = measure(all_prompts, tp, hosts, options.window)
        rows.append(row)
        print(
            f"{tp:>3}{hosts:>6}{1 - 1 / hosts:>13.1%}{row['uniform']:>14.1%}{row['aware']:>9.1%}"
            f"{row['uniform_by_prefix']:>11.1%}{row['aware_by_prefix']:>9.1%}"
            f"{row['uniform_touched_max']:>12.0f}{row['aware_touched_max']:>8.0f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 1 if max(row["aware_touched_max"] for row in rows) > 2 else 0


if __name__ == "__main__":
    sys.exit(main())
