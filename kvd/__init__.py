"""kvd: the storage daemon for the KV cache of LLM inference.

    store = kvd.connect()
    ns = store.namespace(kvd.Manifest(model=..., revision=..., dtype="bfloat16", fixed="*", tenant="", salt=""))
    chain = ns.chain(tokens, chunk_tokens=256)
    with ns.acquire(chain) as leases:
        view = leases[0].view

    geom = kvd.Geometry.from_hf_config("config.json", dtype="bfloat16")
    cache = ns.register(kvd.PagedLayout("vllm-hnd", ...), tensors, geom=geom)
    with ns.acquire(chain, geom) as leases:
        leases.scatter(cache, block_ids)

Importing this package is light: the client and its native part are loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvd.errors import (
    CapacityError,
    CompatibilityError,
    ConfigError,
    CorruptionError,
    InvariantError,
    KvdError,
    LifecycleError,
    ProtocolError,
    Retry,
    UnavailableError,
    UsageError,
    ViewsAliveError,
)
from kvd.types import Descriptor, Member, Outcome
from kvd.version import VERSION

if TYPE_CHECKING:
    from kvd.clientlib.caches import EngineCache
    from kvd.clientlib.chain import Chain
    from kvd.clientlib.families import FamilyLeases
    from kvd.clientlib.leases import Lease, Leases
    from kvd.clientlib.namespace import Namespace
    from kvd.clientlib.store import Admin, Store, connect, connect_async
    from kvd.clientlib.writes import Write, Writes
    from kvd.layout.encoding import FIXED
    from kvd.layout.family import Completeness
    from kvd.layout.geometry import Geometry, Group, Plane, Rule, Scales
    from kvd.layout.manifest import Manifest
    from kvd.layout.paged import PagedLayout
    from kvd.layout.shards import Objects, Rank, Split
    from kvd.layout.states import StateLayout
    from kvd.shm.messages import Granted, Published

__version__ = VERSION

_LAZY = {
    "Admin": "kvd.clientlib.store",
    "Chain": "kvd.clientlib.chain",
    "Completeness": "kvd.layout.family",
    "EngineCache": "kvd.clientlib.caches",
    "FIXED": "kvd.layout.encoding",
    "FamilyLeases": "kvd.clientlib.families",
    "Geometry": "kvd.layout.geometry",
    "Granted": "kvd.shm.messages",
    "Group": "kvd.layout.geometry",
    "Lease": "kvd.clientlib.leases",
    "Leases": "kvd.clientlib.leases",
    "Manifest": "kvd.layout.manifest",
    "Namespace": "kvd.clientlib.namespace",
    "Objects": "kvd.layout.shards",
    "PagedLayout": "kvd.layout.paged",
    "Plane": "kvd.layout.geometry",
    "Published": "kvd.shm.messages",
    "Rank": "kvd.layout.shards",
    "Rule": "kvd.layout.geometry",
    "Scales": "kvd.layout.geometry",
    "Split": "kvd.layout.shards",
    "StateLayout": "kvd.layout.states",
    "Store": "kvd.clientlib.store",
    "Write": "kvd.clientlib.writes",
    "Writes": "kvd.clientlib.writes",
    "connect": "kvd.clientlib.store",
    "connect_async": "kvd.clientlib.store",
}

__all__ = [
    "FIXED", "Admin", "CapacityError", "Chain", "CompatibilityError", "Completeness", "ConfigError",
    "CorruptionError", "Descriptor", "EngineCache", "FamilyLeases", "Geometry", "Granted", "Group",
    "InvariantError", "KvdError", "Lease", "Leases", "LifecycleError", "Manifest", "Member", "Namespace",
    "Objects", "Outcome", "PagedLayout", "Plane", "ProtocolError", "Published", "Rank", "Retry", "Rule", "Scales",
    "Split", "StateLayout", "Store", "UnavailableError", "UsageError", "ViewsAliveError", "Write", "Writes",
    "__version__", "connect", "connect_async",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module 'kvd' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
