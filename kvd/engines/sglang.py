"""kvd as the storage behind SGLang's HiCache: pages go straight between the host pool's memory and kvd's.

    --enable-hierarchical-cache --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "kvd", "module_path": "kvd.engines.sglang", "class_name": "KvdHiCache", "interface_v1": 1}'

One instance a rank. SGLang asks in its prefetch thread (`batch_exists`), reads in an I/O thread (`batch_get_v1`),
stores in its backup thread (`batch_set_v1`); none of them may raise, since that ends the engine. Nothing waits for a
daemon that is away. A page is one object a rank in kvd's own format, so that engines with other page layouts, or other
tensor parallelism, meet; SGLang's keys are hashes of the tokens up to the page's end and name nothing of the model:
kvd's namespace adds that. How the pool lays out its pages is described once and compared with the addresses that the
pool itself gives; where they differ nothing is stored or loaded.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
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
from kvd.errors import CapacityError, UnavailableError, UsageError
from kvd.layout.geometry import Geometry
from kvd.layout.manifest import Manifest
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Rank, Split

log = logging.getLogger("kvd.engines.sglang")

_LAYOUTS: Final = {
    "layer_first": "sglang-layer-first",
    "page_first": "sglang-page-first",
    "page_first_direct": "sglang-page-first-direct",
    "page_head": "sglang-page-head",
}
_SETTINGS: Final = frozenset({
    "backend_name", "module_path", "class_name", "interface_v1", "socket", "model", "revision", "tenant", "salt",
    "deadline_s", "verify", "prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys", "tp_lcm_size", "prefetch_timeout_per_page",
})  # fmt: skip
_COUNTERS: Final = (
    "lookups", "pages_asked", "pages_hit", "loads", "loaded_pages", "loaded_bytes", "saves", "saved_pages",
    "saved_bytes", "saves_full", "away", "failures",
)  # fmt: skip
_WAIT_AT_START_S: Final = 2.0
T = TypeVar("T")


class Pool:
    """One rank's host pool, described: geometry of the whole model, this rank's part, its layout and its memory.

    Raises UsageError(pool) for a pool that cannot be described to the byte.
    """

    def __init__(self, host: Any, config: Any) -> None:
        order = _LAYOUTS.get(host.layout)
        buffer: Any = getattr(host, "kv_buffer", None)
        if order is None or not torch.is_tensor(buffer) or getattr(config, "is_mla_model", False):
            raise UsageError(
                f"a {type(host).__name__} with layout {host.layout!r} is not served; allowed: keys and values of one "
                f"width, layouts {', '.join(_LAYOUTS)}",
                code="pool",
            )  # fmt: skip
        dtype = str(host.dtype).removeprefix("torch.")
        self.page_tokens, self.dtype = int(host.page_size), dtype
        layers, heads, dim = int(host.layer_num), int(host.head_num), int(host.head_dim)
        self.split, self.rank = Split(tp=config.tp_size), Rank(config.tp_rank)
        self.geometry = Geometry.attention(
            layers=layers, kv_heads=heads * config.tp_size, head_dim=dim, dtype=dtype
        )
        pages = buffer.numel() // (2 * layers * heads * dim * self.page_tokens)
        planes = Geometry.attention(layers=layers, kv_heads=heads, head_dim=dim, dtype=dtype).groups[0].planes
        self.layout = PagedLayout(
            order, planes, layers, pages, self.page_tokens, first_head=heads * config.tp_rank
        )
        self.memory = memoryview(buffer.detach().reshape(-1).view(torch.uint8).numpy())
        self._check(host, buffer)

    def _check(self, host: Any, buffer: Any) -> None:
        """Whether the pool's own addresses of its first and its last page are those of the description."""
        last = self.layout.blocks - 1
        slots = torch.cat([torch.arange(self.page_tokens) + page * self.page_tokens for page in (0, last)])
        pointers, _ = host.get_page_buffer_meta(slots)
        stride, plane = self.layout.stride("B"), self.layout.stride("P")
        each = [0] if host.layout != "layer_first" else range(self.layout.layers)
        layer = self.layout.stride("L")
        described = [
            buffer.data_ptr() + page * stride + at * layer + side * plane
            for page in (0, last)
            for at in each
            for side in (0, 1)
        ]
        if list(pointers) != described:
            raise UsageError(
                f"pages of this {type(host).__name__} ({host.layout}) are not where its layout says",
                code="pool",
            )


def manifest_of(config: Any, pool: Pool) -> Manifest:
    """What names this engine's pages. Raises UsageError for weights that cannot be named."""
    given: Mapping[str, Any] = config.extra_config or {}
    unknown = sorted(set(given) - _SETTINGS)
    if unknown:
        raise UsageError(
            f"extra config {', '.join(unknown)} is unknown; allowed: {', '.join(sorted(_SETTINGS))}",
            code="settings",
        )
    name = str(given.get("model") or config.model_name or "")
    folder = _folder(name)
    hf_config: dict[str, Any] = {"model_type": "unnamed"}
    if folder is not None:
        import json

        hf_config = json.loads((folder / "config.json").read_text())
    revision = given.get("revision") or weights_revision(folder or name)
    return manifest_from(
        hf_config,
        model=name,
        revision=str(revision),
        dtype=pool.dtype,
        geometry=pool.geometry,
        tenant=str(given.get("tenant", "")),
        salt=str(given.get("salt", "")),
        extra={
            "engine": "sglang",
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


class KvdHiCache(HiCacheStorage):
    """See the module. `counters.totals()` says what it did."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        self.config = storage_config
        self.counters = Counters(_COUNTERS)
        self._attachment: Attachment[tuple[Store, Namespace, EngineCache]] | None = None
        self._pool: Pool | None = None
        self._told: set[str] = set()
        self._lock = threading.Lock()

    # -- start and end --------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang has its pool: describe it, and attach. A pool that is not served leaves kvd out of it."""
        super().register_mem_pool_host(mem_pool_host)
        given: Mapping[str, Any] = self.config.extra_config or {}
        try:
            pool = Pool(mem_pool_host, self.config)
            manifest = manifest_of(self.config, pool)
        except Exception as error:  # noqa: BLE001 - the engine starts, without kvd
            log.warning("kvd: this engine runs without kvd: %s", error)
            return
        self._pool = pool

        def prepare(store: Store) -> tuple[Store, Namespace, EngineCache]:
            namespace = store.namespace(manifest)
            cache = namespace.register(
                pool.layout,
                [pool.memory],
                geom=pool.geometry,
                split=pool.split,
                rank=pool.rank,
                name="hicache",
            )
            return store, namespace, cache

        self._attachment = Attachment(
            prepare,
            socket=given.get("socket"),
            client=f"sglang-{self.config.tp_rank}-{os.getpid()}",
            deadline_s=float(given.get("deadline_s", 1.0)),
            verify_reads=bool(given.get("verify", False)),
        )
        if self._attachment.wait(_WAIT_AT_START_S) is not None:
            log.info("kvd: serving pages of %d tokens, namespace %s", pool.page_tokens, manifest.short)

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
        self.counters.add("lookups")
        self.counters.add("pages_asked", len(keys))
        found = self._found(keys)
        if found is None:
            return 0
        _, namespace, _, chain = found
        hits = namespace.match(chain)
        self.counters.add("pages_hit", hits)
        return hits

    @_shielded(lambda keys: [False] * len(keys))
    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Copy leading pages into the host pool, straight from kvd's memory; which of them are there now."""
        found = self._found(keys)
        if found is None:
            return [False] * len(keys)
        _, namespace, cache, chain = found
        pages, pool = self._pages(keys, host_indices), self._described()
        self.counters.add("loads")
        # SGLang leaves the last token of a prompt to be computed by itself.
        tokens = (len(keys) + 1) * pool.page_tokens
        with namespace.acquire(chain, pool.geometry, prompt_tokens=tokens) as leases:
            assert isinstance(leases, FamilyLeases)
            usable = leases.usable_chunks
            copied = leases.scatter(cache, pages[:usable]) if usable else 0
        self.counters.add("loaded_pages", usable)
        self.counters.add("loaded_bytes", copied)
        return [True] * usable + [False] * (len(keys) - usable)

    @_shielded(lambda keys: [False] * len(keys))
    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Store pages straight from the host pool; which of them are in kvd, by whomever."""
        found = self._found(keys, extra_info)
        if found is None or self._resting():
            return [False] * len(keys)
        _, namespace, cache, chain = found
        pages, pool = self._pages(keys, host_indices), self._described()
        self.counters.add("saves")
        stored: list[bool] = []
        for first in range(0, len(keys), limits.batch_items_max):
            part = slice(first, first + limits.batch_items_max)
            try:
                with namespace.reserve(
                    chain[part], geom=pool.geometry, split=pool.split, rank=pool.rank, skip_pending=True
                ) as writes:
                    copied = writes.gather(cache, pages[part])
                    results = writes.publish()
            except CapacityError:
                self.counters.add("saves_full")
                return [*stored, *[False] * (len(keys) - len(stored))]
            except UnavailableError:
                if self._attachment is not None:
                    self._attachment.trouble()
                raise
            self.counters.add("saved_bytes", copied)
            self.counters.add("saved_pages", results.count(Published.PUBLISHED))
            stored += [
                result in (Published.PUBLISHED, Published.PRESENT, Published.SKIPPED) for result in results
            ]
        return stored

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """Models with several pools are not served: no page of theirs is ever there."""
        if pool_transfers:
            self._say("several pools (hybrid models) are not served")
            return PoolTransferResult.empty()
        return PoolTransferResult(self.batch_exists(keys, extra_info), {})

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """See `batch_exists_v2`."""
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        """See `batch_exists_v2`."""
        return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}

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

    def _found(
        self, keys: list[str], extra_info: Any = None
    ) -> tuple[Store, Namespace, EngineCache, Chain] | None:
        """What is attached, and the identities of these pages; None without a daemon or a page."""
        session = self._attachment.session if self._attachment is not None else None
        if session is None:
            self.counters.add("away")
            return None
        if not keys:
            return None
        store, namespace, cache = session
        # Each key already stands for everything before it; what lies behind what only decides who leaves first.
        before = list(getattr(extra_info, "prefix_keys", None) or ())[-1:]
        identities = b"".join(
            bytes(
                namespace.chain_hashes(
                    bytes.fromhex(key), len(key) // 2, self._described().page_tokens
                ).identities
            )
            for key in (*before, *keys)
        )
        chain = namespace.chain_of(identities, self._described().page_tokens)
        return store, namespace, cache, chain[len(before) :]

    def _described(self) -> Pool:
        assert self._pool is not None
        return self._pool

    def _resting(self) -> bool:
        return self._attachment is not None and self._attachment.resting

    def _pages(self, keys: list[str], host_indices: Any) -> list[int]:
        """Numbers of the pages in the pool. Raises UsageError(pages) for slots that are not whole pages."""
        size = self._described().page_tokens
        slots = host_indices.tolist()
        firsts = slots[::size]
        if len(slots) != len(keys) * size or any(slot % size for slot in firsts):
            raise UsageError(f"{len(slots)} slots are not {len(keys)} pages of {size} tokens", code="pages")
        return [slot // size for slot in firsts]

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
