"""A name for the weights that a model has in memory now, and for the adapters that are active in it.

Any thread. Weights are named by what they are, not by where they came from: another revision under the same name, a
merged adapter, one more step of training all give another name. Every byte is read once, where it lies, at the speed of
memory; later calls only look at whether a tensor was written to since.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator
from typing import Any, Final

import torch

from kvd.errors import UsageError

_COLUMNS: Final = 4096
_known: weakref.WeakKeyDictionary[Any, tuple[tuple[Any, ...], str]] = weakref.WeakKeyDictionary()


def fingerprint(model: Any) -> str:
    """32 hex digits that name all parameters and buffers of a model, by name, shape, type and value.

    Computed again when a tensor was replaced, or changed in a way that torch counts (all but writes through `.data`).
    Raises UsageError(revision) for weights that are not in memory.
    """
    tensors = list(_tensors(model))
    seen = tuple((name, tensor.data_ptr(), _version(tensor)) for name, tensor in tensors)
    found = _known.get(model)
    if found is not None and found[0] == seen:
        return found[1]
    digest = hashlib.sha256(b"kvd-live-weights-v1\0")
    for name, tensor in tensors:
        digest.update(f"{name}\0{tuple(tensor.shape)}\0{tensor.dtype}\0".encode())
        for part in _sums(tensor.detach()):
            digest.update(part.cpu().numpy().data)
    name = digest.hexdigest()[:32]
    _known[model] = (seen, name)
    return name


def forget(model: Any) -> None:
    """Have the weights read again: they were changed in a way that torch does not count."""
    _known.pop(model, None)


def adapters(model: Any) -> str:
    """ "none", or a digest of which adapters are active, on which modules, and how much they count.

    Their weights are among the model's own; whether they are used is not.
    """
    if not getattr(model, "_hf_peft_config_loaded", False) and not getattr(model, "peft_config", None):
        return "none"
    digest = hashlib.sha256(b"kvd-adapters-v1\0")
    for name, module in model.named_modules():
        # Models have methods of these names, layers that PEFT wrapped have properties.
        if isinstance(getattr(module, "active_adapters", None), list | tuple):
            scaling = sorted((str(k), float(v)) for k, v in dict(getattr(module, "scaling", {})).items())
            merged = sorted(map(str, getattr(module, "merged_adapters", ())))
            state = (name, list(module.active_adapters), bool(module.disable_adapters), merged, scaling)
            digest.update(repr(state).encode())
    return f"peft-{digest.hexdigest()[:32]}"


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type == "meta":
            raise UsageError(
                f"weight {name} is not in memory (device meta): name the weights yourself with revision=, by a commit "
                "id or anything that changes whenever they do",
                code="revision",
            )  # fmt: skip
        yield name, tensor


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version  # tensors made in inference mode are not counted


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Sums of a tensor's 64-bit words along rows and along columns, modulo 2^64, and what is left over.

    Any changed value changes a row and a column. Exact, so that the order of the additions does not matter.
    """
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // (8 * _COLUMNS) * 8 * _COLUMNS
    yield flat[whole:]
    if whole:
        words = flat[:whole].view(torch.int64).view(-1, _COLUMNS)
        yield words.sum(0)
        yield words.sum(1)
