"""Threads of this package that may be inside native code when the program ends.

The interpreter ends a daemon thread that comes back from native code at that moment in a way that aborts the process.
So these threads look at `leaving` at short intervals, and the end of the program waits for them.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable

leaving = threading.Event()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(run: Callable[[], None], name: str) -> threading.Thread:
    """Start a thread that looks at `leaving` many times a second."""
    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


@atexit.register
def _end() -> None:
    leaving.set()
    for thread in list(_threads):
        thread.join()
