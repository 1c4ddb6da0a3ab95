"""Time to the first token with kvd, beside the same prompt computed and beside the model's own live cache.

    python benchmarks/engines_transformers.py [--model build/models/smollm2-135m] [--tokens 2000] [--json FILE]

Starts a daemon of its own. One prompt; repeats in turns, so that a machine that slows down slows down both; medians,
and the ratio pair by pair. The reader is another attachment than the writer. Exit code 1 if transformers_speedup is
less than --least (15), or if the first token differs.

    cold     prefill of the whole prompt
    kvd      chain, match, lease, copy out of shared memory, prefill of the rest
    live     prefill of the rest on a copy of the cache that is in the process already: what kvd could reach at best
    processor_share says how much of its processors the cold run got: below 0.8 other work disturbs, and the ratio of
    processor seconds (transformers_speedup_cpu) is the one to look at
    store    storing a cache of the whole prompt, of which kvd has nothing
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import kvd
from kvd.engines import transformers as engine
from kvd.engines import transformers_cache as caches

MODEL = Path(__file__).resolve().parents[1] / "build" / "models" / "smollm2-135m"


def first_token(model: Any, ids: Any, cache: Any, begin: int) -> int:
    """Run the prompt from `begin` on; the most likely next token."""
    with torch.inference_mode():
        name = caches.cache_name(model)
        logits = model(ids[:, begin:], logits_to_keep=1, use_cache=True, **{name: cache}).logits
    return int(logits[0, -1].argmax())


def seconds(run: Callable[[], int], cpu: list[float] | None = None) -> tuple[float, int]:
    """How long it took, and what it gave; `cpu` gets the processor seconds of all threads."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    result = run()
    if cpu is not None:
        cpu.append(time.process_time() - cpu_begin)
    return time.perf_counter() - begin, result


def measure(model: Any, socket: str, tokens: int, repeats: int) -> dict[str, Any]:
    """All medians and ratios."""
    ids = torch.tensor([[(7 * n + 3) % 1500 + 3 for n in range(tokens)]])
    first_token(model, ids[:, :64], caches.new_cache(model), 0)
    with kvd.connect(socket, client="writer") as store, kvd.connect(socket, client="reader") as other:
        begin = time.perf_counter()
        writer = engine.Adapter(store, model)
        writer.manifest()
        prepare_s = time.perf_counter() - begin
        reader = engine.Adapter(other, model, kept=writer.kept)
        cache, held = writer.prefill(ids)
        store_s, _ = seconds(lambda: engine.Adapter(store, model, salt="again").save(cache, ids[:, :held]))
        cold, warm, live, tokens_seen = [], [], [], set()
        cold_cpu: list[float] = []
        warm_cpu: list[float] = []
        for _ in range(repeats):
            took, token = seconds(lambda: first_token(model, ids, caches.new_cache(model), 0), cold_cpu)
            cold.append(took)
            tokens_seen.add(token)

            def with_kvd() -> int:
                loaded, reused = reader.load(ids)
                return first_token(model, ids, loaded, reused)

            took, token = seconds(with_kvd, warm_cpu)
            warm.append(took)
            tokens_seen.add(token)
            mine = copy.deepcopy(cache)
            took, token = seconds(lambda mine=mine: first_token(model, ids, mine, held))
            live.append(took)
            tokens_seen.add(token)
        counted = reader.counters
        return {
            "prompt_tokens": tokens,
            "reused_tokens": counted.tokens_reused // repeats,
            "loaded_bytes": counted.bytes_loaded // repeats,
            "repeats": repeats,
            "cold_s": statistics.median(cold),
            "kvd_s": statistics.median(warm),
            "live_s": statistics.median(live),
            "store_s": store_s,
            "prepare_s": prepare_s,
            "transformers_speedup": statistics.median(c / w for c, w in zip(cold, warm, strict=True)),
            "transformers_speedup_cpu": statistics.median(
                c / w for c, w in zip(cold_cpu, warm_cpu, strict=True)
            ),
            "processor_share": sum(cold_cpu) / sum(cold) / torch.get_num_threads(),
            "transformers_kvd_over_live": statistics.median(w / h for w, h in zip(warm, live, strict=True)),
            "tokens_equal": len(tokens_seen) == 1,
            "failures": counted.failures + writer.counters.failures,
        }


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--least", type=float, default=15.0)
    parser.add_argument("--threads", type=int, default=min(2, len(os.sched_getaffinity(0))))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not (options.model / "config.json").exists():
        print(f"no checkpoint in {options.model}: make demo makes it", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    model = AutoModelForCausalLM.from_pretrained(str(options.model), dtype=torch.float32).eval()
    with tempfile.TemporaryDirectory(prefix="kvd-") as folder:
        config = Path(folder, "kvd.toml")
        socket = f"{folder}/kvd.sock"
        config.write_text(
            f'[server]\nsocket = "{socket}"\nruntime_dir = "{folder}"\n[pool]\nsize = "512MiB"\n',
            encoding="utf-8",
        )
        daemon = subprocess.Popen(
            [sys.executable, "-m", "kvd.server.main", "serve", "--config", str(config)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            end = time.monotonic() + 30
            while not Path(socket).exists() and time.monotonic() < end and daemon.poll() is None:
                time.sleep(0.05)
            found = measure(model, socket, options.tokens, options.repeats)
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(30)
    found["model"] = options.model.name
    for name, value in found.items():
        print(f"{name:28} {value:.4f}" if isinstance(value, float) else f"{name:28} {value}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return int(
        found["transformers_speedup"] < options.least or not found["tokens_equal"] or found["failures"] > 0
    )


if __name__ == "__main__":
    sys.exit(main())
