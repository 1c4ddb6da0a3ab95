// Which prefix of a prompt can be loaded: the native twin of kvd/layout/family.py, which says why.
//
// Owns: the rules of one geometry at one chunk size, and what members each group has under the splits met so far. Called
// by: Client and the binding, with the GIL held. Invariant: answers equal those of Completeness.usable_chunks; a family
// whose split no rule knows ends the walk and is named, so that the caller can add it and ask again.
#pragma once

#include <array>
#include <vector>

#include "layout.hpp"

namespace kvd {

class FamilyRules {
 public:
  enum Kind : u32 { full = 0, window = 1, chunked = 2, state = 3 };
  static constexpr u64 groups_max = members_max;
  struct Group {
    u32 kind, window;  // window in tokens, 0 for full and state
  };
  struct Masks {
    u64 low, high;  // bits of one group's members
  };

  // std::invalid_argument names what cannot be.
  FamilyRules(u64 chunk_tokens, std::vector<Group> groups);

  // One mask a group; none at all: families of that split do not count.
  void add(u32 split, std::vector<Masks> masks);

  const std::vector<Group>& groups() const noexcept { return groups_; }
  // The masks of a split; nullptr if it was never added. An empty list is one that does not count.
  const std::vector<Masks>* masks(u32 split) const noexcept;
  // The first chunk that a prefix of `chunks` needs; it needs all from there on (none: `chunks`).
  u64 first_needed(u64 chunks) const noexcept;
  u64 first_chunk(const Group& group, u64 chunks) const noexcept;

 private:
  struct Split {
    u32 code;
    std::vector<Masks> masks;
  };
  u64 chunk_tokens_;
  std::vector<Group> groups_;
  std::vector<Split> splits_;
};

// Takes the families of a chain in order and keeps the longest usable prefix.
class PrefixWalk {
 public:
  explicit PrefixWalk(const FamilyRules& rules) noexcept : rules_(rules) { runs_.fill(0); }

  // The next chunk's family: its present bits (0, 0: there is none) and its split. Returns whether a longer prefix can
  // still be usable.
  bool step(u64 low, u64 high, u32 split) noexcept;
  u32 usable() const noexcept { return usable_; }
  int unknown_split() const noexcept { return unknown_; }  // -1: none was met

 private:
  const FamilyRules& rules_;
  std::array<u32, FamilyRules::groups_max> runs_;  // a group's whole chunks in a row, up to the last one
  u32 taken_ = 0, usable_ = 0;
  int unknown_ = -1;
};

}  // namespace kvd
