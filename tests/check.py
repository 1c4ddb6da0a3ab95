"""One command that checks the house: format, lint, strict types, import contracts, tidiness. Run by `make check`.

Prints one line a check and what is wrong; exit status 1 if anything is.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
NATIVE_LINES_MAX = 400
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")

COMMANDS = {
    "format": ["ruff", "format", "--check", "."],
    "lint": ["ruff", "check", "."],
    "types": ["mypy", "-p", "kvd"],
    "imports": ["lint-imports"],
}


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout that git knows or would add, matching the patterns."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def untidy_sources() -> Iterator[str]:
    """Files and functions that are too long, marks of unfinished work."""
    for path in tracked("*.py", "*.cpp", "*.hpp", "*.inc"):
        name = path.relative_to(ROOT)
        if name.parts[0] == "third_party":
            continue
        text = path.read_text()
        lines = text.count("\n")
        most = NATIVE_LINES_MAX if path.suffix != ".py" and name.parts[0] == "kvd" else FILE_LINES_MAX
        if lines > most:
            yield f"{name}: {lines} lines, at most {most}"
        for number, line in enumerate(text.splitlines(), 1):
            if UNFINISHED.search(line) and path != Path(__file__):
                yield f"{name}:{number}: unfinished: {line.strip()[:80]}"
        if path.suffix == ".py":
            yield from long_functions(name, text)


def long_functions(name: Path, text: str) -> Iterator[str]:
    """Functions over the limit; signature and docstring are not counted."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        first = node.body[0]
        begin = first.lineno
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and first.end_lineno:
            begin = first.end_lineno + 1
        length = node.end_lineno - begin + 1
        if length > FUNCTION_LINES_MAX:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES_MAX}"


def broken_links() -> Iterator[str]:
    """Links of the documents that lead nowhere."""
    for path in tracked("*.md"):
        for target in LINK.findall(path.read_text()):
            if not (path.parent / target).exists():
                yield f"{path.relative_to(ROOT)}: link to {target}, which is not there"


def main() -> int:
    """Run every check; 1 if one failed."""
    failed = []
    for name, command in COMMANDS.items():
        done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
        print(f"{name:8} {'ok' if done.returncode == 0 else 'FAILED'}", flush=True)
        if done.returncode:
            failed.append(name)
            print(done.stdout + done.stderr, flush=True)
    problems = [*untidy_sources(), *broken_links()]
    print(f"{'tidy':8} {'ok' if not problems else 'FAILED'}")
    for problem in problems:
        print("  " + problem)
    return 1 if failed or problems else 0


if __name__ == "__main__":
    sys.exit(main())
