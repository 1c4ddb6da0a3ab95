"""Fuzz one target for a while: `fuzz.py TARGET --seconds 60 [--seed N]`; all of them: `make fuzz`.

By random edits of the corpus; or, with --guided and atheris (extra `fuzz`), by coverage of the Python code: then what
follows are options and folders of libFuzzer, as campaign.py gives them. An input that ends a target in a way that is
not its contract is written to crash-TARGET-HASH and the exit status is not 0; `fuzz.py TARGET FILE…` replays.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
CORPUS = HERE / "corpus"
INPUT_BYTES_MAX = 4096


def mutated(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """A few random changes: bits, bytes, interesting numbers, cuts, doubled parts, a part of another input."""
    out = bytearray(data)
    for _ in range(1 << rng.randrange(5)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(7):
            case 0 if out:
                out[at % len(out)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[at % len(out)] = rng.randrange(256)
            case 2:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(
                    (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 64) - 1, 1 << 63)
                )
                out[at : at + width] = (number & ((1 << 8 * width) - 1)).to_bytes(width, "little")
            case 3:
                del out[at : at + rng.randrange(1, 17)]
            case 4:
                part = out[at : at + rng.randrange(1, 65)]
                out[at:at] = part
            case 5:
                other = rng.choice(others)
                begin = rng.randrange(len(other) + 1)
                out[at:at] = other[begin : begin + rng.randrange(1, 65)]
            case _:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(out[:INPUT_BYTES_MAX])


def known(name: str, seeds: Callable[[], list[bytes]]) -> list[bytes]:
    """The corpus of a target: what is kept in files, and the seeds that are made."""
    folder = CORPUS / name
    kept = [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return kept + seeds()


def kept_aside(name: str, data: bytes) -> Path:
    """Where an input lies that ended a target."""
    path = Path(f"crash-{name}-{hashlib.sha256(data).hexdigest()[:12]}")
    path.write_bytes(data)
    return path


def at_random(
    name: str, target: Callable[[bytes], None], inputs: list[bytes], seconds: float, seed: int
) -> None:
    """The corpus as it is, then random edits of it until the time is over."""
    rng = random.Random(seed)
    last = Path(f".last-{name}-{os.getpid()}").absolute()
    end_s = time.monotonic() + seconds
    count = 0
    try:
        while count < len(inputs) or time.monotonic() < end_s:
            data = inputs[count] if count < len(inputs) else mutated(rng.choice(inputs), rng, inputs)
            last.write_bytes(data)  # a crash of the process leaves it there
            try:
                target(data)
            except BaseException:
                print(f"{name}: input kept in {kept_aside(name, data)}", file=sys.stderr)
                raise
            count += 1
    finally:
        last.unlink(missing_ok=True)
    print(f"{name}: {len(inputs)} inputs known, {count} run, seed {seed}", flush=True)


def guided(name: str, options: list[str]) -> None:
    """Guided by coverage, with atheris, which ends the process itself. `options` and folders are libFuzzer's."""
    import atheris
    import targets

    if name == "restart":
        import restarts  # noqa: F401  so that what it runs is instrumented too

    atheris.instrument_all()  # after the imports: kvd may be loaded by a loader of its own (editable)
    folder = Path(next(option for option in options if not option.startswith("-")))
    for data in targets.SEEDS[name]():
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    atheris.Setup([sys.argv[0], *options], targets.TARGETS[name])
    atheris.Fuzz()


def main() -> int:
    """Command line."""
    if "--guided" in sys.argv[2:3]:
        guided(sys.argv[1], sys.argv[3:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("files", nargs="*", type=Path, help="replay these instead")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    arguments = parser.parse_args()
    import targets

    name = arguments.target
    target = targets.TARGETS[name]
    if arguments.files:
        for path in arguments.files:
            target(path.read_bytes())
            print(f"{path}: ends as it should")
        return 0
    at_random(name, target, known(name, targets.SEEDS[name]), arguments.seconds, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
