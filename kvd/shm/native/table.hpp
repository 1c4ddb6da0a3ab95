// The daemon's side of META: families and records change here, and nowhere else.
//
// Owns: the META mapping, the daemon's POOL mappings, which regions are scanned for hazards. Called by: the daemon's
// thread only. Throws std::invalid_argument (the argument cannot be right) or std::runtime_error (kvd's books disagree:
// the daemon stops).
// Invariants: I1 only this class writes META, generations only grow; I2 the order of publication; I4 EVICTING, fence,
// scan, in this order; I5 READY only for a record that is PENDING for this very owner.
//
//   entry   EMPTY -> WRITING -> READY (publish), READY -> EVICTING -> EMPTY | READY | EVICTING in limbo (evict)
//   record  FREE -> PENDING (reserve) -> PUBLISHED (publish) -> FREE (evict);  PENDING -> FREE (free_records)
#pragma once

#include <memory>
#include <vector>

#include "index.hpp"
#include "region.hpp"

namespace kvd {

struct TableIdentity {
  u64 epoch, bucket_seed, pid, start_ticks;
  u8 boot_id[16];
};

class Adoption;
struct Adopted;
struct AdoptionPlan;

enum PublishStatus : u8 { publish_done = 0, publish_present = 1, publish_no_index = 4 };

// Columns are as long as the batch; numbers are of records or entries.
struct PublishBatch {
  u32 owner;
  u64 count;
  const u8* keys;     // count x 32 bytes
  const u8* members;  // count
  u32 split, family_members;
  const u32* records;
  const u64* checksums;
  const u32* entries;  // free ones to use, in order
  u64 entries_count;
  // What a later daemon may ask for: the entry each family lies behind (none32: a root; parent_previous: the family of
  // the item before it), and their namespace. parents may be nullptr: all are roots.
  const u32* parents;
  u32 namespace_number;
};

inline constexpr u32 parent_previous = 0xFFFFFFFE;

// How a family is cut: members of one family have one.
struct FamilyShape {
  u32 split, family_members;
};

struct ReserveBatch {
  u32 owner;
  u32 reservation;
  u64 count;
  const u32* records;
  const u64 *places, *sizes;
  const u8* members;
  const u16* ranges;  // heads_begin, heads_end, layers_begin, layers_end
};

struct Evicted {
  std::vector<u32> freed, held, records;  // records: those of the freed entries, with their places and sizes
  std::vector<u64> places, sizes;
};

class Table {
 public:
  Table(int fd, u64 families_max, u64 records_max, const std::vector<u64>& segment_bytes, u64 clients_max,
        const TableIdentity& identity);

  const Index& index() const { return guard_.check("a table"), index_; }
  const std::shared_ptr<Mapping>& mapping() const noexcept { return mapping_; }
  const std::shared_ptr<Mapping>& segment(u32 number) const;  // mapped ones only

  void set_state(u32 state);
  void set_segment(u32 segment, u64 populated_bytes, u32 page_kind, u64 inode);
  void map_segment(u32 segment, int fd, bool sealed);
  u8* memory(u32 segment, u64 offset, u64 size) const;

  // Entry of each key, and which of the members are there; with a shape every member of a family split otherwise is.
  void probe(const u8* keys, u64 count, const u8* members, u64 members_count, u32* entries, u8* present,
             const FamilyShape* shape = nullptr) const;
  void reserve(const ReserveBatch& batch);
  u32 publish(const PublishBatch& batch, u8* status, u32* entries, u8* differs);  // returns how many entries it used
  void free_records(const u32* records, u64 count);
  Evicted evict(const u32* entries, u64 count, bool withdraw);
  void set_flags(const u32* entries, u64 count, u8 flags);

  void attach(u32 slot, std::shared_ptr<Region> region, u32 pid, u64 start_ticks, u64 client_id, u64 attached_ns);
  // A client of an earlier daemon: revoked, scanned like any other, until detach.
  void attach_ghost(u32 slot, std::shared_ptr<Region> region, const ClientSlot& as_it_was);
  void set_parents(const u32* entries, const u32* parents, u64 count);
  void disconnected(u32 slot);
  void detach(u32 slot);
  struct Held {
    u64 leases, bytes;
  };
  Held held(u32 slot);
  std::vector<u32> holders(u32 entry) const;
  std::vector<u32> scan(u32 begin, u32 count) const;  // READY entries
  Adopted adopt(const Adoption& old, const AdoptionPlan& plan);  // adopt.hpp; on a table that holds nothing yet
  void check_entry(u32 number) const;

 private:
  Record& record_of(u32 number) const;
  void check_published(const PublishBatch& batch, u64 item) const;
  u32 record_checked(u32 number, u32 state, const char* action) const;
  bool has_shape(u32 number, const FamilyShape& shape) const;
  void link(u32 entry, u32 record, u8 member, u64 checksum);
  friend class Adopter;
  void set_parent(u32 entry, u32 parent) const;
  void write_entry(u32 entry, const Key& key, const PublishBatch& batch, u64 item, u32 parent);
  Shared<u64>* free_slot(const Key& key) const;
  void clear_slot(u32 entry);
  void free_entry(u32 entry, Evicted& out);
  u64 family_bytes(u32 entry) const;
  ClientSlot& client_slot(u32 slot, bool attached) const;
  bool marked(u32 entry) const { return (marks_[entry / 64] >> (entry % 64) & 1) != 0; }
  void mark(u32 entry) { marks_[entry / 64] |= u64{1} << (entry % 64); }
  void unmark(u32 entry) { marks_[entry / 64] &= ~(u64{1} << (entry % 64)); }

  ForkGuard guard_;
  std::shared_ptr<Mapping> mapping_;
  Index index_;
  std::vector<std::shared_ptr<Mapping>> segments_;
  std::vector<std::shared_ptr<Region>> regions_;  // by client slot
  std::vector<u64> marks_;                        // a bit an entry, all clear between calls
};

}  // namespace kvd
