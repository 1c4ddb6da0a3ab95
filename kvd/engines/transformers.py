"""kvd for Hugging Face Transformers: load the cache of a prompt's prefix, store what was computed, hold conversations.

    cache, reused = kvd.engines.transformers.load(store, model, input_ids)
    output = model.generate(input_ids, past_key_values=cache)
    kvd.engines.transformers.save(store, model, cache, output)

    output = kvd.engines.transformers.generate(store, model, input_ids, max_new_tokens=100)      the three in one

    talk = kvd.engines.transformers.Conversation(store, model, tokenizer)
    answer = talk.say("What is a prefix?", max_new_tokens=100)

`store` is a `kvd.Store`, a `kvd.Namespace` to share under a manifest of your own, the path of a daemon's socket, or
None for the daemon of this host; with a path or None the connection is made, and made again when the daemon was
restarted. What names the cache is taken from the model (`Adapter.manifest`). Runs on the caller's thread; an `Adapter`
may be used from several.

Never raises because of kvd: a daemon that is away, slow, full or restarted, or a model whose cache cannot be kept, is
a miss, counted in `Adapter.counters` and logged under "kvd.engines.transformers". Only what a caller gets wrong raises,
as UsageError: ids that are not one sequence, options that do not exist.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from transformers import StoppingCriteriaList

from kvd import Published, limits
from kvd.clientlib.chain import Chain
from kvd.clientlib.families import FamilyLeases
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.store import Store, connect
from kvd.engines import transformers_cache as caches
from kvd.engines import transformers_states as states
from kvd.engines import transformers_weights as weights
from kvd.engines.common import manifest_from
from kvd.errors import KvdError, UnavailableError, UsageError
from kvd.layout.manifest import Manifest

__all__ = ["Adapter", "Conversation", "Counters", "adapter", "generate", "load", "save"]

log = logging.getLogger("kvd.engines.transformers")

CHUNK_TOKENS: Final = 64
BATCH_BYTES: Final = 64 << 20
"""Reserved at once: what is written in one go is neither evicted nor of use to others meanwhile."""

_RETRY_S: Final = 5.0
_QUIET_S: Final = 60.0
_OWN_CACHE: Final = ("past_key_values", "cache", "cache_params", "cache_implementation", "inputs_embeds",
                     "assistant_model", "prompt_lookup_num_tokens")  # fmt: skip

Where = Store | Namespace | str | os.PathLike[str] | None
T = TypeVar("T")


@dataclass(slots=True)
class Counters:
    """What an adapter did. Tokens and bytes are those really copied; a failure is counted once a call."""

    loads: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    bytes_loaded: int = 0
    saves: int = 0
    chunks_stored: int = 0
    bytes_stored: int = 0
    bypassed: int = 0
    unaligned: int = 0
    failures: int = 0
    last_failure: str = ""

    @property
    def hit_rate_tokens(self) -> float:
        """Tokens reused of those that prompts had."""
        return self.tokens_reused / self.tokens_asked if self.tokens_asked else 0.0


class _Link:
    """The connection to a daemon: given, or made here, at most one try in `_RETRY_S`, none that waits for long."""

    def __init__(self, where: Where, deadline_s: float, *, verify: bool) -> None:
        self.given = where if isinstance(where, Store) else None
        self._path = None if where is None or isinstance(where, Store | Namespace) else os.fspath(where)
        self._deadline_s, self._verify = deadline_s, verify
        self._own: Store | None = None
        self._next_try_s = 0.0
        self._lock = threading.Lock()

    def store(self) -> Store:
        """A store that is attached. Raises UnavailableError."""
        if self.given is not None:
            return self.given
        with self._lock:
            if self._own is not None and self._own.lost is None:
                return self._own
            if time.monotonic() < self._next_try_s:
                raise UnavailableError("the daemon is away; the next try follows", code="away")
            self._next_try_s = time.monotonic() + _RETRY_S
            if self._own is not None:
                self._own.close()
                self._own = None
            self._own = connect(self._path, deadline_s=self._deadline_s, verify_reads=self._verify)
            return self._own

    def close(self) -> None:
        """Detach, if the connection was made here."""
        with self._lock:
            if self._own is not None:
                self._own.close()
                self._own = None


class Adapter:
    """One model on one daemon: what names its cache, and the copies to and from it. `adapter()` keeps one a model.

    `chunk_tokens`: what is stored and found as a whole; the rest of a prompt is computed (default 64, less where a
    window is smaller). `tenant`, `salt`: who shares. `revision`: a name of the weights instead of the one computed from
    them. `adapter_name`: the same for LoRA and other adapters that PEFT does not know of. `verify`: compare each object
    with its checksum before it is used. `deadline_s`: the longest that storing waits for the daemon; loading never
    waits. Raises UsageError for a model whose cache cannot be kept, saying why.
    """

    def __init__(
        self,
        where: Where,
        model: Any,
        *,
        chunk_tokens: int | None = None,
        tenant: str = "",
        salt: str = "",
        revision: str | None = None,
        adapter_name: str | None = None,
        verify: bool = False,
        deadline_s: float = 2.0,
        kept: caches.Kept | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._link = _Link(where, deadline_s, verify=verify)
        self._given = where if isinstance(where, Namespace) else None
        self._revision, self._adapter_name = revision, adapter_name
        self._tenant, self._salt, self._deadline_s = tenant, salt, deadline_s
        self._not_before_s = 0.0
        self._said: dict[str, float] = {}
        self.kept = kept or caches.describe(model)
        self.counters = Counters()
        window = min(
            (g.window for g in self.kept.geometry.groups if g.windowed), default=limits.chunk_tokens_max
        )
        self.chunk_tokens = chunk_tokens or min(CHUNK_TOKENS, 1 << window.bit_length() - 1)
        if self.chunk_tokens > window:
            raise UsageError(
                f"chunk_tokens is {chunk_tokens}, the model has a window of {window}; allowed: at most that",
                code="chunk", chunk_tokens=self.chunk_tokens,
            )  # fmt: skip

    @property
    def model(self) -> Any:
        """The model, which the adapter does not keep alive."""
        model = self._model()
        if model is None:
            raise UsageError("the model of this adapter is gone", code="model")
        return model

    def manifest(self) -> Manifest:
        """What names this model's cache now: config, live weights, active adapters, element type, who shares."""
        model, config = self.model, self.model.config
        quantisation = getattr(config, "quantization_config", None)
        if quantisation is not None and not isinstance(quantisation, dict):
            quantisation = quantisation.to_dict()
        return manifest_from(
            config.to_dict(),
            model=str(getattr(config, "_name_or_path", "") or type(model).__name__),
            revision=self._revision or f"live-{weights.fingerprint(model)}",
            dtype=self.kept.dtype,
            geometry=self.kept.geometry,
            adapter=self._adapter_name or weights.adapters(model),
            quantisation="none" if quantisation is None else repr(sorted(quantisation.items())),
            tenant=self._tenant,
            salt=self._salt,
            extra={
                "engine": "transformers",
                "kernels": str(getattr(config, "_attn_implementation", "")),
                "device": self.kept.device.type,
            },
        )

    # -- load -----------------------------------------------------------------------------------------------

    def load(self, input_ids: Any) -> tuple[Any, int]:
        """A cache with the longest prefix of these ids that kvd has, and how many tokens that is (0: an empty one).

        `input_ids`: [tokens] or [1, tokens], no padding. The last token is never in it, so that the model has something
        to compute. Windows of the cache keep all tokens until `save` has seen them.
        """
        ids = caches.check_ids(input_ids)
        self.counters.loads += 1
        self.counters.tokens_asked += len(ids)
        cache, reused = self._shielded("load", lambda: self._load(ids), (None, 0))
        if cache is None:
            cache = caches.new_cache(self.model)
        if self.kept.windowed:
            caches.record_windows(cache, on=True)
        return cache, reused

    def _load(self, ids: Sequence[int]) -> tuple[Any, int]:
        if len(ids) <= self.chunk_tokens or not self._in_use():
            return None, 0
        namespace = self._namespace()
        chain = namespace.chain(ids, self.chunk_tokens)
        with namespace.acquire(chain, self.kept.geometry) as leases:
            assert isinstance(leases, FamilyLeases)
            if not leases.usable_chunks:
                return None, 0
            cache = caches.new_cache(self.model)
            copied = caches.restore(self.kept, namespace, leases, cache)
            reused = leases.tokens_count
        self.counters.hits += 1
        self.counters.tokens_reused += reused
        self.counters.bytes_loaded += copied
        log.debug("reused %d of %d tokens, %d B", reused, len(ids), copied)
        return cache, reused

    # -- save -----------------------------------------------------------------------------------------------

    def save(self, cache: Any, input_ids: Any) -> int:
        """Store the full chunks of a cache that kvd does not have; returns how many were stored.

        `input_ids` are those that the cache was computed from, at least as many as it holds: what `generate` returned
        will do. A model with states stores only where a chunk ends exactly at the cache's last token (`prefill`).
        """
        ids = caches.check_ids(input_ids)
        self.counters.saves += 1
        return self._shielded("save", lambda: self._save(cache, ids), 0)

    def _save(self, cache: Any, ids: Sequence[int]) -> int:
        # A cache of states alone does not know how long it is.
        tokens = len(ids) if self.kept.only_states else int(cache.get_seq_length())
        if tokens > len(ids):
            raise UsageError(
                f"a cache of {tokens} tokens was given {len(ids)} input_ids; allowed: all it was computed from",
                code="input-ids",
            )
        if tokens < self.chunk_tokens or not self._in_use() or time.monotonic() < self._not_before_s:
            return 0
        if self.kept.has_states and tokens % self.chunk_tokens:
            self.counters.unaligned += 1
            self._warn(
                "unaligned",
                f"not stored: a cache of {tokens} tokens with states, which can be kept only where a chunk of "
                f"{self.chunk_tokens} ends; generate() and prefill() see to that",
            )
            return 0
        namespace = self._namespace()
        chain = namespace.chain(ids[:tokens], self.chunk_tokens)
        stored = 0
        try:
            for number, chunks in caches.storable(self.kept, cache, tokens, self.chunk_tokens):
                stored += self._store_group(namespace, chain, number, cache, tokens, chunks)
        except UnavailableError:
            self._not_before_s = (
                time.monotonic() + _RETRY_S
            )  # a daemon that is stuck is waited for once, not always
            raise
        finally:
            caches.trim_windows(cache, tokens, self.chunk_tokens)
        self.counters.chunks_stored += stored
        return stored

    def _store_group(
        self, namespace: Namespace, chain: Chain, number: int, cache: Any, tokens: int, chunks: range
    ) -> int:
        """Store the chunks of one group, a bounded number of bytes at a time, front to back."""
        geometry, stored = self.kept.geometry, 0
        objects = namespace.families(geometry, self.chunk_tokens).objects(0)
        parts = [part for part in objects if part.group == number]
        each = max(
            1, min(BATCH_BYTES // sum(p.size_bytes for p in parts), limits.batch_items_max // len(parts))
        )
        for first in range(chunks.start, chunks.stop, each):
            batch = range(first, min(first + each, chunks.stop))
            wanted = chain[batch.start : batch.stop]
            with namespace.reserve(
                wanted, geom=geometry, groups=[number], skip_pending=True, deadline_s=self._deadline_s
            ) as writes:
                if not writes.granted_count:
                    continue
                copied = caches.fill(
                    self.kept, namespace, writes, number, cache, tokens, batch, self.chunk_tokens
                )
                results = writes.publish()
            stored += sum(result is Published.PUBLISHED for result in results) // len(parts)
            self.counters.bytes_stored += copied
        return stored

    # -- all of it ------------------------------------------------------------------------------------------

    def prefill(self, input_ids: Any) -> tuple[Any, int]:
        """Load, compute and store all full chunks of a prompt; the cache, and how many tokens it holds.

        What is left for the model are the tokens after the last chunk, at least one. States are stored where it ends.
        """
        ids = caches.check_ids(input_ids)
        cache, reused = self.load(ids)
        full = (len(ids) - 1) // self.chunk_tokens * self.chunk_tokens
        if full > reused:
            rest = torch.tensor([ids[reused:full]], dtype=torch.long, device=self.kept.device)
            with torch.no_grad():
                self.model(input_ids=rest, use_cache=True, **{self.kept.cache_name: cache})
            self.save(cache, ids[:full])
        return cache, max(full, reused)

    def generate(self, input_ids: Any, **options: Any) -> Any:
        """As `model.generate(input_ids, **options)`, with the prefix from kvd and what was computed stored there.

        Passed on to the model alone, and counted as bypassed: batches, padding, beams and several answers, options that
        bring or choose a cache, and inputs beside the ids (images), which would be part of what names a prefix.
        """
        ids = torch.as_tensor(input_ids)
        ids = (ids if ids.dim() == 2 else ids[None]).to(self.kept.device)
        if not self._takes(ids, options):
            self.counters.bypassed += 1
            return self.model.generate(ids, **options)
        cache, known = self.prefill(ids) if self.kept.has_states else self.load(ids)
        options = {**options, "attention_mask": torch.ones_like(ids), self.kept.cache_name: cache}
        if self.kept.has_states:
            return self._generate_states(ids, cache, known, options)
        out = self.model.generate(ids, **options)
        self._shielded("save", lambda: self.save(cache, _sequences(out)), 0)
        return out

    def _generate_states(self, ids: torch.Tensor, cache: Any, known: int, options: dict[str, Any]) -> Any:
        """Generate, and store the answer up to its last full chunk, with the states as they were there."""
        front = known if self.kept.only_states else 0
        passed = states.Boundaries(
            self.kept, cache, self.chunk_tokens, front, lambda take: self._shielded("snapshot", take, None)
        )
        options["stopping_criteria"] = StoppingCriteriaList(
            [*(options.get("stopping_criteria") or ()), passed]
        )
        if front:  # Transformers cuts ids by the length of a cache that knows it
            options["attention_mask"] = options["attention_mask"][:, front:]
            out = _with_front(self.model.generate(ids[:, front:], **options), ids[:, :front])
        else:
            out = self.model.generate(ids, **options)
        if passed.tokens > known:
            self._shielded("save", lambda: self._save_passed(cache, _sequences(out), passed), 0)
        return out

    def _save_passed(self, cache: Any, ids: torch.Tensor, passed: states.Boundaries) -> int:
        """Store what generation has passed, up to the last chunk whose states were taken."""
        then = states.cut(self.kept, cache, passed.tokens, passed.states)
        return self.save(then, ids[:, : passed.tokens])

    def _takes(self, ids: torch.Tensor, options: dict[str, Any]) -> bool:
        chosen = options.get("generation_config") or self.model.generation_config
        mask = options.get("attention_mask")

        def said(name: str, otherwise: Any) -> Any:
            value = options.get(name, getattr(chosen, name, None))
            return otherwise if value is None else value

        return (
            ids.shape[0] == 1
            and not any(options.get(name) is not None for name in _OWN_CACHE)
            and not any(torch.is_tensor(v) for name, v in options.items() if name != "attention_mask")
            and (mask is None or bool(mask.bool().all()))
            and int(said("num_beams", 1)) == 1
            and int(said("num_return_sequences", 1)) == 1
            and bool(said("use_cache", True))
            and not said("cache_implementation", "")
        )

    def serves(self, where: Where) -> bool:
        """Whether this adapter was made for that store or namespace."""
        return self._given is where if isinstance(where, Namespace) else self._link.given is where

    def close(self) -> None:
        """Detach from the daemon, if this adapter made the connection."""
        self._link.close()

    # -- inside ---------------------------------------------------------------------------------------------

    def _in_use(self) -> bool:
        """Dropout makes a cache that is nobody else's."""
        return not self.model.training

    def _namespace(self) -> Namespace:
        return self._given if self._given is not None else self._link.store().namespace(self.manifest())

    def _shielded(self, what: str, run: Callable[[], T], otherwise: T) -> T:
        """The result, or `otherwise` when anything at all goes wrong."""
        try:
            return run()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine goes on without kvd
            self.counters.failures += 1
            reason = error.code if isinstance(error, KvdError) else type(error).__name__
            self.counters.last_failure = f"{what}: {reason}: {error}"
            self._warn(f"{what} {reason}", f"{what} failed, computed instead: {reason}: {error}")
            return otherwise

    def _warn(self, kind: str, text: str) -> None:
        """Once in `_QUIET_S` for each kind."""
        now = time.monotonic()
        if now >= self._said.get(kind, 0.0):
            self._said[kind] = now + _QUIET_S
            log.warning("%s", text)


def _sequences(out: Any) -> torch.Tensor:
    """The ids in what `model.generate` returned."""
    ids: torch.Tensor = out if torch.is_tensor(out) else out.sequences
    return ids


def _with_front(out: Any, front: torch.Tensor) -> Any:
    if torch.is_tensor(out):
        return torch.cat([front, out], dim=1)
    out.sequences = torch.cat([front, out.sequences], dim=1)
    return out


class Conversation:
    """Turns of one conversation. Every turn is found by what was said before it, by whatever process said it.

    With a tokenizer: `say("...")` with its chat template, `messages` holds both sides. Without: `extend(ids)`, `tokens`
    holds all ids. Options are those of `Adapter`.
    """

    def __init__(self, where: Where, model: Any, tokenizer: Any = None, **options: Any) -> None:
        self.adapter = _adapter_or_none(where, model, options)
        self._model, self._tokenizer = model, tokenizer
        self.messages: list[dict[str, str]] = []
        self.tokens: list[int] = []
        self.prompt_tokens = 0
        """Tokens of the last prompt, everything said before included."""

    @property
    def reused_tokens(self) -> int:
        """Tokens of all prompts of this model that came from kvd, so far."""
        return 0 if self.adapter is None else self.adapter.counters.tokens_reused

    def say(self, text: str, *, role: str = "user", **options: Any) -> str:
        """Append a message and generate the answer, `options` as `generate` takes them; returns its text."""
        if self._tokenizer is None:
            raise UsageError("this conversation has no tokenizer; use extend(ids)", code="tokenizer")
        self.messages.append({"role": role, "content": text})
        prompt = self._tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(prompt, add_special_tokens=False)["input_ids"]
        self.tokens = []
        answer = str(self._tokenizer.decode(self.extend(ids, **options), skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def extend(self, ids: Any, **options: Any) -> list[int]:
        """Append token ids and generate after them; returns the ids generated, which are appended too."""
        prompt = [*self.tokens, *caches.check_ids(ids)]
        self.prompt_tokens = len(prompt)
        run = self._model if self.adapter is None else self.adapter
        out = run.generate(torch.tensor([prompt], device=self._model.device), **options)
        everything = (out if torch.is_tensor(out) else out.sequences)[0].tolist()
        self.tokens = everything
        return list(everything[len(prompt) :])


_adapters: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Adapter]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakSet[Any] = weakref.WeakSet()


def adapter(where: Where, model: Any, *, kept: caches.Kept | None = None, **options: Any) -> Adapter:
    """The adapter of a model, made at its first use. Options as `Adapter` takes them. Raises as it does."""
    place = id(where) if isinstance(where, Store | Namespace) else where
    key = (place, *sorted(options.items()))
    known = _adapters.setdefault(model, {})
    found = known.get(key)
    if found is None or (isinstance(where, Store | Namespace) and not found.serves(where)):
        kept = kept or next((other.kept for other in known.values()), None)
        found = known[key] = Adapter(where, model, kept=kept, **options)
    return found


def _adapter_or_none(where: Where, model: Any, options: dict[str, Any]) -> Adapter | None:
    """The adapter, or None, and a warning once, for a model that goes on without kvd."""
    if model in _refused:
        return None
    try:
        kept = None if _adapters.get(model) else caches.describe(model)
    except Exception as error:  # noqa: BLE001 - the model is to be run, with kvd or without
        _refused.add(model)
        log.warning("%s runs without kvd: %s", type(model).__name__, error)
        return None
    return adapter(where, model, kept=kept, **options)


def load(where: Where, model: Any, input_ids: Any, **options: Any) -> tuple[Any, int]:
    """A cache with the longest prefix of these ids that kvd has, and its tokens: `Adapter.load`."""
    caches.check_ids(input_ids)
    found = _adapter_or_none(where, model, options)
    return (caches.new_cache(model), 0) if found is None else found.load(input_ids)


def save(where: Where, model: Any, cache: Any, input_ids: Any, **options: Any) -> int:
    """Store what a cache holds and kvd does not; how many chunks were stored: `Adapter.save`."""
    caches.check_ids(input_ids)
    found = _adapter_or_none(where, model, options)
    return 0 if found is None else found.save(cache, input_ids)


def generate(where: Where, model: Any, input_ids: Any, **options: Any) -> Any:
    """As `model.generate(input_ids, **options)`, with kvd: `Adapter.generate`. For other options use an `Adapter`."""
    found = _adapter_or_none(where, model, {})
    return model.generate(input_ids, **options) if found is None else found.generate(input_ids, **options)
