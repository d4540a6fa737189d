// The rows of x in the order in which a tile reads them: for each step of K one 32-bit word of
// every row of the tile, [step][rows of the tile]. K is padded with zeros to whole blocks.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include <vector>

#include "numbers.h"
#include "panels.h"

namespace {

// M rows cut into the fewest tiles of at most `largest` rows, as equal as they can be.
struct Cut {
  int64_t m, tiles;
  Cut(int64_t m_, int64_t largest) : m(m_), tiles((m_ + largest - 1) / largest) {}
  int64_t start(int64_t tile) const { return m * tile / tiles; }
};

// Memory that a thread keeps for its next call: fresh pages cost more than packing does.
inline uint32_t* workspace(size_t count) {
  static thread_local std::vector<uint32_t> kept;
  if (kept.size() < count) kept.resize(count);
  return kept.data();
}

// bfloat16 x as it is, in pairs.
struct PairRows {
  typedef __m512 Sum;
  uint32_t* words;
  int64_t steps;

  PairRows(int64_t m, int64_t k)
      : words(workspace((size_t)(m * blocks(k) * Pairs::STEPS))), steps(blocks(k) * Pairs::STEPS) {}

  const uint32_t* of(int64_t row) const { return words + row * steps; }

  template <typename Number>
  void take(const typename Number::Stored* x, int64_t k, const Cut& cut) {
    static_assert(sizeof(typename Number::Stored) == 2, "pairs of 16-bit numbers");
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
      const int64_t start = cut.start(tile), height = cut.start(tile + 1) - start;
      for (int64_t row = 0; row < height; ++row)
        take_row(x + (start + row) * k, k, words + start * steps + row, height);
    }
  }

  // The decoded weights are 0 and +-2.
  __m512 finish(__m512 sum, int64_t) const { return _mm512_mul_ps(sum, _mm512_set1_ps(0.5f)); }

 private:
  void take_row(const uint16_t* x, int64_t k, uint32_t* target, int64_t height) const {
    const int64_t whole = k / 2;
    for (int64_t step = 0; step < whole; ++step) memcpy(target + step * height, x + 2 * step, 4);
    for (int64_t step = whole; step < steps; ++step)
      target[step * height] = 2 * step < k ? x[2 * step] : 0u;
  }
};

// x quantised to int8, row by row, in quads: a = max(max|x|, 1e-7), q = rne(x * (127 / a)).
struct QuadRows {
  typedef __m512i Sum;
  uint32_t* words;
  int64_t steps;
  std::vector<float> scales;  // a / 127; NaN where the row is not finite
  std::vector<int32_t> sums;  // of q: the decoded weights are one too large

  QuadRows(int64_t m, int64_t k)
      : words(workspace((size_t)(m * blocks(k) * Quads::STEPS))),
        steps(blocks(k) * Quads::STEPS),
        scales((size_t)m),
        sums((size_t)m) {}

  const uint32_t* of(int64_t row) const { return words + row * steps; }

  template <typename Number>
  void take(const typename Number::Stored* x, int64_t k, const Cut& cut) {
    for (int64_t tile = 0; tile < cut.tiles; ++tile) {
      const int64_t start = cut.start(tile), height = cut.start(tile + 1) - start;
      for (int64_t row = 0; row < height; ++row)
        take_row<Number>(x + (start + row) * k, k, start + row, words + start * steps + row,
                         height);
    }
  }

  __m512 finish(__m512i sum, int64_t row) const {
    const __m512i exact = _mm512_sub_epi32(sum, _mm512_set1_epi32(sums[(size_t)row]));
    return _mm512_mul_ps(_mm512_cvtepi32_ps(exact), _mm512_set1_ps(scales[(size_t)row]));
  }

 private:
  // Largest |x| as bits, whose order is that of the magnitudes, with infinity and NaN on top.
  template <typename Number>
  static uint32_t largest(const typename Number::Stored* x, int64_t k) {
    __m512i found = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 16) {
      const __m512i bits = _mm512_castps_si512(Number::load(x + i, first(k - i)));
      found = _mm512_max_epi32(found, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
    }
    return (uint32_t)_mm512_reduce_max_epi32(found);
  }

  template <typename Number>
  void take_row(const typename Number::Stored* x, int64_t k, int64_t row, uint32_t* target,
                int64_t height) {
    const uint32_t bits = largest<Number>(x, k);
    const bool finite = bits < 0x7F800000u;
    float amax;
    memcpy(&amax, &bits, sizeof amax);
    if (amax < 1e-7f) amax = 1e-7f;
    const __m512 factor = _mm512_set1_ps(127.0f / amax);
    const int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    __m512i total = _mm512_setzero_si512();
    for (int64_t block = 0; block < steps / Quads::STEPS; ++block) {
      const __mmask16 some = finite ? first(k - block * BLOCK) : (__mmask16)0;
      const __m512 values = Number::load(x + block * BLOCK, some);
      const __m512i codes = _mm512_cvt_roundps_epi32(_mm512_mul_ps(values, factor), nearest);
      total = _mm512_add_epi32(total, codes);
      alignas(16) uint32_t quads[Quads::STEPS];
      _mm_store_si128((__m128i*)quads, _mm512_cvtsepi32_epi8(codes));
      for (int step = 0; step < Quads::STEPS; ++step)
        target[(block * Quads::STEPS + step) * height] = quads[step];
    }
    scales[(size_t)row] = finite ? amax / 127.0f : __builtin_nanf("");
    sums[(size_t)row] = _mm512_reduce_add_epi32(total);
  }
};

}  // namespace
