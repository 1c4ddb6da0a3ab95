"""Sizes and groups: the golden numbers, real configs with their traps, and refusals that name the field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from geometry_table import ROWS, Row
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.layout import geometry, hf
from kvd.layout.geometry import Geometry, Group, Plane, Rule, Scales
from kvd.layout.manifest import Manifest

CONFIGS = Path(__file__).parents[4] / "shared" / "configs"
LLAMA = Geometry.attention(layers=32, kv_heads=8, head_dim=128, dtype="bfloat16")
GIB, MIB = 1 << 30, 1 << 20
CONFIG: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096,
}  # fmt: skip


def described(geom: Geometry) -> str:
    return ", ".join(f"{group.name} {len(group.layers)}" for group in geom.groups)


def test_the_golden_numbers() -> None:
    assert LLAMA.bytes_per_token == 131_072
    assert LLAMA.stored_bytes(8192) == GIB
    assert LLAMA.stored_bytes(32_768) == 4 * GIB
    assert 64 * LLAMA.stored_bytes(8192) == 64 * GIB
    assert LLAMA.token_slots(40 * GIB) == 327_680
    whole = LLAMA.objects(chunk_tokens=256)
    assert [part.size_bytes for part in whole] == [32 * MIB]
    sharded = LLAMA.objects(chunk_tokens=256, tp=4)
    assert [part.size_bytes for part in sharded] == [8 * MIB] * 4
    assert [part.heads for part in sharded] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    chunks = 8192 // 256
    assert chunks * len(sharded) == 128
    assert chunks * sharded.chunk_bytes == GIB
    eight = LLAMA.objects(chunk_tokens=256, tp=8)
    assert chunks * eight[0].size_bytes == 128 * MIB


def test_query_heads_never_enter() -> None:
    few = Geometry.from_hf_config({**CONFIG, "num_attention_heads": 8, "head_dim": 128}, dtype="bfloat16")
    many = Geometry.from_hf_config({**CONFIG, "num_attention_heads": 64, "head_dim": 128}, dtype="bfloat16")
    assert few == many
    assert few.groups == LLAMA.groups


def test_tail_waste() -> None:
    assert [geometry.tail_waste_tokens(tokens, 16) for tokens in (0, 1, 15, 16, 17)] == [0, 15, 1, 0, 15]
    mean = sum(geometry.tail_waste_tokens(tokens, 16) for tokens in range(1, 17)) / 16
    assert geometry.mean_tail_waste_tokens(16) == mean == 7.5


def test_k_and_v_of_different_precision_and_scales() -> None:
    mixed = Geometry.attention(layers=1, kv_heads=8, head_dim=128, dtype="float16", v_dtype="int8")
    assert mixed.bytes_per_token == 8 * 128 * (2 + 1)
    wide = Geometry.attention(layers=1, kv_heads=8, head_dim=192, v_head_dim=128, dtype="bfloat16")
    assert wide.bytes_per_token == 8 * (192 + 128) * 2
    scaled = Geometry.attention(layers=1, kv_heads=8, head_dim=128, dtype="int8", scales=Scales("float32"))
    assert scaled.bytes_per_token == 8 * 2 * (128 + 4)
    fine = Geometry.attention(
        layers=2,
        kv_heads=8,
        head_dim=128,
        dtype="int4",
        scales=Scales("float16", group_dim=32, zero_points=True),
    )
    assert fine.bytes_per_token == 2 * 8 * 2 * (64 + 4 * 2 + 4 * 2)
    assert [p.name for p in fine.groups[0].planes] == ["k", "v", "k_scale", "k_zero", "v_scale", "v_zero"]
    quantised = Geometry.from_hf_config(CONFIG, dtype="float8_e4m3fn", scales=Scales("float32"))
    assert quantised.bytes_per_token == 32 * 8 * 2 * (128 + 4)


def test_the_fingerprint_names_what_is_kept() -> None:
    """Rows A8 and A10: two engines that keep different bytes never share a namespace that carries it."""
    config = {
        "model_type": "mamba2", "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "state_size": 16,
        "n_groups": 1, "conv_kernel": 4,
    }  # fmt: skip
    prints = {
        Geometry.from_hf_config(config, dtype="bfloat16", **changes).fingerprint
        for changes in ({}, {"conv_columns_less": 1}, {"state_dtype": "bfloat16"}, {"conv_dtype": "float16"})
    }
    assert len(prints) == 4
    assert LLAMA.fingerprint == "47ac502a6a5c034c71577d842321b2ab"
    assert (
        LLAMA.fingerprint
        != Geometry.attention(layers=32, kv_heads=4, head_dim=256, dtype="bfloat16").fingerprint
    )


def test_windows_and_latents_by_hand() -> None:
    mixed = Geometry.attention(
        layers=6, kv_heads=1, head_dim=64, dtype="float16", window=512, window_layers=[0, 1, 2, 3, 4]
    )
    assert described(mixed) == "full 1, window 512 5"
    assert mixed.groups[0].layers == (5,)
    assert mixed.resident_bytes(10_000) == 256 * (10_000 + 5 * 511)
    assert mixed.resident_bytes(100) == mixed.stored_bytes(100) == 256 * 600
    latent = Geometry.latent(layers=61, latent_dim=512, rope_dim=64, dtype="bfloat16")
    assert latent.bytes_per_token == 70_272
    chunked = Geometry([Group(Rule.CHUNKED, (0,), (Plane("k", 1, 8, "int8"),), 100)])
    assert [chunked.groups[0].kept_tokens(n) for n in (0, 99, 100, 250)] == [0, 99, 0, 50]


@pytest.mark.parametrize("row", ROWS, ids=[row.file for row in ROWS])
def test_real_configs(row: Row) -> None:
    path = CONFIGS / f"{row.file}.json"
    if not path.exists():
        pytest.skip("no ../shared/configs beside this checkout: real configs are not read")
    geom = Geometry.from_hf_config(str(path), dtype="bfloat16")
    assert (geom.bytes_per_token, geom.state_bytes, described(geom)) == (row.per_token, row.state, row.groups)
    assert geom == Geometry.from_hf_config(json.loads(path.read_text()), dtype="bfloat16")
    assert geom == Geometry.from_hf_config(path.read_text(), dtype="bfloat16")
    fields = hf.identity_fields(str(path))
    Manifest(model="m", revision="r1", dtype="bfloat16", tenant="", salt="", fixed="*", **fields)


def test_every_config_has_a_row() -> None:
    if not CONFIGS.exists():
        pytest.skip("no ../shared/configs beside this checkout: real configs are not read")
    assert {path.stem for path in CONFIGS.glob("*.json")} == {row.file for row in ROWS}


def test_falcon_with_the_new_decoder_keeps_its_kv_heads() -> None:
    """By hand: 60 x 8 x 64 x 2 x 2 B, as engines keep it. Transformers' own class repeats K and V for all 128 heads."""
    config = {
        "model_type": "falcon", "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8,
        "hidden_size": 8192, "new_decoder_architecture": True, "multi_query": True,
    }  # fmt: skip
    assert Geometry.from_hf_config(config, dtype="bfloat16").bytes_per_token == 60 * 8 * 64 * 4


def test_layer_numbers_of_hybrids() -> None:
    gemma = Geometry.from_hf_config(
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 12, "sliding_window": 512}},
        dtype="bfloat16",
    )
    assert gemma.groups[0].layers == (5, 11)
    assert gemma.groups[0].heads == 4
    kimi = {
        "model_type": "kimi_linear", "num_hidden_layers": 3, "num_attention_heads": 4, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2], "num_heads": 4, "head_dim": 8,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    geom = Geometry.from_hf_config(kimi, dtype="bfloat16")
    assert [(group.name, group.layers) for group in geom.groups] == [("full", (2,)), ("state", (0, 1))]


def test_convolution_columns_and_state_types_are_the_engines_choice() -> None:
    config = {
        "model_type": "mamba2", "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8, "state_size": 16,
        "n_groups": 1, "conv_kernel": 4,
    }  # fmt: skip
    channels = 4 * 8 + 2 * 16
    default = Geometry.from_hf_config(config, dtype="bfloat16")
    assert default.state_bytes == 4 * 8 * 16 * 4 + channels * 4 * 2
    narrow = Geometry.from_hf_config(config, dtype="bfloat16", state_dtype="bfloat16", conv_columns_less=1)
    assert narrow.state_bytes == 4 * 8 * 16 * 2 + channels * 3 * 2
    assert default.bytes_per_token == 0
    with pytest.raises(UsageError, match="no bytes per token"):
        default.token_slots(1 << 30)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "nonesuch"}, "'nonesuch' .* by hand: Geometry.attention"),
        ({"model_type": None}, "without model_type"),
        ({"model_type": 7}, "not a string"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_hidden_layers": None}, "num_hidden_layers .* is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers is '32'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"n_layer": 31}, "n_layer is 31; num_hidden_layers says 32"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5; it must divide the 32"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"num_key_value_heads": 1.5}, "num_key_value_heads is 1.5"),
        ({"hidden_size": 4095}, "head_dim is missing; and 32 heads do not divide the hidden size 4095"),
        ({"hidden_size": None}, "hidden_size .* is missing"),
        ({"head_dim": 2**40}, "head_dim is 1099511627776"),
        ({"sliding_window": 4096}, "llama has no window"),
        ({"model_type": "mistral", "sliding_window": -1}, "sliding_window is -1"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "has 1 entries; the model has 32"),
        ({"model_type": "mistral", "layer_types": ["odd"] * 32}, r"layer_types\[0\] is 'odd'; allowed: full"),
        ({"model_type": "mixtral", "layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window is null; layers .* need it"),
        ({"is_encoder_decoder": 1}, "is_encoder_decoder is 1; allowed: true, false"),
        ({"model_type": "gemma3", "text_config": {**CONFIG, "model_type": []}}, r"text_config: model_type is \[\]"),
        ({"model_type": "llama4_text", "no_rope_layers": 0}, "no_rope_layers is 0"),
        ({"num_hidden_layers": "3" * 9999}, "num_hidden_layers is '3{190,200}…; allowed"),
        ({"model_type": "mistral", "layer_types": 3}, "layer_types is a int"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window is 'no'"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 9}, "max_window_layers is None"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "no prefix to keep"),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 2]}, "no_rope_layers is"),
        ({"model_type": "llama4_text", "no_rope_layers": [[1]] * 32}, "no_rope_layers is"),
        ({"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 8}, "attn_layer_offset is 8"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank is missing"),
        ({"model_type": "minimax"}, "attn_type_list is missing"),
        ({"model_type": "kimi_linear"}, "full_attn_layers and kda_layers are missing"),
        ({"model_type": "nemotron_h"}, "hybrid_override_pattern is missing"),
        ({"model_type": "bamba"}, "attn_layer_indices is None"),
        ({"model_type": "zamba2"}, "layers_block_type is missing"),
        ({"model_type": "zamba2", "layers_block_type": ["mamba"] * 32, "n_mamba_heads": 3, "mamba_expand": 2},
         "n_mamba_heads is 3; heads of 2730 must make the inner width 8192"),
        ({"model_type": "bamba", "attn_layer_indices": [32]}, r"attn_layer_indices is \[32\]; allowed: .* 0 … 31"),
        ({"model_type": "falcon_h1", "mamba_n_heads": 3, "mamba_d_head": "auto", "mamba_expand": 2},
         "mamba_d_head is 'auto'; and 3 heads do not divide 8192"),
        ({"model_type": "falcon_h1", "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_ssm": 31},
         "mamba_d_ssm is 31; 4 heads of 8 make 32"),
        ({"model_type": "mamba", "state_size": 16, "conv_kernel": 0}, "conv_kernel is 0"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_read_are_refused_by_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Geometry.from_hf_config({**CONFIG, **changes}, dtype="bfloat16")


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.json cannot be read"):
        Geometry.from_hf_config(str(tmp_path / "absent.json"), dtype="bfloat16")
    for text, says in (("{not json", "is not JSON"), ("[1]", "not a JSON object"), ("", "is not JSON")):
        file = tmp_path / "config.json"
        file.write_text(text)
        with pytest.raises(UsageError, match=says):
            Geometry.from_hf_config(str(file), dtype="bfloat16")
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="cannot be read"):
        Geometry.from_hf_config(str(file), dtype="bfloat16")
    file.write_text('{"model_type": "llama", "num_hidden_layers": 32, "num_hidden_layers": 2}')
    with pytest.raises(UsageError, match="'num_hidden_layers' is there twice"):
        Geometry.from_hf_config(str(file), dtype="bfloat16")
    with pytest.raises(UsageError, match="Is a directory"):
        Geometry.from_hf_config(str(tmp_path), dtype="bfloat16")
    with pytest.raises(UsageError, match="cannot be read"):
        Geometry.from_hf_config("a\0b", dtype="bfloat16")
    with pytest.raises(UsageError, match="bf17"):
        Geometry.from_hf_config(CONFIG, dtype="bf17")


def test_files_that_never_end_are_not_read(tmp_path: Path) -> None:
    """Fails if whatever is there is opened and read: a pipe without a writer held the caller up for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for endless in (pipe, Path("/dev/zero")):
        with pytest.raises(UsageError, match="no plain file; read it and give its text"):
            Geometry.from_hf_config(str(endless), dtype="bfloat16")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UsageError, match=f"more than {hf.CONFIG_BYTES_MAX} B"):
        Geometry.from_hf_config(str(large), dtype="bfloat16")


@pytest.mark.parametrize(
    ("model_type", "kv_heads", "groups"),
    [
        ("mistral", 8, "window 4096 32"), ("mixtral", 8, "full 32"), ("qwen2", 32, "full 32"),
        ("qwen3_moe", 4, "full 32"),
        ("llama4_text", 8, "full 8, chunked 8192 24"), ("starcoder2", 2, "full 32"), ("llama", 32, "full 32"),
        ("gemma2", 4, "full 16, window 4096 16"),
    ],
)  # fmt: skip
def test_what_a_config_leaves_out_is_what_its_class_takes(
    model_type: str, kv_heads: int, groups: str
) -> None:
    """Absent and null are two things: Transformers' class has a default for the one and takes the other as it is.

    The numbers are those of Transformers' classes. Fails if a field left out is read as one that is null.
    """
    config = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    geom = Geometry.from_hf_config({**config, "model_type": model_type}, dtype="bfloat16")
    assert (geom.groups[0].heads, described(geom)) == (kv_heads, groups)
    if model_type in ("mistral", "llama4_text", "qwen2"):
        nulls = {"num_key_value_heads": None, "sliding_window": None, "attention_chunk_size": None}
        geom = Geometry.from_hf_config({**config, **nulls, "model_type": model_type}, dtype="bfloat16")
        assert (geom.groups[0].heads, described(geom)) == (32, "full 32")
    slides = {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 28}
    assert (
        described(Geometry.from_hf_config({**CONFIG, **slides}, dtype="bfloat16")) == "full 28, window 4096 4"
    )


def test_engines_choices_are_checked() -> None:
    with pytest.raises(UsageError, match="conv_columns_less is 2"):
        Geometry.from_hf_config(CONFIG, dtype="bfloat16", conv_columns_less=2)
    for field in ("state_dtype", "conv_dtype", "v_dtype"):
        with pytest.raises(UsageError, match=f"{field} 'odd'"):
            Geometry.from_hf_config(CONFIG, **{"dtype": "bfloat16", field: "odd"})
    mamba = {
        "model_type": "mamba",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "state_size": 4,
        "conv_kernel": 1,
    }
    with pytest.raises(UsageError, match="conv_kernel is 1; it must be above 1"):
        Geometry.from_hf_config(mamba, dtype="bfloat16", conv_columns_less=1)
    with pytest.raises(UsageError, match="one row of one type"):
        Geometry.from_hf_config({**CONFIG, "model_type": "deepseek_v3"}, dtype="bfloat16", v_dtype="int8")
    with pytest.raises(UsageError, match="neither architectures nor model_type"):
        hf.identity_fields({})
    assert hf.identity_fields({**CONFIG, "architectures": ["LlamaForCausalLM"], "rope_theta": 1e4}) == {
        "architecture": "LlamaForCausalLM",
        "position": {"rope_theta": 1e4},
        "attention": {
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("full", "kda"), [([0], [1, 2]), (["3"], [1, 2]), ([None], [1, 2]), ([3, 3], [1, 2])]
)
def test_kimi_layer_lists_must_name_each_layer_once(full: list[Any], kda: list[Any]) -> None:
    config = {
        "model_type": "kimi_linear", "num_hidden_layers": 3, "num_attention_heads": 4,
        "linear_attn_config": {"full_attn_layers": full, "kda_layers": kda, "num_heads": 4, "head_dim": 8,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    with pytest.raises(UsageError, match="each layer once; allowed: 1 … 3"):
        Geometry.from_hf_config(config, dtype="bfloat16")


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Geometry.attention(layers=0, kv_heads=8, head_dim=128, dtype="bfloat16"), "layers is 0"),
        (lambda: Geometry.attention(layers=1, kv_heads=-8, head_dim=128, dtype="bfloat16"), "is -8"),
        (lambda: Geometry.attention(layers=1, kv_heads=8, head_dim=0.5, dtype="bfloat16"), "is 0.5"),
        (lambda: Geometry.attention(layers=1, kv_heads=8, head_dim=3, dtype="int4"), "not whole bytes"),
        (lambda: Geometry.attention(layers=2, kv_heads=1, head_dim=8, dtype="int8", window_layers=[0]), "window"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", scales=Scales(group_dim=3)),
         "do not divide"),
        (lambda: Geometry([]), "at least one group"),
        (lambda: Geometry([Group(Rule.FULL, (5,), (Plane("k", 1, 8, "int8"),))], 5), "layer 5"),
        (lambda: Geometry([Group(Rule.FULL, (0,), (Plane("k", 1, 8, "int8"),)),
                           Group(Rule.WINDOW, (0,), (Plane("k", 1, 8, "int8"),), 9)]), r"\[0\] are in two"),
        (lambda: Group("causal", (0,), (Plane("k", 1, 8, "int8"),)), "rule of a group is 'causal'; allowed: full, w"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", v_head_dim=0), "plane v is 0"),
        (lambda: LLAMA.stored_bytes(-1), "tokens is -1"),
        (lambda: LLAMA.stored_bytes(1, snapshots=-1), "snapshots is -1"),
        (lambda: LLAMA.resident_bytes(1.5), "tokens is 1.5"),
        (lambda: Group(Rule.FULL, (1, 0), (Plane("k", 1, 8, "int8"),)), "not ascending"),
        (lambda: Group(Rule.FULL, (0,), ()), "needs layers and planes"),
        (lambda: Group(Rule.WINDOW, (0,), (Plane("k", 1, 8, "int8"),)), "window"),
        (lambda: Group(Rule.FULL, (0,), (Plane("k", 1, 8, "int8"),), 7), "has no window"),
        (lambda: Group(Rule.FULL, (0,), (Plane("k", 2, 8, "int8"), Plane("v", 1, 8, "int8"))), "head counts"),
        (lambda: Group(Rule.FULL, (0,), (Plane("k", 1, 8, "int8"), Plane("k", 1, 8, "int8"))), "share a name"),
        (lambda: Plane("", 1, 8, "int8"), "not a name"),
        (lambda: Plane("k", 1, 8, "int9"), "int9"),
        (lambda: LLAMA.objects(chunk_tokens=100, block_tokens=16), "multiple of the engine's block of 16"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", window=8).objects(
            chunk_tokens=32, block_tokens=16), "window of 8 tokens is smaller"),
        (lambda: LLAMA.token_slots(-1), "capacity_bytes is -1"),
        (lambda: LLAMA.stored_bytes(-5), "tokens is -5"),
        (lambda: LLAMA.stored_bytes(5, snapshots=-1), "snapshots is -1"),
        (lambda: LLAMA.objects(chunk_tokens=16, block_tokens=4.0), "block_tokens 4.0 is not an integer"),
        (lambda: LLAMA.objects(chunk_tokens=16, split="tp2"), "split is 'tp2'"),
        (lambda: Group("odd", (0,), (Plane("k", 1, 8, "int8"),)), "rule of a group is 'odd'; allowed: full, window"),
        (lambda: Group(Rule.FULL, 5, (Plane("k", 1, 8, "int8"),)), "layers of a group is 5; allowed is a list"),
        (lambda: Group(Rule.FULL, (0,), ("k",)), "planes of a group is .*; allowed is a list, Plane each"),
        (lambda: Geometry(None), "groups is None; allowed is a list"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", v_head_dim=0),
         "dim of plane v is 0"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", v_dtype=""), "plane v ''"),
        (lambda: Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype="int8", scales="int8"), "scales is 'int8'"),
        (lambda: Geometry.attention(layers=2, kv_heads=1, head_dim=8, dtype="int8", window=4, window_layers=1),
         "window_layers is 1; allowed is a list"),
        (lambda: Geometry.attention(layers=2, kv_heads=1, head_dim=8, dtype="int8", window=4, window_layers=[2]),
         "window_layers is 2; allowed is a whole number in 0 … 1"),
        (lambda: geometry.tail_waste_tokens(5, 0), "block_tokens is 0"),
    ],
)  # fmt: skip
def test_absurd_geometry_is_refused(build: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        build()


@settings(deadline=None)
@given(
    st.integers(1, 12), st.sampled_from([1, 2, 3, 8]), st.sampled_from([1, 8, 64]),
    st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]),
)  # fmt: skip
def test_objects_hold_every_byte_once(layers: int, heads: int, dim: int, tp: int, pp: int, cp: int) -> None:
    geom = Geometry.attention(layers=layers, kv_heads=heads, head_dim=dim, dtype="bfloat16")
    try:
        objects = geom.objects(chunk_tokens=16, tp=tp, pp=pp, cp=cp)
    except UsageError:
        assert pp > layers or (heads % tp and tp % heads)
        return
    assert objects.chunk_bytes == geom.stored_bytes(16)
    assert [part.index for part in objects] == list(range(len(objects)))


def test_a_config_that_is_no_mapping_says_what_to_give() -> None:
    class Config:
        def to_dict(self) -> dict[str, object]:
            return {}

    with pytest.raises(UsageError, match=r"type Config: give config.to_dict\(\)"):
        Geometry.from_hf_config(Config(), dtype="bfloat16")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="not a JSON object, but a list"):
        Geometry.from_hf_config("[1]", dtype="bfloat16")
    with pytest.raises(UsageError, match="write 'bfloat16'"):
        Geometry.attention(layers=1, kv_heads=1, head_dim=8, dtype=_TorchType())  # type: ignore[arg-type]


class _TorchType:
    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("config", "plane"),
    [
        (
            {
                "model_type": "qwen3_next",
                "num_hidden_layers": 4,
                "full_attention_interval": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 64,
                "hidden_size": 256,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 32,
                "linear_value_head_dim": 32,
                "linear_conv_kernel_dim": 4,
            },
            "conv_q",
        ),
        (
            {
                "model_type": "minimax",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "hidden_size": 256,
                "head_dim": 64,
                "layer_types": ["full_attention", "linear_attention"],
            },
            "state",
        ),
    ],
    ids=["conv", "state"],
)
def test_a_quantised_cache_does_not_quantise_states(config: dict[str, object], plane: str) -> None:
    """Fails if a state takes K's type whatever it is."""

    def kept(kv_dtype: str, **changes: object) -> str:
        geom = Geometry.from_hf_config({**config, **changes}, dtype=kv_dtype)
        return next(p.dtype for group in geom.groups for p in group.planes if p.name == plane)

    assert kept("float16", torch_dtype="bfloat16") == "float16"
    assert kept("float8_e4m3fn", torch_dtype="bfloat16") == "bfloat16"
    assert kept("float8_e4m3fn", dtype="float16") == "float16"
    with pytest.raises(UsageError, match="is not known: K is kept in float8_e4m3fn"):
        kept("float8_e4m3fn", torch_dtype="complex")
