// What the fuzz targets share: a small domain as plain C++, and edits that turn its memory into anything.
//
// An input is a list of edits of 13 bytes: u32 offset, u8 width - 1, u64 value. They are applied to an image of memory
// that was right before: so most of it stays plausible, and the checks behind the first are reached as well.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <vector>

#include "client.hpp"
#include "table.hpp"

namespace fuzz {

using namespace kvd;

#define REQUIRE(condition)                                                                  \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: REQUIRE(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                         \
    }                                                                                       \
  } while (0)

inline constexpr u64 object_bytes = 128, epoch = 99;
inline constexpr u32 families = 32;

inline int memory_file(u64 bytes = 0) {
  const int fd = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(fd >= 0 && ftruncate(fd, static_cast<off_t>(bytes)) == 0);
  return fd;
}

inline Key key(u32 number) {
  Key out{};
  u64 words[4] = {number * 0x9E3779B97F4A7C15ull + 1, number, ~u64{number}, 7};
  static_assert(sizeof out == sizeof words);
  std::memcpy(&out, words, sizeof out);
  return out;
}

inline RegionShape shape(u32 slot) { return {slot, epoch, 4096, 4096, 16, 256}; }

struct World {
  int meta = memory_file(), pool = memory_file(families * object_bytes);
  Table table;

  World() : table(meta, families, families, {families * object_bytes}, 4, TableIdentity{epoch, 0x5EED, 1, 1, {}}) {
    table.map_segment(0, pool, true);
    for (u32 number = 0; number < families - 4; ++number) {
      const u64 place = place_of(0, number * object_bytes), size = object_bytes, checksum = number;
      const u16 ranges[4] = {0, 8, 0, 32};
      const u8 member = 0;
      const Key identity = key(number);
      table.reserve({0, 1, 1, &number, &place, &size, &member, ranges});
      PublishBatch batch{};
      batch.count = 1, batch.keys = reinterpret_cast<const u8*>(&identity), batch.members = &member;
      batch.family_members = 1, batch.records = &number, batch.checksums = &checksum;
      batch.entries = &number, batch.entries_count = 1;
      u8 status = 255, differs = 0;
      u32 entry = none32;
      table.publish(batch, &status, &entry, &differs);
      REQUIRE(status == publish_done);
    }
    const u32 gone[2] = {3, 9};
    table.evict(gone, 2, false);
  }
  ~World() { close(meta), close(pool); }
};

inline std::vector<u8> image_of(int fd, u64 bytes) {
  std::vector<u8> out(bytes);
  REQUIRE(pread(fd, out.data(), bytes, 0) == static_cast<ssize_t>(bytes));
  return out;
}

inline constexpr u64 edit_bytes = 13;

// Applies the edits to [data, data + bytes).
inline void edit(u8* data, u64 bytes, const u8* edits, u64 size) {
  for (; size >= edit_bytes; edits += edit_bytes, size -= edit_bytes) {
    u32 offset;
    u64 value;
    std::memcpy(&offset, edits, 4), std::memcpy(&value, edits + 5, 8);
    std::memcpy(data + offset % (bytes - 8), &value, edits[4] % 8 + 1u);
  }
}

// A copy of an image with edits, mapped by whoever opens the descriptor.
inline int damaged(const std::vector<u8>& image, const u8* edits, u64 size) {
  std::vector<u8> copy = image;
  edit(copy.data(), copy.size(), edits, size);
  const int fd = memory_file();
  REQUIRE(write(fd, copy.data(), copy.size()) == static_cast<ssize_t>(copy.size()));
  return fd;
}

}  // namespace fuzz
