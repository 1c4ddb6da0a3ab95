"""Programs for the model checker: instructions, threads, scenarios, and a thread made ready to run.

Owns the instruction set and its static analysis. `machine.py` gives it a meaning. Pure data, imported by tests only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Order = str  # "relaxed" | "acquire" for loads, "relaxed" | "release" | "nt" for stores
Fn = Callable[..., int]  # its parameter names are the registers that it reads


@dataclass(frozen=True, slots=True)
class Load:
    """reg = word, or word[index register]. `must` is a claim on registers that holds whenever the load is done."""

    reg: str
    word: str
    order: Order = "relaxed"
    index: str | None = None
    must: Fn | None = None
    claim: str = ""


@dataclass(frozen=True, slots=True)
class Store:
    word: str
    value: int | Fn
    order: Order = "relaxed"


@dataclass(frozen=True, slots=True)
class Fence:
    kind: str  # "acquire" | "release" | "seq_cst" | "sfence"


@dataclass(frozen=True, slots=True)
class If:
    """Jumps to a label when the condition is true."""

    condition: Fn
    goto: str


@dataclass(frozen=True, slots=True)
class Let:
    reg: str
    value: int | Fn


@dataclass(frozen=True, slots=True)
class Await:
    """Blocks until the word satisfies `until` (acquire); or jumps to `goto` when the thread `or_gone` is gone."""

    word: str
    until: Callable[[int], bool]
    or_gone: str | None = None
    goto: str | None = None


@dataclass(frozen=True, slots=True)
class IfGone:
    """Jumps when the named thread is dead and all that it stored is in memory: what a pidfd tells."""

    thread: str
    goto: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Must hold when reached. `check` sees the register `held` of every living thread, by thread name."""

    text: str
    check: Callable[[Mapping[str, int]], bool]


Instr = Load | Store | Fence | If | Let | Await | IfGone | Claim
Line = Instr | str  # a string is a label


@dataclass(frozen=True, slots=True)
class Thread:
    """A program. A mortal thread may die between any two of its steps. The register `held` starts at `held`."""

    name: str
    lines: Sequence[Line]
    mortal: bool = False
    held: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    """Threads over words that start at `words`.

    `final` gets the words once no thread can move and says what is wrong with them, or None.
    """

    name: str
    words: Mapping[str, int]
    threads: Sequence[Thread]
    final: Callable[[Mapping[str, int]], str | None] = lambda words: None
    show: Callable[[str, int], str] = lambda word, value: str(value)


def params(fn: object) -> tuple[str, ...]:
    return tuple(inspect.signature(fn).parameters) if callable(fn) else ()


class Program:
    """A thread made ready to run: labels resolved, registers numbered, liveness and future accesses per pc."""

    def __init__(self, thread: Thread, words: Mapping[str, int]) -> None:
        self.name, self.mortal = thread.name, thread.mortal
        labels: dict[str, int] = {}
        self.code: list[Instr] = []
        for line in thread.lines:
            if isinstance(line, str):
                labels[line] = len(self.code)
            else:
                self.code.append(line)
        self.end = len(self.code)
        self.reg_names = ["held", *sorted({i.reg for i in self.code if isinstance(i, Load | Let)} - {"held"})]
        self.reg_ids = {name: number for number, name in enumerate(self.reg_names)}
        self.start_regs = (thread.held,) + (0,) * (len(self.reg_names) - 1)
        self.word_ids = {name: number for number, name in enumerate(words)}
        self.held_bit = 1 << len(words)  # stands for all `held` registers in the sets of accesses
        self.target = [labels[g] if (g := getattr(i, "goto", None)) else -1 for i in self.code]
        self.uses: list[tuple[int, ...]] = [self._uses(i) for i in self.code]
        self.touch: list[tuple[int, ...]] = [self._touched(i) for i in self.code]
        self._analyse()

    def _uses(self, instr: Instr) -> tuple[int, ...]:
        match instr:
            case Load(index=index, must=must):
                names = [*params(must), *([index] if index else [])]
            case Store(value=fn) | Let(value=fn) | If(condition=fn):
                names = list(params(fn))
            case _:
                names = []
        return tuple(self.reg_ids[name] for name in names)

    def _touched(self, instr: Instr) -> tuple[int, ...]:
        """The words an instruction may access; several when it is indexed."""
        match instr:
            case Load(word=word, index=str()):
                return tuple(n for name, n in self.word_ids.items() if name.startswith(word + "["))
            case Load(word=word) | Store(word=word) | Await(word=word):
                return (self.word_ids[word],)
        return ()

    def _analyse(self) -> None:
        """Backward data flow to a fixed point: live registers, words still read and written, as bit sets by pc."""
        size = self.end + 1
        self.live, self.reads, self.writes = [1] * size, [0] * size, [0] * size  # bit 0 of live: `held`
        changed = True
        while changed:
            changed = False
            for pc in range(self.end - 1, -1, -1):
                instr = self.code[pc]
                succ = [pc + 1] + ([self.target[pc]] if self.target[pc] >= 0 else [])
                live = reads = writes = 0
                for s in succ:
                    live, reads, writes = live | self.live[s], reads | self.reads[s], writes | self.writes[s]
                mask = sum(1 << w for w in self.touch[pc])
                if isinstance(instr, Store):
                    writes |= mask
                else:
                    reads |= mask
                reads |= self.held_bit if isinstance(instr, Claim) else 0
                writes |= self.held_bit if isinstance(instr, Let) and instr.reg == "held" else 0
                if isinstance(instr, Load | Let):
                    live &= ~(1 << self.reg_ids[instr.reg])
                live |= 1 | sum(1 << r for r in set(self.uses[pc]))
                if isinstance(
                    instr, Load
                ):  # what `must` says of the loaded register does not make it live before
                    own = self.reg_ids[instr.reg]
                    live &= ~(1 << own) if instr.index != instr.reg else ~0
                new = (live, reads, writes)
                if new != (self.live[pc], self.reads[pc], self.writes[pc]):
                    self.live[pc], self.reads[pc], self.writes[pc] = new
                    changed = True

    def call(self, pc: int, fn: int | Fn, regs: tuple[int, ...]) -> int:
        if isinstance(fn, int):
            return fn
        return int(fn(*[regs[self.reg_ids[name]] for name in params_cached(fn)]))

    def word_at(self, pc: int, regs: tuple[int, ...]) -> int:
        """The word that the access at pc means; -1 for an index out of range, which only speculation may see."""
        instr = self.code[pc]
        if isinstance(instr, Load) and instr.index is not None:
            return self.word_ids.get(f"{instr.word}[{regs[self.reg_ids[instr.index]]}]", -1)
        return self.touch[pc][0]


_PARAMS: dict[Fn, tuple[str, ...]] = {}


def params_cached(fn: Fn) -> tuple[str, ...]:
    names = _PARAMS.get(fn)
    if names is None:
        names = _PARAMS[fn] = params(fn)
    return names
