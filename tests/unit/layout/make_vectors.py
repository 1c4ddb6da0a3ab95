"""Writes the golden vectors of identity. They were written once; a difference is a broken release, not a new vector.

    python tests/unit/layout/make_vectors.py [FOLDER]

The vectors are read by test_layout_vectors.py and by the tests of the native hasher. Formats:

encoding.json  [{name, value (as Python text), hex}]
manifest.json  [{name, arguments, hex, root}]
chain.json     chains:  [{name, algorithm, namespace_root, chunk_tokens, root, tokens | token_rule, extras, identities}]
               engine:  [{root, engine_hashes, identities}]
               seeds:   [{identity, member, seed}]
token_rule {count, multiply, add, modulo}: token i = (i * multiply + add) mod modulo. Bytes are hex, a seed is decimal.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import xxhash

from kvd.layout import chain, encoding
from kvd.layout.encoding import FIXED
from kvd.layout.manifest import Manifest

HASHES = {
    chain.SHA256: chain.sha256,
    chain.XXH3_128: chain.xxh3_128(lambda message, seed: xxhash.xxh3_128_digest(message, seed=seed)),
}

VALUES: dict[str, object] = {
    "none": None,
    "fixed": FIXED,
    "booleans": [True, False],
    "integers": [0, 1, -1, 255, -256, 2**63, -(2**80)],
    "whole floats are integers": [10000.0, -0.0, 1e15],
    "floats": [0.1, -2.5, 1e300, float("inf"), 2.0**53],
    "text": ["", "a", "é", "e\u0301", "名", "\u0000"],
    "bytes": b"\x00\xff",
    "nesting": {"b": [1, [2, []]], "a": {"é": None, "z": {}}, "aa": "x"},
}

MANIFESTS: dict[str, dict[str, Any]] = {
    "least": {"model": "m", "revision": "r1", "dtype": "bfloat16", "tenant": "", "salt": "", "fixed": "*"},
    "full": {
        "model": "meta-llama/Meta-Llama-3.1-8B",
        "revision": "d04e592bb4f6aa9cfee91e2e20afa771667e1d4b",
        "dtype": "bfloat16",
        "architecture": "LlamaForCausalLM",
        "tokenizer": "llama-3@1",
        "chat_template": "none",
        "adapter": "none",
        "position": {"rope_theta": 500000.0, "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}},
        "attention": {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32},
        "multimodal": "none",
        "quantisation": "none",
        "sharing_group": "",
        "tenant": "acme",
        "salt": "pepper",
        "extra": {"kernel": "flash"},
    },
    "one field fixed": {
        "model": "m", "revision": "r1", "dtype": "float16", "tenant": "t", "salt": "s", "adapter": "style@3",
        "fixed": "*",
    },
}  # fmt: skip

LARGE = {"count": 32768, "multiply": 2654435761, "add": 12345, "modulo": 2**32}


def tokens_of(case: dict[str, Any]) -> list[int]:
    """The tokens of a chain case."""
    if "tokens" in case:
        return list(case["tokens"])
    rule = case["token_rule"]
    return [(i * rule["multiply"] + rule["add"]) % rule["modulo"] for i in range(rule["count"])]


def _chains() -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [
        {"name": "empty", "chunk_tokens": 4, "tokens": []},
        {"name": "partial tail", "chunk_tokens": 4, "tokens": [1, 2, 3, 4, 5, 6, 7]},
        {"name": "one token a chunk", "chunk_tokens": 1, "tokens": [0, 2**32 - 1]},
        {
            "name": "extras",
            "chunk_tokens": 2,
            "tokens": [9, 8, 7, 6, 5, 4],
            "extras": {"1": b"image:1".hex()},
        },
        {"name": "same tokens, no extras", "chunk_tokens": 2, "tokens": [9, 8, 7, 6, 5, 4]},
        {"name": "32k in chunks of 256", "chunk_tokens": 256, "token_rule": LARGE},
        {"name": "odd chunk", "chunk_tokens": 37, "token_rule": {**LARGE, "count": 1000}},
    ]
    result = []
    for algorithm, hash32 in HASHES.items():
        for case in cases:
            namespace_root = hashlib.sha256(case["name"].encode()).digest()
            root = chain.chain_root(namespace_root, case["chunk_tokens"], algorithm)
            extras = {int(n): bytes.fromhex(extra) for n, extra in case.get("extras", {}).items()}
            identities = chain.chain(root, tokens_of(case), case["chunk_tokens"], extras, hash32)
            result.append({
                **case, "extras": case.get("extras", {}), "algorithm": algorithm,
                "namespace_root": namespace_root.hex(), "root": root.hex(),
                "identities": [identity.hex() for identity in identities],
            })  # fmt: skip
    return result


def vectors() -> dict[str, Any]:
    """All vectors, by file name."""
    root = chain.chain_root(hashlib.sha256(b"engine").digest(), 16)
    hashes = [hashlib.sha256(bytes([n])).digest()[: 8 + 8 * n] for n in range(4)]
    manifests = {name: Manifest(**arguments) for name, arguments in MANIFESTS.items()}
    seeds = [(hashlib.sha256(bytes([n])).digest(), n) for n in (0, 1, 7, 127)]
    return {
        "encoding.json": [
            {"name": name, "value": repr(value), "hex": encoding.encode(value).hex()}
            for name, value in VALUES.items()
        ],
        "manifest.json": [
            {"name": name, "arguments": MANIFESTS[name], "hex": m.encode().hex(), "root": m.root.hex()}
            for name, m in manifests.items()
        ],
        "chain.json": {
            "chains": _chains(),
            "engine": [{
                "root": root.hex(), "engine_hashes": [h.hex() for h in hashes],
                "identities": [h.hex() for h in chain.chain_from_hashes(root, hashes)],
            }],
            "seeds": [
                {"identity": identity.hex(), "member": member, "seed": str(chain.checksum_seed(identity, member))}
                for identity, member in seeds
            ],
        },
    }  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "vectors"
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in vectors().items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
