"""The geometry of real configs against vLLM's own arithmetic: every layer, every window, every state, and TP.

vLLM builds each model of `../shared/configs` without weights and is asked what its layers keep (vllm_specs.py). An
independent witness beside Transformers' caches: another code base, read by nobody who wrote the geometry. Where the two
differ on purpose the difference is named here, and must be exactly that one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllm_harness import MARKS

from kvd.errors import UsageError
from kvd.layout.geometry import Geometry, Rule
from kvd.layout.shards import Objects, Split

pytestmark = MARKS

HERE = Path(__file__).parent
CONFIGS = Path(__file__).parents[3] / "shared" / "configs"
FILES = sorted(CONFIGS.glob("*.json"))
NAMES = [path.stem for path in FILES] or ["none"]  # without the files one test says why it is skipped

RULE_OF = {
    "FullAttentionSpec": Rule.FULL, "MLAAttentionSpec": Rule.FULL, "SlidingWindowSpec": Rule.WINDOW,
    "ChunkedLocalAttentionSpec": Rule.CHUNKED, "MambaSpec": Rule.STATE,
}  # fmt: skip

# vLLM has no class for these any more, and no calculator either: what it says instead.
REFUSED = {"falcon-7b-refinedweb": "RWForCausalLM was supported in vLLM until"}

# Cohere's windows see `sliding_window` tokens before the present one in vLLM, one less in Transformers, whose rule the
# geometry of a config has. Bytes are the same; kvd under vLLM takes the window from vLLM.
WINDOW_MORE = {"command-a-partial": 1, "command-r7b-composed": 1}

# vLLM numbers some layers after another count (a shared block's use, all Mamba layers behind all attention).
NUMBERED_OTHERWISE = {"zamba2-2.7b-composed", "falcon-h1-0.5b"}


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """What vLLM says of all configs, asked in one process."""
    if not FILES:
        pytest.skip("no ../shared/configs beside this checkout: vLLM is not asked about real models")
    clean = {k: v for k, v in os.environ.items() if k != "KVD_SOCKET"}
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_specs.py"), *map(str, FILES)],
        env=clean, capture_output=True, text=True, timeout=540, check=False,
    )  # fmt: skip
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("SPECS ")]
    assert len(lines) == len(FILES), done.stdout[-2000:] + done.stderr[-2000:]
    return {line["file"]: line for line in lines}


def geometry_of(name: str) -> Geometry:
    """As vLLM keeps it in BF16: of a convolution over k tokens the last k - 1 inputs."""
    return Geometry.from_hf_config(str(CONFIGS / f"{name}.json"), dtype="bfloat16", conv_columns_less=1)


def answer(said: dict[str, Any], name: str) -> Any:
    """vLLM's answer, or a skip for the configs that it is known to refuse with those words."""
    found = said[name]
    if name in REFUSED:
        assert REFUSED[name] in found["refused"]
        pytest.skip(f"vLLM refuses {name}: {found['refused'][:200]}")
    assert "refused" not in found, found["refused"]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_vllm_keeps_the_same_of_every_layer(said: dict[str, Any], name: str) -> None:
    """Rule, window, bytes of a token and bytes of a state, layer by layer."""
    layers = answer(said, name)["layers"]
    numbered = name not in NUMBERED_OTHERWISE
    theirs = Counter(
        (one["number"] if numbered else 0, RULE_OF[one["kind"]], one["window"], one["token"], one["state"])
        for one in layers
    )
    more = WINDOW_MORE.get(name, 0)
    mine = Counter(
        (
            layer if numbered else 0, group.rule, group.window + (more if group.rule is Rule.WINDOW else 0),
            0 if group.rule is Rule.STATE else group.layer_bytes,
            group.layer_bytes if group.rule is Rule.STATE else 0,
        )
        for group in geometry_of(name).groups for layer in group.layers
    )  # fmt: skip
    assert theirs == mine
    geometry = geometry_of(name)
    assert geometry.bytes_per_token == sum(one["token"] for one in layers)
    assert geometry.state_bytes == sum(one["state"] for one in layers)


@pytest.mark.parametrize("name", NAMES)
def test_vllm_gives_each_rank_the_same_part(said: dict[str, Any], name: str) -> None:
    """TP 2, 3, 4, 8: KV heads of a rank, and the bytes of its state. What kvd stores once, every rank of vLLM holds."""
    geometry, checked = geometry_of(name), 0
    for tp, theirs in answer(said, name)["tp"].items():
        split = Split(tp=int(tp))
        bands = [band.heads for group in geometry.groups for band in group.bands]
        if any(heads % split.tp and split.tp % heads for heads in bands):
            # vLLM's arithmetic rounds down here, and its classes refuse to be built.
            with pytest.raises(UsageError, match=f"tp={tp} ranks"):
                Objects(geometry, split, 240)
            continue
        for part in Objects(geometry, split, 240):
            group = geometry.groups[part.group]
            counts = [end - begin for begin, end in part.band_heads]
            if group.rule is Rule.STATE:
                # A band that an earlier part holds for this rank as well: one head of it.
                held = sum(
                    (count or 1) * band.head_bytes for count, band in zip(counts, group.bands, strict=True)
                )
                assert held == theirs["state"]
            else:
                assert counts == [theirs["heads"]]
            checked += 1
    assert checked
