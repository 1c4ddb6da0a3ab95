"""The worker processes of the demo. `python -m demo_lib.worker JOB` with a `Job` as JSON; see `protocol`.

    checkpoint   makes the model, if it is not there
    writer       process A: runs the prompt cold, publishes its KV in kvd, leaves the reference results
    reader       process B: shares nothing with A but the daemon; finds the prefix in kvd and goes on

The reference is independent of kvd: A prefills the prefix into a cache, and runs the tail on that same live
cache. The bytes it publishes are taken from the cache as it is before the tail.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import MODEL_NAME, ensure, find_gguf

import kvd
from demo_lib.engine import ChunkShape, Engine, pack, unpack
from demo_lib.protocol import Job, Speaker, own_stdout, sha256_of

CONNECT_DEADLINE_S = 10.0


def checkpoint(job: Job, say: Speaker) -> dict[str, object]:
    """Make the checkpoint; the result names its revision."""
    source = ensure(Path(job.checkpoint), say.step)
    return {"revision": source.revision}


def writer(job: Job, say: Speaker) -> dict[str, object]:
    """Process A: what the prompt costs without kvd, then its KV into kvd, then the reference."""
    say.step("A: loading the model (float32) and warming up")
    engine = Engine.load(Path(job.checkpoint))
    prompt = engine.prompt()
    shape = engine.chunk_shape(job.chunk_tokens)
    chunks = reusable_chunks(len(prompt), job.chunk_tokens)
    prefix, tail = prompt[: chunks * job.chunk_tokens], prompt[chunks * job.chunk_tokens :]

    cold_s, cold_cpu_s, cold_tokens = run_cold(job, say, engine, prompt)

    say.step(f"A: prefilling the first {len(prefix)} tokens once more, to publish them")
    cache = engine.new_cache()
    engine.forward(prefix, cache)
    published = publish(job, say, prompt, chunks, lambda index: pack(cache, index, shape), shape)

    say.step(f"A: the other {len(tail)} tokens on the live cache, as the reference")
    reference = engine.forward(tail, cache, logits=0)
    digest = save_logits(Path(job.logits_file), reference)
    split_tokens = engine.greedy(reference, cache, job.generate)
    return {
        "threads": engine.threads,
        "prompt_tokens": len(prompt),
        "prompt_sha256": sha256_of(prompt.tobytes()),
        "tail_tokens": len(tail),
        "ttft_cold_s": cold_s,
        "ttft_cold_cpu_s": cold_cpu_s,
        "tokens_cold": cold_tokens,
        "tokens_live_split": split_tokens,
        "logits_sha256": digest,
        "logits_shape": list(reference.shape),
        "answer": engine.text(cold_tokens),
    } | published


def run_cold(
    job: Job, say: Speaker, engine: Engine, prompt: array[int]
) -> tuple[list[float], list[float], list[int]]:
    """Of each repeat with an empty cache: seconds to the first token, and processor seconds (of all threads) in them;
    the greedy tokens of the last.
    """
    took: list[float] = []
    cpu: list[float] = []
    firsts: list[int] = []
    tokens: list[int] = []
    for repeat in range(job.repeats):
        say.step(f"A: all {len(prompt)} tokens without kvd, run {repeat + 1} of {job.repeats}")
        begin, cpu_begin = time.perf_counter(), time.process_time()
        cache = engine.new_cache()
        logits = engine.forward(prompt, cache)
        firsts.append(int(logits[-1].argmax()))
        took.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - cpu_begin)
        say.note(f"first token after {took[-1]:.3f} s")
        if repeat == job.repeats - 1:
            say.step(f"A: generating {job.generate} tokens without kvd")
            tokens = engine.greedy(logits, cache, job.generate)
    if set(firsts) != {tokens[0]}:
        raise RuntimeError(
            f"equal runs gave different first tokens, {firsts}: this model is not deterministic here"
        )
    return took, cpu, tokens


def publish(
    job: Job,
    say: Speaker,
    prompt: array[int],
    chunks: int,
    packed: Callable[[int], torch.Tensor],
    shape: ChunkShape,
) -> dict[str, object]:
    """Put `chunks` chunks, given one by one by `packed`, into kvd; none of them may be there before."""
    say.step(f"A: publishing {chunks} chunks of {job.chunk_tokens} tokens")
    with kvd.connect(socket=job.socket, client="demo-a", deadline_s=CONNECT_DEADLINE_S) as store:
        namespace = store.namespace(manifest())
        chain = namespace.chain(prompt, chunk_tokens=job.chunk_tokens)
        before = namespace.match(chain)
        if before:
            raise RuntimeError(f"the daemon already had {before} chunks: the demo needs a fresh one")
        begin = time.perf_counter()
        with namespace.reserve(chain[:chunks], nbytes=shape.size_bytes, request="demo-a") as writes:
            for index, write in enumerate(writes):
                write.fill(packed(index).numpy())
            results = writes.publish()
        took = time.perf_counter() - begin
        if len(results) != chunks or set(results) != {kvd.Published.PUBLISHED}:
            raise RuntimeError(f"kvd did not publish all of {chunks} chunks: {results}")
        say.note(f"{chunks * shape.size_bytes / 2**20:.1f} MiB in {took * 1e3:.0f} ms")
        return {
            "chunks_published": chunks,
            "chunk_bytes": shape.size_bytes,
            "chunk_shape": list(shape.dims),
            "chunk_sha256": [tensor_sha256(packed(index)) for index in range(chunks)],
            "publish_s": took,
            "writer_stats": dict(store.stats()),
        }


@dataclass(slots=True)
class Reuse:
    """What the timed runs with kvd gave; `acquired_bytes` counts every lease of this process, in bytes."""

    ttft_s: list[float] = field(default_factory=list)
    match_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    first_tokens: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    acquired_bytes: int = 0
    hits: int = 0
    chain: Any = None


def reader(job: Job, say: Speaker) -> dict[str, object]:
    """Process B: finds the prefix in kvd and goes on from it; also a control whose bytes are spoiled."""
    say.step("B: a new process, loading the model and warming up")
    engine = Engine.load(Path(job.checkpoint))
    prompt = engine.prompt()
    shape = engine.chunk_shape(job.chunk_tokens)
    with kvd.connect(socket=job.socket, client="demo-b", deadline_s=CONNECT_DEADLINE_S) as store:
        namespace = store.namespace(manifest())
        reuse = run_with_kvd(job, say, engine, prompt, namespace)
        tail = prompt[reuse.hits * job.chunk_tokens :]

        say.step(f"B: all logits of the last {len(tail)} tokens, once right and once with a chunk zeroed")
        prefix = reuse.chain[: reuse.hits]
        cache, again = load(engine, namespace, prefix, shape, "demo-b-logits")
        chunk_sha256 = digests(namespace, prefix, shape)
        reuse.acquired_bytes += (again + len(chunk_sha256)) * shape.size_bytes
        spoiled = spoil(cache, engine, reuse.hits, shape)
        found = engine.forward(tail, cache, logits=0)
        control = engine.forward(tail, spoiled, logits=0) if spoiled is not None else found
        difference = float((control - found).abs().max())
        say.note(f"a zeroed chunk moves the logits by up to {difference:.2f}")
        stats = dict(store.stats())
    return {
        "threads": engine.threads,
        "prompt_tokens": len(prompt),
        "prompt_sha256": sha256_of(prompt.tobytes()),
        "chunks_reused": reuse.hits,
        "tokens_reused": reuse.hits * job.chunk_tokens,
        "acquired_bytes": reuse.acquired_bytes,
        "ttft_kvd_s": reuse.ttft_s,
        "match_s": reuse.match_s,
        "load_s": reuse.load_s,
        "first_tokens_kvd": reuse.first_tokens,
        "tokens_kvd": reuse.tokens,
        "chunk_sha256": chunk_sha256,
        "logits_sha256": save_logits(Path(job.logits_file), found),
        "logits_shape": list(found.shape),
        "control_sha256": sha256_of(logits_bytes(control)),
        "control_max_difference": difference,
        "reader_stats": stats,
        "answer": engine.text(reuse.tokens),
    }


def run_with_kvd(job: Job, say: Speaker, engine: Engine, prompt: array[int], namespace: Any) -> Reuse:
    """The prompt with kvd, from hashing to the first token, each repeat with leases of its own."""
    shape = engine.chunk_shape(job.chunk_tokens)
    reuse = Reuse()
    for repeat in range(job.repeats):
        say.step(f"B: the same prompt with kvd, run {repeat + 1} of {job.repeats}")
        begin = time.perf_counter()
        reuse.chain = namespace.chain(prompt, chunk_tokens=job.chunk_tokens)
        hits = namespace.match(reuse.chain[: reuse.chain.usable_chunks])
        matched = time.perf_counter()
        cache, reuse.hits = load(engine, namespace, reuse.chain[:hits], shape, f"demo-b-{repeat + 1}")
        loaded = time.perf_counter()
        logits = engine.forward(prompt[reuse.hits * job.chunk_tokens :], cache)
        reuse.first_tokens.append(int(logits[-1].argmax()))
        end = time.perf_counter()
        reuse.ttft_s.append(end - begin)
        reuse.match_s.append(matched - begin)
        reuse.load_s.append(loaded - matched)
        reuse.acquired_bytes += reuse.hits * shape.size_bytes
        say.note(f"first token after {end - begin:.3f} s, {reuse.hits * job.chunk_tokens} tokens reused")
        if repeat == job.repeats - 1:
            say.step(f"B: generating {job.generate} tokens after the prefix from kvd")
            reuse.tokens = engine.greedy(logits, cache, job.generate)
    return reuse


def load(engine: Engine, namespace: Any, chain: Any, shape: ChunkShape, request: str) -> tuple[Any, int]:
    """A model cache built from the leading chunks of `chain` that kvd has, and how many these were.

    The chunks are read where they lie in shared memory; the one copy made is the model's own cache.
    """
    cache = engine.new_cache()
    hits = with_chunks(namespace, chain, shape, request, lambda chunks: unpack(chunks, cache))
    return cache, hits


def digests(namespace: Any, chain: Any, shape: ChunkShape) -> list[str]:
    """The sha256 of each of the leading chunks of `chain`, as they lie in kvd.

    Stricter than any comparison of logits: a flipped low bit of one value can vanish in the model's rounding.
    """
    found: list[str] = []
    with_chunks(
        namespace, chain, shape, "demo-b-sha256", lambda chunks: found.extend(map(tensor_sha256, chunks))
    )
    return found


def with_chunks(
    namespace: Any, chain: Any, shape: ChunkShape, request: str, use: Callable[[list[torch.Tensor]], None]
) -> int:
    """Lease the leading chunks of `chain`, let `use` read them in place, give them back; how many they were.

    What was matched may be gone by now, so the number of leases counts. No tensor over the shared memory may
    outlive its lease: they exist only in the call of `use`.
    """
    with namespace.acquire(chain, request=request) as leases:
        if len(leases) > 0:
            use([lease.tensor(torch.float32, shape.dims) for lease in leases])
        return len(leases)


def spoil(cache: Any, engine: Engine, chunks: int, shape: ChunkShape) -> Any | None:
    """A copy of `cache` whose middle chunk is zeros (what a wrong read might give); None if there is no chunk."""
    if chunks == 0:
        return None
    private = [pack(cache, index, shape) for index in range(chunks)]
    private[chunks // 2].zero_()
    spoiled = engine.new_cache()
    unpack(private, spoiled)
    return spoiled


def reusable_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Full chunks that leave at least one token to compute: the last token's logits are not in any cache."""
    return (prompt_tokens - 1) // chunk_tokens


def manifest() -> Any:
    """What must agree before two processes may share KV: the weights, and how their KV is represented."""
    _, source = find_gguf()
    return kvd.Manifest(
        model=MODEL_NAME, revision=source.revision, dtype="float32", fixed="*", tenant="", salt=""
    )


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Of the tensor's bytes in C order, without a copy when it is contiguous."""
    return sha256_of(memoryview(tensor.contiguous().numpy()).cast("B"))


def logits_bytes(logits: torch.Tensor) -> bytes:
    data: bytes = logits.contiguous().numpy().tobytes()
    return data


def save_logits(path: Path, logits: torch.Tensor) -> str:
    """Leave the raw float32 values, row by row, for the parent to compare; their sha256."""
    data = logits_bytes(logits)
    path.write_bytes(data)
    return sha256_of(data)


ROLES: dict[str, Callable[[Job, Speaker], dict[str, object]]] = {
    "checkpoint": checkpoint,
    "writer": writer,
    "reader": reader,
}


def main() -> int:
    """Run the role that the job names; exit 0 after a result, 1 with the reason on standard error."""
    say = own_stdout()
    job = Job.from_json(sys.argv[1])
    say.result(ROLES[job.role](job, say))
    return 0


if __name__ == "__main__":
    sys.exit(main())
