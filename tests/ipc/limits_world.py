"""What tests of clients at their limits share: a namespace, chains, a daemon that stands still, its books."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import kvd

CHUNK = 16
SIZE = 4096
WAIT_S = 20.0


def namespace(store: kvd.Store, **changes: Any) -> kvd.Namespace:
    fields = {"model": "m", "revision": "1", "dtype": "bfloat16", "tenant": "", "salt": "", "fixed": "*"}
    return store.namespace(kvd.Manifest(**{**fields, **changes}))


def chain_of(ns: kvd.Namespace, chunks: int, seed: int = 0) -> kvd.Chain:
    return ns.chain(list(range(seed * 100_000, seed * 100_000 + chunks * CHUNK)), CHUNK)


@contextlib.contextmanager
def stopped(running: Any) -> Iterator[None]:
    """The daemon stands still in the block."""
    os.kill(running.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(running.pid, signal.SIGCONT)


def reserved_bytes(running: Any) -> int:
    return int(running.call("status")["core"]["pool"]["reserved_bytes"])


def until_reserved(running: Any, expected_bytes: int) -> None:
    end = time.monotonic() + WAIT_S
    while (found := reserved_bytes(running)) != expected_bytes:
        assert time.monotonic() < end, f"{found} bytes are reserved, {expected_bytes} were due"


# --- what may be written
