// Identities of prefix chunks, and the checksum seeds made from them.
//
//   identity_i = H(identity_{i-1} (32) | u32 token count | tokens, u32 each | u32 extras length | extras)
//   engine_i   = SHA-256("kvd-ext-v1\0" | engine_{i-1} (32) | u32 hash length | the engine's hash of block i)
//   seed       = first 8 bytes, as u64, of SHA-256("kvd-seed-v1\0" | identity (32) | u16 member)
//
// All integers are little-endian. H is SHA-256, or for trusted prompts XXH3_128 (canonical form, big-endian) with seed 0
// followed by the same with seed 1.
// Called by: clients (chains) and whoever verifies payload (seeds). Any thread; no state.
// Invariant: the pure reference in kvd/layout gives the same bytes; one set of vectors runs on both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

inline constexpr std::size_t identity_bytes = 32;

enum class ChainAlgorithm : int { sha256 = 0, xxh3_128 = 1 };

struct ByteSpan {
  const std::uint8_t* data = nullptr;
  std::size_t size = 0;
};

// Hash `chunks` chunks of `chunk_tokens` tokens (u32 little-endian, any alignment) onto `parent`; writes `chunks`
// identities to `out`. `extras` is nullptr or one span a chunk.
void chain_hash(const std::uint8_t parent[identity_bytes], const std::uint8_t* tokens, std::size_t chunk_tokens,
                std::size_t chunks, ChainAlgorithm algorithm, const ByteSpan* extras, std::uint8_t* out);

// Chain `count` hashes of an engine's own blocks, `hash_bytes` each, onto `parent`; writes `count` identities.
void chain_engine(const std::uint8_t parent[identity_bytes], const std::uint8_t* hashes, std::size_t hash_bytes,
                  std::size_t count, std::uint8_t* out) noexcept;

// The seed of a member's checksum: bytes that belong to another object or member do not verify.
std::uint64_t object_seed(const std::uint8_t identity[identity_bytes], std::uint16_t member) noexcept;

}  // namespace kvd
