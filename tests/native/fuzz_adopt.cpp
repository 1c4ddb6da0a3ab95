// An old META and the region of an old client, damaged, as the next daemon takes them over: an exception, or a table in
// which nothing is owned twice, that a client can read and that the daemon can empty and fill.
#include "adopt.hpp"
#include "fuzz_world.hpp"

using namespace fuzz;

namespace {

constexpr u64 pool_bytes = families * object_bytes;

struct Images {
  World world;
  std::vector<u8> meta, region;
  Images() {
    const int fd = memory_file();
    const auto made = std::make_shared<Region>(fd, shape(0));
    world.table.attach(0, made, 1, 1, 1, 1);
    const std::shared_ptr<Client> client = Client::open(world.meta, fd, {world.pool}, false);
    const Key one = key(5), other = key(11);
    const LeaseRef first = client->acquire(reinterpret_cast<const u8*>(&one), 1, 0, false);
    const LeaseRef second = client->acquire(reinterpret_cast<const u8*>(&other), 1, 0, false);
    REQUIRE(first->size() == 1 && second->size() == 1);
    const u32 record = families - 1;
    const u64 place = place_of(0, record * object_bytes), size = object_bytes;
    const u16 ranges[4] = {0, 8, 0, 32};
    const u8 member = 0;
    world.table.reserve({0, 1, 1, &record, &place, &size, &member, ranges});
    meta = image_of(world.meta, world.table.mapping()->size());
    region = image_of(fd, made->bytes());
    close(fd);
  }
};

std::unique_ptr<Table> next_table(int fd, int pool, const Adoption& old) {
  const MetaShape& was = old.index().shape();
  if (was.families_max > 4096 || was.records_max > 4096) fail<std::invalid_argument>("too large for a fuzzer");
  auto table = std::make_unique<Table>(fd, was.families_max, was.records_max, std::vector<u64>{pool_bytes}, was.clients_max + 4u,
                                       TableIdentity{epoch + 1, 0xFEED, 1, 1, {}});
  table->map_segment(0, pool, true);
  return table;
}

void take_over(Table& table, const Adoption& old, int region) {
  AdoptionPlan plan{std::vector<bool>(old.index().shape().segments_count, true), old.sizes(), {}, {},
                    std::vector<u32>(old.index().shape().clients_max, none32), pool_bytes, 3};
  for (const u64 size : plan.sizes) {
    plan.slot_bytes.push_back(size <= pool_bytes ? (size + 63) / 64 * 64 : 0);
    plan.slab_frames.push_back(1);
  }
  const ClientSlot& row = old.index().client(0);
  const u32 ghost = old.index().shape().clients_max;
  plan.ghosts[0] = ghost;
  const RegionShape was{ghost, row.epoch.load(), row.sq_bytes.load(), row.cq_bytes.load(), row.touch_records.load(), row.hazards_max.load()};
  table.attach_ghost(ghost, std::make_shared<Region>(region, was, Region::Existing{}), row);
  const Adopted out = table.adopt(old, plan);
  REQUIRE(out.members.size() == out.families && out.limbo.size() == out.withdrawn);
}

// Each byte of the pool belongs to one record at most; then all that nobody holds leaves.
void live_on(Table& table, int meta, int pool) {
  std::vector<u8> owned(pool_bytes / 64);
  const Index& index = table.index();
  for (u32 i = 0; i < index.shape().records_max; ++i) {
    const Record& record = index.record(i);
    if (record.state.load() == record_free) continue;
    const u64 place = record.place.load(), size = record.size_bytes.load();
    REQUIRE(place_segment(place) == 0 && place_offset(place) + size <= pool_bytes && place % 64 == 0);
    for (u64 at = place_offset(place); at < place_offset(place) + size; at += 64) REQUIRE(owned[at / 64]++ == 0);
  }
  const std::vector<u32> ready = table.scan(0, index.shape().families_max);
  const int fd = memory_file();
  const RegionShape mine{0, epoch + 1, 4096, 4096, 16, 256};
  table.attach(0, std::make_shared<Region>(fd, mine), 1, 1, 1, 1);
  {
    const std::shared_ptr<Client> client = Client::open(meta, fd, {pool}, false);
    volatile u8 sum = 0;
    for (u32 i = 0; i < families; ++i) {
      const Key one = key(i);
      const LeaseRef set = client->acquire(reinterpret_cast<const u8*>(&one), 1, 0, false);
      if (set->size() == 0) continue;
      for (u32 m = 0; m < members_max; ++m) {
        if (!index.has((*set)[0].entry, m)) continue;
        const Member member = client->member((*set)[0], m);
        for (u64 at = 0; at < member.size; ++at) sum = sum + member.address[at];
      }
    }
  }
  const Evicted gone = table.evict(ready.data(), ready.size(), false);
  REQUIRE(gone.freed.size() + gone.held.size() == ready.size());
  close(fd);
}

}  // namespace

// The first byte splits the edits between META and the region.
extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size) {
  static Images images;
  if (size == 0) return 0;
  const u64 middle = (size - 1) * data[0] / 255 / edit_bytes * edit_bytes;
  const int old_meta = damaged(images.meta, data + 1, middle);
  const int region = damaged(images.region, data + 1 + middle, size - 1 - middle);
  const int meta = memory_file();
  std::unique_ptr<Table> table;
  bool taken = false;
  try {
    const Adoption old(old_meta);
    table = next_table(meta, images.world.pool, old);
    take_over(*table, old, region);
    taken = true;
  } catch (const std::runtime_error&) {
  } catch (const std::invalid_argument&) {
  }
  // What was taken over is good: from here on nothing is thrown.
  if (taken) live_on(*table, meta, images.world.pool);
  close(old_meta), close(region), close(meta);
  return 0;
}
