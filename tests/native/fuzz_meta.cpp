// META and CLIENT as a client reads them, damaged or of another version: an exception, a miss, or bytes that are there.
#include "fuzz_world.hpp"

using namespace fuzz;

namespace {

struct Images {
  World world;
  std::vector<u8> meta, region;
  Images() {
    meta = image_of(world.meta, world.table.mapping()->size());
    const int fd = memory_file();
    const auto made = std::make_shared<Region>(fd, shape(0));
    world.table.attach(0, made, 1, 1, 1, 1);
    region = image_of(fd, made->bytes());
    close(fd);
  }
};

// Every byte that a client is given lies inside the segment, and is there.
void read_all(const Client& client, const LeaseSet& set) {
  const Mapping& segment = *client.segment(0);
  volatile u8 sum = 0;
  for (u32 i = 0; i < set.size(); ++i) {
    for (const u32 number : {0u, 1u, 127u}) {
      try {
        const Member member = client.member(set.checked(i), number);
        REQUIRE(member.address >= segment.data() && member.size <= segment.size() &&
                member.address + member.size <= segment.data() + segment.size());
        for (u64 at = 0; at < member.size; ++at) sum = sum + member.address[at];
      } catch (const std::exception&) {
      }
    }
  }
}

template <class Call>
void attempt(Call&& call) {
  try {
    call();
  } catch (const std::exception&) {
  }
}

void use(Client& client) {
  std::vector<u8> keys(32 * families);
  for (u32 i = 0; i < families; ++i) {
    const Key one = key(i);
    std::memcpy(keys.data() + 32 * i, &one, 32);
  }
  attempt([&] { client.match(keys.data(), families, 7); });
  attempt([&] {
    std::vector<PresentRow> rows(families);
    client.present(keys.data(), families, rows.data());
  });
  for (const bool each : {false, true}) {
    attempt([&] {
      const LeaseRef set = client.acquire(keys.data(), families, 7, each);
      read_all(client, *set);
      set->release(0, set->size());
    });
  }
  for (u32 i = 0; i < families; i += 3) {
    attempt([&] {
      LeaseSet* set = client.fetch(keys.data() + 32 * i, i % 2, 7);
      if (set == nullptr) return;
      const LeaseRef kept(set);
      set->unref();  // the reference that fetch left
      read_all(client, *set);
    });
  }
  attempt([&] { client.submissions().push(4, 1, nullptr, 0); });
  attempt([&] { client.completions().pop(16, [](const FrameView& frame) {
    volatile u8 sum = 0;
    for (u32 i = 0; i < frame.size; ++i) sum = sum + frame.payload[i];
  }); });
  attempt([&] { client.close(); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static Images images;
  if (size == 0) return 0;
  const u64 middle = (size - 1) * data[0] / 255 / edit_bytes * edit_bytes;
  const int meta = damaged(images.meta, data + 1, middle);
  const int region = damaged(images.region, data + 1 + middle, size - 1 - middle);
  attempt([&] {
    const std::shared_ptr<Client> client = Client::open(meta, region, {images.world.pool}, false);
    use(*client);
  });
  close(meta), close(region);
  return 0;
}
