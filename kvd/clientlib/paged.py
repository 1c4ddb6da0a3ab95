"""Between an engine's paged KV tensors and objects: gather into slots, scatter out of views, one call a batch.

The plan says how one object maps to blocks and is checked once (`plan`); `gather` fills objects from blocks,
`scatter` writes objects into blocks. Native, without the GIL, past the caches where that pays. The shapes are in
kvd.shm.compute.
"""

from __future__ import annotations

from kvd.shm.compute import PagedPlan as Plan
from kvd.shm.compute import copy, gather, scatter
from kvd.shm.compute import paged_plan as plan

__all__ = ["Plan", "copy", "gather", "plan", "scatter"]
