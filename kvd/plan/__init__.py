"""The planner: arithmetic about a fleet that a colleague can check by hand. PURE.

Owns the three ledgers (capacity, objects, network), the break-even of loading against computing, the routing
estimate, Little's law, value per byte and the chunk-size sweep. Nothing here imports `kvd.layout` or
`kvd.core`: what a model keeps arrives as a `Footprint`, and the sweep replays through a protocol. `breakeven` may be
used by anyone above, live; the other modules by `kvctl plan` and benchmarks. No state, any thread.
"""
