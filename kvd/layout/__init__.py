"""What the bytes mean: names of prefixes, geometry of caches, how chunks are cut into objects and put into blocks.

Pure: no operating system, clock, randomness or array library (reading the one config file a caller names is the only
exception, in `hf`). Anyone above may use it; it imports only errors, limits and types. Nothing is mutable but a
`ChainBuilder` and a `Completeness`' cache.

    encoding   one value, one string of bytes              geometry  planes, groups, sizes      hf  from a config.json
    manifest   what names a namespace                      shards    splits, objects, re-sharding
    chain      which prefix a chunk belongs to             family    which prefixes are usable
    dtypes     element types                               paged     an engine's blocks          states  its states
    strided    the copies that native code carries out     placement on which host an object is kept

docs/design/layout.md says why, and draws the bytes.
"""
