"""What `call` can ask for: the administration of one daemon.

Owns the table of methods: who may call each, and what its parameters are. Event-loop thread only. What changes
something needs an admin uid (root, the daemon's own, access.admin_uids) and is written to the audit log. Every method
checks its parameters by name; unknown ones are refused. Everything asked for is done when it is its turn
(`kvd.server.turns`), long look-ups in steps.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvd.config import Config
from kvd.core import events as ev
from kvd.core.report import FamilyRow
from kvd.errors import InvariantError, KvdError, UsageError
from kvd.layout.shards import Split
from kvd.probe import hugepages, memory, numa
from kvd.server import logs
from kvd.server.domain import Domain
from kvd.server.metrics import exposition
from kvd.server.peer import Peer
from kvd.server.report import Report
from kvd.server.runner import Runner
from kvd.server.trace import Tracer
from kvd.server.turns import Step, Turns
from kvd.server.verifier import Verifier
from kvd.shm.layout import EntryState

LS_LIMIT_MAX: Final = 1000
LS_ROWS_STEP: Final = 16
LS_ENTRIES_STEP: Final = 2048
LS_ENTRIES_MAX: Final = 65_536  # looked at for one page, which may have fewer rows for that
SCAN_STEP: Final = 2048
KEY_DIGITS_MIN: Final = 8
KEY_DIGITS: Final = 64
Done = Callable[[object], None]


@dataclass(frozen=True, slots=True)
class Method:
    """One method: its handler, whether it changes something, and its parameters (name -> type).

    A handler that has not done everything returns the step that goes on.
    """

    run: Callable[[Mapping[str, Any], Done], Step | None]
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
        turns: Turns,
    ) -> None:
        self._domain = domain
        self._runner = runner
        self._report = report
        self._verifier = verifier
        self._config = config
        self._stop = stop
        self._turns = turns
        self._tracer = Tracer(domain)
        self._methods: dict[str, Method] = {
            "status": Method(self._status, False, {}),
            "health": Method(self._health, False, {}),
            "clients": Method(self._clients, False, {}),
            "namespaces": Method(self._namespaces, False, {"start": int, "limit": int}),
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

    def call(
        self,
        peer: Peer,
        name: str,
        params: Mapping[str, Any],
        done: Done,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run a method when it is its turn; `done` gets its result or a KvdError, now or later. Raises UsageError.

        What nobody wants any more by then is not looked for; what was to be changed is changed all the same.
        """
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
        following: Step | None = None

        def step() -> bool:
            nonlocal following
            if not method.changes and not is_wanted():
                return True
            try:
                if following is not None:
                    return following()
                following = method.run(params, done)
            except KvdError as error:
                if isinstance(error, InvariantError):
                    raise
                done(error)
                return True
            return following is None

        self._turns.submit(peer.uid, peer, step)

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

    def _namespaces(self, params: Mapping[str, Any], done: Done) -> None:
        """Namespaces from number `start` on; `next` is where to go on, None at the end."""
        start, limit = _page("namespaces", params)
        known = self._domain.namespaces.by_number
        numbers = sorted(number for number in known if number >= start)
        rows = self._report.namespaces(known[number] for number in numbers[:limit])
        done({"namespaces": rows, "next": numbers[limit] if len(numbers) > limit else None})

    def _ls(self, params: Mapping[str, Any], done: Done) -> Step:
        """Families from entry `start` on; `next` is where to go on, None at the end."""
        start, limit = _page("ls", params)
        namespace = params.get("namespace")
        rows: list[dict[str, object]] = []
        at = start

        def step() -> bool:
            nonlocal at
            found, following = self._domain.core.families(
                namespace, at, min(LS_ROWS_STEP, limit - len(rows)), LS_ENTRIES_STEP
            )
            rows.extend(self._row(row) for row in found)
            if following is not None and len(rows) < limit and following - start < LS_ENTRIES_MAX:
                at = following
                return False
            done({"families": rows, "next": following})
            return True

        return step

    def _inspect(self, params: Mapping[str, Any], done: Done) -> Step | None:
        def found(outcome: int | KvdError) -> None:
            if isinstance(outcome, KvdError):
                done(outcome)
                return
            rows, _ = self._domain.core.families(None, outcome, 1, 1)
            if not rows:
                done(_absent(params["key"]))
                return
            entry = self._domain.table.entry(outcome)
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

        return self._find(params["key"], found)

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

    def _pin(self, params: Mapping[str, Any], done: Done) -> Step | None:
        kind = {"soft": ev.PinKind.SOFT, "hard": ev.PinKind.HARD}.get(params.get("kind", "soft"))
        if kind is None:
            raise UsageError(f"pin: kind is soft or hard, not {params['kind']!r}", code="params")
        pin_kind = kind
        return self._with_entry(
            params["key"], done, lambda op, entry: ev.Pin(op, array("I", [entry]), pin_kind)
        )

    def _unpin(self, params: Mapping[str, Any], done: Done) -> Step | None:
        return self._with_entry(params["key"], done, lambda op, entry: ev.Unpin(op, array("I", [entry])))

    def _withdraw(self, params: Mapping[str, Any], done: Done) -> Step | None:
        """Damaged or revoked: not found any more, nor what lies behind it, whoever holds or pins it."""
        return self._with_entry(params["key"], done, lambda op, entry: ev.Withdraw(op, array("I", [entry])))

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

    def _damaged(self, params: Mapping[str, Any], done: Done) -> Step | None:
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

        return self._find(params["key"], found)

    # --- finding

    def _namespace(self, method: str, params: Mapping[str, Any]) -> int | None:
        """The namespace that was named, if any. Raises UsageError(namespace) if there is none of that number."""
        namespace: int | None = params.get("namespace")
        if namespace is not None and namespace not in self._domain.namespaces.by_number:
            raise UsageError(
                f"{method}: there is no namespace {namespace}", code="namespace", namespace=namespace
            )
        return namespace

    def _with_entry(self, key: str, done: Done, make: Callable[[int, int], ev.Event]) -> Step | None:
        def found(outcome: int | KvdError) -> None:
            if isinstance(outcome, KvdError):
                done(outcome)
            else:
                self._runner.administrate(lambda op: make(op, outcome), lambda reply: done(_outcome(reply)))

        return self._find(key, found)

    def _find(self, key: str, found: Callable[[int | KvdError], None]) -> Step | None:
        """The entry with this key, given in full or by its first digits. Raises UsageError if it is no key.

        `found` is told in the very turn in which the entry was looked at: later it may be another family's.
        """
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
            return None
        return self._scan(key, digits, found)

    def _scan(self, key: str, digits: str, found: Callable[[int | KvdError], None]) -> Step:
        """Looks at all READY entries for those whose keys begin with these digits."""
        key8, mask = (
            int.from_bytes(bytes.fromhex(text[:16].ljust(16, "0")), "little")
            for text in (digits, "f" * len(digits))
        )
        families_max, at = self._domain.sizes.families_max, 0
        matches: list[int] = []

        def is_meant(entry: int) -> bool:
            row = self._domain.table.entry(entry)
            return bool(row["state"] == EntryState.READY and row["key"].hex().startswith(digits))

        def step() -> bool:
            nonlocal at
            ready = array("I", self._domain.table.scan(at, min(SCAN_STEP, families_max - at)))
            matches.extend(
                entry for entry in self._domain.core.beginning_with(ready, key8, mask) if is_meant(entry)
            )
            at += SCAN_STEP
            if at < families_max and len(matches) < 2:
                return False
            matches[:] = filter(is_meant, matches)  # it may have left since
            if len(matches) > 1:
                found(
                    UsageError(f"{len(matches)} or more keys begin with {key}; give more digits", code="key")
                )
            else:
                found(matches[0] if matches else _absent(key))
            return True

        return step


def _page(method: str, params: Mapping[str, Any]) -> tuple[int, int]:
    """(start, limit) of a listing. Raises UsageError(params)."""
    start, limit = params.get("start", 0), params.get("limit", 100)
    if not 1 <= limit <= LS_LIMIT_MAX or start < 0:
        raise UsageError(f"{method}: limit is 1 … {LS_LIMIT_MAX}, start is not negative", code="params")
    return start, limit


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
