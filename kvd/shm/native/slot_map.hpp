// Which slots of the pool are taken, by the places and sizes that the records of an old META name.
//
// Owned by one Adopter. Invariant: slabs do not overlap, and a slot that two records name is known to be.
#pragma once

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "adopt.hpp"

namespace kvd {

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

}  // namespace kvd
