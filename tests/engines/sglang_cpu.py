"""SGLang on a machine without a GPU, for tests: kvd's backend with page copies that need no CUDA, and one engine run.

As a module in SGLang's own process it is the storage backend `CpuKvdHiCache`. As a program, `sglang_cpu.py MODEL JSON`
starts an engine and answers orders, a line each (`main`).
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from kvd.engines.sglang import KvdHiCache


def copies_without_cuda() -> None:
    """The wheel's copies between device pool and host pool are CUDA kernels; these do the same by indexing."""
    import sglang.srt.mem_cache.pool_host.mha as pool

    def layer_first(
        src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
    ) -> None:
        for source, target in zip(src_layers, dst_layers, strict=True):
            target[dst_indices] = source[src_indices].view_as(target[dst_indices])

    def to_pages(src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int) -> None:
        layers, page, slot = len(src_ptrs) // 2, dst_indices // page_size, dst_indices % page_size
        for side, target in enumerate(dst_ptrs):
            for layer in range(layers):
                target[page, layer, slot] = src_ptrs[side * layers + layer][src_indices]

    def from_pages(
        src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
    ) -> None:
        page, slot = src_indices // page_size, src_indices % page_size
        for source, target in zip(src_ptrs, dst_ptrs, strict=True):
            target[dst_indices] = source[page, layer_id, slot]

    pool.transfer_kv_direct = layer_first
    pool.transfer_kv_all_layer_direct_lf_pf = to_pages
    pool.transfer_kv_per_layer_direct_pf_lf = from_pages


def small_reserve() -> None:
    """SGLang wants 10 GiB of the host's memory to stay free; a machine that runs tests may not have that much."""
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


class CpuKvdHiCache(KvdHiCache):
    """kvd's backend where there is no CUDA; keeps its counters in a file, for the test to read."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        copies_without_cuda()
        super().__init__(storage_config, kwargs)

    def _tell(self) -> None:
        path = os.environ["KVD_TEST_COUNTERS"]
        with open(f"{path}.{threading.get_ident()}", "w", encoding="utf-8") as file:
            json.dump(self.counters.totals(), file)
        os.replace(file.name, path)


def _telling(name: str) -> None:
    hook = getattr(KvdHiCache, name)

    def told(self: CpuKvdHiCache, *given: Any, **named: Any) -> Any:
        try:
            return hook(self, *given, **named)
        finally:
            self._tell()

    setattr(CpuKvdHiCache, name, told)


for _name in (
    "batch_exists",
    "batch_get_v1",
    "batch_set_v1",
    "batch_exists_v2",
    "batch_get_v2",
    "batch_set_v2",
):
    _telling(_name)


def started(model: str, job: dict[str, Any]) -> Any:
    """An engine: plain, or with kvd behind a hierarchical cache."""
    import sglang
    import torch

    torch.set_num_threads(2)
    backend = {
        "backend_name": "kvd", "module_path": "sglang_cpu", "class_name": "CpuKvdHiCache", "interface_v1": 1,
        "socket": job["socket"], **job.get("extra", {}),
    }  # fmt: skip
    hicache = {} if job.get("plain") else {
        "enable_hierarchical_cache": True, "hicache_ratio": 2.0, "hicache_write_policy": "write_through",
        "hicache_mem_layout": job["layout"], "hicache_io_backend": "direct", "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend_extra_config": json.dumps(backend),
    }  # fmt: skip
    return sglang.Engine(
        model_path=model, device="cpu", dtype="float32", attention_backend="torch_native", page_size=64,
        disable_overlap_schedule=True, skip_server_warmup=True, mem_fraction_static=0.3, max_total_tokens=8192,
        log_level="warning", sampling_backend="pytorch", grammar_backend="none", disable_cuda_graph=True,
        skip_tokenizer_init=True, **hicache, **job.get("options", {}),
    )  # fmt: skip


def main() -> None:
    """One engine, until the end of the standard input.

    A line of it is an order: {"prompt": ids, "tokens": n, "flush": whether the engine is to forget all it has itself};
    each is answered by a line `RESULT {"tokens": ids, "cached": n}`, and the engine's start by `RESULT {}`.
    """
    engine = started(sys.argv[1], json.loads(sys.argv[2]))
    print("RESULT {}", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order.get("flush"):
            forget(engine)
        sampling = {"temperature": 0, "max_new_tokens": order.get("tokens", 8), "ignore_eos": True}
        out = engine.generate(input_ids=order["prompt"], sampling_params=sampling)
        told = {"tokens": out["output_ids"], "cached": out["meta_info"]["cached_tokens"]}
        print("RESULT " + json.dumps(told), flush=True)
    engine.shutdown()


def forget(engine: Any) -> None:
    """SGLang refuses while it is still storing behind its last answer: asked until it has done it."""
    import time

    end = time.monotonic() + 60
    while not getattr(engine.flush_cache(), "success", True):
        if time.monotonic() > end:
            raise TimeoutError("the engine does not flush its cache")
        time.sleep(0.1)


if __name__ == "__mp_main__":  # SGLang's own processes, which import this file again
    small_reserve()
if __name__ == "__main__":
    main()
