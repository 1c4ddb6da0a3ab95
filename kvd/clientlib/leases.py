"""What a reader holds: leases on families, and views of their bytes where they lie.

A lease protects one generation of one family from reuse until it is released. Views (memoryview, numpy, torch) keep
their lease alive, whatever else happens: memory under a view never changes. Local, no daemon involved.

    acquire ──▶ held ── release, no view alive ──▶ over
                  └── release, views alive ──▶ ViewsAliveError; over when the last view dies
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvd import arguments, limits
from kvd.clientlib.native_errors import NATIVE, translate
from kvd.errors import CorruptionError, KvdError, UsageError, ViewsAliveError
from kvd.shm import compute

if TYPE_CHECKING:
    from kvd.clientlib.chain import Chain
    from kvd.shm._native import Lease as NativeLease
    from kvd.shm._native import LeaseBatch


Report = Callable[[bytes, int], bool]
"""report(identity, member): tell the daemon that an object is damaged; whether it found the same and withdrew it."""

Verified = set[tuple[bytes, int]]
"""(identity, member) of what was compared with its checksum already. None where `verify_reads` is off."""


class Lease:
    """The right to read one family. `view` is member 0; `member_view(m)` any other.

    With `verify_reads` a member is compared with its checksum when it is first looked at under this lease.
    """

    __slots__ = ("_native", "_report", "_verified", "identity")

    def __init__(
        self,
        native: NativeLease,
        identity: bytes,
        report: Report | None = None,
        verified: Verified | None = None,
    ) -> None:
        self._native = native
        self._report = report
        self._verified = verified
        self.identity = identity

    @property
    def view(self) -> memoryview:
        """The bytes of member 0, read-only, without a copy. Raises as `member_view`."""
        if self._verified is not None:
            self._verify_once(0)
        try:
            return self._native.view(0)
        except NATIVE as error:
            raise _lease_error(error, 0) from None

    def member_view(self, member: int) -> memoryview:
        """The bytes of one member, read-only, without a copy.

        Raises LifecycleError after release, UsageError for a member that this family has not, and with `verify_reads`
        CorruptionError.
        """
        if self._verified is not None:
            self._verify_once(member)
        try:
            return self._native.view(member)
        except NATIVE as error:
            raise _lease_error(error, member) from None

    def _verify_once(self, member: int) -> None:
        verified = self._verified
        if verified is not None and (self.identity, member) not in verified:
            self.verify(member)
            verified.add((self.identity, member))

    def size(self, member: int = 0) -> int:
        """Size of a member in bytes. Raises LifecycleError, UsageError as `member_view`."""
        try:
            return self._native.size(member)
        except NATIVE as error:
            raise _lease_error(error, member) from None

    def array(self, dtype: Any, shape: Sequence[int], member: int = 0) -> Any:
        """A read-only numpy array over a member; it keeps the lease."""
        import numpy

        view = self.member_view(member)
        try:
            return numpy.frombuffer(view, dtype=dtype).reshape(shape)
        except (TypeError, ValueError, RuntimeError, OverflowError, SyntaxError) as error:
            raise _no_array(dtype, shape, view.nbytes, error) from None

    def tensor(self, dtype: Any, shape: Sequence[int], member: int = 0) -> Any:
        """A torch tensor over a member; it keeps the lease.

        torch knows no read-only memory: writing into this tensor in place is a segmentation fault. Clone it first.
        """
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            # Through the memoryview: torch lets go of the object at once, but keeps the memoryview's buffer.
            view = self.member_view(member)
            try:
                return torch.frombuffer(view, dtype=dtype).view(*shape)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise _no_array(dtype, shape, view.nbytes, error) from None

    def verify(self, member: int = 0) -> None:
        """Compare the bytes with the checksum they were published with.

        Raises CorruptionError, after the daemon was told (a moment's wait): it looks itself, and withdraws the family.
        """
        arguments.count("member", member, 0, limits.members_per_family_max - 1, "member")
        seed = int.from_bytes(compute.seeds(self.identity, member), "little")
        try:
            expected = self._native.checksum(member)
            found = compute.checksum(self._native.view(member), seed)
        except NATIVE as error:
            raise _lease_error(error, member) from None
        if found != expected:
            withdrawn = self._report is not None and self._report(self.identity, member)
            raise CorruptionError(
                f"object {self.identity.hex()[:16]} member {member}: its bytes do not match its checksum",
                code="checksum", key=self.identity.hex(), member=member,
                expected=f"{expected:016x}", found=f"{found:016x}", withdrawn=withdrawn,
            )  # fmt: skip

    def release(self) -> None:
        """Give the lease back. Raises ViewsAliveError while views of it live, UsageError(forked) in a forked child."""
        try:
            self._native.release()
        except BufferError as error:
            raise _views_alive(error) from None
        except NATIVE as error:
            raise translate(error) from None


class Leases(Sequence[Lease]):
    """Leases on the leading chunks of a chain, taken at once. `len()` says how many there were to take."""

    __slots__ = ("_chain", "_native", "_report", "_verified")

    def __init__(
        self, native: LeaseBatch, chain: Chain, *, verify: bool = False, report: Report | None = None
    ) -> None:
        self._native = native
        self._chain = chain
        self._verified: Verified | None = set() if verify else None
        self._report = report

    def __len__(self) -> int:
        return len(self._native)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return Lease(self._native[index], self._chain[index], self._report, self._verified)

    def __iter__(self) -> Iterator[Lease]:
        return (self[i] for i in range(len(self)))

    @property
    def tokens_count(self) -> int:
        """Tokens that these leases cover."""
        return len(self) * self._chain.chunk_tokens

    def export(self) -> bytes:
        """Descriptors for another process of this request, to `Namespace.adopt`. Hold on until it has."""
        try:
            return self._native.export()
        except NATIVE as error:
            raise translate(error) from None

    def copy_to(self, destinations: Sequence[Any], *, member: int = 0, threads: int = 1) -> int:
        """Copy each object into the writable buffer at the same position; returns the bytes copied.

        Large copies pass the caches by (non-temporal stores). Raises UsageError on sizes that differ.
        """
        given = arguments.length("destinations", destinations, "give a list of writable buffers, one a lease")
        threads = arguments.count("threads", threads, 1, 64)
        if given > len(self):
            raise UsageError(f"{len(destinations)} destinations for {len(self)} leases", code="destinations")
        copied = 0
        for lease, destination in zip(self, destinations, strict=False):
            view = lease.member_view(member)
            size_bytes = arguments.buffer(
                "destination", destination, "give a writable buffer", "destinations"
            ).nbytes
            if size_bytes != view.nbytes:
                raise UsageError(
                    f"destination of {size_bytes} B for an object of {view.nbytes} B",
                    code="size",
                )
            compute.copy(destination, view, threads)
            copied += view.nbytes
        return copied

    async def copy_to_async(self, destinations: Sequence[Any], *, member: int = 0, threads: int = 1) -> int:
        """As `copy_to`, on a worker thread, so that it overlaps with the loop's other work."""
        return await asyncio.to_thread(self.copy_to, destinations, member=member, threads=threads)

    def release(self) -> None:
        """Give all back at once. Raises ViewsAliveError while views live; then they end with the last view.

        Raises UsageError(forked) in a forked child: the leases are the parent's, which gives them back.
        """
        try:
            self._native.release()
        except BufferError as error:
            raise _views_alive(error) from None
        except NATIVE as error:
            raise translate(error) from None

    def __enter__(self) -> Leases:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except (ViewsAliveError, UsageError):
            # The views of a failing block live on in its traceback: its error is the one to show. So it is in a forked
            # child, where the release fails, too.
            if error is None:
                raise

    def __repr__(self) -> str:
        return f"<Leases on {len(self)} chunks>"


def _views_alive(error: BufferError) -> ViewsAliveError:
    return ViewsAliveError(
        f"views of this lease are alive ({error}); delete arrays, tensors and slices first. "
        "The lease ends when the last of them does",
        code="views-alive",
    )  # fmt: skip


def _no_array(dtype: object, shape: object, size_bytes: int, error: Exception) -> UsageError:
    """What an array of a lease cannot be."""
    refused = arguments.refusal(
        "dtype",
        dtype,
        f"{_said(error)}; the member has {size_bytes} B, shape = {arguments.described(shape)}",
        "array",
    )
    refused.fields["size_bytes"] = size_bytes
    return refused


def _said(error: Exception) -> str:
    """What a library says of values that may not even be shown."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - the text is built of them
        return type(error).__name__


def _lease_error(error: Exception, member: int) -> KvdError:
    if isinstance(error, TypeError):
        return arguments.refusal("member", member, "give the number of a member", "member")
    if "not in this family" in str(error) or isinstance(error, ValueError):
        return UsageError(f"this family has no member {member}", code="member", member=member)
    return translate(error)
