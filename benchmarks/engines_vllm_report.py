"""What `make bench-engines` says in the end: one table of all keys with their targets, a picture of the conversations.

    python benchmarks/engines_vllm_report.py [--folder build]

Reads what engines_vllm.py, engines_vllm_turns.py, engines_vllm_timeline.py and engines_transformers.py have written
into the folder; writes bench-engines.json, bench-engines.png and bench-engines-timeline.png there. Exit code 1 if a
target is missed, or if a part is missing.
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

PARTS = ("bench-engines-vllm.json", "bench-engines-vllm-turns.json", "bench-engines-timeline.json",
         "bench-engines-transformers.json")  # fmt: skip
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


def timeline_picture(given: dict[str, Any], path: Path) -> None:
    """Lookup, bands that are loaded and layers that are computed, on one scale."""
    said, raw = given["timeline"], given["raw"]
    figure, axis = plt.subplots(figsize=(9, 3.6), layout="constrained", dpi=120)
    rows = (("lookup", "lookup", "#666666"), ("load, a band each", "load", "#d55e00"),
            ("step is prepared", "prepare", "#56b4e9"), ("suffix, a layer each", "compute", "#0072b2"))  # fmt: skip
    for at, (_, name, colour) in enumerate(rows):
        bars = [(begin * 1e3, (end - begin) * 1e3) for begin, end in raw[name]]
        edge = colour if len(bars) == 1 else "white"  # white between parts, and a line at least of one alone
        axis.broken_barh(bars, (-at - 0.32, 0.64), facecolors=colour, edgecolor=edge, linewidth=0.5)
    first = said["first_token_ms"]
    axis.axvline(first, color="black", linestyle="--", linewidth=1, label=f"first token: {first:.0f} ms")
    axis.set_yticks([-at for at in range(len(rows))], [title for title, _, _ in rows])
    axis.set(xlabel="ms after the request", xlim=(0, first * 1.04), ylim=(-len(rows) + 0.4, 0.6))
    axis.set_title(
        f"vLLM on a CPU: {given['prefix']:,} tokens loaded ({raw['loaded_bytes'] / 2**20:.0f} MiB) beside "
        f"{given['suffix']} computed; all of them computed: {said['all_computed_ms']:,.0f} ms", fontsize=10,
    )  # fmt: skip
    axis.grid(visible=True, axis="x", color="#dddddd", linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", framealpha=1, edgecolor="none")
    figure.savefig(path)
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
    timeline = parts.get("bench-engines-timeline.json")
    if timeline is not None:
        result["timeline"] = timeline["timeline"]
        timeline_picture(timeline, folder / "bench-engines-timeline.png")
        print(f"picture: {folder / 'bench-engines-timeline.png'}")
    (folder / "bench-engines.json").write_text(json.dumps(result, indent=1))
    return 1 if missed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
