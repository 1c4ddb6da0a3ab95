"""The configuration: one validated, frozen value; the only home of defaults.

Owns every option of the daemon: its name, default, meaning and bounds. One TOML file, then `KVD_*` environment
variables over it (`[pool] size` is KVD_POOL_SIZE). May be read by the server and kvctl. Nothing here asks the
machine anything: amounts given as a share ("80%") are turned into bytes by `resolve`, which is told how much
there is. Every refusal is a ConfigError naming the key, the value, what is allowed and where it was set.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from kvd import limits
from kvd.errors import ConfigError
from kvd.limits import GIB, KIB, MIB

DEFAULT_PATH: Final = Path("/etc/kvd/kvd.toml")
_UNITS: Final = {
    "": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1 << 40, "K": KIB, "M": MIB, "G": GIB, "T": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_SHARE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")


def parse_size(value: object) -> int:
    """Bytes of 1048576, "64MiB", "1.5GiB" or "10GB". Raises ValueError saying what is allowed."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("a size is bytes or a number with a unit: 65536, 64MiB, 1.5GiB, 10GB")
    unit_bytes = _UNITS[match[2].upper()]
    return int(float(match[1]) * unit_bytes) if "." in match[1] else int(match[1]) * unit_bytes


@dataclass(frozen=True, slots=True)
class Amount:
    """A size that is either given in bytes or as a share of a whole that is known later."""

    size_bytes: int | None = None
    share: float | None = None

    def of(self, whole_bytes: int) -> int:
        """Bytes, when the whole has `whole_bytes`."""
        return self.size_bytes if self.size_bytes is not None else int(whole_bytes * (self.share or 0.0))

    def __str__(self) -> str:
        return (
            format_size(self.size_bytes) if self.size_bytes is not None else f"{(self.share or 0.0) * 100:g}%"
        )


def parse_amount(value: object) -> Amount:
    """An Amount of "80%" or of anything `parse_size` takes. Raises ValueError."""
    if isinstance(value, Amount):
        return value
    match = _SHARE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        try:
            return Amount(size_bytes=parse_size(value))
        except ValueError as error:
            raise ValueError(f'{error}, or a share: "80%"') from None
    if not 0 < float(match[1]) <= 100:
        raise ValueError("a share is more than 0% and at most 100%")
    return Amount(share=float(match[1]) / 100)


def format_size(size_bytes: int) -> str:
    """`size_bytes` for people: the largest unit that leaves at most two decimals exact enough to read."""
    for unit, factor in (("TiB", 1 << 40), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{size_bytes} B"


def _word_or_number(word: str, low: int, high: int) -> Any:
    """A validator for "auto" (or another word) or a size between `low` and `high`, with one message for both."""

    def check(value: object) -> object:
        if value == word:
            return value
        try:
            number = parse_size(value)
        except ValueError:
            number = -1
        if not low <= number <= high:
            raise ValueError(f'allowed is "{word}" or a number {low} … {high} (units such as MiB may follow)')
        return number

    return BeforeValidator(check)


def _none_or_amount(value: object) -> object:
    return value if value == "none" else parse_amount(value)


def _listed(value: object) -> object:
    """Environment variables give lists as "1000,1001"."""
    if isinstance(value, str):
        return [item.strip() for item in value.split(",") if item.strip()]
    return value


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("it is not a power of two")
    return value


def parse_listen(text: str) -> tuple[str, int]:
    """(host, port) of "127.0.0.1:9464" or "[::1]:9464"; port 0 takes any. Raises ValueError saying what is allowed."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    decimal = port.isascii() and port.isdigit() and len(port) <= 5
    is_host = bool(bare) and not any(char.isspace() for char in bare) and (":" not in host or bare != host)
    if not (colon and is_host and decimal and int(port) <= 65535):
        raise ValueError("write host:port with a port of 0 … 65535, such as 127.0.0.1:9464 or [::1]:9464")
    return bare, int(port)


def _none_or_listen(value: str) -> str:
    if value:
        parse_listen(value)
    return value


def _absolute(value: str) -> str:
    """The daemon, its clients and kvctl run in different directories."""
    if not value.startswith("/"):
        raise ValueError("write an absolute path, such as /run/kvd/kvd.sock: it is not relative to anything")
    if "\0" in value:
        raise ValueError("a path has no NUL in it")
    return value


def _socket_path(value: str) -> str:
    if len(value.encode(errors="surrogateescape")) > limits.socket_path_bytes_max:
        raise ValueError(f"the kernel allows {limits.socket_path_bytes_max} bytes for the path of a socket")
    return _absolute(value)


Auto = Literal["auto"]
ShareOrSize = Annotated[Amount, BeforeValidator(parse_amount)]
RingSize = Annotated[
    int,
    BeforeValidator(parse_size),
    Field(ge=limits.ring_bytes_min, le=limits.ring_bytes_max),
    AfterValidator(_power_of_two),
]
Ids = Annotated[tuple[Annotated[int, Field(ge=0, le=0xFFFFFFFF)], ...], BeforeValidator(_listed)]
SegmentSize = Annotated[Auto | int, _word_or_number("auto", limits.frame_bytes, limits.segment_bytes_max)]
FamiliesMax = Annotated[Auto | int, _word_or_number("auto", 64, limits.families_max)]
RecordsMax = Annotated[Auto | int, _word_or_number("auto", 64, 2 * limits.families_max)]
ConnectionsMax = Annotated[Auto | int, _word_or_number("auto", 1, 4 * limits.clients_max)]
Threads = Annotated[Auto | int, _word_or_number("auto", 1, 64)]


class _Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True
    )


class ServerConfig(_Section):
    """The process: where it listens, what it logs, how it stops."""

    socket: Annotated[str, AfterValidator(_socket_path)] = "/run/kvd/kvd.sock"
    """unix socket for clients and kvctl (KVD_SOCKET sets it too); the last part of its directory is made (mode 0755)"""
    socket_mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0660"
    """permissions of the socket file, octal; ignored when systemd passes the socket"""
    runtime_dir: Annotated[str, AfterValidator(_absolute)] = "/run/kvd"
    """directory for the owner file of named memory and the keeper's socket"""
    log_format: Literal["auto", "console", "json"] = "auto"
    """console for people, json for collectors; auto: console on a terminal"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """least level that is logged"""
    metrics_listen: Annotated[str, Field(max_length=255), AfterValidator(_none_or_listen)] = ""
    """host:port of the Prometheus endpoint, such as 127.0.0.1:9464; empty: off"""
    stop_timeout_s: Annotated[float, Field(gt=0, le=600)] = 10.0
    """longest time between SIGTERM and exit, whatever clients do"""


class PoolConfig(_Section):
    """The memory that objects live in."""

    size: ShareOrSize = Amount(share=0.5)
    """bytes, or a share of the machine's memory or of the cgroup's limit, whichever is less"""
    segment_size: SegmentSize = "auto"
    """bytes per segment, the bound of one object; auto: 1 GiB, more for pools above 128 GiB"""
    families_max: FamiliesMax = "auto"
    """index entries; auto: one for each 64 KiB of pool"""
    records_max: RecordsMax = "auto"
    """objects (members of families); auto: twice families_max"""
    huge_pages: Literal["auto", "thp", "hugetlb", "never"] = "auto"
    """auto: transparent huge pages where the kernel gives them; hugetlb fails if too few are reserved"""
    backing: Literal["memfd", "posix"] = "memfd"
    """memfd, or named POSIX memory (cannot be sealed: for single-user hosts only)"""
    lock: Literal["auto", "yes", "no"] = "auto"
    """keep the pool from being swapped; auto: try, log if not allowed; yes: refuse to start otherwise"""
    populate: Literal["background", "lazy"] = "background"
    """background: touch all pages at start, serving meanwhile; lazy: when they are first used"""
    populate_threads: Threads = "auto"
    """threads that populate; auto: one for every two processors, at most 8"""


class ClientsConfig(_Section):
    """What one client may use."""

    max: Annotated[int, Field(ge=1, le=limits.clients_max)] = 64
    """clients attached at once"""
    hazards_max: Annotated[int, Field(ge=64, le=limits.hazards_per_client_max)] = 1 << 20
    """families that one client may hold leases on (8 bytes each, only touched when used)"""
    sq_size: RingSize = MIB
    """bytes of the ring towards the daemon; a power of two"""
    cq_size: RingSize = MIB
    """bytes of the ring of answers; a power of two"""
    touch_records: Annotated[int, Field(ge=64, le=1 << 20), AfterValidator(_power_of_two)] = (
        limits.touch_ring_records
    )
    """recency records that a client can leave between two looks of the daemon; a power of two"""
    leased_max: Annotated[Literal["none"] | Amount, BeforeValidator(_none_or_amount)] = Amount(share=0.5)
    """bytes that one client may hold leases on, in bytes or as a share of the pool; none: no limit"""
    reserved_max: ShareOrSize = Amount(share=0.5)
    """bytes that one client may be writing at once (reserved, not published yet), or a share of the pool"""
    leased_over: Literal["report", "refuse", "disconnect"] = "report"
    """who holds more: report it, refuse its reservations, or disconnect and kill it"""


class EvictionConfig(_Section):
    """What leaves when room is needed."""

    policy: Literal["slru", "lru", "value"] = "slru"
    """slru: what was used twice is not washed out by scans; value: of the coldest, the least worth a byte goes first"""
    protected_share: Annotated[float, Field(gt=0, lt=1)] = 0.25
    """slru, value: share of the bytes for runs that were used again"""
    pinned_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """share of the pool that hard pins may take"""


class AccessConfig(_Section):
    """Who may connect, beyond the permissions of the socket file."""

    admin_uids: Ids = ()
    """users who may pin, clear and stop, besides root and the daemon's own"""
    uids: Ids = ()
    """users who may connect; uids and gids both empty: whom the socket file lets in"""
    gids: Ids = ()
    """groups whose members may connect"""
    connections_per_uid: ConnectionsMax = "auto"
    """control connections that one user may have open, each connected store is one; auto: clients.max and 16 more"""


class ObjectsConfig(_Section):
    """How objects are treated."""

    strict_duplicates: bool = False
    """tell a writer whose bytes differ from those already there, and log both checksums"""
    verify_sample: Annotated[int, Field(ge=0, le=1 << 32)] = 1000
    """the daemon computes the checksum of every n-th published object once more; 0: of none"""


class RestartConfig(_Section):
    """What outlives the process, so that the next one serves from the same memory."""

    keep: Literal["auto", "service-manager", "keeper", "off"] = "auto"
    """who keeps the memory over a restart; auto: the service manager if it says that it stores enough, else nobody"""


class EventsConfig(_Section):
    """What routers are told of what is stored (docs/engines.md, "KV events")."""

    listen: Annotated[str, Field(max_length=255, pattern=r"^$|^(tcp|ipc)://.+$")] = ""
    """ZMQ address to publish KV events at, such as tcp://127.0.0.1:5557 or ipc:///run/kvd/events; empty: off"""
    replay_listen: Annotated[str, Field(max_length=255, pattern=r"^$|^(tcp|ipc)://.+$")] = ""
    """ZMQ address at which subscribers ask for what they missed; empty: none"""
    topic: Annotated[str, Field(max_length=255)] = "kvd"
    """topic of all events"""
    queue_max: Annotated[int, Field(ge=16, le=1 << 20)] = 16384
    """operations that may wait to be published; when more come, subscribers get everything anew"""


class Origin(BaseModel):
    """Where each key was set: "default", a file, or an environment variable."""

    model_config = ConfigDict(frozen=True)
    keys: Mapping[str, str] = {}


class Config(BaseModel):
    """All options of the daemon. Build with `Config.load`, or directly in tests."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    server: ServerConfig = ServerConfig()
    pool: PoolConfig = PoolConfig()
    clients: ClientsConfig = ClientsConfig()
    eviction: EvictionConfig = EvictionConfig()
    access: AccessConfig = AccessConfig()
    objects: ObjectsConfig = ObjectsConfig()
    restart: RestartConfig = RestartConfig()
    events: EventsConfig = EventsConfig()
    origin: Annotated[Origin, Field(exclude=True, repr=False)] = Origin()

    @classmethod
    def load(cls, path: Path | None, env: Mapping[str, str]) -> Config:
        """The file at `path` (None: no file) with the `KVD_*` variables of `env` over it. Raises ConfigError."""
        values = _from_file(path) if path is not None else {}
        origin = {f"{s}.{k}": str(path) for s, section in values.items() for k in section}
        for section, key, name, text in _from_env(env):
            values.setdefault(section, {})[key] = text
            origin[f"{section}.{key}"] = name
        try:
            return cls.model_validate({**values, "origin": Origin(keys=origin)})
        except ValidationError as error:
            raise _translated(error, origin) from None

    def describe(self) -> list[tuple[str, str, str, str]]:
        """(key, value, where it was set, meaning) of every option, in the order of the documentation."""
        rows = []
        for section in SECTIONS:
            part = getattr(self, section)
            for key, field in type(part).model_fields.items():
                name = f"{section}.{key}"
                rows.append(
                    (
                        name,
                        _shown(getattr(part, key)),
                        self.origin.keys.get(name, "default"),
                        field.description or "",
                    )
                )
        return rows


SECTIONS: Final = tuple(name for name in Config.model_fields if name != "origin")
_KEYS: Final = {section: tuple(type(getattr(Config(), section)).model_fields) for section in SECTIONS}
_VARIABLES: Final = {
    f"KVD_{section}_{key}".upper(): (section, key) for section, keys in _KEYS.items() for key in keys
}
# Read by others: the client and kvctl (KVD_SOCKET, KVD_CONFIG), builds and tests.
_OTHER_VARIABLES: Final = ("KVD_CONFIG", "KVD_MUTANT")


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(str(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def _near(name: str, known: list[str], cutoff: float = 0.6) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
    return f"; did you mean {found[0]!r}?" if found else ""


def _from_file(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}", code="file", path=str(path)) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", code="file", path=str(path)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}", code="file", path=str(path)) from None
    for section, keys in values.items():
        if section not in SECTIONS:
            raise ConfigError(
                f"{path}: unknown section [{section}]{_near(section, list(SECTIONS))} "
                f"(sections are {', '.join(SECTIONS)})",
                code="unknown", key=section, source=str(path),
            )  # fmt: skip
        if not isinstance(keys, dict):
            raise ConfigError(
                f"{path}: {section} = {keys!r} is not a section; write [{section}] and its keys below",
                code="value", key=section, source=str(path),
            )  # fmt: skip
    return values


def _from_env(env: Mapping[str, str]) -> list[tuple[str, str, str, str]]:
    """(section, key, variable, text). A variable that looks like an option of ours but is none is an error."""
    ours = tuple(f"KVD_{section.upper()}_" for section in SECTIONS)
    found = []
    if env.get("KVD_SOCKET"):
        found.append(("server", "socket", "KVD_SOCKET", env["KVD_SOCKET"]))
    for name, text in sorted(env.items()):
        if not name.startswith("KVD_") or name in _OTHER_VARIABLES or name == "KVD_SOCKET":
            continue
        if name in _VARIABLES:
            found.append((*_VARIABLES[name], name, text))
        elif name.startswith(ours) or _near(name, list(_VARIABLES), cutoff=0.8):
            raise ConfigError(
                f"environment variable {name}: no such option{_near(name, list(_VARIABLES))}",
                code="unknown", key=name, source=name,
            )  # fmt: skip
    return found


def _translated(error: ValidationError, origin: Mapping[str, str]) -> ConfigError:
    details = error.errors(include_url=False)
    lines = [_line(item, origin) for item in details]
    first = details[0]
    key = ".".join(str(part) for part in first["loc"][:2])
    return ConfigError(
        "\n".join(dict.fromkeys(lines)),
        code="unknown" if first["type"] == "extra_forbidden" else "value",
        key=key,
        value=str(first.get("input")),
        source=origin.get(key, "default"),
    )


def _line(item: ErrorDetails, origin: Mapping[str, str]) -> str:
    section, *rest = (str(part) for part in item["loc"])
    key = f"{section}.{rest[0]}" if rest else section
    source = origin.get(key, "default")
    if item["type"] == "extra_forbidden":
        return f"{source}: unknown key {key}{_near(rest[0], list(_KEYS[section]))}"
    if not rest:
        return f"[{section}]: {item['msg'].removeprefix('Value error, ')}"
    return f"{source}: {key} = {item['input']!r} is not allowed: {item['msg'].removeprefix('Value error, ')}"


@dataclass(frozen=True, slots=True)
class Sizes:
    """A configuration with every "auto" and every share turned into numbers."""

    pool_bytes: int
    segments_bytes: tuple[int, ...]
    families_max: int
    records_max: int
    leased_bytes_max: int | None
    reserved_bytes_max: int
    memory_bytes: int  # what shares are of: the machine or its cgroup
    memory_source: str
    index_bytes: int  # of META, when it is full
    cut_bytes: int = 0  # of a size that was given in bytes and is not whole frames

    @property
    def notes(self) -> list[str]:
        """What an operator may not expect of these sizes, for the log and for config check."""
        if not self.cut_bytes:
            return []
        return [
            f"pool.size is {format_size(self.pool_bytes)}, {self.cut_bytes} B less than was asked for: a pool is whole "
            f"frames of {format_size(limits.frame_bytes)}"
        ]


def index_bytes(families_max: int, records_max: int, segments_count: int, clients_max: int) -> int:
    """Bytes of META for these sizes, as the native code lays it out: the most that it comes to take."""
    buckets_count = max(2, 1 << (-(-families_max // 4) - 1).bit_length())
    parts = (
        4096, segments_count * 32, clients_max * 64, buckets_count * 64, families_max * 64, records_max * 48,
    )  # fmt: skip
    before_cold = sum(-(-part // 64) * 64 for part in parts)
    return -(-(before_cold + families_max * 16) // 4096) * 4096


def resolve(config: Config, memory_bytes: int, memory_source: str) -> Sizes:
    """Sizes on a machine (or in a cgroup) with `memory_bytes`. Raises ConfigError if pool and index cannot fit."""
    pool = config.pool
    where = config.origin.keys.get("pool.size", "default")
    wanted_bytes = pool.size.of(memory_bytes)
    if wanted_bytes > memory_bytes:
        raise ConfigError(
            f"{where}: pool.size = {pool.size} is {wanted_bytes} B, but {memory_source} has {memory_bytes} B "
            f"({format_size(memory_bytes)}); give at most that, or a share such as \"80%\"",
            code="pool-size", key="pool.size", value=str(pool.size), source=where, size_bytes=wanted_bytes,
            memory_bytes=memory_bytes, memory_source=memory_source,
        )  # fmt: skip
    pool_bytes = wanted_bytes - wanted_bytes % limits.frame_bytes
    if pool_bytes < limits.frame_bytes:
        raise ConfigError(
            f"{where}: pool.size = {pool.size} is {wanted_bytes} B, less than one frame of {limits.frame_bytes} B",
            code="pool-size", key="pool.size", value=str(pool.size), source=where, size_bytes=wanted_bytes,
        )  # fmt: skip
    segment_bytes = _segment_bytes(config, pool_bytes)
    full, rest = divmod(pool_bytes, segment_bytes)
    families_max = pool_bytes // (64 * KIB) if pool.families_max == "auto" else pool.families_max
    families_max = max(64, min(families_max, limits.families_max))
    segments_bytes = (segment_bytes,) * full + ((rest,) if rest else ())
    records_max = 2 * families_max if pool.records_max == "auto" else pool.records_max
    meta_bytes = index_bytes(families_max, records_max, len(segments_bytes), config.clients.max)
    if pool_bytes + meta_bytes > memory_bytes:
        raise ConfigError(
            f"{where}: a pool of {pool_bytes} B ({format_size(pool_bytes)}) needs an index of {meta_bytes} B "
            f"({format_size(meta_bytes)}) beside it, together more than the {memory_bytes} B "
            f"({format_size(memory_bytes)}) that {memory_source} has; make pool.size smaller, or pool.families_max "
            f"({families_max}) and pool.records_max ({records_max})",
            code="pool-size", key="pool.size", value=str(pool.size), source=where, size_bytes=pool_bytes,
            index_bytes=meta_bytes, memory_bytes=memory_bytes, memory_source=memory_source,
        )  # fmt: skip
    leased = config.clients.leased_max
    return Sizes(
        pool_bytes=pool_bytes,
        segments_bytes=segments_bytes,
        families_max=families_max,
        records_max=records_max,
        leased_bytes_max=None if isinstance(leased, str) else leased.of(pool_bytes),
        reserved_bytes_max=max(1, config.clients.reserved_max.of(pool_bytes)),
        memory_bytes=memory_bytes,
        memory_source=memory_source,
        index_bytes=meta_bytes,
        cut_bytes=wanted_bytes - pool_bytes if pool.size.share is None else 0,
    )


def _segment_bytes(config: Config, pool_bytes: int) -> int:
    """Size of a segment: as set, or 1 GiB and in large pools so much that there are at most 128."""
    if config.pool.segment_size == "auto":
        return min(pool_bytes, max(1, -(-pool_bytes // (128 * GIB))) * GIB)
    segment_bytes = config.pool.segment_size
    source = config.origin.keys.get("pool.segment_size", "default")
    if segment_bytes % limits.frame_bytes:
        raise ConfigError(
            f"{source}: pool.segment_size = {segment_bytes} is not a multiple of {limits.frame_bytes} B (2MiB)",
            code="value", key="pool.segment_size", value=str(segment_bytes), source=source,
        )  # fmt: skip
    if -(-pool_bytes // segment_bytes) > limits.segments_max:
        raise ConfigError(
            f"{source}: pool.segment_size = {segment_bytes} cuts the pool of {pool_bytes} B into more than "
            f"{limits.segments_max} segments; make it larger",
            code="value", key="pool.segment_size", value=str(segment_bytes), source=source,
        )  # fmt: skip
    return min(segment_bytes, pool_bytes)
