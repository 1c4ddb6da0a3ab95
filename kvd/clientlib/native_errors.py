"""What the native client raises, as kvd's own errors: the one place of clientlib where they are translated."""

from __future__ import annotations

from kvd.errors import CapacityError, KvdError, LifecycleError, UsageError
from kvd.shm._native import HazardsExhausted

NATIVE = (HazardsExhausted, RuntimeError, ValueError, TypeError, IndexError)


def translate(error: Exception) -> KvdError:
    """The KvdError that says what a native error means to a caller."""
    text = str(error)
    if isinstance(error, HazardsExhausted):
        return CapacityError(
            f"this client holds as many leases as its region has room for ({text}); "
            "release some, or raise clients.hazards_max",
            code="leases",
        )
    if "fork" in text:
        return UsageError("this store was connected before a fork: connect again in the child", code="forked")
    if "belonged to is gone" in text:
        return LifecycleError(
            "the daemon that granted this reservation is gone: it is over, reserve anew and write again",
            code="reservation-over",
        )
    if "closed" in text:
        return UsageError("this store was closed; connect again", code="closed")
    if isinstance(error, ValueError | TypeError):
        return UsageError(text, code="argument")
    return LifecycleError(f"this lease is over: {text}", code="lease-over")
