// A client's side: looking up, leasing and reading without the daemon, and its end of the rings.
//
// Owns: the mappings of META (read-only), CLIENT and POOL, the hazard words, both ring ends. Called by: Python bindings
// with the GIL held, or one thread of a C++ test. Throws std::invalid_argument (bad argument), std::out_of_range (a member
// that is not there), std::runtime_error (closed, forked, or META leads nowhere), HazardsExhausted.
// Invariant (I3): nothing of a family is read before its hazard was placed, one fence passed and sg was found unchanged.
#pragma once

#include <memory>
#include <vector>

#include "family.hpp"
#include "index.hpp"
#include "lease.hpp"
#include "ring.hpp"

namespace kvd {

// Who may write into the pool right now: counted with the GIL held, shared by a client and its writable views.
struct Writers {
  u32 live = 0;                 // exports of writable views, and fills under way
  const char* ended = nullptr;  // why no further one is handed out
};

// Reserved slots, checked, and what keeps them mapped while the GIL is released.
struct Slots {
  std::vector<u8*> addresses;
  std::vector<std::shared_ptr<Mapping>> kept;
};

struct Member {
  u8* address;
  u64 size, checksum;
  u16 heads[2], layers[2];
};

class Client : public std::enable_shared_from_this<Client> {
 public:
  static std::shared_ptr<Client> open(int meta_fd, int client_fd, const std::vector<int>& segment_fds, bool writable);
  Client(std::shared_ptr<Mapping> meta, std::shared_ptr<Mapping> region, std::vector<std::shared_ptr<Mapping>> segments);

  const Index& index() const { return check(), index_; }
  u32 slot() const noexcept { return slot_; }
  u32 match(const u8* keys, u64 count, u64 request);
  void present(const u8* keys, u64 count, PresentRow* rows) const;
  LeaseRef acquire(const u8* keys, u64 count, u64 request, bool each);

  // The same by the rules of a geometry: the longest usable prefix, and leases on the chunks that it needs (the last
  // ones). A split that the rules do not know shortens the answer and is named by the walk.
  PrefixWalk match_family(const u8* keys, u64 count, const FamilyRules& rules, u64 request);
  LeaseRef acquire_family(const u8* keys, u64 count, const FamilyRules& rules, u64 request, PrefixWalk& walk);
  PresentRow present_of(u32 entry) const noexcept;  // as good as the sg or the hazard that the caller holds
  LeaseSet* fetch(const u8* key, u32 member, u64 request);  // nullptr: a miss
  // `keys`: one a descriptor, that its family has to be of; nullptr: of any.
  LeaseRef adopt(const u8* descriptors, u64 count, const u8* keys = nullptr);
  Member member(const Leased& lease, u32 member) const;
  const std::shared_ptr<Mapping>& writable(u64 place, u64 size, u8*& address) const;
  Slots slots(const u64* places, const u64* sizes, u64 count) const;
  const std::shared_ptr<Writers>& writers() const noexcept { return writers_; }
  const std::shared_ptr<Mapping>& segment(u32 segment) const;

  Producer& submissions() { return check(), sq_; }
  Consumer& completions() { return check(), cq_; }
  enum Wait : int { wait_gone = -1, wait_deadline = 0, wait_ready = 1, wait_interrupted = 2, wait_again = 3, wait_stirred = 4 };
  // Until a byte comes on the wake socket, or the eventfd `stir_fd` (or -1) is written to. Touches no memory of the
  // region: run it without the GIL.
  static Wait poll_once(int wake_fd, int stir_fd, u64 deadline_ns);

  void count(Counter counter, u64 amount) noexcept {
    Shared<u64>& word = header_->counters[counter];
    word.store(word.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
  }
  u64 counter(Counter counter) const { return check(), header_->counters[counter].load(std::memory_order_relaxed); }
  u32 close();  // releases what no view keeps; returns the leases that are left and who may still write
  // The daemon is gone: nothing is found any more. Leases stay, so does all that they need.
  void lose() noexcept { lost_ = true; }
  bool lost() const noexcept { return lost_ || header_gone(); }
  void retire();      // as lose, and unmapped with the last lease
  bool left() const;  // retired, and neither a lease nor a writable view is there any more

  // For LeaseSet.
  Hazards& hazards() noexcept { return hazards_; }
  const Hazards& hazards() const noexcept { return hazards_; }
  bool forked() const noexcept { return guard_.forked(); }
  void check_process() const { guard_.check("a client"); }
  void check() const;
  void link(LeaseSet& set) noexcept;
  void unlink(LeaseSet& set) noexcept;
  void unmap_if_done() noexcept;

 private:
  static constexpr u64 patience_ns = 2'000'000;  // how long an adoption waits for a scan to be over
  struct Asked {
    u64 request, started_ns;
    const u8* keys;
    u64 count;
  };
  void revalidate(LeaseSet& set, bool each, bool patient) const;
  void touch(TouchKind kind, const Asked& asked, u64 matched, u64 missed, const LeaseSet* set, Hit deepest, u64 bytes);

  ForkGuard guard_;
  std::shared_ptr<Mapping> meta_, region_;
  std::vector<std::shared_ptr<Mapping>> segments_;
  Index index_;
  ClientHeader* header_ = nullptr;
  TouchRow* touches_ = nullptr;
  Hazards hazards_{nullptr, 0, nullptr};
  Producer sq_{RingWords{}};
  Consumer cq_{RingWords{}};
  u64 touched_ = 0;
  u32 touch_records_ = 0, slot_ = 0;
  bool header_gone() const noexcept;
  bool closed_ = false, lost_ = false, retired_ = false;
  std::shared_ptr<Writers> writers_ = std::make_shared<Writers>();
  LeaseSet* sets_ = nullptr;
};

}  // namespace kvd
