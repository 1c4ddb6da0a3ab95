#include "cpu.hpp"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvd {
namespace {

#if defined(__x86_64__)

CpuFeatures detect() noexcept {
  CpuFeatures features;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return features;
  const bool ssse3_and_sse41 = (ecx & (1U << 9)) != 0 && (ecx & (1U << 19)) != 0;
  const bool osxsave = (ecx & (1U << 27)) != 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return features;
  features.sha = ssse3_and_sse41 && (ebx & (1U << 29)) != 0;
  if (!osxsave) return features;
  // The CPU may have registers that the operating system does not save: XCR0 tells.
  unsigned xcr0 = 0, xcr0_high = 0;
  __asm__("xgetbv" : "=a"(xcr0), "=d"(xcr0_high) : "c"(0));
  const bool saves_ymm = (xcr0 & 0x06U) == 0x06U;
  const bool saves_zmm = (xcr0 & 0xe6U) == 0xe6U;
  features.avx2 = saves_ymm && (ebx & (1U << 5)) != 0;
  constexpr unsigned avx512_f_dq_bw_vl = (1U << 16) | (1U << 17) | (1U << 30) | (1U << 31);
  features.avx512 = features.avx2 && saves_zmm && (ebx & avx512_f_dq_bw_vl) == avx512_f_dq_bw_vl;
  return features;
}

#else

CpuFeatures detect() noexcept { return {}; }

#endif

std::atomic<const Kernels*> selected{nullptr};

const Kernels* widest() noexcept {
#if defined(__x86_64__)
  if (cpu_features().avx512) return &kernels_avx512;
  if (cpu_features().avx2) return &kernels_avx2;
#endif
  return &kernels_baseline;
}

}  // namespace

const CpuFeatures& cpu_features() noexcept {
  static const CpuFeatures features = detect();
  return features;
}

const Kernels& kernels() noexcept {
  const Kernels* row = selected.load(std::memory_order_relaxed);
  if (row == nullptr) {
    row = widest();
    selected.store(row, std::memory_order_relaxed);  // racing threads store the same pointer
  }
  return *row;
}

const Kernels* kernels_by_name(const char* name) noexcept {
  if (std::strcmp(name, kernels_baseline.name) == 0) return &kernels_baseline;
#if defined(__x86_64__)
  if (std::strcmp(name, kernels_avx2.name) == 0) return cpu_features().avx2 ? &kernels_avx2 : nullptr;
  if (std::strcmp(name, kernels_avx512.name) == 0) return cpu_features().avx512 ? &kernels_avx512 : nullptr;
#endif
  return nullptr;
}

bool select_kernels(const char* name) noexcept {
  const Kernels* row = kernels_by_name(name);
  if (row == nullptr) return false;
  selected.store(row, std::memory_order_relaxed);
  return true;
}

void store_fence() noexcept {
#if defined(__x86_64__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_release);
#endif
}

}  // namespace kvd
