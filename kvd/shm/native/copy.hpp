// Bulk copies into and out of the pool.
//
// Owns: when to go past the cache, when a second thread pays, and the fence at the end.
// Called by: clients that fill or drain objects, the daemon's movers. Any thread; no shared state.
// Invariant (I8): when a function here returns, all its stores are ordered before the caller's next store, so that a
// publish which follows cannot become visible before the bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

// From this size on the copy uses non-temporal stores. Below it memcpy is as fast and leaves the bytes in the cache.
inline constexpr std::size_t stream_bytes_min = std::size_t{256} << 10;

// A further thread is started only for each full share of this size.
inline constexpr std::size_t thread_share_bytes_min = std::size_t{4} << 20;
inline constexpr unsigned copy_threads_max = 64;

// Copy `size` bytes between ranges that do not overlap.
void copy_nt(void* dst, const void* src, std::size_t size) noexcept;

// The same with up to `threads` threads (1 .. copy_threads_max), which live only inside the call. Where the system
// refuses a thread, the calling thread does that share.
void copy_nt(void* dst, const void* src, std::size_t size, unsigned threads);

}  // namespace kvd
