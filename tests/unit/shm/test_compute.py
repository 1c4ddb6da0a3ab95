"""The native compute functions against hashlib, the reference package of XXH3, numpy and kvd.layout.chain.

Seeded; every kernel that this CPU runs is tested, since a machine with wide vectors would otherwise never run the
narrow ones. Size mistakes, overlaps, foreign ids and short buffers must be refused before a byte moves.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import random
import struct
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.errors import UsageError
from kvd.layout import chain as reference
from kvd.layout import strided
from kvd.shm import _native, compute

SEED = 20240607
STREAMED = 256 * 1024  # from here on copies go past the cache


@pytest.fixture(params=_native.isa_names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each set of kernels in turn; the best again afterwards."""
    _native.isa_select(request.param)
    yield request.param
    _native.isa_select(_native.isa_names()[-1])


def random_bytes(size: int, seed: int = SEED) -> bytes:
    return random.Random(seed).randbytes(size)


# -- checksums and copies -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_xxh3_equals_the_reference_at_every_length_class(isa: str, seed: int) -> None:
    data = random_bytes(5000)
    for size in [*range(260), 511, 512, 513, 1023, 1024, 1025, 1088, 2048, 2049, 4999, 5000]:
        assert compute.checksum(data[:size], seed) == xxhash.xxh3_64_intdigest(data[:size], seed), size
        assert compute.xxh3_128(data[:size], seed) == xxhash.xxh3_128_digest(data[:size], seed), size


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        63,
        64,
        240,
        241,
        1024,
        1025,
        65536,
        STREAMED - 1,
        STREAMED,
        STREAMED + 1,
        STREAMED + 63,
        1_000_003,
    ],
)
def test_copies_move_every_byte_and_no_other_and_the_fused_hash_is_xxh3(isa: str, size: int) -> None:
    source = random_bytes(size + 64)
    for to, at in [(0, 0), (1, 0), (0, 1), (8, 24), (63, 33)]:
        src = memoryview(source)[at : at + size]
        for fused in (False, True):
            target = bytearray(b"\xa5" * (to + size + 64))
            dst = memoryview(target)[to : to + size]
            if fused:
                assert compute.copy_checksum(dst, src, size + 7) == xxhash.xxh3_64_intdigest(src, size + 7)
            else:
                compute.copy(dst, src)
            assert target[to : to + size] == src
            assert target[:to] == b"\xa5" * to
            assert target[to + size :] == b"\xa5" * 64


def test_a_copy_with_threads_moves_every_byte() -> None:
    source = random_bytes(9 * 1024 * 1024 + 5)
    for threads in (1, 2, 3, 64):
        target = bytearray(len(source))
        compute.copy(target, source, threads=threads)
        assert target == source


def test_any_buffer_is_taken() -> None:
    data = random_bytes(4096)
    area = mmap.mmap(-1, 4096)
    compute.copy(area, data)
    for buf in (
        data,
        bytearray(data),
        memoryview(data),
        area,
        np.frombuffer(data, np.float64).reshape(8, 64),
    ):
        assert compute.checksum(buf, 3) == xxhash.xxh3_64_intdigest(data, 3)
    area.close()  # would raise BufferError if an export were left behind


def test_buffers_are_not_held_after_an_error() -> None:
    target = bytearray(10)
    with pytest.raises(UsageError):
        compute.copy(target, b"123")
    target.extend(b"x")  # would raise BufferError


@pytest.mark.parametrize(
    ("dst", "src", "text"),
    [
        (bytearray(3), b"1234", "dst has 3 bytes, src has 4"),
        (b"123", b"123", "dst: the buffer is read-only"),
        ("abc", b"123", "dst: a bytes-like object is required, not str"),
        (bytearray(3), 3, "src: a bytes-like object is required, not int"),
        (bytearray(8), memoryview(bytearray(16))[::2], "src: the buffer is not C-contiguous"),
    ],
)
def test_copies_refuse_by_name(dst: Any, src: Any, text: str) -> None:
    for call in (lambda: compute.copy(dst, src), lambda: compute.copy_checksum(dst, src, 0)):
        with pytest.raises(UsageError, match=text) as caught:
            call()
        assert caught.value.code == "KVD-USAGE-ARGUMENT"


def test_overlap_is_refused_and_neighbours_are_not() -> None:
    view = memoryview(bytearray(range(200)))
    for dst, src in [(view[:100], view[:100]), (view[1:101], view[:100]), (view[:100], view[99:199])]:
        with pytest.raises(UsageError, match="overlap"):
            compute.copy(dst, src)
    compute.copy(view[:100], view[100:])
    assert view[:100] == view[100:]


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_thread_counts_out_of_range_are_refused(threads: int) -> None:
    with pytest.raises(UsageError, match=f"threads = {threads}: must be 1 .. 64"):
        compute.copy(bytearray(1), b"1", threads)


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="avx1024"):
        _native.isa_select("avx1024")


@pytest.mark.slow
def test_long_work_lets_other_threads_run() -> None:
    """With a switch interval of a minute, another thread gets the GIL only if the call gives it away.

    Sees `GilReleaseIfLong` left out: then the thread that was woken before the call never runs within it.
    """
    source = bytes(128 * 1024 * 1024)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    try:
        for _ in range(50):  # the scheduler of a busy machine may be late, but not 50 times
            turn, ran = threading.Lock(), threading.Event()
            turn.acquire()

            def run(turn: Any = turn, ran: threading.Event = ran) -> None:
                with turn:
                    ran.set()

            thread = threading.Thread(target=run)
            thread.start()
            turn.release()
            compute.checksum(source)
            happened = ran.is_set()
            thread.join()
            if happened:
                return
    finally:
        sys.setswitchinterval(interval)
    pytest.fail("no other thread ran during 50 long hashes")


# -- chains ---------------------------------------------------------------------------------------------------


def xxh3(message: bytes, seed: int) -> bytes:
    return xxhash.xxh3_128_digest(message, seed)


def expected_chain(
    parent: bytes, tokens: list[int], chunk: int, algorithm: str, extras: list[bytes]
) -> bytes:
    hash32 = reference.sha256 if algorithm == "sha256" else reference.xxh3_128(xxh3)
    out = []
    for i in range(len(tokens) // chunk):
        parent = reference.link(parent, tokens[i * chunk : (i + 1) * chunk], extras[i], hash32)
        out.append(parent)
    return b"".join(out)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    chunk=st.integers(1, 40),
    algorithm=st.sampled_from(["sha256", "xxh3_128"]),
    portable=st.booleans(),
    data=st.data(),
)
def test_chain_equals_the_reference(
    tokens: list[int], chunk: int, algorithm: str, portable: bool, data: st.DataObject
) -> None:
    parent = data.draw(st.binary(min_size=32, max_size=32))
    count = len(tokens) // chunk
    extras = data.draw(st.lists(st.binary(max_size=80), min_size=count, max_size=count))
    _native.sha256_force_portable(portable)
    try:
        expected = expected_chain(parent, tokens, chunk, algorithm, extras)
        assert compute.chain(parent, tokens, chunk, algorithm, extras) == expected
        packed = compute.tokens_u32(tokens)
        assert packed == reference.token_bytes(tokens)
        assert compute.chain(parent, packed, chunk, algorithm, extras) == expected
    finally:
        _native.sha256_force_portable(False)
    plain = expected_chain(parent, tokens, chunk, algorithm, [b""] * count)
    assert compute.chain(parent, tokens, chunk, algorithm) == plain


def test_the_message_is_exactly_as_documented() -> None:
    parent, tokens, extras = bytes(range(32)), [1, 2**32 - 1], b"lora"
    message = parent + struct.pack("<III", 2, *tokens) + struct.pack("<I", 4) + extras
    assert compute.chain(parent, tokens, 2, extras=[extras]) == hashlib.sha256(message).digest()
    both = xxhash.xxh3_128_digest(message, 0) + xxhash.xxh3_128_digest(message, 1)
    assert compute.chain(parent, tokens, 2, "xxh3_128", [extras]) == both


def test_every_integer_buffer_gives_the_same_chain() -> None:
    tokens = [random.Random(SEED).randrange(2**31) for _ in range(1000)]
    expected = compute.chain(bytes(32), tokens, 16)
    wide = np.array([0, *tokens], dtype=np.int64)
    odd = np.frombuffer(b"x" + np.array(tokens, np.uint32).tobytes(), np.uint8)[1:].view(
        np.uint32
    )  # misaligned
    for form in (
        array("I", tokens), array("i", tokens), array("l", tokens), array("Q", tokens), tuple(tokens), odd,
        memoryview(array("q", tokens)), wide[1:], wide[1:].astype(np.int32), wide[1:].astype("<u4"),
        np.array(tokens, np.uint64),
    ):  # fmt: skip
        assert compute.chain(bytes(32), form, 16) == expected


@pytest.mark.slow
def test_a_torch_tensor_goes_through_numpy() -> None:
    torch = pytest.importorskip("torch")
    tokens = torch.arange(64)
    assert compute.chain(bytes(32), tokens.numpy(), 16) == compute.chain(bytes(32), list(range(64)), 16)
    with pytest.raises(UsageError, match=r"tensor\.numpy\(\)"):
        compute.chain(bytes(32), tokens, 16)


@pytest.mark.parametrize("value", [-1, 2**32, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 17, 32])
def test_a_token_out_of_range_is_named_with_its_position(value: int, position: int) -> None:
    """Position 32 is in the tail that no chunk takes: it is wrong all the same."""
    tokens = [5] * 33
    tokens[position] = value
    for form in (tokens, tuple(tokens), np.array(tokens, np.int64), array("q", tokens)):
        for call in (
            lambda form=form: compute.chain(bytes(32), form, 16),
            lambda form=form: compute.tokens_u32(form),
        ):
            with pytest.raises(
                UsageError, match=rf"tokens\[{position}\] = {value}: must be 0 .. 4294967295"
            ) as caught:
                call()
            assert caught.value.code == "KVD-USAGE-TOKEN"
    if value == -1:
        with pytest.raises(UsageError, match=rf"tokens\[{position}\] = -1"):
            compute.chain(bytes(32), np.array(tokens, np.int32), 16)


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        ([1, 2.0], r"tokens\[1\]: an int is required, not float"),
        ([True], r"tokens\[0\]: an int is required, not bool"),
        ([1, 2**70], r"tokens\[1\] = 1180591620717411303424"),
        (np.zeros(4, np.float32), "format 'f'"),
        (np.zeros(4, np.uint16), "format 'H'"),
        (np.zeros(4, ">u4"), "format '>I'"),
        (np.zeros((2, 2), np.uint32), "2 dimensions"),
        (np.zeros(8, np.uint32)[::2], "not C-contiguous"),
        (7, "tokens: a buffer of int32"),
        (b"12345", "tokens has 5 bytes"),
    ],
)
def test_tokens_of_a_wrong_kind_are_refused(tokens: Any, text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        compute.chain(bytes(32), tokens, 2)
    assert caught.value.code == "KVD-USAGE-TOKEN"


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"parent": b"123"}, "parent has 3 bytes"),
        ({"chunk_tokens": 0}, "chunk_tokens = 0: must be 1 .. 1048576"),
        ({"chunk_tokens": 2**20 + 1}, "chunk_tokens = 1048577"),
        ({"algorithm": "md5"}, "'md5' is unknown; allowed: sha256, xxh3_128"),
        ({"extras": [b""]}, "extras has 1 items for 2 full chunks"),
        ({"extras": [b"", 3]}, r"extras\[1\]: a bytes-like object"),
    ],
)
def test_chain_refuses_other_arguments_by_name(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        compute.chain(**{"parent": bytes(32), "tokens": [1, 2, 3, 4, 5], "chunk_tokens": 2, **kwargs})


def test_engine_hashes_and_seeds_equal_the_reference() -> None:
    rng = random.Random(SEED)
    for hash_bytes in (1, 8, 16, 32, 64, 200):
        hashes = [rng.randbytes(hash_bytes) for _ in range(20)]
        parent = rng.randbytes(32)
        ids = compute.chain_engine(parent, b"".join(hashes), hash_bytes)
        assert ids == b"".join(reference.chain_from_hashes(parent, hashes))
        for member in (0, 1, 127):
            seeds = memoryview(compute.seeds(ids, member)).cast("Q").tolist()
            assert seeds == [reference.checksum_seed(ids[i : i + 32], member) for i in range(0, len(ids), 32)]
    for call, text in [
        (lambda: compute.chain_engine(bytes(32), b"123", 2), "hashes has 3 bytes"),
        (lambda: compute.chain_engine(bytes(32), b"", 0), "hash_bytes = 0"),
        (lambda: compute.seeds(b"123", 0), "identities has 3 bytes"),
        (lambda: compute.seeds(bytes(32), 65536), "member = 65536"),
    ]:
        with pytest.raises(UsageError, match=text):
            call()


def test_a_request_hash_is_stable_and_never_zero() -> None:
    assert compute.request_hash("req-1") == xxhash.xxh3_64_intdigest(b"req-1")
    assert compute.request_hash("") != 0


def test_golden_chain_vectors() -> None:
    """The file that binds kvd.layout.chain binds the native twin too."""
    vectors = json.loads((Path(__file__).parents[1] / "layout" / "vectors" / "chain.json").read_text())
    chunks = 0
    for case in vectors["chains"]:
        chunk, rule, tokens = case["chunk_tokens"], case.get("token_rule"), case.get("tokens")
        if rule is not None:
            tokens = [(i * rule["multiply"] + rule["add"]) % rule["modulo"] for i in range(rule["count"])]
        count = len(tokens) // chunk
        extras = [bytes.fromhex(case["extras"].get(str(number), "")) for number in range(count)]
        ids = compute.chain(bytes.fromhex(case["root"]), tokens, chunk, case["algorithm"], extras)
        assert [ids[at : at + 32].hex() for at in range(0, len(ids), 32)] == case["identities"], case["name"]
        chunks += count
    assert chunks > 0
    for case in vectors["engine"]:
        parent = bytes.fromhex(case["root"])
        for engine_hash, identity in zip(case["engine_hashes"], case["identities"], strict=True):
            parent = compute.chain_engine(parent, bytes.fromhex(engine_hash), len(engine_hash) // 2)
            assert parent.hex() == identity
    for case in vectors["seeds"]:
        seeds = compute.seeds(bytes.fromhex(case["identity"]), case["member"])
        assert int.from_bytes(seeds, "little") == int(case["seed"])


# -- paged and strided copies ---------------------------------------------------------------------------------


def paged_case(
    layers: int, blocks: int, block_tokens: int, heads: int, dim: int, *, head_major: bool
) -> tuple[compute.PagedPlan, list[Any], Any]:
    """Per-layer paged tensors [2, blocks, tokens, heads, dim] (or heads first) and objects [L, 2, tokens, heads, dim].

    The object has 4 blocks. Returns plan, tensors and a function that builds the expected object from block ids.
    """
    rng = np.random.default_rng(SEED)
    inner = (heads, block_tokens, dim) if head_major else (block_tokens, heads, dim)
    tensors = [rng.integers(0, 2**16, (2, blocks, *inner), dtype=np.uint16) for _ in range(layers)]
    block_bytes = block_tokens * heads * dim * 2
    runs: list[compute.PagedRun] = []
    for layer in range(layers):
        for kv in range(2):
            base = (layer * 2 + kv) * 4 * block_bytes
            if head_major:
                loops = [(block_tokens, dim * 2, heads * dim * 2), (heads, block_tokens * dim * 2, dim * 2)]
                run = (layer, dim * 2, kv * blocks * block_bytes, base, block_bytes, block_bytes, loops)
            else:
                run = (layer, block_bytes, kv * blocks * block_bytes, base, block_bytes, block_bytes, [])
            runs.append(run)
    plan = compute.paged_plan(layers * 2 * 4 * block_bytes, blocks, 4, runs)

    def expected(ids: Any) -> bytes:
        parts = []
        for tensor in tensors:
            picked = tensor[:, ids]
            parts.append(picked.transpose(0, 1, 3, 2, 4) if head_major else picked)
        return b"".join(np.ascontiguousarray(part).tobytes() for part in parts)

    return plan, tensors, expected


@pytest.mark.parametrize("head_major", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 40, 16, 2, 8), (3, 64, 16, 4, 64), (2, 48, 4, 3, 20), (2, 64, 64, 2, 256)]
)
def test_gather_and_scatter_equal_numpy(isa: str, shape: tuple[int, ...], head_major: bool) -> None:
    plan, tensors, expected = paged_case(*shape, head_major=head_major)
    ids = np.random.default_rng(SEED).permutation(shape[1])[:32]
    objects = [bytearray(plan.object_bytes) for _ in range(8)]
    compute.gather(plan, objects, tensors, ids)
    for i, one in enumerate(objects):
        assert one == expected(ids[4 * i : 4 * i + 4])
    written = [np.full_like(tensor, 0xA5A5) for tensor in tensors]
    compute.scatter(plan, objects, written, ids.tolist())
    for tensor, got in zip(tensors, written, strict=True):
        assert (got[:, ids] == tensor[:, ids]).all()
        others = np.setdiff1d(np.arange(shape[1]), ids)
        assert (got[:, others] == 0xA5A5).all()  # no byte of another block is touched


def test_paged_copies_refuse_before_a_byte_moves() -> None:
    plan, tensors, _ = paged_case(2, 40, 16, 2, 8, head_major=False)
    good_ids = [3, 39, 0, 7]
    short = tensors[1].reshape(-1).view(np.uint8)[:-1]  # a byte less than the last block needs
    cases: list[tuple[Any, Any, Any, str]] = [
        ([bytearray(plan.object_bytes)], tensors, [3, 40, 0, 7], r"block_ids\[1\] = 40: must be 0 .. 39"),
        ([bytearray(plan.object_bytes)], tensors, [3, -1, 0, 7], r"block_ids\[1\] = -1"),
        ([bytearray(plan.object_bytes)], tensors, good_ids[:3], "block_ids has 3 items: 1 objects need 4"),
        ([bytearray(plan.object_bytes - 1)], tensors, good_ids, r"objects\[0\] has \d+ bytes"),
        ([bytes(plan.object_bytes)], tensors, good_ids, r"objects\[0\]: the buffer is read-only"),
        ([bytearray(plan.object_bytes)], tensors[:1], good_ids, "tensors has 1 items: the plan uses 2"),
        (
            [bytearray(plan.object_bytes)],
            [tensors[0], short],
            good_ids,
            r"tensors\[1\] has \d+ bytes",
        ),
    ]
    for objects, given_tensors, ids, text in cases:
        with pytest.raises(UsageError, match=text):
            compute.gather(plan, objects, given_tensors, ids)
        assert not any(objects[0])


def test_a_gather_that_would_leave_holes_is_refused_but_may_scatter() -> None:
    """Stale bytes of the slot's former owner must never be published as part of an object."""
    plan = compute.paged_plan(100, 4, 1, [(0, 60, 0, 0, 60, 0, [])])
    tensor = bytearray(240)
    with pytest.raises(UsageError, match="fills 60 of an object's 100 bytes"):
        compute.gather(plan, [bytearray(100)], [tensor], [2])
    compute.scatter(plan, [b"\x07" * 100], [tensor], [2])
    assert tensor == bytes(120) + b"\x07" * 60 + bytes(60)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((0, 4, 1, [(0, 8, 0, 0, 8, 0, [])]), "object_bytes = 0"),
        ((64, 0, 1, [(0, 8, 0, 0, 8, 0, [])]), "blocks_count = 0"),
        ((64, 4, 0, [(0, 8, 0, 0, 8, 0, [])]), "blocks_per_object = 0"),
        ((64, 4, 1, []), "copy nothing"),
        ((64, 4, 1, [(0, 8, 0, 0, 8, 0, []), (0, 8, 0, 57, 8, 0, [])]), r"runs\[1\].object_offset = 57"),
        ((64, 4, 1, [(0, 8, 0, 0, 2**63, 0, [])]), r"runs\[0\].paged_block_stride"),
        ((64, 4, 1, [(0, 8, 0, 0, 8, 0, [(1, 0, 0)] * 5)]), r"runs\[0\].dims = 5"),
        ((64, 4, 1, [(0, -8, 0, 0, 8, 0, [])]), "incompatible"),
    ],
)
def test_impossible_plans_are_refused(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(UsageError, match=text) as caught:
        compute.paged_plan(*args)
    assert caught.value.code == "KVD-USAGE-PLAN"


def test_strided_copies_equal_the_plain_reference() -> None:
    rng = random.Random(SEED)
    for _ in range(100):
        sources = [rng.randbytes(8000) for _ in range(3)]
        copies = []
        for _ in range(rng.randrange(1, 5)):
            run = rng.choice([1, 2, 16, 64, 100, 256])
            loops = tuple(
                (rng.randrange(1, 4), rng.randrange(300), rng.randrange(300)) for _ in range(rng.randrange(5))
            )
            copies.append(
                strided.Copy(
                    rng.randrange(3), rng.randrange(2), rng.randrange(500), rng.randrange(500), run, loops
                )
            )
        expected = [bytearray(8000), bytearray(8000)]
        strided.run_reference(copies, lambda i: sources[i], lambda i: expected[i])  # noqa: B023
        plan = compute.strided_plan(
            [(c.src, c.dst, c.src_offset, c.dst_offset, c.run_bytes, c.loops) for c in copies]
        )
        got = [bytearray(8000), bytearray(8000)]
        sources_used, used = len(plan.source_bytes_min), len(plan.destination_bytes_min)
        compute.strided_copy(plan, sources[:sources_used], got[:used])
        assert got == expected
        assert plan.moved_bytes == sum(c.size_bytes for c in copies)
    with pytest.raises(UsageError, match=r"sources\[0\] has 7 bytes: the plan reaches 8"):
        compute.strided_copy(compute.strided_plan([(0, 0, 0, 0, 8, [])]), [bytes(7)], [bytearray(8)])


@pytest.mark.parametrize("blocks", [16, 1 << 20])  # marked in a table, and found by sorting
def test_a_scatter_names_each_block_once_and_a_gather_may_name_it_again(blocks: int) -> None:
    plan = compute.paged_plan(1, blocks, 1, [(0, 1, 0, 0, 1, 0, [])])
    tensor = bytearray(blocks)
    tensor[5] = 7
    objects = [bytearray(1) for _ in range(4)]
    compute.gather(plan, objects, [tensor], [5, 9, 5, 3])
    assert [one[0] for one in objects] == [7, 0, 7, 0]
    before = bytes(tensor)
    with pytest.raises(UsageError, match=r"block_ids\[2\] = 5: stands at block_ids\[0\] too") as error:
        compute.scatter(plan, [b"\1"] * 4, [tensor], [5, 9, 5, 3])
    assert error.value.code == "KVD-USAGE-BLOCK-IDS"
    assert tensor == before
    compute.scatter(plan, [b"\1"] * 4, [tensor], [5, 9, 6, 3])
    assert [tensor[n] for n in (3, 5, 6, 9)] == [1] * 4
