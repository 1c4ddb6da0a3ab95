"""What `make bench-engines` says in the end: one table of all keys with their targets, a picture of the conversations.

    python benchmarks/engines_vllm_report.py [--folder build]

Reads what engines_vllm.py, engines_vllm_turns.py and engines_transformers.py have written into the folder; writes
bench-engines.json and bench-engines.png there. Exit code 1 if a target is missed, or if a part is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from engines_vllm import REPORTED, ROOT, TARGETS

matplotlib.use("Agg")

PARTS = ("bench-engines-vllm.json", "bench-engines-vllm-turns.json", "bench-engines-transformers.json")
ALL = {**TARGETS, "transformers_speedup": (">=", 15.0)}
COLOURS = {"local": "#8c8c8c", "limited": "#c44e52", "kvd": "#4c72b0", "restart": "#2a4d7c", "cold": "#dd8452",
           "down": "#937860"}  # fmt: skip
LABELS = {"local": "large\ncache", "limited": "small\ncache", "kvd": "small cache\n+ kvd",
          "restart": "new engine\n+ kvd", "cold": "+ kvd,\nno hits", "down": "+ kvd,\nno daemon"}  # fmt: skip


def picture(turns: dict[str, Any], path: Path) -> None:
    """TTFT of every request, its median over all, what was computed, goodput; a bar or cloud for each variant."""
    found, raw = turns["variants"], turns["raw"]
    names = list(found)
    figure, grid = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    axes = list(grid.flat)
    colours = [COLOURS[name] for name in names]
    labels = [LABELS[name] for name in names]
    for at, name in enumerate(names):
        times = [request["token_s"][0] - request["sent_s"] for request in raw[name]["requests"]]
        spread = [at + 0.5 * ((7 * n % len(times)) / len(times) - 0.5) for n in range(len(times))]
        axes[0].scatter(spread, times, s=14, color=COLOURS[name], alpha=0.7)
        axes[0].hlines(found[name]["ttft_p50_s"], at - 0.35, at + 0.35, color="black", linewidth=1.5)
    axes[0].axhline(turns["limit"]["ttft_max_s"], color="black", linestyle=":", linewidth=1)
    axes[0].set_xticks(range(len(names)), labels)
    axes[0].set_title("Time to first token, s (line: median; dots: limit)")
    axes[0].set_ylim(bottom=0)
    computed = [(one["prompt_tokens"] - one["skipped_tokens"]) / 1e3 for one in found.values()]
    skipped = [one["skipped_tokens"] / 1e3 for one in found.values()]
    axes[1].bar(labels, computed, color=colours)
    axes[1].bar(labels, skipped, bottom=computed, color="none", edgecolor=colours, hatch="//")
    axes[1].set_title("Prompt tokens, thousands (hatched: not computed)")
    for axis, key, title in (
        (axes[2], "e2e_p50_s", "Whole answer, s (median of requests)"),
        (axes[3], "goodput_per_s", "Goodput, requests/s"),
    ):
        bars = axis.bar(labels, [one[key] for one in found.values()], color=colours)
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
        axis.set_title(title)
    for axis in axes:
        axis.tick_params(axis="x", labelsize=9)
        axis.title.set_fontsize(11)
        axis.spines[["top", "right"]].set_visible(False)
    shape, limit = turns["shape"], turns["limit"]
    figure.suptitle(
        f"vLLM on a CPU, {shape['conversations']} conversations of {shape['turns']} turns, {shape['clients']} at once; "
        f"goodput: first token within {limit['ttft_max_s']} s and {limit['tpot_max_s']} s a token",
        fontsize=12,
    )
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    """Read, print, draw, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "build")
    folder = parser.parse_args().folder
    missing = [name for name in PARTS if not (folder / name).exists()]
    parts = {name: json.loads((folder / name).read_text()) for name in PARTS if name not in missing}
    keys = {
        key: value for part in parts.values() for key, value in part.items() if key in ALL or key in REPORTED
    }
    missed = 0
    for key, (sign, target) in ALL.items():
        if key not in keys:
            print(f"{key:32} {'-':>9}   {sign} {target:<6} NOT MEASURED")
            missed += 1
            continue
        good = keys[key] >= target if sign == ">=" else keys[key] <= target
        missed += not good
        print(f"{key:32} {keys[key]:9.3f}   {sign} {target:<6} {'' if good else 'MISSED'}")
    for key in REPORTED:
        if key in keys:
            print(f"{key:32} {keys[key]:9.3f}")
    result: dict[str, Any] = {"keys": keys}
    turns = parts.get("bench-engines-vllm-turns.json")
    if turns is not None:
        result |= {name: turns[name] for name in ("shape", "limit", "variants")}
        picture(turns, folder / "bench-engines.png")
        print(f"picture: {folder / 'bench-engines.png'}")
    (folder / "bench-engines.json").write_text(json.dumps(result, indent=1))
    return 1 if missed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
