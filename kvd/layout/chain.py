"""Chained prefix identity: which prefix a chunk of tokens belongs to, in 32 bytes.

Pure; the reference for the native hasher, which must agree byte for byte (tests/unit/layout/vectors). A
chunk is a fixed number of tokens; its identity covers every token before it, so the same tokens after
another prefix are another object. Incremental: extending a prompt hashes only the new chunks. All integers
are little-endian.

    root      = SHA-256("kvd-chain-v1\\0" | namespace root (32) | u32 chunk_tokens | algorithm name, ASCII)
    message_i = h_(i-1) (32) | u32 count of tokens | tokens, u32 each | u32 extras length | extras
    h_i       = H(message_i), h_(-1) = root
    H         = sha256: SHA-256(m)
                xxh3_128: XXH3_128(m, seed 0) | XXH3_128(m, seed 1), each in its canonical, big-endian form
    h_i       = SHA-256("kvd-ext-v1\\0" | h_(i-1) | u32 length | engine hash)   for an engine's own hashes
    seed      = first 8 bytes of SHA-256("kvd-seed-v1\\0" | identity (32) | u16 member index), as a u64

Chunk size and algorithm are in the root, so that chains made with different ones never meet. xxh3 does not
resist someone who looks for collisions: it is for trusted prompts; the caller brings the function, kvd does
not need it.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Protocol

from kvd import limits
from kvd.errors import UsageError

SHA256: Final = "sha256"
XXH3_128: Final = "xxh3_128"
ALGORITHMS: Final = (SHA256, XXH3_128)

Hash = Callable[[bytes], bytes]
"""A message in, 32 bytes out."""

_ROOT_PREFIX: Final = b"kvd-chain-v1\0"
_EXT_PREFIX: Final = b"kvd-ext-v1\0"
_SEED_PREFIX: Final = b"kvd-seed-v1\0"


class Xxh3(Protocol):
    """XXH3 128 in its canonical big-endian form, e.g. `lambda m, s: xxhash.xxh3_128_digest(m, seed=s)`."""

    def __call__(self, message: bytes, seed: int, /) -> bytes: ...


def sha256(message: bytes) -> bytes:
    """SHA-256, the default hash of a chain."""
    return hashlib.sha256(message).digest()


def xxh3_128(function: Xxh3) -> Hash:
    """The 32-byte hash that the algorithm "xxh3_128" stands for, over a given XXH3: seed 0, then seed 1."""

    def hash32(message: bytes) -> bytes:
        digest = function(message, 0) + function(message, 1)
        if len(digest) != limits.identity_bytes:
            raise UsageError(f"xxh3_128 gave {len(digest)} bytes for two digests, not 32", code="hash")
        return digest

    return hash32


def check_chunk_tokens(chunk_tokens: int, *, block_tokens: int | None = None) -> int:
    """A chunk size in tokens, checked: 1 … chunk_tokens_max and a multiple of the engine's block."""
    if isinstance(chunk_tokens, bool) or not isinstance(chunk_tokens, int):
        raise UsageError(f"chunk_tokens {chunk_tokens!r} is not an integer", code="chunk")
    if not 0 < chunk_tokens <= limits.chunk_tokens_max:
        raise UsageError(
            f"chunk_tokens {chunk_tokens} is outside 1 … {limits.chunk_tokens_max}",
            code="chunk", chunk_tokens=chunk_tokens,
        )  # fmt: skip
    if block_tokens is not None and (isinstance(block_tokens, bool) or not isinstance(block_tokens, int)):
        raise UsageError(f"block_tokens {block_tokens!r} is not an integer", code="chunk")
    if block_tokens is not None and (block_tokens <= 0 or chunk_tokens % block_tokens):
        nearest = max(1, round(chunk_tokens / block_tokens)) * block_tokens if block_tokens > 0 else 0
        raise UsageError(
            f"chunk_tokens {chunk_tokens} is not a multiple of the engine's block of {block_tokens} tokens"
            + (f"; the nearest is {nearest}" if nearest else ""),
            code="chunk", chunk_tokens=chunk_tokens, block_tokens=block_tokens,
        )  # fmt: skip
    return chunk_tokens


def chain_root(namespace_root: bytes, chunk_tokens: int, algorithm: str = SHA256) -> bytes:
    """The identity that stands before the first chunk: namespace, chunk size and algorithm, 32 bytes."""
    _identity("namespace root", namespace_root)
    check_chunk_tokens(chunk_tokens)
    if algorithm not in ALGORITHMS:
        raise UsageError(
            f"chain algorithm {algorithm!r} is unknown; allowed: {', '.join(ALGORITHMS)}",
            code="algorithm", algorithm=str(algorithm),
        )  # fmt: skip
    body = namespace_root + struct.pack("<I", chunk_tokens) + algorithm.encode("ascii")
    return sha256(_ROOT_PREFIX + body)


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 in little-endian. A buffer of u32 (array, numpy, torch via memoryview) is taken as it
    is.

    Raises UsageError(token) naming the first position that is not an integer in 0 … 2^32 - 1.
    """
    if not isinstance(tokens, list | tuple):
        view = _u32_view(tokens)
        if view is not None:
            return view
    try:
        packed = array("I", tokens)
    except (TypeError, OverflowError, ValueError):
        packed = array("I")
        for position, token in enumerate(tokens):
            packed.append(_token(position, token))
    for position, token in enumerate(tokens):
        if isinstance(token, bool):
            _token(position, token)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _u32_view(tokens: object) -> bytes | None:
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except TypeError:
        return None
    if view.format not in ("I", "L", "=I", "<I", "@I") or view.itemsize != 4 or view.ndim != 1:
        raise UsageError(
            f"a token buffer has {view.ndim} dimensions of format {view.format!r}; allowed is one "
            "dimension of unsigned 32-bit integers (or a plain list of int)",
            code="token",
        )  # fmt: skip
    return view.tobytes()


def _token(position: int, token: object) -> int:
    value: int | None = None
    if not isinstance(token, bool | float | str | bytes):
        try:
            value = token.__index__()  # type: ignore[attr-defined]
        except (AttributeError, TypeError):
            value = None
    if value is None or not 0 <= value <= limits.token_id_max:
        raise UsageError(
            f"token {token!r} ({type(token).__name__}) at position {position} is not an integer in "
            f"0 … {limits.token_id_max}",
            code="token", position=position,
        )  # fmt: skip
    return value


def message(parent: bytes, tokens: Sequence[int], extras: bytes = b"") -> bytes:
    """The exact bytes that are hashed for one chunk after `parent`."""
    _identity("parent", parent)
    packed = token_bytes(tokens)
    if not packed:
        raise UsageError("a chunk has no tokens", code="chunk")
    return b"".join(
        (parent, struct.pack("<I", len(packed) // 4), packed, struct.pack("<I", len(extras)), extras)
    )


def link(parent: bytes, tokens: Sequence[int], extras: bytes = b"", hash32: Hash = sha256) -> bytes:
    """The identity of the chunk that holds `tokens` after `parent`, 32 bytes."""
    return _identity("digest", hash32(message(parent, tokens, extras)))


def link_hash(parent: bytes, engine_hash: bytes) -> bytes:
    """The identity of a chunk that an engine names by its own hash."""
    _identity("parent", parent)
    if not engine_hash:
        raise UsageError("an engine hash is empty", code="engine-hash")
    return sha256(_EXT_PREFIX + parent + struct.pack("<I", len(engine_hash)) + engine_hash)


def chain(
    root: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: Mapping[int, bytes] | None = None,
    hash32: Hash = sha256,
) -> list[bytes]:
    """Identities of all full chunks of `tokens`; a partial chunk at the tail has none. Extras by chunk
    number.
    """
    builder = ChainBuilder(root, chunk_tokens, hash32)
    builder.extend(tokens, extras or {})
    return list(builder.identities)


def chain_from_hashes(root: bytes, engine_hashes: Iterable[bytes]) -> list[bytes]:
    """Identities of the chunks that an engine names by its own hashes, in order, one hash a chunk."""
    identities: list[bytes] = []
    parent = root
    for engine_hash in engine_hashes:
        parent = link_hash(parent, engine_hash)
        identities.append(parent)
    return identities


class ChainBuilder:
    """A growing prefix chain, not thread-safe. Invariant: len(identities) = tokens_count // chunk_tokens."""

    __slots__ = ("_extras", "_hash", "_tail", "chunk_tokens", "identities", "root", "tokens_count")

    def __init__(self, root: bytes, chunk_tokens: int, hash32: Hash = sha256) -> None:
        self.root = _identity("root", root)
        self.chunk_tokens = check_chunk_tokens(chunk_tokens)
        self.identities: list[bytes] = []
        self.tokens_count = 0
        self._hash = hash32
        self._tail = b""
        self._extras: dict[int, bytes] = {}

    def extend(self, tokens: Sequence[int], extras: Mapping[int, bytes] | None = None) -> list[bytes]:
        """Append tokens; the identities of the chunks that became full. `extras` by absolute chunk number.

        Raises UsageError(extras) if a chunk was hashed before its extras came: they cannot be added any
        more, and dropping them would let two prompts meet that must not.
        """
        added = extras or {}
        for number, extra in added.items():
            if number < len(self.identities):
                raise UsageError(
                    f"extras for chunk {number} came after it was hashed; give them with its tokens",
                    code="extras", chunk=number,
                )  # fmt: skip
            if self._extras.get(number, extra) != extra:
                raise UsageError(
                    f"chunk {number} was given two different extras", code="extras", chunk=number
                )
        packed = self._tail + token_bytes(tokens)
        self._extras.update(added)
        size = 4 * self.chunk_tokens
        before = len(self.identities)
        parent = self.identities[-1] if self.identities else self.root
        head = struct.pack("<I", self.chunk_tokens)
        for start in range(0, len(packed) - size + 1, size):
            extra = self._extras.pop(len(self.identities), b"")
            body = (parent, head, packed[start : start + size], struct.pack("<I", len(extra)), extra)
            parent = _identity("digest", self._hash(b"".join(body)))
            self.identities.append(parent)
        self._tail = packed[(len(self.identities) - before) * size :]
        self.tokens_count = len(self.identities) * self.chunk_tokens + len(self._tail) // 4
        return self.identities[before:]


def checksum_seed(identity: bytes, member_index: int) -> int:
    """Seed of the checksum of one object, so that the right bytes under a wrong key or member do not check
    out.
    """
    _identity("identity", identity)
    if not 0 <= member_index < limits.members_per_family_max:
        raise UsageError(
            f"member index {member_index} is outside 0 … {limits.members_per_family_max - 1}", code="member"
        )
    digest = sha256(_SEED_PREFIX + identity + struct.pack("<H", member_index))
    return int.from_bytes(digest[:8], "little")


def published_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Chunks of a prompt that can be published: the full ones. A partial chunk at the tail never is."""
    return _prompt(prompt_tokens) // check_chunk_tokens(chunk_tokens)


def usable_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Chunks of a prompt that may be loaded: those within its first S - 1 tokens.

    The last token is always computed, because its logits choose the next one; so a prompt that ends exactly
    at a chunk boundary does not load its last chunk.
    """
    return max(0, _prompt(prompt_tokens) - 1) // check_chunk_tokens(chunk_tokens)


def usable_tokens(prompt_tokens: int, chunk_tokens: int) -> int:
    """The same rule in tokens: S - 1, rounded down to a chunk."""
    return usable_chunks(prompt_tokens, chunk_tokens) * chunk_tokens


def _prompt(prompt_tokens: int) -> int:
    if isinstance(prompt_tokens, bool) or not isinstance(prompt_tokens, int) or prompt_tokens < 0:
        raise UsageError(f"prompt_tokens {prompt_tokens!r} is not a count of tokens", code="prompt")
    return prompt_tokens


def _identity(name: str, value: bytes) -> bytes:
    if not isinstance(value, bytes) or len(value) != limits.identity_bytes:
        size = len(value) if isinstance(value, bytes) else type(value).__name__
        raise UsageError(f"{name} is {size}, not {limits.identity_bytes} bytes", code="identity")
    return value
