"""`kvctl bench`: measures this host against its own floors, in one run.

Every figure is taken through the public client against a daemon that the bench starts for itself, pinned to one CPU
while the client is pinned to another. A speed is reported beside the floor it is a ratio of, taken in the same
run. Medians.
"""
