// SHA-256 (FIPS 180-4), with the SHA extensions where the CPU has them.
//
// Called by: chain.cpp. One object per message, one thread per object.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

class Sha256 {
 public:
  static constexpr std::size_t digest_bytes = 32;
  static constexpr std::size_t block_bytes = 64;

  Sha256() noexcept;
  void update(const void* data, std::size_t size) noexcept;
  void finish(std::uint8_t digest[digest_bytes]) noexcept;  // once, at the end

 private:
  std::uint32_t state_[8];
  std::uint64_t total_bytes_ = 0;
  std::size_t buffered_bytes_ = 0;
  std::uint8_t buffer_[block_bytes];
};

// Takes `blocks` blocks of 64 bytes into the state. Exposed so that tests compare the two implementations.
using Sha256Compress = void (*)(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks);
void sha256_compress_portable(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks) noexcept;
#if defined(__x86_64__)
void sha256_compress_ni(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks) noexcept;
#endif

// The round constants, for both implementations.
extern const std::uint32_t sha256_k[64];

// Use the portable code even where the CPU has the extensions. For tests; false returns to the normal choice.
void sha256_force_portable(bool portable) noexcept;

}  // namespace kvd
