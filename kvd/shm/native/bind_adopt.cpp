// Python's view of a restart: the old META (Adoption), ghosts' regions, and the columns of what was taken over.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "adopt.hpp"
#include "bind_memory.hpp"

using namespace kvd;

namespace {

nb::list segments(const Adoption& old) {
  nb::list rows;
  for (u32 i = 0; i < old.index().shape().segments_count; ++i) {
    const Segment& row = old.index().segment(i);
    rows.append(nb::make_tuple(row.size_bytes, row.populated_bytes.load(), row.page_kind.load(), row.inode.load()));
  }
  return rows;
}

nb::dict client_row(u32 slot, const ClientSlot& row) {
  nb::dict out;
  out["slot"] = slot;
  out["state"] = row.state.load();
  out["pid"] = row.pid.load();
  out["start_ticks"] = row.start_ticks.load();
  out["client_id"] = row.client_id.load();
  out["epoch"] = row.epoch.load();
  out["region_slot"] = row.region_slot.load();
  return out;
}

nb::list clients(const Adoption& old) {
  nb::list rows;
  for (u32 i = 0; i < old.index().shape().clients_max; ++i) {
    const ClientSlot& row = old.index().client(i);
    if (row.state.load() != client_free) rows.append(client_row(i, row));
  }
  return rows;
}

const ClientSlot& slot_of_old(const Adoption& old, u32 slot) {
  if (slot >= old.index().shape().clients_max) fail<std::invalid_argument>("client slot ", slot, " of the old META");
  return old.index().client(slot);
}

// Raises OSError, ValueError or RuntimeError if the descriptor is not the region that META describes.
void attach_ghost(Table& table, const Adoption& old, u32 old_slot, u32 slot, int fd) {
  const ClientSlot& row = slot_of_old(old, old_slot);
  const RegionShape shape{slot, row.epoch.load(), row.sq_bytes.load(), row.cq_bytes.load(), row.touch_records.load(),
                          row.hazards_max.load()};
  table.attach_ghost(slot, std::make_shared<Region>(fd, shape, Region::Existing{}), row);
}

template <class T>
std::vector<T> values(nb::handle object, const char* name) {
  const Column<T> column(object, name);
  return {column.data(), column.data() + column.size()};
}

// One column of the runs, as the core keeps it.
template <class T, class Get>
nb::bytes run_column(const Adopted& out, Get&& get) {
  const OutColumn<T> column(out.runs.size());
  for (u64 i = 0; i < out.runs.size(); ++i) column.data()[i] = static_cast<T>(get(out.runs[i]));
  return column.take();
}

nb::list slabs(const Adopted& out) {
  nb::list rows;
  for (const AdoptedSlab& slab : out.slabs) {
    rows.append(nb::make_tuple(slab.frame, slab.slot_bytes,
                               nb::bytes(out.owners.data() + slab.owners_first, slab.slots_count * sizeof(u32)),
                               nb::bytes(out.free_places.data() + slab.free_first, slab.free_count * sizeof(u64)),
                               slab.fresh_count, slab.reserved_count));
  }
  return rows;
}

nb::list shapes(const Adopted& out) {
  nb::list rows;
  for (const std::vector<u64>& shape : out.shapes) {
    nb::list sizes;
    for (const u64 size : shape) sizes.append(size);
    rows.append(nb::tuple(sizes));
  }
  return rows;
}

nb::dict adopt(Table& table, const Adoption& old, nb::handle kept_in, nb::handle slot_bytes_in, nb::handle slab_frames_in,
               nb::handle ghosts_in, u64 frame_bytes, u32 namespaces_count, u32 runs_from) {
  AdoptionPlan plan;
  for (const u8 kept : values<u8>(kept_in, "segments_kept")) plan.segments_kept.push_back(kept != 0);
  plan.sizes = old.sizes();
  plan.slot_bytes = values<u64>(slot_bytes_in, "slot_bytes");
  plan.slab_frames = values<u32>(slab_frames_in, "slab_frames");
  plan.ghosts = values<u32>(ghosts_in, "ghosts");
  plan.frame_bytes = frame_bytes;
  plan.namespaces_count = namespaces_count;
  Adopted out = table.adopt(old, plan);
  for (u32& run : out.run_of) run += run != none32 ? runs_from : 0;
  for (AdoptedRun& run : out.runs) run.parent += run.parent != none32 ? runs_from : 0;
  nb::dict result;
  result["families"] = out.families;
  result["withdrawn"] = out.withdrawn;
  result["pending"] = out.pending;
  result["bytes"] = out.bytes;
  result["not_kept"] = out.not_kept;
  result["damaged"] = out.damaged;
  result["entries_end"] = out.entries_end;
  result["records_end"] = out.records_end;
  result["free_entries"] = column_of(out.free_entries);
  result["free_records"] = column_of(out.free_records);
  result["run_of"] = column_of(out.run_of);
  result["home_of"] = column_of(out.home_of);
  result["bytes_of"] = column_of(out.bytes_of);
  result["key8_of"] = column_of(out.key8_of);
  result["missing_of"] = column_of(out.missing_of);
  result["run_sizes"] = run_column<u32>(out, [](const AdoptedRun& run) { return run.count; });
  result["run_parents"] = run_column<u32>(out, [](const AdoptedRun& run) { return run.parent; });
  result["run_namespaces"] = run_column<u16>(out, [](const AdoptedRun& run) { return run.namespace_number; });
  result["run_bytes"] = run_column<u64>(out, [](const AdoptedRun& run) { return run.bytes; });
  result["run_shapes"] = run_column<u32>(out, [](const AdoptedRun& run) { return run.shape; });
  result["run_pins"] = run_column<u8>(out, [](const AdoptedRun& run) { return run.flags; });
  result["members"] = column_of(out.members);
  result["shapes"] = shapes(out);
  result["slabs"] = slabs(out);
  result["limbo"] = column_of(out.limbo);
  result["ghost_slots"] = column_of(out.ghost_slots);
  result["ghost_records"] = column_of(out.ghost_records);
  result["ghost_places"] = column_of(out.ghost_places);
  return result;
}

}  // namespace

void bind_adoption(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Adoption>(module, "Adoption")
      .def(nb::init<int>(), "meta_fd"_a)
      .def_prop_ro("epoch", [](const Adoption& old) { return old.header().epoch; })
      .def_prop_ro("boot_id", [](const Adoption& old) { return nb::bytes(old.header().boot_id, 16); })
      .def_prop_ro("bucket_seed", [](const Adoption& old) { return old.header().bucket_seed; })
      .def_prop_ro("families_max", [](const Adoption& old) { return old.index().shape().families_max; })
      .def_prop_ro("records_max", [](const Adoption& old) { return old.index().shape().records_max; })
      .def_prop_ro("clients_max", [](const Adoption& old) { return old.index().shape().clients_max; })
      .def_prop_ro("segments", &segments)
      .def_prop_ro("clients", &clients)
      .def("sizes", [](const Adoption& old) { return column_of(old.sizes()); })
      .def("attach_ghost",
           [](const Adoption& old, Table& table, u32 old_slot, u32 slot, int fd) {
             attach_ghost(table, old, old_slot, slot, fd);
           },
           "table"_a, "old_slot"_a, "slot"_a, "fd"_a)
      .def("adopt",
           [](const Adoption& old, Table& table, nb::handle kept, nb::handle slot_bytes, nb::handle slab_frames,
              nb::handle ghosts, u64 frame_bytes, u32 namespaces_count, u32 runs_from) {
             return adopt(table, old, kept, slot_bytes, slab_frames, ghosts, frame_bytes, namespaces_count, runs_from);
           },
           "table"_a, nb::kw_only(), "segments_kept"_a, "slot_bytes"_a, "slab_frames"_a, "ghosts"_a, "frame_bytes"_a,
           "namespaces_count"_a, "runs_from"_a = 0);
}
