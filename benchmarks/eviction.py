"""How much of a recorded workload each policy keeps, beside the figures published for the same trace.

Replays the public Mooncake conversation trace (one line a request: the hashes of its 512-token blocks) through
the real Core, with an index and a memory made of dictionaries. A request looks up its chain, leaves one touch,
and writes what was missing. A hit is a block that lies in the unbroken prefix that was found; the table gives
hits as a share of all blocks asked for.

"value" is published nowhere: it stands beside the others. On this trace all blocks are alike, so that only its count of
reuses tells; what sizes do is tested in tests/unit/core/test_core_policy.py.

    python benchmarks/eviction.py [--trace FILE] [--capacity 5,10] [--policy slru] [--json FILE]

Exit code 1 if SLRU at 5 % or more is worse than the published SLRU by more than 0.005.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from array import array
from pathlib import Path

from kvd.core import events as ev
from kvd.core.core import Core, CoreConfig
from kvd.types import Member

default_trace = Path(__file__).resolve().parents[2] / "shared" / "traces" / "mooncake_conversation.jsonl"
capacities = (1, 5, 10, 20, 40)  # per cent of the unique blocks
published = {
    "lru": (0.053, 0.196, 0.279, 0.345, 0.360),
    "slru": (0.060, 0.207, 0.289, 0.337, 0.361),
}
tolerance = 0.005
object_bytes = 4096  # sizes do not matter here: all blocks are alike
batch_families_max = 128


class Replay:
    """One core, and the tables around it."""

    def __init__(self, policy: str, families_max: int) -> None:
        slots = families_max + 512  # the index is what is short, not the memory
        frames = -(-slots * object_bytes // (2 << 20))
        self.core = Core(CoreConfig(policy=policy), families_max, families_max, [frames * (2 << 20)])
        self.core.step(0, ev.SegmentReady(0, 0, frames * (2 << 20)))
        self.core.step(0, ev.ClientAttached(0, 1, "replay", writable=True))
        self.entry_of: dict[int, int] = {}
        self.block_of: array[int] = array("Q", bytes(8 * families_max))
        self.record_of: array[int] = array("I", bytes(4 * families_max))
        self.place_of: array[int] = array("Q", bytes(8 * families_max))
        self.members = (Member(0, object_bytes),)
        self.hits = self.asked = self.refused = 0

    def request(self, number: int, now_ns: int, blocks: list[int]) -> None:
        """Look up, touch, write the rest behind what was found."""
        entry_of = self.entry_of
        matched = 0
        for block in blocks:
            if block not in entry_of:
                break
            matched += 1
        self.hits += matched
        self.asked += len(blocks)
        deepest = entry_of[blocks[matched - 1]] if matched else ev.NONE
        missed = blocks[matched] + 1 if matched < len(blocks) else 0
        touch = ev.Touch(number, now_ns, deepest, 0, matched, len(blocks), missed, 0, ev.TouchKind.ACQUIRE, 0)
        self.core.step(now_ns, ev.Touched(0, [touch]))
        for begin in range(matched, len(blocks), batch_families_max):
            if not self.write(number, now_ns, blocks, begin, min(begin + batch_families_max, len(blocks))):
                break

    def write(self, number: int, now_ns: int, blocks: list[int], begin: int, end: int) -> bool:
        """Reserve and publish blocks [begin, end); False if there is no room behind this request's own prefix."""
        entry_of = self.entry_of
        part = blocks[begin:end]
        keys = b"".join([(block + 1).to_bytes(8, "little") * 4 for block in part])
        entries = array("I", [entry_of.get(block, ev.NONE) for block in part])
        present = bytes([entry != ev.NONE for entry in entries])
        parent = entry_of.get(blocks[begin - 1], ev.NONE) if begin else ev.NONE
        reserve = ev.Reserve(0, number, number, 0, keys, parent, self.members, 0, 1, False, entries, present)
        effects = self.settle(now_ns, self.core.step(now_ns, reserve))
        reply = effects[-1]
        if not isinstance(reply, ev.ReservedReply):
            self.refused += 1
            return False
        if not reply.reservation:
            return True
        checksums = array("Q", bytes(8 * len(part)))
        publish = ev.Publish(0, number, reply.reservation, 0, checksums, bytes([1]) * len(part))
        (ask,) = (one for one in self.core.step(now_ns, publish) if isinstance(one, ev.DoPublish))
        granted = [at for at, status in enumerate(reply.statuses) if status == ev.ReserveStatus.GRANTED]
        assert len(granted) == len(ask.records)
        used = ask.entries[: len(granted)]
        for at, entry, record in zip(granted, used, ask.records, strict=True):
            entry_of[part[at]] = entry
            self.block_of[entry] = part[at]
            self.record_of[entry] = record
            self.place_of[entry] = reply.places[at]
        zeros = bytes(len(granted))
        self.core.step(now_ns, ev.Published(ask.token, zeros, used, zeros, len(used)))
        return True

    def settle(self, now_ns: int, effects: list[ev.Effect]) -> list[ev.Effect]:
        """Carry out evictions until the reservation is answered. Nobody holds anything here."""
        while isinstance(ask := effects[-1], ev.DoEvict):
            records, places = array("I"), array("Q")
            for entry in ask.entries:
                del self.entry_of[self.block_of[entry]]
                records.append(self.record_of[entry])
                places.append(self.place_of[entry])
            effects = self.core.step(
                now_ns, ev.Evicted(ask.token, ask.entries, array("I"), records, places, array("Q"))
            )
        return effects


def replay(requests: list[tuple[int, list[int]]], policy: str, families_max: int) -> dict[str, float]:
    """Hit ratio and cost of one policy at one capacity."""
    run = Replay(policy, families_max)
    began = time.perf_counter()
    for number, (timestamp_ms, blocks) in enumerate(requests, start=1):
        run.request(number, timestamp_ms * 1_000_000 + number, blocks)
    seconds = time.perf_counter() - began
    run.core.validate()
    counters = run.core.counters
    return {
        "hit_ratio": run.hits / run.asked,
        "us_per_block": seconds * 1e6 / run.asked,
        "seconds": seconds,
        "evictions": counters["evictions"],
        "evicted_families": counters["evicted_entries"] + counters["evicted_space"],
        "refused": run.refused,
    }


def load(trace: Path) -> list[tuple[int, list[int]]]:
    """Requests of a trace: (milliseconds, block numbers)."""
    with trace.open() as lines:
        rows = [json.loads(line) for line in lines]
    return [(row["timestamp"], row["hash_ids"]) for row in rows]


def main() -> int:
    """Print the table; see the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, default=default_trace)
    parser.add_argument(
        "--capacity", default=",".join(map(str, capacities)), help="per cent of unique blocks"
    )
    parser.add_argument("--policy", default="lru,slru,value")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.trace.exists():
        print(f"skipped: the trace {options.trace} is not here")
        return 0
    requests = load(options.trace)
    unique = len({block for _, blocks in requests for block in blocks})
    total = sum(len(blocks) for _, blocks in requests)
    print(
        f"{len(requests)} requests, {total} blocks, {unique} unique; an infinite cache finds {1 - unique / total:.3f}"
    )
    print(
        f"{'policy':8}{'capacity':>9}{'kvd':>8}{'published':>11}{'difference':>12}{'us/block':>10}{'evictions':>11}"
    )
    results, worse = [], 0
    for policy in options.policy.split(","):
        for percent in map(int, options.capacity.split(",")):
            result = replay(requests, policy, unique * percent // 100)
            reference = dict(zip(capacities, published.get(policy, ()), strict=False)).get(percent)
            difference = "" if reference is None else f"{result['hit_ratio'] - reference:+.4f}"
            shown = "" if reference is None else f"{reference:.3f}"
            print(
                f"{policy:8}{percent:>8}%{result['hit_ratio']:>8.4f}{shown:>11}{difference:>12}"
                f"{result['us_per_block']:>10.2f}{result['evictions']:>11.0f}",
                flush=True,
            )
            results.append({"policy": policy, "percent": percent, "published": reference, **result})
            if policy == "slru" and percent >= 5 and reference is not None:
                worse += result["hit_ratio"] < reference - tolerance
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
