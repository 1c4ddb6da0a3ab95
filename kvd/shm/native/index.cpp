#include "index.hpp"

#include <algorithm>

namespace kvd {
namespace {

constexpr u64 line(u64 bytes) { return (bytes + 63) & ~u64{63}; }

void check_count(u64 value, u64 most, const char* what) {
  if (value == 0 || value > most) fail<std::invalid_argument>(what, " = ", value, ": 1 .. ", most, " is allowed");
}

void check_equal(u64 have, u64 want, const char* what) {
  if (have != want) fail<std::runtime_error>("META: ", what, " is ", have, ", expected ", want);
}

}  // namespace

MetaShape MetaShape::of(u64 families_max, u64 records_max, u64 segments, u64 clients_max) {
  check_count(families_max, families_limit, "families_max");
  check_count(records_max, none32 - 1, "records_max");
  check_count(segments, segments_limit, "segments");
  check_count(clients_max, clients_limit, "clients_max");
  MetaShape shape{};
  shape.families_max = static_cast<u32>(families_max);
  shape.records_max = static_cast<u32>(records_max);
  shape.segments_count = static_cast<u32>(segments);
  shape.clients_max = static_cast<u32>(clients_max);
  // Eight slots a bucket, at most half of them used: with two choices an insert practically never fails.
  shape.buckets_count = std::max<u32>(2, std::bit_ceil(static_cast<u32>((families_max + 3) / 4)));
  shape.segments_offset = header_bytes;
  shape.clients_offset = line(shape.segments_offset + segments * sizeof(Segment));
  shape.buckets_offset = line(shape.clients_offset + clients_max * sizeof(ClientSlot));
  shape.entries_offset = line(shape.buckets_offset + u64{shape.buckets_count} * sizeof(Bucket));
  shape.records_offset = line(shape.entries_offset + families_max * sizeof(Entry));
  shape.cold_offset = line(shape.records_offset + records_max * sizeof(Record));
  shape.meta_bytes = (shape.cold_offset + families_max * sizeof(Cold) + 4095) & ~u64{4095};
  return shape;
}

Index::Index(const Mapping& meta) {
  header_ = meta.at<MetaHeader>(0, 1, "META header");
  const MetaHeader& header = *header_;
  check_equal(header.magic, meta_magic, "magic");
  check_equal(header.version, layout_version, "layout_version");
  check_equal(header.header_size, header_bytes, "header_bytes");
  shape_ = MetaShape::of(header.families_max, header.records_max, header.segments_count, header.clients_max);
  check_equal(header.buckets_count, shape_.buckets_count, "buckets_count");
  check_equal(header.segments_offset, shape_.segments_offset, "segments_offset");
  check_equal(header.clients_offset, shape_.clients_offset, "clients_offset");
  check_equal(header.buckets_offset, shape_.buckets_offset, "buckets_offset");
  check_equal(header.entries_offset, shape_.entries_offset, "entries_offset");
  check_equal(header.records_offset, shape_.records_offset, "records_offset");
  check_equal(header.cold_offset, shape_.cold_offset, "cold_offset");
  check_equal(header.meta_bytes, shape_.meta_bytes, "meta_bytes");
  check_equal(meta.size(), shape_.meta_bytes, "file size");
  segments_ = meta.at<Segment>(shape_.segments_offset, shape_.segments_count, "segments");
  clients_ = meta.at<ClientSlot>(shape_.clients_offset, shape_.clients_max, "clients");
  buckets_ = meta.at<Bucket>(shape_.buckets_offset, shape_.buckets_count, "buckets");
  entries_ = meta.at<Entry>(shape_.entries_offset, shape_.families_max, "entries");
  records_ = meta.at<Record>(shape_.records_offset, shape_.records_max, "records");
  cold_ = meta.at<Cold>(shape_.cold_offset, shape_.families_max, "cold rows");
  seed_ = header.bucket_seed;
  epoch_ = header.epoch;
  mask_ = shape_.buckets_count - 1;
  shift_ = 64 - static_cast<u32>(std::countr_zero(shape_.buckets_count));
}

u32 Index::find_record(u32 number, u32 member) const {
  if (member >= members_max || !has(number, member)) return none32;
  u32 record = entries_[number].record_first.load(std::memory_order_acquire);
  for (u32 steps = 0; steps < members_max && record != none32; ++steps) {
    check_record(record);
    const Record& row = records_[record];
    if (row.member.load(std::memory_order_relaxed) == member) return record;
    record = row.next.load(std::memory_order_relaxed);
  }
  fail<std::runtime_error>("META: entry ", number, " has member ", member, " but no record of it");
}

}  // namespace kvd
