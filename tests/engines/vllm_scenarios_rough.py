"""Scenarios with the real vLLM in rough company: other engines, dead ones, poisoned blocks, a daemon that stops.

As vllm_scenarios.py, whose helpers they use: `python vllm_scenarios_rough.py NAME '{"socket": ..., ...}'`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import vllm_lib as lib
from vllm_lib import Engine, prompt_of, say
from vllm_scenarios import TOKENS, ask, engine_of

GARBAGE = 7.0  # no NaN: vLLM's CPU kernel multiplies masked rows by 0


def side_by_side(given: dict[str, Any]) -> dict[str, Any]:
    """One of several engines that run at the same time on the same prompts, each in an order of its own."""
    engine = engine_of(given)
    prompts = [prompt_of(700 + 40 * n, 50 + n) for n in range(8)]
    alone = [engine.run(prompt, TOKENS, cache_salt=f"alone-{given['number']}") for prompt in prompts]
    order = random.Random(given["number"]).sample(range(len(prompts)), len(prompts))
    ask("meet")
    runs = []
    for _ in range(3):
        engine.reset()
        for n in order:
            runs.append((n, engine.run(prompts[n], TOKENS)["tokens"] == alone[n]["tokens"]))
    ask("part")  # nobody leaves while others still load what it stored
    counters = engine.counters()
    engine.close()
    return {"alone": [r["tokens"] for r in alone], "equal": runs, "counters": counters}


def killed(given: dict[str, Any]) -> dict[str, Any]:
    """Killed while it holds leases and copies: half a load is done."""
    engine = engine_of(given)
    prompt = prompt_of(2000)
    result = {"cold": engine.run(prompt, TOKENS), "counters": engine.counters()}
    engine.reset()
    say(result)
    worker = engine.connectors[1].worker

    def deadly(*_: Any) -> int:
        ask("die")
        raise SystemExit("still alive")

    worker.copy_in = deadly
    engine.run(prompt, TOKENS)
    raise SystemExit("nothing was loaded")


def _poison_what_is_freed(engine: Engine) -> Callable[[], int]:
    """Fill every block with garbage the moment the engine frees it; says how many it were."""
    worker = engine.connectors[1].worker
    pool = engine.llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    free_blocks, count = pool.free_blocks, 0

    def poisoned(blocks: Any) -> None:
        nonlocal count
        blocks = list(blocks)
        free_blocks(blocks)
        free = [block for block in blocks if block.ref_cnt == 0 and not block.is_null]
        for block in free:
            pool._maybe_evict_cached_block(block)  # else the engine itself would hit the garbage
        ids = worker._tensor_blocks([block.block_id for block in free])
        for tensors in worker._tensors:
            for tensor in tensors:
                tensor[list(ids)] = GARBAGE
        count += len(free)

    pool.free_blocks = poisoned
    return lambda: count


def _let_room_come_late(engine: Engine, rng: random.Random) -> None:
    """Some reservations are answered only a few steps later: then a save waits, and its blocks may be gone."""
    worker = engine.connectors[1].worker
    reserve, begin = worker._reserve, worker.begin
    waiting: list[tuple[Any, Any]] = []

    def late(caches: Any, job: Any) -> None:
        if rng.random() < 0.7:
            waiting.append((caches, job))
        else:
            reserve(caches, job)

    def beginning(plan: Any) -> None:
        begin(plan)
        worker._stores.flush(10)
        while waiting and rng.random() < 0.3:
            reserve(*waiting.pop(0))

    worker._reserve, worker.begin = late, beginning


def poisoned(given: dict[str, Any]) -> dict[str, Any]:
    """More requests than blocks, some aborted, late reservations, and every block that is freed is garbage at once."""
    from vllm import SamplingParams

    engine = engine_of(given)
    prompts = [prompt_of(500 + 37 * n, n + 1) for n in range(8)]
    reference = [engine.run(prompt, 24, cache_salt="reference") for prompt in prompts]
    rng = random.Random(given["random_seed"])
    freed = _poison_what_is_freed(engine)
    _let_room_come_late(engine, rng)
    if given.get("forget_gone"):  # the omission that the test must notice
        worker = engine.connectors[1].worker
        begin = worker.begin

        def forgetful(plan: Any) -> None:
            plan.gone = []
            begin(plan)

        worker.begin = forgetful
    core = engine.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    preempted = aborted = 0
    for round_ in range(3):
        engine.reset()
        live = [f"chaos-{round_}-{n}" for n in range(len(prompts))]
        for name, prompt in zip(live, prompts, strict=True):
            core.add_request(name, {"prompt_token_ids": prompt, "cache_salt": "chaos"}, sampling)
        for _ in range(150):
            if not core.has_unfinished_requests():
                break
            core.step()
            preempted = max(preempted, max([r.num_preemptions for r in scheduler.requests.values()] or [0]))
            if live and rng.random() < given.get("abort_chance", 0.04):
                core.abort_request([live.pop(rng.randrange(len(live)))])
                aborted += 1
        core.abort_request(live)
        while core.has_unfinished_requests():
            core.step()
    before = engine.counters()
    checked = []
    for prompt in prompts:
        engine.reset()
        checked.append(engine.run(prompt, 24, cache_salt="chaos"))
    after = engine.counters()
    held = len(engine.connectors[0].scheduler._held)
    engine.close()
    return {
        "reference": reference, "checked": checked, "preempted": preempted, "aborted": aborted, "held": held,
        "freed": freed(), "hit": after["hit_tokens"] - before["hit_tokens"], "counters": after,
    }  # fmt: skip


def stopped_in_mid_request(given: dict[str, Any]) -> dict[str, Any]:
    """The daemon is stopped for ten seconds while requests are being computed, loaded and stored."""
    from vllm import SamplingParams

    engine = engine_of(given)
    known = prompt_of(2000)
    fresh = [prompt_of(800, 10 + n) for n in range(3)]
    result: dict[str, Any] = {"cold": engine.run(known, TOKENS)}
    result["fresh"] = [engine.run(prompt, 32, cache_salt="alone") for prompt in fresh]
    engine.counters()
    engine.reset()
    before = engine.counters()["loaded_bytes"]
    core, outputs, steps_s = engine.llm.llm_engine, {}, []

    def step() -> None:
        began = time.monotonic()
        for out in core.step():
            if out.finished:
                outputs[out.request_id] = list(out.outputs[0].token_ids)
        steps_s.append(time.monotonic() - began)

    def add(name: str, prompt: list[int], tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        core.add_request(name, {"prompt_token_ids": prompt}, sampling)

    add("fresh-0", fresh[0], 32)
    for _ in range(3):
        step()
    ask("stop")  # the first is in the middle of its answer
    until, loads = time.monotonic() + given["stopped_s"], 0
    add("fresh-1", fresh[1], 32)
    while time.monotonic() < until:
        if not core.has_unfinished_requests():
            engine.reset()
            add(f"known-{loads}", known, TOKENS)
            loads += 1
        step()
    add("fresh-2", fresh[2], 32)
    step()
    ask("cont")
    while core.has_unfinished_requests():
        step()
    result |= {"outputs": outputs, "loads": loads, "step_s_max": max(steps_s)}
    engine.counters()
    engine.reset()
    result["afterwards"] = engine.run(known, TOKENS)
    result["counters"] = engine.counters()
    result["bytes"] = result["counters"]["loaded_bytes"] - before
    engine.close()
    return result


if __name__ == "__main__":
    lib.settle_environment(in_process=json.loads(sys.argv[2]).get("in_process", True))
    say(globals()[sys.argv[1]](json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that do not end by themselves
