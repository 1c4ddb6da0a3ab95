"""What the planner takes from files: bytes of a token and of a state from a config, figures of a benchmark run.

Called by `kvd.kvctl.plan`, in the calling thread. Invariant: a file is plain and bounded before it is read, and what is
wrong with it is a UsageError that names the option.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from kvd.errors import UsageError
from kvd.plan import units

json_bytes_max = 16 << 20


@dataclass(frozen=True, slots=True)
class Model:
    """What a model keeps: bytes of one token, all layers, and bytes of one state, 0 if it has none."""

    token_bytes: int
    state_bytes: int = 0


def model_of(config: Path | None, bytes_per_token: int | None, dtype: str) -> Model:
    """From exactly one of --config and --bytes-per-token."""
    if bytes_per_token is not None and config is not None:
        raise UsageError(
            f"--config = {config} and --bytes-per-token = {bytes_per_token}: two answers to one question; allowed: one",
            code="contradiction",
        )  # fmt: skip
    if bytes_per_token is not None:
        return Model(units.check_int("--bytes-per-token", bytes_per_token, 1, units.plan_bytes_max))
    if config is None:
        raise UsageError(
            "bytes per token are not known; allowed: --config config.json, or --bytes-per-token N",
            code="missing",
        )
    from kvd.layout.geometry import Geometry  # only this option needs it

    _check_file(config, "--config", "a Hugging Face config.json")
    geometry = Geometry.from_hf_config(str(config), dtype=dtype)
    if not geometry.bytes_per_token:
        raise UsageError(
            f"--config = {config}: this model keeps no bytes per token, only a state of "
            f"{units.format_bytes(geometry.state_bytes)}, whatever the length; allowed: models that attend",
            code="geometry",
        )  # fmt: skip
    return Model(geometry.bytes_per_token, geometry.state_bytes)


def token_bytes_of(config: Path | None, bytes_per_token: int | None, dtype: str, what: str) -> int:
    """The same for a plan that cannot count states: a model that keeps one is refused."""
    model = model_of(config, bytes_per_token, dtype)
    if model.state_bytes:
        raise UsageError(
            f"--config = {config}: this model also keeps a state of {units.format_bytes(model.state_bytes)}, and "
            f"{what}; allowed: --bytes-per-token {model.token_bytes}, for its attention alone",
            code="geometry",
        )  # fmt: skip
    return model.token_bytes


def own_metadata_bytes(path: Path) -> int:
    """`metadata_bytes_per_object` of a benchmark run, in which every family has one member."""
    found = _read_json(path, "--bench")
    value = found.get("metadata_bytes_per_object") if isinstance(found, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise UsageError(
            f"--bench = {path}: metadata_bytes_per_object = {value!r}; allowed: the output of "
            f"`kvctl bench local --json`, with a number of bytes there",
            code="file",
        )  # fmt: skip
    return units.ceil_div(Fraction(value), 1)


def _check_file(path: Path, option: str, allowed: str) -> None:
    try:
        plain = path.is_file()
    except OSError:  # a name that is too long
        plain = False
    if not plain:
        raise UsageError(f"{option} = {path}: no such file; allowed: {allowed}", code="file")


def _read_json(path: Path, option: str) -> object:
    _check_file(path, option, "a readable file")
    try:
        with path.open("rb") as file:
            raw = file.read(json_bytes_max + 1)
        if len(raw) > json_bytes_max:
            raise UsageError(
                f"{option} = {path}: more than {json_bytes_max} B, the most allowed", code="file"
            )
        return json.loads(raw)
    except OSError as error:
        raise UsageError(
            f"{option} = {path}: {error.strerror}; allowed: a readable file", code="file"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} = {path} is not JSON: {error}", code="file") from None
