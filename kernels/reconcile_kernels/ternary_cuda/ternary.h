// What the variants share: the operands, the decoding of a code, and the steps after the sum.
//
//   y[m, n] = scale * sum over k of x[m, k] * w[n, k]  (+ bias[n])
//
// w is ternary_k_interleaved: codes 0, 1, 2 are 0, +1, -1 and code 3, which no encoder writes, is 0;
// k = 4j + i of row n in bits 2i and 2i + 1 of byte j, which read as little-endian 32-bit words
// means k = 16j + i in bits 2i and 2i + 1 of word j.
//
// There is one scale per row (span 0), or one per row and block of `span` k, which then
// multiplies the sum of its block. Sums are float32; nothing is contracted.
#pragma once

#include "grid.h"
#include "numbers.h"

template <typename Number>
struct Operands {
  grid::Global<const typename Number::Stored> x;  // [M, K]
  grid::Global<const uint32_t> w;                 // as the variant says
  grid::Global<const float> scales;               // [N], or [N, ceil(K / span)]
  grid::Global<const float> bias;                 // [N], or empty
  grid::Global<typename Number::Stored> y;        // [M, N]
  int64_t M, N, K, span;
  bool has_bias, divide;

  // A sum over all of K, or, with scales per block, of sums that are scaled already.
  __device__ __forceinline__ void store(int64_t m, int64_t n, float sum) const {
    if (!span) sum = divide ? sum / scales.get(n) : sum * scales.get(n);
    if (has_bias) sum += bias.get(n);
    y.set(m * N + n, Number::narrow(sum));
  }

  // The sum of a part of K that lies in the block of k, as it enters the running sum.
  __device__ __forceinline__ float scaled(float sum, int64_t n, int64_t k) const {
    if (!span) return sum;
    const float scale = scales.get(n * ((K + span - 1) / span) + k / span);
    return divide ? sum / scale : sum * scale;
  }
};

// 0, +1, -1, 0 for codes 0 to 3, without a branch.
static __device__ __forceinline__ float ternary_value(uint32_t code) {
  return (float)((int)(code & 1u) - (int)(code >> 1));
}

template <typename Number>
static Operands<Number> operands(const void *x, const void *w, int64_t words, const float *scales,
                                 const float *bias, void *y, int64_t M, int64_t N, int64_t K,
                                 int64_t span, int divide) {
  typedef typename Number::Stored Stored;
  const int64_t per_row = span ? (K + span - 1) / span : 1;
  return Operands<Number>{{(const Stored *)x, M * K},
                          {(const uint32_t *)w, words},
                          {scales, N * per_row},
                          {bias, bias ? N : 0},
                          {(Stored *)y, M * N},
                          M,
                          N,
                          K,
                          span,
                          bias != nullptr,
                          divide != 0};
}

// x [M, K] and y [M, N] in the dtype of the name, w as the variant wants it, scales and bias as in
// Operands, all without gaps and on 16-byte boundaries, in the memory of `device`. Returns a CUDA
// error code, 0 if none.
#define EXPORT_ONE(name, Number, launch)                                                         \
  extern "C" int name(const void *x, const void *w, int64_t words, const float *scales,          \
                      const float *bias, void *y, int64_t M, int64_t N, int64_t K, int64_t span, \
                      int divide, int device, void *stream) {                                    \
    const cudaError_t chosen = cudaSetDevice(device);                                            \
    if (chosen != cudaSuccess) return (int)chosen;                                               \
    launch<Number>(operands<Number>(x, w, words, scales, bias, y, M, N, K, span, divide),        \
                   (cudaStream_t)stream);                                                        \
    return (int)cudaGetLastError();                                                              \
  }
#define EXPORT(variant, launch)                                 \
  EXPORT_ONE(ternary_##variant##_bfloat16, BFloat16, launch)    \
  EXPORT_ONE(ternary_##variant##_float16, Float16, launch)      \
  EXPORT_ONE(ternary_##variant##_float32, Float32, launch)      \
  extern "C" const char *ternary_##variant##_error(int code) {  \
    return cudaGetErrorString((cudaError_t)code);               \
  }
