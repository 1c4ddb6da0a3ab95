// Copies, hashes and chains as plain C++, also under ThreadSanitizer and AddressSanitizer.
//
// Every kernel row that this CPU runs is compared with memcpy and with the other rows, at all alignments, with guard
// bytes around each destination: a store past the end, a missed tail or a head fix-up that is off by one fails here.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "chain.hpp"
#include "checksum.hpp"
#include "copy.hpp"
#include "cpu.hpp"
#include "paged.hpp"
#include "sha256.hpp"

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint64_t seed = 20240607;
constexpr std::uint8_t guard = 0xa5;

Bytes random_bytes(std::mt19937_64& random, std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; i += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min(sizeof word, size - i));
  }
  return bytes;
}

std::vector<const kvd::Kernels*> rows() {
  std::vector<const kvd::Kernels*> result;
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (const kvd::Kernels* row = kvd::kernels_by_name(name)) result.push_back(row);
  }
  return result;
}

bool only_changed(const Bytes& buffer, std::size_t begin, std::size_t size, const std::uint8_t* expected) {
  for (std::size_t i = 0; i < begin; ++i) {
    if (buffer[i] != guard) return false;
  }
  for (std::size_t i = begin + size; i < buffer.size(); ++i) {
    if (buffer[i] != guard) return false;
  }
  return std::memcmp(buffer.data() + begin, expected, size) == 0;
}

void test_copy_kernels() {
  std::mt19937_64 random(seed);
  const Bytes source = random_bytes(random, 20000);
  for (const kvd::Kernels* row : rows()) {
    for (const std::size_t size : {0, 1, 63, 64, 65, 127, 128, 255, 256, 257, 1024, 1025, 1087, 1088, 2047, 2048, 2049,
                                   3000, 4096, 4097, 9999, 16384}) {
      for (std::size_t to = 0; to < 130; to += 1 + random() % 7) {
        const std::size_t from = random() % 130;
        Bytes target(to + size + 200, guard);
        row->copy_stream(target.data() + to, source.data() + from, size);
        CHECK(only_changed(target, to, size, source.data() + from));
        if (size <= 1024) continue;
        Bytes fused(to + size + 200, guard);
        const std::uint64_t sum = row->copy_stream_xxh3_64(fused.data() + to, source.data() + from, size, size * 77);
        CHECK(only_changed(fused, to, size, source.data() + from));
        CHECK(sum == row->xxh3_64(source.data() + from, size, size * 77));
        CHECK(sum == kvd::kernels_baseline.xxh3_64(source.data() + from, size, size * 77));
      }
    }
  }
}

void test_hash_rows_agree() {
  std::mt19937_64 random(seed + 1);
  const Bytes source = random_bytes(random, 5000);
  CHECK(kvd::xxh3_64("", 0) == 0x2d06800538d394c2ULL);  // published value of the empty input
  for (const kvd::Kernels* row : rows()) {
    for (std::size_t size = 0; size <= source.size(); size += 1 + size / 16) {
      std::uint8_t wide[16], narrow[16];
      const std::uint64_t hash_seed = random();
      row->xxh3_128(source.data(), size, hash_seed, wide);
      kvd::kernels_baseline.xxh3_128(source.data(), size, hash_seed, narrow);
      CHECK(std::memcmp(wide, narrow, sizeof wide) == 0);
      CHECK(row->xxh3_64(source.data(), size, hash_seed) == kvd::kernels_baseline.xxh3_64(source.data(), size, hash_seed));
    }
  }
}

void test_copy_policies() {
  std::mt19937_64 random(seed + 2);
  const Bytes source = random_bytes(random, (std::size_t{9} << 20) + 77);
  for (const std::size_t size : {std::size_t{0}, std::size_t{100}, kvd::stream_bytes_min - 1, kvd::stream_bytes_min,
                                 source.size() - 5}) {
    for (const unsigned threads : {1U, 2U, 64U}) {
      Bytes target(size + 100, guard);
      kvd::copy_nt(target.data() + 3, source.data() + 5, size, threads);
      CHECK(only_changed(target, 3, size, source.data() + 5));
    }
    Bytes target(size + 100, guard);
    CHECK(kvd::copy_checksum(target.data() + 3, source.data() + 5, size, 9) == kvd::xxh3_64(source.data() + 5, size, 9));
    CHECK(only_changed(target, 3, size, source.data() + 5));
  }
}

// What a publish relies on: another thread that sees the flag sees the streamed bytes (I8). Under x86 without the fence
// this fails only by luck; the test is here for ThreadSanitizer and for architectures with weaker order.
void test_copy_then_publish() {
  const Bytes source(kvd::stream_bytes_min, 7);
  Bytes target(source.size());
  std::atomic<bool> ready{false};
  std::thread reader([&] {
    while (!ready.load(std::memory_order_acquire)) std::this_thread::yield();
    CHECK(target == source);
  });
  kvd::copy_nt(target.data(), source.data(), source.size());
  ready.store(true, std::memory_order_release);
  reader.join();
}

std::string hex(const std::uint8_t* bytes, std::size_t size) {
  std::string text;
  char pair[3];
  for (std::size_t i = 0; i < size; ++i) {
    std::snprintf(pair, sizeof pair, "%02x", bytes[i]);
    text += pair;
  }
  return text;
}

std::string sha256_hex(const std::string& message, std::size_t piece) {
  kvd::Sha256 hash;
  for (std::size_t at = 0; at < message.size(); at += piece) {
    hash.update(message.data() + at, std::min(piece, message.size() - at));
  }
  std::uint8_t digest[32];
  hash.finish(digest);
  return hex(digest, sizeof digest);
}

void test_sha256() {
  for (const bool portable : {false, true}) {
    kvd::sha256_force_portable(portable);
    for (const std::size_t piece : {1, 3, 64, 1000}) {
      // FIPS 180-4 examples
      CHECK(sha256_hex("", piece) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
      CHECK(sha256_hex("abc", piece) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
      CHECK(sha256_hex("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", piece) ==
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
      CHECK(sha256_hex(std::string(1000000, 'a'), piece) ==
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
  }
  for (std::size_t size = 0; size < 300; ++size) {  // every length of the padding, both ways
    const std::string message(size, static_cast<char>(size));
    kvd::sha256_force_portable(true);
    const std::string portable = sha256_hex(message, 1000);
    kvd::sha256_force_portable(false);
    CHECK(sha256_hex(message, 1000) == portable);
  }
}

void test_chain_is_incremental() {
  std::mt19937_64 random(seed + 3);
  const Bytes tokens = random_bytes(random, 10 * 16 * 4), parent = random_bytes(random, 32);
  for (const auto algorithm : {kvd::ChainAlgorithm::sha256, kvd::ChainAlgorithm::xxh3_128}) {
    Bytes whole(10 * 32), parts(10 * 32), changed(10 * 32);
    kvd::chain_hash(parent.data(), tokens.data(), 16, 10, algorithm, nullptr, whole.data());
    kvd::chain_hash(parent.data(), tokens.data(), 16, 4, algorithm, nullptr, parts.data());
    kvd::chain_hash(parts.data() + 3 * 32, tokens.data() + 4 * 64, 16, 6, algorithm, nullptr, parts.data() + 4 * 32);
    CHECK(whole == parts);
    std::vector<kvd::ByteSpan> extras(10);
    extras[5] = {parent.data(), 1};
    kvd::chain_hash(parent.data(), tokens.data(), 16, 10, algorithm, extras.data(), changed.data());
    CHECK(std::equal(whole.begin(), whole.begin() + 5 * 32, changed.begin()));
    for (std::size_t chunk = 5; chunk < 10; ++chunk) {
      CHECK(std::memcmp(whole.data() + chunk * 32, changed.data() + chunk * 32, 32) != 0);
    }
  }
  CHECK(kvd::object_seed(parent.data(), 0) != kvd::object_seed(parent.data(), 1));
}

// A plan of one run over all its dims that fills the object densely, the tensor with gaps.
kvd::PagedRun random_run(std::mt19937_64& random, std::uint64_t& object_at, std::uint64_t& paged_at,
                         std::uint64_t blocks_per_object) {
  const std::uint64_t run_choices[] = {1, 2, 8, 24, 64, 100, 128, 256, 300, 1024, 4096};
  kvd::PagedRun run;
  run.run_bytes = run_choices[random() % std::size(run_choices)];
  std::uint64_t object = run.run_bytes, paged = run.run_bytes;
  for (std::size_t dims = random() % 5; dims > 0; --dims) {  // built from the inside
    const std::uint64_t count = 1 + random() % 3;
    run.dims.insert(run.dims.begin(), {count, paged + (random() % 2) * 32, object});
    object *= count;
    paged = run.dims.front().paged_stride * (count - 1) + paged;
  }
  run.object_block_stride = object;
  run.object_offset = object_at;
  object_at += object * blocks_per_object;
  run.paged_offset = paged_at;
  run.paged_block_stride = paged + random() % 100;
  return run;
}

template <typename Visit>
void each_piece(const kvd::PagedRun& run, std::size_t depth, std::uint64_t paged, std::uint64_t object, Visit visit) {
  if (depth == run.dims.size()) return visit(paged, object);
  for (std::uint64_t i = 0; i < run.dims[depth].count; ++i) {
    each_piece(run, depth + 1, paged + i * run.dims[depth].paged_stride, object + i * run.dims[depth].object_stride, visit);
  }
}

void test_paged_against_reference() {
  std::mt19937_64 random(seed + 4);
  for (int round = 0; round < 200; ++round) {
    const std::uint64_t blocks_per_object = 1 + random() % 4, blocks_count = blocks_per_object * 3 + random() % 5;
    std::uint64_t object_bytes = 0;
    std::vector<kvd::PagedRun> runs;
    for (std::uint32_t tensor = 0; tensor < 1 + random() % 3; ++tensor) {
      std::uint64_t paged_at = random() % 70;
      runs.push_back(random_run(random, object_bytes, paged_at, blocks_per_object));
      runs.back().tensor = tensor;
    }
    const kvd::PagedPlan plan(object_bytes, blocks_count, blocks_per_object, runs);
    CHECK(plan.moved_bytes() == object_bytes);
    std::vector<std::uint32_t> ids(blocks_count);
    for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
    std::shuffle(ids.begin(), ids.end(), random);
    std::vector<Bytes> tensors, objects(2, Bytes(object_bytes, guard));
    for (const std::uint64_t size : plan.tensor_bytes_min()) tensors.push_back(random_bytes(random, size));
    std::vector<std::uint8_t*> tensor_at, object_at;
    for (Bytes& tensor : tensors) tensor_at.push_back(tensor.data());
    for (Bytes& object : objects) object_at.push_back(object.data());

    std::vector<Bytes> expected = objects;
    std::vector<Bytes> scattered;
    for (const Bytes& tensor : tensors) scattered.emplace_back(tensor.size(), guard);
    for (std::size_t o = 0; o < objects.size(); ++o) {
      for (const kvd::PagedRun& run : runs) {
        for (std::uint64_t b = 0; b < blocks_per_object; ++b) {
          const std::uint64_t paged = run.paged_offset + ids[o * blocks_per_object + b] * run.paged_block_stride;
          each_piece(run, 0, paged, run.object_offset + b * run.object_block_stride, [&](auto from, auto to) {
            std::memcpy(expected[o].data() + to, tensors[run.tensor].data() + from, run.run_bytes);
            std::memcpy(scattered[run.tensor].data() + from, tensors[run.tensor].data() + from, run.run_bytes);
          });
        }
      }
    }
    kvd::paged_copy(plan, kvd::PagedDirection::gather, object_at.data(), 2, tensor_at.data(), ids.data());
    CHECK(objects == expected);
    for (Bytes& tensor : tensors) std::fill(tensor.begin(), tensor.end(), guard);
    kvd::paged_copy(plan, kvd::PagedDirection::scatter, object_at.data(), 2, tensor_at.data(), ids.data());
    CHECK(tensors == scattered);
  }
}

// One of two shapes, in no order of blocks: a run a block, or four runs a block of which the inner two change places.
kvd::PagedPlan streamed_plan(std::uint64_t run_bytes, std::uint64_t blocks, bool with_dims) {
  const std::uint64_t heads = with_dims ? 4 : 1;
  kvd::PagedRun run{0, run_bytes, 0, 0, heads * run_bytes, heads * run_bytes, {}};
  if (with_dims) run.dims = {{2, 2 * run_bytes, run_bytes}, {2, run_bytes, 2 * run_bytes}};
  return {blocks * heads * run_bytes, blocks, blocks, {run}};
}

// Enough bytes for stores past the cache, which the rounds above rarely reach. Where each side starts in a cache line
// decides which way a run takes: whole lines, parts of lines, through the cache. Guards stand close on both sides.
void test_paged_streams(std::uint64_t run_bytes, std::size_t paged_start, std::size_t object_start, bool with_dims) {
  std::mt19937_64 random(seed + run_bytes);
  const std::uint64_t block_bytes = run_bytes * (with_dims ? 4 : 1);
  const std::uint64_t blocks = kvd::stream_bytes_min / block_bytes + 3;
  const kvd::PagedPlan plan = streamed_plan(run_bytes, blocks, with_dims);
  const std::size_t size = blocks * block_bytes;
  std::vector<std::uint32_t> ids(blocks);
  for (std::uint32_t i = 0; i < ids.size(); ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), random);
  const Bytes source = random_bytes(random, size);
  Bytes expected(size);
  for (std::uint64_t b = 0; b < blocks; ++b) {
    for (std::uint64_t head = 0; head < block_bytes / run_bytes; ++head) {
      const std::uint64_t from = with_dims ? (head % 2) * 2 + head / 2 : head;
      std::memcpy(&expected[b * block_bytes + head * run_bytes], &source[ids[b] * block_bytes + from * run_bytes],
                  run_bytes);
    }
  }
  constexpr std::size_t line = 64;
  const auto start_in = [](Bytes& memory, std::size_t start) {
    const std::size_t to_line = (line - reinterpret_cast<std::uintptr_t>(memory.data()) % line) % line;
    return memory.data() + line + to_line + start;
  };
  Bytes paged_memory(size + 4 * line, guard), object_memory(size + 4 * line, guard);
  std::uint8_t *paged = start_in(paged_memory, paged_start), *object = start_in(object_memory, object_start);
  std::memcpy(paged, source.data(), size);
  kvd::paged_copy(plan, kvd::PagedDirection::gather, &object, 1, &paged, ids.data());
  CHECK(only_changed(object_memory, static_cast<std::size_t>(object - object_memory.data()), size, expected.data()));
  std::memset(paged, 0, size);
  kvd::paged_copy(plan, kvd::PagedDirection::scatter, &object, 1, &paged, ids.data());
  CHECK(only_changed(paged_memory, static_cast<std::size_t>(paged - paged_memory.data()), size, source.data()));
}

void test_paged_streams() {
  for (const std::uint64_t run_bytes :
       {16, 64, 100, 128, 191, 192, 256, 320, 500, 512, 1000, 1023, 1024, 1088, 2048, 4096, 4160, 32768 + 8}) {
    for (const std::size_t start : {0, 1, 16, 63}) {
      for (const bool with_dims : {false, true}) {
        test_paged_streams(run_bytes, start, 0, with_dims);
        test_paged_streams(run_bytes, 0, start, with_dims);
        test_paged_streams(run_bytes, start, start, with_dims);
      }
    }
  }
}

template <typename Make>
bool refused(Make make, const std::string& expected) {
  try {
    make();
  } catch (const std::invalid_argument& error) {
    return std::string(error.what()).find(expected) != std::string::npos;
  }
  return false;
}

void test_plans_refuse() {
  const kvd::PagedRun good{0, 64, 0, 0, 64, 64, {}};
  const auto plan = [](kvd::PagedRun run, std::uint64_t object_bytes = 128, std::uint64_t blocks_count = 4) {
    return [=] { kvd::PagedPlan(object_bytes, blocks_count, 2, {run}); };
  };
  CHECK(!refused(plan(good), ""));
  CHECK(refused(plan(good, 127), "ends at byte 128 of an object of 127"));
  CHECK(refused(plan(good, 0), "object_bytes"));
  CHECK(refused(plan(good, 128, 0), "blocks_count"));
  kvd::PagedRun bad = good;
  bad.run_bytes = 0;
  CHECK(refused(plan(bad), "runs[0].run_bytes"));
  bad = good;
  bad.paged_block_stride = ~std::uint64_t{0};  // would wrap round 2^64
  CHECK(refused(plan(bad), "runs[0].paged_block_stride"));
  bad = good;
  bad.dims = {{std::uint64_t{1} << 40, std::uint64_t{1} << 40, 0}};
  CHECK(refused(plan(bad), "runs[0].dims.paged_stride"));
  bad.dims.assign(5, {1, 0, 0});
  CHECK(refused(plan(bad), "runs[0].dims = 5"));
  bad.dims = {{0, 0, 0}};
  CHECK(refused(plan(bad), "runs[0].dims.count"));
}

}  // namespace

int main() {
  std::printf("seed %llu, kernels", static_cast<unsigned long long>(seed));
  for (const kvd::Kernels* row : rows()) std::printf(" %s", row->name);
  std::printf("\n");
  test_copy_kernels();
  test_hash_rows_agree();
  for (const kvd::Kernels* row : rows()) {
    CHECK(kvd::select_kernels(row->name));
    test_copy_policies();
    test_copy_then_publish();
    test_paged_against_reference();
    test_paged_streams();
  }
  CHECK(!kvd::select_kernels("avx1024"));
  test_sha256();
  test_chain_is_incremental();
  test_plans_refuse();
  std::printf("test_compute: all passed\n");
  return 0;
}
