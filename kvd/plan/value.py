"""value_per_byte: a heuristic for what a cached family is worth to an eviction or admission policy.

    value_per_byte = (expected reuses × compute time saved - cost of write, read, replication) / bytes

It is a heuristic. Expected reuses are a guess from the past, times are means, and families are not
independent: a suffix is worth nothing without its prefix, so a policy that uses this must still evict
suffixes before prefixes. It ranks; it proves nothing. Pure, any thread, floats and no allocation: a policy
calls it per family.
"""

from __future__ import annotations

from kvd.errors import UsageError


def value_per_byte(
    size_bytes: int,
    expected_reuses: float,
    saved_per_reuse_ns: float,
    read_per_reuse_ns: float = 0.0,
    write_ns: float = 0.0,
    replication_ns: float = 0.0,
) -> float:
    """Nanoseconds won per byte kept; negative when keeping costs more than it brings.

    `read_per_reuse_ns` is paid at every reuse, `write_ns` and `replication_ns` once, and are 0 for what has
    been spent already: when deciding what to evict, the write is a sunk cost. Raises UsageError for a size
    not above 0 and for negative or not finite arguments.
    """
    if size_bytes <= 0:
        raise UsageError(f"size = {size_bytes} B; allowed: 1 or more", code="range", size_bytes=size_bytes)
    cost_ns = expected_reuses * read_per_reuse_ns + write_ns + replication_ns
    smallest = min(expected_reuses, saved_per_reuse_ns, read_per_reuse_ns, write_ns, replication_ns)
    gain_ns = expected_reuses * saved_per_reuse_ns - cost_ns
    # A gain that is NaN or infinite is refused here: it would outrank everything for ever.
    if not smallest >= 0 or gain_ns - gain_ns != 0:
        raise UsageError(
            f"reuses = {expected_reuses}, saved = {saved_per_reuse_ns} ns, read = {read_per_reuse_ns} ns, "
            f"write = {write_ns} ns, replication = {replication_ns} ns; allowed: finite numbers of 0 or more",
            code="range",
        )  # fmt: skip
    return gain_ns / size_bytes
