#include "table.hpp"
#include "mutants.hpp"

namespace kvd {

using std::memory_order_acquire, std::memory_order_relaxed, std::memory_order_release;

namespace {

std::shared_ptr<Mapping> make_meta(int fd, const MetaShape& shape, const std::vector<u64>& segment_bytes,
                                   const TableIdentity& identity) {
  if (identity.epoch == 0) fail<std::invalid_argument>("epoch = 0: a random number that is not 0 is needed");
  size_file(fd, shape.meta_bytes, "META");
  auto mapping = Mapping::of(fd, true, Mapping::Pages::huge, "META");
  MetaHeader& header = *mapping->at<MetaHeader>(0, 1, "META header");
  header.version = layout_version;
  header.header_size = header_bytes;
  std::memcpy(header.boot_id, identity.boot_id, sizeof header.boot_id);
  header.epoch = identity.epoch;
  header.daemon_pid = identity.pid;
  header.daemon_start_ticks = identity.start_ticks;
  header.families_max = shape.families_max;
  header.buckets_count = shape.buckets_count;
  header.records_max = shape.records_max;
  header.segments_count = shape.segments_count;
  header.clients_max = shape.clients_max;
  header.segments_offset = shape.segments_offset;
  header.clients_offset = shape.clients_offset;
  header.buckets_offset = shape.buckets_offset;
  header.entries_offset = shape.entries_offset;
  header.records_offset = shape.records_offset;
  header.cold_offset = shape.cold_offset;
  header.meta_bytes = shape.meta_bytes;
  header.bucket_seed = identity.bucket_seed;
  auto* segments = mapping->at<Segment>(shape.segments_offset, shape.segments_count, "segments");
  for (u32 i = 0; i < shape.segments_count; ++i) segments[i].size_bytes = segment_bytes[i];
  auto* entries = mapping->at<Entry>(shape.entries_offset, shape.families_max, "entries");
  for (u32 i = 0; i < shape.families_max; ++i) entries[i].record_first.store(none32, memory_order_relaxed);
  header.magic = meta_magic;
  seal_writing(fd, "META");
  return mapping;
}

}  // namespace

Table::Table(int fd, u64 families_max, u64 records_max, const std::vector<u64>& segment_bytes, u64 clients_max,
             const TableIdentity& identity)
    : mapping_(make_meta(fd, MetaShape::of(families_max, records_max, segment_bytes.size(), clients_max), segment_bytes,
                         identity)),
      index_(*mapping_),
      segments_(segment_bytes.size()),
      regions_(clients_max),
      marks_((families_max + 63) / 64) {}

// --- arguments

void Table::check_entry(u32 number) const {
  if (number >= index_.shape().families_max) {
    fail<std::invalid_argument>("entry ", number, " of ", index_.shape().families_max);
  }
}

Record& Table::record_of(u32 number) const {
  if (number >= index_.shape().records_max) {
    fail<std::invalid_argument>("record ", number, " of ", index_.shape().records_max);
  }
  return index_.record(number);
}

u32 Table::record_checked(u32 number, u32 state, const char* action) const {
  const u32 is = record_of(number).state.load(memory_order_relaxed);
  if (is != state) fail<std::runtime_error>(action, ": record ", number, " is in state ", is, ", not ", state);
  return number;
}

ClientSlot& Table::client_slot(u32 slot, bool attached) const {
  guard_.check("a table");
  if (slot >= index_.shape().clients_max) {
    fail<std::invalid_argument>("client slot ", slot, " of ", index_.shape().clients_max);
  }
  if ((regions_[slot] != nullptr) != attached) {
    fail<std::runtime_error>("client slot ", slot, attached ? " is free" : " is taken");
  }
  return index_.client(slot);
}

// --- header, segments, clients

void Table::set_state(u32 state) {
  if (state > 3) fail<std::invalid_argument>("state ", state, ": 0 .. 3 is allowed");
  index().header().state.store(state, memory_order_release);
}

void Table::set_segment(u32 segment, u64 populated_bytes, u32 page_kind, u64 inode) {
  if (segment >= index().shape().segments_count) {
    fail<std::invalid_argument>("segment ", segment, " of ", index_.shape().segments_count);
  }
  Segment& row = index_.segment(segment);
  if (populated_bytes > row.size_bytes) {
    fail<std::invalid_argument>("populated_bytes = ", populated_bytes, " of a segment of ", row.size_bytes);
  }
  row.page_kind.store(page_kind, memory_order_relaxed);
  row.inode.store(inode, memory_order_relaxed);
  row.populated_bytes.store(populated_bytes, memory_order_release);
}

void Table::map_segment(u32 segment, int fd, bool sealed) {
  if (segment >= index().shape().segments_count || segments_[segment] != nullptr) {
    fail<std::invalid_argument>("segment ", segment, " of ", index_.shape().segments_count, " is mapped or not there");
  }
  auto mapping = Mapping::of(fd, true, Mapping::Pages::huge, "segment");
  if (mapping->size() != index_.segment(segment).size_bytes) {
    fail<std::invalid_argument>("segment ", segment, " has a file of ", mapping->size(), " bytes, not ",
                                index_.segment(segment).size_bytes);
  }
  if (sealed) seal_resizing(fd, "segment");
  segments_[segment] = std::move(mapping);
}

const std::shared_ptr<Mapping>& Table::segment(u32 number) const {
  guard_.check("a table");
  if (number >= segments_.size() || segments_[number] == nullptr) {
    fail<std::invalid_argument>("segment ", number, " is not mapped");
  }
  return segments_[number];
}

u8* Table::memory(u32 number, u64 offset, u64 size) const { return segment(number)->at<u8>(offset, size, "memory"); }

void Table::attach(u32 slot, std::shared_ptr<Region> region, u32 pid, u64 start_ticks, u64 client_id, u64 attached_ns) {
  ClientSlot& row = client_slot(slot, false);
  if (region->shape().slot != slot || region->shape().epoch != index_.epoch()) {
    fail<std::invalid_argument>("the region was made for slot ", region->shape().slot, " and another epoch or slot than ",
                                slot);
  }
  row.pid.store(pid, memory_order_relaxed);
  row.start_ticks.store(start_ticks, memory_order_relaxed);
  row.client_id.store(client_id, memory_order_relaxed);
  row.attached_ns.store(attached_ns, memory_order_relaxed);
  const RegionShape& shape = region->shape();
  row.epoch.store(shape.epoch, memory_order_relaxed);
  row.region_slot.store(slot, memory_order_relaxed);
  row.sq_bytes.store(shape.sq_bytes, memory_order_relaxed);
  row.cq_bytes.store(shape.cq_bytes, memory_order_relaxed);
  row.touch_records.store(shape.touch_records, memory_order_relaxed);
  row.hazards_max.store(shape.hazards_max, memory_order_relaxed);
  row.state.store(client_attached, memory_order_release);
  regions_[slot] = std::move(region);
}

void Table::attach_ghost(u32 slot, std::shared_ptr<Region> region, const ClientSlot& as_it_was) {
  ClientSlot& row = client_slot(slot, false);
  const auto same = [](auto& to, const auto& from) { to.store(from.load(memory_order_relaxed), memory_order_relaxed); };
  same(row.pid, as_it_was.pid);
  same(row.start_ticks, as_it_was.start_ticks);
  same(row.client_id, as_it_was.client_id);
  same(row.attached_ns, as_it_was.attached_ns);
  same(row.epoch, as_it_was.epoch);
  same(row.region_slot, as_it_was.region_slot);
  same(row.sq_bytes, as_it_was.sq_bytes);
  same(row.cq_bytes, as_it_was.cq_bytes);
  same(row.touch_records, as_it_was.touch_records);
  same(row.hazards_max, as_it_was.hazards_max);
  row.state.store(client_ghost, memory_order_release);
  region->revoke();
  regions_[slot] = std::move(region);
}

void Table::disconnected(u32 slot) { client_slot(slot, true).state.store(client_disconnected, memory_order_release); }

void Table::detach(u32 slot) {
  client_slot(slot, true).state.store(client_free, memory_order_release);
  regions_[slot].reset();
}

// --- records and families

void Table::probe(const u8* keys, u64 count, const u8* members, u64 members_count, u32* entries, u8* present,
                  const FamilyShape* shape) const {
  index().find_each(keys, count, [&](u64 i, const Hit& hit) {
    entries[i] = hit.entry;
    // What is split otherwise has no place for these members, whatever their numbers: publish would turn them down.
    const bool foreign = hit && shape != nullptr && !has_shape(hit.entry, *shape);
    for (u64 m = 0; m < members_count; ++m) {
      present[i * members_count + m] =
          foreign || (hit && members[m] < members_max && index_.has(hit.entry, members[m]));
    }
    return true;
  });
}

bool Table::has_shape(u32 number, const FamilyShape& shape) const {
  const Entry& entry = index_.entry(number);
  return entry.split.load(memory_order_relaxed) == shape.split &&
         entry.members_count.load(memory_order_relaxed) == shape.family_members;
}

void Table::reserve(const ReserveBatch& batch) {
  if (batch.owner != owner_none && batch.owner >= index().shape().clients_max) {
    fail<std::invalid_argument>("owner ", batch.owner, " of ", index_.shape().clients_max);
  }
  for (u64 i = 0; i < batch.count; ++i) {
    record_checked(batch.records[i], record_free, "reserve");
    const u64 segment = place_segment(batch.places[i]), offset = place_offset(batch.places[i]), size = batch.sizes[i];
    const u64 room = segment < index_.shape().segments_count ? index_.segment(static_cast<u32>(segment)).size_bytes : 0;
    if (offset > room || size > room - offset || batch.members[i] >= members_max) {
      fail<std::invalid_argument>("reserve: item ", i, ": member ", +batch.members[i], ", ", size, " bytes at ", offset,
                                  " of segment ", segment, ", which has ", room);
    }
  }
  for (u64 i = 0; i < batch.count; ++i) {
    Record& record = index_.record(record_checked(batch.records[i], record_free, "reserve twice"));
    record.place.store(batch.places[i], memory_order_relaxed);
    record.size_bytes.store(batch.sizes[i], memory_order_relaxed);
    record.checksum.store(0, memory_order_relaxed);
    record.next.store(none32, memory_order_relaxed);
    record.entry.store(none32, memory_order_relaxed);
    record.owner.store(static_cast<u16>(batch.owner), memory_order_relaxed);
    record.member.store(batch.members[i], memory_order_relaxed);
    const u16* range = batch.ranges + 4 * i;
    record.heads_begin.store(range[0], memory_order_relaxed);
    record.heads_end.store(range[1], memory_order_relaxed);
    record.layers_begin.store(range[2], memory_order_relaxed);
    record.layers_end.store(range[3], memory_order_relaxed);
    record.reservation.store(batch.reservation, memory_order_relaxed);
    record.state.store(record_pending, memory_order_release);
  }
}

void Table::check_published(const PublishBatch& batch, u64 item) const {
  const Record& record = record_of(batch.records[item]);
  if (batch.members[item] >= members_max) {  // those from family_members on are optional
    fail<std::invalid_argument>("publish: item ", item, " is member ", +batch.members[item], ": at most ", members_max - 1);
  }
  if (mutant::owner_check) return;
  const u32 state = record.state.load(memory_order_relaxed), owner = record.owner.load(memory_order_relaxed),
            member = record.member.load(memory_order_relaxed);
  if (state != record_pending || owner != batch.owner || member != batch.members[item]) {
    fail<std::runtime_error>("publish: record ", batch.records[item], " is in state ", state, " of owner ", owner,
                             " for member ", member, ", not pending of owner ", batch.owner, " for member ",
                             +batch.members[item]);
  }
}

u32 Table::publish(const PublishBatch& batch, u8* status, u32* entries, u8* differs) {
  guard_.check("a table");
  if (batch.family_members == 0 || batch.family_members > members_max || batch.split > 0xFFFF) {
    fail<std::invalid_argument>("publish: family_members = ", batch.family_members, ", split = ", batch.split);
  }
  for (u64 i = 0; i < batch.count; ++i) check_published(batch, i);
  u64 used = 0;
  u32 behind = none32, family = none32;  // of the item before: what its family lies behind, and its entry
  for (u64 i = 0; i < batch.count; ++i) {
    check_published(batch, i);  // once more: a record named twice is no longer pending
    const Key key = Key::load(batch.keys + i * identity_size);
    const u32 record = batch.records[i], member = batch.members[i];
    const Hit hit = index_.find(key);
    differs[i] = 0;
    entries[i] = hit.entry;
    const bool same = i > 0 && std::memcmp(batch.keys + i * identity_size, batch.keys + (i - 1) * identity_size,
                                           identity_size) == 0;
    if (!same) {
      const u32 parent = batch.parents != nullptr ? batch.parents[i] : none32;
      if (parent != parent_previous) behind = parent;
      else if (family != none32) behind = family;
      family = hit.entry;
    }
    if (hit) {
      const bool foreign = !has_shape(hit.entry, FamilyShape{batch.split, batch.family_members});
      const bool present = index_.has(hit.entry, member);
      if (!foreign && !present) {
        link(hit.entry, record, static_cast<u8>(member), batch.checksums[i]);
        status[i] = publish_done;
        continue;
      }
      status[i] = publish_present;
      // A family that is split otherwise may have no such member: then there are no other bytes to differ from.
      differs[i] = present && index_.record(index_.find_record(hit.entry, member)).checksum.load(memory_order_relaxed) !=
                                  batch.checksums[i];
      continue;
    }
    Shared<u64>* const slot = used < batch.entries_count ? free_slot(key) : nullptr;
    if (slot == nullptr) {
      status[i] = publish_no_index;
      continue;
    }
    entries[i] = batch.entries[used++];
    family = entries[i];
    write_entry(entries[i], key, batch, i, behind);
    slot->store(slot_of(index_.locate(key).tag, entries[i]), memory_order_release);
    status[i] = publish_done;
  }
  return static_cast<u32>(used);
}

// I2. Whoever sees a field of the new generation also sees that sg has left the old one.
void Table::write_entry(u32 number, const Key& key, const PublishBatch& batch, u64 item, u32 parent) {
  check_entry(number);
  Entry& entry = index_.entry(number);
  const u64 old = entry.sg.load(memory_order_relaxed);
  if (sg_state(old) != entry_empty) fail<std::runtime_error>("publish: entry ", number, " is not free");
  const u64 generation = sg_generation(old) + (mutant::generation && sg_generation(old) != 0 ? 0 : 1);
  entry.sg.store(sg_of(generation, entry_writing), memory_order_relaxed);
  std::atomic_thread_fence(memory_order_release);
  step("publish.writing");
  for (u32 i = 0; i < 4; ++i) entry.identity[i].store(key.words[i], memory_order_relaxed);
  entry.present[0].store(0, memory_order_relaxed);
  entry.present[1].store(0, memory_order_relaxed);
  entry.record_first.store(none32, memory_order_relaxed);
  entry.split.store(static_cast<u16>(batch.split), memory_order_relaxed);
  entry.members_count.store(static_cast<u8>(batch.family_members), memory_order_relaxed);
  entry.flags.store(0, memory_order_relaxed);
  index_.cold(number).namespace_number.store(batch.namespace_number, memory_order_relaxed);
  set_parent(number, parent);
  link(number, batch.records[item], batch.members[item], batch.checksums[item]);
  step("publish.linked");
  entry.sg.store(sg_of(generation, entry_ready), memory_order_release);
  step("publish.ready");
}

void Table::set_parent(u32 number, u32 parent) const {
  Cold& cold = index_.cold(number);
  const bool known = parent < index_.shape().families_max;
  cold.parent_entry.store(known ? parent : none32, memory_order_relaxed);
  cold.parent_generation.store(known ? low32(sg_generation(index_.entry(parent).sg.load(memory_order_relaxed))) : 0,
                               memory_order_relaxed);
}

void Table::set_parents(const u32* entries, const u32* parents, u64 count) {
  guard_.check("a table");
  for (u64 i = 0; i < count; ++i) check_entry(entries[i]);
  for (u64 i = 0; i < count; ++i) set_parent(entries[i], parents[i]);
}

// The record, the head of the list, the present bit: a reader who sees the bit sees the record.
void Table::link(u32 number, u32 record, u8 member, u64 checksum) {
  Entry& entry = index_.entry(number);
  Record& row = index_.record(record);
  row.checksum.store(checksum, memory_order_relaxed);
  row.entry.store(number, memory_order_relaxed);
  row.next.store(entry.record_first.load(memory_order_relaxed), memory_order_relaxed);
  row.owner.store(owner_none, memory_order_relaxed);
  row.state.store(record_published, memory_order_relaxed);
  entry.record_first.store(record, memory_order_release);
  Shared<u64>& present = entry.present[member / 64];
  present.store(present.load(memory_order_relaxed) | u64{1} << (member % 64), memory_order_release);
}

void Table::free_records(const u32* records, u64 count) {
  guard_.check("a table");
  for (u64 i = 0; i < count; ++i) record_checked(records[i], record_pending, "free_records");
  for (u64 i = 0; i < count; ++i) {
    index_.record(record_checked(records[i], record_pending, "free_records twice"))
        .state.store(record_free, memory_order_release);
  }
}

}  // namespace kvd
