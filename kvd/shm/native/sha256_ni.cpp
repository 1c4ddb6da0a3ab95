// SHA-256 with the x86 SHA extensions; compiled with flags of its own, so only C headers and intrinsics here (see
// copy_isa.inc). The caller checks cpu_features().sha first.
#if defined(__x86_64__)

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#include "sha256.hpp"

namespace kvd {

void sha256_compress_ni(uint32_t state[8], const uint8_t* data, size_t blocks) noexcept {
  const __m128i to_big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
  // The rounds instruction wants the eight words as {a b e f} and {c d g h}.
  const __m128i abcd = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state));
  const __m128i efgh = _mm_loadu_si128(reinterpret_cast<const __m128i*>(state + 4));
  const __m128i cdab = _mm_shuffle_epi32(abcd, 0xb1);
  const __m128i hgfe = _mm_shuffle_epi32(efgh, 0x1b);
  __m128i abef = _mm_alignr_epi8(cdab, hgfe, 8);
  __m128i cdgh = _mm_blend_epi16(hgfe, cdab, 0xf0);

  for (; blocks > 0; --blocks, data += Sha256::block_bytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // the last 16 words of the message schedule, four a register, as a ring
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 16 * i)), to_big_endian);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(sha256_k + 4 * i));
      const __m128i wk = _mm_add_epi32(w[i & 3], k);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      if (i >= 3 && i < 15) {  // the words of rounds 4(i+1) .. 4(i+1)+3 replace the oldest four
        const __m128i seven_back = _mm_alignr_epi8(w[i & 3], w[(i + 3) & 3], 4);
        const __m128i partial = _mm_add_epi32(_mm_sha256msg1_epu32(w[(i + 1) & 3], w[(i + 2) & 3]), seven_back);
        w[(i + 1) & 3] = _mm_sha256msg2_epu32(partial, w[i & 3]);
      }
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }

  const __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
  const __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state), _mm_blend_epi16(feba, dchg, 0xf0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

}  // namespace kvd

#endif
