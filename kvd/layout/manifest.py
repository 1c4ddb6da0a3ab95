"""The manifest: everything two engines must agree on before either may use what the other computed.

Pure. Owns the fields of a namespace, their canonical encoding and the root they hash to. Anyone may build
one. A manifest is immutable; two manifests with the same root are the same namespace, and any difference is
a miss.

What is in it: the model and its weights, tokenizer and chat template, adapter, position scheme, attention
configuration, multimodal preprocessing, element type and scales of the KV, kvd's object format, and who
shares (tenant, sharing group, salt). What is not: the split (TP, PP, context parallel), which is recorded
with each family, the paged layout of an engine, which belongs to its registration, and sampling settings,
which do not change the KV of a given prefix. A namespace is not access control.

    encode() = "KVDM" | u8 1 | canonical mapping of all fields (kvd.layout.encoding)
    root     = SHA-256("kvd-manifest-v1\\0" | encode())
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvd import limits
from kvd.errors import UsageError
from kvd.layout import encoding
from kvd.layout.dtypes import dtype_bits
from kvd.layout.encoding import FIXED, Fixed

OBJECT_FORMAT_VERSION: Final = 1
"""Version of the canonical object format (docs/design/layout.md); another version is another namespace."""

_MAGIC: Final = b"KVDM\x01"
_ROOT_PREFIX: Final = b"kvd-manifest-v1\0"

# Always given: without these three a cache cannot even be sized.
_ALWAYS: Final = ("model", "revision", "dtype")
# Text that says who shares. "*" does not cover tenant and salt, so that no connector can drop them by a
# default.
_NAMED_ONLY: Final = ("tenant", "salt")
_TEXT: Final = (
    "architecture", "tokenizer", "chat_template", "adapter", "multimodal", "quantisation",
    "sharing_group", "tenant", "salt",
)  # fmt: skip
_MAPPINGS: Final = ("position", "attention")
_MAY_BE_FIXED: Final = frozenset(_TEXT + _MAPPINGS)
_MAY_BE_EMPTY: Final = frozenset({"tenant", "salt", "sharing_group"})
_MOVING_REVISIONS: Final = frozenset({"main", "master", "latest", "head", "default", "none", "unknown"})

_SAMPLING: Final = frozenset({
    "temperature", "top_p", "top_k", "min_p", "typical_p", "seed", "sampling_seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "num_beams", "do_sample", "max_tokens", "max_new_tokens", "stop",
    "logit_bias", "n", "best_of", "length_penalty", "no_repeat_ngram_size",
})  # fmt: skip
_SPLIT: Final = frozenset({
    "tp", "pp", "cp", "dp", "ep", "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size",
    "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    "expert_parallel_size", "tp_size", "pp_size", "dp_size", "tp_rank", "pp_rank", "rank", "world_size",
})  # fmt: skip
_PAGED: Final = frozenset({"block_size", "page_size", "kv_layout", "kv_cache_layout", "layout",
                           "paged_layout", "num_blocks", "num_gpu_blocks", "strides"})  # fmt: skip
_WHAT_IT_SAYS: Final = {
    "architecture": "the model class, as in config.json",
    "tokenizer": "name@version",
    "chat_template": 'name@version or a digest, "none" without one',
    "adapter": '"none" or name@version',
    "position": "a mapping such as {'rope_theta': 500000, 'rope_scaling': None}",
    "attention": "a mapping such as {'kind': 'full'} or {'sliding_window': 4096}",
    "multimodal": 'preprocessing identity, "none" without one',
    "quantisation": '"none" or the identity of the scales',
    "sharing_group": 'who shares beside the tenant, "" for nobody',
    "tenant": 'whose objects these are, "" if the whole domain shares',
    "salt": 'a secret that keeps apart, "" for none',
}


class _Missing:
    def __repr__(self) -> str:
        return "MISSING"


_MISSING: Final = _Missing()


@dataclass(frozen=True, slots=True, init=False, eq=False)
class Manifest:
    """What names a namespace. All arguments by keyword; README: `Manifest(model=..., revision=...,
    dtype=...)`.

    `model`, `revision` and `dtype` are always given. Each other field is given, or declared to be the same
    for the whole domain: `tokenizer=FIXED`, `fixed=("tokenizer", "adapter")`, or `fixed="*"` for all the
    rest except `tenant` and `salt`, which are always named ("" says: none). `extra` is for what kvd has no
    name for. Raises UsageError: manifest-missing, manifest-field, manifest-sampling, manifest-split,
    manifest-paged, dtype, encoding.
    """

    model: str
    revision: str
    dtype: str
    architecture: str | Fixed
    tokenizer: str | Fixed
    chat_template: str | Fixed
    adapter: str | Fixed
    position: Mapping[str, Any] | Fixed
    attention: Mapping[str, Any] | Fixed
    multimodal: str | Fixed
    quantisation: str | Fixed
    sharing_group: str | Fixed
    tenant: str | Fixed
    salt: str | Fixed = field(repr=False)
    format_version: int
    extra: Mapping[str, Any]
    _encoded: bytes = field(repr=False)
    _root: bytes = field(repr=False)

    def __init__(
        self,
        *,
        model: str | _Missing = _MISSING,
        revision: str | _Missing = _MISSING,
        dtype: str | _Missing = _MISSING,
        architecture: str | Fixed | _Missing = _MISSING,
        tokenizer: str | Fixed | _Missing = _MISSING,
        chat_template: str | Fixed | _Missing = _MISSING,
        adapter: str | Fixed | _Missing = _MISSING,
        position: Mapping[str, Any] | Fixed | _Missing = _MISSING,
        attention: Mapping[str, Any] | Fixed | _Missing = _MISSING,
        multimodal: str | Fixed | _Missing = _MISSING,
        quantisation: str | Fixed | _Missing = _MISSING,
        sharing_group: str | Fixed | _Missing = _MISSING,
        tenant: str | Fixed | _Missing = _MISSING,
        salt: str | Fixed | _Missing = _MISSING,
        format_version: int = OBJECT_FORMAT_VERSION,
        extra: Mapping[str, Any] | None = None,
        fixed: str | Iterable[str] = (),
        **unknown: object,
    ) -> None:
        _refuse_unknown(unknown)
        given: dict[str, object] = {
            "model": model, "revision": revision, "dtype": dtype, "architecture": architecture,
            "tokenizer": tokenizer, "chat_template": chat_template, "adapter": adapter, "position": position,
            "attention": attention, "multimodal": multimodal, "quantisation": quantisation,
            "sharing_group": sharing_group, "tenant": tenant, "salt": salt,
        }  # fmt: skip
        _apply_fixed(given, fixed)
        _refuse_missing(given)
        fields: dict[str, object] = {**given, "format_version": format_version, "extra": extra or {}}
        _check(fields)
        encoded = _MAGIC + encoding.encode(
            fields, where="manifest"
        )  # first: freezing takes only what has an encoding
        frozen = {name: encoding.freeze(value) for name, value in fields.items()}
        if len(encoded) > limits.manifest_bytes_max:
            raise _bad(
                "manifest",
                f"of {len(encoded)} B",
                f"at most {limits.manifest_bytes_max} B; give the hash of a long text",
            )
        for name, value in frozen.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_encoded", encoded)
        object.__setattr__(self, "_root", hashlib.sha256(_ROOT_PREFIX + encoded).digest())

    @property
    def root(self) -> bytes:
        """32 bytes that name the namespace: SHA-256 over a prefix of its own and the canonical encoding."""
        return self._root

    @property
    def short(self) -> str:
        """The first 12 hex digits of the root, for logs and tables."""
        return self._root.hex()[:12]

    def encode(self) -> bytes:
        """The canonical bytes. They contain the salt: send them to the daemon, do not log them."""
        return self._encoded

    @classmethod
    def decode(cls, encoded: bytes) -> Manifest:
        """The manifest these canonical bytes name. Raises UsageError(encoding) for anything that is not
        canonical.
        """
        encoded = bytes(encoded)
        if not encoded.startswith(_MAGIC):
            raise UsageError(
                f"these bytes are no manifest of version 1 (they begin with {encoded[:5]!r})", code="encoding"
            )
        fields = encoding.decode(encoded[len(_MAGIC) :], where="manifest")
        names = {*_ALWAYS, *_MAY_BE_FIXED, "format_version", "extra"}
        if not isinstance(fields, dict) or set(fields) != names:
            raise UsageError("an encoded manifest has exactly the fields of a manifest", code="encoding")
        manifest = cls(**fields)
        if manifest._encoded != encoded:
            raise UsageError("this manifest is not in the canonical form", code="encoding")
        return manifest

    def replace(self, **changes: Any) -> Manifest:
        """The same manifest with some fields changed: another namespace, unless nothing differs."""
        return Manifest(**{**self.fields(), **changes})

    def fields(self) -> dict[str, Any]:
        """All fields by name, as the constructor takes them (the salt included)."""
        names = (*_ALWAYS, *_TEXT, *_MAPPINGS, "format_version", "extra")
        return {name: encoding.thaw(getattr(self, name)) for name in names}

    def differences(self, other: Manifest) -> dict[str, tuple[object, object]]:
        """The fields in which two manifests differ, for messages; a salt is never shown."""
        mine, theirs = self.fields(), other.fields()
        changed = {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
        if "salt" in changed:
            changed["salt"] = ("(hidden)", "(hidden)")
        return changed

    def __eq__(self, other: object) -> bool:
        return self._encoded == other._encoded if isinstance(other, Manifest) else NotImplemented

    def __hash__(self) -> int:
        return int.from_bytes(self._root[:8], "little", signed=True)

    def __reduce__(self) -> tuple[object, ...]:
        return Manifest.decode, (self._encoded,)


def _bad(name: str, found: str, allowed: str) -> UsageError:
    return UsageError(f"manifest field {name} {found}; allowed: {allowed}", code="manifest-field", field=name)


def _refuse_unknown(names: Iterable[str], *, inside: str = "") -> None:
    """Names that must never become part of an identity, each with the reason; others are just unknown."""
    for name in sorted(names):
        plain = name.lower().lstrip("_")
        if plain in _SAMPLING:
            raise UsageError(
                f"{inside}{name} is a sampling setting: it changes which token is chosen, not the KV of a "
                "given prefix, so in a manifest it would only split the cache; leave it out",
                code="manifest-sampling", field=name,
            )  # fmt: skip
        if plain in _SPLIT:
            raise UsageError(
                f"{inside}{name} describes the split over ranks: it is recorded with each family, so that "
                "readers with another split still find it; it goes to Geometry.objects(tp=, pp=)",
                code="manifest-split", field=name,
            )  # fmt: skip
        if plain in _PAGED:
            raise UsageError(
                f"{inside}{name} describes how one engine pages its memory: it belongs to that engine's "
                "registration (PagedLayout), objects have one format for all; leave it out",
                code="manifest-paged", field=name,
            )  # fmt: skip
        if not inside:
            raise UsageError(
                f"a manifest has no field {name!r}; what kvd has no name for goes into "
                f"extra={{{name!r}: ...}}",
                code="manifest-field", field=name,
            )  # fmt: skip


def _apply_fixed(given: dict[str, object], fixed: str | Iterable[str]) -> None:
    listed = [fixed] if isinstance(fixed, str) else [*fixed] if isinstance(fixed, Iterable) else [None]
    names = {name for name in listed if isinstance(name, str)}
    if not all(isinstance(name, str) for name in listed):
        raise _bad("fixed", f"is {fixed!r}", "a list of field names, or '*'")
    everything = "*" in names
    names.discard("*")
    for name in sorted(names):
        if name in _ALWAYS:
            raise _bad(name, "cannot be fixed", "a value: without it a cache can not even be sized")
        if name not in _MAY_BE_FIXED:
            raise _bad(f"fixed={name!r}", "is unknown", ", ".join(sorted(_MAY_BE_FIXED)))
        if not isinstance(given[name], _Missing | Fixed):
            raise _bad(name, "is both given and declared fixed", "one of the two")
        given[name] = FIXED
    if everything:
        for name in _MAY_BE_FIXED.difference(_NAMED_ONLY):
            if isinstance(given[name], _Missing):
                given[name] = FIXED


def _refuse_missing(given: Mapping[str, object]) -> None:
    missing = [name for name, value in given.items() if isinstance(value, _Missing)]
    if not missing:
        return
    says = "; ".join(f"{name}: {_WHAT_IT_SAYS[name]}" for name in missing if name in _WHAT_IT_SAYS)
    covered = tuple(name for name in missing if name not in _ALWAYS)
    way_out = ""
    if covered:
        way_out = (
            f". What is the same for everyone in this domain can be declared so: fixed={covered!r}, or "
            "fixed='*' for all the rest; tenant and salt are always named, '' means none"
        )
    raise UsageError(
        f"manifest without {', '.join(missing)}: a field left out would let caches meet that must not"
        f"{way_out}{f' ({says})' if says else ''}",
        code="manifest-missing", missing=",".join(missing),
    )  # fmt: skip


def _check(fields: Mapping[str, object]) -> None:
    for name in (*_ALWAYS, *_TEXT):
        value = fields[name]
        if isinstance(value, Fixed) and name in _MAY_BE_FIXED:
            continue
        if not isinstance(value, str):
            raise _bad(name, f"is a {type(value).__name__}", "a string")
        if not value.strip() and name not in _MAY_BE_EMPTY:
            raise _bad(name, "is empty", _WHAT_IT_SAYS.get(name, "a name"))
        if value != value.strip() and name != "salt":
            raise _bad(name, f"is {value!r}", "no blanks around it")
    revision = str(fields["revision"])
    if revision.lower() in _MOVING_REVISIONS:
        raise _bad(
            "revision", f"is {revision!r}, a name that moves",
            "what changes with the weights: a commit id or a digest of the weight files",
        )  # fmt: skip
    dtype_bits(str(fields["dtype"]), field="manifest field dtype")
    for name in (*_MAPPINGS, "extra"):
        value = fields[name]
        if isinstance(value, Fixed) and name in _MAY_BE_FIXED:
            continue
        if not isinstance(value, Mapping):
            raise _bad(name, f"is a {type(value).__name__}", "a mapping")
        if not all(isinstance(key, str) for key in value):
            raise _bad(name, "has a key that is not a string", "string keys")
        _refuse_unknown(value, inside=f"{name}.")
    version = fields["format_version"]
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= 0xFFFF:
        raise _bad("format_version", f"is {version!r}", f"1 … 65535, {OBJECT_FORMAT_VERSION} is kvd's own")
