// Python functions over copy, checksum, chain and paged. Sizes, types and ranges are checked here, with the argument's
// name in the message; the C++ below trusts its callers.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "bind_buffer.hpp"
#include "bind_integers.hpp"
#include "chain.hpp"
#include "checksum.hpp"
#include "copy.hpp"
#include "cpu.hpp"
#include "paged.hpp"
#include "sha256.hpp"

namespace nb = nanobind;
using namespace kvd;

namespace {

constexpr std::int64_t chunk_tokens_max = std::int64_t{1} << 20;  // kvd.limits.chunk_tokens_max

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

void check_copy(const Buffer& dst, const Buffer& src) {
  if (dst.size() != src.size()) {
    refuse("dst has " + std::to_string(dst.size()) + " bytes, src has " + std::to_string(src.size()) +
           ": they must be equal");
  }
  const auto to = reinterpret_cast<std::uintptr_t>(dst.data()), from = reinterpret_cast<std::uintptr_t>(src.data());
  if (to < from + src.size() && from < to + dst.size()) refuse("dst and src overlap");
}

nb::bytes new_bytes(std::size_t size) {
  PyObject* object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
  if (object == nullptr) throw nb::python_error();
  return nb::steal<nb::bytes>(object);
}

std::uint8_t* bytes_data(const nb::bytes& bytes) {
  return reinterpret_cast<std::uint8_t*>(PyBytes_AS_STRING(bytes.ptr()));
}

Buffer identity_buffer(nb::handle object, const char* name) {
  Buffer identity(object, name, Buffer::Access::read);
  if (identity.size() != identity_bytes) {
    refuse(std::string(name) + " has " + std::to_string(identity.size()) + " bytes: an identity has 32");
  }
  return identity;
}

std::uint64_t py_xxh3_64(nb::handle buf, std::uint64_t seed) {
  const Buffer data(buf, "buf", Buffer::Access::read);
  const GilReleaseIfLong release(data.size());
  return xxh3_64(data.data(), data.size(), seed);
}

nb::bytes py_xxh3_128(nb::handle buf, std::uint64_t seed) {
  const Buffer data(buf, "buf", Buffer::Access::read);
  nb::bytes out = new_bytes(16);
  const GilReleaseIfLong release(data.size());
  kernels().xxh3_128(data.data(), data.size(), seed, bytes_data(out));
  return out;
}

nb::bytes py_tokens_u32(nb::handle tokens) {
  const IntegerArray ids(tokens, "tokens");
  return nb::bytes(reinterpret_cast<const char*>(ids.bytes()), ids.count() * sizeof(std::uint32_t));
}

void py_copy(nb::handle dst, nb::handle src, int threads) {
  const Buffer to(dst, "dst", Buffer::Access::write), from(src, "src", Buffer::Access::read);
  check_copy(to, from);
  if (threads < 1 || threads > static_cast<int>(copy_threads_max)) {
    refuse("threads = " + std::to_string(threads) + ": must be 1 .. " + std::to_string(copy_threads_max));
  }
  const GilReleaseIfLong release(to.size());
  copy_nt(to.data(), from.data(), to.size(), static_cast<unsigned>(threads));
}

std::uint64_t py_copy_checksum(nb::handle dst, nb::handle src, std::uint64_t seed) {
  const Buffer to(dst, "dst", Buffer::Access::write), from(src, "src", Buffer::Access::read);
  check_copy(to, from);
  const GilReleaseIfLong release(to.size());
  return copy_checksum(to.data(), from.data(), to.size(), seed);
}

// Buffers of the extras, one a chunk; empty where there are none.
std::vector<Buffer> extras_buffers(nb::handle extras, std::size_t chunks) {
  std::vector<Buffer> buffers;
  if (extras.is_none()) return buffers;
  if (!PyList_Check(extras.ptr()) && !PyTuple_Check(extras.ptr())) {
    throw nb::type_error("extras: a list of bytes or None is required");
  }
  const std::size_t given = nb::len(extras);
  if (given != chunks) {
    refuse("extras has " + std::to_string(given) + " items for " + std::to_string(chunks) +
           " full chunks: one each, b'' for none");
  }
  buffers.reserve(given);
  for (std::size_t i = 0; i < given; ++i) {
    buffers.emplace_back(extras[i], "extras[" + std::to_string(i) + "]", Buffer::Access::read);
    if (buffers.back().size() > UINT32_MAX) refuse("extras[" + std::to_string(i) + "]: 4 GiB or more");
  }
  return buffers;
}

nb::bytes py_chain(nb::handle parent, nb::handle tokens, std::int64_t chunk_tokens, int algorithm, nb::handle extras) {
  const Buffer root = identity_buffer(parent, "parent");
  if (chunk_tokens < 1 || chunk_tokens > chunk_tokens_max) {
    refuse("chunk_tokens = " + std::to_string(chunk_tokens) + ": must be 1 .. " + std::to_string(chunk_tokens_max));
  }
  if (algorithm != static_cast<int>(ChainAlgorithm::sha256) &&
      algorithm != static_cast<int>(ChainAlgorithm::xxh3_128)) {
    refuse("algorithm = " + std::to_string(algorithm) + ": 0 is SHA-256, 1 is XXH3_128");
  }
  const IntegerArray ids(tokens, "tokens");
  const std::size_t chunks = ids.count() / static_cast<std::size_t>(chunk_tokens);
  const std::vector<Buffer> extra_buffers = extras_buffers(extras, chunks);
  std::vector<ByteSpan> spans;
  for (const Buffer& extra : extra_buffers) spans.push_back({extra.data(), extra.size()});
  nb::bytes out = new_bytes(chunks * identity_bytes);
  {
    const GilReleaseIfLong release(ids.count() * 16);  // SHA-256 takes about four times as long as a copy, each token 4 B
    chain_hash(root.data(), ids.bytes(), static_cast<std::size_t>(chunk_tokens), chunks,
               static_cast<ChainAlgorithm>(algorithm), spans.empty() ? nullptr : spans.data(), bytes_data(out));
  }
  return out;
}

nb::bytes py_chain_engine(nb::handle parent, nb::handle hashes, std::int64_t hash_bytes) {
  const Buffer root = identity_buffer(parent, "parent");
  const Buffer data(hashes, "hashes", Buffer::Access::read);
  if (hash_bytes < 1 || hash_bytes > 4096) {
    refuse("hash_bytes = " + std::to_string(hash_bytes) + ": must be 1 .. 4096");
  }
  const auto each = static_cast<std::size_t>(hash_bytes);
  if (data.size() % each != 0) {
    refuse("hashes has " + std::to_string(data.size()) + " bytes: not a multiple of hash_bytes = " +
           std::to_string(each));
  }
  nb::bytes out = new_bytes(data.size() / each * identity_bytes);
  const GilReleaseIfLong release(data.size() / each * 512);
  chain_engine(root.data(), data.data(), each, data.size() / each, bytes_data(out));
  return out;
}

nb::bytes py_seeds(nb::handle identities, std::int64_t member) {
  const Buffer data(identities, "identities", Buffer::Access::read);
  if (data.size() % identity_bytes != 0) {
    refuse("identities has " + std::to_string(data.size()) + " bytes: not a multiple of 32");
  }
  if (member < 0 || member > UINT16_MAX) {
    refuse("member = " + std::to_string(member) + ": must be 0 .. 65535");
  }
  const std::size_t count = data.size() / identity_bytes;
  nb::bytes out = new_bytes(count * sizeof(std::uint64_t));
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t seed = object_seed(data.data() + i * identity_bytes, static_cast<std::uint16_t>(member));
    std::memcpy(bytes_data(out) + i * sizeof seed, &seed, sizeof seed);
  }
  return out;
}

using DimTuple = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;
using RunTuple = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t,
                            std::vector<DimTuple>>;

void init_plan(PagedPlan* self, std::uint64_t object_bytes, std::uint64_t blocks_count,
               std::uint64_t blocks_per_object, const std::vector<RunTuple>& tuples) {
  std::vector<PagedRun> runs;
  runs.reserve(tuples.size());
  for (const auto& [tensor, run_bytes, paged_offset, object_offset, paged_block, object_block, dims] : tuples) {
    PagedRun run{tensor, run_bytes, paged_offset, object_offset, paged_block, object_block, {}};
    for (const auto& [count, paged_stride, object_stride] : dims) run.dims.push_back({count, paged_stride, object_stride});
    runs.push_back(std::move(run));
  }
  new (self) PagedPlan(object_bytes, blocks_count, blocks_per_object, runs);
}

std::vector<Buffer> buffers_of(const nb::sequence& items, const char* name, Buffer::Access access) {
  std::vector<Buffer> buffers;
  buffers.reserve(nb::len(items));
  for (nb::handle item : items) {
    buffers.emplace_back(item, std::string(name) + "[" + std::to_string(buffers.size()) + "]", access);
  }
  return buffers;
}

std::vector<std::uint8_t*> addresses(const std::vector<Buffer>& buffers) {
  std::vector<std::uint8_t*> result;
  result.reserve(buffers.size());
  for (const Buffer& buffer : buffers) result.push_back(buffer.data());
  return result;
}

void check_sizes(const std::vector<Buffer>& buffers, const std::vector<std::uint64_t>& least, const std::string& name) {
  if (buffers.size() != least.size()) {
    refuse(name + " has " + std::to_string(buffers.size()) + " items: the plan uses " + std::to_string(least.size()));
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (buffers[i].size() >= least[i]) continue;
    refuse(name + "[" + std::to_string(i) + "] has " + std::to_string(buffers[i].size()) +
           " bytes: the plan reaches " + std::to_string(least[i]));
  }
}

void check_paged(const PagedPlan& plan, PagedDirection direction, const std::vector<Buffer>& objects,
                 const std::vector<Buffer>& tensors, const IntegerArray& ids) {
  if (direction == PagedDirection::gather && plan.moved_bytes() != plan.object_bytes()) {
    refuse("plan: it fills " + std::to_string(plan.moved_bytes()) + " of an object's " +
           std::to_string(plan.object_bytes()) + " bytes; a gather must fill all of it");
  }
  for (std::size_t o = 0; o < objects.size(); ++o) {
    if (objects[o].size() == plan.object_bytes()) continue;
    refuse("objects[" + std::to_string(o) + "] has " + std::to_string(objects[o].size()) +
           " bytes: the plan's objects have " + std::to_string(plan.object_bytes()));
  }
  check_sizes(tensors, plan.tensor_bytes_min(), "tensors");
  if (ids.count() != objects.size() * plan.blocks_per_object()) {
    refuse("block_ids has " + std::to_string(ids.count()) + " items: " + std::to_string(objects.size()) +
           " objects need " + std::to_string(objects.size() * plan.blocks_per_object()));
  }
  ids.check_below(plan.blocks_count());
  if (direction == PagedDirection::scatter) ids.check_distinct(plan.blocks_count());
}

void py_paged_copy(const PagedPlan& plan, int direction_code, const nb::sequence& objects, const nb::sequence& tensors,
                   nb::handle block_ids) {
  if (direction_code != 0 && direction_code != 1) {
    refuse("direction = " + std::to_string(direction_code) + ": 0 is gather, 1 is scatter");
  }
  const auto direction = static_cast<PagedDirection>(direction_code);
  const bool gather = direction == PagedDirection::gather;
  const auto read = Buffer::Access::read, write = Buffer::Access::write;
  const std::vector<Buffer> object_buffers = buffers_of(objects, "objects", gather ? write : read);
  const std::vector<Buffer> tensor_buffers = buffers_of(tensors, "tensors", gather ? read : write);
  const IntegerArray ids(block_ids, "block_ids");
  check_paged(plan, direction, object_buffers, tensor_buffers, ids);
  const std::vector<std::uint32_t> aligned_ids = ids.values();
  const std::size_t objects_count = object_buffers.size();
  const auto object_addresses = addresses(object_buffers), tensor_addresses = addresses(tensor_buffers);
  const GilReleaseIfLong release(plan.moved_bytes() * objects_count);
  paged_copy(plan, direction, object_addresses.data(), objects_count, tensor_addresses.data(), aligned_ids.data());
}

using CopyTuple = std::tuple<std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t,
                             std::vector<DimTuple>>;

void init_strided(StridedPlan* self, const std::vector<CopyTuple>& tuples) {
  std::vector<StridedCopy> copies;
  copies.reserve(tuples.size());
  for (const auto& [source, destination, source_offset, destination_offset, run_bytes, loops] : tuples) {
    StridedCopy copy{source, destination, run_bytes, source_offset, destination_offset, {}};
    for (const auto& [count, source_stride, destination_stride] : loops) {
      copy.loops.push_back({count, source_stride, destination_stride});
    }
    copies.push_back(std::move(copy));
  }
  new (self) StridedPlan(copies);
}

void py_strided_copy(const StridedPlan& plan, const nb::sequence& sources, const nb::sequence& destinations) {
  const std::vector<Buffer> from = buffers_of(sources, "sources", Buffer::Access::read);
  const std::vector<Buffer> to = buffers_of(destinations, "destinations", Buffer::Access::write);
  check_sizes(from, plan.source_bytes_min(), "sources");
  check_sizes(to, plan.destination_bytes_min(), "destinations");
  const auto from_addresses = addresses(from), to_addresses = addresses(to);
  const GilReleaseIfLong release(plan.moved_bytes());
  strided_copy(plan, from_addresses.data(), to_addresses.data());
}

std::vector<std::string> py_isa_names() {
  std::vector<std::string> names;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (kernels_by_name(name) != nullptr) names.emplace_back(name);
  }
  return names;
}

void py_isa_select(const std::string& name) {
  if (!select_kernels(name.c_str())) refuse("isa = '" + name + "': not one that this CPU runs");
}

}  // namespace

void bind_compute(nb::module_& module) {
  using namespace nb::literals;
  module.def("xxh3_64", py_xxh3_64, "buf"_a, "seed"_a = 0);
  module.def("xxh3_128", py_xxh3_128, "buf"_a, "seed"_a = 0);
  module.def("tokens_u32", py_tokens_u32, "tokens"_a);
  module.def("copy", py_copy, "dst"_a, "src"_a, "threads"_a = 1);
  module.def("copy_checksum", py_copy_checksum, "dst"_a, "src"_a, "seed"_a);
  module.def("chain", py_chain, "parent"_a, "tokens"_a, "chunk_tokens"_a, "algorithm"_a = 0, "extras"_a = nb::none());
  module.def("chain_engine", py_chain_engine, "parent"_a, "hashes"_a, "hash_bytes"_a);
  module.def("seeds", py_seeds, "identities"_a, "member"_a);
  nb::class_<PagedPlan>(module, "PagedPlan")
      .def("__init__", init_plan, "object_bytes"_a, "blocks_count"_a, "blocks_per_object"_a, "runs"_a)
      .def_prop_ro("object_bytes", &PagedPlan::object_bytes)
      .def_prop_ro("blocks_count", &PagedPlan::blocks_count)
      .def_prop_ro("blocks_per_object", &PagedPlan::blocks_per_object)
      .def_prop_ro("moved_bytes", &PagedPlan::moved_bytes)
      .def_prop_ro("tensor_bytes_min", &PagedPlan::tensor_bytes_min);
  module.def("paged_copy", py_paged_copy, "plan"_a, "direction"_a, "objects"_a, "tensors"_a, "block_ids"_a);
  nb::class_<StridedPlan>(module, "StridedPlan")
      .def("__init__", init_strided, "copies"_a)
      .def_prop_ro("moved_bytes", &StridedPlan::moved_bytes)
      .def_prop_ro("source_bytes_min", &StridedPlan::source_bytes_min)
      .def_prop_ro("destination_bytes_min", &StridedPlan::destination_bytes_min);
  module.def("strided_copy", py_strided_copy, "plan"_a, "sources"_a, "destinations"_a);
  module.def("isa_names", py_isa_names);
  module.def("isa_selected", [] { return std::string(kernels().name); });
  module.def("isa_select", py_isa_select, "name"_a);
  module.def("sha256_force_portable", sha256_force_portable, "portable"_a);
}
