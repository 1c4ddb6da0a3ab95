// What a client writes into its region, as the daemon reads it: RingError, or frames that lie inside the ring.
#include "fuzz_world.hpp"

using namespace fuzz;

namespace {

template <class Call>
void attempt(Call&& call) {
  try {
    call();
  } catch (const RingError&) {
  }
}

}  // namespace

// The first byte: how many frames are pushed by a good client before the edits; then edits; then all that the daemon does.
extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static World world;
  if (size == 0) return 0;
  const int fd = memory_file();
  const auto region = std::make_shared<Region>(fd, shape(1));
  world.table.attach(1, region, 1, 1, 1, 1);
  {
    const std::shared_ptr<Client> client = Client::open(world.meta, fd, {world.pool}, false);
    for (u32 i = 0; i < data[0] % 40u; ++i) client->submissions().push(static_cast<u16>(i % 5), i, data, size % 200);
    edit(region->mapping()->data(), region->bytes(), data + 1, size - 1);
    u64 seen = 0;
    volatile u8 sum = 0;
    for (int turn = 0; turn < 3; ++turn) {
      attempt([&] {
        region->submissions().pop(64, [&](const FrameView& frame) {
          const u8* begin = region->mapping()->data();
          REQUIRE(frame.payload >= begin && frame.payload + frame.size <= begin + region->bytes());
          for (u32 i = 0; i < frame.size; ++i) sum = sum + frame.payload[i];
          seen += frame.size;
        });
      });
      attempt([&] { region->completions().push(4, 1, data, size % 1000); });
      (void)region->touches();
      (void)region->counters();
      edit(region->mapping()->data(), region->bytes(), data + 1, size - 1);
    }
    const Table::Held held = world.table.held(1);
    REQUIRE(held.leases <= region->shape().hazards_max);
    (void)world.table.holders(5);
    (void)region->touches();
  }
  world.table.detach(1);
  close(fd);
  return 0;
}
