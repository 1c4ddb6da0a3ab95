"""SGLang with kvd behind its HiCache: a second run of this program reuses what the first one computed.

    kvd serve &
    python examples/sglang_hicache.py MODEL
    python examples/sglang_hicache.py MODEL          # again: "from kvd" is not 0 any more

Needs SGLang (0.5.23 is tested) and its kernels. The same settings as flags of `sglang.launch_server`:
--enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{...}'.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

PROMPT = "You are a patient librarian. Here is the catalogue.\n" + "\n".join(
    f"Shelf {n}: volumes {7 * n} to {7 * n + 6}, on subject number {n * n % 97}." for n in range(120)
)


def main() -> int:
    """One prompt, one answer, and how much of the prompt was in a cache."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder with a checkpoint, or a name on the hub")
    parser.add_argument("--socket", help="of the daemon; default: KVD_SOCKET, else /run/kvd/kvd.sock")
    parser.add_argument("--salt", default="", help="a secret that keeps these pages apart")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="more options of sglang.Engine, as JSON"
    )
    parser.add_argument("--backend", type=json.loads, default={}, help="more of the extra config, as JSON")
    options = parser.parse_args()
    import sglang

    backend = {
        "backend_name": "kvd", "module_path": "kvd.engines.sglang", "class_name": "KvdHiCache", "interface_v1": 1,
        "salt": options.salt, **options.backend,
    }  # fmt: skip
    if options.socket:
        backend["socket"] = options.socket
    settings = {
        "model_path": options.model,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_through",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(backend),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    engine = sglang.Engine(**settings, **options.engine)
    begin = time.perf_counter()
    answer = engine.generate(PROMPT, sampling_params={"temperature": 0, "max_new_tokens": 32})
    took_s, meta = time.perf_counter() - begin, answer["meta_info"]
    print(answer["text"])
    print(f"{took_s:.2f} s, {meta['cached_tokens']} of {meta['prompt_tokens']} prompt tokens from kvd")
    time.sleep(options.linger_s)  # it stores behind its answers, and ends without finishing that
    engine.shutdown()
    return 0


if __name__ == "__main__":  # SGLang starts processes that import this file again
    sys.exit(main())
