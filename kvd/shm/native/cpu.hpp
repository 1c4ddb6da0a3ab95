// Which instruction sets this CPU has, and the kernels that use them.
//
// Owns: the table of copy and hash kernels, one row per instruction set, each compiled in a translation unit of its
// own (copy_isa_*.cpp). Everything else in kvd is compiled for the baseline (x86-64-v2, or plain aarch64), so a binary
// starts on any supported machine and picks at run time.
// Threads: the choice is made once, at first use; `select_kernels` is for tests and benchmarks only.
// Invariant: all rows give the same bytes and the same hashes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvd {

struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;  // F, BW, DQ and VL together, and the operating system saves the registers
  bool sha = false;
};

// What the running CPU offers; detected once.
const CpuFeatures& cpu_features() noexcept;

struct Kernels {
  const char* name;  // "baseline", "avx2" or "avx512"

  // XXH3 of any length, seed 0 or not. The 128-bit form writes the canonical (big-endian) 16 bytes.
  std::uint64_t (*xxh3_64)(const void* data, std::size_t size, std::uint64_t seed);
  void (*xxh3_128)(const void* data, std::size_t size, std::uint64_t seed, std::uint8_t out[16]);

  // Copy past the cache: non-temporal stores for whole lines, plain ones for the edges. Ranges must not overlap.
  // Nothing is fenced: call store_fence() before telling anyone that the bytes are there.
  void (*copy_stream)(std::uint8_t* dst, const std::uint8_t* src, std::size_t size);

  // The same, and the XXH3 64-bit hash of what was read. size must be above 1024.
  std::uint64_t (*copy_stream_xxh3_64)(std::uint8_t* dst, const std::uint8_t* src, std::size_t size,
                                       std::uint64_t seed);

  // `count` runs of `run_bytes`, each side advancing by its stride; `stream` asks for non-temporal stores. Not fenced.
  void (*copy_runs)(std::uint8_t* dst, const std::uint8_t* src, std::size_t run_bytes, std::size_t count,
                    std::size_t dst_stride, std::size_t src_stride, bool stream);
};

// The row in use: the widest that the CPU runs, unless a test selected another.
const Kernels& kernels() noexcept;

// The row of that name, or nullptr if it is unknown or this CPU cannot run it.
const Kernels* kernels_by_name(const char* name) noexcept;

// Use the row of that name from now on, in every thread. False (and no change) if this CPU cannot run it.
bool select_kernels(const char* name) noexcept;

// Orders non-temporal stores before whatever follows. Due after every kernel that streams, before a publish.
void store_fence() noexcept;

// The rows; only those compiled for this architecture exist.
extern const Kernels kernels_baseline;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

}  // namespace kvd
