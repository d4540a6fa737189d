// What both engines share: the call, the scales, the end of a row, and the split into threads.
//
//   y[m, n] = round(sum over blocks kb of scale[n, kb] * (sum over k in kb of x[m, k] * w[n, k]) + bias[n])
//
// The inner sum is float32 and starts at 0 in every block of 128; how it adds up is the engine's.
// The outer sum is C = fma(inner, scale, C) from +0, kb ascending. Neither depends on M, on the
// number of threads or on a row's place, so a row gives the same bits alone and in any batch.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <thread>
#include <vector>

#include "fp8.h"

constexpr int64_t COLUMNS = 32;  // of a packed block
constexpr int64_t K_BLOCK = 128;  // values of k under one scale
constexpr int64_t PAIRS = K_BLOCK / 2;

enum Type { BFLOAT16 = 0, FLOAT32 = 1 };

struct Call {
  const void *x;          // [M, K] in x_type
  const uint8_t *packed;  // N/32 blocks of K/2 rows of 64 bytes: 32 columns x 2 neighbours along k
  const float *scales;    // per block: [ceil(N / group), ceil(K / 128)]; per column: [N]
  const float *bias;      // [N] or null
  void *y;                // [M, N] in y_type
  int64_t M, N, K;
  int64_t group;  // columns that share a row of `scales`, a multiple of 32; 1: a scale per column
  int x_type, y_type, threads;

  int64_t k_blocks() const { return (K + K_BLOCK - 1) / K_BLOCK; }
  int64_t pairs(int64_t kb) const {
    const int64_t left = K / 2 - kb * PAIRS;
    return left < PAIRS ? left : PAIRS;
  }
  const uint8_t *weights(int64_t n) const { return packed + n * K; }
};

// Two registers of 16 columns, in the order that the decoder leaves.
struct Pair {
  __m512 first, second;
};

inline Pair scales_of(const Call &call, int64_t n, int64_t kb) {
  Pair scale;
  if (call.group == 1) {
    const float *row = call.scales + n;
    into_lane_order(_mm512_loadu_ps(row), _mm512_loadu_ps(row + 16), scale.first, scale.second);
  } else {
    scale.first = scale.second =
        _mm512_set1_ps(call.scales[n / call.group * call.k_blocks() + kb]);
  }
  return scale;
}

// total [32], in lane order: add the inner sums of a block under its scale.
inline void fold(float *total, __m512 first, __m512 second, const Pair &scale) {
  _mm512_store_ps(total, _mm512_fmadd_ps(first, scale.first, _mm512_load_ps(total)));
  _mm512_store_ps(total + 16, _mm512_fmadd_ps(second, scale.second, _mm512_load_ps(total + 16)));
}

// Bias, rounding and store of 32 columns of row m.
inline void finish(const Call &call, int64_t m, int64_t n, const float *total) {
  __m512 left, right;
  into_column_order(_mm512_load_ps(total), _mm512_load_ps(total + 16), left, right);
  if (call.bias) {
    left = _mm512_add_ps(left, _mm512_loadu_ps(call.bias + n));
    right = _mm512_add_ps(right, _mm512_loadu_ps(call.bias + n + 16));
  }
  const int64_t at = m * call.N + n;
  if (call.y_type == BFLOAT16) {
    _mm512_storeu_si512((uint16_t *)call.y + at, (__m512i)_mm512_cvtne2ps_pbh(right, left));
  } else {
    _mm512_storeu_ps((float *)call.y + at, left);
    _mm512_storeu_ps((float *)call.y + at + 16, right);
  }
}

// 64-byte aligned memory that frees itself.
template <typename T>
struct Aligned {
  T *data;
  explicit Aligned(int64_t count)
      : data((T *)aligned_alloc(64, ((size_t)count * sizeof(T) + 63) / 64 * 64)) {
    if (!data) abort();
  }
  ~Aligned() { free(data); }
  Aligned(const Aligned &) = delete;
};

// 64 bytes of memory for a register.
struct Register {
  __m512i codes;
};

// One block of k for 32 columns, decoded: [pairs][first | second][16][2] bfloat16.
inline void decode_panel(const Decoder &decode, const uint8_t *w, int64_t pairs, Register *panel) {
  for (int64_t p = 0; p < pairs; ++p) {
    _mm_prefetch((const char *)w + 64 * p + 4096, _MM_HINT_T0);
    decode(_mm512_loadu_si512(w + 64 * p), panel[2 * p].codes, panel[2 * p + 1].codes);
  }
}

// To nearest even, subnormals kept, whatever the caller's thread is set to.
struct PlainRounding {
  unsigned before = _mm_getcsr();
  PlainRounding() { _mm_setcsr(0x1f80); }
  ~PlainRounding() { _mm_setcsr(before); }
};

constexpr int64_t WORK_FOR_A_THREAD = 1 << 21;  // multiplications below which one more costs more

// body(begin, end) over columns, in multiples of `step`, on as many threads as there is work for.
template <typename Body>
inline void over_columns(const Call &call, int64_t step, Body body) {
  const int64_t steps = (call.N + step - 1) / step, work = call.M * call.N * call.K;
  int64_t threads = work / WORK_FOR_A_THREAD;
  if (threads > call.threads) threads = call.threads;
  if (threads > steps) threads = steps;
  const auto part = [&](int64_t t) {
    const PlainRounding rounding;
    const int64_t end = steps * (t + 1) / threads * step;
    body(steps * t / threads * step, end < call.N ? end : call.N);
  };
  if (threads <= 1) {
    threads = 1;
    return part(0);
  }
  std::vector<std::thread> others;
  for (int64_t t = 1; t < threads; ++t) others.emplace_back(part, t);
  part(0);
  for (std::thread &other : others) other.join();
}

// The one function of an engine's library.
#define EXPORT_LINEAR(name, body)                                                             \
  extern "C" void name(const void *x, const uint8_t *packed, const float *scales,             \
                       const float *bias, void *y, int64_t M, int64_t N, int64_t K,           \
                       int64_t group, int x_type, int y_type, int threads) {                  \
    const Call call{x, packed, scales, bias, y, M, N, K, group, x_type, y_type, threads};     \
    body(call);                                                                               \
  }
