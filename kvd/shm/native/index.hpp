// Reading META: the bucket index, entries and records, for the daemon and for clients alike.
//
// Owns: nothing; it points into a mapping that its holder keeps. Called by: Table and Client, any thread (reads only).
// Invariants: buckets are hints, an entry is believed only while its sg is READY and its identity is equal; every
// number that comes out of META is bounded before it is used as an index.
#pragma once

#include <cstring>
#include <stdexcept>

#include "layout.hpp"
#include "mapping.hpp"
#include "mutants.hpp"

namespace kvd {

struct Key {
  u64 words[4];
  static Key load(const u8* bytes) {
    Key key;
    std::memcpy(key.words, bytes, sizeof key.words);
    return key;
  }
  bool operator==(const Key&) const = default;
};

struct Spot {
  u32 first, second, tag;  // both buckets of a key
};

struct Hit {
  u32 entry = none32;  // none32: not there
  u64 sg = 0;          // as it was before the identity was compared
  explicit operator bool() const { return entry != none32; }
};

struct MetaShape {
  u32 families_max, buckets_count, records_max, segments_count, clients_max;
  u64 segments_offset, clients_offset, buckets_offset, entries_offset, records_offset, cold_offset,
      meta_bytes;
  static MetaShape of(u64 families_max, u64 records_max, u64 segments, u64 clients_max);  // std::invalid_argument
};

class Index {
 public:
  Index() = default;
  // Checks the header of a META; throws std::runtime_error naming what does not hold.
  explicit Index(const Mapping& meta);

  const MetaShape& shape() const noexcept { return shape_; }
  u64 epoch() const noexcept { return epoch_; }
  MetaHeader& header() const noexcept { return *header_; }
  Segment& segment(u32 i) const noexcept { return segments_[i]; }
  ClientSlot& client(u32 i) const noexcept { return clients_[i]; }
  Bucket& bucket(u32 i) const noexcept { return buckets_[i]; }
  Entry& entry(u32 i) const noexcept { return entries_[i]; }
  Record& record(u32 i) const noexcept { return records_[i]; }
  Cold& cold(u32 i) const noexcept { return cold_[i]; }

  Spot locate(const Key& key) const noexcept {
    const u64 hash = (key.words[0] ^ seed_) * 0x9E3779B97F4A7C15ULL;
    const u32 first = static_cast<u32>(hash >> shift_), tag = static_cast<u32>(key.words[1]);
    return {first, (first ^ (mix32(tag) | 1)) & mask_, tag};
  }

  // Whether an entry is of that key. Stands as long as its generation does: read it under a hazard, or read sg again.
  bool names(u32 number, const Key& key) const noexcept {
    u64 difference = 0;
    for (u32 i = 0; i < 4; ++i) difference |= entries_[number].identity[i].load(std::memory_order_relaxed) ^ key.words[i];
    return mutant::identity || difference == 0;
  }

  Hit find(const Key& key) const noexcept {
    const Spot spot = locate(key);
    __builtin_prefetch(&buckets_[spot.second]);
    return find(key, spot);
  }

  // Finds `count` keys of 32 bytes in order, overlapping their cache misses: while one key is compared, the entries of
  // the next `stage` keys and the buckets of the `stage` after them are on their way. sink(i, hit) returns whether to
  // go on.
  template <class Sink>
  void find_each(const u8* keys, u64 count, Sink&& sink) const {
    constexpr u64 stage = 16, window = 64;
    struct Flight {
      Key key;
      Spot spot;
      u32 candidate;
      bool possible;
    } flights[window];
    for (u64 i = 0; i < count + 2 * stage; ++i) {
      if (i < count) {
        Flight& flight = flights[i % window];
        flight.key = Key::load(keys + identity_size * i);
        flight.spot = locate(flight.key);
        __builtin_prefetch(&buckets_[flight.spot.first]);
        __builtin_prefetch(&buckets_[flight.spot.second]);
      }
      if (i >= stage && i - stage < count) {
        Flight& flight = flights[(i - stage) % window];
        flight.candidate = candidate(flight.spot, flight.possible);
        if (flight.candidate != none32) __builtin_prefetch(&entries_[flight.candidate]);
      }
      if (i >= 2 * stage) {
        const Flight& flight = flights[(i - 2 * stage) % window];
        Hit hit = flight.candidate != none32 ? check(flight.candidate, flight.key) : Hit{};
        if (!hit && flight.possible) hit = find(flight.key, flight.spot);
        if (!sink(i - 2 * stage, hit)) return;
      }
    }
  }

  // Whether a found family has all its members. As good as the sg it was found with.
  bool complete(u32 number) const noexcept {
    const Entry& entry = entries_[number];
    const u32 count = entry.members_count.load(std::memory_order_relaxed);
    const u64 low = entry.present[0].load(std::memory_order_acquire);
    if (count <= 64) return count != 0 && (~low << (64 - count)) == 0;
    if (count > members_max) return false;
    return low == ~u64{0} && (~entry.present[1].load(std::memory_order_acquire) << (128 - count)) == 0;
  }
  bool has(u32 number, u32 member) const noexcept {
    return (entries_[number].present[member / 64].load(std::memory_order_acquire) >> (member % 64) & 1) != 0;
  }
  // Whether the sg of a hit still stands; orders the caller's reads before it.
  bool unchanged(const Hit& hit) const noexcept {
    std::atomic_thread_fence(std::memory_order_acquire);
    return entries_[hit.entry].sg.load(std::memory_order_relaxed) == hit.sg;
  }
  // Brings the line of a family's first record, whatever it says: a hint.
  void prefetch_record(u32 entry) const noexcept {
    const u32 first = this->entry(entry).record_first.load(std::memory_order_relaxed);
    if (first < shape().records_max) __builtin_prefetch(&record(first));
  }
  // The record of a member, none32 if it is not there. std::runtime_error: the list leads nowhere. The caller holds a
  // hazard on the entry, or is the daemon.
  u32 find_record(u32 entry, u32 member) const;
  void check_record(u32 number) const {
    if (number >= shape_.records_max) {
      fail<std::runtime_error>("META names record ", number, " of ", shape_.records_max);
    }
  }

 private:
  static u32 mix32(u32 x) noexcept {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
  }

  // The first entry under an equal tag in either bucket; possible: some slot has that tag.
  u32 candidate(const Spot& spot, bool& possible) const noexcept {
    const Bucket &first = buckets_[spot.first], &second = buckets_[spot.second];
    u32 hits = 0;
    for (u32 i = 0; i < bucket_slots; ++i) {
      hits |= u32{first.slots[i].load(std::memory_order_relaxed) >> 32 == spot.tag} << i;
      hits |= u32{second.slots[i].load(std::memory_order_relaxed) >> 32 == spot.tag} << (i + bucket_slots);
    }
    possible = hits != 0;
    if (!possible) return none32;
    const u32 i = static_cast<u32>(std::countr_zero(hits));
    const Bucket& bucket = i < bucket_slots ? first : second;
    const u32 entry = word_entry(bucket.slots[i % bucket_slots].load(std::memory_order_relaxed));
    return entry < shape_.families_max ? entry : none32;
  }

  Hit check(u32 number, const Key& key) const noexcept {
    const u64 sg = entries_[number].sg.load(std::memory_order_acquire);
    if (sg_state(sg) != entry_ready || !names(number, key)) return {};
    return {number, sg};
  }

  Hit find(const Key& key, const Spot& spot) const noexcept {
    for (const u32 bucket : {spot.first, spot.second}) {
      for (const Shared<u64>& slot : buckets_[bucket].slots) {
        const u64 word = slot.load(std::memory_order_relaxed);
        if (word >> 32 != spot.tag || word_entry(word) >= shape_.families_max) continue;
        if (const Hit hit = check(word_entry(word), key)) return hit;
      }
    }
    return {};
  }

  MetaHeader* header_ = nullptr;
  Segment* segments_ = nullptr;
  ClientSlot* clients_ = nullptr;
  Bucket* buckets_ = nullptr;
  Entry* entries_ = nullptr;
  Record* records_ = nullptr;
  Cold* cold_ = nullptr;
  MetaShape shape_{};
  u64 seed_ = 0, epoch_ = 0;
  u32 shift_ = 0, mask_ = 0;
};

}  // namespace kvd
