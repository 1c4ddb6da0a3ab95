// Index, leases and rings as plain C++, also under ThreadSanitizer and AddressSanitizer.
//
// All sides use one mapping of META and of each CLIENT region, so that a sanitizer sees every access to the same
// address. What each test guards is named where it is: it fails in a build with KVD_DEFINES=KVD_TESTING when run with
// KVD_MUTANT=x.
#include <cstring>
#include <random>
#include <thread>

#include "check.hpp"
#include "client.hpp"
#include "mutants.hpp"
#include "table.hpp"

using namespace kvd;

namespace {

constexpr u64 seed = 20240611;
constexpr u64 object_bytes = 256;

struct World {
  static constexpr u64 epoch = 99;
  int meta = memory_file("meta"), pool;
  std::unique_ptr<Table> table;
  std::vector<std::shared_ptr<Region>> regions;
  u32 families;

  explicit World(u32 families_max, u32 records_max = 0, u32 clients = 4) : families(families_max) {
    if (records_max == 0) records_max = families_max;
    const u64 pool_bytes = u64{records_max} * object_bytes;
    pool = memory_file("pool", pool_bytes);
    const TableIdentity identity{epoch, 0x9E3779B97F4A7C15, 1, 1, {}};
    table = std::make_unique<Table>(meta, families_max, records_max, std::vector<u64>{pool_bytes}, clients, identity);
    table->map_segment(0, pool, true);
  }
  ~World() { close(meta), close(pool); }

  // A client over the very mappings of the daemon.
  std::shared_ptr<Client> client(u32 slot, u32 hazards = 1024) {
    const int fd = memory_file("client");
    regions.push_back(std::make_shared<Region>(fd, RegionShape{slot, epoch, 4096, 4096, 64, hazards}));
    close(fd);
    table->attach(slot, regions.back(), 1, 1, 1, 1);
    return std::make_shared<Client>(table->mapping(), regions.back()->mapping(),
                                    std::vector<std::shared_ptr<Mapping>>{table->segment(0)});
  }

  void reserve(u32 record, u8 member = 0, u32 owner = 0) {
    const u64 place = place_of(0, record * object_bytes), size = object_bytes;
    const u16 ranges[4] = {0, 8, 0, 32};
    table->reserve({owner, 1, 1, &record, &place, &size, &member, ranges});
  }
  u8 publish(const Key& key, u32 record, u32 entry, u8 member = 0, u32 members = 1, u64 checksum = 7, u32 owner = 0,
             u8* differs = nullptr, u32 split = 0) {
    u8 status = 255, differ = 0;
    u32 out = none32;
    table->publish({owner, 1, reinterpret_cast<const u8*>(&key), &member, split, members, &record, &checksum, &entry, 1},
                   &status, &out, &differ);
    if (differs != nullptr) *differs = differ;
    return status;
  }
  void put(const Key& key, u32 number) {
    reserve(number);
    CHECK(publish(key, number, number) == publish_done);
  }
  Evicted evict(std::vector<u32> entries, bool withdraw = false) {
    return table->evict(entries.data(), entries.size(), withdraw);
  }
};

const u8* bytes_of(const Key& key) { return reinterpret_cast<const u8*>(key.words); }
const u8* bytes_of(const std::vector<Key>& keys) { return reinterpret_cast<const u8*>(keys.data()); }

std::vector<Key> random_keys(std::mt19937_64& random, u64 count) {
  std::vector<Key> keys(count);
  for (Key& key : keys) {
    for (u64& word : key.words) word = random();
  }
  return keys;
}

// Full to families_max and emptied again, ten times over with new keys: no insert fails, no slot stays behind.
void test_turnover() {
  constexpr u32 families = 4096;
  World world(families);
  auto client = world.client(0);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 10; ++round) {
    const std::vector<Key> keys = random_keys(random, families);
    for (u32 i = 0; i < families; ++i) world.put(keys[i], i);
    CHECK(client->match(bytes_of(keys), families, 0) == families);
    CHECK(world.table->scan(0, families).size() == families);
    std::vector<u32> all(families);
    for (u32 i = 0; i < families; ++i) all[i] = i;
    const Evicted out = world.evict(all);
    CHECK(out.freed.size() == families && out.records.size() == families && out.held.empty());
    CHECK(client->match(bytes_of(keys), families, 0) == 0);
    const Index& index = world.table->index();
    for (u32 b = 0; b < index.shape().buckets_count; ++b) {
      for (Shared<u64>& slot : index.bucket(b).slots) CHECK(slot.load() == 0);
    }
  }
}

// Keys that share both buckets and the tag: sixteen fit, each is told from the others (IDENTITY), the next is refused.
void test_collisions() {
  World world(64);
  auto client = world.client(0);
  std::vector<Key> keys;
  for (u64 i = 0; i < 17; ++i) keys.push_back({{1, 2, i, 4}});
  for (u32 i = 0; i < 16; ++i) world.put(keys[i], i);
  world.reserve(16);
  CHECK(world.publish(keys[16], 16, 16) == publish_no_index);
  for (u32 i = 0; i < 16; ++i) CHECK(world.table->index().find(keys[i]).entry == i);
  CHECK(!world.table->index().find(keys[16]));
  CHECK(client->match(bytes_of(keys), 17, 0) == 16);
  CHECK(world.evict({5}).freed.size() == 1);
  CHECK(client->match(bytes_of(keys), 17, 0) == 5);
  CHECK(world.publish(keys[16], 16, 5) == publish_done);
  const auto each = client->acquire(bytes_of(keys), 17, 0, true);
  CHECK(each->size() == 16 && (*each)[15].key == 16 && (*each)[15].entry == 5);
}

// I5: a record is published once, by its owner, for its member (OWNER_CHECK).
void test_publish_checks() {
  World world(64);
  const Key key{{1, 2, 3, 4}};
  world.reserve(0, 0, 2);
  CHECK_THROWS(std::runtime_error, world.publish(key, 0, 0, 0, 1, 7, 1));
  CHECK_THROWS(std::runtime_error, world.publish(key, 0, 0, 1, 2, 7, 2));
  CHECK_THROWS(std::runtime_error, world.publish(key, 1, 0));
  CHECK_THROWS(std::invalid_argument, world.publish(key, 64, 0));
  CHECK_THROWS(std::invalid_argument, world.publish(key, 0, 64, 0, 1, 7, 2));
  CHECK_THROWS(std::runtime_error, world.reserve(0, 0, 2));
  CHECK(world.publish(key, 0, 0, 0, 1, 7, 2) == publish_done);
  CHECK_THROWS(std::runtime_error, world.publish(key, 0, 1, 0, 1, 7, 2));
  world.reserve(1, 0, 2);
  u8 differs = 9;
  CHECK(world.publish(key, 1, 1, 0, 1, 7, 2, &differs) == publish_present && differs == 0);
  CHECK(world.publish(key, 1, 1, 0, 1, 8, 2, &differs) == publish_present && differs == 1);
  // Split otherwise: the same member is compared, and one that is not there differs from nothing.
  CHECK(world.publish(key, 1, 1, 0, 1, 7, 2, &differs, 5) == publish_present && differs == 0);
  CHECK(world.publish(key, 1, 1, 0, 1, 8, 2, &differs, 5) == publish_present && differs == 1);
  world.reserve(2, 3, 2);
  CHECK(world.publish(key, 2, 2, 3, 1, 8, 2, &differs, 5) == publish_present && differs == 0);
  const u32 record = 1, published = 0;
  world.table->free_records(&record, 1);
  CHECK_THROWS(std::runtime_error, world.table->free_records(&record, 1));
  CHECK_THROWS(std::runtime_error, world.table->free_records(&published, 1));
}

// A family grows member by member, is complete with the last one, and leaves as a whole.
void test_members() {
  World world(8, 256);
  auto client = world.client(0);
  const Key key{{11, 12, 13, 14}};
  for (u32 m = 0; m < 128; ++m) {
    CHECK(client->match(bytes_of(key), 1, 0) == 0);
    world.reserve(m, static_cast<u8>(m));
    CHECK(world.publish(key, m, 3, static_cast<u8>(m), 128, m) == publish_done);
  }
  CHECK(client->match(bytes_of(key), 1, 0) == 1);
  {
    const LeaseRef lease = client->acquire(bytes_of(key), 1, 0, false);
    CHECK(lease->size() == 1);
    for (u32 m = 0; m < 128; ++m) {
      const Member member = client->member((*lease)[0], m);
      CHECK(member.checksum == m && member.size == object_bytes && member.layers[1] == 32);
      CHECK(member.address == world.table->memory(0, m * object_bytes, object_bytes));
    }
    CHECK(world.evict({3}).held.size() == 1);
    CHECK(world.table->held(0).leases == 1 && world.table->held(0).bytes == 128 * object_bytes);
    CHECK(world.table->holders(3) == std::vector<u32>{0});
  }
  const Evicted out = world.evict({3});
  CHECK(out.records.size() == 128 && out.places.size() == 128 && out.sizes[5] == object_bytes);
}

// A hazard keeps a family (HAZARD_SCAN); withdrawn, it stays in limbo while its key lives on elsewhere.
void test_limbo() {
  World world(64);
  auto client = world.client(0), worker = world.client(1);
  const Key key{{1, 2, 3, 4}};
  world.put(key, 0);
  LeaseSet* lease = client->fetch(bytes_of(key), 0, 0);
  CHECK(lease != nullptr);
  const Descriptor descriptor{World::epoch, 0, 0, (*lease)[0].generation};
  const u8* wire = reinterpret_cast<const u8*>(&descriptor);
  CHECK(world.evict({0}).held.size() == 1);
  CHECK(client->match(bytes_of(key), 1, 0) == 1);  // back to READY
  CHECK(world.evict({0}, true).held.size() == 1);
  CHECK(client->match(bytes_of(key), 1, 0) == 0);
  world.put(key, 1);  // the same key, while the old bytes are still read
  CHECK(client->match(bytes_of(key), 1, 0) == 1);
  CHECK(world.evict({0}).held.size() == 1);  // not revived by a plain eviction
  CHECK(world.table->index().find(key).entry == 1);
  CHECK(worker->adopt(wire, 1)->size() == 1);
  {
    const LeaseRef adopted = worker->adopt(wire, 1);
    CHECK(adopted->size() == 1);
    lease->unref();
    CHECK(world.evict({0}).held.size() == 1);  // the worker's own hazard holds it now
  }
  CHECK(world.evict({0}).freed.size() == 1);
  CHECK(client->match(bytes_of(key), 1, 0) == 1);  // the new one kept its slot
  CHECK(worker->adopt(wire, 1)->size() == 0);
}

// Reuse is a new generation: what named the old one names nothing (GENERATION).
void test_generations() {
  World world(64);
  auto client = world.client(0);
  const Key old_key{{1, 2, 3, 4}}, new_key{{5, 6, 7, 8}};
  world.put(old_key, 0);
  const u64 before = sg_generation(world.table->index().entry(0).sg.load());
  const Descriptor stale{World::epoch, 0, 0, before};
  CHECK(world.evict({0}).freed.size() == 1);
  world.put(new_key, 0);
  CHECK(sg_generation(world.table->index().entry(0).sg.load()) > before);
  CHECK(client->adopt(reinterpret_cast<const u8*>(&stale), 1)->size() == 0);
  const Descriptor wrong[3] = {{World::epoch + 1, 0, 0, before + 1}, {World::epoch, 64, 0, 1}, {World::epoch, none32, 0, 1}};
  CHECK(client->adopt(reinterpret_cast<const u8*>(wrong), 3)->size() == 0);
  // A word with another generation's number pins nothing.
  auto* words = reinterpret_cast<ClientHeader*>(world.regions[0]->mapping()->data());
  auto* hazards = world.regions[0]->mapping()->at<Shared<u64>>(words->hazards_offset, 1024, "hazards");
  hazards[900].store(hazard_of(before, 0));
  words->hazards_high.store(none32);  // hostile: beyond the table
  CHECK(world.evict({0}).freed.size() == 1);
}

// Words of a client: all or nothing, used again, released late when a view lives (EXPORTS).
void test_hazards() {
  World world(64);
  auto client = world.client(0, 8);
  std::mt19937_64 random(seed);
  const std::vector<Key> keys = random_keys(random, 16);
  for (u32 i = 0; i < 16; ++i) world.put(keys[i], i);
  CHECK_THROWS(HazardsExhausted, client->acquire(bytes_of(keys), 9, 0, false));
  CHECK(client->hazards().used() == 0 && world.table->held(0).leases == 0);
  const LeaseRef first = client->acquire(bytes_of(keys), 8, 0, false);
  CHECK_THROWS(HazardsExhausted, client->fetch(bytes_of(keys[9]), 0, 0));
  first->add_export(3);
  CHECK(first->release(0, 8) == 1 && first->held() == 1 && first->release(0, 8) == 1);
  CHECK(world.table->held(0).leases == 1);
  CHECK_THROWS(std::runtime_error, first->checked(3));
  CHECK(world.evict({3}).held.size() == 1);
  first->drop_export(3);
  CHECK(client->hazards().used() == 0 && world.evict({3}).freed.size() == 1);
  for (int i = 0; i < 100; ++i) CHECK(client->acquire(bytes_of(keys), 8, 0, true)->size() == 7);
}

// One lease that stays does not keep the mark high: words low down are used first, and the mark falls with the top.
void test_mark_falls() {
  World world(64);
  auto client = world.client(0, 1u << 15);
  std::mt19937_64 random(seed);
  const std::vector<Key> keys = random_keys(random, 8);
  for (u32 i = 0; i < 8; ++i) world.put(keys[i], i);
  auto& mark = reinterpret_cast<ClientHeader*>(world.regions[0]->mapping()->data())->hazards_high;
  const LeaseRef stays = client->acquire(bytes_of(keys), 1, 0, false);
  using Ref = std::unique_ptr<LeaseRef>;
  const auto lease = [&](u64 count) { return std::make_unique<LeaseRef>(client->acquire(bytes_of(keys), count, 0, false)); };
  std::vector<Ref> many;
  for (u32 i = 0; i < 2500; ++i) many.push_back(lease(8));
  CHECK(mark.load() == 20001 && world.table->held(0).leases == 20001);
  std::vector<Ref> some;
  while (many.size() > 100) {
    if (many.size() % 50 == 0) some.push_back(std::move(many.back()));
    many.pop_back();
  }
  const u32 held = client->hazards().used();
  CHECK(world.table->held(0).leases == held && mark.load() > 19000);
  some.clear();  // the holes below go with the top
  CHECK(mark.load() < 1000 + 4096 && client->hazards().used() == 801);
  many.erase(many.begin(), many.begin() + 50);
  const LeaseRef low = client->acquire(bytes_of(keys), 8, 0, false);
  CHECK((*low)[0].word < 401 && mark.load() < 1000 + 4096);
  CHECK(world.table->held(0).leases == client->hazards().used());
  for (u32 round = 0; round < 20000; ++round) {
    if (random() % 2 == 0 || many.empty()) many.push_back(lease(1 + random() % 8));
    else std::swap(many[random() % many.size()], many.back()), many.pop_back();
    if (round % 500 == 0) CHECK(world.table->held(0).leases == client->hazards().used());
  }
}

// A closed client releases what nobody looks at and keeps its memory for the rest.
void test_close() {
  World world(64);
  auto client = world.client(0);
  std::mt19937_64 random(seed);
  const std::vector<Key> keys = random_keys(random, 4);
  for (u32 i = 0; i < 4; ++i) world.put(keys[i], i);
  LeaseRef set = client->acquire(bytes_of(keys), 4, 0, false);
  set->add_export(2);
  CHECK(client->close() == 1 && world.table->held(0).leases == 1);
  CHECK_THROWS(std::runtime_error, client->match(bytes_of(keys), 4, 0));
  set->drop_export(2);
  CHECK(world.table->held(0).leases == 0 && client->close() == 0);
  CHECK(world.regions[0]->counters()[count_leases_released] == 4);
}

// --- rings

struct RingPair {
  alignas(64) u8 memory[256]{};
  Shared<u64> tail{0}, head{0};
  Shared<u32> sleeping{0};
  RingWords words() { return {memory, sizeof memory, &tail, &head, &sleeping}; }
  void raw(u64 at, u32 size, u16 type, u16 flags) {
    const Frame frame{size, type, flags, 1};
    std::memcpy(memory + at % sizeof memory, &frame, 8);
  }
};

// Every size at every position, through many laps; order and bytes are kept, full is full, sleepers are woken once.
void test_ring_roundtrip() {
  RingPair ring;
  Producer producer(ring.words());
  Consumer consumer(ring.words());
  std::mt19937_64 random(seed);
  std::vector<std::vector<u8>> sent;
  u64 received = 0;
  for (u64 op = 0; op < 20000; ++op) {
    std::vector<u8> payload(random() % (producer.payload_bytes_max() + 1));
    for (u8& byte : payload) byte = static_cast<u8>(random());
    const bool slept = op % 3 == 0 && consumer.may_sleep();
    const PushResult result = producer.push(static_cast<u16>(op % 5), sent.size(), payload.data(), payload.size());
    CHECK(result == (result == push_full ? push_full : slept ? push_wake : push_done));
    if (result != push_full) {
      sent.push_back(payload);
      if (random() % 4 != 0) continue;
    }
    CHECK(!consumer.may_sleep());
    consumer.pop(static_cast<u32>(random() % 3 + 1), [&](const FrameView& frame) {
      CHECK(frame.op == received && frame.size == sent[received].size());
      CHECK(std::equal(sent[received].begin(), sent[received].end(), frame.payload));
      ++received;
    });
  }
  CHECK(received > 4000);
  const std::vector<u8> large(producer.payload_bytes_max() + 1);
  CHECK_THROWS(std::invalid_argument, producer.push(1, 1, large.data(), large.size()));
}

// I6: cursors and lengths that cannot be end the ring, before a byte outside is touched (RING_BOUNDS).
void test_ring_hostile() {
  const auto rejects = [](u64 tail, u32 size, u16 type, u16 flags) {
    RingPair ring;
    Consumer consumer(ring.words());
    ring.raw(0, size, type, flags);
    ring.tail.store(tail);
    CHECK_THROWS(RingError, consumer.pop(16, [](const FrameView&) {}));
  };
  rejects(264, 0, 1, 0);             // more than the ring holds
  rejects(~u64{0} - 7, 0, 1, 0);     // before the start
  rejects(20, 0, 1, 0);              // not aligned
  rejects(24, 16, 1, 0);             // longer than what was pushed
  rejects(256, 0xFFFFFFF8, 1, 0);    // longer than anything
  rejects(256, 0xFFFFFFFF, 1, 0);
  rejects(256, 120, 1, 0);           // longer than half the ring
  rejects(32, 0, 1, 7);              // flags nobody defined
  rejects(64, 0, frame_pad, 0);      // a pad beyond what was pushed
  rejects(256, 8, frame_pad, 0);
  RingPair ring;
  Producer producer(ring.words());
  CHECK(producer.push(1, 1, nullptr, 0) == push_done);
  ring.head.store(1000);
  CHECK_THROWS(RingError, producer.push(1, 1, nullptr, 0));
}

// Rows that were overwritten or make no sense are skipped, the rest arrives in order.
void test_touches() {
  World world(64);
  auto client = world.client(0);
  const Key keys[2] = {{{1, 2, 3, 4}}, {{77, 6, 7, 8}}};
  world.put(keys[0], 0);
  CHECK(client->match(bytes_of(keys[0]), 2, 0) == 1 && world.regions[0]->touches().empty());
  CHECK(client->match(bytes_of(keys[0]), 2, 42) == 1);
  client->acquire(bytes_of(keys[0]), 2, 43, false);
  std::vector<Touch> rows = world.regions[0]->touches();
  CHECK(rows.size() == 2 && rows[0].kind == touch_match && rows[1].kind == touch_acquire);
  for (const Touch& row : rows) {
    CHECK(row.matched == 1 && row.asked == 2 && row.missed_key8 == 77 && row.deepest_entry == 0);
    CHECK(row.deepest_generation == 1 && row.started_ns != 0);
  }
  for (u64 i = 1; i <= 200; ++i) client->match(bytes_of(keys[0]), 1, i);
  rows = world.regions[0]->touches();
  CHECK(rows.size() == 64 && rows.front().request == 137 && rows.back().request == 200);
  auto* header = reinterpret_cast<ClientHeader*>(world.regions[0]->mapping()->data());
  header->touch_tail.store(~u64{0} - 5);
  CHECK(world.regions[0]->touches().empty());
  header->touch_tail.store(3);
  CHECK(world.regions[0]->touches().size() <= 64);
}

// --- stress

// Readers lease and read while the daemon evicts and rewrites the same slots. Each object is filled with the number of
// its publication, which is also its checksum: a reader that sees another number under its lease read another object.
// Guards I2, I3 and I4 together (REVALIDATE, HAZARD_SCAN); with ThreadSanitizer also that no read races a write.
void reader(Client& client, const std::vector<Key>& keys, u64 batch, const std::atomic<bool>& stop, u64 id,
            std::atomic<u64>& reads) {
  std::mt19937_64 random(seed + id);
  std::vector<Key> asked(batch);
  while (!stop.load(std::memory_order_relaxed)) {
    for (Key& key : asked) key = keys[random() % keys.size()];
    const LeaseRef set = client.acquire(bytes_of(asked), asked.size(), 0, true);
    for (u32 i = 0; i < set->size(); ++i) {
      const Member member = client.member((*set)[i], 0);
      u64 words[object_bytes / 8];
      std::memcpy(words, member.address, sizeof words);
      CHECK(words[0] == asked[(*set)[i].key].words[0]);
      for (u32 w = 1; w < object_bytes / 8; ++w) CHECK(words[w] == member.checksum);
      reads.fetch_add(1, std::memory_order_relaxed);
    }
    client.match(bytes_of(asked), asked.size(), 1);
    if (random() % 4 == 0) set->release(0, set->size());
  }
}

// With two families and one victim at a time it also meets what only a store buffer does (READER_FENCE, DAEMON_FENCE; most runs do).
void test_stress(u64 rounds, u32 families, u32 keys_count, u64 batch) {
  World world(families);
  std::mt19937_64 random(seed);
  const std::vector<Key> keys = random_keys(random, keys_count);
  std::vector<std::shared_ptr<Client>> clients;
  for (u32 i = 0; i < 3; ++i) clients.push_back(world.client(i));
  std::atomic<bool> stop{false};
  std::atomic<u64> reads[3] = {};
  std::vector<std::thread> threads;
  for (u32 i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] { reader(*clients[i], keys, batch, stop, i, reads[i]); });
  }
  std::vector<u32> free_numbers, used;
  for (u32 i = 0; i < families; ++i) free_numbers.push_back(i);
  u64 publication = 0, freed = 0, held = 0;
  const auto all_read = [&] { return reads[0] > 1000 && reads[1] > 1000 && reads[2] > 1000; };
  for (u64 round = 0; round < rounds || !all_read(); ++round) {
    while (!free_numbers.empty()) {
      const Key& key = keys[random() % keys_count];
      if (world.table->index().find(key)) break;
      const u32 number = free_numbers.back();
      u64 words[object_bytes / 8];
      std::fill(std::begin(words), std::end(words), ++publication);
      words[0] = key.words[0];
      std::memcpy(world.table->memory(0, number * object_bytes, object_bytes), words, sizeof words);
      world.reserve(number);
      CHECK(world.publish(key, number, number, 0, 1, publication) == publish_done);
      free_numbers.pop_back();
      used.push_back(number);
    }
    std::shuffle(used.begin(), used.end(), random);
    const std::vector<u32> victims(used.begin(), used.begin() + static_cast<long>(std::min<u64>(used.size(), batch)));
    const Evicted out = world.evict(victims);
    freed += out.freed.size();
    held += out.held.size();
    for (const u32 number : out.freed) {
      free_numbers.push_back(number);
      std::erase(used, number);
    }
    if (round % 64 == 0) {
      for (const auto& region : world.regions) region->touches();
    }
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("stress: %lu rounds, %lu reads, %lu freed, %lu held\n", rounds, reads[0] + reads[1] + reads[2], freed, held);
  CHECK(freed > 1000 && held != 0);
  for (u32 i = 0; i < 3; ++i) CHECK(world.table->held(i).leases == 0);
}

}  // namespace

int main(int argc, char** argv) {
  std::printf("seed %lu\n", seed);
  test_turnover();
  test_collisions();
  test_publish_checks();
  test_members();
  test_limbo();
  test_generations();
  test_hazards();
  test_mark_falls();
  test_close();
  test_ring_roundtrip();
  test_ring_hostile();
  test_touches();
  const u64 rounds = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 40000;
  test_stress(rounds, 64, 96, 8);
  test_stress(10 * rounds, 2, 2, 1);
  std::puts("ok");
}
