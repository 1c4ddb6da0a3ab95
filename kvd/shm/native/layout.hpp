// What every process maps, byte by byte (docs/design/shm.md). Little endian, 64-byte aligned tables.
//
// Owns: the structures, their offsets (asserted below) and the packing of words. No behaviour.
// Called by: everything in this folder. kvd/shm/layout.py holds the same table; a test compares the two.
// Rule: a word that one process writes while another may read it is a std::atomic, so that no read is a data race.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace kvd {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
template <class T>
using Shared = std::atomic<T>;

static_assert(std::endian::native == std::endian::little, "the regions are little endian");
static_assert(sizeof(Shared<u64>) == 8 && Shared<u64>::is_always_lock_free, "words are shared between processes");
static_assert(sizeof(Shared<u32>) == 4 && sizeof(Shared<u16>) == 2 && sizeof(Shared<u8>) == 1);

inline constexpr u64 meta_magic = 0x314154454D44564BULL;    // "KVDMETA1"
inline constexpr u64 client_magic = 0x31544E4C4344564BULL;  // "KVDCLNT1"
inline constexpr u32 layout_version = 1;
inline constexpr u32 header_bytes = 4096;
inline constexpr u32 none32 = 0xFFFFFFFF;
inline constexpr u16 owner_none = 0xFFFF;
inline constexpr u32 identity_size = 32;
inline constexpr u32 members_max = 128;
inline constexpr u32 bucket_slots = 8;
inline constexpr u32 counters_count = 32;
inline constexpr u16 frame_pad = 0xFFFF;
inline constexpr u32 families_limit = 1u << 28;
inline constexpr u32 clients_limit = 0xFFFE;
inline constexpr u32 segments_limit = 1024;

// Words: sg, place, bucket slot, hazard.
enum EntryFlag : u8 { entry_soft_pinned = 1, entry_hard_pinned = 2, entry_withdrawn = 4 };
enum EntryState : u32 { entry_empty = 0, entry_writing = 1, entry_ready = 2, entry_evicting = 3 };
enum RecordState : u8 { record_free = 0, record_pending = 1, record_published = 2 };
enum ClientState : u32 { client_free = 0, client_attached = 1, client_disconnected = 2, client_ghost = 3 };

constexpr u64 sg_of(u64 generation, EntryState state) { return generation << 8 | state; }
constexpr u32 sg_state(u64 sg) { return static_cast<u32>(sg & 0xFF); }
constexpr u64 sg_generation(u64 sg) { return sg >> 8; }
constexpr u64 place_of(u32 segment, u64 offset) { return u64{segment} << 48 | offset; }
constexpr u32 place_segment(u64 place) { return static_cast<u32>(place >> 48); }
constexpr u64 place_offset(u64 place) { return place & ((u64{1} << 48) - 1); }
constexpr u64 slot_of(u32 tag, u32 entry) { return u64{tag} << 32 | (entry + 1); }
constexpr u32 low32(u64 word) { return static_cast<u32>(word); }
constexpr u32 word_entry(u64 word) { return static_cast<u32>(word) - 1; }  // of a bucket slot or hazard; 0: none32
constexpr u64 hazard_of(u64 generation, u32 entry) { return (generation & none32) << 32 | (entry + 1); }

struct MetaHeader {
  u64 magic;
  u32 version, header_size;
  u8 boot_id[16];
  u64 epoch, daemon_pid, daemon_start_ticks;
  u32 families_max, buckets_count, records_max, segments_count, clients_max, reserved;
  u64 segments_offset, clients_offset, buckets_offset, entries_offset, records_offset, meta_bytes, bucket_seed;
  u64 cold_offset;
  alignas(64) Shared<u32> state;
  u8 rest[header_bytes - 196];
};

struct Segment {
  u64 size_bytes;
  Shared<u64> populated_bytes;
  Shared<u32> page_kind, domain;
  Shared<u64> inode;
};

struct ClientSlot {
  Shared<u32> state, pid;
  Shared<u64> start_ticks, client_id, attached_ns;
  Shared<u64> epoch;        // of its region: an earlier one for a ghost
  Shared<u32> region_slot;  // in the header of its region
  Shared<u32> sq_bytes, cq_bytes, touch_records, hazards_max;
  u32 reserved;
};

struct alignas(64) Bucket {
  Shared<u64> slots[bucket_slots];
};

struct alignas(64) Entry {
  Shared<u64> sg;
  Shared<u64> identity[4];
  Shared<u64> present[2];
  Shared<u32> record_first;
  Shared<u16> split;
  Shared<u8> members_count, flags;
};

struct Record {
  Shared<u64> place, size_bytes, checksum;
  Shared<u32> next, entry;
  Shared<u16> owner;
  Shared<u8> member, state;
  Shared<u16> heads_begin, heads_end, layers_begin, layers_end;
  Shared<u32> reservation;
};

// What only a daemon that starts over this memory asks about an entry (adopt.hpp).
struct Cold {
  Shared<u32> parent_entry;       // none32: a root, or its parent is not known
  Shared<u32> parent_generation;  // low 32 bits; another one now: the parent has left
  Shared<u32> namespace_number;
  u32 reserved;
};

struct ClientHeader {
  u64 magic;
  u32 version, header_size;
  u64 epoch;
  u32 client_slot;
  Shared<u32> revoked;  // by a later daemon: no lease can be had through the old META any more
  u64 sq_offset, cq_offset;
  u32 sq_bytes, cq_bytes;
  u64 touch_offset;
  u32 touch_records, reserved2;
  u64 hazards_offset;
  u32 hazards_max;
  alignas(64) Shared<u32> hazards_high;
  alignas(64) Shared<u64> sq_tail;
  alignas(64) Shared<u64> sq_head;
  alignas(64) Shared<u64> cq_tail;
  alignas(64) Shared<u64> cq_head;
  alignas(64) Shared<u32> daemon_sleeping;
  alignas(64) Shared<u32> client_sleeping;
  alignas(64) Shared<u64> touch_tail;
  alignas(64) Shared<u64> counters[counters_count];
  u8 rest[header_bytes - 896];
};

// The order of ClientHeader::counters; the rest is reserved.
enum Counter : u32 {
  count_lookups, count_keys_asked, count_keys_hit, count_leases, count_leases_released, count_bytes_viewed,
  count_fetches, count_adopts, count_adopts_failed, count_verify_failed, count_bytes_filled,
};

enum TouchKind : u32 { touch_match = 1, touch_acquire = 2, touch_adopt = 3, touch_fetch = 4 };

// One row of the touch ring. `sequence` is the row's number plus one, 0 while it is being written.
struct Touch {
  u64 request, started_ns;
  u32 deepest_entry, deepest_generation, matched, asked;
  u64 missed_key8;
  u32 took_ns, kind;
  u64 bytes, sequence;
};
struct alignas(64) TouchRow {
  Shared<u64> words[8];
};

struct Frame {
  u32 payload_bytes;
  u16 type, flags;
  u64 op;
};

// One lease on its way to another process (LeaseBatch.export, Client.adopt).
struct Descriptor {
  u64 epoch;
  u32 entry, reserved;
  u64 generation;
};

// One row of Client.present.
struct PresentRow {
  u64 present[2];
  u16 split;
  u8 members_count, ready;
  u32 reserved;
};

// structure, field, offset
#define KVD_LAYOUT_FIELDS(X)                                                                                         \
  X(MetaHeader, magic, 0) X(MetaHeader, version, 8) X(MetaHeader, header_size, 12) X(MetaHeader, boot_id, 16)         \
  X(MetaHeader, epoch, 32) X(MetaHeader, daemon_pid, 40) X(MetaHeader, daemon_start_ticks, 48)                        \
  X(MetaHeader, families_max, 56) X(MetaHeader, buckets_count, 60) X(MetaHeader, records_max, 64)                     \
  X(MetaHeader, segments_count, 68) X(MetaHeader, clients_max, 72) X(MetaHeader, segments_offset, 80)                 \
  X(MetaHeader, clients_offset, 88) X(MetaHeader, buckets_offset, 96) X(MetaHeader, entries_offset, 104)              \
  X(MetaHeader, records_offset, 112) X(MetaHeader, meta_bytes, 120) X(MetaHeader, bucket_seed, 128)                   \
  X(MetaHeader, cold_offset, 136)                                                                                    \
  X(MetaHeader, state, 192)                                                                                          \
  X(Segment, size_bytes, 0) X(Segment, populated_bytes, 8) X(Segment, page_kind, 16) X(Segment, domain, 20)           \
  X(Segment, inode, 24)                                                                                              \
  X(ClientSlot, state, 0) X(ClientSlot, pid, 4) X(ClientSlot, start_ticks, 8) X(ClientSlot, client_id, 16)            \
  X(ClientSlot, attached_ns, 24) X(ClientSlot, epoch, 32) X(ClientSlot, region_slot, 40) X(ClientSlot, sq_bytes, 44)  \
  X(ClientSlot, cq_bytes, 48) X(ClientSlot, touch_records, 52) X(ClientSlot, hazards_max, 56)                        \
  X(Bucket, slots, 0)                                                                                                \
  X(Entry, sg, 0) X(Entry, identity, 8) X(Entry, present, 40) X(Entry, record_first, 56) X(Entry, split, 60)          \
  X(Entry, members_count, 62) X(Entry, flags, 63)                                                                    \
  X(Record, place, 0) X(Record, size_bytes, 8) X(Record, checksum, 16) X(Record, next, 24) X(Record, entry, 28)       \
  X(Record, owner, 32) X(Record, member, 34) X(Record, state, 35) X(Record, heads_begin, 36) X(Record, heads_end, 38) \
  X(Record, layers_begin, 40) X(Record, layers_end, 42) X(Record, reservation, 44)                                   \
  X(ClientHeader, magic, 0) X(ClientHeader, version, 8) X(ClientHeader, header_size, 12) X(ClientHeader, epoch, 16)   \
  X(Cold, parent_entry, 0) X(Cold, parent_generation, 4) X(Cold, namespace_number, 8)                                \
  X(ClientHeader, client_slot, 24) X(ClientHeader, revoked, 28) X(ClientHeader, sq_offset, 32) X(ClientHeader, cq_offset, 40)                      \
  X(ClientHeader, sq_bytes, 48) X(ClientHeader, cq_bytes, 52) X(ClientHeader, touch_offset, 56)                       \
  X(ClientHeader, touch_records, 64) X(ClientHeader, hazards_offset, 72) X(ClientHeader, hazards_max, 80)             \
  X(ClientHeader, hazards_high, 128) X(ClientHeader, sq_tail, 192) X(ClientHeader, sq_head, 256)                      \
  X(ClientHeader, cq_tail, 320) X(ClientHeader, cq_head, 384) X(ClientHeader, daemon_sleeping, 448)                   \
  X(ClientHeader, client_sleeping, 512) X(ClientHeader, touch_tail, 576) X(ClientHeader, counters, 640)               \
  X(Touch, request, 0) X(Touch, started_ns, 8) X(Touch, deepest_entry, 16) X(Touch, deepest_generation, 20)           \
  X(Touch, matched, 24) X(Touch, asked, 28) X(Touch, missed_key8, 32) X(Touch, took_ns, 40) X(Touch, kind, 44)        \
  X(Touch, bytes, 48) X(Touch, sequence, 56)                                                                         \
  X(Frame, payload_bytes, 0) X(Frame, type, 4) X(Frame, flags, 6) X(Frame, op, 8)                                     \
  X(Descriptor, epoch, 0) X(Descriptor, entry, 8) X(Descriptor, generation, 16)                                      \
  X(PresentRow, present, 0) X(PresentRow, split, 16) X(PresentRow, members_count, 18) X(PresentRow, ready, 19)

// structure, size
#define KVD_LAYOUT_SIZES(X)                                                                                    \
  X(MetaHeader, 4096) X(Segment, 32) X(ClientSlot, 64) X(Bucket, 64) X(Entry, 64) X(Record, 48) X(Cold, 16) X(ClientHeader, 4096) \
  X(Touch, 64) X(TouchRow, 64) X(Frame, 16) X(Descriptor, 24) X(PresentRow, 24)

#define KVD_CHECK_FIELD(structure, field, offset) static_assert(offsetof(structure, field) == (offset));
#define KVD_CHECK_SIZE(structure, size) static_assert(sizeof(structure) == (size));
KVD_LAYOUT_FIELDS(KVD_CHECK_FIELD)
KVD_LAYOUT_SIZES(KVD_CHECK_SIZE)
#undef KVD_CHECK_FIELD
#undef KVD_CHECK_SIZE

}  // namespace kvd
