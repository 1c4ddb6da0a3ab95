#include "adopt.hpp"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

namespace kvd {

using std::memory_order_relaxed, std::memory_order_release;

Adoption::Adoption(int meta_fd)
    : mapping_(Mapping::of(meta_fd, false, Mapping::Pages::huge, "old META")), index_(*mapping_) {}

std::vector<u64> Adoption::sizes() const {
  std::unordered_set<u64> seen;
  u64 last = 0;
  for (u32 i = 0; i < index_.shape().records_max; ++i) {
    const Record& record = index_.record(i);
    if (record.state.load(memory_order_relaxed) == record_free) continue;
    const u64 size = record.size_bytes.load(memory_order_relaxed);
    if (size != last) seen.insert(last = size);
  }
  std::vector<u64> sizes(seen.begin(), seen.end());
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

namespace {

template <class T>
void same(Shared<T>& to, const Shared<T>& from) {
  to.store(from.load(memory_order_relaxed), memory_order_relaxed);
}

}  // namespace

// Which slots are taken, by the places and sizes that records name.
class SlotMap {
 public:
  SlotMap(const Index& old, const AdoptionPlan& plan) : plan_(plan) {
    u64 frames = 0;
    for (u32 i = 0; i < old.shape().segments_count; ++i) {
      first_frame_.push_back(frames);
      segment_frames_.push_back(plan.segments_kept[i] ? old.segment(i).size_bytes / plan.frame_bytes : 0);
      frames += segment_frames_.back();
    }
    slab_of_.assign(frames, none32);
  }

  enum Claim { claimed, claimed_twice, elsewhere, impossible };
  static constexpr u64 nowhere = ~u64{0};

  // Takes the slot of this object; `slot` becomes its number. Who comes second learns that, and so does whoever asks.
  Claim claim(u64 place, u64 size, u64& slot) {
    slot = nowhere;
    const u32 segment = place_segment(place);
    if (segment >= segment_frames_.size()) return impossible;
    if (!plan_.segments_kept[segment]) return elsewhere;
    const u32 slab = find_slab(segment, place_offset(place), size);
    if (slab == none32) return impossible;
    const Slab& in = slabs_[slab];
    slot = in.first_slot + (place_offset(place) - in.offset) / in.slot_bytes;
    if (taken_[slot]) {
      twice_.insert(slot);
      return claimed_twice;
    }
    taken_[slot] = true;
    return claimed;
  }
  bool twice(u64 slot) const { return !twice_.empty() && twice_.contains(slot); }
  u32 slab(u32 segment, u64 offset) const { return slab_of_[first_frame_[segment] + offset / plan_.frame_bytes]; }

  struct Slab {
    u32 segment;
    u64 offset, slot_bytes, first_slot;
    u32 slots;
  };
  const std::vector<Slab>& slabs() const { return slabs_; }
  u64 slots_count() const { return taken_.size(); }

 private:
  // A slab begins at a frame, and a slot at a multiple of its size behind that: there is one frame at most from which the
  // slot is such a multiple within the slab, or a smaller slab would have done without waste.
  u32 find_slab(u32 segment, u64 offset, u64 size) {
    const auto at = std::lower_bound(plan_.sizes.begin(), plan_.sizes.end(), size);
    if (at == plan_.sizes.end() || *at != size) return none32;
    const u64 i = static_cast<u64>(at - plan_.sizes.begin()), slot_bytes = plan_.slot_bytes[i];
    const u64 frames = plan_.slab_frames[i], frame_bytes = plan_.frame_bytes;
    if (slot_bytes == 0 || offset / frame_bytes >= segment_frames_[segment]) return none32;
    const u64 known = slab_of_[first_frame_[segment] + offset / frame_bytes];
    if (known != none32) {
      const Slab& slab = slabs_[known];
      const bool fits = slab.slot_bytes == slot_bytes && (offset - slab.offset) % slot_bytes == 0 &&
                        (offset - slab.offset) / slot_bytes < slab.slots;
      return fits ? static_cast<u32>(known) : none32;
    }
    const u64 slots = frames * frame_bytes / slot_bytes;
    for (u64 back = 0; back < frames && back <= offset / frame_bytes; ++back) {
      const u64 frame = offset / frame_bytes - back, begin = frame * frame_bytes;
      if ((offset - begin) % slot_bytes != 0 || (offset - begin) / slot_bytes >= slots) continue;
      if (frame + frames > segment_frames_[segment]) continue;
      const auto first = slab_of_.begin() + static_cast<i64>(first_frame_[segment] + frame);
      if (std::any_of(first, first + static_cast<i64>(frames), [](u32 slab) { return slab != none32; })) continue;
      std::fill(first, first + static_cast<i64>(frames), static_cast<u32>(slabs_.size()));
      slabs_.push_back({segment, begin, slot_bytes, taken_.size(), static_cast<u32>(slots)});
      taken_.resize(taken_.size() + slots);
      return static_cast<u32>(slabs_.size() - 1);
    }
    return none32;
  }

  using i64 = std::int64_t;
  const AdoptionPlan& plan_;
  std::vector<u64> first_frame_, segment_frames_;
  std::vector<u32> slab_of_;  // by frame of all kept segments
  std::vector<Slab> slabs_;
  std::vector<bool> taken_;
  std::unordered_set<u64> twice_;
};

class Adopter {
 public:
  Adopter(Table& table, const Adoption& old, const AdoptionPlan& plan)
      : table_(table), old_(old.index()), plan_(plan), slots_(old_, plan), families_(old_.shape().families_max),
        held_((families_ + 63) / 64), slot_entry_() {}

  Adopted run() {
    check_fit();
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

  void check_fit() const {
    const MetaShape &now = table_.index_.shape(), &was = old_.shape();
    if (now.families_max < was.families_max || now.records_max < was.records_max ||
        plan_.segments_kept.size() != was.segments_count ||
        plan_.ghosts.size() != was.clients_max) {
      fail<std::invalid_argument>("adopt: the new META must have room for every number of the old one");
    }
    if (plan_.slot_bytes.size() != plan_.sizes.size() || plan_.slab_frames.size() != plan_.sizes.size()) {
      fail<std::invalid_argument>("adopt: columns of sizes differ in length");
    }
    for (u32 i = 0; i < was.segments_count; ++i) {
      if (plan_.segments_kept[i] && i >= now.segments_count) fail<std::invalid_argument>("adopt: segment ", i, " is not there");
      if (plan_.segments_kept[i] && old_.segment(i).size_bytes != table_.index_.segment(i).size_bytes) {
        fail<std::invalid_argument>("adopt: segment ", i, " has another size now");
      }
    }
  }

  // All ghosts were revoked when they were attached. After this fence their hazards only become fewer.
  void look_at_hazards() {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (const auto& region : table_.regions_) {
      if (region == nullptr) continue;
      region->each_hazard([&](u32 entry, u32 generation) {
        if (entry >= families_) return;
        if (low32(sg_generation(old_.entry(entry).sg.load(memory_order_relaxed))) != generation) return;
        held_[entry / 64] |= u64{1} << (entry % 64);
      });
    }
  }
  bool held(u32 entry) const { return (held_[entry / 64] >> (entry % 64) & 1) != 0; }

  u32 ghost_of(const Record& record) const {
    const u32 owner = record.owner.load(memory_order_relaxed);
    return owner < plan_.ghosts.size() ? plan_.ghosts[owner] : none32;
  }

  void claim_pending() {
    for (u32 i = 0; i < old_.shape().records_max; ++i) {
      const Record& record = old_.record(i);
      if (record.state.load(memory_order_relaxed) != record_pending || ghost_of(record) == none32) continue;
      u64 slot;
      switch (slots_.claim(record.place.load(memory_order_relaxed), record.size_bytes.load(memory_order_relaxed), slot)) {
        case SlotMap::claimed: pending_.push_back({i, slot}); break;
        case SlotMap::elsewhere: break;  // in memory that nobody else gets
        default: fail<std::runtime_error>("record ", i, " is being written by a living client, in a slot that cannot be");
      }
    }
  }

  // The records of a family, checked as far as one family can be.
  Verdict examine(u32 number) {
    const Entry& entry = old_.entry(number);
    const u32 state = sg_state(entry.sg.load(memory_order_relaxed));
    if (state != entry_ready && state != entry_evicting) return absent;
    const Cold& cold = old_.cold(number);
    const u32 space = cold.namespace_number.load(memory_order_relaxed);
    const u32 mandatory = entry.members_count.load(memory_order_relaxed);
    if (space > plan_.namespaces_count || mandatory == 0 ||
        mandatory > members_max) {
      return damaged;
    }
    u64 left[2] = {entry.present[0].load(memory_order_relaxed), entry.present[1].load(memory_order_relaxed)};
    if ((left[0] | left[1]) == 0) return damaged;
    found_.clear();
    Verdict verdict = whole;
    for (u32 i = entry.record_first.load(memory_order_relaxed); i != none32;
         i = old_.record(i).next.load(memory_order_relaxed)) {
      if (i >= old_.shape().records_max) return damaged;
      const Record& record = old_.record(i);
      const u32 member = record.member.load(memory_order_relaxed);
      // Each member once: so a list that runs in a circle ends here.
      if (member >= members_max || (left[member / 64] >> (member % 64) & 1) == 0) return damaged;
      left[member / 64] &= ~(u64{1} << (member % 64));
      if (record.state.load(memory_order_relaxed) != record_published ||
          record.entry.load(memory_order_relaxed) != number ||
          record.owner.load(memory_order_relaxed) != owner_none) {
        return damaged;
      }
      u64 slot;
      switch (slots_.claim(record.place.load(memory_order_relaxed), record.size_bytes.load(memory_order_relaxed), slot)) {
        case SlotMap::impossible: verdict = damaged; break;
        case SlotMap::elsewhere: verdict = verdict == damaged ? damaged : not_kept; break;
        default: break;  // two for one slot: found when all have claimed
      }
      found_.push_back(slot);
    }
    if ((left[0] | left[1]) != 0) return damaged;
    // Half in memory that is kept: that half must not be given to others while somebody holds the family.
    const bool half = verdict == not_kept && std::any_of(found_.begin(), found_.end(), [](u64 s) { return s != SlotMap::nowhere; });
    return half ? damaged : verdict;
  }

  void claim_families() {
    verdicts_.resize(families_);
    first_slot_.resize(u64{families_} + 1);
    for (u32 i = 0; i < families_; ++i) {
      verdicts_[i] = examine(i);
      first_slot_[i] = family_slots_.size();
      if (verdicts_[i] == whole) family_slots_.insert(family_slots_.end(), found_.begin(), found_.end());
    }
    first_slot_[families_] = family_slots_.size();
    for (const Pending& one : pending_) {
      if (slots_.twice(one.slot)) {
        fail<std::runtime_error>("record ", one.record, " is being written by a living client, in the slot of another");
      }
    }
  }

  void copy_families() {
    slot_entry_.assign(slots_.slots_count(), none32);
    for (u32 i = 0; i < families_; ++i) {
      if (i + ahead < families_ && verdicts_[i + ahead] == whole) fetch_buckets(i + ahead);
      const u64 sg = old_.entry(i).sg.load(memory_order_relaxed);
      Entry& to = table_.index_.entry(i);
      for (u64 s = first_slot_[i]; s < first_slot_[i + 1]; ++s) {
        if (slots_.twice(family_slots_[s])) verdicts_[i] = damaged;
      }
      if (verdicts_[i] == whole) {
        copy_family(i);
        continue;
      }
      // Memory that is not there any more is nobody's to reuse: it may be held. Otherwise what is held must stay.
      if (verdicts_[i] == damaged && held(i)) fail<std::runtime_error>("family ", i, " does not check out and is held");
      out_.damaged += verdicts_[i] == damaged;
      out_.not_kept += verdicts_[i] == not_kept;
      to.sg.store(sg_of(sg_generation(sg), entry_empty), memory_order_relaxed);
    }
  }

  // Buckets lie all over the place: those of the families to come are on their way while one is copied.
  static constexpr u32 ahead = 24;
  void fetch_buckets(u32 number) const {
    const Entry& entry = old_.entry(number);
    const Key key{{entry.identity[0].load(memory_order_relaxed), entry.identity[1].load(memory_order_relaxed), 0, 0}};
    const Spot spot = table_.index_.locate(key);
    __builtin_prefetch(&table_.index_.bucket(spot.first), 1);
    __builtin_prefetch(&table_.index_.bucket(spot.second), 1);
  }

  void copy_family(u32 number) {
    const Entry& from = old_.entry(number);
    Entry& to = table_.index_.entry(number);
    Key key{};
    for (u32 i = 0; i < 4; ++i) key.words[i] = from.identity[i].load(memory_order_relaxed), same(to.identity[i], from.identity[i]);
    same(to.present[0], from.present[0]);
    same(to.present[1], from.present[1]);
    same(to.record_first, from.record_first);
    same(to.split, from.split);
    same(to.members_count, from.members_count);
    same(to.flags, from.flags);
    u64 slot = first_slot_[number];
    for (u32 i = from.record_first.load(memory_order_relaxed); i != none32; ++slot) {
      const Record& record = old_.record(i);
      copy_record(i);
      slot_entry_[family_slots_[slot]] = number;
      out_.bytes += record.size_bytes.load(memory_order_relaxed);
      i = record.next.load(memory_order_relaxed);
    }
    // Of two under one key, or with no room in the buckets, one is nobody's to find: it leaves with its last lease.
    bool withdrawn = (from.flags.load(memory_order_relaxed) & entry_withdrawn) != 0;
    Shared<u64>* const bucket = withdrawn || table_.index_.find(key) ? nullptr : table_.free_slot(key);
    withdrawn = bucket == nullptr;
    to.flags.store(static_cast<u8>((from.flags.load(memory_order_relaxed) & ~entry_withdrawn) |
                                   (withdrawn ? entry_withdrawn : 0)), memory_order_relaxed);
    to.sg.store(sg_of(sg_generation(from.sg.load(memory_order_relaxed)), entry_ready), memory_order_release);
    if (!withdrawn) bucket->store(slot_of(table_.index_.locate(key).tag, number), memory_order_release);
    ++(withdrawn ? out_.withdrawn : out_.families);
    if (withdrawn) out_.limbo.push_back(number);
  }

  void copy_record(u32 number) {
    const Record& from = old_.record(number);
    Record& to = table_.index_.record(number);
    same(to.place, from.place);
    same(to.size_bytes, from.size_bytes);
    same(to.checksum, from.checksum);
    same(to.next, from.next);
    same(to.entry, from.entry);
    same(to.owner, from.owner);
    same(to.member, from.member);
    same(to.state, from.state);
    same(to.heads_begin, from.heads_begin);
    same(to.heads_end, from.heads_end);
    same(to.layers_begin, from.layers_begin);
    same(to.layers_end, from.layers_end);
    same(to.reservation, from.reservation);
    out_.records_end = std::max(out_.records_end, number + 1);
  }

  void copy_pending() {
    for (const Pending& one : pending_) {
      copy_record(one.record);
      Record& record = table_.index_.record(one.record);
      const u32 ghost = ghost_of(old_.record(one.record));
      record.owner.store(static_cast<u16>(ghost), memory_order_relaxed);
      out_.ghost_slots.push_back(ghost);
      out_.ghost_records.push_back(one.record);
      out_.ghost_places.push_back(record.place.load(memory_order_relaxed));
    }
    out_.pending = pending_.size();
  }

  void gather_numbers() {
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

  // --- what lies behind what

  bool linked(u32 number) const {
    return verdicts_[number] == whole && (table_.index_.entry(number).flags.load(memory_order_relaxed) & entry_withdrawn) == 0;
  }

  // The parents of all linked families; none32 where the parent left, is of another namespace, or closes a circle.
  std::vector<u32> parents() const {
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
  u32 shape_of(u32 number) {
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
  u64 slot_size(u64 slot) {
    const auto& slabs = slots_.slabs();
    if (slot < slabs[last_slab_].first_slot || slot >= slabs[last_slab_].first_slot + slabs[last_slab_].slots) {
      const auto after = std::upper_bound(slabs.begin(), slabs.end(), slot,
                                          [](u64 one, const SlotMap::Slab& slab) { return one < slab.first_slot; });
      last_slab_ = static_cast<u64>(after - slabs.begin()) - 1;
    }
    return slabs[last_slab_].slot_bytes;
  }

  void describe_families() {
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

  u32 pins(u32 number) const { return old_.entry(number).flags.load(memory_order_relaxed) & ~u32{entry_withdrawn}; }

  void gather_runs() {
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
        if (first_child[at + 1] - first_child[at] != 1) break;
        const u32 child = children[first_child[at]];
        if (shape_[child] != run.shape || pins(child) != run.flags) break;
        at = child;
      }
      for (u32 c = first_child[at]; c < first_child[at + 1]; ++c) heads.push_back({children[c], number});
      out_.runs.push_back(run);
    }
  }

  void gather_slabs() {
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

Adopted Table::adopt(const Adoption& old, const AdoptionPlan& plan) {
  guard_.check("a table");
  return Adopter(*this, old, plan).run();
}

}  // namespace kvd
