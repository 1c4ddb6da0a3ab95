"""Deterministic simulation: the real core, simulated clients and a faulty world, under virtual time and one seed."""
