#include "region.hpp"

#include <cstring>

namespace kvd {
namespace {

constexpr u64 page(u64 bytes) { return (bytes + 4095) & ~u64{4095}; }

void check_power(u64 value, u64 least, u64 most, const char* what) {
  if (!std::has_single_bit(value) || value < least || value > most) {
    fail<std::invalid_argument>(what, " = ", value, ": a power of two in ", least, " .. ", most, " is needed");
  }
}

std::shared_ptr<Mapping> make_region(int fd, const RegionParts& parts) {
  size_file(fd, parts.bytes, "client region");
  auto mapping = Mapping::of(fd, true, Mapping::Pages::small, "client region");
  seal_resizing(fd, "client region");
  return mapping;
}

}  // namespace

RegionParts RegionParts::of(u32 sq_bytes, u32 cq_bytes, u32 touch_records, u32 hazards_max) {
  check_power(sq_bytes, 4096, 1u << 30, "sq_bytes");
  check_power(cq_bytes, 4096, 1u << 30, "cq_bytes");
  check_power(touch_records, 1, 1u << 24, "touch_records");
  if (hazards_max == 0 || hazards_max > 1u << 28) {
    fail<std::invalid_argument>("hazards_max = ", hazards_max, ": 1 .. ", 1u << 28, " is needed");
  }
  RegionParts parts{};
  parts.sq = header_bytes;
  parts.cq = parts.sq + sq_bytes;
  parts.touches = parts.cq + cq_bytes;
  parts.hazards = page(parts.touches + u64{touch_records} * sizeof(TouchRow));
  parts.bytes = page(parts.hazards + u64{hazards_max} * 8);
  return parts;
}

namespace {

RegionParts parts_of(const RegionShape& shape) {
  return RegionParts::of(shape.sq_bytes, shape.cq_bytes, shape.touch_records, shape.hazards_max);
}

}  // namespace

void Region::locate(const RegionParts& parts) {
  header_ = mapping_->at<ClientHeader>(0, 1, "client region");
  hazards_ = mapping_->at<Shared<u64>>(parts.hazards, shape_.hazards_max, "hazards");
  touches_ = mapping_->at<TouchRow>(parts.touches, shape_.touch_records, "touch ring");
}

Region::Region(int fd, const RegionShape& shape, Existing) : shape_(shape), sq_(RingWords{}), cq_(RingWords{}) {
  const RegionParts parts = parts_of(shape);
  mapping_ = Mapping::of(fd, true, Mapping::Pages::small, "client region");
  if (mapping_->size() != parts.bytes) {
    fail<std::runtime_error>("client region of ", mapping_->size(), " bytes, META says ", parts.bytes);
  }
  seal_resizing(fd, "client region");
  locate(parts);
}

Region::Region(int fd, const RegionShape& shape) : shape_(shape), sq_(RingWords{}), cq_(RingWords{}) {
  const RegionParts parts = parts_of(shape);
  mapping_ = make_region(fd, parts);
  locate(parts);
  ClientHeader& header = *header_;
  header.magic = client_magic;
  header.version = layout_version;
  header.header_size = header_bytes;
  header.epoch = shape.epoch;
  header.client_slot = shape.slot;
  header.sq_offset = parts.sq;
  header.cq_offset = parts.cq;
  header.sq_bytes = shape.sq_bytes;
  header.cq_bytes = shape.cq_bytes;
  header.touch_offset = parts.touches;
  header.touch_records = shape.touch_records;
  header.hazards_offset = parts.hazards;
  header.hazards_max = shape.hazards_max;
  u8* base = mapping_->data();
  sq_ = Consumer({base + parts.sq, shape.sq_bytes, &header.sq_tail, &header.sq_head, &header.daemon_sleeping});
  cq_ = Producer({base + parts.cq, shape.cq_bytes, &header.cq_tail, &header.cq_head, &header.client_sleeping});
}

std::vector<Touch> Region::touches() {
  guard_.check("a client region");
  const u64 tail = header_->touch_tail.load(std::memory_order_acquire);
  const u64 capacity = shape_.touch_records;
  if (tail - touch_cursor_ > capacity) touch_cursor_ = tail - capacity;  // overwritten, or a tail that makes no sense
  std::vector<Touch> rows;
  rows.reserve(tail - touch_cursor_);
  for (; touch_cursor_ != tail; ++touch_cursor_) {
    const TouchRow& row = touches_[touch_cursor_ & (capacity - 1)];
    std::array<u64, 8> words{};
    if (row.words[7].load(std::memory_order_acquire) != touch_cursor_ + 1) continue;
    for (u32 i = 0; i < 7; ++i) words[i] = row.words[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    words[7] = row.words[7].load(std::memory_order_relaxed);
    if (words[7] == touch_cursor_ + 1) rows.push_back(std::bit_cast<Touch>(words));
  }
  return rows;
}

std::array<u64, counters_count> Region::counters() const {
  guard_.check("a client region");
  std::array<u64, counters_count> values{};
  for (u32 i = 0; i < counters_count; ++i) values[i] = header_->counters[i].load(std::memory_order_relaxed);
  return values;
}

}  // namespace kvd
