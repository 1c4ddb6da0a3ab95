"""Conversations of several turns over the real vLLM, with and without kvd: `make bench-engines` runs it.

    python benchmarks/engines_vllm_turns.py [--conversations 6] [--turns 3] [--json build/bench-engines-vllm-turns.json]

Each conversation begins with instructions that all share and a document of its own; each turn appends a question and
the model's answer. `--clients` of them are under way at once, in turn, a client sends the next turn of its conversation
when it has the answer to the one before. Model: the checkpoint of examples/make_checkpoint.py, float32, block size 32.
Every variant is a fresh engine process:

    local     no kvd, the engine's own prefix cache holds everything: as good as one engine can be
    limited   no kvd, the engine's own cache holds what runs, and little more
    kvd       the same small cache, kvd empty at the start
    restart   the same, a new engine on what "kvd" left behind: all prompts known
    cold      kvd looks and stores, and never finds anything (a salt for each request)
    down      kvd configured, no daemon

What each figure means is in docs/performance.md, "Engines". Exit code 1 if kvd does not help: with it, and after a
restart, fewer prompt tokens must be computed and the first token must come sooner than in "limited".
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engines_vllm import ROOT, Daemon, quantile

sys.path.insert(0, str(ROOT / "tests" / "engines"))

SHARED_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 256, 700, 150, 32
BLOCK = 32
VARIANTS = ("local", "limited", "kvd", "restart", "cold", "down")


# -- one variant, in a process of its own -------------------------------------------------------------------


class Conversation:
    """What was said so far, and the next thing to say."""

    def __init__(self, number: int) -> None:
        import vllm_lib as lib

        self.number, self.turn = number, 0
        shared = lib.prompt_of(SHARED_TOKENS, 1)
        self.tokens = shared + lib.prompt_of(DOCUMENT_TOKENS, 100 + number)

    def prompt(self) -> list[int]:
        """The prompt of the next turn."""
        import vllm_lib as lib

        self.turn += 1
        self.tokens = self.tokens + lib.prompt_of(QUESTION_TOKENS, 1000 + 50 * self.number + self.turn)
        return self.tokens


def blocks_needed(clients: int, turns: int) -> int:
    """Blocks for what runs at once, and an eighth more."""
    longest = SHARED_TOKENS + DOCUMENT_TOKENS + turns * (QUESTION_TOKENS + ANSWER_TOKENS)
    return clients * (longest // BLOCK + 2) * 9 // 8


def run_variant(given: dict[str, Any]) -> dict[str, Any]:
    """All conversations on one engine; every request's times, and what was computed."""
    import vllm_lib as lib

    small = {"num_gpu_blocks_override": blocks_needed(given["clients"], given["turns"])}
    engine = lib.Engine(
        given["model"], given["socket"], max_model_len=2560, max_num_batched_tokens=2560,
        **({} if given["variant"] == "local" else small),
    )  # fmt: skip
    if given["socket"] and Path(given["socket"]).exists():
        assert engine.ready()
    engine.run(lib.prompt_of(600, 7), 4, cache_salt="warm")
    engine.run(lib.prompt_of(600, 8), 4, cache_salt="warm")
    before = engine.counters() if given["socket"] else {}
    client = Client(engine, given)
    began = time.perf_counter()
    requests = client.converse()
    took_s = time.perf_counter() - began
    after = engine.counters() if given["socket"] else {}
    prompt_tokens = sum(r["prompt_tokens"] for r in requests)
    decoded = sum(r["answer_tokens"] - 1 for r in requests)
    result = {
        "requests": requests, "took_s": took_s, "prompt_tokens": prompt_tokens,
        "computed_prompt_tokens": client.scheduled_tokens - decoded,
        "kvd": {name: after[name] - before[name] for name in after},
    }  # fmt: skip
    if given["socket"]:
        result["bytes_per_token"] = engine.connectors[0].scheduler.identity.bytes_per_token
    engine.close()
    return result


class Client:
    """Sends turns and steps the engine; times are those of the step that brought a token."""

    def __init__(self, engine: Any, given: dict[str, Any]) -> None:
        from vllm import SamplingParams

        self.core = engine.llm.llm_engine
        self.given = given
        self.sampling = SamplingParams(
            temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True, detokenize=False
        )
        self.live: dict[str, tuple[Conversation, dict[str, Any]]] = {}
        self.scheduled_tokens = 0
        scheduler = self.core.engine_core.engine_core.scheduler
        schedule = scheduler.schedule

        def counted(*args: Any, **named: Any) -> Any:
            output = schedule(*args, **named)
            self.scheduled_tokens += sum(output.num_scheduled_tokens.values())
            return output

        scheduler.schedule = counted

    def converse(self) -> list[dict[str, Any]]:
        """All conversations; turns are taken in the order in which clients come free."""
        waiting = [Conversation(n) for n in range(self.given["conversations"])]
        done: list[dict[str, Any]] = []
        while waiting or self.live:
            while waiting and len(self.live) < self.given["clients"]:
                self._send(waiting.pop(0))
            for output in self.core.step():
                ended = self._received(output)
                if ended is None:
                    continue
                conversation, record = ended
                done.append(record)
                if conversation.turn < self.given["turns"]:
                    waiting.append(conversation)
        return done

    def _send(self, conversation: Conversation) -> None:
        prompt = conversation.prompt()
        name = f"{conversation.number}-{conversation.turn}"
        inputs: dict[str, Any] = {"prompt_token_ids": prompt}
        if self.given["variant"] == "cold":
            inputs["cache_salt"] = f"{name}-{os.getpid()}"
        record = {"name": name, "prompt_tokens": len(prompt), "sent_s": time.perf_counter(), "token_s": []}
        self.live[name] = conversation, record
        self.core.add_request(name, inputs, self.sampling)

    def _received(self, output: Any) -> tuple[Conversation, dict[str, Any]] | None:
        now_s = time.perf_counter()
        # Names are the engine's own from a certain place on: the client's is what it begins with.
        name = next(n for n in self.live if output.request_id == n or output.request_id.startswith(n + "-"))
        conversation, record = self.live[name]
        tokens = list(output.outputs[0].token_ids)
        record["token_s"] += [now_s] * (len(tokens) - len(record["token_s"]))
        if not output.finished:
            return None
        del self.live[name]
        conversation.tokens = conversation.tokens + tokens
        record |= {"answer_tokens": len(tokens), "cached_tokens": output.num_cached_tokens or 0}
        return conversation, record


# -- what it means ------------------------------------------------------------------------------------------


def summary(result: dict[str, Any], ttft_max_s: float, tpot_max_s: float) -> dict[str, Any]:
    """The figures of one variant; docs/performance.md defines each."""
    ttft, itl, tpot, e2e, good = [], [], [], [], 0
    for request in result["requests"]:
        times = request["token_s"]
        ttft.append(times[0] - request["sent_s"])
        itl += [b - a for a, b in itertools.pairwise(times)]
        # Of an answer of one token there is no time per output token: it is good by its first token alone.
        own_tpot = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None
        tpot += [own_tpot] if own_tpot is not None else []
        e2e.append(times[-1] - request["sent_s"])
        good += ttft[-1] <= ttft_max_s and (own_tpot is None or own_tpot <= tpot_max_s)
    kvd, prompt_tokens, count = result["kvd"], result["prompt_tokens"], len(result["requests"])
    needed_bytes = prompt_tokens * result.get("bytes_per_token", 0)
    return {
        "requests": count,
        **{f"{name}_{q}_s": quantile(values, p) if values else None for name, values in
           (("ttft", ttft), ("itl", itl), ("tpot", tpot), ("e2e", e2e)) for q, p in (("p50", 0.5), ("p95", 0.95))},
        "ttft_mean_s": statistics.fmean(ttft),
        "goodput_per_s": good / result["took_s"],
        "good_share": good / count,
        "host_s_per_good": result["took_s"] / good if good else None,
        "hit_rate_requests": kvd.get("loads", 0) / count,
        "hit_rate_tokens": kvd.get("hit_tokens", 0) / prompt_tokens,
        "hit_rate_bytes": kvd.get("loaded_bytes", 0) / needed_bytes if needed_bytes else 0.0,
        "prompt_tokens": prompt_tokens,
        "skipped_tokens": prompt_tokens - result["computed_prompt_tokens"],
        "took_s": result["took_s"],
        "failures": kvd.get("load_failures", 0) + kvd.get("hook_errors", 0),
    }  # fmt: skip


ROWS = (
    ("ttft_p50_s", "TTFT p50, s"), ("ttft_p95_s", "TTFT p95, s"), ("itl_p50_s", "ITL p50, s"),
    ("itl_p95_s", "ITL p95, s"),
    ("tpot_p50_s", "TPOT p50, s"), ("e2e_p50_s", "E2E p50, s"), ("e2e_p95_s", "E2E p95, s"),
    ("goodput_per_s", "goodput, requests/s"), ("good_share", "within the limit"),
    ("host_s_per_good", "host-seconds a good one"),
    ("hit_rate_requests", "kvd hits, by request"), ("hit_rate_tokens", "kvd hits, by token"),
    ("hit_rate_bytes", "kvd hits, by byte"), ("prompt_tokens", "prompt tokens"),
    ("skipped_tokens", "of them not computed"), ("took_s", "all took, s"), ("failures", "failures"),
)  # fmt: skip


def _cell(value: float | None) -> str:
    """'-' for what is not defined."""
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.3f}"


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """One column a variant."""
    lines = [f"{'':24}" + "".join(f"{name:>10}" for name in summaries)]
    for key, title in ROWS:
        values = [one[key] for one in summaries.values()]
        lines.append(f"{title:24}" + "".join(f"{_cell(v):>10}" for v in values))
    return "\n".join(lines)


# -- all of them --------------------------------------------------------------------------------------------


def measure(model: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Every variant in turn."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvd-turns-") as folder, Daemon(Path(folder)) as daemon:
        sockets = {"kvd": daemon.socket, "restart": daemon.socket, "cold": daemon.socket,
                   "down": f"{folder}/nobody.sock"}  # fmt: skip
        for variant in VARIANTS:
            arguments = {**given, "variant": variant, "socket": sockets.get(variant), "model": str(model)}
            with (ROOT / "build" / f"bench-engines-vllm-turns-{variant}.log").open("wb") as log:
                done = subprocess.run(
                    [sys.executable, __file__, "--variant", json.dumps(arguments)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, timeout=600, text=True,
                )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            if not lines:
                raise SystemExit(f"{variant} ended without a result, exit code {done.returncode}: {log.name}")
            found[variant] = json.loads(lines[-1][len("RESULT ") :])
            print(f"{variant}: {found[variant]['took_s']:.1f} s", flush=True)
    return found


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--ttft-max", type=float, default=2.0, help="seconds; the limit of goodput")
    parser.add_argument("--tpot-max", type=float, default=0.2, help="seconds a token; the limit of goodput")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "models" / "smollm2-135m")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench-engines-vllm-turns.json")
    given = parser.parse_args()
    if given.variant:
        print("RESULT " + json.dumps(run_variant(json.loads(given.variant))), flush=True)
        os._exit(0)  # engines leave threads behind that do not end by themselves
    if not (given.model / "config.json").exists():
        print(f"no checkpoint at {given.model}: make demo makes it")
        return 2
    shape = {"conversations": given.conversations, "turns": given.turns, "clients": given.clients}
    found = measure(given.model, shape)
    summaries = {name: summary(result, given.ttft_max, given.tpot_max) for name, result in found.items()}
    limit = {"ttft_max_s": given.ttft_max, "tpot_max_s": given.tpot_max}
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(
        json.dumps({"shape": shape, "limit": limit, "variants": summaries, "raw": found}, indent=1)
    )
    print(f"{shape}, limit of goodput: TTFT {given.ttft_max} s and TPOT {given.tpot_max} s")
    print(table(summaries))
    limited = summaries["limited"]
    helped = all(
        summaries[name]["skipped_tokens"] > limited["skipped_tokens"]
        and summaries[name]["ttft_mean_s"] < limited["ttft_mean_s"]
        for name in ("kvd", "restart")
    )
    failures = sum(one["failures"] for one in summaries.values())
    if not helped or failures:
        print(f"kvd did not help, or failed: {failures} failures")
    return int(not helped or failures > 0)


if __name__ == "__main__":
    sys.exit(main())
