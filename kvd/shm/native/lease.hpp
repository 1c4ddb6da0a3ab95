// Hazard words of one client, and the leases that stand on them.
//
// Owns: which hazard words are in use; how many views hang on each lease. Called by: Client, with the GIL held.
// Invariants: I3; a word is cleared when its lease is released and no view of it is alive, and not before; a set of
// leases that is dropped clears what it still holds.
//
//   leased  HELD -> FREE (release, no views)   HELD -> RELEASED -> FREE (release with views alive; the last one dies)
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "layout.hpp"

namespace kvd {

class Client;

struct HazardsExhausted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Hazards {
 public:
  Hazards(Shared<u64>* words, u32 max, Shared<u32>* high) : words_(words), max_(max), high_(high) {}

  // Returns the number of the word. The caller fences before it reads sg again.
  u32 place(u32 entry, u64 generation);
  void clear(u32 word) noexcept;
  u32 used() const noexcept { return used_; }

 private:
  static constexpr u32 shrink_by = 4096;  // the mark falls in steps: who leases and releases at the top leaves it alone
  bool is_free(u32 word) const noexcept { return (free_[word / 64] >> (word % 64) & 1) != 0; }
  Shared<u64>* words_;
  u32 max_;
  Shared<u32>* high_;
  u32 high_now_ = 0;   // what *high_ says
  u32 fresh_ = 0;      // words from here on are free, the one before is not
  u32 used_ = 0;
  u32 lowest_ = 0;     // below this word of free_ none is free
  std::vector<u64> free_;  // a bit a word below fresh_: free again
};

struct Leased {
  u64 generation;
  u32 entry;
  u32 key;      // position in what was asked for
  u32 word;     // none32: nothing is held any more
  u32 exports;  // views alive
  bool released;
};

// What one acquire, fetch or adopt returned. Reference counted by hand: its leases and views share it.
class LeaseSet {
 public:
  LeaseSet(std::shared_ptr<Client> client, u32 capacity, u32 asked);
  LeaseSet(const LeaseSet&) = delete;
  LeaseSet& operator=(const LeaseSet&) = delete;

  u32 size() const noexcept { return size_; }
  u32 held() const noexcept { return held_; }
  u32 exports() const noexcept { return exports_; }
  u32 asked() const noexcept { return asked_; }
  Client& client() const noexcept { return *client_; }
  const Leased& operator[](u32 i) const noexcept { return items_[i]; }
  const Leased& checked(u32 i) const;  // std::runtime_error: released, or in a forked child

  // While the set is being made: place a hazard; take back what did not stand.
  void add(u32 entry, u64 generation, u32 key);
  template <class Keep>
  void keep_if(Keep&& keep) {
    u32 kept = 0;
    for (u32 i = 0; i < size_; ++i) {
      if (keep(items_[i])) items_[kept++] = items_[i];
      else let_go(items_[i]);
    }
    size_ = kept;
  }

  void add_export(u32 i) noexcept { ++items_[i].exports, ++exports_; }
  void drop_export(u32 i) noexcept;
  u32 release(u32 begin, u32 end);  // returns how many of them views keep alive for now

  void ref() noexcept { ++refs_; }
  void unref() noexcept;

  LeaseSet *next = nullptr, *previous = nullptr;  // the client's list

 private:
  ~LeaseSet();
  void let_go(Leased& item) noexcept;
  std::shared_ptr<Client> client_;
  u32 refs_ = 0, size_ = 0, held_ = 0, exports_ = 0;
  const u32 asked_;
  Leased one_;  // a fetch needs no second allocation
  std::unique_ptr<Leased[]> many_;
  Leased* items_;
};

class LeaseRef {
 public:
  explicit LeaseRef(LeaseSet* set) noexcept : set_(set) { set_->ref(); }
  LeaseRef(const LeaseRef& other) noexcept : LeaseRef(other.set_) {}
  LeaseRef& operator=(const LeaseRef&) = delete;
  ~LeaseRef() { set_->unref(); }
  LeaseSet* operator->() const noexcept { return set_; }
  LeaseSet& operator*() const noexcept { return *set_; }

 private:
  LeaseSet* set_;
};

}  // namespace kvd
