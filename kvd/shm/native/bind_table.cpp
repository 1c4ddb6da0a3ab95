// Python's view of the daemon's side: Table, Region, and the layout that kvd/shm/layout.py is compared with.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <system_error>

#include "adopt.hpp"
#include "bind_memory.hpp"
#include "lease.hpp"
#include "mutants.hpp"
#include "table.hpp"

void bind_client(nanobind::module_& module);
void bind_adoption(nanobind::module_& module);

using namespace kvd;

namespace {

void init_table(Table* self, int fd, u64 families_max, u64 records_max, const std::vector<u64>& segment_bytes,
                u64 clients_max, u64 epoch, nb::handle boot_id, u64 bucket_seed, u64 pid, u64 start_ticks) {
  TableIdentity identity{epoch, bucket_seed, pid, start_ticks, {}};
  const Column<u8> boot(boot_id, "boot_id", sizeof identity.boot_id);
  std::memcpy(identity.boot_id, boot.data(), sizeof identity.boot_id);
  new (self) Table(fd, families_max, records_max, segment_bytes, clients_max, identity);
}

nb::object memory(const Table& table, u32 segment, u64 offset, u64 size) {
  u8* address = table.memory(segment, offset, size);
  return memoryview_of(nb::cast(WritableView{table.segment(segment), std::make_shared<Writers>(), address, size}));
}

nb::tuple probe(const Table& table, nb::handle keys_in, nb::handle members_in,
                std::optional<std::pair<u32, u32>> shape_in) {
  const Keys keys(keys_in);
  const Column<u8> members(members_in, "members");
  const OutColumn<u32> entries(keys.count());
  const OutColumn<u8> present(keys.count() * members.size());
  const FamilyShape shape = shape_in ? FamilyShape{shape_in->first, shape_in->second} : FamilyShape{};
  table.probe(keys.data(), keys.count(), members.data(), members.size(), entries.data(), present.data(),
              shape_in ? &shape : nullptr);
  return nb::make_tuple(entries.take(), present.take());
}

void reserve(Table& table, u32 owner, u64 reservation, nb::handle records_in, nb::handle places_in, nb::handle sizes_in,
             nb::handle members_in, nb::handle ranges_in) {
  const Column<u32> records(records_in, "records");
  const u64 count = records.size();
  const Column<u64> places(places_in, "places", count), sizes(sizes_in, "sizes", count);
  const Column<u8> members(members_in, "members", count);
  const Column<u16> ranges(ranges_in, "ranges", 4 * count);
  table.reserve({owner, low32(reservation), count, records.data(), places.data(), sizes.data(), members.data(),
                 ranges.data()});
}

nb::tuple publish(Table& table, u32 owner, nb::handle keys_in, nb::handle members_in, u32 split, u32 family_members,
                  nb::handle records_in, nb::handle checksums_in, nb::handle entries_in, u32 namespace_number,
                  nb::handle parents_in) {
  const Keys keys(keys_in);
  const u64 count = keys.count();
  const Column<u8> members(members_in, "members", count);
  const Column<u32> records(records_in, "records", count), free_entries(entries_in, "entries");
  const Column<u64> checksums(checksums_in, "checksums", count);
  std::optional<Column<u32>> parents;
  if (!parents_in.is_none()) parents.emplace(parents_in, "parents", count);
  const OutColumn<u8> status(count), differs(count);
  const OutColumn<u32> entries(count);
  const PublishBatch batch{owner,          count,          keys.data(),      members.data(),      split,
                           family_members, records.data(), checksums.data(), free_entries.data(), free_entries.size(),
                           parents ? parents->data() : nullptr, namespace_number};
  const u32 used = table.publish(batch, status.data(), entries.data(), differs.data());
  return nb::make_tuple(status.take(), entries.take(), differs.take(), used);
}

Evicted evict(Table& table, nb::handle entries_in, bool withdraw) {
  const Column<u32> entries(entries_in, "entries");
  return table.evict(entries.data(), entries.size(), withdraw);
}

nb::dict entry_dict(const Table& table, u32 number) {
  table.check_entry(number);
  const Index& index = table.index();
  const Entry& entry = index.entry(number);
  const u64 sg = entry.sg.load();
  u64 key[4];
  for (u32 i = 0; i < 4; ++i) key[i] = entry.identity[i].load();
  nb::list members;
  u32 next = entry.record_first.load();
  for (u32 steps = 0; steps < members_max && next != none32; ++steps) {
    index.check_record(next);
    const Record& record = index.record(next);
    nb::dict row;
    row["member"] = record.member.load();
    row["record"] = next;
    row["place"] = record.place.load();
    row["size_bytes"] = record.size_bytes.load();
    row["checksum"] = record.checksum.load();
    row["heads"] = nb::make_tuple(record.heads_begin.load(), record.heads_end.load());
    row["layers"] = nb::make_tuple(record.layers_begin.load(), record.layers_end.load());
    members.append(row);
    next = record.next.load();
  }
  nb::dict out;
  out["generation"] = sg_generation(sg);
  out["state"] = sg_state(sg);
  out["key"] = nb::bytes(key, sizeof key);
  out["present"] = nb::make_tuple(entry.present[0].load(), entry.present[1].load());
  out["split"] = entry.split.load();
  out["members_count"] = entry.members_count.load();
  out["flags"] = entry.flags.load();
  const Cold& cold = index.cold(number);
  out["parent"] = nb::make_tuple(cold.parent_entry.load(), cold.parent_generation.load());
  out["namespace"] = cold.namespace_number.load();
  out["members"] = members;
  return out;
}

nb::dict layout() {
  nb::dict out;
#define KVD_EXPORT_FIELD(structure, field, offset) out[#structure "." #field] = u64{offsetof(structure, field)};
#define KVD_EXPORT_SIZE(structure, size) out[#structure] = u64{sizeof(structure)};
  KVD_LAYOUT_FIELDS(KVD_EXPORT_FIELD)
  KVD_LAYOUT_SIZES(KVD_EXPORT_SIZE)
#undef KVD_EXPORT_FIELD
#undef KVD_EXPORT_SIZE
  out["layout_version"] = layout_version;
  out["meta_magic"] = meta_magic;
  out["client_magic"] = client_magic;
  out["members_max"] = members_max;
  out["bucket_slots"] = bucket_slots;
  out["counters_count"] = counters_count;
  out["frame_pad"] = frame_pad;
  return out;
}

nb::tuple mutants() {
  nb::list names;
  const std::pair<const char*, bool> all[] = {
      {"READER_FENCE", mutant::reader_fence}, {"DAEMON_FENCE", mutant::daemon_fence},
      {"REVALIDATE", mutant::revalidate},     {"HAZARD_SCAN", mutant::hazard_scan},
      {"GENERATION", mutant::generation},     {"OWNER_CHECK", mutant::owner_check},
      {"EXPORTS", mutant::exports},           {"IDENTITY", mutant::identity},
      {"RING_BOUNDS", mutant::ring_bounds},   {"REVOKED", mutant::revoked}};
  for (const auto& [name, active] : all) {
    if (active) names.append(name);
  }
  return nb::tuple(names);
}

void bind_region(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Region>(module, "Region")
      .def(
          "__init__",
          [](Region* self, int fd, u32 slot, u64 epoch, u32 sq_bytes, u32 cq_bytes, u32 touch_records, u32 hazards_max) {
            new (self) Region(fd, {slot, epoch, sq_bytes, cq_bytes, touch_records, hazards_max});
          },
          "fd"_a, nb::kw_only(), "slot"_a, "epoch"_a, "sq_bytes"_a, "cq_bytes"_a, "touch_records"_a, "hazards_max"_a)
      .def_prop_ro("region_bytes", &Region::bytes)
      .def_prop_ro("slot", [](const Region& region) { return region.shape().slot; })
      .def_prop_ro("payload_bytes_max", [](Region& region) { return region.completions().payload_bytes_max(); })
      .def("pop", [](Region& region, u32 frames_max) { return pop_frames(region.submissions(), frames_max); },
           "frames_max"_a)
      .def("push",
           [](Region& region, u16 type, u64 op, nb::handle payload) {
             return push_frame(region.completions(), type, op, payload);
           },
           "type"_a, "op"_a, "payload"_a)
      .def("may_sleep", [](Region& region) { return region.submissions().may_sleep(); })
      .def("awake", [](Region& region) { region.submissions().awake(); })
      .def("touches", [](Region& region) { return column_of(region.touches()); })
      .def("counters", [](const Region& region) {
        nb::list values;
        for (const u64 value : region.counters()) values.append(value);
        return nb::tuple(values);
      });
}

void bind_evicted(nb::module_& module) {
  nb::class_<Evicted>(module, "Evicted")
      .def_prop_ro("freed", [](const Evicted& out) { return column_of(out.freed); })
      .def_prop_ro("held", [](const Evicted& out) { return column_of(out.held); })
      .def_prop_ro("records", [](const Evicted& out) { return column_of(out.records); })
      .def_prop_ro("places", [](const Evicted& out) { return column_of(out.places); })
      .def_prop_ro("sizes", [](const Evicted& out) { return column_of(out.sizes); });
}

}  // namespace

void bind_table(nb::module_& module) {
  using namespace nb::literals;
  nb::register_exception_translator([](const std::exception_ptr& error, void*) {
    try {
      std::rethrow_exception(error);
    } catch (const std::system_error& system) {
      const nb::object arguments = nb::make_tuple(system.code().value(), system.what());
      PyErr_SetObject(PyExc_OSError, arguments.ptr());
    }
  });
  nb::exception<HazardsExhausted>(module, "HazardsExhausted", PyExc_RuntimeError);
  module.def("layout", &layout);
  module.attr("mutants") = mutants();
  bind_region(module);
  bind_evicted(module);
  nb::class_<Table>(module, "Table")
      .def("__init__", &init_table, "fd"_a, nb::kw_only(), "families_max"_a, "records_max"_a, "segment_bytes"_a,
           "clients_max"_a, "epoch"_a, "boot_id"_a, "bucket_seed"_a, "pid"_a, "start_ticks"_a)
      .def_static("bytes_for",
                  [](u64 families_max, u64 records_max, u64 segments, u64 clients_max) {
                    return MetaShape::of(families_max, records_max, segments, clients_max).meta_bytes;
                  },
                  "families_max"_a, "records_max"_a, "segments"_a, "clients_max"_a)
      .def_prop_ro("meta_bytes", [](const Table& table) { return table.index().shape().meta_bytes; })
      .def_prop_ro("buckets_count", [](const Table& table) { return table.index().shape().buckets_count; })
      .def("set_state", &Table::set_state, "state"_a)
      .def("set_segment", &Table::set_segment, "segment"_a, "populated_bytes"_a, "page_kind"_a, "inode"_a)
      .def("map_segment", &Table::map_segment, "segment"_a, "fd"_a, "sealed"_a = true)
      .def("memory", &memory, "segment"_a, "offset"_a, "size"_a)
      .def("probe", &probe, "keys"_a, "members"_a, "shape"_a = nb::none())
      .def("reserve", &reserve, "owner"_a, "reservation"_a, "records"_a, "places"_a, "sizes"_a, "members"_a, "ranges"_a)
      .def("publish", &publish, "owner"_a, "keys"_a, "members"_a, "split"_a, "family_members"_a, "records"_a,
           "checksums"_a, "entries"_a, "namespace_number"_a = 0, "parents"_a = nb::none())
      .def("set_parents",
           [](Table& table, nb::handle entries_in, nb::handle parents_in) {
             const Column<u32> entries(entries_in, "entries");
             const Column<u32> parents(parents_in, "parents", entries.size());
             table.set_parents(entries.data(), parents.data(), entries.size());
           },
           "entries"_a, "parents"_a)
      .def("free_records",
           [](Table& table, nb::handle records_in) {
             const Column<u32> records(records_in, "records");
             table.free_records(records.data(), records.size());
           },
           "records"_a)
      .def("evict", &evict, "entries"_a, "withdraw"_a)
      .def("attach", &Table::attach, "slot"_a, "region"_a, "pid"_a, "start_ticks"_a, "client_id"_a, "now_ns"_a)
      .def("disconnected", &Table::disconnected, "slot"_a)
      .def("detach", &Table::detach, "slot"_a)
      .def("held",
           [](Table& table, u32 slot) {
             const Table::Held held = table.held(slot);
             return std::pair(held.leases, held.bytes);
           },
           "slot"_a)
      .def("holders", &Table::holders, "entry"_a)
      .def("entry", &entry_dict, "entry"_a)
      .def("scan", [](const Table& table, u32 begin, u32 count) { return column_of(table.scan(begin, count)); },
           "begin"_a, "count"_a)
      .def("set_flags",
           [](Table& table, nb::handle entries_in, u8 flags) {
             const Column<u32> entries(entries_in, "entries");
             table.set_flags(entries.data(), entries.size(), flags);
           },
           "entries"_a, "flags"_a);
  bind_client(module);
  bind_adoption(module);
}
