"""The canonical format carries real caches: out of one Transformers model run, into another, same logits bit
for bit.

Small random models, one of each kind of cache. The first run's cache is gathered into objects under one
split, re-sharded to another, and scattered over the cache of a run on other tokens. Skip the scatter of any
one group and the logits differ.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from test_layout_transformers import BASE, MAMBA

from kvd.layout import paged, shards, states, strided
from kvd.layout.geometry import Geometry, Group, Rule
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Objects, Split
from kvd.layout.states import StateLayout

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = pytest.mark.slow

TOKENS, BLOCK, SEED = 32, 8, 20240607
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "gemma2": BASE | {"sliding_window": 64, "head_dim": 16},
    "deepseek_v3": BASE | {
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None,
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 16,
    },
    "jamba": BASE | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "bamba": BASE | MAMBA | {"attn_layer_indices": [1, 4]},
    "qwen3_next": BASE | EXPERTS | {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}  # fmt: skip


def build(model_type: str) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    transformers.logging.set_verbosity_error()
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.CONFIG_MAPPING[model_type].from_dict(
            MODELS[model_type] | {"model_type": model_type}
        )
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(torch.bfloat16).eval()


def buffers(cache: Any, group: Group) -> list[memoryview]:
    """Writable bytes of the tensors that hold a group, in the order of its layout."""
    tensors = []
    for number in group.layers:
        layer = cache.layers[number]
        if group.rule is Rule.STATE:
            tensors += [layer.conv_states[0], layer.recurrent_states[0]]
        else:
            tensors += [layer.keys, layer.values]
    views = []
    for tensor in tensors:
        assert tensor.is_contiguous()
        views.append(memoryview(tensor.view(torch.uint8).numpy()).cast("B"))
    return views


def plans(geom: Geometry, objects: Objects) -> dict[int, paged.PagedPlan]:
    found = {}
    for part in objects:
        group = geom.groups[part.group]
        if group.rule is Rule.STATE:
            layout = StateLayout(states.transformers_tensors(group), group.planes, len(group.layers), slots=1)
            found[part.index] = layout.plan(group, part)
        else:
            keeps = PagedLayout("transformers", group.planes, len(group.layers), TOKENS // BLOCK, BLOCK)
            found[part.index] = paged.plan(keeps, group, part)
    return found


def ids_of(plan: paged.PagedPlan) -> list[int]:
    return list(range(plan.blocks_per_object))


@pytest.mark.parametrize(
    ("written", "wanted"), [(Split(), Split()), (Split(tp=2, pp=2), Split(tp=4))], ids=str
)
@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_a_restored_prefix_gives_the_same_logits(model_type: str, written: Split, wanted: Split) -> None:
    model = build(model_type)
    geom = Geometry.from_hf_config(model.config.to_dict(), dtype="bfloat16")
    generator = torch.Generator().manual_seed(SEED)
    prefix, other, rest = (torch.randint(1, 64, (1, n), generator=generator) for n in (TOKENS, TOKENS, 6))

    def after(tokens: Any) -> Any:
        return model(tokens, use_cache=True).past_key_values

    def logits(cache: Any) -> Any:
        return model(rest, past_key_values=cache, use_cache=True).logits

    with torch.no_grad():
        source = after(prefix)
        objects = Objects(geom, written, TOKENS)
        stored: dict[int, bytearray] = {}
        for part, plan in zip(objects, plans(geom, objects).values(), strict=True):
            stored[part.index] = bytearray(part.size_bytes)
            plan.gather_reference(buffers(source, geom.groups[part.group]), ids_of(plan), stored[part.index])
        target_objects = Objects(geom, wanted, TOKENS)
        moved = {part.index: bytearray(part.size_bytes) for part in target_objects}
        plan_over = shards.reshard(objects, target_objects)
        strided.run_reference(plan_over, lambda n: bytes(stored[n]), moved.__getitem__)
        expected = logits(source)
        assert not torch.equal(logits(after(other)), expected), "the model does not look at its cache"
        for skipped in [*range(len(geom.groups)), None]:
            restored = after(other)
            for part, plan in zip(target_objects, plans(geom, target_objects).values(), strict=True):
                if part.group != skipped:
                    tensors = buffers(restored, geom.groups[part.group])
                    plan.scatter_reference(bytes(moved[part.index]), ids_of(plan), tensors)  # type: ignore[arg-type]
            same = torch.equal(logits(restored), expected)
            assert same == (skipped is None), f"skipped group {skipped}"
