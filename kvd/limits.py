"""Every bound of kvd in one place, and the relations between them (checked at import).

Names end in unit and bound. A value here is a hard limit of the format or the protocol; what an operator
may choose within it is in `kvd.config`.
"""

from __future__ import annotations

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

# Families and members
identity_bytes = 32
members_per_family_max = 128  # present bits in an index entry
families_max = 1 << 28  # entry numbers are 32 bits in a hazard word; buckets stay below 4 GiB
namespaces_max = 4096
namespaces_per_process_max = 1024  # that one process may bring up
# That one user may bring up, other than root and the daemon's own.
namespaces_per_uid_max = namespaces_max // 2
manifest_bytes_max = 8 * KIB  # real ones have less than 2 KiB; the daemon keeps each one twice at most
encoded_bytes_max = 64 * KIB  # of any other canonical encoding (layouts); only its hash is kept

# Pool
frame_bytes = 2 * MIB  # unit in which segments are handed to size classes; a huge page
slot_align_bytes = 64
page_bytes = 4096
segments_max = 1024
segment_bytes_max = 1 << 40
object_bytes_max = 1 << 38
size_classes_max = 4096

# Clients
clients_max = 1024
hazards_per_client_max = 1 << 24
ring_bytes_min = 512 * KIB  # a frame takes half of a ring at most, and the largest batch must fit
ring_bytes_max = 64 * MIB
batch_items_max = 4096  # families × members of one ring message
touch_ring_records = 4096

# Control protocol
socket_path_bytes_max = 107  # the kernel's
frame_bytes_max = 4 * MIB
fds_per_message_max = 200  # the kernel allows 253
handshake_timeout_ns = 5_000_000_000
requests_in_flight_max = 64

# Tokens
token_id_max = (1 << 32) - 1
chunk_tokens_max = 1 << 20

if not frame_bytes % page_bytes == 0 or not page_bytes % slot_align_bytes == 0:
    raise AssertionError("frames hold whole pages, pages hold whole slots")
if not families_max < 1 << 32:
    raise AssertionError("an entry number and the free mark fit 32 bits")
# RESERVE has 32 B an item and 32 a member before it, RESERVED 9, PUBLISH 9; the rest is heads.
if not batch_items_max * identity_bytes + members_per_family_max * 32 + 1024 <= ring_bytes_min // 2:
    raise AssertionError("the largest batch fits half of the smallest ring")
