#include "client.hpp"

#include <algorithm>
#include <array>

#include "mutants.hpp"
#include "region.hpp"

namespace kvd {

using std::memory_order_acquire, std::memory_order_relaxed, std::memory_order_release;

std::shared_ptr<Client> Client::open(int meta_fd, int client_fd, const std::vector<int>& segment_fds, bool writable) {
  auto meta = Mapping::of(meta_fd, false, Mapping::Pages::huge, "META");
  auto region = Mapping::of(client_fd, true, Mapping::Pages::small, "client region");
  std::vector<std::shared_ptr<Mapping>> segments;
  for (const int fd : segment_fds) segments.push_back(Mapping::of(fd, writable, Mapping::Pages::huge, "segment"));
  return std::make_shared<Client>(std::move(meta), std::move(region), std::move(segments));
}

Client::Client(std::shared_ptr<Mapping> meta, std::shared_ptr<Mapping> region,
               std::vector<std::shared_ptr<Mapping>> segments)
    : meta_(std::move(meta)), region_(std::move(region)), segments_(std::move(segments)), index_(*meta_) {
  header_ = region_->at<ClientHeader>(0, 1, "client header");
  const ClientHeader& header = *header_;
  if (header.magic != client_magic || header.version != layout_version || header.header_size != header_bytes) {
    fail<std::runtime_error>("client region: magic or version is not that of layout ", layout_version);
  }
  if (header.epoch != index_.epoch()) fail<std::runtime_error>("client region and META are of different epochs");
  const RegionParts parts = RegionParts::of(header.sq_bytes, header.cq_bytes, header.touch_records, header.hazards_max);
  if (header.sq_offset != parts.sq || header.cq_offset != parts.cq || header.touch_offset != parts.touches ||
      header.hazards_offset != parts.hazards || region_->size() != parts.bytes) {
    fail<std::runtime_error>("client region: offsets do not follow from its sizes");
  }
  if ((header.sq_tail.load(memory_order_relaxed) | header.cq_head.load(memory_order_relaxed) |
       header.touch_tail.load(memory_order_relaxed) | header.hazards_high.load(memory_order_relaxed)) != 0) {
    fail<std::runtime_error>("client region: it is in use already; attach for one of your own");
  }
  if (segments_.size() != index_.shape().segments_count) {
    fail<std::runtime_error>("META has ", index_.shape().segments_count, " segments, ", segments_.size(), " were given");
  }
  for (u32 i = 0; i < segments_.size(); ++i) {
    if (segments_[i] != nullptr && segments_[i]->size() != index_.segment(i).size_bytes) {
      fail<std::runtime_error>("segment ", i, " has ", segments_[i]->size(), " bytes, META says ",
                               index_.segment(i).size_bytes);
    }
  }
  slot_ = header.client_slot;
  touch_records_ = header.touch_records;
  touches_ = region_->at<TouchRow>(parts.touches, touch_records_, "touch ring");
  hazards_ = Hazards(region_->at<Shared<u64>>(parts.hazards, header.hazards_max, "hazards"), header.hazards_max,
                     &header_->hazards_high);
  u8* base = region_->data();
  sq_ = Producer({base + parts.sq, header.sq_bytes, &header_->sq_tail, &header_->sq_head, &header_->daemon_sleeping});
  cq_ = Consumer({base + parts.cq, header.cq_bytes, &header_->cq_tail, &header_->cq_head, &header_->client_sleeping});
}

void Client::check() const {
  check_process();
  if (retired_) fail<std::runtime_error>("the daemon that this belonged to is gone");
  if (closed_) fail<std::runtime_error>("the client is closed");
}

// --- life

void Client::link(LeaseSet& set) noexcept {
  set.next = sets_;
  if (sets_ != nullptr) sets_->previous = &set;
  sets_ = &set;
}

void Client::unlink(LeaseSet& set) noexcept {
  (set.previous != nullptr ? set.previous->next : sets_) = set.next;
  if (set.next != nullptr) set.next->previous = set.previous;
}

u32 Client::close() {
  check_process();
  closed_ = true;
  if (writers_->ended == nullptr) writers_->ended = "the client is closed";
  for (LeaseSet* set = sets_; set != nullptr; set = set->next) set->release(0, set->size());
  unmap_if_done();
  return hazards_.used() + writers_->live;
}

bool Client::header_gone() const noexcept {
  return !mutant::revoked && !forked() && region_ != nullptr && header_->revoked.load(memory_order_acquire) != 0;
}

void Client::retire() {
  check_process();
  if (retired_) return;
  lost_ = retired_ = closed_ = true;
  writers_->ended = "the daemon that this belonged to is gone";
  unmap_if_done();
}

bool Client::left() const {
  check_process();
  return retired_ && hazards_.used() == 0 && writers_->live == 0;
}

void Client::unmap_if_done() noexcept {
  if (!closed_ || hazards_.used() != 0) return;
  meta_.reset();
  region_.reset();
  segments_.clear();
}

// --- looking up

u32 Client::match(const u8* keys, u64 count, u64 request) {
  check();
  const Asked asked{request, request != 0 ? now_ns() : 0, keys, count};
  u64 matched = 0;
  Hit deepest;
  const bool here = !lost();
  index_.find_each(keys, count, [&](u64, const Hit& hit) {
    if (!here || !hit || !index_.complete(hit.entry) || !index_.unchanged(hit)) return false;
    deepest = hit;
    ++matched;
    return true;
  });
  this->count(count_lookups, 1);
  this->count(count_keys_asked, count);
  this->count(count_keys_hit, matched);
  if (request != 0) touch(touch_match, asked, matched, matched, nullptr, deepest, 0);
  return static_cast<u32>(matched);
}

void Client::present(const u8* keys, u64 count, PresentRow* rows) const {
  check();
  std::fill_n(rows, count, PresentRow{});
  if (lost()) return;
  index_.find_each(keys, count, [&](u64 i, const Hit& hit) {
    if (!hit) return true;
    const PresentRow row = present_of(hit.entry);
    if (index_.unchanged(hit)) rows[i] = row;
    return true;
  });
}

// Acquire: who sees a bit sees the record behind it.
PresentRow Client::present_of(u32 number) const noexcept {
  const Entry& entry = index_.entry(number);
  return {{entry.present[0].load(memory_order_acquire), entry.present[1].load(memory_order_acquire)},
          entry.split.load(memory_order_relaxed),
          entry.members_count.load(memory_order_relaxed),
          1,
          0};
}

PrefixWalk Client::match_family(const u8* keys, u64 count, const FamilyRules& rules, u64 request) {
  check();
  const Asked asked{request, request != 0 ? now_ns() : 0, keys, count};
  PrefixWalk walk(rules);
  Hit deepest;
  const bool here = !lost();
  index_.find_each(keys, count, [&](u64, const Hit& hit) {
    PresentRow row{};
    if (hit && here) {
      row = present_of(hit.entry);
      if (!index_.unchanged(hit)) row = {};
    }
    const u32 before = walk.usable();
    const bool more = walk.step(row.present[0], row.present[1], row.split);
    if (walk.usable() != before) deepest = hit;
    return more;
  });
  this->count(count_lookups, 1);
  this->count(count_keys_asked, count);
  this->count(count_keys_hit, walk.usable());
  if (request != 0) touch(touch_match, asked, walk.usable(), walk.usable(), nullptr, deepest, 0);
  return walk;
}

// --- leases

// I3, second half, for all hazards of a set. What was read of an entry since its sg was read first stands with it.
void Client::revalidate(LeaseSet& set, bool each, bool patient) const {
  step("lease.hazard");
  if (!mutant::reader_fence) std::atomic_thread_fence(std::memory_order_seq_cst);
  step("lease.fenced");
  // A daemon that took over this memory looks at hazards after it has revoked: it sees those of this set, or this sees it.
  if (lost()) return set.keep_if([](const Leased&) { return false; });
  if (mutant::revalidate) return;
  bool going = true;
  const u64 until = patient ? now_ns() + patience_ns : 0;  // for the whole set
  set.keep_if([&](const Leased& item) {
    const Shared<u64>& sg = index_.entry(item.entry).sg;
    u64 now = sg.load(memory_order_acquire);
    // The daemon looks whether this family is held: it goes back to READY if it is, in less time than a scan takes.
    while (patient && now == sg_of(item.generation, entry_evicting) && now_ns() < until) {
      now = sg.load(memory_order_acquire);
    }
    const bool stands = now == sg_of(item.generation, entry_ready);
    going = going && (stands || each);
    return going && stands;
  });
}

LeaseRef Client::acquire(const u8* keys, u64 count, u64 request, bool each) {
  check();
  const Asked asked{request, now_ns(), keys, count};
  LeaseRef set(new LeaseSet(shared_from_this(), static_cast<u32>(count), static_cast<u32>(count)));
  index_.find_each(keys, count, [&](u64 i, const Hit& hit) {
    if (!hit || !index_.complete(hit.entry)) return each;
    step("lease.found");
    set->add(hit.entry, sg_generation(hit.sg), static_cast<u32>(i));
    return true;
  });
  revalidate(*set, each, false);
  u64 missed = 0;
  while (missed < set->size() && (*set)[static_cast<u32>(missed)].key == missed) ++missed;
  this->count(count_lookups, 1);
  this->count(count_keys_asked, count);
  this->count(count_keys_hit, set->size());
  this->count(count_leases, set->size());
  touch(touch_acquire, asked, set->size(), missed, &*set, {}, 0);
  return set;
}

// Hazards on all that may count, one fence, and only then the bits: those that were there at the look-up could be of an
// older generation. What the prefix does not need is let go at once.
LeaseRef Client::acquire_family(const u8* keys, u64 count, const FamilyRules& rules, u64 request, PrefixWalk& walk) {
  check();
  const Asked asked{request, now_ns(), keys, count};
  LeaseRef set(new LeaseSet(shared_from_this(), static_cast<u32>(count), static_cast<u32>(count)));
  PrefixWalk ahead(rules);
  index_.find_each(keys, count, [&](u64 i, const Hit& hit) {
    const PresentRow row = hit ? present_of(hit.entry) : PresentRow{};
    const bool more = ahead.step(row.present[0], row.present[1], row.split);
    if (hit && (more || ahead.unknown_split() >= 0)) set->add(hit.entry, sg_generation(hit.sg), static_cast<u32>(i));
    return more;
  });
  revalidate(*set, true, false);
  u32 next = 0;
  bool more = true;
  for (u32 i = 0; more && i < set->size(); ++i, ++next) {
    for (; more && next < (*set)[i].key; ++next) more = walk.step(0, 0, 0);
    const PresentRow row = present_of((*set)[i].entry);
    more = more && walk.step(row.present[0], row.present[1], row.split);
  }
  for (; more && next < count; ++next) more = walk.step(0, 0, 0);  // a stretch may end where nothing is needed
  const u64 usable = walk.usable(), first = rules.first_needed(usable);
  set->keep_if([&](const Leased& item) { return item.key >= first && item.key < usable; });
  this->count(count_lookups, 1);
  this->count(count_keys_asked, count);
  this->count(count_keys_hit, usable);
  this->count(count_leases, set->size());
  touch(touch_acquire, asked, usable, usable, &*set, {}, 0);
  return set;
}

LeaseSet* Client::fetch(const u8* key, u32 member, u64 request) {
  check();
  if (member >= members_max) fail<std::invalid_argument>("member ", member, ": 0 .. ", members_max - 1, " is allowed");
  const Asked asked{request, now_ns(), key, 1};
  this->count(count_fetches, 1);
  const Hit hit = index_.find(Key::load(key));
  if (!hit || !index_.has(hit.entry, member)) {
    touch(touch_fetch, asked, 0, 0, nullptr, {}, 0);
    return nullptr;
  }
  index_.prefetch_record(hit.entry);  // its line comes while the hazard is placed and fenced
  LeaseSet* set = new LeaseSet(shared_from_this(), 1, 1);
  const LeaseRef hold(set);
  set->add(hit.entry, sg_generation(hit.sg), 0);
  revalidate(*set, false, false);
  const u32 matched = set->size();
  const u64 bytes = matched != 0 ? this->member((*set)[0], member).size : 0;
  this->count(count_leases, matched);
  touch(touch_fetch, asked, matched, matched, set, {}, bytes);
  if (matched == 0) return nullptr;
  set->ref();  // the caller's, taken over by whoever wraps it
  return set;
}

LeaseRef Client::adopt(const u8* descriptors, u64 count, const u8* keys) {
  check();
  const Asked asked{0, now_ns(), nullptr, count};
  LeaseRef set(new LeaseSet(shared_from_this(), static_cast<u32>(count), static_cast<u32>(count)));
  for (u32 i = 0; i < count; ++i) {
    Descriptor lease;
    std::memcpy(&lease, descriptors + i * sizeof lease, sizeof lease);
    if (lease.epoch != index_.epoch() || lease.entry >= index_.shape().families_max) continue;
    set->add(lease.entry, lease.generation, i);
  }
  revalidate(*set, true, true);
  if (keys != nullptr) {
    set->keep_if([&](const Leased& item) { return index_.names(item.entry, Key::load(keys + identity_size * item.key)); });
  }
  this->count(count_adopts, set->size());
  this->count(count_adopts_failed, count - set->size());
  this->count(count_leases, set->size());
  touch(touch_adopt, asked, set->size(), count, &*set, {}, 0);
  return set;
}

// The caller's hazard keeps the record from changing; what it says is bounded all the same.
Member Client::member(const Leased& lease, u32 member) const {
  const u32 number = index_.find_record(lease.entry, member);
  if (number == none32) fail<std::out_of_range>("member ", member, " is not in this family");
  const Record& record = index_.record(number);
  const u64 place = record.place.load(memory_order_relaxed), size = record.size_bytes.load(memory_order_relaxed);
  const u32 segment = place_segment(place);
  if (segment >= segments_.size() || segments_[segment] == nullptr) {
    fail<std::runtime_error>("record ", number, " lies in segment ", segment, " of ", segments_.size());
  }
  return {segments_[segment]->at<u8>(place_offset(place), size, "an object"),
          size,
          record.checksum.load(memory_order_relaxed),
          {record.heads_begin.load(memory_order_relaxed), record.heads_end.load(memory_order_relaxed)},
          {record.layers_begin.load(memory_order_relaxed), record.layers_end.load(memory_order_relaxed)}};
}

const std::shared_ptr<Mapping>& Client::writable(u64 place, u64 size, u8*& address) const {
  check();
  const u32 segment = place_segment(place);
  if (segment >= segments_.size() || segments_[segment] == nullptr) {
    fail<std::runtime_error>("place names segment ", segment, " of ", segments_.size());
  }
  if (!segments_[segment]->writable()) fail<std::runtime_error>("the pool is mapped read-only: attach as a writer");
  address = segments_[segment]->at<u8>(place_offset(place), size, "a writable slot");
  return segments_[segment];
}

Slots Client::slots(const u64* places, const u64* sizes, u64 count) const {
  Slots slots;
  slots.addresses.resize(count);
  for (u64 i = 0; i < count; ++i) {
    const std::shared_ptr<Mapping>& segment = writable(places[i], sizes[i], slots.addresses[i]);
    if (slots.kept.empty() || slots.kept.back() != segment) slots.kept.push_back(segment);
  }
  return slots;
}

const std::shared_ptr<Mapping>& Client::segment(u32 segment) const {
  check();
  if (segment >= segments_.size() || segments_[segment] == nullptr) {
    fail<std::invalid_argument>("segment ", segment, " of ", segments_.size());
  }
  return segments_[segment];
}

// --- what the daemon learns

void Client::touch(TouchKind kind, const Asked& asked, u64 matched, u64 missed, const LeaseSet* set, Hit deepest,
                   u64 bytes) {
  Touch row{};
  row.request = asked.request;
  row.started_ns = asked.started_ns;
  row.deepest_entry = deepest.entry;
  row.deepest_generation = low32(sg_generation(deepest.sg));
  if (set != nullptr && set->size() != 0) {
    const Leased& last = (*set)[set->size() - 1];
    row.deepest_entry = last.entry;
    row.deepest_generation = low32(last.generation);
  }
  row.matched = static_cast<u32>(matched);
  row.asked = static_cast<u32>(asked.count);
  if (asked.keys != nullptr && missed < asked.count) std::memcpy(&row.missed_key8, asked.keys + missed * identity_size, 8);
  row.took_ns = static_cast<u32>(std::min<u64>(now_ns() - asked.started_ns, none32));
  row.kind = kind;
  row.bytes = bytes;
  const auto words = std::bit_cast<std::array<u64, 8>>(row);
  TouchRow& to = touches_[touched_ & (touch_records_ - 1)];
  to.words[7].store(0, memory_order_relaxed);
  std::atomic_thread_fence(memory_order_release);
  for (u32 i = 0; i < 7; ++i) to.words[i].store(words[i], memory_order_relaxed);
  to.words[7].store(++touched_, memory_order_release);
  header_->touch_tail.store(touched_, memory_order_release);
}

}  // namespace kvd
