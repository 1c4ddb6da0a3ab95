// One taking over of an old META, step by step; lives as long as Table::adopt.
//
// Owns what it has found out so far. Invariant: in the order of run(), for each step believes what those before it checked.
#pragma once

#include <map>
#include <vector>

#include "slot_map.hpp"

namespace kvd {

template <class T>
void same(Shared<T>& to, const Shared<T>& from) {
  to.store(from.load(std::memory_order_relaxed), std::memory_order_relaxed);
}

class Adopter {
 public:
  Adopter(Table& table, const Adoption& old, const AdoptionPlan& plan)
      : table_(table), old_(old.index()), plan_(plan), slots_(fitting(), plan), families_(old_.shape().families_max),
        held_((families_ + 63) / 64), slot_entry_() {}

  Adopted run() {
    look_at_hazards();
    claim_pending();
    claim_families();
    copy_families();
    copy_pending();
    gather_numbers();
    gather_runs();
    gather_slabs();
    return std::move(out_);
  }

 private:
  enum Verdict : u8 { absent, whole, damaged, not_kept };
  void check_fit() const;
  const Index& fitting() const { return check_fit(), old_; }  // before anything is made as large as the old META says
  void look_at_hazards();
  bool held(u32 entry) const { return (held_[entry / 64] >> (entry % 64) & 1) != 0; }

  u32 ghost_of(const Record& record) const;
  void claim_pending();
  Verdict examine(u32 number);
  void claim_families();
  void copy_families();

  // Buckets lie all over the place: those of the families to come are on their way while one is copied.
  static constexpr u32 ahead = 24;
  void fetch_buckets(u32 number) const;
  void copy_family(u32 number);
  void copy_record(u32 number);
  void copy_pending();

  // adopt_gather.cpp: the columns that the core asks for, and what lies behind what
  void gather_numbers();
  bool linked(u32 number) const;
  std::vector<u32> parents() const;
  u32 shape_of(u32 number);
  u64 slot_size(u64 slot);
  void describe_families();
  u32 pins(u32 number) const { return old_.entry(number).flags.load(std::memory_order_relaxed) & ~u32{entry_withdrawn}; }

  void gather_runs();
  void gather_slabs();

  struct Pending {
    u32 record;
    u64 slot;
  };
  Table& table_;
  const Index& old_;
  const AdoptionPlan& plan_;
  SlotMap slots_;
  const u32 families_;
  std::vector<u64> held_;          // a bit an entry
  std::vector<Pending> pending_;
  std::vector<Verdict> verdicts_;
  std::vector<u64> found_;         // slots of the family that is looked at
  std::vector<u64> first_slot_, family_slots_;  // by entry: its slots, in the order of its records
  std::vector<u32> slot_entry_, shape_;
  std::map<std::vector<u64>, u32> shapes_;
  u32 last_shape_ = none32;
  u64 last_slab_ = 0;
  Adopted out_;
};

}  // namespace kvd
