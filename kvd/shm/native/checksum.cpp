#include "checksum.hpp"

#include <cstring>

#include "copy.hpp"
#include "cpu.hpp"

namespace kvd {

std::uint64_t xxh3_64(const void* data, std::size_t size, std::uint64_t seed) noexcept {
  return kernels().xxh3_64(data, size, seed);
}

std::uint64_t copy_checksum(void* dst, const void* src, std::size_t size, std::uint64_t seed) noexcept {
  if (size < stream_bytes_min) {
    if (size != 0) std::memcpy(dst, src, size);
    return kernels().xxh3_64(dst, size, seed);  // of the copy, which nobody else writes
  }
  const std::uint64_t sum = kernels().copy_stream_xxh3_64(static_cast<std::uint8_t*>(dst),
                                                          static_cast<const std::uint8_t*>(src), size, seed);
  store_fence();
  return sum;
}

}  // namespace kvd
