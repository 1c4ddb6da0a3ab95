// Python's view of the client's side: Client and the rules of families. Leases and views are in bind_lease.cpp.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <utility>

#include "bind_lease.hpp"
#include "bind_memory.hpp"
#include "checksum.hpp"
#include "client.hpp"

using namespace kvd;

namespace {

// --- client

nb::object fetch(Client& client, nb::handle key, u32 member, u64 request) {
  const Column<u8> bytes(key, "key", identity_size);
  LeaseSet* set = client.fetch(bytes.data(), member, request);
  if (set == nullptr) return nb::none();
  LeaseRef ref(set);
  set->unref();  // the reference that fetch left
  return nb::cast(Lease{ref, 0, member, member});
}

LeaseBatch adopt(Client& client, nb::handle descriptors, nb::handle keys_in) {
  const Column<u8> bytes(descriptors, "descriptors");
  if (bytes.size() % sizeof(Descriptor) != 0) {
    fail<std::invalid_argument>("descriptors has ", bytes.size(), " bytes: not a multiple of ", sizeof(Descriptor));
  }
  const u64 count = bytes.size() / sizeof(Descriptor);
  if (keys_in.is_none()) return {client.adopt(bytes.data(), count, nullptr)};
  const Keys keys(keys_in);
  if (keys.count() != count) fail<std::invalid_argument>("keys has ", keys.count(), " items for ", count, " descriptors");
  return {client.adopt(bytes.data(), count, keys.data())};
}

nb::bytes present(const Client& client, nb::handle keys_in) {
  const Keys keys(keys_in);
  const OutColumn<PresentRow> out(keys.count());
  client.present(keys.data(), keys.count(), out.data());
  return out.take();
}

nb::tuple counters(const Client& client) {
  nb::list values;
  for (u32 i = 0; i < counters_count; ++i) values.append(client.counter(static_cast<Counter>(i)));
  return nb::tuple(values);
}

WritableView writable(const Client& client, u64 place, u64 size) {
  u8* address = nullptr;
  const auto& mapping = client.writable(place, size, address);
  return {mapping, client.writers(), address, size};
}

u64 sum(const Column<u64>& sizes) {
  u64 bytes = 0;
  for (u64 i = 0; i < sizes.size(); ++i) bytes += sizes.data()[i];
  return bytes;
}

nb::bytes checksums(const Client& client, nb::handle places_in, nb::handle sizes_in, nb::handle seeds_in) {
  const Column<u64> places(places_in, "places"), sizes(sizes_in, "sizes"), seeds(seeds_in, "seeds");
  const u64 count = places.size();
  if (sizes.size() != count || seeds.size() != count) {
    fail<std::invalid_argument>("places, sizes and seeds have ", count, ", ", sizes.size(), " and ", seeds.size(), " items");
  }
  const OutColumn<u64> out(count);
  const Slots slots = client.slots(places.data(), sizes.data(), count);  // stays while others close the client
  {
    const GilReleaseIfLong unlocked(sum(sizes));
    for (u64 i = 0; i < count; ++i) out.data()[i] = xxh3_64(slots.addresses[i], sizes.data()[i], seeds.data()[i]);
  }
  return out.take();
}

// Counts as one who writes, with the GIL held at both ends.
class Writing {
 public:
  explicit Writing(const Client& client) : writers_(client.writers()) { ++writers_->live; }
  Writing(const Writing&) = delete;
  Writing& operator=(const Writing&) = delete;
  ~Writing() { --writers_->live; }
  bool serving() const noexcept { return writers_->ended == nullptr; }

 private:
  std::shared_ptr<Writers> writers_;
};

// All sources are looked at before the first byte is copied.
nb::bytes fill(Client& client, nb::handle places_in, nb::handle sizes_in, nb::sequence sources, nb::handle seeds_in) {
  const Column<u64> places(places_in, "places"), sizes(sizes_in, "sizes"), seeds(seeds_in, "seeds");
  const u64 count = places.size();
  if (sizes.size() != count || seeds.size() != count || nb::len(sources) != count) {
    fail<std::invalid_argument>("places, sizes, sources and seeds have ", count, ", ", sizes.size(), ", ", nb::len(sources),
                                " and ", seeds.size(), " items");
  }
  std::vector<Buffer> from;
  from.reserve(count);
  for (u64 i = 0; i < count; ++i) {
    from.emplace_back(sources[i], "source", Buffer::Access::read);
    if (from.back().size() != sizes.data()[i]) {
      fail<std::invalid_argument>("source ", i, " has ", from.back().size(), " bytes, its slot ", sizes.data()[i]);
    }
  }
  const OutColumn<u64> out(count);
  const Slots slots = client.slots(places.data(), sizes.data(), count);
  const Writing writing(client);
  const u64 bytes = sum(sizes);
  {
    const GilReleaseIfLong unlocked(bytes);
    for (u64 i = 0; i < count; ++i) {
      out.data()[i] = copy_checksum(slots.addresses[i], from[i].data(), from[i].size(), seeds.data()[i]);
    }
  }
  if (writing.serving()) client.count(count_bytes_filled, bytes);
  return out.take();
}

// Sleeps only after the ring was found empty with the sleeping word set. Comes back after signal handlers have run, and
// when it was stirred: who waits looks whether it still has to.
int wait(Client& client, int wake_fd, u64 timeout_ns, int stir_fd) {
  const u64 now = now_ns(), deadline = timeout_ns > ~u64{0} - now ? ~u64{0} : now + timeout_ns;
  for (;;) {
    if (!client.completions().may_sleep()) return Client::wait_ready;
    Client::Wait result;
    {
      const nb::gil_scoped_release unlocked;
      result = Client::poll_once(wake_fd, stir_fd, deadline);
    }
    client.completions().awake();
    if (result == Client::wait_interrupted && PyErr_CheckSignals() != 0) throw nb::python_error();
    if (client.completions().waiting()) return Client::wait_ready;
    if (result != Client::wait_again) return result;
  }
}

}  // namespace

// Rules as (kind, window) a group; masks as (low, high) a group.
void bind_family(nb::module_& module) {
  using namespace nb::literals;
  using Pairs = std::vector<std::pair<u64, u64>>;
  nb::class_<FamilyRules>(module, "FamilyRules")
      .def("__init__",
           [](FamilyRules* self, u64 chunk_tokens, const std::vector<std::pair<u32, u32>>& rules) {
             std::vector<FamilyRules::Group> groups;
             for (const auto& [kind, window] : rules) groups.push_back({kind, window});
             new (self) FamilyRules(chunk_tokens, std::move(groups));
           },
           "chunk_tokens"_a, "groups"_a)
      .def("add",
           [](FamilyRules& rules, u32 split, const Pairs& pairs) {
             std::vector<FamilyRules::Masks> masks;
             for (const auto& [low, high] : pairs) masks.push_back({low, high});
             rules.add(split, std::move(masks));
           },
           "split"_a, "masks"_a)
      .def("usable",
           [](const FamilyRules& rules, nb::handle rows_in) {
             const Column<u8> bytes(rows_in, "rows");
             if (bytes.size() % sizeof(PresentRow) != 0) {
               fail<std::invalid_argument>("rows has ", bytes.size(), " bytes: not a multiple of ", sizeof(PresentRow));
             }
             PrefixWalk walk(rules);
             for (u64 at = 0; at < bytes.size(); at += sizeof(PresentRow)) {
               PresentRow row;
               std::memcpy(&row, bytes.data() + at, sizeof row);
               if (!walk.step(row.present[0], row.present[1], row.split)) break;
             }
             return nb::make_tuple(walk.usable(), walk.unknown_split());
           },
           "rows"_a);
}

void bind_client(nb::module_& module) {
  using namespace nb::literals;
  bind_leases(module);
  bind_family(module);
  nb::class_<Client>(module, "Client")
      .def(nb::new_(&Client::open), "meta_fd"_a, "client_fd"_a, "segment_fds"_a, "writable"_a)
      .def_prop_ro("epoch", [](const Client& client) { return client.index().epoch(); })
      .def_prop_ro("state", [](const Client& client) { return client.index().header().state.load(std::memory_order_acquire); })
      .def_prop_ro("slot", &Client::slot)
      .def_prop_ro("held", [](const Client& client) { return client.hazards().used(); })
      .def_prop_ro("payload_bytes_max", [](Client& client) { return client.submissions().payload_bytes_max(); })
      .def("match",
           [](Client& client, nb::handle keys_in, u64 request) {
             const Keys keys(keys_in);
             return client.match(keys.data(), keys.count(), request);
           },
           "keys"_a, "request"_a = 0)
      .def("present", &present, "keys"_a)
      .def("acquire",
           [](Client& client, nb::handle keys_in, u64 request) {
             const Keys keys(keys_in);
             return LeaseBatch{client.acquire(keys.data(), keys.count(), request, false)};
           },
           "keys"_a, "request"_a = 0)
      .def("acquire_each",
           [](Client& client, nb::handle keys_in, u64 request) {
             const Keys keys(keys_in);
             return LeaseBatch{client.acquire(keys.data(), keys.count(), request, true)};
           },
           "keys"_a, "request"_a = 0)
      .def("match_family",
           [](Client& client, nb::handle keys_in, const FamilyRules& rules, u64 request) {
             const Keys keys(keys_in);
             const PrefixWalk walk = client.match_family(keys.data(), keys.count(), rules, request);
             return nb::make_tuple(walk.usable(), walk.unknown_split());
           },
           "keys"_a, "rules"_a, "request"_a = 0)
      .def("acquire_family",
           [](Client& client, nb::handle keys_in, const FamilyRules& rules, u64 request) {
             const Keys keys(keys_in);
             PrefixWalk walk(rules);
             LeaseBatch batch{client.acquire_family(keys.data(), keys.count(), rules, request, walk)};
             return nb::make_tuple(batch, walk.usable(), walk.unknown_split());
           },
           "keys"_a, "rules"_a, "request"_a = 0)
      .def("fetch", &fetch, "key"_a, "member"_a = 0, "request"_a = 0)
      .def("adopt", &adopt, "descriptors"_a, "keys"_a = nb::none())
      .def("writable", &writable, "place"_a, "size"_a)
      .def("submit",
           [](Client& client, u16 type, u64 op, nb::handle payload) {
             return push_frame(client.submissions(), type, op, payload);
           },
           "type"_a, "op"_a, "payload"_a)
      .def("poll", [](Client& client, u32 frames_max) { return pop_frames(client.completions(), frames_max); },
           "frames_max"_a)
      .def("wait", &wait, "wake_fd"_a, "timeout_ns"_a, "stir_fd"_a = -1)
      .def("may_sleep", [](Client& client) { return client.completions().may_sleep(); })
      .def("awake", [](Client& client) { client.completions().awake(); })
      .def("add",
           [](Client& client, u32 counter, u64 amount) {
             client.check();
             if (counter >= counters_count) fail<std::invalid_argument>("counter ", counter, " of ", counters_count);
             client.count(static_cast<Counter>(counter), amount);
           },
           "counter"_a, "amount"_a)
      .def("checksums", &checksums, "places"_a, "sizes"_a, "seeds"_a)
      .def("fill", &fill, "places"_a, "sizes"_a, "sources"_a, "seeds"_a)
      .def("prefault",
           [](const Client& client, u32 segment, u64 offset, u64 bytes) {
             const std::shared_ptr<Mapping> mapping = client.segment(segment);  // stays while others close the client
             const nb::gil_scoped_release unlocked;
             mapping->prefault(offset, bytes);
           },
           "segment"_a, "offset"_a, "bytes"_a)
      .def("counters", &counters)
      .def_prop_ro("lost", &Client::lost)
      .def("lose", &Client::lose)
      .def("retire", &Client::retire)
      .def_prop_ro("left", &Client::left)
      .def("close", &Client::close);
}
