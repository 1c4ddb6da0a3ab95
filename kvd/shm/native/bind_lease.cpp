// Python's view of leases: LeaseBatch, Lease, WritableView, and the buffers they export.
//
// A memoryview of a lease holds the Lease object and counts as one export of it until the last slice, array or tensor
// made of it is gone; the hazard stays as long.
#include "bind_lease.hpp"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bind_memory.hpp"

namespace kvd {
namespace {

[[noreturn]] void views_alive(u32 count) {
  throw nb::buffer_error(text(count, " of these leases have views alive; each is released when its last view dies").c_str());
}

void release(LeaseSet& set, u32 begin, u32 end) {
  if (const u32 kept = set.release(begin, end); kept != 0) views_alive(kept);
}

Member member_of(const Lease& lease, std::optional<u32> member) {
  return lease.set->client().member(lease.set->checked(lease.index), member.value_or(lease.member));
}

// --- buffers

template <class Fill>
int export_buffer(Py_buffer* view, Fill&& fill) noexcept {
  view->obj = nullptr;
  try {
    return fill();
  } catch (const std::out_of_range& error) {
    PyErr_SetString(PyExc_IndexError, error.what());
    return -1;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return -1;
  }
}

int lease_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  return export_buffer(view, [&] {
    Lease& lease = *nb::inst_ptr<Lease>(self);
    const Member member = member_of(lease, lease.showing);
    if (PyBuffer_FillInfo(view, self, member.address, static_cast<Py_ssize_t>(member.size), 1, flags) != 0) return -1;
    lease.set->add_export(lease.index);
    lease.set->client().count(count_bytes_viewed, member.size);
    return 0;
  });
}

void lease_releasebuffer(PyObject* self, Py_buffer*) {
  const Lease& lease = *nb::inst_ptr<Lease>(self);
  lease.set->drop_export(lease.index);
}

int writable_getbuffer(PyObject* self, Py_buffer* view, int flags) {
  return export_buffer(view, [&] {
    WritableView& slot = *nb::inst_ptr<WritableView>(self);
    slot.mapping->guard().check("a writable view");
    if (slot.retired) fail<std::runtime_error>("this writable view was retired");
    if (slot.writers->ended != nullptr) fail<std::runtime_error>(slot.writers->ended);
    if (PyBuffer_FillInfo(view, self, slot.address, static_cast<Py_ssize_t>(slot.size), 0, flags) != 0) return -1;
    ++slot.exports;
    ++slot.writers->live;
    return 0;
  });
}

void writable_releasebuffer(PyObject* self, Py_buffer*) {
  WritableView& slot = *nb::inst_ptr<WritableView>(self);
  --slot.exports;
  --slot.writers->live;
}

PyType_Slot lease_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(lease_getbuffer)},
                             {Py_bf_releasebuffer, reinterpret_cast<void*>(lease_releasebuffer)},
                             {0, nullptr}};
PyType_Slot writable_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(writable_getbuffer)},
                                {Py_bf_releasebuffer, reinterpret_cast<void*>(writable_releasebuffer)},
                                {0, nullptr}};

nb::object lease_view(nb::handle self, std::optional<u32> member) {
  Lease& lease = *nb::inst_ptr<Lease>(self);
  lease.showing = member.value_or(lease.member);
  PyObject* view = PyMemoryView_FromObject(self.ptr());
  lease.showing = lease.member;  // memoryview(lease) shows what it always showed
  if (view == nullptr) throw nb::python_error();
  return nb::steal(view);
}

// --- batches

Lease lease_at(const LeaseBatch& batch, Py_ssize_t index) {
  const Py_ssize_t size = batch.set->size();
  if (index < 0) index += size;
  if (index < 0 || index >= size) throw nb::index_error(text("lease ", index, " of ", size).c_str());
  return {batch.set, static_cast<u32>(index), 0, 0};
}

nb::bytes mask(const LeaseBatch& batch) {
  const OutColumn<u8> out(batch.set->asked());
  std::fill_n(out.data(), batch.set->asked(), u8{0});
  for (u32 i = 0; i < batch.set->size(); ++i) out.data()[(*batch.set)[i].key] = 1;
  return out.take();
}

nb::bytes export_leases(const LeaseBatch& batch) {
  const u32 size = batch.set->size();
  const u64 epoch = batch.set->client().index().epoch();
  const OutColumn<Descriptor> out(size);
  for (u32 i = 0; i < size; ++i) {
    const Leased& lease = batch.set->checked(i);
    const Descriptor row{epoch, lease.entry, 0, lease.generation};
    std::memcpy(out.data() + i, &row, sizeof row);
  }
  return out.take();
}

nb::bytes present_of_leases(const LeaseBatch& batch) {
  const OutColumn<PresentRow> out(batch.set->size());
  for (u32 i = 0; i < batch.set->size(); ++i) {
    out.data()[i] = batch.set->client().present_of(batch.set->checked(i).entry);
  }
  return out.take();
}

nb::tuple columns(const LeaseBatch& batch, u32 member) {
  const u32 size = batch.set->size();
  const Client& client = batch.set->client();
  const OutColumn<u64> addresses(size), sizes(size), checksums(size);
  for (u32 i = 0; i < size; ++i) {
    const Member row = client.member(batch.set->checked(i), member);
    addresses.data()[i] = reinterpret_cast<u64>(row.address);
    sizes.data()[i] = row.size;
    checksums.data()[i] = row.checksum;
  }
  return nb::make_tuple(addresses.take(), sizes.take(), checksums.take());
}

}  // namespace

void bind_leases(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<Lease>(module, "Lease", nb::type_slots(lease_slots))
      .def("view", &lease_view, "member"_a = nb::none())
      .def("size", [](const Lease& lease, std::optional<u32> member) { return member_of(lease, member).size; },
           "member"_a = nb::none())
      .def("checksum", [](const Lease& lease, std::optional<u32> member) { return member_of(lease, member).checksum; },
           "member"_a = nb::none())
      .def("heads",
           [](const Lease& lease, std::optional<u32> member) {
             const Member row = member_of(lease, member);
             return nb::make_tuple(row.heads[0], row.heads[1]);
           },
           "member"_a = nb::none())
      .def("layers",
           [](const Lease& lease, std::optional<u32> member) {
             const Member row = member_of(lease, member);
             return nb::make_tuple(row.layers[0], row.layers[1]);
           },
           "member"_a = nb::none())
      .def_prop_ro("entry", [](const Lease& lease) { return (*lease.set)[lease.index].entry; })
      .def_prop_ro("generation", [](const Lease& lease) { return (*lease.set)[lease.index].generation; })
      .def_prop_ro("exports", [](const Lease& lease) { return (*lease.set)[lease.index].exports; })
      .def_prop_ro("released",
                   [](const Lease& lease) {
                     const Leased& item = (*lease.set)[lease.index];
                     return item.released || item.word == none32;
                   })
      .def("release", [](const Lease& lease) { release(*lease.set, lease.index, lease.index + 1); });
  nb::class_<LeaseBatch>(module, "LeaseBatch")
      .def("__len__", [](const LeaseBatch& batch) { return batch.set->size(); })
      .def("__getitem__", &lease_at, "index"_a)
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__",
           [](const LeaseBatch& batch, nb::handle type, nb::handle, nb::handle) {
             const u32 kept = batch.set->release(0, batch.set->size());
             if (kept != 0 && type.is_none()) views_alive(kept);  // an error on its way is not hidden by this one
           },
           "type"_a.none(), "value"_a.none(), "traceback"_a.none())
      .def("release", [](const LeaseBatch& batch) { release(*batch.set, 0, batch.set->size()); })
      .def_prop_ro("held", [](const LeaseBatch& batch) { return batch.set->held(); })
      .def_prop_ro("exports", [](const LeaseBatch& batch) { return batch.set->exports(); })
      .def_prop_ro("mask", &mask)
      .def("export", &export_leases)
      .def("present", &present_of_leases)
      .def("columns", &columns, "member"_a = 0);
  nb::class_<WritableView>(module, "WritableView", nb::type_slots(writable_slots))
      .def_prop_ro("view", [](nb::handle self) { return memoryview_of(self); })
      .def_ro("exports", &WritableView::exports)
      .def("retire", [](WritableView& slot) { slot.retired = true; })
      .def("retire_idle", [](WritableView& slot) { return slot.retired = slot.retired || slot.exports == 0; });
}

}  // namespace kvd
