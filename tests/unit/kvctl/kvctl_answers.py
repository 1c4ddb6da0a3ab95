"""Answers of a daemon, in the shape that the real one gives (tests/ipc/test_kvctl.py holds them together)."""

from __future__ import annotations

from typing import Any

KEY = "33a7eccdbc2081f4e8025850f4281523bacba9e2aadccfc6c4e7ccb7b14721f1"
OTHER = "00d983c348a54420f0310c9b971e38d3f800e233981a28af30ddf0d4bc37ee29"
ROOT = "5b65c0d18bcd07c87ec7a15e45ec6426011e11ef4b0f1fd6724490b50679fec5"
GIB = 1 << 30

COUNTERS = dict.fromkeys(
    (
        "granted", "published", "published_bytes", "duplicates", "differs", "aborted", "orphaned", "misses_pending",
        "misses_evicted", "misses_never", "evicted_bytes", "capacity_refusals", "lease_limit_refusals",
        "client_protocol_errors", "clients_killed", "pin_refusals", "evicted_space", "evicted_window", "verify_damaged",
    ),
    0,
)  # fmt: skip
LOOKUPS = {"lookups": 0, "keys_asked": 0, "keys_hit": 0, "verify_failed": 0}

STATUS: dict[str, Any] = {
    "version": "0.1.0", "pid": 4711, "epoch": "00", "uptime_s": 11_100.0, "state": "ok", "socket": "/run/kvd/kvd.sock",
    "health": {"state": "ok", "restarts": 0, "parts": {"daemon": {"state": "ok", "reason": ""}}},
    "domain": "default", "meta_bytes": 90 << 20, "private_bytes": 120 << 20,
    "pool": {
        "size_bytes": 64 * GIB, "memory_bytes": 128 * GIB, "backing": "memfd", "families_max": 1 << 20,
        "records_max": 1 << 21,
        "population": {
            "total_bytes": 64 * GIB, "populated_bytes": 64 * GIB, "huge_bytes": 64 * GIB, "done": True, "seconds": 9.0,
            "gib_per_s": 7.1, "locked": True, "lock_refused": "", "error": "",
        },
        "segments": [{"number": number, "size_bytes": GIB} for number in range(64)],
    },
    "core": {
        "pool": {
            "total_bytes": 64 * GIB, "used_bytes": 48 * GIB, "free_bytes": 16 * GIB, "reserved_bytes": 0,
            "pinned_bytes": 0, "soft_pinned_bytes": 0, "limbo_bytes": 0,
        },
        "families": 12_345, "families_max": 1 << 20, "families_partial": 0, "records": 24_690, "records_max": 1 << 21,
    },
    "clients": {"attached": 3, "disconnected": 0, "max": 64, "leases": 0, "leased_bytes": 0},
    "namespaces": [
        {"number": 1, "root": ROOT, "label": "llama-3-8b@5b65c0d18bcd", "model": "llama-3-8b", "tenant": "acme",
         "families": 12_345, "bytes": 48 * GIB},
        {"number": 2, "root": "ff" * 32, "label": "qwen@ffffffffffff", "model": "qwen", "tenant": "", "families": 0,
         "bytes": 0},
    ],
    "namespaces_count": 2,
    "verify": {"running": None, "last": None, "sample_every": 1000},
    "lookups": LOOKUPS,
    "counters": COUNTERS,
}  # fmt: skip
CLIENT: dict[str, Any] = {
    "slot": 0, "client_id": 1, "name": "vllm-engine", "pid": 900, "uid": 1000, "state": "attached", "hostile": False,
    "access": "write", "attached_s": 7_300.0, "leases": 5, "leased_bytes": 3 << 20, "over_lease_limit": False,
    "blocks_reclaim_s": None,
    "frames": 10, "answers_waiting": 0, "counters": {"keys_asked": 200, "keys_hit": 150},
}  # fmt: skip

NAMESPACES: dict[str, Any] = {"namespaces": STATUS["namespaces"], "next": None}
