// Adopting: what was copied becomes the columns that the core goes on with.
#include "adopter.hpp"

namespace kvd {

using std::memory_order_relaxed;

void Adopter::gather_numbers() {
  for (u32 i = 0; i < families_; ++i) {
    if (verdicts_[i] == whole) out_.entries_end = i + 1;
  }
  for (u32 i = 0; i < out_.entries_end; ++i) {
    if (verdicts_[i] != whole) out_.free_entries.push_back(i);
  }
  for (u32 i = 0; i < out_.records_end; ++i) {
    if (table_.index_.record(i).state.load(memory_order_relaxed) == record_free) out_.free_records.push_back(i);
  }
}

// The parents of all linked families; none32 where the parent left, is of another namespace, or closes a circle.
std::vector<u32> Adopter::parents() const {
  const u32 end = out_.entries_end;
  std::vector<u32> parent(end, none32);
  for (u32 i = 0; i < end; ++i) {
    if (!linked(i)) continue;
    const Cold& cold = old_.cold(i);
    const u32 p = cold.parent_entry.load(memory_order_relaxed);
    if (p >= end || !linked(p)) continue;
    if (low32(sg_generation(old_.entry(p).sg.load(memory_order_relaxed))) !=
        cold.parent_generation.load(memory_order_relaxed)) continue;
    if (old_.cold(p).namespace_number.load(memory_order_relaxed) !=
        cold.namespace_number.load(memory_order_relaxed)) continue;
    parent[i] = p;
  }
  std::vector<u32> walk(end, 0);  // the walk in which a family was seen
  for (u32 i = 0; i < end; ++i) {
    u32 at = i, before = none32;
    while (at != none32 && walk[at] == 0) {
      walk[at] = i + 1;
      before = at;
      at = parent[at];
    }
    if (at != none32 && before != none32 && walk[at] == i + 1) parent[before] = none32;
  }
  return parent;
}

// Interned: the slot sizes of a family.
u32 Adopter::shape_of(u32 number) {
  std::vector<u64> sizes;
  u64 bytes = 0;
  for (u64 s = first_slot_[number]; s < first_slot_[number + 1]; ++s) {
    const u64 size = slot_size(family_slots_[s]);
    sizes.push_back(size);
    bytes += size;
  }
  out_.bytes_of[number] = bytes;
  if (sizes.size() > 1) {
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
  }
  if (last_shape_ != none32 && out_.shapes[last_shape_] == sizes) return last_shape_;
  const auto [found, fresh] = shapes_.try_emplace(sizes, static_cast<u32>(out_.shapes.size()));
  if (fresh) out_.shapes.push_back(sizes);
  return last_shape_ = found->second;
}

u64 Adopter::slot_size(u64 slot) {
  const auto& slabs = slots_.slabs();
  if (slot < slabs[last_slab_].first_slot || slot >= slabs[last_slab_].first_slot + slabs[last_slab_].slots) {
    const auto after = std::upper_bound(slabs.begin(), slabs.end(), slot,
                                        [](u64 one, const SlotMap::Slab& slab) { return one < slab.first_slot; });
    last_slab_ = static_cast<u64>(after - slabs.begin()) - 1;
  }
  return slabs[last_slab_].slot_bytes;
}

void Adopter::describe_families() {
  const u32 end = out_.entries_end;
  out_.run_of.assign(end, none32);
  out_.home_of.assign(end, 0);
  out_.bytes_of.assign(end, 0);
  out_.key8_of.assign(end, 0);
  out_.missing_of.assign(end, 0);
  shape_.assign(end, none32);
  for (u32 i = 0; i < end; ++i) {
    if (verdicts_[i] != whole) continue;
    const Entry& entry = old_.entry(i);
    shape_[i] = shape_of(i);
    out_.key8_of[i] = entry.identity[0].load(memory_order_relaxed);
    const u32 mandatory = entry.members_count.load(memory_order_relaxed);
    u32 missing = mandatory;
    for (u32 m = 0; m < mandatory; ++m) missing -= old_.has(i, m);
    out_.missing_of[i] = static_cast<u8>(linked(i) ? missing : 0);
  }
}

// As in kvd/core/forest.py: a run that is split or cut costs a bounded time.
constexpr u32 run_families_max = 1 << 14;

void Adopter::gather_runs() {
  describe_families();
  const u32 end = out_.entries_end;
  const std::vector<u32> parent = parents();
  for (u32 i = 0; i < end; ++i) {
    if (verdicts_[i] != whole) continue;
    same(table_.index_.cold(i).namespace_number, old_.cold(i).namespace_number);
    table_.set_parent(i, parent[i]);
  }
  std::vector<u32> first_child(u64{end} + 1, 0), children(end);
  for (u32 i = 0; i < end; ++i) {
    if (parent[i] != none32) ++first_child[parent[i] + 1];
  }
  for (u32 i = 0; i < end; ++i) first_child[i + 1] += first_child[i];
  std::vector<u32> next(first_child.begin(), first_child.end() - 1);
  for (u32 i = 0; i < end; ++i) {
    if (parent[i] != none32) children[next[parent[i]]++] = i;
  }
  struct Head {
    u32 entry, parent;
  };
  std::vector<Head> heads;
  for (u32 i = 0; i < end; ++i) {
    if (linked(i) && parent[i] == none32) heads.push_back({i, none32});
  }
  for (u64 h = 0; h < heads.size(); ++h) {
    const u32 number = static_cast<u32>(out_.runs.size());
    u32 at = heads[h].entry;
    AdoptedRun run{static_cast<u32>(out_.members.size()), 0, heads[h].parent,
                   old_.cold(at).namespace_number.load(memory_order_relaxed), 0, shape_[at], pins(at)};
    for (;;) {
      out_.members.push_back(at);
      out_.run_of[at] = number;
      run.bytes += out_.bytes_of[at];
      ++run.count;
      if (first_child[at + 1] - first_child[at] != 1 || run.count >= run_families_max) break;
      const u32 child = children[first_child[at]];
      if (shape_[child] != run.shape || pins(child) != run.flags) break;
      at = child;
    }
    for (u32 c = first_child[at]; c < first_child[at + 1]; ++c) heads.push_back({children[c], number});
    out_.runs.push_back(run);
  }
}

void Adopter::gather_slabs() {
  std::vector<bool> reserved(slots_.slots_count());
  for (const Pending& one : pending_) reserved[one.slot] = true;
  const u64 frame_bytes = plan_.frame_bytes;
  for (const SlotMap::Slab& slab : slots_.slabs()) {
    const u64 end = slab.first_slot + slab.slots;
    u64 used_end = slab.first_slot;
    for (u64 s = slab.first_slot; s < end; ++s) {
      if (slot_entry_[s] != none32 || reserved[s]) used_end = s + 1;
    }
    if (used_end == slab.first_slot) continue;
    const u32 number = static_cast<u32>(out_.slabs.size());
    AdoptedSlab row{place_of(slab.segment, slab.offset) / frame_bytes, slab.slot_bytes,
                    static_cast<u32>(out_.owners.size()), slab.slots, static_cast<u32>(out_.free_places.size()), 0,
                    static_cast<u32>(end - used_end), 0};
    for (u64 s = slab.first_slot; s < end; ++s) {
      out_.owners.push_back(slot_entry_[s]);
      if (slot_entry_[s] != none32) out_.home_of[slot_entry_[s]] = number;
      else if (reserved[s]) ++row.reserved_count;
      else if (s < used_end) out_.free_places.push_back(place_of(slab.segment, slab.offset + (s - slab.first_slot) * slab.slot_bytes));
    }
    row.free_count = static_cast<u32>(out_.free_places.size()) - row.free_first;
    out_.slabs.push_back(row);
  }
}

}  // namespace kvd
