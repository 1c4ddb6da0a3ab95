"""The form every plan has: arithmetic in steps, what it takes for granted, what follows and what does not.

Owns `Step` and the way a value and its unit are shown. A ledger is a frozen dataclass whose fields are the
checked inputs; `answers` are its results under stable names, `steps` the arithmetic that led to them,
`assumptions` what they take for granted and `conclusion` one sentence, so that a colleague can check each
line by hand and a program can read exact numbers. No state, any thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, TypeAlias

from kvd.plan import units
from kvd.plan.units import Number

Answer: TypeAlias = Number | bool | str | None

_SHOW = {
    "B": units.format_bytes,
    "B/s": units.format_bandwidth,
    "ns": units.format_ns,
    "1/s": units.format_rate,
    "share": units.format_share,
}


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

    @property
    def text(self) -> str:
        """The value as a person reads it, with ≈ where digits were cut."""
        show = _SHOW.get(self.unit)
        return f"{units.format_number(self.value)} {self.unit}" if show is None else show(self.value)

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


def plain(value: Answer) -> int | float | bool | str | None:
    """A value as JSON can hold it: whole Fractions as int, others as float."""
    if isinstance(value, Fraction):
        return int(value) if value.denominator == 1 else float(value)
    return value


def as_dict(ledger: Ledger) -> dict[str, object]:
    """The JSON form of any plan."""
    return {
        "answers": {name: plain(value) for name, value in ledger.answers.items()},
        "steps": [step.as_dict() for step in ledger.steps],
        "assumptions": list(ledger.assumptions),
        "conclusion": ledger.conclusion,
    }
