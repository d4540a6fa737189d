// 64 codes of float8_e4m3fn at once to bfloat16, exactly, and the order of columns that this gives.
//
// bfloat16 holds every value of E4M3FN, so decoding is a lookup: VPERMI2B finds the low and the
// high byte of the number without its sign among 128 entries. Interleaving the two bytes within
// the 128-bit lanes puts columns 8q..8q+3 into one register and 8q+4..8q+7 into another; sums stay
// in this order, and are put right when they are stored.
#pragma once

#include <immintrin.h>
#include <stdint.h>

// Bits of the bfloat16 that equals code 0..127: 4 bits of exponent with bias 7, 3 of mantissa.
constexpr uint16_t bfloat16_of(unsigned code) {
  const unsigned exponent = code >> 3, mantissa = code & 7;
  if (code == 0x7f) return 0x7fc0;  // the only NaN
  if (exponent) return (uint16_t)((exponent + 120) << 7 | mantissa << 4);
  if (!mantissa) return 0;
  // a subnormal, mantissa * 2^-9: its leading digit decides the exponent
  const unsigned top = mantissa >> 2 ? 2 : mantissa >> 1 ? 1 : 0;
  return (uint16_t)((118 + top) << 7 | ((mantissa << (7 - top)) & 0x7f));
}

struct ByteTable {
  uint8_t low[128], high[128];
};

constexpr ByteTable byte_table() {
  ByteTable table{};
  for (unsigned code = 0; code < 128; ++code) {
    table.low[code] = (uint8_t)(bfloat16_of(code) & 0xff);
    table.high[code] = (uint8_t)(bfloat16_of(code) >> 8);
  }
  return table;
}

alignas(64) constexpr ByteTable BYTES = byte_table();

struct Decoder {
  __m512i low0 = _mm512_load_si512(BYTES.low), low1 = _mm512_load_si512(BYTES.low + 64);
  __m512i high0 = _mm512_load_si512(BYTES.high), high1 = _mm512_load_si512(BYTES.high + 64);
  __m512i sign = _mm512_set1_epi8((char)0x80);

  // codes: 32 columns x 2 neighbours along k. first and second: 16 columns x 2 bfloat16 each.
  inline __attribute__((always_inline)) void operator()(__m512i codes, __m512i &first,
                                                        __m512i &second) const {
    const __m512i low = _mm512_permutex2var_epi8(low0, codes, low1);  // the sign bit is ignored
    const __m512i unsigned_high = _mm512_permutex2var_epi8(high0, codes, high1);
    const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, codes, sign, 0xf8);  // a | (b & c)
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
};

// Column of each lane: 8q + j in lane 4q + j of `first`, 8q + 4 + j in that lane of `second`.
inline void into_column_order(__m512 first, __m512 second, __m512 &left, __m512 &right) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high =
      _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  left = _mm512_permutex2var_ps(first, low, second);
  right = _mm512_permutex2var_ps(first, high, second);
}

inline void into_lane_order(__m512 left, __m512 right, __m512 &first, __m512 &second) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
  const __m512i high = _mm512_setr_epi32(4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  first = _mm512_permutex2var_ps(left, low, right);
  second = _mm512_permutex2var_ps(left, high, right);
}
