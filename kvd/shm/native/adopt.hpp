// A daemon starts over memory that an earlier one left: the old META is read, a new one is built, POOL stays as it is.
//
// Owns: the read-only mapping of the old META (Adoption). Called by: the daemon's thread, on a table that holds nothing
// yet, before anybody is attached but ghosts. Throws std::runtime_error when the old META cannot be taken over without the
// risk of a wrong byte: the caller then starts with memory of its own.
// Invariants: entry numbers, record numbers and generations stay what they were, so that a hazard of an old client means
// the same in the new table; nothing of the old META is believed before it was checked; what a ghost holds, or may still
// write, is never free.
#pragma once

#include <vector>

#include "table.hpp"

namespace kvd {

class Adoption {
 public:
  explicit Adoption(int meta_fd);
  const Index& index() const noexcept { return index_; }
  const MetaHeader& header() const noexcept { return index_.header(); }
  std::vector<u64> sizes() const;  // of all objects and slots being written, ascending, each once

 private:
  std::shared_ptr<Mapping> mapping_;
  Index index_;
};

// What the new daemon knows and the old META does not say. Columns of `sizes` go with Adoption::sizes().
struct AdoptionPlan {
  std::vector<bool> segments_kept;               // by old number: the same file is segment of the same number now
  std::vector<u64> sizes, slot_bytes;            // slot_bytes: how much a slot of that size takes, 0: cannot be placed
  std::vector<u32> slab_frames;                  // frames of the slabs that hold such slots
  std::vector<u32> ghosts;                       // by old client slot: its slot now, none32: its process is gone
  u64 frame_bytes;
  u32 namespaces_count;                          // numbers above this mean nothing
};

struct AdoptedRun {
  u32 first, count;  // of Adopted::members
  u32 parent;        // number of a run before this one in the list, none32
  u32 namespace_number;
  u64 bytes;         // of slots
  u32 shape;         // of Adopted::shapes
  u32 flags;         // pins
};

struct AdoptedSlab {
  u64 frame;             // place >> log2(frame_bytes)
  u64 slot_bytes;
  u32 owners_first, slots_count;  // of Adopted::owners: the entry of each slot, none32: free or reserved
  u32 free_first, free_count;     // of Adopted::free_places
  u32 fresh_count;                // the last so many slots are free beside those
  u32 reserved_count;
};

struct Adopted {
  u64 families = 0, withdrawn = 0, pending = 0, bytes = 0;
  u64 not_kept = 0, damaged = 0;                // families: in a segment that is not there any more; that do not check out
  u32 entries_end = 0, records_end = 0;         // numbers from here on were never used
  std::vector<u32> free_entries, free_records;  // below those ends
  // By entry number, below entries_end.
  std::vector<u32> run_of, home_of;             // run_of: number in runs, none32; home_of: number in slabs
  std::vector<u64> bytes_of, key8_of;
  std::vector<u8> missing_of;
  std::vector<AdoptedRun> runs;                 // parents before their children
  std::vector<u32> members;                     // entries, run by run, head to tail
  std::vector<std::vector<u64>> shapes;         // slot sizes that occur in a family
  std::vector<AdoptedSlab> slabs;
  std::vector<u32> owners;
  std::vector<u64> free_places;
  std::vector<u32> limbo;                       // withdrawn entries
  std::vector<u32> ghost_slots, ghost_records;  // what ghosts may still be writing
  std::vector<u64> ghost_places;
};

}  // namespace kvd
