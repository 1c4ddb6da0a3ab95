"""vLLM on kvd: run it twice, and the second process answers from what the first one stored.

    kvd serve &
    build/venv-vllm/bin/python examples/vllm_kvd.py build/models/smollm2-135m

Needs vLLM (make test-engines-vllm makes build/venv-vllm) and a checkpoint (make demo makes one). Works without a daemon
too: then nothing is found, and the engine computes. The same over HTTP:

    vllm serve build/models/smollm2-135m --kv-transfer-config '{"kv_connector": "KvdConnector",
      "kv_connector_module_path": "kvd.engines.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
"""

from __future__ import annotations

import argparse
import os
import time

QUESTION = "\n\nWhich of the rules above is about errors? Answer in one sentence."


def main() -> None:
    """Ask about a long text, twice in this process; whoever comes next finds it as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a checkpoint folder, or a name on a hub")
    parser.add_argument("--socket", help="of the daemon; default: KVD_SOCKET, else /run/kvd/kvd.sock")
    parser.add_argument("--text", default="docs/contracts.md", help="a file to ask about")
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    llm = LLM(
        given.model,
        dtype="float32",
        max_model_len=4096,
        enforce_eager=True,
        block_size=32,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvdConnector",
            kv_connector_module_path="kvd.engines.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": given.socket} if given.socket else {},
        ),
    )
    with open(given.text, encoding="utf-8") as file:
        prompt = file.read()[:7000] + QUESTION
    sampling = SamplingParams(temperature=0, max_tokens=32)
    for turn in ("first", "after the engine's own cache was dropped"):
        began = time.monotonic()
        answer = llm.generate([prompt], sampling, use_tqdm=False)[0]
        took = time.monotonic() - began
        known = f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids or [])} tokens were known"
        print(f"{turn}: {took:.2f} s, {known}: {answer.outputs[0].text.strip()!r}")
        llm.reset_prefix_cache()


if __name__ == "__main__":
    main()
