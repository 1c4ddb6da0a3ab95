#include "lease.hpp"

#include <algorithm>
#include <bit>

#include "client.hpp"
#include "mapping.hpp"
#include "mutants.hpp"

namespace kvd {

// Stores with release: an evictor that reads a later value of this word knows that the reads under the lease before it
// are over. The mark goes up first, so that a scan that misses the word cannot miss it for the mark.
u32 Hazards::place(u32 entry, u64 generation) {
  u32 word;
  if (used_ < fresh_) {  // the lowest free one, so that the mark can fall
    while (free_[lowest_] == 0) ++lowest_;
    word = lowest_ * 64 + static_cast<u32>(std::countr_zero(free_[lowest_]));
    free_[lowest_] &= free_[lowest_] - 1;
  } else if (fresh_ < max_) {
    if (fresh_ / 64 == free_.size()) free_.push_back(0);
    word = fresh_++;
    if (fresh_ > high_now_) high_->store(high_now_ = fresh_, std::memory_order_release);
  } else {
    fail<HazardsExhausted>("all ", max_, " hazard words of this client are in use: release leases, or attach with more");
  }
  words_[word].store(hazard_of(generation, entry), std::memory_order_release);
  ++used_;
  return word;
}

void Hazards::clear(u32 word) noexcept {
  words_[word].store(0, std::memory_order_release);
  --used_;
  free_[word / 64] |= u64{1} << (word % 64);
  lowest_ = std::min(lowest_, word / 64);
  if (word + 1 != fresh_) return;
  // Each step down was a step up: what this costs, placing has paid.
  while (fresh_ > 0 && is_free(fresh_ - 1)) {
    --fresh_;
    free_[fresh_ / 64] &= ~(u64{1} << (fresh_ % 64));
  }
  if (high_now_ - fresh_ >= shrink_by) high_->store(high_now_ = fresh_, std::memory_order_release);
}

LeaseSet::LeaseSet(std::shared_ptr<Client> client, u32 capacity, u32 asked)
    : client_(std::move(client)),
      asked_(asked),
      many_(capacity > 1 ? new Leased[capacity] : nullptr),
      items_(many_ ? many_.get() : &one_) {
  client_->link(*this);
}

LeaseSet::~LeaseSet() {
  client_->unlink(*this);
  if (held_ == 0 || client_->forked()) return;
  client_->count(count_leases_released, held_);
  for (u32 i = 0; i < size_; ++i) let_go(items_[i]);
  client_->unmap_if_done();
}

void LeaseSet::unref() noexcept {
  if (--refs_ == 0) delete this;
}

const Leased& LeaseSet::checked(u32 i) const {
  client_->check_process();
  if (items_[i].word == none32 || items_[i].released) fail<std::runtime_error>("lease ", i, " was released");
  return items_[i];
}

void LeaseSet::add(u32 entry, u64 generation, u32 key) {
  u32 word = none32;
  try {
    word = client_->hazards().place(entry, generation);
  } catch (...) {
    keep_if([](const Leased&) { return false; });  // all or nothing
    throw;
  }
  items_[size_++] = {generation, entry, key, word, 0, false};
  ++held_;
}

void LeaseSet::let_go(Leased& item) noexcept {
  if (item.word == none32) return;
  step("release.held");
  client_->hazards().clear(item.word);
  step("release.cleared");
  item.word = none32;
  --held_;
}

void LeaseSet::drop_export(u32 i) noexcept {
  Leased& item = items_[i];
  --exports_;
  if (--item.exports != 0 || !item.released || client_->forked()) return;
  if (item.word == none32) return;
  let_go(item);
  client_->count(count_leases_released, 1);
  client_->unmap_if_done();
}

u32 LeaseSet::release(u32 begin, u32 end) {
  client_->check_process();
  u32 deferred = 0, released = 0;
  for (u32 i = begin; i < end; ++i) {
    Leased& item = items_[i];
    if (item.word == none32) continue;
    item.released = true;
    if (item.exports != 0 && !mutant::exports) {
      ++deferred;
    } else {
      let_go(item);
      ++released;
    }
  }
  if (released != 0) client_->count(count_leases_released, released);
  client_->unmap_if_done();
  return deferred;
}

}  // namespace kvd
