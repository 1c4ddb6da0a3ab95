"""What all engine adapters need to name a cache: the manifest of an engine's configuration, the revision of weights.

Reads files of a checkpoint and nothing else; any thread. A manifest made here names everything that changes KV bytes
for a given prefix of token ids: model and weights, adapter, element types, geometry, salt, what an adapter adds.
Tokenizer and chat template only choose token ids: unless they are given they are declared the same for the domain.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from kvd.errors import UsageError
from kvd.layout.encoding import FIXED, Fixed
from kvd.layout.geometry import Geometry
from kvd.layout.hf import identity_fields
from kvd.layout.manifest import Manifest

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_NOT_WEIGHTS: Final = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"})
_COMMIT: Final = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_SAMPLES_MAX: Final = 4096  # of one file
_SAMPLE_BYTES: Final = 4096
_HEAD_BYTES: Final = 1 << 20


def manifest_from(
    hf_config: Mapping[str, Any],
    *,
    model: str,
    revision: str,
    dtype: str,
    geometry: Geometry | None = None,
    tokenizer: str | Fixed = FIXED,
    chat_template: str | Fixed = FIXED,
    adapter: str = "none",
    quantisation: str = "none",
    multimodal: str | Fixed = FIXED,
    tenant: str = "",
    salt: str = "",
    extra: Mapping[str, Any] | None = None,
) -> Manifest:
    """The manifest of what one engine keeps. `hf_config`: the model's config.json as a mapping.

    `revision` is what `weights_revision` gives, or a commit id; `dtype` the element type of the KV cache. `geometry`
    defaults to what the config says; its fingerprint goes into `extra`. `adapter` is "none" or name@revision of a LoRA.
    Raises UsageError as Manifest and Geometry do.
    """
    plain = json_values(hf_config)
    geom = geometry or Geometry.from_hf_config(plain, dtype=dtype)
    said = identity_fields(plain)
    return Manifest(
        model=model,
        revision=revision,
        dtype=dtype,
        architecture=str(said["architecture"]),
        tokenizer=tokenizer,
        chat_template=chat_template,
        adapter=adapter,
        position=said["position"],  # type: ignore[arg-type]
        attention=said["attention"],  # type: ignore[arg-type]
        multimodal=multimodal,
        quantisation=quantisation,
        sharing_group="",
        tenant=tenant,
        salt=salt,
        extra={**json_values(extra or {}), "geometry": geom.fingerprint},
    )


def json_values(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping as JSON would keep it; what JSON cannot keep (types, enums) as its text, so that equal configs of two
    processes stay equal.
    """
    value = json.loads(json.dumps(mapping, sort_keys=True, default=str))
    assert isinstance(value, dict)
    return value


def weights_revision(model: str | os.PathLike[str], *, revision: str | None = None) -> str:
    """A name of the weights that changes with them (A9), for a folder, one file, or the name of a model on a hub.

    A commit id, given or in the path of a hub's snapshot, is the revision. A folder is named by a digest of its
    config and weight files: names, sizes, heads (which list every tensor) and samples of 4 KiB spread over each file,
    at most 16 MiB a file, so that training anything in it changes the name and 100 GB take seconds. Raises
    UsageError(revision) where only a name that moves is known.
    """
    if revision is not None and _COMMIT.fullmatch(revision):
        return revision
    path = Path(model)
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return path.name
    files = _weight_files(path)
    if not files:
        raise UsageError(
            f"no revision of {model} is known: {revision!r} is no commit id and there are no weight files to look at; "
            "name the revision yourself (a commit id, or anything that changes whenever the weights do)",
            code="revision", model=str(model),
        )  # fmt: skip
    digest = hashlib.sha256(b"kvd-weights-v1\0")
    for file in files:
        _add_file(digest, file)
    return f"files-{digest.hexdigest()[:32]}"


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        return []
    weights = [
        f for f in path.iterdir() if f.suffix in _WEIGHTS and f.name not in _NOT_WEIGHTS and f.is_file()
    ]
    if not weights:
        return []
    configs = [f for f in path.iterdir() if f.name in ("config.json", "adapter_config.json") and f.is_file()]
    return sorted(configs) + sorted(weights)


def _add_file(digest: Any, path: Path) -> None:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        digest.update(os.pread(file.fileno(), _HEAD_BYTES, 0))
        for offset in _sample_offsets(size):
            digest.update(os.pread(file.fileno(), _SAMPLE_BYTES, offset))


def _sample_offsets(size: int) -> Iterable[int]:
    """Where to look in a file of that size beyond its head: evenly, the end included."""
    rest = size - _HEAD_BYTES
    if rest <= 0:
        return ()
    samples = min(_SAMPLES_MAX, -(-rest // _SAMPLE_BYTES))
    return (
        size - 1 - rest * n // samples // _SAMPLE_BYTES * _SAMPLE_BYTES - _SAMPLE_BYTES + 1
        for n in range(samples)
    )
