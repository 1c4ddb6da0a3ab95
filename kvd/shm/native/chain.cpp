#include "chain.hpp"

#include <bit>
#include <cstring>
#include <vector>

#include "cpu.hpp"
#include "sha256.hpp"

namespace kvd {
namespace {

static_assert(std::endian::native == std::endian::little, "identities are hashed from little-endian memory");

// The terminating zero is part of the message: no domain is a prefix of another.
constexpr char engine_domain[] = "kvd-ext-v1";
constexpr char seed_domain[] = "kvd-seed-v1";

void hash_sha256(const std::uint8_t* parent, const std::uint8_t* tokens, std::uint32_t token_count, ByteSpan extras,
                 std::uint8_t* out) noexcept {
  const auto extras_size = static_cast<std::uint32_t>(extras.size);
  Sha256 hash;
  hash.update(parent, identity_bytes);
  hash.update(&token_count, sizeof token_count);
  hash.update(tokens, std::size_t{token_count} * sizeof(std::uint32_t));
  hash.update(&extras_size, sizeof extras_size);
  hash.update(extras.data, extras.size);
  hash.finish(out);
}

std::uint8_t* put(std::uint8_t* to, const void* from, std::size_t size) noexcept {
  if (size != 0) std::memcpy(to, from, size);
  return to + size;
}

void hash_xxh3_128(const std::uint8_t* parent, const std::uint8_t* tokens, std::uint32_t token_count, ByteSpan extras,
                   std::vector<std::uint8_t>& message, std::uint8_t* out) {
  const auto extras_size = static_cast<std::uint32_t>(extras.size);
  const std::size_t tokens_bytes = std::size_t{token_count} * sizeof(std::uint32_t);
  message.resize(identity_bytes + sizeof token_count + tokens_bytes + sizeof extras_size + extras.size);
  std::uint8_t* at = put(message.data(), parent, identity_bytes);
  at = put(at, &token_count, sizeof token_count);
  at = put(at, tokens, tokens_bytes);
  at = put(at, &extras_size, sizeof extras_size);
  put(at, extras.data, extras.size);
  kernels().xxh3_128(message.data(), message.size(), 0, out);
  kernels().xxh3_128(message.data(), message.size(), 1, out + identity_bytes / 2);
}

}  // namespace

void chain_hash(const std::uint8_t parent[identity_bytes], const std::uint8_t* tokens, std::size_t chunk_tokens,
                std::size_t chunks, ChainAlgorithm algorithm, const ByteSpan* extras, std::uint8_t* out) {
  std::vector<std::uint8_t> message;
  const auto token_count = static_cast<std::uint32_t>(chunk_tokens);
  for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
    const ByteSpan extra = extras == nullptr ? ByteSpan{} : extras[chunk];
    if (algorithm == ChainAlgorithm::sha256) {
      hash_sha256(parent, tokens, token_count, extra, out);
    } else {
      hash_xxh3_128(parent, tokens, token_count, extra, message, out);
    }
    parent = out;
    out += identity_bytes;
    tokens += chunk_tokens * sizeof(std::uint32_t);
  }
}

void chain_engine(const std::uint8_t parent[identity_bytes], const std::uint8_t* hashes, std::size_t hash_bytes,
                  std::size_t count, std::uint8_t* out) noexcept {
  const auto hash_size = static_cast<std::uint32_t>(hash_bytes);
  for (std::size_t i = 0; i < count; ++i, hashes += hash_bytes, out += identity_bytes) {
    Sha256 hash;
    hash.update(engine_domain, sizeof engine_domain);
    hash.update(parent, identity_bytes);
    hash.update(&hash_size, sizeof hash_size);
    hash.update(hashes, hash_bytes);
    hash.finish(out);
    parent = out;
  }
}

std::uint64_t object_seed(const std::uint8_t identity[identity_bytes], std::uint16_t member) noexcept {
  std::uint8_t digest[Sha256::digest_bytes];
  Sha256 hash;
  hash.update(seed_domain, sizeof seed_domain);
  hash.update(identity, identity_bytes);
  hash.update(&member, sizeof member);
  hash.finish(digest);
  std::uint64_t seed = 0;
  std::memcpy(&seed, digest, sizeof seed);
  return seed;
}

}  // namespace kvd
