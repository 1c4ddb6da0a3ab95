// Table: eviction, and what it needs to know about who holds what.
#include "table.hpp"
#include "mutants.hpp"

namespace kvd {

using std::memory_order_acquire, std::memory_order_relaxed, std::memory_order_release;

// I4 for a batch: all victims leave READY, one fence, then every hazard that could name one of them is looked at. A
// reader that stored its hazard too late for the scan finds EVICTING when it reads sg again, and backs off.
Evicted Table::evict(const u32* entries, u64 count, bool withdraw) {
  guard_.check("a table");
  for (u64 i = 0; i < count; ++i) {
    check_entry(entries[i]);
    const u32 state = sg_state(index_.entry(entries[i]).sg.load(memory_order_relaxed));
    if (state != entry_ready) {
      fail<std::runtime_error>("evict: entry ", entries[i], " is in state ", state, ", not READY");
    }
  }
  Evicted out;
  out.freed.reserve(count);
  for (u64 i = 0; i < count; ++i) {
    if (marked(entries[i])) {
      for (u64 j = 0; j < i; ++j) unmark(entries[j]);
      fail<std::invalid_argument>("evict: entry ", entries[i], " is named twice");
    }
    mark(entries[i]);
  }
  for (u64 i = 0; i < count; ++i) {
    Shared<u64>& sg = index_.entry(entries[i]).sg;
    sg.store(sg_of(sg_generation(sg.load(memory_order_relaxed)), entry_evicting), memory_order_relaxed);
  }
  step("evict.marked");
  if (!mutant::daemon_fence) std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!mutant::hazard_scan) {
    for (const auto& region : regions_) {
      if (region == nullptr) continue;
      region->each_hazard([&](u32 entry, u32 generation) {
        if (entry < index_.shape().families_max && marked(entry) &&
            low32(sg_generation(index_.entry(entry).sg.load(memory_order_relaxed))) == generation) {
          unmark(entry);  // held
        }
      });
    }
  }
  step("evict.scanned");
  for (u64 i = 0; i < count; ++i) {
    const u32 number = entries[i];
    Shared<u64>& sg = index_.entry(number).sg;
    if (marked(number)) {
      unmark(number);
      free_entry(number, out);
    } else {
      out.held.push_back(number);
      if (withdraw) {  // limbo: nobody new finds it, and its key may be published anew
        clear_slot(number);
        Shared<u8>& flags = index_.entry(number).flags;
        flags.store(flags.load(memory_order_relaxed) | entry_withdrawn, memory_order_relaxed);
      }
      // Back to READY in limbo too: a worker that adopts what its scheduler holds must see it stand, while EVICTING could
      // also mean that the scan has passed the worker's hazard (docs/design/lease-protocol.md).
      sg.store(sg_of(sg_generation(sg.load(memory_order_relaxed)), entry_ready), memory_order_release);
    }
  }
  return out;
}

void Table::free_entry(u32 number, Evicted& out) {
  Entry& entry = index_.entry(number);
  clear_slot(number);
  u32 record = entry.record_first.load(memory_order_relaxed);
  for (u32 steps = 0; record != none32; ++steps) {
    if (steps == members_max) fail<std::runtime_error>("entry ", number, " has more records than members");
    index_.check_record(record);
    Record& row = index_.record(record);
    out.records.push_back(record);
    out.places.push_back(row.place.load(memory_order_relaxed));
    out.sizes.push_back(row.size_bytes.load(memory_order_relaxed));
    row.state.store(record_free, memory_order_relaxed);
    row.entry.store(none32, memory_order_relaxed);
    record = row.next.load(memory_order_relaxed);
  }
  entry.record_first.store(none32, memory_order_relaxed);
  entry.present[0].store(0, memory_order_relaxed);
  entry.present[1].store(0, memory_order_relaxed);
  entry.sg.store(sg_of(sg_generation(entry.sg.load(memory_order_relaxed)), entry_empty), memory_order_release);
  out.freed.push_back(number);
}

// The emptier of a key's two buckets; nullptr: both are full.
Shared<u64>* Table::free_slot(const Key& key) const {
  const Spot spot = index_.locate(key);
  Shared<u64>* best = nullptr;
  u32 best_free = 0;
  for (const u32 number : {spot.first, spot.second}) {
    Shared<u64>* slot = nullptr;
    u32 free = 0;
    for (Shared<u64>& candidate : index_.bucket(number).slots) {
      if (candidate.load(memory_order_relaxed) != 0) continue;
      if (slot == nullptr) slot = &candidate;
      ++free;
    }
    if (free > best_free) best = slot, best_free = free;
  }
  return best;
}

// An entry in limbo has no slot any more: that is not an error.
void Table::clear_slot(u32 number) {
  const Entry& entry = index_.entry(number);
  Key key{};
  for (u32 i = 0; i < 4; ++i) key.words[i] = entry.identity[i].load(memory_order_relaxed);
  const Spot spot = index_.locate(key);
  for (const u32 bucket : {spot.first, spot.second}) {
    for (Shared<u64>& slot : index_.bucket(bucket).slots) {
      if (slot.load(memory_order_relaxed) == slot_of(spot.tag, number)) return slot.store(0, memory_order_release);
    }
  }
}

u64 Table::family_bytes(u32 number) const {
  u64 bytes = 0;
  u32 record = index_.entry(number).record_first.load(memory_order_relaxed);
  for (u32 steps = 0; steps < members_max && record != none32; ++steps) {
    index_.check_record(record);
    bytes += index_.record(record).size_bytes.load(memory_order_relaxed);
    record = index_.record(record).next.load(memory_order_relaxed);
  }
  return bytes;
}

// Every hazard is a lease; a family that is leased several times pins its bytes once. Words that name another
// generation, or nothing that can be, pin nothing and are not counted.
Table::Held Table::held(u32 slot) {
  client_slot(slot, true);
  Held held{};
  std::vector<u32> seen;
  regions_[slot]->each_hazard([&](u32 entry, u32 generation) {
    if (entry >= index_.shape().families_max) return;
    const u64 sg = index_.entry(entry).sg.load(memory_order_relaxed);
    if (low32(sg_generation(sg)) != generation || sg_state(sg) == entry_empty) return;
    ++held.leases;
    if (marked(entry)) return;
    mark(entry);
    seen.push_back(entry);
    held.bytes += family_bytes(entry);
  });
  for (const u32 entry : seen) unmark(entry);
  return held;
}

std::vector<u32> Table::holders(u32 number) const {
  guard_.check("a table");
  check_entry(number);
  const u32 generation = low32(sg_generation(index_.entry(number).sg.load(memory_order_relaxed)));
  std::vector<u32> slots;
  for (u32 slot = 0; slot < regions_.size(); ++slot) {
    bool holds = false;
    if (regions_[slot] == nullptr) continue;
    regions_[slot]->each_hazard([&](u32 entry, u32 low) { holds |= entry == number && low == generation; });
    if (holds) slots.push_back(slot);
  }
  return slots;
}

std::vector<u32> Table::scan(u32 begin, u32 count) const {
  const u32 end = static_cast<u32>(std::min<u64>(u64{begin} + count, index().shape().families_max));
  std::vector<u32> ready;
  for (u32 i = begin; i < end; ++i) {
    const Entry& entry = index_.entry(i);
    if (sg_state(entry.sg.load(memory_order_relaxed)) != entry_ready) continue;
    if ((entry.flags.load(memory_order_relaxed) & entry_withdrawn) == 0) ready.push_back(i);
  }
  return ready;
}

void Table::set_flags(const u32* entries, u64 count, u8 flags) {
  guard_.check("a table");
  for (u64 i = 0; i < count; ++i) check_entry(entries[i]);
  for (u64 i = 0; i < count; ++i) {
    Shared<u8>& to = index_.entry(entries[i]).flags;
    to.store((to.load(memory_order_relaxed) & entry_withdrawn) | (flags & ~entry_withdrawn), memory_order_relaxed);
  }
}

}  // namespace kvd
