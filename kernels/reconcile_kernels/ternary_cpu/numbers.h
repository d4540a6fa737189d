// Sixteen numbers of x to float32, and sixteen float32 to y, each rounded once to nearest even.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace {

// The lanes below `count`, which may be negative.
inline __mmask16 first(int64_t count) {
  return count >= 16 ? (__mmask16)0xFFFF : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

struct Float32 {
  typedef float Stored;
  static __m512 load(const float* x, __mmask16 some) { return _mm512_maskz_loadu_ps(some, x); }
  static void store(float* y, __mmask16 some, __m512 values) {
    _mm512_mask_storeu_ps(y, some, values);
  }
};

struct Float16 {
  typedef uint16_t Stored;
  static __m512 load(const uint16_t* x, __mmask16 some) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, x));
  }
  static void store(uint16_t* y, __mmask16 some, __m512 values) {
    const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm256_mask_storeu_epi16(y, some, _mm512_cvtps_ph(values, nearest));
  }
};

struct BFloat16 {
  typedef uint16_t Stored;
  static __m512 load(const uint16_t* x, __mmask16 some) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, x));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
  }
  // In integers, because VCVTNEPS2BF16 flushes subnormals; NaN becomes the quiet NaN 0x7FC0.
  static void store(uint16_t* y, __mmask16 some, __m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
    const __m512i near = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_mov_epi32(near, nan, _mm512_set1_epi32(0x7FC0));
    _mm256_mask_storeu_epi16(y, some, _mm512_cvtepi32_epi16(rounded));
  }
};

}  // namespace
