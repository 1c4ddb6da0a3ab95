"""The prefix chain: identity covers everything before, nothing is dropped or clamped, and extending is cheap."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd import limits
from kvd.errors import UsageError
from kvd.layout import chain

ROOT = chain.chain_root(bytes(32), 4)


def test_the_same_tokens_after_another_prefix_are_another_chunk() -> None:
    one = chain.chain(ROOT, [1, 2, 3, 4, 9, 9, 9, 9], 4)
    other = chain.chain(ROOT, [1, 2, 3, 5, 9, 9, 9, 9], 4)
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_chunk_size_algorithm_and_namespace_are_in_the_root() -> None:
    roots = {
        chain.chain_root(namespace, tokens, algorithm)
        for namespace in (bytes(32), bytes(31) + b"\1")
        for tokens in (4, 8)
        for algorithm in chain.ALGORITHMS
    }
    assert len(roots) == 8


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, limits.token_id_max), max_size=60), st.data())
def test_extending_in_any_pieces_gives_the_same_chain(tokens: list[int], data: st.DataObject) -> None:
    builder = chain.ChainBuilder(ROOT, 4)
    at = 0
    grown: list[bytes] = []
    while at < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - at))
        grown += builder.extend(tokens[at : at + size])
        at += size
    assert grown == builder.identities == chain.chain(ROOT, tokens, 4)
    assert len(grown) == chain.published_chunks(len(tokens), 4)
    assert builder.tokens_count == len(tokens)


def test_only_new_chunks_are_hashed() -> None:
    hashed: list[int] = []

    def counting(message: bytes) -> bytes:
        hashed.append(len(message))
        return chain.sha256(message)

    builder = chain.ChainBuilder(ROOT, 4, counting)
    builder.extend(list(range(4000)))
    hashed.clear()
    builder.extend(list(range(9)))
    assert len(hashed) == 2


def test_extras_separate_and_cannot_come_late_or_twice() -> None:
    """Row E2: silently drop late extras and this fails."""
    plain = chain.chain(ROOT, range(12), 4)
    image = chain.chain(ROOT, range(12), 4, {1: b"image"})
    assert image[0] == plain[0]
    assert image[1] != plain[1]
    assert image[2] != plain[2]
    builder = chain.ChainBuilder(ROOT, 4)
    builder.extend(range(6), {1: b"image"})
    with pytest.raises(UsageError, match="chunk 0 came after it was hashed"):
        builder.extend([7], {0: b"late"})
    with pytest.raises(UsageError, match="two different extras"):
        builder.extend([7], {1: b"other"})
    assert builder.tokens_count == 6
    builder.extend(range(6, 12), {1: b"image"})
    assert builder.identities == image


@pytest.mark.parametrize(
    "tokens",
    [
        array("I", [1, 2, 3, 2**32 - 1]),
        np.array([1, 2, 3, 2**32 - 1], dtype=np.uint32),
        memoryview(array("I", [1, 2, 3, 2**32 - 1])),
        (1, 2, 3, 2**32 - 1),
        [np.int64(1), np.uint8(2), 3, np.uint64(2**32 - 1)],
    ],
    ids=["array", "numpy", "memoryview", "tuple", "numpy scalars"],
)
def test_buffers_and_lists_hash_alike(tokens: object) -> None:
    assert chain.token_bytes(tokens) == chain.token_bytes([1, 2, 3, 2**32 - 1])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1, -1], "token -1 .* position 1"),
        ([2**32], "token 4294967296"),
        ([1, 2.0], "token 2.0 .* position 1"),
        ([True], "token True"),
        (["7"], "token '7'"),
        ([None], "token None"),
        (b"\1\2\3\4", "format 'B'"),
        (np.array([1, 2], dtype=np.int64), "format"),
        (np.array([1.0], dtype=np.float32), "format"),
        (np.array([[1]], dtype=np.uint32), "2 dimensions"),
    ],
)
def test_tokens_of_a_wrong_kind_are_refused(tokens: object, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        chain.token_bytes(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("chunk_tokens", [0, -4, 2**21, True, 4.0, "4"])
def test_chunk_sizes_out_of_range_are_refused(chunk_tokens: int) -> None:
    with pytest.raises(UsageError, match=str(chunk_tokens)):
        chain.chain_root(bytes(32), chunk_tokens)


def test_a_chunk_is_a_multiple_of_the_block() -> None:
    assert chain.check_chunk_tokens(256, block_tokens=16) == 256
    with pytest.raises(UsageError, match="multiple of the engine's block of 16 tokens; the nearest is 96"):
        chain.check_chunk_tokens(100, block_tokens=16)
    with pytest.raises(UsageError, match="block of 0"):
        chain.check_chunk_tokens(100, block_tokens=0)


def test_wrong_identities_and_hashes_are_refused() -> None:
    with pytest.raises(UsageError, match="namespace root is 31"):
        chain.chain_root(bytes(31), 4)
    with pytest.raises(UsageError, match="algorithm 'md5'"):
        chain.chain_root(bytes(32), 4, "md5")
    with pytest.raises(UsageError, match="parent is str"):
        chain.link("x" * 32, [1])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="digest is 16"):
        chain.link(bytes(32), [1], hash32=lambda message: bytes(16))
    with pytest.raises(UsageError, match="no tokens"):
        chain.link(bytes(32), [])
    with pytest.raises(UsageError, match="empty"):
        chain.link_hash(bytes(32), b"")
    with pytest.raises(UsageError, match="not 32"):
        chain.xxh3_128(lambda message, seed: bytes(8))(b"")


def test_seeds_differ_by_identity_and_member() -> None:
    seeds = {chain.checksum_seed(identity, m) for identity in (bytes(32), b"\1" * 32) for m in range(128)}
    assert len(seeds) == 256
    with pytest.raises(UsageError, match="128"):
        chain.checksum_seed(bytes(32), 128)


@pytest.mark.parametrize(
    ("prompt", "usable", "published"),
    [(0, 0, 0), (1, 0, 0), (255, 0, 0), (256, 0, 1), (257, 1, 1), (512, 1, 2), (513, 2, 2), (8192, 31, 32)],
)
def test_the_last_token_is_always_computed(prompt: int, usable: int, published: int) -> None:
    """S-1 rounded down: use S instead and the rows at a chunk boundary fail."""
    assert chain.usable_chunks(prompt, 256) == usable
    assert chain.usable_tokens(prompt, 256) == usable * 256
    assert chain.published_chunks(prompt, 256) == published


def test_prompts_that_are_no_counts_are_refused() -> None:
    for prompt in (-1, 1.5, True):
        with pytest.raises(UsageError, match="prompt_tokens"):
            chain.usable_chunks(prompt, 4)  # type: ignore[arg-type]
