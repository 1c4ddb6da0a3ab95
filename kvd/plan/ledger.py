"""The form every plan has: arithmetic in steps, what it takes for granted, what follows and what does not.

Owns `Step` and the way a value and its unit are shown. A ledger is a frozen dataclass whose fields are the
checked inputs; `answers` are its results under stable names, `steps` the arithmetic that led to them,
`assumptions` what they take for granted and `conclusion` one sentence, so that a colleague can check each
line by hand and a program can read exact numbers. A ledger calls its inputs as the options of `kvctl plan` that give
them, in what it refuses as in what it assumes: one thing has one name. No state, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Protocol, TypeAlias

from kvd.plan import units
from kvd.plan.units import Number

Answer: TypeAlias = "Number | bool | str | Sequence[Answer] | Mapping[str, Answer] | None"
Plain: TypeAlias = "int | float | bool | str | list[Plain] | dict[str, Plain] | None"

_SHOW = {
    "B": units.format_bytes,
    "B/s": units.format_bandwidth,
    "ns": units.format_ns,
    "1/s": units.format_rate,
    "share": units.format_share,
}
UNITS_SHOWN = frozenset(_SHOW)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of arithmetic: what it is, how it came about, the exact value, and its unit.

    `unit` is 'B', 'B/s', 'ns', '1/s' or 'share' (a share of 1), which are scaled when shown, or the plural
    name of what is counted ('hosts', 'objects').
    """

    label: str
    expression: str
    value: Number
    unit: str

    def __post_init__(self) -> None:
        # Within a sum the sign stays with its number.
        object.__setattr__(self, "expression", self.expression.replace("≈ ", "≈"))

    @property
    def text(self) -> str:
        """The value as a person reads it, with ≈ where digits were cut."""
        show = _SHOW.get(self.unit)
        if show is not None:
            return show(self.value)
        return f"{units.format_number(self.value)} {singular(self.unit) if self.value == 1 else self.unit}"

    def as_dict(self) -> dict[str, object]:
        """JSON form; `exact` is the ratio of two ints where `value` had to become a float."""
        out: dict[str, object] = {
            "label": self.label,
            "expression": self.expression,
            "value": plain(self.value),
            "unit": self.unit,
            "text": self.text,
        }
        exact = Fraction(self.value)
        return out if exact.denominator == 1 else {**out, "exact": str(exact)}


def singular(plural: str) -> str:
    """'host' of 'hosts', 'family' of 'families'."""
    return f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")


class Ledger(Protocol):
    """What the command line needs of a plan."""

    @property
    def answers(self) -> Mapping[str, Answer]:
        """The results; names end in their unit."""

    @property
    def steps(self) -> Sequence[Step]:
        """The arithmetic, in order."""

    @property
    def assumptions(self) -> Sequence[str]:
        """What the numbers take for granted, a sentence each."""

    @property
    def conclusion(self) -> str:
        """What follows, and what does not."""


def plain(value: object) -> Plain:
    """A value as JSON can hold it: whole Fractions as int, others as float; what holds values by its fields."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [plain(one) for one in value]
    return inputs(value) if is_dataclass(value) else str(value)


def inputs(value: object) -> dict[str, Plain]:
    """The fields of a ledger, or of a value in one, but for those marked as results: `field(metadata=RESULT)`."""
    if not is_dataclass(value):
        return {}
    return {
        one.name: plain(getattr(value, one.name)) for one in fields(value) if "result" not in one.metadata
    }


RESULT: Mapping[str, bool] = {"result": True}


def as_dict(ledger: Ledger) -> dict[str, object]:
    """The JSON form of any plan."""
    return {
        "inputs": inputs(ledger),
        "answers": {name: plain(value) for name, value in ledger.answers.items()},
        "steps": [step.as_dict() for step in ledger.steps],
        "assumptions": list(ledger.assumptions),
        "conclusion": ledger.conclusion,
    }
