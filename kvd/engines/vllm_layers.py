"""Loads within a step that arrive band by band of layers, while the model computes the layers before them.

Owned by a WorkerSide with `load="layers"` and one block table. The engine's main thread begins a step and waits for a
band where a layer of it is about to be computed; the load thread copies, and says which bands are there. Whatever goes
wrong, every band is let through: a load that failed is told at the end of the step, as any other. A load has failed
unless it is known to have arrived in every band, so that whatever ends the copying early cannot pass garbage off.

    begun ── band 0 there ── band 1 there ── … ──▶ through ── finish ──▶ idle
               └── an error: the load is failed, its other bands are not copied ──▶ through
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

from kvd.clientlib.caches import EngineCache
from kvd.clientlib.namespace import Namespace
from kvd.engines.vllm_messages import Load
from kvd.layout.geometry import Geometry
from kvd.layout.paged import PagedLayout

BANDS_MAX: Final = 8  # each is a call of its own for each load

CopyBand = Callable[[int], None]
"""copy(band)"""


class LayerLoads:
    """See the module. `names`: the engine's layers in ascending order; `layout`: of all of them."""

    def __init__(self, names: Sequence[str], layout: PagedLayout, tensors: Sequence[Any]) -> None:
        size = -(-len(names) // BANDS_MAX)
        self._bands = [range(begin, min(begin + size, len(names))) for begin in range(0, len(names), size)]
        self._band_of = {names[layer]: n for n, band in enumerate(self._bands) for layer in band}
        self._layout, self._tensors = layout, tensors
        self._there = [threading.Event() for _ in self._bands]
        self._through = threading.Event()
        self._through.set()
        self._failed: list[Load] = []
        self._under_way = False

    def register(self, namespace: Namespace, geometry: Geometry, group: int) -> list[EngineCache]:
        """The tensors of each band, registered; once a namespace."""
        return [
            namespace.register(
                dataclasses.replace(self._layout, layers=len(band), first_layer=self._layout.first_layer + band.start),
                self._tensors[band.start : band.stop],
                geom=geometry, group=group, name=f"kv-band-{number}",
            )
            for number, band in enumerate(self._bands)
        ]  # fmt: skip

    def begin(self, loads: Sequence[Load]) -> None:
        """On the main thread: a step with loads begins. Until they have arrived all of them count as failed."""
        self._failed = list(loads)
        self._under_way = True
        self._through.clear()
        for there in self._there:
            there.clear()

    def copy(
        self, loads: Sequence[tuple[Load, CopyBand | None]], failed: Callable[[Load, Exception], None]
    ) -> None:
        """On the load thread: band by band, each of all loads; None: this one has failed already.

        `loads`: those that began, in any state. What raises nevertheless leaves all of them failed.
        """
        going = {number: copy for number, (_, copy) in enumerate(loads) if copy is not None}
        for band, there in enumerate(self._there):
            for number, copy in list(going.items()):
                try:
                    copy(band)
                except Exception as error:  # noqa: BLE001  the engine is told that the load failed, whatever it was
                    del going[number]
                    failed(loads[number][0], error)
            there.set()
        self._failed = [load for number, (load, _) in enumerate(loads) if number not in going]

    def end(self) -> None:
        """On the load thread, whatever happened: nobody waits for anything any more."""
        for there in self._there:
            there.set()
        self._through.set()

    def wait(self, name: str) -> None:
        """On the main thread: until that layer's bytes are there, or the load has failed."""
        if self._under_way and (band := self._band_of.get(name)) is not None:
            self._there[band].wait()

    def finish(self) -> list[Load]:
        """On the main thread, when the step is over: the loads that failed, told once."""
        if not self._under_way:
            return []
        self._through.wait()
        self._under_way = False
        return self._failed
