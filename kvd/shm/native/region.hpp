// The daemon's side of one CLIENT region.
//
// Owns: the mapping, both ring ends of the daemon, the cursor into the touch ring. Called by: the daemon's thread.
// Invariant (I6): the client can write every byte here at any time. Sizes and offsets are kept privately, cursors and
// counts are bounded before use, what is parsed is copied first.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "mapping.hpp"
#include "ring.hpp"

namespace kvd {

struct RegionShape {
  u32 slot;
  u64 epoch;
  u32 sq_bytes, cq_bytes, touch_records, hazards_max;
};

// Where the parts of a region lie; the client checks a header against the same sums.
struct RegionParts {
  u64 sq, cq, touches, hazards, bytes;
  static RegionParts of(u32 sq_bytes, u32 cq_bytes, u32 touch_records, u32 hazards_max);  // std::invalid_argument
};

class Region {
 public:
  Region(int fd, const RegionShape& shape);
  // The region of a client of an earlier daemon: mapped as it is, only revoked and scanned. Its shape is what META said.
  struct Existing {};
  Region(int fd, const RegionShape& shape, Existing);

  // From the next fence on its client takes no lease any more. What it holds, each_hazard shows.
  void revoke() noexcept { header_->revoked.store(1, std::memory_order_seq_cst); }

  Consumer& submissions() { return guard_.check("a client region"), sq_; }
  Producer& completions() { return guard_.check("a client region"), cq_; }
  std::vector<Touch> touches();  // what is still there of the rows since the last call
  std::array<u64, counters_count> counters() const;
  const RegionShape& shape() const noexcept { return shape_; }
  u64 bytes() const noexcept { return mapping_->size(); }
  const std::shared_ptr<Mapping>& mapping() const noexcept { return mapping_; }

  // Calls visit(entry, generation's low 32 bits) for each hazard word that is set. A word that is released meanwhile
  // was read with acquire: what its holder read before happened before.
  template <class Visit>
  void each_hazard(Visit&& visit) const {
    const u32 high = std::min(header_->hazards_high.load(std::memory_order_acquire), shape_.hazards_max);
    for (u32 i = 0; i < high; ++i) {
      const u64 word = hazards_[i].load(std::memory_order_acquire);
      if (word_entry(word) != none32) visit(word_entry(word), static_cast<u32>(word >> 32));
    }
  }

 private:
  void locate(const RegionParts& parts);
  RegionShape shape_;
  ForkGuard guard_;
  std::shared_ptr<Mapping> mapping_;
  ClientHeader* header_;
  Shared<u64>* hazards_;
  TouchRow* touches_;
  Consumer sq_;
  Producer cq_;
  u64 touch_cursor_ = 0;
};

}  // namespace kvd
