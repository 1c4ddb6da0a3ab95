"""Slow and obvious: the canonical object format and paged memories, built element by element with numpy.

Shares no code with kvd.layout beyond its descriptions; used to judge copy plans, here and for the native copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvd.layout.geometry import Geometry, Group, Rule
from kvd.layout.paged import PagedLayout
from kvd.layout.shards import Part


def rows_of(geometry: Geometry, chunk_tokens: int, seed: int) -> list[dict[str, np.ndarray]]:
    """For each group random bytes of each plane: [layer, token, head, row bytes] (a state: one token)."""
    rng = np.random.default_rng(seed)
    return [
        {
            plane.name: rng.integers(
                0, 256,
                (len(group.layers), 1 if group.rule is Rule.STATE else chunk_tokens, plane.heads, plane.row_bytes),
                dtype=np.uint8,
            )
            for plane in group.planes
        }
        for group in geometry.groups
    ]  # fmt: skip


def object_bytes(group: Group, rows: dict[str, np.ndarray], part: Part) -> bytes:
    """[layer][band][head][plane][token][row], written out in that order."""
    tokens = [t for begin, end in part.tokens for t in range(begin, end)] or [0]
    pieces: list[bytes] = []
    for layer in range(*part.layers):
        names = [plane.name for plane in group.planes]
        while names:  # a band: consecutive planes with the same number of heads
            heads = rows[names[0]].shape[2]
            band = [names.pop(0)]
            while names and rows[names[0]].shape[2] == heads:
                band.append(names.pop(0))
            first = [plane.name for plane in group.planes].index(band[0])
            number = len({
                i for i in range(1, first + 1)
                if group.planes[i].heads != group.planes[i - 1].heads
            })  # fmt: skip
            for head in range(*part.band_heads[number]):
                for name in band:
                    pieces += [rows[name][layer, token, head].tobytes() for token in tokens]
    return b"".join(pieces)


def paged_tensors(
    layout: PagedLayout, rows: dict[str, np.ndarray], ids: Sequence[int], seed: int
) -> list[np.ndarray]:
    """Engine memory in `layout` with the tokens of `rows` in blocks `ids`, in order, and noise everywhere else.

    `rows` are those of this rank: [layer, token, head, row bytes]. Dense layouts only.
    """
    rng = np.random.default_rng(seed)
    names = [plane.name for plane in layout.planes]
    widths = [rows[name].shape[3] for name in names]
    extents = {"L": layout.layers, "B": layout.blocks, "H": layout.heads, "N": layout.block_tokens}
    separate = layout.separate_axes
    inside = layout.axes.endswith("PD") and "P" not in separate
    values = {"L": range(layout.layers), "P": range(len(names))}
    numbers = [()]
    for axis in separate:
        numbers = [(*number, value) for number in numbers for value in values[axis]]
    tensors: list[np.ndarray] = []
    for number in numbers:
        chosen = dict(zip(separate, number, strict=True))
        planes = [chosen["P"]] if "P" in chosen else list(range(len(names)))
        axes = [a for a in layout.axes if a not in separate and a not in ("D", *("P" if inside else ""))]
        row = sum(widths[p] for p in planes) if inside else widths[planes[0]]
        shape = [len(planes) if a == "P" else extents[a] for a in axes] + [row]
        tensor = rng.integers(0, 256, shape, dtype=np.uint8)
        for layer in [chosen["L"]] if "L" in chosen else range(layout.layers):
            for p in planes:
                for slot, block in enumerate(ids):
                    for n in range(layout.block_tokens):
                        for head in range(layout.heads):
                            at = {"L": layer, "B": block, "P": planes.index(p), "H": head, "N": n}
                            begin = sum(widths[q] for q in planes if q < p) if inside else 0
                            index = tuple(at[a] for a in axes)
                            source = rows[names[p]][layer, slot * layout.block_tokens + n, head]
                            tensor[index][begin : begin + widths[p]] = source
        tensors.append(tensor)
    return tensors
