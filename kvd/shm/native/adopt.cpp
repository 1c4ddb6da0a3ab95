// Adopting: what the old META says is checked and copied. adopt_gather.cpp makes columns of it.
#include "adopter.hpp"

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

void Adopter::check_fit() const {
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
void Adopter::look_at_hazards() {
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

u32 Adopter::ghost_of(const Record& record) const {
  const u32 owner = record.owner.load(memory_order_relaxed);
  return owner < plan_.ghosts.size() ? plan_.ghosts[owner] : none32;
}

void Adopter::claim_pending() {
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
Adopter::Verdict Adopter::examine(u32 number) {
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

void Adopter::claim_families() {
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

void Adopter::copy_families() {
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

void Adopter::fetch_buckets(u32 number) const {
  const Entry& entry = old_.entry(number);
  const Key key{{entry.identity[0].load(memory_order_relaxed), entry.identity[1].load(memory_order_relaxed), 0, 0}};
  const Spot spot = table_.index_.locate(key);
  __builtin_prefetch(&table_.index_.bucket(spot.first), 1);
  __builtin_prefetch(&table_.index_.bucket(spot.second), 1);
}

void Adopter::copy_family(u32 number) {
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

void Adopter::copy_record(u32 number) {
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

void Adopter::copy_pending() {
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

bool Adopter::linked(u32 number) const {
  return verdicts_[number] == whole && (table_.index_.entry(number).flags.load(memory_order_relaxed) & entry_withdrawn) == 0;
}

Adopted Table::adopt(const Adoption& old, const AdoptionPlan& plan) {
  guard_.check("a table");
  return Adopter(*this, old, plan).run();
}

}  // namespace kvd
