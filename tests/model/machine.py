"""An explicit-state model checker for small shared-memory programs under three memory models.

Owns: the store-buffer semantics and the exhaustive search, over the instructions of `program.py`. It knows nothing
of kvd; the protocol is in `protocol.py`. Only tests import it. Single-threaded and deterministic: the same scenario
always explores the same states in the same order.

A thread is a list of instructions with a program counter and integer registers. Memory is a set of named words.
Every store goes into a buffer of its thread and reaches memory later (a *drain*); a load sees the thread's own newest
buffered store, else memory. The models differ in what may overtake what:

    TSO   a buffer drains in order (x86).
    PSO   stores to different words drain in any order, unless a release store or a fence stands between.
    WEAK  PSO, and a load may be done before older loads, a relaxed store before older relaxed loads, as far as
          acquire loads, fences, dependencies and coherence allow; branches are predicted as not taken (aarch64).

A non-temporal store is ordered by `Fence("sfence")` and `Fence("seq_cst")` alone, in each model.

Invariants of the search: it is breadth first, so the trace of a violation is a shortest one; each reachable state is
visited once; the partial-order reduction only ever postpones steps that commute with everything the other threads
can still do (see `Machine.moves`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from .program import Await, Claim, Fence, If, IfGone, Let, Load, Program, Scenario, Store

__all__ = ["Machine", "Model", "Result", "explore"]


class Model(StrEnum):
    TSO = "tso"
    PSO = "pso"
    WEAK = "weak"


@dataclass(slots=True)
class Result:
    """`violation` is None when the whole state space was explored and every claim held."""

    states: int
    violation: str | None = None
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        head = f"{self.states} states"
        return head if self.violation is None else "\n".join([f"{self.violation} ({head})", *self.trace])


# A buffer entry is (kind, word, value); the last two kinds are markers, that is fences waiting in the buffer.
PLAIN, RELEASE, NT, RELEASE_MARK, SFENCE_MARK = range(5)
Entry = tuple[int, int, int]
# pc, registers, buffer, done early: ((pc, value), ...), dead
Local = tuple[int, tuple[int, ...], tuple[Entry, ...], tuple[tuple[int, int], ...], bool]
State = tuple[tuple[int, ...], tuple[Local, ...]]
Move = tuple[int, str, int]  # thread, "go" | "drain" | "early" | "die", buffer position or pc


class Violated(Exception):  # noqa: N818  an outcome of the search, not a programming error
    """A claim is false in the state that a step has just reached."""


class Machine:
    """The transition system of a scenario under a memory model."""

    def __init__(self, scenario: Scenario, model: Model, reduce: bool = True) -> None:
        self.scenario, self.model, self.reduce = scenario, model, reduce
        self.programs = [Program(thread, scenario.words) for thread in scenario.threads]
        self.thread_ids = {program.name: number for number, program in enumerate(self.programs)}
        self.word_names = list(scenario.words)
        self.log: list[str] | None = None  # a list while a trace is replayed

    def start(self) -> State:
        state: State = (
            tuple(self.scenario.words.values()),
            tuple((0, p.start_regs, (), (), False) for p in self.programs),
        )
        for t in range(len(self.programs)):
            state = self.settle(state, t)
        return state

    # ---- store buffers

    def drainable(self, buffer: tuple[Entry, ...]) -> Iterator[int]:
        """Positions that may go to memory now."""
        ordinary_before = release_mark = False
        seen: set[int] = set()
        for position, (kind, word, _) in enumerate(buffer):
            if kind == SFENCE_MARK:
                return
            if kind == RELEASE_MARK:
                release_mark = True
                continue
            blocked = word in seen
            if kind != NT:
                in_order = self.model is Model.TSO or kind == RELEASE
                blocked = blocked or release_mark or (in_order and ordinary_before)
                ordinary_before = True
            seen.add(word)
            if not blocked:
                yield position

    @staticmethod
    def tidy(buffer: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Drops markers that nothing waits before any more."""
        out: list[Entry] = []
        for entry in buffer:
            if entry[0] == SFENCE_MARK and not out:
                continue
            if entry[0] == RELEASE_MARK and not any(e[0] != NT for e in out):
                continue
            out.append(entry)
        return tuple(out)

    # ---- which moves to explore

    def others_future(self, state: State, me: int) -> tuple[int, int]:
        """Bit sets of words that threads other than `me` may still read, and may still write."""
        reads = writes = 0
        for t, (pc, _, buffer, _, dead) in enumerate(state[1]):
            if t == me:
                continue
            if not dead:
                program = self.programs[t]
                reads |= program.reads[pc]
                writes |= program.writes[pc]
            for kind, word, _ in buffer:
                if kind < RELEASE_MARK:
                    writes |= 1 << word
        return reads, writes

    def moves(self, state: State) -> list[Move]:
        """The moves to explore from a state.

        Reduction: a drain to a word that no other thread can still access, or a load of a word that no other thread
        can still write, commutes with every step of the others and is never disabled by them. Then it alone is
        explored: the rest comes after it. (Not a load of a thread that can die, nor one after which a claim elsewhere
        could see another `held`.) Steps inside one thread that nobody can see are never moves: `settle` does them.
        """
        moves: list[Move] = []
        for t, (pc, regs, buffer, _, dead) in enumerate(state[1]):
            program = self.programs[t]
            reads, writes = self.others_future(state, t)
            for position in self.drainable(buffer):
                if self.reduce and not (reads | writes) >> buffer[position][1] & 1:
                    return [(t, "drain", position)]
                moves.append((t, "drain", position))
            if program.mortal and not dead:
                moves.append((t, "die", 0))
            if dead or pc == program.end:
                continue
            instr = program.code[pc]
            lone = self.reduce and isinstance(instr, Load) and not program.mortal
            lone = lone and not program.writes[pc] & reads & program.held_bit
            if lone and not writes >> program.word_at(pc, regs) & 1:
                return [(t, "go", 0)]
            if self.enabled(state, t):
                moves.append((t, "go", 0))
            if self.model is Model.WEAK:
                moves += [(t, "early", at) for at in self.early(program, state[1][t], reads | writes, writes)]
        return moves

    def gone(self, state: State, name: str) -> bool:
        _, _, buffer, _, dead = state[1][self.thread_ids[name]]
        return dead and not buffer

    def enabled(self, state: State, t: int) -> bool:
        pc, _, buffer, _, _ = state[1][t]
        match self.programs[t].code[pc]:
            case Fence():
                return not buffer
            case Await(word=word, until=until, or_gone=or_gone):
                value = self.read(state, t, self.programs[t].word_ids[word])
                return until(value) or (or_gone is not None and self.gone(state, or_gone))
        return True

    def early(self, program: Program, local: Local, accessed: int, written: int) -> Iterator[int]:
        """Later accesses that a weak machine may do before the ones from pc on; pointless ones are left out."""
        pc, _, _, done, _ = local
        regs = self.speculated(program, local, program.end)
        done_at = {at for at, _ in done}
        pending_words: set[int] = set()
        pending_regs: set[int] = set()
        stores = True
        for at in range(pc, program.end):
            instr = program.code[at]
            if at in done_at:
                if isinstance(instr, Load):
                    pending_regs.discard(program.reg_ids[instr.reg])
                continue
            match instr:
                case Load(reg=reg, index=index):
                    if at > pc and (index is None or program.reg_ids[index] not in pending_regs):
                        word = program.word_at(at, regs)
                        if word not in pending_words and word >= 0 and written >> word & 1:
                            yield at
                    pending_words.update(program.touch[at])
                    pending_regs.add(program.reg_ids[reg])
                    if instr.order == "acquire":
                        return
                case Store(order=order):
                    word = program.touch[at][0]
                    ready = at > pc and stores and not pending_regs.intersection(program.uses[at])
                    if ready and order == "relaxed" and word not in pending_words and accessed >> word & 1:
                        yield at
                    pending_words.add(word)
                case Fence(kind="release") | Fence(kind="sfence") | If():
                    stores = False
                case Let(reg=reg):
                    pending_regs.add(program.reg_ids[reg])
                case _:
                    return

    @staticmethod
    def speculated(program: Program, local: Local, until: int) -> tuple[int, ...]:
        """The registers as far as loads done early, before the instruction `until`, tell."""
        regs = list(local[1])
        for at, value in local[3]:
            instr = program.code[at]
            if isinstance(instr, Load) and at < until:
                regs[program.reg_ids[instr.reg]] = value
        return tuple(regs)

    # ---- steps

    def read(self, state: State, t: int, word: int) -> int:
        for _, w, value in reversed(state[1][t][2]):
            if w == word:
                return value
        return state[0][word]

    def note(self, t: int, text: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.programs[t].name:>10}  {text}")

    def show(self, word: int, value: int) -> str:
        return f"{self.word_names[word]} = {self.scenario.show(self.word_names[word], value)}"

    def with_local(self, state: State, t: int, local: Local) -> State:
        return state[0], (*state[1][:t], local, *state[1][t + 1 :])

    def apply(self, state: State, move: Move) -> State:
        """The state after a move and the invisible steps that follow it. Raises Violated."""
        t, kind, arg = move
        pc, regs, buffer, early, dead = state[1][t]
        program = self.programs[t]
        if kind == "drain":
            _, word, value = buffer[arg]
            self.note(t, f"    ... {self.show(word, value)} reaches memory")
            rest = self.tidy(buffer[:arg] + buffer[arg + 1 :])
            memory = (*state[0][:word], value, *state[0][word + 1 :])
            state = self.with_local((memory, state[1]), t, (pc, regs, rest, early, dead))
        elif kind == "die":
            self.note(t, "dies")
            return self.with_local(state, t, (program.end, (0,) * len(regs), buffer, (), True))
        elif kind == "early":
            state = self.do_early(state, t, arg)
        else:
            state = self.step(state, t)
        return self.settle(state, t)

    def do_early(self, state: State, t: int, at: int) -> State:
        pc, kept, buffer, early, dead = state[1][t]
        program, instr = self.programs[t], self.programs[t].code[at]
        regs = self.speculated(program, state[1][t], at)
        word = program.word_at(at, regs)
        value = 0
        if isinstance(instr, Store):
            stored = program.call(at, instr.value, regs)
            buffer = (*buffer, (PLAIN, word, stored))
            self.note(t, f"store {self.show(word, stored)} (ahead of older loads)")
        else:
            value = self.read(state, t, word)
            self.note(t, f"load  {self.show(word, value)} (ahead of older accesses)")
        early = tuple(sorted((*early, (at, value))))
        return self.with_local(state, t, (pc, kept, buffer, early, dead))

    def settle(self, state: State, t: int) -> State:
        """Runs the steps of a thread that no other thread can see or influence."""
        while True:
            pc, _, buffer, early, dead = state[1][t]
            program = self.programs[t]
            if dead or pc == program.end or not self.reduce:
                return state
            instr = program.code[pc]
            match instr:
                case _ if early and early[0][0] == pc:
                    pass
                case Load() | Await() | IfGone() | Claim():
                    return state
                case Fence(kind="seq_cst") if buffer:
                    return state
                case Store() if program.mortal:
                    return state  # a move of its own, since the thread may die between two stores
            state = self.step(state, t)

    def step(self, state: State, t: int) -> State:
        """Executes the instruction at pc. Raises Violated."""
        pc, regs, buffer, early, dead = state[1][t]
        program, after = self.programs[t], pc + 1
        instr = program.code[pc]
        done = None
        if early and early[0][0] == pc:
            done, early = early[0][1], early[1:]
        match instr:
            case Load(reg=reg):
                word = program.word_at(pc, regs)
                if word < 0:
                    raise Violated(
                        f"{program.name}: {instr.word}[{regs[program.reg_ids[str(instr.index)]]}] does not exist"
                    )
                value = self.read(state, t, word) if done is None else done
                self.note(t, f"load  {self.show(word, value)}" + ("" if done is None else " (done before)"))
                number = program.reg_ids[reg]
                regs = (*regs[:number], value, *regs[number + 1 :])
                if instr.must is not None and not program.call(pc, instr.must, regs):
                    raise Violated(f"{program.name}: {instr.claim}; it read {self.show(word, value)}")
            case Store(order=order, value=fn) if done is None:
                kind = {"relaxed": PLAIN, "release": RELEASE, "nt": NT}[order]
                value, word = program.call(pc, fn, regs), program.touch[pc][0]
                self.note(t, f"store {self.show(word, value)} ({order})")
                buffer = (*buffer, (kind, word, value))
            case Fence(kind=kind_name):
                self.note(t, f"fence {kind_name}")
                if buffer and kind_name in ("release", "sfence"):
                    buffer = self.tidy(
                        (*buffer, (RELEASE_MARK if kind_name == "release" else SFENCE_MARK, -1, 0))
                    )
            case If(condition=condition):
                if program.call(pc, condition, regs):
                    after, early = program.target[pc], ()
                    self.note(t, f"goes to '{instr.goto}'")
            case Let(reg=reg, value=fn):
                number = program.reg_ids[reg]
                regs = (*regs[:number], program.call(pc, fn, regs), *regs[number + 1 :])
            case Await(word=name, until=until):
                word = program.word_ids[name]
                value = self.read(state, t, word)
                if until(value):
                    self.note(t, f"waited until {self.show(word, value)}")
                else:
                    after = program.target[pc]
                    self.note(t, f"sees that {instr.or_gone} is gone, goes to '{instr.goto}'")
            case IfGone(thread=name):
                if self.gone(state, name):
                    after = program.target[pc]
                    self.note(t, f"sees that {name} is gone, goes to '{instr.goto}'")
            case Claim(text=text, check=check):
                held = {
                    p.name: own[1][0] for p, own in zip(self.programs, state[1], strict=True) if not own[4]
                }
                if not check(held):
                    raise Violated(f"{program.name}: {text}")
                self.note(t, f"claim holds: {text}")
        live = program.live[after]
        if any(value and not live >> number & 1 for number, value in enumerate(regs)):
            regs = tuple(value if live >> number & 1 else 0 for number, value in enumerate(regs))
        return self.with_local(state, t, (after, regs, buffer, early, dead))

    def ended(self, state: State) -> str | None:
        """What is wrong with a state in which nothing more happens."""
        stuck = [p.name for p, own in zip(self.programs, state[1], strict=True) if own[0] != p.end]
        if stuck:
            return f"stuck for ever: {', '.join(stuck)}"
        return self.scenario.final(dict(zip(self.word_names, state[0], strict=True)))


def explore(scenario: Scenario, model: Model, states_max: int = 1_000_000, reduce: bool = True) -> Result:
    """Visits every reachable state, or stops at the first violation with a shortest trace.

    Violations: a false claim, a load out of range, an end with threads stuck or refused by `final`, and a state from
    which no end can be reached (a loop that never ends, whatever the schedule).

    `reduce=False` explores each single step of each thread: many times slower, to check the reduction itself.

    Raises RuntimeError beyond `states_max` states: the scenario is too large, nothing has been shown.
    """
    machine = Machine(scenario, model, reduce)
    first = machine.start()
    parents: dict[State, tuple[State, Move] | None] = {first: None}
    before: dict[State, list[State]] = {first: []}
    ends: list[State] = []
    queue = deque([first])
    while queue:
        state = queue.popleft()
        moves = machine.moves(state)
        if all(kind == "die" for _, kind, _ in moves):  # nobody is obliged to die: this may be all there is
            ends.append(state)
            wrong = machine.ended(state)
            if wrong is not None:
                return Result(len(parents), wrong, replay(machine, parents, state, None))
        for move in moves:
            try:
                new = machine.apply(state, move)
            except Violated as violated:
                return Result(len(parents), str(violated), replay(machine, parents, state, move))
            if new not in parents:
                parents[new] = (state, move)
                before[new] = []
                queue.append(new)
            before[new].append(state)
        if len(parents) > states_max:
            raise RuntimeError(f"{scenario.name}: more than {states_max} states; make the scenario smaller")
    finishing = set(ends)
    while ends:
        fresh = [state for state in before[ends.pop()] if state not in finishing]
        finishing.update(fresh)
        ends += fresh
    for state in parents:  # in the order of discovery: a nearest one first
        if state not in finishing:
            return Result(len(parents), "can never finish from here", replay(machine, parents, state, None))
    return Result(len(parents))


def replay(
    machine: Machine, parents: Mapping[State, tuple[State, Move] | None], last: State, move: Move | None
) -> list[str]:
    """The steps from the start to `last` and through `move`, one line each."""
    path = [move] if move is not None else []
    state = last
    while (link := parents[state]) is not None:
        state = link[0]
        path.append(link[1])
    machine.log = []
    state = machine.start()
    for step in reversed(path):
        try:
            state = machine.apply(state, step)
        except Violated as violated:
            machine.note(step[0], f"VIOLATION {violated}")
    lines, machine.log = machine.log, None
    return lines
