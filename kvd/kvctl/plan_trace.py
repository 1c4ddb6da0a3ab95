"""Reader of recorded traces: JSON lines with timestamp (ms), input_length, output_length and hash_ids.

Called by `kvctl plan chunk` and benchmarks, in the calling thread. Invariant: a line is bounded and checked
field by field before it becomes a request; the message names the file, the line and the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from kvd.errors import UsageError
from kvd.plan.chunk import RecordedRequest, check_blocks

trace_line_bytes_max = 4 << 20
trace_id_max = (1 << 64) - 1  # hashes of blocks are 64 bits in the traces there are


def read_trace(path: Path, requests_max: int, block_tokens: int | None = None) -> Iterator[RecordedRequest]:
    """Requests of a JSON-lines trace. UsageError names the line and the field that is wrong.

    With `block_tokens` the ids of a request must be as many as its prompt has blocks.
    """
    try:
        with path.open("rb") as lines:
            for number in range(1, requests_max + 1):
                line = lines.readline(trace_line_bytes_max + 1)
                if not line:
                    return
                where = f"--trace {path}, line {number}"
                request = _trace_request(line, where)
                if block_tokens is not None:
                    _check_blocks(request, block_tokens, where)
                yield request
    except OSError as error:
        raise UsageError(
            f"--trace = {path}: {error.strerror}; allowed: a readable file", code="file"
        ) from None


def _check_blocks(request: RecordedRequest, block_tokens: int, where: str) -> None:
    try:
        check_blocks(request, block_tokens)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", code="trace", field="hash_ids") from None


def _trace_request(line: bytes, where: str) -> RecordedRequest:
    if len(line) > trace_line_bytes_max:
        raise UsageError(f"{where}: longer than {trace_line_bytes_max} B, the most allowed", code="trace")
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON; allowed: one object a line", code="trace") from None
    if not isinstance(data, dict):
        raise UsageError(f"{where} is not a JSON object; allowed: one object a line", code="trace")
    numbers = []
    for name in ("timestamp", "input_length", "output_length"):
        if name not in data:
            raise UsageError(f"{where}: {name} is missing; allowed: a whole number", code="trace", field=name)
        value = data[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise UsageError(
                f"{where}: {name} = {value!r}; allowed: a whole number", code="trace", field=name
            )
        numbers.append(value)
    if "hash_ids" not in data:
        raise UsageError(
            f"{where}: hash_ids is missing; allowed: a list of whole numbers", code="trace", field="hash_ids"
        )
    ids = data["hash_ids"]
    if not isinstance(ids, list):
        raise UsageError(
            f"{where}: hash_ids is a {type(ids).__name__}; allowed: a list of whole numbers",
            code="trace", field="hash_ids",
        )  # fmt: skip
    for value in ids:
        if type(value) is not int or not 0 <= value <= trace_id_max:
            raise UsageError(
                f"{where}: hash_ids names {value!r}; allowed: whole numbers in 0 … {trace_id_max}",
                code="trace", field="hash_ids",
            )  # fmt: skip
    try:
        return RecordedRequest(numbers[0], numbers[1], numbers[2], tuple(ids))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", code="trace") from None
