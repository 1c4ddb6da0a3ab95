"""Adapters that put kvd under an engine: thin, on clientlib, layout and plan only.

    common*        what they share: manifest from an engine's configuration, attachment that never waits, the worth of
                   a load, counters
    vllm*          a KVConnectorBase_V1

Imports no engine by itself: each adapter imports its own, and only its own. A rule for all: nothing that kvd does may
raise into an engine or make it wait. What goes wrong is a miss before a load was promised, and a failed block after.
"""
