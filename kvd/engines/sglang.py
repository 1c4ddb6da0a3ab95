"""kvd as the storage behind SGLang's HiCache: pages go straight between the host pool's memory and kvd's.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvd", "module_path": "kvd.engines.sglang", "class_name": "KvdHiCache", "interface_v1": 1}'

One instance a rank. SGLang asks in its prefetch thread (`batch_exists`), reads in an I/O thread (`batch_get_v1`),
stores in its backup thread (`batch_set_v1`); none of them may raise, since that ends the engine. Nothing waits for a
daemon that is away. A page is one object a rank in kvd's own format, so that engines with other page layouts, or other
tensor parallelism, meet; SGLang's keys are hashes of the tokens up to the page's end and name nothing of the model:
kvd's namespace adds that.

Models with several pools (sliding windows, states, indexers) are asked for by `batch_exists_v2`, which says up to where
every pool has what it needs, and moved by `batch_get_v2` and `batch_set_v2`. Each pool has a namespace of its own: its
pages have the same keys and other bytes, and of windows and states only some pages are ever stored.

What a pool keeps is described once (`sglang_pools`) and compared with the addresses that the pool itself gives; a pool
that is not served is named in the log, and nothing of its model is found.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult

from kvd import Published, limits
from kvd.clientlib.caches import EngineCache
from kvd.clientlib.chain import Chain
from kvd.clientlib.families import FamilyLeases
from kvd.clientlib.namespace import Namespace
from kvd.clientlib.store import Store
from kvd.engines.common import manifest_from, weights_revision
from kvd.engines.common_attach import Attachment
from kvd.engines.common_counters import Counters
from kvd.engines.sglang_pools import Pool, describe
from kvd.errors import CapacityError, UnavailableError, UsageError
from kvd.layout.manifest import Manifest

log = logging.getLogger("kvd.engines.sglang")

_SETTINGS: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "socket", "model", "revision", "tenant", "salt",
    "deadline_s", "verify", "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys", "tp_lcm_size", "prefetch_timeout_per_page",
})  # fmt: skip
_COUNTERS: Final = (
    "lookups", "pages_asked", "pages_hit", "loads", "loaded_pages", "loaded_bytes", "saves", "saved_pages",
    "saved_bytes", "saves_full", "saves_resting", "pages_short", "away", "failures",
)  # fmt: skip
_WAIT_AT_START_S: Final = 2.0
KV: Final = "kv"
"""SGLang's name of the pool that every model has."""
BATCH_BYTES: Final = 64 << 20
"""Reserved at once: what is written in one go is neither evicted nor of use to others, and no client may have much."""
_TRAILING: Final = "trailing_pages"
_BLOCK_GROUPS: Final = "block_groups"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Identity:
    """What all pools of one engine have in common in the names of their pages."""

    config: Mapping[str, Any]
    model: str
    revision: str
    tenant: str
    salt: str
    ranks: Mapping[str, str]

    def manifest(self, pool: Pool, name: str) -> Manifest:
        """What names the pages of one pool; `name` as SGLang calls it."""
        return manifest_from(
            self.config,
            model=self.model,
            revision=self.revision,
            dtype=pool.dtype,
            geometry=pool.geometry,
            tenant=self.tenant,
            salt=self.salt,
            extra={
                "engine": "sglang",
                **self.ranks,
                **({} if name == KV else {"pool": name}),
                **pool.named,
            },
        )


def identity_of(config: Any) -> Identity:
    """Read it from SGLang's storage config. Raises UsageError for weights that cannot be named, unknown settings."""
    given: Mapping[str, Any] = config.extra_config or {}
    unknown = sorted(set(given) - _SETTINGS)
    if unknown:
        raise UsageError(
            f"extra config {', '.join(unknown)} is unknown; allowed: {', '.join(sorted(_SETTINGS))}",
            code="settings",
        )
    model = str(given.get("model") or config.model_name or "")
    folder = _folder(model)
    hf_config: dict[str, Any] = {"model_type": "unnamed"}
    if folder is not None:
        hf_config = json.loads((folder / "config.json").read_text())
    return Identity(
        hf_config,
        model,
        str(given.get("revision") or weights_revision(folder or model)),
        str(given.get("tenant", "")),
        str(given.get("salt", "")),
        {
            # Stages and context ranks keep to themselves: their pages are of other layers or other tokens.
            "stage": f"{config.pp_rank}/{config.pp_size}",
            "context": f"{config.attn_cp_rank}/{config.attn_cp_size} {config.dcp_rank}/{config.dcp_size}",
        },
    )


def _folder(name: str) -> Path | None:
    """Where the model's files are: its folder, or what the hub's cache has of it."""
    if Path(name, "config.json").is_file():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download

        found = Path(snapshot_download(name, local_files_only=True))
    except Exception:  # noqa: BLE001 - not there, whatever the hub's client says of it
        return None
    return found if (found / "config.json").is_file() else None


@dataclass(frozen=True, slots=True)
class Door:
    """One pool under its own name, attached: where its pages go in and out."""

    pool: Pool
    namespace: Namespace
    cache: EngineCache

    def chain(self, keys: Sequence[str], before: Sequence[str] = ()) -> Chain:
        """The identities of pages. Each key already stands for everything before it; what lies `before` only decides
        who leaves first.
        """
        tokens = self.pool.chunk_tokens
        identities = b"".join(
            bytes(self.namespace.chain_hashes(bytes.fromhex(key), len(key) // 2, tokens).identities)
            for key in (*before, *keys)
        )
        chain: Chain = self.namespace.chain_of(identities, tokens)[len(before) :]
        return chain

    def pages(self, keys: Sequence[str], host_indices: Any) -> list[int]:
        """Numbers of the pages in the pool. Raises UsageError(pages) for slots that are not whole pages."""
        size = self.pool.page_slots
        slots = [] if host_indices is None else host_indices.tolist()
        firsts = slots[::size]
        if len(slots) != len(keys) * size or any(slot % size for slot in firsts):
            raise UsageError(f"{len(slots)} slots are not {len(keys)} pages of {size} tokens", code="pages")
        return [slot // size for slot in firsts]

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Which of these pages are stored, by all ranks."""
        chain, found = self.chain(keys), [False] * len(keys)
        at = 0
        while at < len(keys):
            run = self.namespace.match(chain[at:])
            found[at : at + run] = [True] * run
            at += run + 1
        return found


def _shielded(otherwise: Callable[[Sequence[Any]], Any]) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A hook that never raises: what it gives instead follows from its first argument."""

    def around(hook: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(hook)
        def shielded(self: KvdHiCache, first: Any, *rest: Any, **named: Any) -> Any:
            try:
                return hook(self, first, *rest, **named)
            except Exception as error:  # noqa: BLE001 - it would end the engine
                self.failed(hook.__name__, error)
                return otherwise(first)

        return shielded

    return around


def _none_of(transfers: Sequence[Any]) -> dict[str, list[bool]]:
    return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class KvdHiCache(HiCacheStorage):
    """See the module. `counters.totals()` says what it did."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.config = storage_config
        self.counters = Counters(_COUNTERS)
        self._attachment: Attachment[Store] | None = None
        self._identity: Identity | None = None
        self._pools: dict[str, Pool] = {}
        self._doors: dict[str, Door] = {}
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # -- start and end --------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang has its pool: describe it, and attach. A pool that is not served leaves kvd out of it."""
        super().register_mem_pool_host(mem_pool_host)
        given: Mapping[str, Any] = self.config.extra_config or {}
        try:
            self._pools[KV] = pool = describe(mem_pool_host, self.config)
            self._identity = identity_of(self.config)
            manifest = self._identity.manifest(pool, KV)
            deadline_s = float(given.get("deadline_s", 1.0))
        except Exception as error:  # noqa: BLE001 - the engine starts, without kvd
            log.warning("kvd: this engine runs without kvd: %s", error)
            return
        self._attachment = Attachment(
            lambda store: store,
            socket=given.get("socket"),
            client=f"sglang-{self.config.tp_rank}-{os.getpid()}",
            deadline_s=deadline_s,
            verify_reads=bool(given.get("verify", False)),
        )
        if self._attachment.wait(_WAIT_AT_START_S) is not None:
            log.info("kvd: serving pages of %d tokens, namespace %s", pool.page_slots, manifest.short)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """SGLang has one more pool. One that is not served is named in the log: prefixes that need it are misses."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name == KV:  # as `register_mem_pool_host` described it
            return
        try:
            self._pools[name] = describe(host_pool, self.config)
        except Exception as error:  # noqa: BLE001 - the engine starts, without kvd for this pool
            log.warning("kvd: pool %s is not kept, nor what needs it: %s", name, error)

    def close(self) -> None:
        """Detach."""
        if self._attachment is not None:
            self._attachment.close()

    def clear(self) -> None:
        """Nothing: what is stored belongs to other engines too (`kvctl clear` empties a namespace)."""

    def get_stats(self) -> None:
        """SGLang's own storage metrics count pages itself; kvd's are in `counters` and the daemon's."""

    # -- what SGLang calls ----------------------------------------------------------------------------------

    @_shielded(lambda _keys: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many leading pages are stored, by all ranks. No daemon involved."""
        return self._leading(keys)

    @_shielded(lambda keys: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy leading pages into the host pool, straight from kvd's memory; which of them are there now."""
        return self._get(KV, keys, host_indices)

    @_shielded(lambda keys: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages straight from the host pool; which of them are in kvd, by whomever."""
        return self._set(KV, keys, host_indices, extra_info)

    @_shielded(lambda _keys: PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Up to where a prefix is stored in every pool that it needs, and which shorter prefixes are.

        A pool with ALL_PAGES must have every page; one with TRAILING_PAGES (windows, states) the last ones, as many as
        the transfer has keys. Whole groups of compressed blocks (BLOCK_GROUPS) never gate a hit, and are not told.
        """
        leading = self._leading(keys)
        hits = {KV: leading} if leading else {}
        usable = list(range(1, leading + 1))
        for transfer in pool_transfers or ():
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if policy == _BLOCK_GROUPS or not usable:
                continue
            door = self._door(str(transfer.name))
            present = door.present(keys[:leading]) if door is not None else [False] * leading
            ends = _usable_ends(present, len(transfer.keys or ()) or 1 if policy == _TRAILING else None)
            if ends:
                hits[transfer.name] = max(ends)
            usable = [end for end in usable if end in ends]
        self.counters.add("pages_short", leading - (usable[-1] if usable else 0))
        return PoolTransferResult(usable[-1] if usable else 0, hits, usable)

    @_shielded(_none_of)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Copy leading pages of each transfer into its pool; which of them are there now."""
        return {
            transfer.name: self._one_pool(self._get, transfer.name, transfer.keys, transfer.host_indices)
            for transfer in transfers
        }

    @_shielded(_none_of)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """Store pages of each transfer; which of them are in kvd, by whomever."""
        return {
            transfer.name: self._one_pool(
                self._set, transfer.name, transfer.keys, transfer.host_indices, extra_info
            )
            for transfer in transfers
        }

    # The methods of before interface_v1 copy every page through a tensor: without "interface_v1": 1 nothing is stored.

    def exists(self, key: str) -> bool:
        """Whether one page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing; see above."""
        self._say('set "interface_v1": 1 in the extra config: without it nothing is stored or loaded')

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[None]:
        """Nothing; see above."""
        self.get("")
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Nothing; see above."""
        self.get("")
        return False

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Nothing; see above."""
        self.get("")
        return False

    # -- inside ---------------------------------------------------------------------------------------------

    def _one_pool(self, move: Callable[..., list[bool]], name: Any, keys: Any, *rest: Any) -> list[bool]:
        """A transfer of one pool: what goes wrong there leaves the other pools alone."""
        try:
            return move(str(name), list(keys or ()), *rest)
        except Exception as error:  # noqa: BLE001 - it would end the engine
            self.failed(f"{move.__name__.strip('_')} of pool {name}", error)
            return [False] * len(keys or ())

    def _leading(self, keys: Sequence[str]) -> int:
        self.counters.add("lookups")
        self.counters.add("pages_asked", len(keys))
        door = self._door(KV)
        if door is None or not keys:
            return 0
        hits = door.namespace.match(door.chain(keys))
        self.counters.add("pages_hit", hits)
        return hits

    def _get(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        door = self._door(name)
        if door is None or not keys:
            return [False] * len(keys)
        pages = door.pages(keys, host_indices)
        self.counters.add("loads")
        # SGLang leaves the last token of a prompt to be computed by itself.
        tokens = (len(keys) + 1) * door.pool.chunk_tokens
        with door.namespace.acquire(door.chain(keys), door.pool.geometry, prompt_tokens=tokens) as leases:
            assert isinstance(leases, FamilyLeases)
            usable = leases.usable_chunks
            copied = leases.scatter(door.cache, pages[:usable]) if usable else 0
        self.counters.add("loaded_pages", usable)
        self.counters.add("loaded_bytes", copied)
        return [True] * usable + [False] * (len(keys) - usable)

    def _set(self, name: str, keys: Sequence[str], host_indices: Any, extra_info: Any) -> list[bool]:
        door, attachment = self._door(name), self._attachment
        if door is None or attachment is None or not keys:
            return [False] * len(keys)
        if attachment.resting:
            self.counters.add("saves_resting")
            return [False] * len(keys)
        before = list(getattr(extra_info, "prefix_keys", None) or ())[-1:]
        chain, pages, pool = door.chain(keys, before), door.pages(keys, host_indices), door.pool
        self.counters.add("saves")
        stored: list[bool] = []
        each = max(1, min(limits.batch_items_max, BATCH_BYTES // pool.page_bytes))
        for first in range(0, len(keys), each):
            part = slice(first, first + each)
            try:
                with door.namespace.reserve(
                    chain[part], geom=pool.geometry, split=pool.split, rank=pool.rank, skip_pending=True
                ) as writes:
                    copied = writes.gather(door.cache, pages[part])
                    results = writes.publish()
            except CapacityError:
                self.counters.add("saves_full")
                return [*stored, *[False] * (len(keys) - len(stored))]
            except UnavailableError:
                attachment.trouble()
                raise
            attachment.well()
            self.counters.add("saved_bytes", copied)
            self.counters.add("saved_pages", results.count(Published.PUBLISHED))
            stored += [
                result in (Published.PUBLISHED, Published.PRESENT, Published.SKIPPED) for result in results
            ]
        return stored

    def _door(self, name: str) -> Door | None:
        """A pool of this engine on the daemon; None while that is away, or for a pool that is not served."""
        store = self._attachment.session if self._attachment is not None else None
        if store is None:
            self.counters.add("away")
            return None
        door = self._doors.get(name)
        if door is not None or (pool := self._pools.get(name)) is None or self._identity is None:
            return door
        with self._lock:  # namespaces and registrations outlive daemons: once is enough
            if name not in self._doors:
                namespace = store.namespace(self._identity.manifest(pool, name))
                cache = namespace.register(
                    pool.layout, pool.buffers, geom=pool.geometry, split=pool.split, rank=pool.rank, name="hicache"
                )  # fmt: skip
                self._doors[name] = Door(pool, namespace, cache)
            return self._doors[name]

    def failed(self, what: str, error: Exception) -> None:
        """Count what went wrong, and say it once."""
        self.counters.add("failures")
        self._say(f"{what}: {type(error).__name__}: {error}")

    def _say(self, text: str) -> None:
        with self._lock:
            if text in self._told or len(self._told) > 1000:
                return
            self._told.add(text)
        log.warning("kvd: %s", text)


def _usable_ends(present: Sequence[bool], trailing: int | None) -> set[int]:
    """Lengths of prefixes, in pages, whose last `trailing` pages (None: all) are present."""
    ends: set[int] = set()
    run = 0
    for end, here in enumerate(present, start=1):
        run = run + 1 if here else 0
        if run >= (end if trailing is None else min(trailing, end)):
            ends.add(end)
    return ends
