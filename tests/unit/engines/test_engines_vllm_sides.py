"""Both halves of the vLLM connector against a real daemon, without vLLM: its objects are stood in for by plain ones.

What the engine does with the answers is tested with the real one (tests/engines/test_vllm.py).
"""

from __future__ import annotations

import hashlib
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvd.engines.vllm_identity import Identity, identify
from kvd.engines.vllm_messages import Plan, Report
from kvd.engines.vllm_scheduler import SchedulerSide
from kvd.engines.vllm_worker import WorkerSide
from kvd.errors import CompatibilityError, UsageError
from kvd.layout.geometry import Rule

BLOCK, HEADS, DIM, BLOCKS = 16, 2, 8, 64


class FullAttentionSpec(types.SimpleNamespace):
    pass


class SlidingWindowSpec(types.SimpleNamespace):
    pass


class MambaSpec(types.SimpleNamespace):
    pass


def spec(cls: type = FullAttentionSpec, **changes: Any) -> Any:
    given = {"block_size": BLOCK, "num_kv_heads": HEADS, "head_size": DIM, "dtype": torch.float32, **changes}
    return cls(**given)


def config(*groups: Any, extra: dict[str, Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    """A VllmConfig and a KVCacheConfig, as far as kvd reads them."""
    namespace = types.SimpleNamespace
    hf = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
    }  # fmt: skip
    model = namespace(
        model="org/model", revision="main", dtype=torch.float32, quantization=None,
        hf_config=namespace(to_dict=lambda: hf, _commit_hash="0" * 40),
        get_total_num_kv_heads=lambda: HEADS,
    )  # fmt: skip
    parallel = namespace(tensor_parallel_size=1, pipeline_parallel_size=1, world_size=1)
    vllm_config = namespace(
        kv_transfer_config=namespace(kv_connector_extra_config=extra or {}), model_config=model,
        cache_config=namespace(prefix_caching_hash_algo="sha256"), parallel_config=parallel, speculative_config=None,
    )  # fmt: skip
    for name, value in changes.items():
        where, _, what = name.partition("__")
        setattr(getattr(vllm_config, where), what, value)
    groups = groups or (spec(),)
    described = [
        namespace(
            kv_cache_spec=one, layer_names=[f"model.layers.{2 * n + i}.self_attn.attn" for i in range(2)]
        )
        for n, one in enumerate(groups)
    ]
    return vllm_config, namespace(kv_cache_groups=described, num_blocks=BLOCKS, hash_block_size=None)


@dataclass
class Request:
    """A request of the engine, as far as kvd reads it."""

    request_id: str
    num_tokens: int
    salt: str = ""
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    lora_request: Any = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens
        parent = self.salt.encode()
        for n in range(self.num_tokens // BLOCK):
            parent = hashlib.sha256(parent + bytes([n])).digest()
            self.block_hashes.append(parent)


class Rig:
    """Both sides, two layers of tensors a group, and the steps of an engine."""

    def __init__(self, socket: str, *groups: Any, **extra: Any) -> None:
        self.identity: Identity = identify(*config(*groups, extra={"socket": socket, **extra}))
        self.tensors = {
            name: torch.randn(BLOCKS, HEADS, BLOCK, 2 * DIM)
            for names in self.identity.layers for name in names
        }  # fmt: skip
        self.scheduler = SchedulerSide(self.identity, 1)
        self.worker = WorkerSide(self.identity, 0)
        self.worker.register(self.tensors)
        assert self.scheduler.attachment.wait(10)
        assert self.worker.attachment is not None
        assert self.worker.attachment.wait(10)

    def plan(self, tables: dict[str, tuple[list[int], ...]], counts: dict[str, int]) -> Plan:
        blocks = types.SimpleNamespace(get_block_ids=tables.get)
        plan = Plan()
        self.scheduler.preempted()
        self.scheduler.promises(plan)
        self.scheduler.saves(
            plan, types.SimpleNamespace(kv_connector_block_state=blocks, num_scheduled_tokens=counts)
        )
        return plan

    def compute(self, plan: Plan, *, wait: bool = True) -> Report | None:
        """A step; `wait` for the reservations, as a step that takes long enough does."""
        self.worker.begin(plan)
        if plan.loads:
            self.worker.load(plan)
        if wait:
            assert self.worker._stores.flush(10)
        self.worker.save(plan)
        assert self.worker.flush(10)
        report = self.worker.report()
        if report is not None:
            self.scheduler.reported(report)
        return report

    def store(self, request: Request, *table: list[int]) -> None:
        """Match (nothing), compute all, save."""
        assert self.scheduler.match(request, 0) == (0, False)
        self.compute(self.plan({request.request_id: table}, {request.request_id: request.num_tokens}))
        self.scheduler.finished(request)

    def held(self) -> int:
        """Leases that the daemon knows of."""
        assert self.worker.attachment is not None
        store = self.worker.attachment.session.store  # type: ignore[union-attr]
        return sum(client["leases"] for client in store.call("clients"))

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


@pytest.fixture
def rig(daemon: Callable[..., Any]) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*groups: Any, **extra: Any) -> Rig:
        rigs.append(Rig(running.socket, *groups, **extra))
        return rigs[-1]

    running = daemon()
    yield make
    for one in rigs:
        one.close()


# -- what is described ------------------------------------------------------------------------------------------


def test_identity_reads_groups_as_the_engine_has_them() -> None:
    identity = identify(*config(spec(SlidingWindowSpec, sliding_window=64), spec()))
    assert [group.rule for group in identity.geometry.groups] == [Rule.FULL, Rule.WINDOW]
    assert identity.groups == (1, 0)
    assert identity.geometry.groups[1].layers == (0, 1)
    assert identity.chunk_tokens == BLOCK
    assert not identity.one_group


@pytest.mark.parametrize(
    ("groups", "changes", "error"),
    [
        ((spec(MambaSpec),), {}, "MambaSpec"),
        ((spec(kv_quant_mode=1),), {}, "quantised KV"),
        ((spec(), spec(block_size=32)), {}, "blocks of"),
        ((spec(SlidingWindowSpec, sliding_window=8),), {}, "smaller than a block"),
        ((), {"cache_config__prefix_caching_hash_algo": "xxhash"}, "made to collide"),
        ((), {"parallel_config__pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ((), {"cache_config__calculate_kv_scales": True}, "scales"),
    ],
)  # fmt: skip
def test_what_cannot_be_described_is_refused_by_name(groups: Any, changes: Any, error: str) -> None:
    """Never by guess: an engine that keeps something else than described would store garbage."""
    with pytest.raises((CompatibilityError, UsageError), match=error):
        identify(*config(*groups, **changes))


@pytest.mark.parametrize("extra", [{"load": "layer"}, {"sokcet": "x"}, {"load": "later"}, {"deadline_s": 0}])
def test_settings_are_checked(extra: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        identify(*config(extra=extra))


def test_tensors_that_are_not_as_described_are_refused() -> None:
    worker = WorkerSide(identify(*config()), 0)
    wrong = {name: torch.zeros(BLOCKS, HEADS + 1, BLOCK, 2 * DIM) for name in worker.identity.layers[0]}
    with pytest.raises(CompatibilityError):
        worker.register(wrong)


# -- what is copied ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("between", [False, True])
def test_what_is_loaded_is_what_was_saved(rig: Callable[..., Rig], between: bool) -> None:
    one = rig(load="async" if between else "sync")
    request = Request("a", 5 * BLOCK + 3)
    one.store(request, [3, 9, 4, 7, 5])
    again = Request("b", 5 * BLOCK + 3)
    assert one.scheduler.match(again, BLOCK) == (4 * BLOCK, between)
    assert one.scheduler.match(again, BLOCK) == (4 * BLOCK, between)  # asked again while it waits
    one.scheduler.allocated(again, ([20, 31, 32, 33, 34],), 4 * BLOCK)
    before = {name: tensor.clone() for name, tensor in one.tensors.items()}
    one.worker.load(plan := one.plan({}, {}))
    assert one.worker._loads.flush(10)
    assert one.worker.failed_blocks() == set()
    assert one.worker.through() == ({"b"} if between else set(), set())
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor[[31, 32, 33, 34]], before[name][[9, 4, 7, 5]])
        untouched = [n for n in range(BLOCKS) if n not in (31, 32, 33, 34)]
        assert torch.equal(tensor[untouched], before[name][untouched])
    report = one.worker.report()
    assert report is not None
    assert report.ended == {plan.loads[0].number: 1}
    assert one.scheduler._held
    one.scheduler.reported(report)
    assert not one.scheduler._held
    assert one.held() == 0


@pytest.mark.slow
def test_a_window_needs_its_last_blocks_only(rig: Callable[..., Rig]) -> None:
    """A10. Blocks that the engine took away (0) are neither saved nor loaded; the rest is."""
    one = rig(spec(), spec(SlidingWindowSpec, sliding_window=2 * BLOCK))
    request = Request("a", 6 * BLOCK + 1)
    one.store(request, [1, 2, 3, 4, 5, 6], [0, 0, 0, 14, 15, 16])
    again = Request("b", 6 * BLOCK + 1)
    assert one.scheduler.match(again, 0) == (6 * BLOCK, True)
    one.scheduler.allocated(again, ([41, 42, 43, 44, 45, 46], [0, 0, 0, 0, 55, 56]), 6 * BLOCK)
    before = {name: tensor.clone() for name, tensor in one.tensors.items()}
    one.worker.load(one.plan({}, {}))
    assert one.worker._loads.flush(10)
    assert one.worker.through() == ({"b"}, set())
    for name in one.identity.layers[0]:
        assert torch.equal(one.tensors[name][41:47], before[name][1:7])
    for name in one.identity.layers[1]:
        assert torch.equal(one.tensors[name][55:57], before[name][15:17])
        assert torch.equal(one.tensors[name][0], before[name][0])


@pytest.mark.slow
def test_a_window_without_its_blocks_is_no_hit(rig: Callable[..., Rig]) -> None:
    """A10: full attention is all there, the window's last blocks are not."""
    one = rig(spec(), spec(SlidingWindowSpec, sliding_window=2 * BLOCK))
    one.store(Request("a", 6 * BLOCK + 1), [1, 2, 3, 4, 5, 6], [11, 12, 13, 0, 0, 0])
    assert one.scheduler.match(Request("b", 6 * BLOCK + 1), 0) == (3 * BLOCK, True)


# -- what goes wrong --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_load_that_fails_is_told_and_nothing_of_its_epoch_is_saved(rig: Callable[..., Rig]) -> None:
    """A4, A5. Without the taint the blocks computed from garbage would be published under their right names."""
    one = rig()
    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    longer = Request("b", 6 * BLOCK + 1)
    longer.block_hashes[:3] = Request("a", 3 * BLOCK + 1).block_hashes
    assert one.scheduler.match(longer, 0) == (3 * BLOCK, False)
    table = ([31, 32, 33, 34, 35, 36],)
    one.scheduler.allocated(longer, table, 3 * BLOCK)
    longer.num_computed_tokens = 3 * BLOCK
    plan = one.plan({"b": table}, {"b": 3 * BLOCK + 1})
    assert len(plan.saves) == 1
    plan.loads[0].exported = plan.loads[0].exported[:-8] + bytes(8)  # a generation that is gone
    report = one.compute(plan)
    assert one.worker.failed_blocks() == {31, 32, 33}
    assert report is not None
    assert report.failed == {"b"}
    assert one.worker.counters.totals()["saves_tainted"] == 3
    assert one.worker.counters.totals()["saved_chunks"] == 3  # those of "a"
    late = one.plan({"b": table}, {})
    assert (late.epoch, late.saves) == (1, [])
    assert one.scheduler.match(longer, 0) == (0, False)  # else the engine would ask for ever
    longer.num_computed_tokens = 0
    one.compute(one.plan({"b": table}, {"b": 6 * BLOCK + 1}))
    assert one.worker.counters.totals()["saved_chunks"] == 6
    assert one.held() == 0


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [0, 2])
def test_a_promise_without_all_its_leases_is_a_failed_load(rig: Callable[..., Rig], chunks: int) -> None:
    """A4. No lease to adopt is no error by itself: unless compared, the engine decodes what lay in its blocks."""
    one = rig()
    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    again = Request("b", 3 * BLOCK + 1)
    assert one.scheduler.match(again, 0) == (3 * BLOCK, False)
    one.scheduler.allocated(again, ([31, 32, 33],), 3 * BLOCK)
    plan = one.plan({}, {})
    load = plan.loads[0]
    load.exported, load.identities = load.exported[: 24 * chunks], load.identities[: 32 * chunks]
    one.worker.load(plan)
    assert one.worker.failed_blocks() == {31, 32, 33}


@pytest.mark.slow
def test_blocks_of_a_request_that_is_gone_are_not_read(rig: Callable[..., Rig]) -> None:
    """A2. The room comes late, the request is preempted, its blocks are somebody else's: nothing is published."""
    one = rig()
    request = Request("a", 3 * BLOCK + 1)
    one.scheduler.match(request, 0)
    plan = one.plan({"a": ([1, 2, 3],)}, {"a": request.num_tokens})
    begun = one.worker._stores.do
    one.worker._stores.do = lambda work: None  # type: ignore[method-assign]  # the daemon has not answered yet
    one.compute(plan, wait=False)
    one.worker._stores.do = begun  # type: ignore[method-assign]
    assert len(one.worker._jobs) == 1
    request.num_preemptions = 1
    following = one.plan({}, {})
    assert following.gone == ["a"]
    one.compute(following)
    assert one.worker._jobs == []
    assert one.worker.counters.totals()["saves_gone"] == 3
    assert one.scheduler.match(Request("b", 3 * BLOCK + 1), 0) == (0, False)


@pytest.mark.slow
def test_a_save_whose_room_comes_late_is_made_after_a_later_step(rig: Callable[..., Rig]) -> None:
    one = rig()
    request = Request("a", 3 * BLOCK + 1)
    one.scheduler.match(request, 0)
    waiting: list[Callable[[], None]] = []
    begun = one.worker._stores.do
    one.worker._stores.do = waiting.append  # type: ignore[method-assign, assignment]
    one.compute(one.plan({"a": ([1, 2, 3],)}, {"a": request.num_tokens}), wait=False)
    one.worker._stores.do = begun  # type: ignore[method-assign]
    waiting[0]()
    one.compute(one.plan({}, {}))
    assert one.worker.counters.totals()["saved_chunks"] == 3
    assert one.scheduler.match(Request("b", 3 * BLOCK + 1), 0) == (3 * BLOCK, False)


@pytest.mark.slow
def test_requests_that_end_leave_no_lease(rig: Callable[..., Rig]) -> None:
    """B2: matched and then aborted, allocated and then aborted."""
    one = rig()
    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    for number in range(200):
        request = Request(f"r{number}", 3 * BLOCK + 1)
        assert one.scheduler.match(request, 0)[0] == 3 * BLOCK
        if number % 2:
            one.scheduler.allocated(request, ([11, 12, 13],), 3 * BLOCK)
        one.scheduler.finished(request)
    assert one.held() > 0
    one.compute(one.plan({}, {}))
    assert one.held() == 0
    assert one.scheduler._requests == {}


@pytest.mark.slow
def test_after_a_reset_the_past_is_not_found(rig: Callable[..., Rig]) -> None:
    """A9: the engine's weights have changed; both sides go on in a namespace of their own."""
    one = rig()
    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    one.scheduler.reset()
    one.store(Request("b", 3 * BLOCK + 1), [4, 5, 6])
    assert one.scheduler.match(Request("c", 3 * BLOCK + 1), 0) == (3 * BLOCK, False)


@pytest.mark.slow
def test_a_lora_is_named_by_its_weights(rig: Callable[..., Rig], tmp_path: Any) -> None:
    """The engine hashes name and path; other weights at the same path must be another namespace."""
    one = rig()
    weights = tmp_path / "adapter_model.safetensors"
    found = []
    for number, content in enumerate((b"one", b"other", b"one")):
        weights.write_bytes(content)
        lora = types.SimpleNamespace(lora_name="l", lora_path=str(tmp_path), lora_int_id=number)
        request = Request(f"r{number}", 3 * BLOCK + 1, lora_request=lora)
        one.scheduler.match(request, 0)  # begins to look at the weights
        while one.scheduler._adapter(request) is None:
            pass
        found.append(one.scheduler.match(request, 0)[0])
        one.compute(one.plan({request.request_id: ([1, 2, 3],)}, {request.request_id: 3 * BLOCK + 1}))
        one.scheduler.finished(request)
    assert found == [0, 0, 3 * BLOCK]


@pytest.mark.slow
def test_a_worker_at_another_daemon_makes_it_a_miss(rig: Callable[..., Rig]) -> None:
    """After a restart the scheduler may be attached before its workers are: promising then would fail."""
    one = rig()
    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    one.scheduler.reported(Report(attached_epochs={"another"}))
    assert one.scheduler.match(Request("b", 3 * BLOCK + 1), 0) == (0, False)
    one.worker._told_epoch = None
    one.compute(one.plan({}, {}))
    assert one.scheduler.match(Request("c", 3 * BLOCK + 1), 0) == (3 * BLOCK, False)


@pytest.mark.slow
def test_a_request_is_named_when_it_arrives(rig: Callable[..., Rig]) -> None:
    """The step that looks it up hashes nothing any more, and finds the same; nothing is kept of one that never ran."""
    one = rig()
    one.store(Request("a", 5 * BLOCK + 1), [1, 2, 3, 4, 5])
    request, other = Request("b", 5 * BLOCK + 1), Request("c", 5 * BLOCK + 1)
    one.scheduler.arrived(request)
    chain = one.scheduler._requests["b"].chain
    assert chain is not None
    assert len(chain) == 5
    assert one.scheduler.match(request, 0) == one.scheduler.match(other, 0) == (5 * BLOCK, False)
    assert one.scheduler._requests["b"].chain is chain
    assert bytes(chain.identities) == bytes(one.scheduler._requests["c"].chain.identities)  # type: ignore[union-attr]
    late = Request("d", 5 * BLOCK + 1)
    one.scheduler.arrived(late)
    one.scheduler.reset()  # whatever was named before has another name now
    assert one.scheduler.match(late, 0) == (0, False)
    for ended in (request, other, late):
        one.scheduler.finished(ended)
    assert one.scheduler._requests == one.scheduler._saving == {}
    assert one.held() == 0


def a_layered_load(one: Rig, chunks: int = 3) -> Plan:
    """A step that loads `chunks` blocks to 31, 32, … and computes 3 more; what was stored lies in 1, 2, …"""
    one.store(Request("a", chunks * BLOCK + 1), list(range(1, chunks + 1)))
    longer = Request("b", (chunks + 3) * BLOCK + 1)
    longer.block_hashes[:chunks] = Request("a", chunks * BLOCK + 1).block_hashes
    assert one.scheduler.match(longer, 0) == (chunks * BLOCK, False)
    table = (list(range(31, 31 + chunks + 3)),)
    one.scheduler.allocated(longer, table, chunks * BLOCK)
    longer.num_computed_tokens = chunks * BLOCK
    return one.plan({"b": table}, {"b": 3 * BLOCK + 1})


@pytest.mark.slow
def test_layers_are_there_when_they_are_waited_for(rig: Callable[..., Rig]) -> None:
    """Layer by layer: no layer is let through before its bytes are there, and none of the next is waited for.

    With a `wait` that does not wait the second layer would be read while it is still as it was.
    """
    one = rig(load="layers")
    plan = a_layered_load(one)
    names = one.identity.layers[0]
    copy_group, order = one.worker.copy_group, []
    release = threading.Event()

    def second_is_late(load: Any, group: int, leases: Any, cache: Any) -> int:
        order.append(cache.layout.first_layer)
        if cache.layout.first_layer == 1:
            assert release.wait(10)
        return copy_group(load, group, leases, cache)

    one.worker.copy_group = second_is_late  # type: ignore[method-assign]
    before = {name: one.tensors[name].clone() for name in names}
    one.worker.begin(plan)
    one.worker.load(plan)
    one.worker.wait_for_layer(names[0])
    assert torch.equal(one.tensors[names[0]][31:34], before[names[0]][1:4])
    assert torch.equal(one.tensors[names[1]], before[names[1]])
    waited: list[bool] = []

    def computing() -> None:
        one.worker.wait_for_layer(names[1])
        waited.append(torch.equal(one.tensors[names[1]][31:34], before[names[1]][1:4]))

    thread = threading.Thread(target=computing)
    thread.start()
    release.set()
    thread.join(10)
    assert waited == [True]
    assert order == [0, 1]
    assert one.worker._stores.flush(10)
    one.worker.save(plan)
    assert one.worker.failed_blocks() == set()
    report = one.worker.report()
    assert report is not None
    assert report.ended == {plan.loads[0].number: 1}
    one.scheduler.reported(report)
    assert one.held() == 0


@pytest.mark.slow
@pytest.mark.parametrize("where", ["adopt", "second band"])
def test_a_layered_load_that_fails_is_told_and_taints(rig: Callable[..., Rig], where: str) -> None:
    """A4, A5: however far it came. Everybody is let through; what was computed with it is not saved."""
    one = rig(load="layers")
    plan = a_layered_load(one)
    if where == "adopt":
        plan.loads[0].exported = plan.loads[0].exported[:-8] + bytes(8)  # a generation that is gone
    else:
        copy_group = one.worker.copy_group

        def unlucky(load: Any, group: int, leases: Any, cache: Any) -> int:
            if cache.layout.first_layer == 1:
                raise RuntimeError("as the test wants it")
            return copy_group(load, group, leases, cache)

        one.worker.copy_group = unlucky  # type: ignore[method-assign]
    one.worker.begin(plan)
    one.worker.load(plan)
    for name in one.identity.layers[0]:
        one.worker.wait_for_layer(name)
    assert one.worker._stores.flush(10)
    one.worker.save(plan)
    assert one.worker.failed_blocks() == {31, 32, 33}
    assert one.worker.failed_blocks() == set()
    report = one.worker.report()
    assert report is not None
    assert (report.failed, report.tainted_epoch) == ({"b"}, 0)
    counted = one.worker.counters.totals()
    assert (counted["load_failures"], counted["saves_tainted"], counted["saved_chunks"]) == (1, 3, 3)
    one.scheduler.reported(report)
    assert one.held() == 0


@pytest.mark.slow
def test_a_layered_load_whose_copying_dies_has_failed(rig: Callable[..., Rig]) -> None:
    """A4, A5: fails if a load that is not known to have failed counts as arrived: unfilled blocks are used."""
    one = rig(load="layers")
    plan = a_layered_load(one)
    layers = one.worker._layers
    assert layers is not None

    def dies(*_given: Any) -> None:
        raise MemoryError("as the test wants it")

    layers.copy = dies  # type: ignore[method-assign, assignment]
    one.worker.begin(plan)
    one.worker.load(plan)
    for name in one.identity.layers[0]:
        one.worker.wait_for_layer(name)
    assert one.worker._stores.flush(10)
    one.worker.save(plan)
    assert one.worker.failed_blocks() == {31, 32, 33}
    report = one.worker.report()
    assert report is not None
    assert (report.failed, report.tainted_epoch) == ({"b"}, 0)
    assert report.ended == {plan.loads[0].number: 1}, "else the scheduler holds its leases for ever"
    assert one.worker.counters.totals()["saves_tainted"] == 3
    one.scheduler.reported(report)
    assert one.held() == 0


@pytest.mark.slow
@pytest.mark.parametrize("how", ["layers", "async"])
def test_loads_that_no_thread_can_be_had_for_have_failed(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Fails if the hook raises, which ends the engine; if the loads are not told, which hangs it or gives it garbage;
    or if the thread that never ran is given the next load, which then never ends.
    """
    one = rig(load=how)
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        if thread.name == "kvd-load":
            raise RuntimeError("can't start new thread")
        start(thread)

    one.store(Request("a", 3 * BLOCK + 1), [1, 2, 3])
    before = {name: tensor.clone() for name, tensor in one.tensors.items()}
    for request, lucky in (("b", False), ("c", True)):
        again = Request(request, 3 * BLOCK + 1)
        assert one.scheduler.match(again, 0) == (3 * BLOCK, how == "async")
        one.scheduler.allocated(again, ([31, 32, 33],), 3 * BLOCK)
        plan = one.plan({}, {})
        one.worker.begin(plan)
        with monkeypatch.context() as patched:
            if not lucky:
                patched.setattr(threading.Thread, "start", none_left)
            one.worker.load(plan)
        assert one.worker._loads.flush(10)
        for name in one.identity.layers[0]:
            one.worker.wait_for_layer(name)
        one.worker.save(plan)
        failed = set() if lucky else {request}
        if how == "async":
            assert one.worker.through() == ({request}, failed)
        else:
            assert one.worker.failed_blocks() == (set() if lucky else {31, 32, 33})
        report = one.worker.report()
        assert report is not None
        assert (report.failed, report.ended) == (failed, {plan.loads[0].number: 1})
        one.scheduler.reported(report)
        one.scheduler.finished(again)
        assert one.held() == 0
    for name, tensor in one.tensors.items():
        assert torch.equal(tensor[31:34], before[name][1:4])
    assert one.worker.counters.totals()["load_failures"] == 1
