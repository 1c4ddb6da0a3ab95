"""How a worker process of the demo talks to its parent: JSON lines on standard output, nothing else.

    {"step": "what it does now"}           ends the step before
    {"note": "what came out of the step"}
    {"result": {...}}                      once, last

Libraries print where they like: `own_stdout` keeps the real standard output for the protocol and points file
descriptor 1 at standard error, which the parent collects in a log file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

GENERATED_TOKENS = 24
REPEATS = 3
CHUNK_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Job:
    """What the parent tells each worker, as the one JSON argument of its command line."""

    role: str  # "checkpoint", "writer" or "reader"
    checkpoint: str
    socket: str
    logits_file: str  # where this worker leaves its logits, or ""
    chunk_tokens: int = CHUNK_TOKENS
    generate: int = GENERATED_TOKENS
    repeats: int = REPEATS

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        return cls(**json.loads(text))


class Speaker:
    """The worker's side: one line per message, flushed at once, since the parent shows it as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def step(self, text: str) -> None:
        self._line({"step": text})

    def note(self, text: str) -> None:
        self._line({"note": text})

    def result(self, values: Mapping[str, object]) -> None:
        self._line({"result": dict(values)})

    def _line(self, message: Mapping[str, object]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def own_stdout() -> Speaker:
    """Take standard output for the protocol; everybody else's prints go to standard error from here on."""
    sys.stdout.flush()
    protocol_fd = os.dup(1)
    os.dup2(2, 1)
    return Speaker(os.fdopen(protocol_fd, "w", encoding="utf-8"))


def sha256_of(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def read_checked(path: Path, sha256: str) -> bytes:
    """The bytes of a file that another process left, refused with ValueError if they are not what it said."""
    data = path.read_bytes()
    if sha256_of(data) != sha256:
        raise ValueError(f"{path} does not hold the bytes that its writer announced (sha256 {sha256})")
    return data
