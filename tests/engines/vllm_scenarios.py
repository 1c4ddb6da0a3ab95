"""Scenarios with the real vLLM, each a process of its own: `python vllm_scenarios.py NAME '{"socket": ..., ...}'`.

A scenario prints `RESULT {...}`. What it wants done to the daemon meanwhile it asks the test for: `ASK kill`, and goes
on when a line comes back. What must hold is asserted by the test, from the results.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

import vllm_lib as lib
from vllm_lib import BLOCK, Engine, make_model, prompt_of, say

TOKENS = 8


def ask(what: str) -> None:
    """Have the test do something; returns when it is done."""
    print(f"ASK {what}", flush=True)
    if not sys.stdin.readline():
        raise SystemExit("the test is gone")


def engine_of(given: dict[str, Any], **options: Any) -> Engine:
    """The engine that a scenario's arguments describe."""
    Path(given["models"]).mkdir(parents=True, exist_ok=True)
    path = make_model(
        Path(given["models"]), given.get("kind", "llama"), given.get("seed", 0), **given.get("shape", {})
    )
    if link := given.get("model_link"):  # the same name, whatever the weights
        Path(link).unlink(missing_ok=True)
        Path(link).symlink_to(path)
        path = Path(link)
    engine = Engine(
        str(path), given.get("socket"), policy=given.get("policy", "recompute"), extra=given.get("extra"),
        **{**given.get("options", {}), **options},
    )  # fmt: skip
    if given.get("socket") and options.get("in_process", True) and Path(given["socket"]).exists():
        assert engine.ready()
    return engine


def spoil(engine: Engine) -> int:
    """Overwrite every object of the daemon's pool, through the worker's own mapping; how many there were."""
    worker = engine.connectors[1].worker
    store = worker.attachment.session.store
    rng = random.Random(7)
    count = 0
    keys: list[str] = []
    start: int | None = 0
    while start is not None:
        page = store.call("ls", start=start, limit=100)
        keys += [family["key"] for family in page["families"]]
        start = page["next"]
    for key in keys:
        for member in store.call("inspect", key=key)["members"]:
            view = store.native.writable(member["place"], member["size_bytes"])
            size = len(view.view)
            view.view[:] = b"".join(rng.randbytes(4)[:3] + b"\x3f" for _ in range(size // 4))  # floats near 1
            view.retire()
            count += 1
    return count


def cold_and_loaded(given: dict[str, Any]) -> dict[str, Any]:
    """Cold, the engine's own hit, loaded from kvd, loaded from spoiled bytes."""
    engine = engine_of(given)
    prompt = prompt_of(given.get("tokens", 2000))
    result: dict[str, Any] = {"cold": engine.run(prompt, TOKENS)}
    result["after_cold"] = engine.counters()
    result["local"] = engine.run(prompt, TOKENS)
    result["reset"] = engine.reset()
    result["loaded"] = engine.run(prompt, TOKENS)
    result["after_loaded"] = engine.counters()
    result["longer"] = engine.run(prompt + prompt_of(100, 5), TOKENS)
    if given.get("spoil", True):
        result["spoiled_objects"] = spoil(engine)
        engine.reset()
        result["spoiled"] = engine.run(prompt, TOKENS)
        result["after_spoiled"] = engine.counters()
    engine.close()
    return result


def one_run(given: dict[str, Any]) -> dict[str, Any]:
    """One prompt in a fresh process."""
    engine = engine_of(given, in_process=given.get("in_process", True))
    request = {"cache_salt": given["cache_salt"]} if "cache_salt" in given else {}
    result = {"run": engine.run(prompt_of(given.get("tokens", 2000)), TOKENS, **request)}
    if given.get("in_process", True) and given.get("socket"):
        result["counters"] = engine.counters()
        result["short"] = engine.connectors[0].scheduler.identity.manifest.short
    elif given.get("socket"):
        engine.run(prompt_of(20, 9), 2)  # steps without a block, which bring the counters of those before
        result["counters"] = engine.metrics()
    engine.close()
    return result


def loras(given: dict[str, Any]) -> dict[str, Any]:
    """One prompt with two LoRAs and with none; and another LoRA that took the place of the first on disk."""
    from vllm.lora.request import LoRARequest

    engine = engine_of(given, enable_lora=True, max_loras=2, max_lora_rank=8)
    model, folder = Path(engine.llm.model_config.model), Path(given["folder"])
    loras = {
        "none": None,
        "a": LoRARequest("a", 1, str(lib.make_lora(folder / "a", model, 1))),
        "b": LoRARequest("b", 2, str(lib.make_lora(folder / "b", model, 2))),
    }
    prompt, result = prompt_of(1000), {}

    def run(name: str, lora: Any) -> None:
        engine.reset()
        before = engine.counters()
        answer = engine.run(prompt, TOKENS, lora=lora)
        after = engine.counters()
        result[name] = {
            **answer,
            **{k: after[k] - before[k] for k in ("hit_tokens", "loaded_bytes", "saved_chunks")},
        }

    scheduler = engine.connectors[0].scheduler
    for lora in loras.values():
        until = time.monotonic() + 10
        while (
            scheduler._adapter(types.SimpleNamespace(lora_request=lora)) is None and time.monotonic() < until
        ):
            pass  # its weights are being looked at
    for round_ in ("cold", "again"):
        for name, lora in loras.items():
            run(f"{name} {round_}", lora)
    lib.make_lora(folder / "a", model, 3)
    replaced = LoRARequest("a", 3, str(folder / "a"))
    run("replaced", replaced)
    engine.close()
    return result


def salts(given: dict[str, Any]) -> dict[str, Any]:
    """The same prompt under several salts of its requests."""
    engine = engine_of(given)
    prompt, result = prompt_of(1000), {}
    for name, salt in (("first", "a"), ("other", "b"), ("none", None), ("again", "a")):
        engine.reset()
        before = engine.counters()["hit_tokens"]
        run = engine.run(prompt, TOKENS, **({"cache_salt": salt} if salt else {}))
        result[name] = {**run, "hit": engine.counters()["hit_tokens"] - before}
    engine.close()
    return result


def failing_loads(given: dict[str, Any]) -> dict[str, Any]:
    """Loads that fail at random; each prompt is loaded several times."""
    engine = engine_of(given)
    rng = random.Random(given["random_seed"])
    worker = engine.connectors[1].worker
    name = "_adopt" if (given.get("extra") or {}).get("load") == "layers" else "copy_in"
    copy_in, failures = getattr(worker, name), 0

    def unlucky(load: Any, generation: str) -> Any:
        nonlocal failures
        if rng.random() < 0.5:
            failures += 1
            for group in load.block_ids:  # garbage, but no NaN: vLLM's CPU kernel multiplies masked rows by 0
                for tensors in worker._tensors:
                    for tensor in tensors:
                        tensor[[block for block in group if block]] = 7.0
            raise RuntimeError("as the test wants it")
        return copy_in(load, generation)

    prompts = [prompt_of(600 + 100 * n, n) for n in range(4)]
    result: dict[str, Any] = {"cold": [engine.run(prompt, TOKENS) for prompt in prompts]}
    engine.counters()
    setattr(worker, name, unlucky)
    rounds = []
    for _ in range(3):
        engine.reset()
        rounds.append([engine.run(prompt, TOKENS) for prompt in prompts])
    engine.reset()
    rounds.append(engine.run_all(prompts, TOKENS))
    setattr(worker, name, copy_in)
    engine.reset()
    result |= {"rounds": rounds, "failures": failures, "after": [engine.run(p, TOKENS) for p in prompts]}
    result["counters"] = engine.counters()
    engine.close()
    return result


def chunked(given: dict[str, Any]) -> dict[str, Any]:
    """Prompts of many lengths with chunked prefill: stored, dropped locally, loaded."""
    engine = engine_of(given)
    # The first save of a process has its namespace made first; a short request on a busy machine may end before that.
    engine.run(prompt_of(BLOCK + 1, 0), TOKENS)
    engine.counters()
    result: dict[str, Any] = {"runs": []}
    for chunks in given["chunks"]:
        prompt = prompt_of(chunks * BLOCK + given.get("rest", 1), chunks)
        cold = engine.run(prompt, TOKENS)
        before = engine.counters()
        engine.reset()
        loaded = engine.run(prompt, TOKENS)
        after = engine.counters()
        result["runs"].append({
            "chunks": chunks, "cold": cold, "loaded": loaded, "bytes": after["loaded_bytes"] - before["loaded_bytes"],
            "hit": after["hit_tokens"] - before["hit_tokens"],
        })  # fmt: skip
        engine.reset()
    result["counters"] = engine.counters()
    engine.close()
    return result


def restarts(given: dict[str, Any]) -> dict[str, Any]:
    """The daemon is killed and comes back: before, between and in the middle of loads."""
    engine = engine_of(given)
    prompt = prompt_of(2000)
    result: dict[str, Any] = {"cold": engine.run(prompt, TOKENS)}
    engine.counters()
    for how in given["how"]:
        ask(how)  # the daemon is away now
        engine.reset()
        began = time.monotonic()
        away = engine.run(prompt, TOKENS)
        away_s = time.monotonic() - began
        ask("start")
        attached_s = _until_attached(engine)
        engine.reset()
        engine.run(prompt, TOKENS)  # tells the scheduler that the worker is there; stores again if need be
        engine.counters()
        engine.reset()
        before = engine.counters()["loaded_bytes"]
        loaded = engine.run(prompt, TOKENS)
        result[how] = {
            "away": away, "away_s": away_s, "attached_s": attached_s, "loaded": loaded,
            "bytes": engine.counters()["loaded_bytes"] - before,
        }  # fmt: skip
    worker = engine.connectors[1].worker
    copy_in = worker.copy_in

    def interrupted(load: Any, generation: str) -> int:
        worker.copy_in = copy_in
        ask("kill")  # after the promise, before the copy
        return int(copy_in(load, generation))

    worker.copy_in = interrupted
    engine.reset()
    result["during"] = engine.run(prompt, TOKENS)
    result["counters"] = engine.counters()
    engine.close()
    return result


def _until_attached(engine: Engine, limit_s: float = 20.0) -> float:
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        if engine.ready(0.05):
            return time.monotonic() - began
    return limit_s


def _times(engine: Engine, seed: int) -> list[float]:
    """How long each of four new prompts takes."""
    times = []
    for n in range(4):
        began = time.monotonic()
        engine.run(prompt_of(800, seed + n), TOKENS)
        times.append(time.monotonic() - began)
    return times


def stopped_daemon(given: dict[str, Any]) -> dict[str, Any]:
    """The daemon is stopped (SIGSTOP): new prompts and hits go on as if nothing were."""
    engine = engine_of(given)
    engine.run(prompt_of(800, 90), TOKENS)  # warm
    known = prompt_of(2000)
    result: dict[str, Any] = {"cold": engine.run(known, TOKENS)}
    engine.counters()
    result["running_s"] = _times(engine, 10)
    ask("stop")
    engine.reset()
    result["stopped_s"] = _times(engine, 20)
    result["loaded"] = engine.run(known, TOKENS)
    scheduler, worker = engine.connectors
    result["hook_us_max"] = max(scheduler.hook_ns) / 1e3
    ask("cont")
    worker.worker.flush(30)
    time.sleep(0)
    engine.reset()
    result["afterwards"] = engine.run(known, TOKENS)
    result["counters"] = engine.counters()
    engine.close()
    return result


def preemption(given: dict[str, Any]) -> dict[str, Any]:
    """More requests than blocks, some aborted half-way: what was stored meanwhile must be right."""
    from vllm import SamplingParams

    engine = engine_of(given)
    prompts = [prompt_of(500 + 37 * n, n + 1) for n in range(8)]
    reference = [engine.run(prompt, 24, cache_salt="reference") for prompt in prompts]
    core = engine.llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False)
    rng = random.Random(given["random_seed"])
    preempted = aborted = 0
    for round_ in range(2):
        engine.reset()
        for n, prompt in enumerate(prompts):
            core.add_request(
                f"chaos-{round_}-{n}", {"prompt_token_ids": prompt, "cache_salt": "chaos"}, sampling
            )
        scheduler = core.engine_core.engine_core.scheduler
        live = [f"chaos-{round_}-{n}" for n in range(len(prompts))]
        for _ in range(200):
            if not core.has_unfinished_requests():
                break
            core.step()
            preempted = max(preempted, max([r.num_preemptions for r in scheduler.requests.values()] or [0]))
            if live and rng.random() < 0.05:
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
        "hit": after["hit_tokens"] - before["hit_tokens"], "counters": after,
    }  # fmt: skip


def many_prompts(given: dict[str, Any]) -> dict[str, Any]:
    """More than the pool holds: everything stays right, nothing waits."""
    engine = engine_of(given)
    prompts = [prompt_of(1500, n) for n in range(given["count"])]
    cold = [engine.run(prompt, TOKENS) for prompt in prompts]
    engine.reset()
    again = [engine.run(prompt, TOKENS) for prompt in reversed(prompts)][::-1]
    counters = engine.counters()
    engine.close()
    return {"cold": cold, "again": again, "counters": counters}


def weights_changed(given: dict[str, Any]) -> dict[str, Any]:
    """The engine resets its connector, as it does after new weights: nothing of before is found."""
    engine = engine_of(given)
    prompt = prompt_of(1000)
    result: dict[str, Any] = {"cold": engine.run(prompt, TOKENS)}
    engine.counters()
    engine.llm.reset_prefix_cache(reset_connector=True)
    before = engine.counters()["hit_tokens"]
    result["after_reset"] = engine.run(prompt, TOKENS)
    result["hit_after_reset"] = engine.counters()["hit_tokens"] - before
    engine.reset()
    result["again"] = engine.run(prompt, TOKENS)
    result["hit_again"] = engine.counters()["hit_tokens"] - before
    engine.close()
    return result


def hook_that_raises(given: dict[str, Any]) -> dict[str, Any]:
    """Whatever goes wrong inside a hook, the engine goes on."""
    engine = engine_of(given)
    scheduler, worker = engine.connectors
    prompt = prompt_of(1000)
    result: dict[str, Any] = {"cold": engine.run(prompt, TOKENS)}
    engine.counters()

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("as the test wants it")

    runs = []
    for side, name in (
        (scheduler.scheduler, "match"), (scheduler.scheduler, "saves"), (scheduler.scheduler, "preempted"),
        (scheduler.scheduler, "reported"), (scheduler.scheduler, "_to_adopt"), (worker.worker, "begin"),
        (worker.worker, "save"), (worker.worker, "copy_in"), (worker.worker, "report"), (worker.worker, "_reserve"),
    ):  # fmt: skip
        kept = getattr(side, name)
        setattr(side, name, (lambda *_: (b"", b"")) if name == "_to_adopt" else broken)
        engine.reset()
        runs.append({"hook": name, **engine.run(prompt, TOKENS)})
        setattr(side, name, kept)
    engine.reset()
    result |= {"runs": runs, "after": engine.run(prompt, TOKENS), "counters": engine.counters()}
    engine.close()
    return result


if __name__ == "__main__":
    os.environ.update(json.loads(sys.argv[2]).get("environment", {}))
    lib.settle_environment(in_process=json.loads(sys.argv[2]).get("in_process", True))
    say(globals()[sys.argv[1]](json.loads(sys.argv[2])))
    sys.stdout.flush()
    os._exit(0)  # engines leave threads behind that do not end by themselves
