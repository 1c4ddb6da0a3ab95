"""What the commands of `kvctl plan` share: options, the model they plan for, how a ledger is told, how errors end.

Called by the modules of the commands, in the calling thread. Invariants: bad input ends with exit code 2 and a message
that names the option, the value and what is allowed, never with a traceback; with `--json` every error is JSON; what
was computed ends with exit code 0, whatever it says.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, ParamSpec

import typer
from typer.core import TyperGroup

from kvd.errors import UsageError, to_dict
from kvd.kvctl.plan_tables import print_ledger
from kvd.plan import units
from kvd.plan.footprint import Footprint, KeptGroup
from kvd.plan.ledger import Ledger, as_dict
from kvd.plan.objects import metadata_per_object_bytes_assumed

if TYPE_CHECKING:
    from kvd.layout.geometry import Geometry

P = ParamSpec("P")

EPILOG: Final = (
    "Exit code 0: an answer was computed, whatever it says (scripts read it from --json); 2: wrong usage, or something "
    "needed is missing."
)
SHARDS_MAX: Final = 4096
DTYPE_DEFAULT: Final = "bfloat16"
METADATA_DEFAULT: Final = f"{metadata_per_object_bytes_assumed}B"


def parse_whole(text: str | int) -> int:
    """A whole number, also as 32_768; defaults come through here as they are."""
    try:
        if isinstance(text, int) or text.isascii():  # int() takes the digits of other scripts too
            return int(text)
    except ValueError:
        pass
    raise typer.BadParameter(f"{text!r}; allowed: a whole number, like 32768")


def whole(*names: str, help: str) -> Any:
    """An option that is a whole number, refused with its value when it is not."""
    return typer.Option(*names, help=help, parser=parse_whole, metavar="N")


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
PlotOption = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE.png", help="Also draw it as a PNG (needs matplotlib).")
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="CONFIG.JSON",
        help="Hugging Face config.json of the model: bytes of tokens and snapshots, windows, groups.",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="With --config: the type that KV is kept in. Default: bfloat16.")
]
TokenBytesOption = Annotated[
    int | None,
    whole("--bytes-per-token", help="Instead of --config: KV bytes of one token, all layers, all needed."),
]
TpOption = Annotated[
    int, whole("--tp", help="Tensor parallel ranks; with --config, heads that ranks share are stored once.")
]
PpOption = Annotated[int, whole("--pp", help="With --config: pipeline stages.")]
GroupsOption = Annotated[
    int | None,
    whole("--groups", help="With --bytes-per-token: groups of layers with one attention rule. Default: 1."),
]
MetadataOption = Annotated[str, typer.Option("--metadata", help="Metadata per object, assumed.")]


def contradiction(message: str, allowed: str) -> UsageError:
    """Two options that cannot both be meant, or one that would be ignored without another."""
    return UsageError(f"{message}; allowed: {allowed}", code="contradiction")


def named_parts(
    option: str, text: str, parts: Sequence[str], value: str, flags: Sequence[str] = ()
) -> tuple[str, dict[str, str]]:
    """'name:part=value,flag' as its name and its parts; a flag has no value. UsageError: unknown, or given twice."""
    name, _, rest = text.rpartition(":") if "=" in text or ":" in text else (text, "", "")
    found: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, given = part.partition("=")
        if part not in flags and (not equals or key not in parts):
            also = f", and {', '.join(flags)}" if flags else ""
            raise UsageError(
                f"{option} = {text!r}: unknown part {part!r}; allowed: {', '.join(parts)} with {value}{also}",
                code=option.strip("-"), value=text,
            )  # fmt: skip
        if key in found and key not in flags:
            raise UsageError(
                f"{option} = {text!r}: {key} is given twice; allowed: once",
                code=option.strip("-"),
                value=text,
            )
        found[key] = given
    return name, found


class PlanGroup(TyperGroup):
    """The group `plan`: what the option parser refuses is JSON too, where --json is among the arguments."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        as_json = "--json" in ctx.args
        try:
            return super().invoke(ctx)
        except _PARSER_ERROR as error:
            if not as_json:
                raise
            _tell(UsageError(error.format_message(), code="option"), as_json=True)
            raise typer.Exit(2) from None


# The parser's UsageError; typer has its own copy of click or uses the one installed.
_PARSER_ERROR: Any = typer.BadParameter.__base__


def _tell(error: UsageError, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"error": to_dict(error)}, indent=2, ensure_ascii=False))
    else:
        typer.echo(f"kvctl plan: {error}", err=True)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turn a UsageError into its message and exit code 2; with --json into JSON."""

    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except UsageError as error:
            _tell(error, as_json=bool(kwargs.get("as_json")))
            raise typer.Exit(2) from None

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__wrapped__ = command  # type: ignore[attr-defined]
    run.__annotations__ = command.__annotations__
    return run


def report(
    name: str, ledgers: dict[str, Ledger], as_json: bool, extra: dict[str, object] | None = None
) -> None:
    """Print the ledgers of one plan, as JSON or for a person."""
    if as_json:
        body = {title: as_dict(ledger) for title, ledger in ledgers.items()}
        typer.echo(json.dumps({"plan": name, "ledgers": body, **(extra or {})}, indent=2, ensure_ascii=False))
        return
    for title, ledger in ledgers.items():
        print_ledger(title, ledger)


def plain_file(path: Path, option: str, bytes_max: int, allowed: str) -> None:
    """Refuse what is no plain file of a sane size: a pipe that nobody writes to would hold the command for ever."""
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{option} = {str(path)[:200]}: {why}; allowed: {allowed}", code="file") from None
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{option} = {path} is no plain file; allowed: {allowed}", code="file")
    if found.st_size > bytes_max:
        raise UsageError(
            f"{option} = {path} has {found.st_size:,} B; allowed: {allowed}, of at most {bytes_max:,} B", code="file"
        )  # fmt: skip


def plots_for(path: Path | None) -> Any:
    """The drawing module, once the path is known to be fit; None if nothing is to be drawn."""
    if path is None:
        return None
    if path.suffix != ".png":
        raise UsageError(f"--plot = {path}: allowed: a file name that ends in .png", code="file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--plot = {path}: no such folder; allowed: an existing one", code="file")
    from kvd.kvctl import plan_plots

    return plan_plots


def model(
    config: Path | None,
    bytes_per_token: int | None,
    dtype: str | None,
    *,
    tp: int = 1,
    pp: int = 1,
    groups: int | None = None,
) -> Footprint:
    """What the model keeps, from exactly one of --config and --bytes-per-token."""
    units.check_int("--tp", tp, 1, SHARDS_MAX)
    units.check_int("--pp", pp, 1, SHARDS_MAX)
    if config is not None and bytes_per_token is not None:
        raise UsageError(
            f"--config = {config} and --bytes-per-token = {bytes_per_token}: two answers to one question; allowed: one",
            code="contradiction",
        )  # fmt: skip
    if config is not None:
        if groups is not None:
            raise contradiction(
                f"--groups = {groups} and --config = {config}: the config says which groups there are",
                "--groups with --bytes-per-token",
            )
        return _of_config(config, dtype, tp, pp)
    if bytes_per_token is None:
        raise UsageError(
            "bytes per token are not known; allowed: --config config.json, or --bytes-per-token N",
            code="missing",
        )
    if dtype is not None:
        raise contradiction(
            f"--dtype = {dtype} without --config: bytes per token were given", "with --config"
        )
    if pp != 1:
        raise contradiction(
            f"--pp = {pp} without --config: which layers a stage has is not known", "with --config"
        )
    units.check_int("--bytes-per-token", bytes_per_token, 1, units.plan_bytes_max)
    return Footprint.by_hand(
        bytes_per_token, tp * units.check_int("--groups", 1 if groups is None else groups, 1, SHARDS_MAX)
    )


def _of_config(config: Path, dtype: str | None, tp: int, pp: int) -> Footprint:
    geometry = geometry_of(config, dtype)
    try:
        return footprint_of(geometry, tp, pp)
    except UsageError as error:
        split = f"--tp = {tp}" + (f", --pp = {pp}" if pp > 1 else "")
        raise UsageError(f"{split} with --config = {config}: {error.message}", code="split") from None


def geometry_of(config: Path, dtype: str | None) -> Geometry:
    """The geometry of --config."""
    from kvd.layout.geometry import Geometry  # only this option needs it
    from kvd.layout.hf import CONFIG_BYTES_MAX

    plain_file(config, "--config", CONFIG_BYTES_MAX, "a Hugging Face config.json")
    return Geometry.from_hf_config(str(config), dtype=dtype or DTYPE_DEFAULT)


def footprint_of(geometry: Geometry, tp: int = 1, pp: int = 1) -> Footprint:
    """What a geometry keeps under a split. Members do not depend on the chunk, nor do windows."""
    from kvd.layout.geometry import Rule

    objects = geometry.objects(chunk_tokens=1, tp=tp, pp=pp)
    groups: list[KeptGroup] = []
    for number, group in enumerate(geometry.groups):
        sizes = [part.size_bytes for part in objects if part.group == number]
        alike = sum(one.name == group.name for one in geometry.groups[:number])
        groups.append(
            KeptGroup(
                name=f"{group.name} ({alike + 1})" if alike else group.name,
                token_bytes=group.bytes_per_token,
                snapshot_bytes=group.state_bytes,
                last_tokens=group.window - 1 if group.windowed else None,
                last_is_bound=group.rule is Rule.CHUNKED,
                members_count=len(sizes),
                members_alike=len(set(sizes)) == 1,
            )
        )
    return Footprint(tuple(groups))
