// VDPBF16PS itself, once per element: the oracle's oracle.
#include <immintrin.h>
#include <stdint.h>

extern "C" void vdpbf16ps(const float *accumulator, const uint32_t *a, const uint32_t *b, float *out,
                          int64_t count) {
  for (int64_t i = 0; i < count; i += 16) {
    const __mmask16 some = count - i < 16 ? (__mmask16)((1u << (count - i)) - 1) : (__mmask16)0xffff;
    const __m512 start = _mm512_maskz_loadu_ps(some, accumulator + i);
    const __m512i x = _mm512_maskz_loadu_epi32(some, a + i), y = _mm512_maskz_loadu_epi32(some, b + i);
    _mm512_mask_storeu_ps(out + i, some, _mm512_dpbf16_ps(start, (__m512bh)x, (__m512bh)y));
  }
}
