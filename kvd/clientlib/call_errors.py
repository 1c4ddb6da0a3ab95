"""Why a call through the rings went without its answer."""

from __future__ import annotations

from kvd.clientlib.native_errors import translate
from kvd.errors import CapacityError, KvdError, LifecycleError, UnavailableError, UsageError
from kvd.shm.messages import Sq


def refusal(kind: Sq, lost: KvdError) -> KvdError:
    """What a call gets once the daemon is gone: what that daemon had granted is over, whoever follows it."""
    if kind is Sq.PUBLISH and isinstance(lost, UnavailableError):
        return LifecycleError(
            "the daemon that granted this reservation is gone: it is over, reserve anew and write again",
            code="reservation-over",
        )
    return lost


def gone(cause: OSError | None = None) -> KvdError:
    why = f" ({cause.strerror})" if cause is not None and cause.strerror else ""
    return UnavailableError(
        f"the daemon is gone{why}: leases stay readable, attach again for more", code="daemon-gone"
    )


def deadline(kind: Sq, deadline_s: float) -> KvdError:
    return UnavailableError(
        f"the daemon did not answer {kind.name} within {deadline_s:.3g} s; nothing was published by it",
        code="deadline", deadline_s=deadline_s,
    )  # fmt: skip


def loop_closed() -> KvdError:
    return UsageError("the event loop that waited for this answer was closed", code="loop")


def unfit(kind: Sq, payload: bytes, error: Exception) -> KvdError:
    if "does not fit the ring" not in str(error):
        return translate(error)
    return UsageError(
        f"a {kind.name} of {len(payload)} B: {error}; use smaller batches, or raise clients.sq_size",
        code="batch", size_bytes=len(payload),
    )  # fmt: skip


def ring_full() -> KvdError:
    return CapacityError(
        "the request ring is full: the daemon is not keeping up; try again later", code="ring-full"
    )
