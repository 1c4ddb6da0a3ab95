"""Bytes in bulk: copies, checksums, prefix chains, paged and strided copies, over the native extension.

Owns nothing; a thin, typed façade that turns the native errors into `UsageError`. May be called by clientlib,
server and kvd.shm, from any thread: work of more than about 50 µs releases the GIL. A "buffer" is any contiguous
object with the buffer protocol (bytes, bytearray, memoryview, mmap, array, numpy array; for a torch tensor
`tensor.numpy()`). Invariants: hashes and identities equal those of kvd.layout.chain on every CPU; when a copy
returns, its bytes are ordered before anything the caller stores next (a publish), although it goes past the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from kvd.errors import UsageError
from kvd.shm import _native

PagedPlan = _native.PagedPlan
StridedPlan = _native.StridedPlan

SHA256: Final = "sha256"
XXH3_128: Final = "xxh3_128"
_ALGORITHMS: Final = {SHA256: 0, XXH3_128: 1}

GATHER: Final = 0
SCATTER: Final = 1

_NATIVE_ERRORS: Final = (TypeError, ValueError, BufferError)

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Integers = Buffer | Sequence[int]
    """One dimension of int32, uint32, int64 or uint64, or a list or tuple of int."""

Loop = tuple[int, int, int]
"""count, stride in bytes on the first side (paged, source), stride in bytes on the second (object, destination)"""

PagedRun = tuple[int, int, int, int, int, int, Sequence[Loop]]
"""tensor, run_bytes, paged_offset, object_offset, paged_block_stride, object_block_stride, loops (outermost first)"""

StridedCopy = tuple[int, int, int, int, int, Sequence[Loop]]
"""source, destination, source_offset, destination_offset, run_bytes, loops (outermost first)"""


def _usage(error: Exception, code: str) -> UsageError:
    return UsageError(str(error), code=code)


def _paged_usage(error: Exception) -> UsageError:
    return _usage(error, "block-ids" if str(error).startswith("block_ids") else "paged")


def checksum(buf: Buffer, seed: int = 0) -> int:
    """XXH3, 64 bits, of a buffer; `seed` 0 … 2^64 - 1."""
    try:
        return _native.xxh3_64(buf, seed)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "argument") from None


def request_hash(request: str) -> int:
    """The number under which a request id travels in records: never 0, which means none."""
    return checksum(request.encode()) or 1


def xxh3_128(message: Buffer, seed: int = 0) -> bytes:
    """XXH3, 128 bits, in its canonical big-endian form: the function that kvd.layout.chain asks for."""
    try:
        return _native.xxh3_128(message, seed)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "argument") from None


def copy(dst: Buffer, src: Buffer, threads: int = 1) -> None:
    """Copy src to dst, of the same size and not overlapping; past the cache from 256 KiB on.

    `threads` (1 … 64) helpers live in this call only, and only for shares of 4 MiB. Raises UsageError(argument).
    """
    try:
        _native.copy(dst, src, threads)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "argument") from None


def copy_checksum(dst: Buffer, src: Buffer, seed: int) -> int:
    """`copy` and `checksum(src, seed)` in one pass over memory. Raises UsageError(argument)."""
    try:
        return _native.copy_checksum(dst, src, seed)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "argument") from None


def tokens_u32(tokens: Integers) -> bytes:
    """Token ids as u32, little-endian. Raises UsageError(token) naming the first position that is not 0 … 2^32 - 1."""
    try:
        return _native.tokens_u32(tokens)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "token") from None


def chain(
    parent: Buffer,
    tokens: Integers,
    chunk_tokens: int,
    algorithm: str = SHA256,
    extras: Sequence[bytes] | None = None,
) -> bytes:
    """Identities, 32 bytes each, of the full chunks of `tokens` after `parent`; the rest at the end has none.

    `tokens` as `tokens_u32` takes them, or the plain bytes that it gives. `extras` has one item per full chunk (b"" for
    none). Raises UsageError: `token` names position and value, `chunk` anything else.
    """
    number = _ALGORITHMS.get(algorithm)
    if number is None:
        allowed = ", ".join(_ALGORITHMS)
        raise UsageError(f"chain algorithm {algorithm!r} is unknown; allowed: {allowed}", code="algorithm")
    try:
        if isinstance(tokens, bytes | bytearray) or (isinstance(tokens, memoryview) and tokens.format == "B"):
            if len(tokens) % 4:
                raise ValueError(f"tokens has {len(tokens)} bytes: not a whole number of u32")
            tokens = memoryview(tokens).cast("I")
        return _native.chain(parent, tokens, chunk_tokens, number, None if extras is None else list(extras))
    except _NATIVE_ERRORS as error:
        raise _usage(error, "token" if str(error).startswith("tokens") else "chunk") from None


def chain_engine(parent: Buffer, hashes: Buffer, hash_bytes: int) -> bytes:
    """Identities of the chunks that an engine names by its own hashes, `hash_bytes` (1 … 4096) each, after `parent`."""
    try:
        return _native.chain_engine(parent, hashes, hash_bytes)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "engine-hash") from None


def seeds(identities: Buffer, member: int) -> bytes:
    """Checksum seeds, u64 each, of one member (0 … 65535) of every identity in `identities` (n × 32 bytes)."""
    try:
        return _native.seeds(identities, member)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "identity") from None


def paged_plan(
    object_bytes: int, blocks_count: int, blocks_per_object: int, runs: Sequence[PagedRun]
) -> PagedPlan:
    """A plan for `gather` and `scatter`, checked once. Raises UsageError(plan) naming the run and the field.

    For block `id` (of `blocks_count`) at place b (of `blocks_per_object`) of an object, each run moves run_bytes
    between tensor + paged_offset + id·paged_block_stride + Σ i·paged stride
    and object + object_offset + b·object_block_stride + Σ i·object stride, over at most four loops.
    """
    try:
        return PagedPlan(object_bytes, blocks_count, blocks_per_object, runs)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "plan") from None


def gather(
    plan: PagedPlan, objects: Sequence[Buffer], tensors: Sequence[Buffer], block_ids: Integers
) -> None:
    """Fill `objects` (each exactly plan.object_bytes) from the paged `tensors`.

    `block_ids` holds blocks_per_object ids for each object in turn. The plan must fill the whole object. Everything is
    checked before the first byte moves. Raises UsageError(paged, block-ids).
    """
    try:
        _native.paged_copy(plan, GATHER, objects, tensors, block_ids)
    except _NATIVE_ERRORS as error:
        raise _paged_usage(error) from None


def scatter(
    plan: PagedPlan, objects: Sequence[Buffer], tensors: Sequence[Buffer], block_ids: Integers
) -> None:
    """Write `objects` into the paged `tensors`: as `gather`, the other way.

    The plan may read part of an object. No block may be named twice: what it held would be another object's.
    """
    try:
        _native.paged_copy(plan, SCATTER, objects, tensors, block_ids)
    except _NATIVE_ERRORS as error:
        raise _paged_usage(error) from None


def strided_plan(copies: Sequence[StridedCopy]) -> StridedPlan:
    """A plan for `strided_copy`, checked once; the native form of kvd.layout.strided.Copy. Raises UsageError(plan)."""
    try:
        return StridedPlan(copies)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "plan") from None


def strided_copy(plan: StridedPlan, sources: Sequence[Buffer], destinations: Sequence[Buffer]) -> None:
    """Carry out a strided plan; sizes are checked before the first byte moves. Raises UsageError(strided)."""
    try:
        _native.strided_copy(plan, sources, destinations)
    except _NATIVE_ERRORS as error:
        raise _usage(error, "strided") from None
