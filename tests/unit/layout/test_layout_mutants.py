"""Each safety rule of the layout package is removed once, in a copy, and a test must notice.

A row is (file, the code, the code without the rule, the test file that fails).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvd.layout

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
PACKAGE = Path(kvd.layout.__file__).parent
KEPT = ("arguments.py", "errors.py", "limits.py", "types.py", "py.typed")

# An editable install finds the real package before any path: the copy must win.
RUN = """
import sys
sys.meta_path = [f for f in sys.meta_path if "scikit" not in (type(f).__name__ + type(f).__module__).lower()]
sys.path[:0] = sys.argv[1:3]
import kvd.layout
assert kvd.layout.__file__.startswith(sys.argv[1]), kvd.layout.__file__
import pytest
options = ["-q", "-x", "-p", "no:cacheprovider", "-c", "/dev/null", "--noconftest", "-W", "ignore"]
sys.exit(pytest.main([*options, *sys.argv[3:]]))
"""

MUTANTS = [
    ("chain.py", "max(0, _prompt(prompt_tokens) - 1)", "_prompt(prompt_tokens)", "chain"),
    ("chain.py", "if number < len(self.identities):", "if False:", "chain"),
    ("chain.py", 'struct.pack("<I", chunk_tokens) + algorithm', 'struct.pack("<I", 0) + algorithm', "chain"),
    ("manifest.py", '_NAMED_ONLY: Final = ("tenant", "salt")', "_NAMED_ONLY: Final = ()", "manifest"),
    ("manifest.py", '"salt": salt,', '"salt": "",', "manifest"),
    ("encoding.py", "in sorted(keyed)", "in keyed", "manifest"),
    ("encoding.py", "if encode(value, where=where) != reader.data:", "if False:", "manifest"),
    ("family.py", "-(-(described.window - 1)", "-(-(described.window - 2)", "family"),
    ("family.py", "ends &= ends << step", "ends |= ends << step", "family"),
    ("family.py", "bitmap & masks[group] == masks[group]", "bitmap & masks[group] != 0", "family"),
    ("family.py", "return whole << 1 | 1", "return (2 << chunks) - 1", "family"),
    ("family.py", "common &= bits", "common = min(common, bits) if common != -1 else bits", "family"),
    ("shards.py", "if part.ranks[0] == tp_rank", "if True", "shards"),
    (
        "shards.py",
        "    if tp % heads == 0:\n        return heads",
        "    if tp % heads == 0:\n        return tp",
        "shards",
    ),
    ("shards.py", "if written.chunk_tokens != wanted.chunk_tokens:", "if False:", "shards"),
    ("paged.py", "if extent > 1 and stride != expected:", "if False:", "paged"),
    ("paged.py", "if mine != theirs:", "if False:", "paged"),
    ("paged.py", '"strides": {axis: stride for', '"strides": {axis: 0 for', "paged"),
    ("geometry.py", "if self.windowed and self.window < block_tokens:", "if False:", "geometry"),
    ("placement.py", "chunk - chunk % self.window_chunks", "chunk", "placement"),
]


@pytest.mark.parametrize(
    ("file", "code", "without", "noticed_by"), MUTANTS, ids=lambda value: str(value)[:40]
)
def test_a_removed_rule_is_noticed(
    tmp_path: Path, file: str, code: str, without: str, noticed_by: str
) -> None:
    copy = tmp_path / "kvd"
    shutil.copytree(PACKAGE, copy / "layout", ignore=shutil.ignore_patterns("__pycache__"))
    for name in KEPT:
        shutil.copy(PACKAGE.parent / name, copy / name)
    (copy / "__init__.py").write_text("")
    source = (copy / "layout" / file).read_text(encoding="utf-8")
    assert source.count(code) >= 1, "the rule is not where this table says; update the table"
    test = str(TESTS / f"test_layout_{noticed_by}.py")
    command = [sys.executable, "-c", RUN, str(tmp_path), str(TESTS), test]
    (copy / "layout" / file).write_text(source.replace(code, without), encoding="utf-8")
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert result.returncode == 1, f"nothing noticed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    assert "failed" in result.stdout


def test_the_unchanged_copy_passes(tmp_path: Path) -> None:
    """Else every mutant above would fail for a wrong reason."""
    copy = tmp_path / "kvd"
    shutil.copytree(PACKAGE, copy / "layout", ignore=shutil.ignore_patterns("__pycache__"))
    for name in KEPT:
        shutil.copy(PACKAGE.parent / name, copy / name)
    (copy / "__init__.py").write_text("")
    tests = [str(TESTS / f"test_layout_{name}.py") for name in sorted({mutant[3] for mutant in MUTANTS})]
    result = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), str(TESTS), *tests],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:]
