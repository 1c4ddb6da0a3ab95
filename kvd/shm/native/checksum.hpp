// The checksum of payload bytes: XXH3, 64 bits, with a seed per object.
//
// Called by: writers (fused with the copy in), readers that verify, the daemon's scrubbing. Any thread; no state.
// It finds accidents and misplaced bytes; it does not resist someone who builds collisions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

// XXH3_64bits_withSeed of `size` bytes. The value is part of the format: equal on every CPU.
std::uint64_t xxh3_64(const void* data, std::size_t size, std::uint64_t seed = 0) noexcept;

// copy_nt and xxh3_64 in one pass over the source; returns the hash of what was copied. Fenced like copy_nt.
std::uint64_t copy_checksum(void* dst, const void* src, std::size_t size, std::uint64_t seed) noexcept;

}  // namespace kvd
