"""What an engine uses: attach to the daemon of this host, match, lease, reserve, publish.

Imports neither torch nor numpy; both are used when a caller asks for an array or a tensor.
"""
