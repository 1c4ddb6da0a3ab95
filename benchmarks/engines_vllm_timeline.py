"""One load beside the model's compute under the real vLLM, as a timeline: `make bench-engines` runs it.

    python benchmarks/engines_vllm_timeline.py [--prefix 3008] [--suffix 96] [--rounds 3]

A prompt whose first `--prefix` tokens are in kvd and whose last `--suffix` are not, with load="layers": the connector
copies bands of layers while the engine prepares the step and the model computes the layers before them. Taken from the
engine's own calls: the scheduler's lookup, each band's copy on the load thread, what comes between `start_load_kv` and
the first layer, each layer between two calls of `wait_for_layer_load`. Of `--rounds` prompts the one with the median
time is shown, beside what `kvctl plan timeline` says of its load and of the engine's work, and beside the same prompts
computed whole. Model: the checkpoint of examples/make_checkpoint.py, float32, blocks of 32.

Writes build/bench-engines-timeline.json, of which engines_vllm_report.py draws a picture. Exit code 1 if nothing
overlapped or the load failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from engines_vllm import ROOT, Daemon

sys.path.insert(0, str(ROOT / "tests" / "engines"))

Span = tuple[float, float]


class Watch:
    """Times of one request in seconds, by wrapping what the engine calls. One request at a time."""

    def __init__(self, engine: Any) -> None:
        self.lookup: list[Span] = []
        self.starts: list[Span] = []
        self.bands: list[Span] = []
        self.waits: list[Span] = []  # of each layer, in the order in which the model comes to them
        self.computed_s = 0.0
        scheduler, worker = engine.connectors
        layers = worker.worker._layers
        assert layers is not None, "this model has no layered loads"
        self._wrap(scheduler, "get_num_new_matched_tokens", self.lookup)
        self._wrap(worker, "start_load_kv", self.starts)
        self._wrap(worker, "wait_for_layer_load", self.waits)
        copy, finish = layers.copy, layers.finish

        def copied(loads: Any, failed: Any) -> None:
            copy([(load, one and self._band(one)) for load, one in loads], failed)

        def finished() -> Any:
            self.computed_s = time.perf_counter()
            return finish()

        layers.copy, layers.finish = copied, finished

    def _wrap(self, owner: Any, name: str, spans: list[Span]) -> None:
        call = getattr(owner, name)

        def timed(*args: Any, **named: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return call(*args, **named)
            finally:
                spans.append((began_s, time.perf_counter()))

        setattr(owner, name, timed)

    def _band(self, copy: Any) -> Any:
        def timed(band: int) -> None:
            began_s = time.perf_counter()
            copy(band)
            self.bands.append((began_s, time.perf_counter()))

        return timed

    def clear(self) -> None:
        """Before the next request."""
        for spans in (self.lookup, self.starts, self.bands, self.waits):
            spans.clear()

    def timeline(self, sent_s: float, layers: int) -> dict[str, Any]:
        """Seconds after the request was sent: the first step's lookup, bands, preparation, compute of each layer."""
        waits = self.waits[:layers]
        ends = [begin for begin, _ in waits[1:]] + [self.computed_s]
        compute = [(over, end) for (_, over), end in zip(waits, ends, strict=True)]

        def since(spans: list[Span]) -> list[Span]:
            return [(begin - sent_s, end - sent_s) for begin, end in spans]

        return {
            "lookup": since(self.lookup[:1]), "load": since(self.bands),
            "prepare": since([(self.starts[0][1], waits[0][0])]), "compute": since(compute),
            "waited_s": sum(end - begin for begin, end in waits),
        }  # fmt: skip


@contextlib.contextmanager
def engine_of(model: Path, socket: str, tokens_max: int) -> Iterator[Any]:
    """vLLM in this process, loads in bands."""
    import vllm_lib as lib

    engine = lib.Engine(
        str(model),
        socket,
        extra={"load": "layers"},
        max_model_len=tokens_max,
        max_num_batched_tokens=tokens_max,
    )
    assert engine.ready()
    try:
        yield engine
    finally:
        engine.close()


def measure(engine: Any, prefix: int, suffix: int, rounds: int) -> dict[str, Any]:
    """The request with the median time of all rounds, and what the same prompts take computed whole."""
    import vllm_lib as lib

    layers = engine.llm.llm_engine.model_config.get_num_layers(
        engine.llm.llm_engine.vllm_config.parallel_config
    )
    watch, shown, whole_s = Watch(engine), [], []
    for number in range(rounds + 1):  # the first warms up
        known, new = lib.prompt_of(prefix, 10 + number), lib.prompt_of(suffix, 500 + number)
        engine.run(known, 1)
        engine.counters()  # what was computed is published
        assert engine.reset()
        watch.clear()
        before = engine.counters()
        sent_s = time.perf_counter()
        answer = engine.run(known + new, 1)
        took_s = time.perf_counter() - sent_s
        after = engine.counters()
        assert after["load_failures"] == 0, "the load failed"
        assert answer["cached"] >= prefix - lib.BLOCK, f"{answer['cached']} tokens of {prefix} were loaded"
        one = watch.timeline(sent_s, layers)
        one |= {"took_s": took_s, "loaded_bytes": after["loaded_bytes"] - before["loaded_bytes"]}
        assert engine.reset()
        began_s = time.perf_counter()
        engine.run(known + new, 1, cache_salt=f"whole-{number}-{os.getpid()}")
        if number:
            whole_s.append(time.perf_counter() - began_s)
            shown.append(one)
    shown.sort(key=lambda one: one["took_s"])
    return {**shown[len(shown) // 2], "layers": layers, "whole_s": statistics.median(whole_s),
            "took_all_s": [one["took_s"] for one in shown]}  # fmt: skip


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What overlapped, and what the planner says of the same load and the same compute."""
    from kvd.plan.timeline import TimelinePlan

    load, lookup = found["load"], found["lookup"][0]
    work = found["prepare"] + found["compute"]
    load_s = sum(end - begin for begin, end in load)
    work_s = sum(end - begin for begin, end in work)
    overlap_s = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in load for b in work)
    begin_s = min(load[0][0], work[0][0])
    end_s = max(load[-1][1], work[-1][1])
    plan = TimelinePlan(
        size_bytes=found["loaded_bytes"], bandwidth_bytes_per_s=Fraction(found["loaded_bytes"]) / Fraction(load_s),
        layers_count=len(load), suffix_ns=round(work_s * 1e9),
    )  # fmt: skip
    return {
        "lookup_us": (lookup[1] - lookup[0]) * 1e6,
        "load_ms": load_s * 1e3, "load_GiB_per_s": found["loaded_bytes"] / load_s / 2**30,
        "engine_ms": work_s * 1e3, "waited_ms": found["waited_s"] * 1e3, "overlap_ms": overlap_s * 1e3,
        "overlap_share_of_load": overlap_s / load_s,
        "load_and_engine_ms": (end_s - begin_s) * 1e3, "planned_ms": float(plan.first_token_ns) / 1e6,
        "first_token_ms": found["took_s"] * 1e3, "all_computed_ms": found["whole_s"] * 1e3,
    }  # fmt: skip


def main() -> int:
    """Measure, print, draw, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefix", type=int, default=3008)
    parser.add_argument("--suffix", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "models" / "smollm2-135m")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-engines-timeline.json")
    given = parser.parse_args()
    if not (given.model / "config.json").exists():
        print(f"no checkpoint at {given.model}: make demo makes it")
        return 2
    with tempfile.TemporaryDirectory(prefix="kvd-timeline-") as folder, Daemon(Path(folder)) as daemon:
        tokens_max = -(-(given.prefix + given.suffix + 64) // 64) * 64
        with engine_of(given.model, daemon.socket, tokens_max) as engine:
            found = measure(engine, given.prefix, given.suffix, given.rounds)
    said = figures(found)
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(
        json.dumps({"prefix": given.prefix, "suffix": given.suffix, "timeline": said, "raw": found}, indent=1)
    )
    for name, value in said.items():
        print(f"{name:24}{value:10.2f}")
    return 0 if said["overlap_ms"] > 0 else 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # engines leave threads behind that do not end by themselves
