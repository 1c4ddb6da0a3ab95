// A table as a daemon leaves it when it dies, what a next one must find in it, and checks on the columns of an adoption.
//
// Used by test_adopt.cpp. Objects of three sizes lie in slabs of one or three frames in two segments; chains, pins, limbo,
// half-written and half-evicted families, leases and reservations of three clients are drawn from a seed.
#pragma once

#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "adopt.hpp"
#include "check.hpp"
#include "client.hpp"
#include "table.hpp"

namespace adopt_world {

using namespace kvd;

inline constexpr u64 frame_bytes = 4096;
inline constexpr u32 families_max = 96, records_max = 256, clients = 4, namespaces = 3;
inline constexpr u64 frames[2] = {160, 160};
inline constexpr u64 sizes[3] = {250, 1000, 6000}, slots[3] = {256, 1024, 6016};
inline constexpr u32 slabs[3] = {1, 1, 3};

inline const u8* bytes_of(const Key& key) { return reinterpret_cast<const u8*>(key.words); }

// Slots as the core gives them out: slabs of one size, from the first frame on.
class Places {
 public:
  u64 take(u32 size) {
    if (left_[size] == 0) {
      if (frame_ + slabs[size] > frames[segment_]) ++segment_, frame_ = 0;
      CHECK(segment_ < 2);
      next_[size] = place_of(segment_, frame_ * frame_bytes);
      left_[size] = slabs[size] * frame_bytes / slots[size];
      frame_ += slabs[size];
    }
    --left_[size];
    const u64 place = next_[size];
    next_[size] += slots[size];
    return place;
  }

 private:
  u64 frame_ = 0, next_[3] = {}, left_[3] = {};
  u32 segment_ = 0;
};

struct Part {
  u32 record;
  u64 place, size, checksum;
};

struct Family {
  Key key;
  u64 generation;
  u32 parent, namespace_number;
  u8 mandatory, flags;
  bool withdrawn;
  std::map<u32, Part> parts;  // by member
};

struct Pending {
  u32 owner, record;
  u64 place, size;
};

inline std::shared_ptr<Region> region_of(u32 slot, u64 epoch, u32 hazards = 256) {
  const int fd = memory_file("client");
  auto region = std::make_shared<Region>(fd, RegionShape{slot, epoch, 4096, 4096, 16, hazards});
  close(fd);
  return region;
}

inline std::unique_ptr<Table> table_of(int meta, u64 epoch, u32 clients_max) {
  const TableIdentity identity{epoch, 0x9E37 * epoch, 1, 1, {}};
  return std::make_unique<Table>(meta, families_max, records_max, std::vector<u64>{frames[0] * frame_bytes, frames[1] * frame_bytes},
                                 clients_max, identity);
}

class Old {
 public:
  static constexpr u64 epoch = 7;
  std::mt19937_64 random;
  int meta = memory_file("meta"), pools[2] = {memory_file("pool", frames[0] * frame_bytes), memory_file("pool", frames[1] * frame_bytes)};
  std::unique_ptr<Table> table = table_of(meta, epoch, clients);
  std::vector<std::shared_ptr<Region>> regions;  // of clients 0 .. 2; 1 is dead when the next daemon comes
  std::map<u32, Family> families;                // what must be found, by entry
  std::vector<Pending> pending;
  std::set<u32> leased;  // entries, by client 0 or 2

  explicit Old(u64 seed) : random(seed) {
    for (u32 i = 0; i < 2; ++i) table->map_segment(i, pools[i], true);
    for (u32 i = 0; i < 3; ++i) {
      regions.push_back(region_of(i, epoch));
      table->attach(i, regions[i], 1, 1, 100 + i, 1);
      clients_.push_back(std::make_shared<Client>(table->mapping(), regions[i]->mapping(), segments()));
    }
    fill();
    turn_over();
    hold();
    die();
  }
  ~Old() {
    leases_.clear();
    for (const int fd : {meta, pools[0], pools[1]}) close(fd);
  }

  std::vector<std::shared_ptr<Mapping>> segments() const { return {table->segment(0), table->segment(1)}; }
  u64 below(u64 bound) { return random() % bound; }

 private:
  Places places_;
  std::vector<std::shared_ptr<Client>> clients_;
  std::vector<LeaseRef> leases_;
  u32 next_record_ = 0;

  void put(u32 entry) {
    Family family{};
    for (u64& word : family.key.words) word = random();
    family.mandatory = static_cast<u8>(1 + below(3));
    const u32 there = below(8) == 0 ? static_cast<u32>(1 + below(family.mandatory)) : family.mandatory;  // some are partial
    family.parent = none32;
    family.namespace_number = static_cast<u32>(1 + below(namespaces));
    if (entry > 0 && below(4) != 0) {
      const auto parent = families.find(static_cast<u32>(below(entry)));
      if (parent != families.end() && !parent->second.withdrawn) {
        family.parent = parent->first;
        family.namespace_number = parent->second.namespace_number;
      }
    }
    for (u32 m = 0; m < there; ++m) publish(family, entry, m);
    family.generation = sg_generation(table->index().entry(entry).sg.load());
    family.flags = below(6) == 0 ? entry_hard_pinned : below(6) == 0 ? entry_soft_pinned : 0;
    if (family.flags != 0) table->set_flags(&entry, 1, family.flags);
    families[entry] = family;
  }

  void publish(Family& family, u32 entry, u32 member) {
    const u32 kind = static_cast<u32>(below(3)), record = next_record_++;
    Part part{record, places_.take(kind), sizes[kind], random()};
    const u16 ranges[4] = {0, 8, 0, 32};
    const u8 number = static_cast<u8>(member);
    table->reserve({1, 1, 1, &record, &part.place, &part.size, &number, ranges});
    u8 status = 255, differs = 0;
    u32 out = none32;
    table->publish({1, 1, bytes_of(family.key), &number, 0, family.mandatory, &record, &part.checksum, &entry, 1,
                    &family.parent, family.namespace_number},
                   &status, &out, &differs);
    CHECK(status == publish_done);
    family.parts[member] = part;
  }

  void fill() {
    for (u32 i = 0; i < 80; ++i) put(i);
  }

  // Some leave, and some of their entries are used a second time: what lay behind them lies behind nothing any more.
  void turn_over() {
    for (u32 i = 0; i < 80; i += 9) {
      const u32 victim[1] = {i};
      CHECK(table->evict(victim, 1, false).freed.size() == 1);
      families.erase(i);
      if (i % 2 == 0) put(i);
    }
    for (auto& [entry, family] : families) {
      if (family.parent == none32) continue;
      const u32 generation = table->index().cold(entry).parent_generation.load();
      const auto parent = families.find(family.parent);
      if (parent == families.end() || low32(parent->second.generation) != generation) family.parent = none32;
    }
  }

  void lease(u32 client, u32 entry) {
    if (leased.contains(entry) || families.at(entry).parts.size() != families.at(entry).mandatory) return;
    leases_.push_back(clients_[client]->acquire(bytes_of(families.at(entry).key), 1, 0, false));
    CHECK(leases_.back()->size() == 1);
    if (client != 1) leased.insert(entry);
  }

  void hold() {
    for (u32 i = 0; i < 24; ++i) {
      const u32 entry = static_cast<u32>(below(80));
      if (families.contains(entry)) lease(static_cast<u32>(below(3)), entry);
    }
    for (const u32 entry : leased) {
      if (below(3) != 0) continue;
      CHECK(table->evict(&entry, 1, true).held.size() == 1);
      families[entry].withdrawn = true;
    }
    for (auto& [entry, family] : families) {
      if (family.parent != none32 && families.contains(family.parent) && families[family.parent].withdrawn) family.parent = none32;
    }
    for (u32 i = 0; i < 9; ++i) {
      const u32 kind = static_cast<u32>(below(3)), record = next_record_++, owner = i % 3;
      const Pending one{owner, record, places_.take(kind), sizes[kind]};
      const u16 ranges[4] = {0, 8, 0, 32};
      const u8 member = 0;
      table->reserve({owner, 2, 1, &record, &one.place, &one.size, &member, ranges});
      if (owner != 1) pending.push_back(one);
    }
  }

  // Half-way through an eviction and a publication.
  void die() {
    for (auto& [entry, family] : families) {
      if (family.withdrawn || below(10) != 0) continue;
      table->index().entry(entry).sg.store(sg_of(family.generation, entry_evicting));
    }
    Entry& half = table->index().entry(families_max - 1);
    half.sg.store(sg_of(5, entry_writing));
    CHECK(next_record_ < records_max);
  }
};

// A table over an old META, with ghosts of the clients that live.
struct Next {
  Adoption old;
  int meta = memory_file("next");
  std::unique_ptr<Table> table = table_of(meta, Old::epoch + 1, 2 * clients);
  AdoptionPlan plan;
  Adopted out;

  Next(const Old& was, int old_meta) : old(old_meta) {
    for (u32 i = 0; i < 2; ++i) table->map_segment(i, was.pools[i], true);
    plan.segments_kept = std::vector<bool>(old.index().shape().segments_count, true);
    plan.frame_bytes = frame_bytes;
    plan.namespaces_count = namespaces;
    plan.sizes = old.sizes();
    for (const u64 size : plan.sizes) {
      const auto kind = static_cast<u64>(std::find(std::begin(sizes), std::end(sizes), size) - sizes);
      // As the core: any size has a slot if the pool has room for one at all.
      const u64 slot = kind < 3 ? slots[kind] : size > frames[0] * frame_bytes ? 0 : (size + 63) / 64 * 64;
      plan.slot_bytes.push_back(slot);
      plan.slab_frames.push_back(kind < 3 ? slabs[kind] : static_cast<u32>((slot + frame_bytes - 1) / frame_bytes));
    }
    plan.ghosts.assign(old.index().shape().clients_max, none32);
    for (const u32 slot : {0u, 2u}) {
      if (slot < plan.ghosts.size()) plan.ghosts[slot] = clients + slot;
      table->attach_ghost(clients + slot, was.regions[slot], was.table->index().client(slot));
    }
    out = table->adopt(old, plan);
  }
  ~Next() { close(meta); }
  Next(const Next&) = delete;
  Next& operator=(const Next&) = delete;

  bool ready(u32 entry) const { return sg_state(table->index().entry(entry).sg.load()) == entry_ready; }
  bool limbo(u32 entry) const { return (table->index().entry(entry).flags.load() & entry_withdrawn) != 0; }
  Key key(u32 entry) const {
    Key key{};
    for (u32 i = 0; i < 4; ++i) key.words[i] = table->index().entry(entry).identity[i].load();
    return key;
  }
  std::vector<u32> records(u32 entry) const {
    std::vector<u32> found;
    for (u32 r = table->index().entry(entry).record_first.load(); r != none32; r = table->index().record(r).next.load()) {
      CHECK(r < records_max && found.size() < members_max);
      found.push_back(r);
    }
    return found;
  }

  void check_columns() const;
  void check_numbers() const;
  void check_runs() const;
  void check_slabs() const;
};

inline void Next::check_columns() const {
  check_numbers();
  check_runs();
  check_slabs();
}

// Free means free, and nothing else is; every record belongs to one family or to one ghost.
inline void Next::check_numbers() const {
  const std::set<u32> entries(out.free_entries.begin(), out.free_entries.end());
  const std::set<u32> records_free(out.free_records.begin(), out.free_records.end());
  CHECK(entries.size() == out.free_entries.size() && records_free.size() == out.free_records.size());
  std::map<u32, u32> named;
  u64 families = 0, withdrawn = 0;
  for (u32 i = 0; i < families_max; ++i) {
    const u32 state = sg_state(table->index().entry(i).sg.load());
    CHECK(state == entry_empty || state == entry_ready);
    CHECK((state == entry_ready) == (i < out.entries_end && !entries.contains(i)));
    if (state != entry_ready) continue;
    ++(limbo(i) ? withdrawn : families);
    for (const u32 record : records(i)) CHECK(named.try_emplace(record, i).second);
    if (limbo(i)) CHECK(table->index().find(key(i)).entry != i);
    else CHECK(table->index().find(key(i)).entry == i);
  }
  CHECK(families == out.families && withdrawn == out.withdrawn && withdrawn == out.limbo.size());
  for (const u32 record : out.ghost_records) CHECK(named.try_emplace(record, none32).second);
  for (u32 i = 0; i < records_max; ++i) {
    const u32 state = table->index().record(i).state.load();
    CHECK((state != record_free) == named.contains(i));
    CHECK((state != record_free) == (i < out.records_end && !records_free.contains(i)));
    if (state != record_free) CHECK((state == record_pending) == (named[i] == none32));
  }
}

// Each linked family in one run, parents first, and a run is of one namespace.
inline void Next::check_runs() const {
  CHECK(out.members.size() == out.families);
  std::set<u32> seen;
  u64 bytes = 0;
  u32 first = 0;
  for (u32 r = 0; r < out.runs.size(); ++r) {
    const AdoptedRun& run = out.runs[r];
    CHECK(run.first == first && run.count > 0 && (run.parent == none32 || run.parent < r));
    CHECK(run.shape < out.shapes.size());
    if (run.parent != none32) CHECK(out.runs[run.parent].namespace_number == run.namespace_number);
    u64 sum = 0;
    for (u32 m = run.first; m < run.first + run.count; ++m) {
      const u32 entry = out.members[m];
      CHECK(ready(entry) && !limbo(entry) && seen.insert(entry).second && out.run_of[entry] == r);
      CHECK(table->index().cold(entry).namespace_number.load() == run.namespace_number);
      sum += out.bytes_of[entry];
    }
    CHECK(sum == run.bytes);
    bytes += sum;
    first += run.count;
  }
  u64 missing = 0;
  for (u32 i = 0; i < out.entries_end; ++i) {
    CHECK((out.run_of[i] != none32) == seen.contains(i));
    missing += out.missing_of[i];
  }
  CHECK(bytes > 0 || out.families == 0);
  CHECK(missing <= u64{families_max} * members_max);
}

// No byte has two owners, no free slot an owner, and all of it lies in the pool.
inline void Next::check_slabs() const {
  std::map<u64, u64> taken;  // begin -> end, of slabs; then of free and used slots
  std::map<u64, u32> owner;  // place -> entry
  std::set<u64> reserved(out.ghost_places.begin(), out.ghost_places.end());
  CHECK(reserved.size() == out.ghost_places.size());
  for (const AdoptedSlab& slab : out.slabs) {
    const u64 base = slab.frame * frame_bytes, end = base + slab.slots_count * slab.slot_bytes;
    CHECK(place_segment(base) < 2 && place_offset(end) <= frames[place_segment(base)] * frame_bytes);
    CHECK(place_segment(end - 1) == place_segment(base));
    const auto after = taken.upper_bound(base);
    CHECK(after == taken.end() || after->first >= end);
    CHECK(after == taken.begin() || std::prev(after)->second <= base);
    taken[base] = end;
    std::set<u64> free;
    for (u32 i = 0; i < slab.free_count; ++i) {
      const u64 place = out.free_places[slab.free_first + i];
      CHECK(place >= base && place < end && (place - base) % slab.slot_bytes == 0 && free.insert(place).second);
    }
    u32 used = 0, pending = 0;
    for (u32 i = 0; i < slab.slots_count; ++i) {
      const u64 place = base + i * slab.slot_bytes;
      const u32 entry = out.owners[slab.owners_first + i];
      const bool fresh = i >= slab.slots_count - slab.fresh_count;
      if (entry != none32) owner[place] = entry;
      used += entry != none32;
      pending += reserved.contains(place);
      CHECK((entry != none32) + reserved.contains(place) + free.contains(place) + fresh == 1);
    }
    CHECK(pending == slab.reserved_count && used + pending + slab.free_count + slab.fresh_count == slab.slots_count);
  }
  for (u32 i = 0; i < out.entries_end; ++i) {
    if (!ready(i)) continue;
    CHECK(out.home_of[i] < out.slabs.size());
    for (const u32 record : records(i)) {
      const auto found = owner.find(table->index().record(record).place.load());
      CHECK(found != owner.end() && found->second == i);
      owner.erase(found);
    }
  }
  CHECK(owner.empty());
}

}  // namespace adopt_world
