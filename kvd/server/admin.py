"""What `call` can ask for: the administration of one daemon.

Owns the table of methods: who may call each, and what its parameters are. Event-loop thread only. What changes
something needs an admin uid (root, the daemon's own, access.admin_uids) and is written to the audit log. Every method
checks its parameters by name; unknown ones are refused. Long look-ups go on in steps between other work.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvd.config import Config
from kvd.core import events as ev
from kvd.core.report import FamilyRow
from kvd.errors import KvdError, UsageError
from kvd.layout.shards import Split
from kvd.probe import hugepages, memory, numa
from kvd.server import logs
from kvd.server.domain import Domain
from kvd.server.metrics import exposition
from kvd.server.peer import Peer
from kvd.server.report import Report
from kvd.server.runner import Runner
from kvd.server.supervise import Guard
from kvd.server.trace import Tracer
from kvd.server.verifier import Verifier
from kvd.shm.layout import EntryState

LS_LIMIT_MAX: Final = 1000
SCAN_STEP: Final = 1024
SCAN_TURN_NS: Final = 1_000_000
KEY_DIGITS_MIN: Final = 8
KEY_DIGITS: Final = 64
Done = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its handler, whether it changes something, and its parameters (name -> type)."""

    run: Callable[[Mapping[str, Any], Done], None]
    changes: bool
    params: Mapping[str, type]
    required: tuple[str, ...] = ()


class Admin:
    """Answers `call`."""

    def __init__(
        self,
        domain: Domain,
        runner: Runner,
        report: Report,
        verifier: Verifier,
        config: Config,
        stop: Callable[[], None],
        guard: Guard,
    ) -> None:
        self._domain = domain
        self._runner = runner
        self._report = report
        self._verifier = verifier
        self._config = config
        self._stop = stop
        self._guard = guard
        self._tracer = Tracer(domain)
        self._methods: dict[str, Method] = {
            "status": Method(self._status, False, {}),
            "health": Method(self._health, False, {}),
            "clients": Method(self._clients, False, {}),
            "ls": Method(self._ls, False, {"namespace": int, "start": int, "limit": int}),
            "inspect": Method(self._inspect, False, {"key": str}, ("key",)),
            "why": Method(self._why, False, {"request": int}, ("request",)),
            "pin": Method(self._pin, True, {"key": str, "kind": str}, ("key",)),
            "unpin": Method(self._unpin, True, {"key": str}, ("key",)),
            "withdraw": Method(self._withdraw, True, {"key": str}, ("key",)),
            "clear": Method(self._clear, True, {"namespace": int}),
            "verify": Method(self._verify, True, {"rate": int, "namespace": int}),
            "verify_status": Method(self._verify_status, False, {}),
            "verify_stop": Method(self._verify_stop, True, {}),
            "damaged": Method(self._damaged, False, {"key": str, "member": int}, ("key", "member")),
            "trace_start": Method(self._trace_start, True, {"path": str, "limit_bytes": int}, ("path",)),
            "trace_status": Method(self._trace_status, False, {}),
            "trace_stop": Method(self._trace_stop, True, {}),
            "stop": Method(self._stop_daemon, True, {}),
            "config": Method(self._describe, False, {}),
            "doctor": Method(self._doctor, False, {}),
            "metrics": Method(self._metrics, False, {}),
        }

    def call(self, peer: Peer, name: str, params: Mapping[str, Any], done: Done) -> None:
        """Run a method; `done` gets its result or a KvdError, now or later. Raises UsageError."""
        method = self._methods.get(name)
        if method is None:
            raise UsageError(
                f"there is no method {name!r}; there are {', '.join(sorted(self._methods))}",
                code="method",
                method=name,
            )
        _check_params(name, method, params)
        if method.changes:
            if peer.uid not in (0, os.getuid(), *self._config.access.admin_uids):
                raise UsageError(
                    f"{name!r} needs an administrator (root, the daemon's user or one of access.admin_uids), not user "
                    f"{peer.uid}",
                    code="denied", uid=peer.uid, method=name,
                )  # fmt: skip
            logs.audit(name, uid=peer.uid, pid=peer.pid, **params)
        method.run(params, done)

    # --- looking

    def _status(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._report.status())

    def _health(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._report.health())

    def _clients(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._report.clients())

    def _describe(self, _params: Mapping[str, Any], done: Done) -> None:
        done([list(row) for row in self._config.describe()])

    def _metrics(self, _params: Mapping[str, Any], done: Done) -> None:
        done(exposition(self._report.series()))

    def _doctor(self, _params: Mapping[str, Any], done: Done) -> None:
        facts, limit, pages = memory.memory(), memory.lock_limit(), hugepages.facts()
        done(
            {
                "memory_total_bytes": facts.total_bytes,
                "memory_available_bytes": facts.available_bytes,
                "memory_bound_bytes": facts.bound_bytes,
                "memory_bound_source": facts.bound_source,
                "memlock_soft_bytes": limit.soft_bytes,
                "memlock_privileged": limit.privileged,
                "shmem_enabled": pages.shmem_enabled,
                "hugetlb_total_count": pages.hugetlb_total_count,
                "hugetlb_free_count": pages.hugetlb_free_count,
                "nodes": [
                    {"number": node.number, "memory_bytes": node.memory_bytes} for node in numa.nodes()
                ],
                "pool": self._report.status()["pool"],
                "health": self._report.health(),
            }
        )

    def _why(self, params: Mapping[str, Any], done: Done) -> None:
        self._runner.read_touches()
        done(self._domain.core.why(params["request"], self._domain.clock.now_ns()))

    def _ls(self, params: Mapping[str, Any], done: Done) -> None:
        """Families from entry `start` on; `next` is where to go on, None at the end."""
        namespace, start = params.get("namespace"), params.get("start", 0)
        limit = params.get("limit", 100)
        if not 1 <= limit <= LS_LIMIT_MAX or start < 0:
            raise UsageError(f"ls: limit is 1 … {LS_LIMIT_MAX}, start is not negative", code="params")
        rows, following = self._domain.core.families(namespace, start, limit)
        done({"families": [self._row(row) for row in rows], "next": following})

    def _inspect(self, params: Mapping[str, Any], done: Done) -> None:
        def found(outcome: int | KvdError) -> None:
            if isinstance(outcome, KvdError):
                done(outcome)
                return
            entry = self._domain.table.entry(outcome)
            rows, _ = self._domain.core.families(None, outcome, 1)
            row = self._row(rows[0])
            row["members"] = [
                {
                    **member,
                    "segment": member["place"] >> 48,
                    "offset": member["place"] & 0xFFFFFFFFFFFF,
                    "checksum": f"{member['checksum']:016x}",
                    "heads": list(member["heads"]),
                    "layers": list(member["layers"]),
                }
                for member in entry["members"]
            ]
            split = Split.from_code(entry["split"])
            row["split"] = {"tp": split.tp, "pp": split.pp, "cp": split.cp}
            row["holders"] = self._domain.table.holders(outcome)
            done(row)

        self._find(params["key"], found)

    def _row(self, family: FamilyRow) -> dict[str, object]:
        entry = self._domain.table.entry(family.entry)
        return {
            "entry": family.entry,
            "key": entry["key"].hex(),
            "namespace": family.namespace,
            "depth": family.depth,
            "size_bytes": family.bytes,
            "idle_s": round((self._domain.clock.now_ns() - family.touched_ns) / 1e9, 1),
            "pin": _pin_name(family.pinned),
            "missing": family.missing,
            "members_count": entry["members_count"],
            "generation": entry["generation"],
            "state": EntryState(entry["state"]).name.lower(),
        }

    # --- changing

    def _pin(self, params: Mapping[str, Any], done: Done) -> None:
        kind = {"soft": ev.PinKind.SOFT, "hard": ev.PinKind.HARD}.get(params.get("kind", "soft"))
        if kind is None:
            raise UsageError(f"pin: kind is soft or hard, not {params['kind']!r}", code="params")
        pin_kind = kind
        self._with_entry(params["key"], done, lambda op, entry: ev.Pin(op, array("I", [entry]), pin_kind))

    def _unpin(self, params: Mapping[str, Any], done: Done) -> None:
        self._with_entry(params["key"], done, lambda op, entry: ev.Unpin(op, array("I", [entry])))

    def _withdraw(self, params: Mapping[str, Any], done: Done) -> None:
        """Damaged or revoked: not found any more, nor what lies behind it, whoever holds or pins it."""
        self._with_entry(params["key"], done, lambda op, entry: ev.Withdraw(op, array("I", [entry])))

    def _clear(self, params: Mapping[str, Any], done: Done) -> None:
        namespace = self._namespace("clear", params)
        self._runner.administrate(lambda op: ev.Clear(op, namespace), lambda reply: done(_outcome(reply)))

    def _trace_start(self, params: Mapping[str, Any], done: Done) -> None:
        done(self._tracer.start(params["path"], params.get("limit_bytes")))

    def _trace_status(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._tracer.status())

    def _trace_stop(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._tracer.stop())

    def _stop_daemon(self, _params: Mapping[str, Any], done: Done) -> None:
        done({"stopping": True, "stop_timeout_s": self._config.server.stop_timeout_s})
        self._stop()

    # --- integrity

    def _verify(self, params: Mapping[str, Any], done: Done) -> None:
        done(self._verifier.start_sweep(params.get("rate"), self._namespace("verify", params)))

    def _verify_status(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._verifier.status())

    def _verify_stop(self, _params: Mapping[str, Any], done: Done) -> None:
        done(self._verifier.stop_sweep())

    def _damaged(self, params: Mapping[str, Any], done: Done) -> None:
        """Anyone may report damage, because only what the daemon finds damaged itself is withdrawn."""
        member = params["member"]

        def found(outcome: int | KvdError) -> None:
            if isinstance(outcome, KvdError):
                done(outcome)
                return
            try:
                self._verifier.report(outcome, member, done)
            except KvdError as error:
                done(error)

        self._find(params["key"], found)

    # --- finding

    def _namespace(self, method: str, params: Mapping[str, Any]) -> int | None:
        """The namespace that was named, if any. Raises UsageError(namespace) if there is none of that number."""
        namespace: int | None = params.get("namespace")
        if namespace is not None and namespace not in self._domain.namespaces_by_number:
            raise UsageError(
                f"{method}: there is no namespace {namespace}", code="namespace", namespace=namespace
            )
        return namespace

    def _with_entry(self, key: str, done: Done, make: Callable[[int, int], ev.Event]) -> None:
        def found(outcome: int | KvdError) -> None:
            if isinstance(outcome, KvdError):
                done(outcome)
            else:
                self._runner.administrate(lambda op: make(op, outcome), lambda reply: done(_outcome(reply)))

        self._find(key, found)

    def _find(self, key: str, found: Callable[[int | KvdError], None]) -> None:
        """The entry with this key, given in full or by its first digits. Raises UsageError if it is no key."""
        digits = key.lower()
        if not KEY_DIGITS_MIN <= len(digits) <= KEY_DIGITS or digits.strip("0123456789abcdef"):
            raise UsageError(
                f"a key is {KEY_DIGITS} hex digits, or at least the first {KEY_DIGITS_MIN} of them",
                code="key",
            )
        if len(digits) == KEY_DIGITS:
            entries, _ = self._domain.table.probe(bytes.fromhex(digits), b"")
            entry = int.from_bytes(entries, "little")
            found(_absent(key) if entry == ev.NONE else entry)
            return
        matches: list[int] = []

        def visit(entries: array[int]) -> int | None:
            matches.extend(
                entry for entry in entries if self._domain.table.entry(entry)["key"].hex().startswith(digits)
            )
            return entries[0] if len(matches) > 1 else None

        def end(_at: int | None) -> None:
            if len(matches) > 1:
                found(
                    UsageError(f"{len(matches)} or more keys begin with {key}; give more digits", code="key")
                )
            else:
                found(matches[0] if matches else _absent(key))

        self._scan(0, visit, end)

    def _scan(
        self, start: int, visit: Callable[[array[int]], int | None], end: Callable[[int | None], None]
    ) -> None:
        """Visit READY entries from `start` on, in steps between other work, until `visit` says where it stopped."""
        families_max = self._domain.sizes.families_max
        turn_ends_ns = self._domain.clock.now_ns() + SCAN_TURN_NS
        while start < families_max:
            count = min(SCAN_STEP, families_max - start)
            entries = array("I", self._domain.table.scan(start, count))
            stopped = visit(entries) if entries else None
            if stopped is not None:
                end(stopped)
                return
            start += count
            if self._domain.clock.now_ns() > turn_ends_ns:
                asyncio.get_running_loop().call_soon(self._guard, self._scan, start, visit, end)
                return
        end(None)


def _check_params(name: str, method: Method, params: Mapping[str, Any]) -> None:
    for key, value in params.items():
        wanted = method.params.get(key)
        if wanted is None:
            known = ", ".join(method.params) or "no parameters"
            raise UsageError(
                f"{name} does not know the parameter {key!r}; it takes {known}", code="params", param=key
            )
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise UsageError(
                f"{name}: {key} is {value!r}, it must be a {wanted.__name__}", code="params", param=key
            )
    for key in method.required:
        if key not in params:
            raise UsageError(f"{name} needs the parameter {key!r}", code="params", param=key)


def _pin_name(kind: int) -> str:
    if kind & ev.PinKind.HARD:
        return "hard"
    return "soft" if kind & ev.PinKind.SOFT else "none"


def _outcome(reply: ev.AdminReply | ev.ErrorReply) -> object:
    return reply.error if isinstance(reply, ev.ErrorReply) else reply.result


def _absent(key: str) -> KvdError:
    return UsageError(f"no family with the key {key} is here", code="not-found", key=key)
