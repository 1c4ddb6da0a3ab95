#include "sha256.hpp"

#include <atomic>
#include <bit>
#include <cstring>

#include "cpu.hpp"

namespace kvd {

alignas(16) const std::uint32_t sha256_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

namespace {

std::atomic<Sha256Compress> chosen{nullptr};

Sha256Compress best() noexcept {
#if defined(__x86_64__)
  if (cpu_features().sha) return sha256_compress_ni;
#endif
  return sha256_compress_portable;
}

Sha256Compress compress() noexcept {
  Sha256Compress function = chosen.load(std::memory_order_relaxed);
  if (function == nullptr) {
    function = best();
    chosen.store(function, std::memory_order_relaxed);
  }
  return function;
}

void store_be32(std::uint8_t* to, std::uint32_t value) noexcept {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::uint8_t>(value >> (24 - 8 * i));
}

std::uint32_t load_be32(const std::uint8_t* from) noexcept {
  return std::uint32_t{from[0]} << 24 | std::uint32_t{from[1]} << 16 | std::uint32_t{from[2]} << 8 | from[3];
}

}  // namespace

void sha256_force_portable(bool portable) noexcept {
  chosen.store(portable ? sha256_compress_portable : best(), std::memory_order_relaxed);
}

void sha256_compress_portable(std::uint32_t state[8], const std::uint8_t* data, std::size_t blocks) noexcept {
  for (; blocks > 0; --blocks, data += Sha256::block_bytes) {
    std::uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_be32(data + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const std::uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const std::uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    std::uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    std::uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    for (int t = 0; t < 64; ++t) {
      const std::uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const std::uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + sha256_k[t] + w[t];
      const std::uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const std::uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1;
      d = c, c = b, b = a, a = t1 + t2;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
  }
}

Sha256::Sha256() noexcept
    : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::update(const void* data, std::size_t size) noexcept {
  const auto* in = static_cast<const std::uint8_t*>(data);
  if (size == 0) return;
  total_bytes_ += size;
  if (buffered_bytes_ > 0) {
    const std::size_t room = block_bytes - buffered_bytes_;
    const std::size_t taken = size < room ? size : room;
    std::memcpy(buffer_ + buffered_bytes_, in, taken);
    buffered_bytes_ += taken, in += taken, size -= taken;
    if (buffered_bytes_ < block_bytes) return;
    compress()(state_, buffer_, 1);
    buffered_bytes_ = 0;
  }
  if (const std::size_t blocks = size / block_bytes; blocks > 0) {
    compress()(state_, in, blocks);
    in += blocks * block_bytes, size -= blocks * block_bytes;
  }
  if (size > 0) std::memcpy(buffer_, in, size);
  buffered_bytes_ = size;
}

void Sha256::finish(std::uint8_t digest[digest_bytes]) noexcept {
  const std::uint64_t bits = total_bytes_ * 8;
  std::uint8_t last[2 * block_bytes] = {};
  std::memcpy(last, buffer_, buffered_bytes_);
  last[buffered_bytes_] = 0x80;
  const std::size_t blocks = buffered_bytes_ + 9 <= block_bytes ? 1 : 2;
  store_be32(last + blocks * block_bytes - 8, static_cast<std::uint32_t>(bits >> 32));
  store_be32(last + blocks * block_bytes - 4, static_cast<std::uint32_t>(bits));
  compress()(state_, last, blocks);
  for (int i = 0; i < 8; ++i) store_be32(digest + 4 * i, state_[i]);
}

}  // namespace kvd
