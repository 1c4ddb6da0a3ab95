"""Golden vectors of identity (row E1 of the faults): the same bytes in every process, hash seed and release.

Fails if a hash of a set or dict, a locale or an id leaks into an identity: the vectors are recomputed in fresh
processes under different hash seeds, and the chain once more by hand, straight from its formula.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import xxhash
from make_vectors import HASHES, LARGE, VALUES, tokens_of, vectors

from kvd.layout import chain, encoding
from kvd.layout.manifest import Manifest

FOLDER = Path(__file__).parent / "vectors"


def stored(name: str) -> Any:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["encoding.json", "manifest.json", "chain.json"])
def test_vectors_are_as_they_were_written(name: str) -> None:
    assert json.loads(json.dumps(vectors()[name])) == stored(name)


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1", "4242", "random"])
def test_fresh_processes_with_other_hash_seeds_agree(seed: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    script = Path(__file__).parent / "make_vectors.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, env=environment, timeout=60)
    for file in FOLDER.glob("*.json"):
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_chain_vectors_follow_from_the_formula_alone() -> None:
    for case in stored("chain.json")["chains"]:
        chunk = case["chunk_tokens"]
        parent = hashlib.sha256(
            b"kvd-chain-v1\x00" + bytes.fromhex(case["namespace_root"]) + struct.pack("<I", chunk)
            + case["algorithm"].encode()
        ).digest()  # fmt: skip
        assert parent.hex() == case["root"]
        tokens = tokens_of(case)
        found = []
        for number in range(len(tokens) // chunk):
            extra = bytes.fromhex(case["extras"].get(str(number), ""))
            part = tokens[number * chunk : (number + 1) * chunk]
            message = (
                parent + struct.pack(f"<I{chunk}I", chunk, *part) + struct.pack("<I", len(extra)) + extra
            )
            if case["algorithm"] == "sha256":
                parent = hashlib.sha256(message).digest()
            else:
                parent = b"".join(
                    xxhash.xxh3_128_intdigest(message, seed=seed).to_bytes(16, "big") for seed in (0, 1)
                )
            found.append(parent.hex())
        assert found == case["identities"], case["name"]


def test_engine_hashes_and_seeds_follow_from_the_formula_alone() -> None:
    content = stored("chain.json")
    for case in content["engine"]:
        parent = bytes.fromhex(case["root"])
        for engine_hash, identity in zip(case["engine_hashes"], case["identities"], strict=True):
            raw = bytes.fromhex(engine_hash)
            parent = hashlib.sha256(b"kvd-ext-v1\x00" + parent + struct.pack("<I", len(raw)) + raw).digest()
            assert parent.hex() == identity
    for case in content["seeds"]:
        digest = hashlib.sha256(
            b"kvd-seed-v1\x00" + bytes.fromhex(case["identity"]) + struct.pack("<H", case["member"])
        ).digest()
        assert struct.unpack("<Q", digest[:8])[0] == int(case["seed"])


def test_manifests_decode_to_themselves() -> None:
    for case in stored("manifest.json"):
        manifest = Manifest.decode(bytes.fromhex(case["hex"]))
        assert manifest == Manifest(**case["arguments"])
        assert manifest.root.hex() == case["root"]
        body = bytes.fromhex(case["hex"])
        assert hashlib.sha256(b"kvd-manifest-v1\x00" + body).hexdigest() == case["root"]


def test_encodings_decode_to_equal_values() -> None:
    for case in stored("encoding.json"):
        decoded = encoding.decode(bytes.fromhex(case["hex"]))
        assert decoded == VALUES[case["name"]]
        assert encoding.encode(decoded).hex() == case["hex"]


def test_large_chain_is_the_same_in_pieces() -> None:
    tokens = tokens_of({"token_rule": LARGE})[:5000]
    root = chain.chain_root(bytes(32), 256)
    for hash32 in HASHES.values():
        builder = chain.ChainBuilder(root, 256, hash32)
        at = 0
        for size in (1, 255, 256, 257, 1000, 3231):
            builder.extend(tokens[at : at + size])
            at += size
        assert at == len(tokens) == builder.tokens_count
        assert builder.identities == chain.chain(root, tokens, 256, hash32=hash32)
