"""Transformers on kvd: tiny random models of several kinds of cache, against the same models without kvd.

Rows A8 to A11, B1, C2, C8, E2 of the field's list. Tokens must be equal to a run without kvd, logits bit for bit equal
to those of a live cache that was split at the same token; counters prove that the bytes came from kvd; and where a
group's bytes are spoiled the logits must differ, so that none of it is decoration.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy
import pytest

import kvd

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from kvd.engines import transformers as engine  # noqa: E402
from kvd.engines import transformers_cache as caches  # noqa: E402
from kvd.engines import transformers_states as states  # noqa: E402
from kvd.engines import transformers_weights as weights  # noqa: E402
from kvd.layout.geometry import Rule  # noqa: E402

pytestmark = pytest.mark.slow

SEED, CHUNK, PROMPT, NEW = 20240611, 8, 43, 10
BASE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 97, "max_position_embeddings": 512, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "gemma2": BASE | {"sliding_window": 12, "head_dim": 8},
    "gemma3_text": BASE | {"sliding_window": 20, "head_dim": 8, "num_hidden_layers": 6},
    "llama4_text": BASE | {"head_dim": 8, "attention_chunk_size": 16, "num_local_experts": 2},
    "deepseek_v3": BASE | {
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None,
        "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "moe_intermediate_size": 16,
    },
    "jamba": BASE | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2, "use_mamba_kernels": False},
    "qwen3_next": BASE | {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "vocab_size": 97, "pad_token_id": 0},
}  # fmt: skip
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def build(model_type: str, dtype: Any = None, seed: int = SEED) -> Any:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        described = MODELS[model_type] | {"model_type": model_type}
        config = transformers.CONFIG_MAPPING[model_type].from_dict(described)
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    return model.to(dtype or torch.float32).eval()


def prompt(tokens: int = PROMPT, seed: int = 1) -> Any:
    return torch.randint(1, 97, (1, tokens), generator=torch.Generator().manual_seed(SEED + seed))


def run(model: Any, ids: Any, cache: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=True, **{caches.cache_name(model): cache}).logits


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Models this small are slower on two threads than on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store(daemon: Any) -> Any:
    with kvd.connect(daemon().socket, client="test") as opened:
        yield opened


def spoil(store: kvd.Store, one: engine.Adapter, ids: Any, group: int) -> None:
    """Zero the objects of one group that a prefix of `ids` would be loaded from."""
    namespace, geometry = store.namespace(one.manifest()), one.kept.geometry
    chain = namespace.chain(ids[0].tolist(), one.chunk_tokens)
    parts = [p for p in geometry.objects(chunk_tokens=one.chunk_tokens) if p.group == group]
    with namespace.acquire(chain, geometry) as leases:
        for chunk in leases.chunks(group):
            for part in parts:
                _zero(leases.member_views([chunk], part.index, part.size_bytes)[0])


def _zero(view: memoryview) -> None:
    """Overwrite published bytes behind kvd's back: this process maps the pool writable, its views are not."""
    address = numpy.frombuffer(view, dtype=numpy.uint8).ctypes.data
    ctypes.memset(address, 0, view.nbytes)


@pytest.mark.parametrize("model_type", sorted(MODELS))
def test_a_loaded_prefix_is_the_live_one_and_every_group_of_it_counts(
    store: kvd.Store, model_type: str
) -> None:
    """Fails if a group is not restored, at another token, or in another order: its spoiled bytes would not matter."""
    model = build(model_type, torch.bfloat16 if model_type == "qwen3_next" else None)
    writer, reader = (engine.Adapter(store, model, chunk_tokens=CHUNK) for _ in range(2))
    ids, usable = prompt(), (PROMPT - 1) // CHUNK * CHUNK
    empty, reused = reader.load(ids)
    assert reused == 0
    assert writer.kept.only_states or empty.get_seq_length() == 0
    live, held = writer.prefill(ids)
    assert held == usable
    assert writer.counters.chunks_stored >= (1 if writer.kept.only_states else usable // CHUNK)
    expected = run(model, ids[:, usable:], live)

    loaded, reused = reader.load(ids)
    assert reused == usable
    assert torch.equal(run(model, ids[:, usable:], loaded), expected)
    geometry = reader.kept.geometry
    least = sum(
        group.state_bytes if group.rule is Rule.STATE else group.bytes_per_token * group.kept_tokens(usable)
        for group in geometry.groups
    )
    assert least <= reader.counters.bytes_loaded <= geometry.stored_bytes(usable)
    assert store.stats()["bytes_viewed"] >= reader.counters.bytes_loaded
    for number, group in enumerate(geometry.groups):
        if not (group.rule is Rule.CHUNKED and usable % group.window == 0):
            spoil(store, reader, ids, number)
            wrong, reused = reader.load(ids)
            assert reused == usable
            assert not torch.equal(run(model, ids[:, usable:], wrong), expected), (
                f"nobody reads group {group.name}"
            )
    assert (writer.counters.failures, reader.counters.failures) == (0, 0)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "jamba", "qwen3_next", "mamba"])
def test_generate_gives_the_tokens_of_a_run_without_kvd_and_turns_build_on_each_other(
    store: kvd.Store, model_type: str
) -> None:
    model = build(model_type)
    first, second = (engine.Conversation(store, model, chunk_tokens=CHUNK, salt=salt) for salt in ("", "x"))
    talk, reused = first, []
    for turn in range(3):
        said = prompt(21, seed=turn)[0].tolist()
        before = list(talk.tokens)
        wanted = model.generate(torch.tensor([[*before, *said]]), **GREEDY)[0].tolist()
        counters = talk.adapter.counters
        asked = counters.tokens_reused
        answer = talk.extend(said, **GREEDY)
        assert talk.tokens == wanted
        assert answer == wanted[len(before) + len(said) :]
        reused.append(counters.tokens_reused - asked)
    # A turn finds the chunks of everything before it, answers included: states were kept where their last chunk ends.
    assert reused == [0, *((length - 1) // CHUNK * CHUNK for length in (31, 62))]
    second.tokens = list(first.tokens)
    second.extend(prompt(9)[0].tolist(), **GREEDY)
    assert second.adapter.counters.tokens_reused == 0, "another salt"
    again = engine.Conversation(store, model, chunk_tokens=CHUNK, salt="")
    assert again.adapter is first.adapter
    assert first.adapter.counters.failures == second.adapter.counters.failures == 0


def test_a_cache_with_states_that_ends_within_a_chunk_is_refused_by_name(
    store: kvd.Store, caplog: pytest.LogCaptureFixture
) -> None:
    """States cannot be cut. Fails if such a cache is stored, or nothing says why it was not."""
    model, ids = build("jamba"), prompt(2 * CHUNK + 3)
    one = engine.Adapter(store, model, chunk_tokens=CHUNK)
    cache, _ = one.load(ids)
    run(model, ids, cache)
    with caplog.at_level(logging.WARNING):
        assert one.save(cache, ids) == 0
        assert one.save(cache, ids) == 0
    assert (one.counters.unaligned, one.counters.failures) == (2, 0)
    assert [record.message for record in caplog.records].count(caplog.messages[0]) == 1
    assert f"{2 * CHUNK + 3} tokens with states" in caplog.messages[0]


def test_a_snapshot_that_cannot_be_taken_leaves_the_answer_alone(
    store: kvd.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails without the shield around what generation calls."""
    model, ids = build("jamba"), prompt(CHUNK + 1)
    wanted = model.generate(ids, **GREEDY)

    def fail(*_given: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(states, "snapshot", fail)
    one = engine.Adapter(store, model, chunk_tokens=CHUNK)
    assert torch.equal(one.generate(ids, **GREEDY), wanted)
    assert one.counters.failures >= 1
    assert one.counters.last_failure.startswith("snapshot: RuntimeError")


@pytest.mark.parametrize("model_type", ["jamba", "mamba"])
def test_states_that_cannot_be_cut_leave_the_answer_alone(
    store: kvd.Store, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    """Fails if anything that follows generation is outside the shield: the answer is there and would be lost."""
    model, ids = build(model_type), prompt(CHUNK + 1)
    wanted = model.generate(ids, **GREEDY)

    def fail(*_given: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(states, "cut", fail)
    one = engine.Adapter(store, model, chunk_tokens=CHUNK)
    assert torch.equal(one.generate(ids, **GREEDY), wanted)
    assert one.counters.failures == 1
    assert one.counters.last_failure == "save: RuntimeError: no memory"


SECOND = """
import sys; sys.path.insert(0, sys.argv[1])
import test_transformers as t
t.torch.set_num_threads(1)
model = t.build("gemma2")
out = t.engine.generate(sys.argv[2], model, t.prompt(200), **t.GREEDY)
print(out[0].tolist()); print(t.engine.adapter(sys.argv[2], model).counters.tokens_reused)
"""


def test_a_second_process_and_a_restarted_daemon(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if anything of a process (hash seed, address, time) gets into what names the cache."""
    running = daemon()
    model, ids = build("gemma2"), prompt(200)
    wanted = model.generate(ids, **GREEDY)
    one = engine.adapter(running.socket, model)
    assert torch.equal(engine.generate(running.socket, model, ids, **GREEDY), wanted)
    command = [sys.executable, "-c", SECOND, str(Path(__file__).parent), running.socket]
    told = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=100
    ).stdout.splitlines()
    assert told == [str(wanted[0].tolist()), str(199 // one.chunk_tokens * one.chunk_tokens)]

    running.kill()
    assert torch.equal(engine.generate(running.socket, model, ids, **GREEDY), wanted)
    monkeypatch.setattr(engine, "_RETRY_S", 0.0)
    one._link._next_try_s = one._not_before_s = 0.0
    daemon(directory=running.directory)
    for reused in (0, 192):
        before = one.counters.tokens_reused
        assert torch.equal(engine.generate(running.socket, model, ids, **GREEDY), wanted)
        assert one.counters.tokens_reused - before == reused
    one.close()


def test_weights_salt_tenant_type_and_kernels_keep_apart(store: kvd.Store) -> None:
    """Rows A8, A9, E2. Fails if the name of the cache leaves any of them out."""
    model, ids = build("llama"), prompt()
    kept = engine.Adapter(store, model, chunk_tokens=CHUNK)
    cache, _ = kept.prefill(ids)
    equal, coarse, eager = build("llama"), build("llama", torch.bfloat16), build("llama")
    assert engine.Adapter(store, equal, chunk_tokens=CHUNK).load(ids)[1] == 40, "equal weights meet"
    assert engine.Adapter(store, model, chunk_tokens=CHUNK, salt="s").load(ids)[1] == 0
    assert engine.Adapter(store, model, chunk_tokens=CHUNK, tenant="t").load(ids)[1] == 0
    assert engine.Adapter(store, model, chunk_tokens=CHUNK, adapter_name="lora@1").load(ids)[1] == 0
    assert engine.Adapter(store, model, chunk_tokens=CHUNK, revision="abc").load(ids)[1] == 0
    assert engine.Adapter(store, model, chunk_tokens=2 * CHUNK).load(ids)[1] == 0
    assert engine.Adapter(store, coarse, chunk_tokens=CHUNK).load(ids)[1] == 0
    eager.set_attn_implementation("eager")
    assert engine.Adapter(store, eager, chunk_tokens=CHUNK).load(ids)[1] == 0
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1.0
    assert kept.load(ids)[1] == 0, "one weight changed under the same name"
    model.train()
    assert kept.save(cache, ids[:, :40]) == 0, "dropout makes a cache of its own"


def test_weights_are_named_by_their_values() -> None:
    model = build("llama")
    name = weights.fingerprint(model)
    assert weights.fingerprint(build("llama")) == name
    weight = model.model.embed_tokens.weight
    names = {name}
    with torch.no_grad():
        weight[[3, 4]] = weight[[4, 3]]
        names.add(weights.fingerprint(model))
        weight[:, [3, 4]] = weight[:, [4, 3]]
        names.add(weights.fingerprint(model))
        weight.data[0, 0] += 1  # not counted by torch
        assert weights.fingerprint(model) in names
        weights.forget(model)
        names.add(weights.fingerprint(model))
    assert len(names) == 4
    assert weights.fingerprint(build("llama", torch.bfloat16)) not in names
    assert weights.adapters(model) == "none"


class Layer(torch.nn.Module):
    """What PEFT puts around a layer, as far as it decides whether an adapter counts."""

    def __init__(self, active: list[str], off: bool) -> None:
        super().__init__()
        self.active_adapters, self.disable_adapters, self.scaling = active, off, {"a": 2.0}


def test_adapters_are_named_by_what_is_active() -> None:
    model, names = build("llama"), set()
    model.peft_config = {"a": 1}
    for active, off in ((["a"], False), (["b"], False), (["a", "b"], False), (["a"], True)):
        model.model.extra = Layer(active, off)
        names.add(weights.adapters(model))
    assert len(names) == 4
    assert "none" not in names


def test_a_daemon_that_is_stopped_full_or_gone_costs_tokens_but_never_wrong_ones(
    daemon: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows B1, C2, C8. Fails without the shield around load and save, or without the wait's bound."""
    running = daemon(pool={"size": "8MiB"})
    model, ids = build("llama"), prompt(600)
    wanted = model.generate(ids, **GREEDY)
    one = engine.Adapter(running.socket, model, chunk_tokens=CHUNK, deadline_s=0.3)
    assert torch.equal(one.generate(ids, **GREEDY), wanted)
    assert one.counters.chunks_stored > 0
    running.process.send_signal(signal.SIGSTOP)
    try:
        fresh = prompt(600, seed=9)
        reference = model.generate(fresh, **GREEDY)
        with caplog.at_level(logging.WARNING, "kvd.engines.transformers"):
            for _ in range(3):
                assert torch.equal(one.generate(fresh, **GREEDY), reference)
        assert one.counters.failures == 1, "waited for once, then left alone for a while"
        assert "computed instead" in caplog.text
        before = one.counters.tokens_reused
        assert torch.equal(one.generate(ids, **GREEDY), wanted)
        assert one.counters.tokens_reused - before == 592, "reading needs no daemon"
    finally:
        running.process.send_signal(signal.SIGCONT)
    one.close()


def test_a_full_pool_and_batches_of_bounded_size(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = daemon(pool={"size": "4MiB"})
    model, ids = build("llama"), prompt(400)
    monkeypatch.setattr(engine, "BATCH_BYTES", 100_000)
    one = engine.Adapter(running.socket, model, chunk_tokens=CHUNK)
    reserved: list[int] = []
    reserve = kvd.Namespace.reserve

    def counted(self: Any, chain: Any, *args: Any, **options: Any) -> Any:
        reserved.append(len(chain))
        return reserve(self, chain, *args, **options)

    monkeypatch.setattr(kvd.Namespace, "reserve", counted)
    cache, _ = one.prefill(ids)
    assert sum(reserved) == one.counters.chunks_stored == 399 // CHUNK
    assert max(reserved) * one.kept.geometry.stored_bytes(CHUNK) <= 100_000
    held, expected = [], run(model, ids[:, 392:], cache)
    with kvd.connect(running.socket) as hog:
        namespace = hog.namespace(
            kvd.Manifest(model="m", revision="1", dtype="float32", fixed="*", tenant="", salt="")
        )
        with pytest.raises(kvd.CapacityError):
            for number in range(1000):
                chain = namespace.chain([number] * 16, 16)
                held.append(namespace.reserve(chain, nbytes=64 << 10))
        fresh = prompt(2000, seed=5)[:, :400]
        wanted = model.generate(fresh, **GREEDY)
        assert torch.equal(one.generate(fresh, **GREEDY), wanted)
        assert one.counters.failures == 1
        assert "CAPACITY" in one.counters.last_failure
        held.clear()
    found, reused = one.load(ids)
    assert torch.equal(run(model, ids[:, reused:], found)[:, -8:], expected[:, -8:]) or reused < 392
    one.close()


def test_damaged_bytes_are_a_miss_where_reads_are_verified(daemon: Any) -> None:
    running = daemon()
    model, ids = build("llama"), prompt()
    wanted = model.generate(ids, **GREEDY)
    one = engine.Adapter(running.socket, model, chunk_tokens=CHUNK, verify=True)
    assert torch.equal(one.generate(ids, **GREEDY), wanted)
    with kvd.connect(running.socket) as store:
        spoil(store, one, ids, 0)
    assert torch.equal(one.generate(ids, **GREEDY), wanted)
    assert one.counters.tokens_reused == 0
    assert "CORRUPTION" in one.counters.last_failure
    one.close()


def test_what_is_not_one_plain_sequence_goes_to_the_model_alone(store: kvd.Store) -> None:
    model, one_row = build("llama"), prompt()
    one = engine.Adapter(store, model, chunk_tokens=CHUNK)
    two = torch.cat([one_row, prompt(seed=2)])
    cases: list[tuple[Any, dict[str, Any]]] = [
        (two, {}),
        (one_row, {"num_beams": 2}),
        (one_row, {"attention_mask": torch.tensor([[0] + [1] * (PROMPT - 1)])}),
        (one_row, {"use_cache": False}),
        (one_row, {"cache_implementation": "static"}),
    ]
    for ids, options in cases:
        assert torch.equal(one.generate(ids, **GREEDY, **options), model.generate(ids, **GREEDY, **options))
    assert (one.counters.bypassed, one.counters.loads, one.counters.saves) == (len(cases), 0, 0)
    for wrong in (two, one_row.float(), "text", [1.5], 3):
        with pytest.raises(kvd.UsageError, match="input_ids"):
            one.load(wrong)
    assert one.save(one.load(one_row)[0], one_row) == 0, "an empty cache"
    assert one.counters.failures == 0
    returned = one.generate(one_row, return_dict_in_generate=True, **GREEDY)
    assert torch.equal(returned.sequences, model.generate(one_row, **GREEDY))
    assert one.generate(one_row[0].tolist(), **GREEDY).shape == (1, PROMPT + NEW)
    assert one.counters.tokens_reused == 40


def test_a_model_that_cannot_be_kept_runs_without_kvd(
    store: kvd.Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Odd(transformers.LlamaConfig):  # type: ignore[misc,name-defined]
        model_type = "odd-one"

    torch.manual_seed(SEED)
    model, ids = transformers.LlamaForCausalLM(Odd(**BASE)).eval(), prompt()
    with pytest.raises(kvd.UsageError, match="odd-one"):
        engine.Adapter(store, model)
    with caplog.at_level(logging.WARNING, "kvd.engines.transformers"):
        cache, reused = engine.load(store, model, ids)
        assert (cache.get_seq_length(), reused) == (0, 0)
        assert engine.save(store, model, cache, ids) == 0
        assert torch.equal(engine.generate(store, model, ids, **GREEDY), model.generate(ids, **GREEDY))
        talk = engine.Conversation(store, model)
        assert len(talk.extend(ids, **GREEDY)) == NEW
    assert caplog.text.count("runs without kvd") == 1


def test_windows_keep_what_is_not_stored_yet_and_no_more(store: kvd.Store) -> None:
    """One live cache over several turns. Fails if a window drops tokens of the chunk that is not full yet."""
    model, ids = build("gemma2"), prompt(150)
    one = engine.Adapter(store, model, chunk_tokens=CHUNK)
    cache, _ = one.load(ids)
    plain = caches.new_cache(model)
    for begin, end in ((0, 29), (29, 31), (31, 94), (94, 149)):
        assert torch.equal(run(model, ids[:, begin:end], cache), run(model, ids[:, begin:end], plain))
        one.save(cache, ids)
        held = {int(layer.keys.shape[2]) for layer in cache.layers if layer.is_sliding}
        assert max(held) <= 11 + CHUNK
    assert one.counters.chunks_stored == 2 * (149 // CHUNK), "both groups, all chunks"
    for length in (150, 100, 50, 17):
        assert one.load(ids[:, :length])[1] == (length - 1) // CHUNK * CHUNK
    with pytest.raises(kvd.UsageError, match="window of 12"):
        engine.Adapter(store, model, chunk_tokens=16)
    assert engine.Adapter(store, model).chunk_tokens == 8
