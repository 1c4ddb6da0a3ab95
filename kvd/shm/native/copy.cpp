#include "copy.hpp"

#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu.hpp"

namespace kvd {

void copy_nt(void* dst, const void* src, std::size_t size) noexcept {
  if (size < stream_bytes_min) {
    if (size != 0) std::memcpy(dst, src, size);
    return;
  }
  kernels().copy_stream(static_cast<std::uint8_t*>(dst), static_cast<const std::uint8_t*>(src), size);
  store_fence();
}

void copy_nt(void* dst, const void* src, std::size_t size, unsigned threads) {
  const std::size_t shares = threads < size / thread_share_bytes_min ? threads : size / thread_share_bytes_min;
  if (shares < 2) return copy_nt(dst, src, size);

  constexpr std::size_t page_bytes = 4096;
  const std::size_t share_bytes = (size / shares + page_bytes - 1) / page_bytes * page_bytes;
  auto* to = static_cast<std::uint8_t*>(dst);
  const auto* from = static_cast<const std::uint8_t*>(src);
  std::vector<std::thread> helpers;
  helpers.reserve(shares - 1);
  std::size_t offset = 0;
  while (helpers.size() + 1 < shares && offset + share_bytes < size) {
    try {
      helpers.emplace_back([=] { copy_nt(to + offset, from + offset, share_bytes); });
    } catch (const std::system_error&) {
      break;  // out of threads: the rest is done here
    }
    offset += share_bytes;
  }
  copy_nt(to + offset, from + offset, size - offset);
  for (std::thread& helper : helpers) helper.join();
}

}  // namespace kvd
