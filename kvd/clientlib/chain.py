"""Chain: the identities of a prompt's chunks, made by the native hasher, extended as the prompt grows.

Pure data plus native hashing; no shared memory. A slice is a view of the same chain. Layout and hashes are those of
kvd.layout.chain, which is the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvd import arguments, limits
from kvd.errors import UsageError
from kvd.layout import chain as reference
from kvd.shm import compute
from kvd.shm.messages import NO_PARENT

_SIZE = limits.identity_bytes


class Chain:
    """Identities of consecutive chunks. `len(chain)` counts them; `chain[a:b]` shares them; `chain[i]` is 32 bytes.

    `extend(tokens)` hashes only what became a whole chunk; tokens of an unfinished chunk wait in `tail`. A partial
    chunk has no identity: it is never stored.
    """

    __slots__ = ("_algorithm", "_ids", "_root", "_start", "_stop", "_tail", "chunk_tokens", "tokens_count")

    def __init__(self, root: bytes, chunk_tokens: int, algorithm: str) -> None:
        chunk_tokens = arguments.count("chunk_tokens", chunk_tokens, 1, limits.chunk_tokens_max, "chunk")
        arguments.text("algorithm", algorithm)
        self._root = reference.chain_root(root, chunk_tokens, algorithm)
        self._algorithm = algorithm
        self._ids = b""
        self._tail = b""
        self._start, self._stop = 0, 0
        self.chunk_tokens = chunk_tokens
        self.tokens_count = 0

    def extend(self, tokens: Any, extras: Sequence[bytes] | None = None) -> Chain:
        """Append token ids (u32 buffer, integer array, or list); returns self.

        `extras` holds one bytes per chunk that these tokens complete. Raises UsageError naming position and value of
        a token that is not an integer in 0 … 2^32 − 1, or if this is a slice.
        """
        if self._start or self._stop * _SIZE != len(self._ids):
            raise UsageError("only a whole chain can be extended, not a slice of it", code="chain-slice")
        if tokens is None:
            raise arguments.refusal(
                "tokens", tokens, "give integers: an array, a numpy array, or a list", "token"
            )
        added = compute.tokens_u32(tokens)
        self.tokens_count += len(added) // 4
        pending = self._tail + added
        whole = len(pending) - len(pending) % (4 * self.chunk_tokens)
        parent = self._ids[-_SIZE:] if self._ids else self._root
        self._ids += compute.chain(parent, pending[:whole], self.chunk_tokens, self._algorithm, extras)
        self._tail = pending[whole:]
        self._stop = len(self._ids) // _SIZE
        return self

    def extend_hashes(self, hashes: Any, hash_bytes: int) -> Chain:
        """Append chunks named by an engine's own block hashes (`hash_bytes` each), chained under the namespace."""
        if self._tail:
            raise UsageError("a chain of tokens cannot go on with block hashes", code="chain-mixed")
        arguments.buffer(
            "hashes", hashes, "give the hashes of the chunks, one after the other, as bytes", "engine-hash"
        )
        arguments.count("hash_bytes", hash_bytes, 1, 4096, "engine-hash")
        parent = self._ids[-_SIZE:] if self._ids else self._root
        self._ids += compute.chain_engine(parent, hashes, hash_bytes)
        self._stop = len(self._ids) // _SIZE
        self.tokens_count = self._stop * self.chunk_tokens
        return self

    @classmethod
    def of_identities(cls, root: bytes, chunk_tokens: int, identities: bytes) -> Chain:
        """A chain whose identities are known already (n × 32 bytes), e.g. handed over by a scheduler."""
        way = f"give n × {_SIZE} bytes, such as chain.identities"
        given = arguments.buffer("identities", identities, way, "identity")
        if given.nbytes % _SIZE:
            raise UsageError(f"identities of {given.nbytes} B are not whole 32-byte ones", code="identity")
        chain = cls(root, chunk_tokens, "sha256")
        chain._ids = bytes(given)
        chain._stop = given.nbytes // _SIZE
        chain.tokens_count = chain._stop * chain.chunk_tokens
        return chain

    @property
    def identities(self) -> bytes | memoryview:
        """The identities of this slice, 32 bytes each, as one read-only buffer."""
        if self._start == 0 and self._stop * _SIZE == len(self._ids):
            return self._ids
        return memoryview(self._ids)[self._start * _SIZE : self._stop * _SIZE]

    @property
    def parent(self) -> bytes:
        """The identity before the first chunk of this slice, zeros at the start of the prompt."""
        return self._ids[(self._start - 1) * _SIZE : self._start * _SIZE] if self._start else NO_PARENT

    @property
    def start(self) -> int:
        """Number of this slice's first chunk in the whole chain."""
        return self._start

    @property
    def usable_chunks(self) -> int:
        """Chunks a prompt of these tokens may reuse: its last token is always computed, for its logits."""
        return max(0, min(self._stop, (self.tokens_count - 1) // self.chunk_tokens) - self._start)

    def __len__(self) -> int:
        return self._stop - self._start

    def __iter__(self) -> Iterator[bytes]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step != 1:
                raise UsageError("a chain is sliced without a step", code="chain-slice")
            return self._view(self._start + start, self._start + max(start, stop))
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"chunk {index} of a chain of {len(self)}")
        at = (self._start + position) * _SIZE
        return self._ids[at : at + _SIZE]

    def _view(self, start: int, stop: int) -> Chain:
        other = Chain.__new__(Chain)
        other._root, other._algorithm, other._ids, other._tail = (
            self._root,
            self._algorithm,
            self._ids,
            self._tail,
        )
        other._start, other._stop = start, stop
        other.chunk_tokens, other.tokens_count = self.chunk_tokens, self.tokens_count
        return other

    def __repr__(self) -> str:
        return f"<Chain of {len(self)} chunks of {self.chunk_tokens} tokens>"
