// The dtypes of x and y: one number or 16 bytes of them to float32, exactly, and float32 back,
// rounded once to nearest even. Integer code, so that both compilers give the same bits.
#pragma once

#include "grid.h"

// Eight 16-bit numbers, the first in the low half of the first word.
template <typename Number>
static __device__ __forceinline__ void unpack_halves(const uint4 &from, float *to) {
  const uint32_t words[4] = {from.x, from.y, from.z, from.w};
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = Number::widen((uint16_t)words[i]);
    to[2 * i + 1] = Number::widen((uint16_t)(words[i] >> 16));
  }
}

struct Float32 {
  typedef float Stored;
  typedef float4 Vector;  // 16 bytes
  static constexpr int COUNT = 4;
  static __device__ __forceinline__ void unpack(const Vector &from, float *to) {
    to[0] = from.x, to[1] = from.y, to[2] = from.z, to[3] = from.w;
  }
  static __device__ __forceinline__ float widen(float x) { return x; }
  static __device__ __forceinline__ float narrow(float y) {
    return y == y ? y : __uint_as_float(0x7fc00000u);
  }
};

struct BFloat16 {
  typedef uint16_t Stored;
  typedef uint4 Vector;
  static constexpr int COUNT = 8;
  static __device__ __forceinline__ void unpack(const Vector &from, float *to) {
    unpack_halves<BFloat16>(from, to);
  }
  static __device__ __forceinline__ float widen(uint16_t x) {
    return __uint_as_float((uint32_t)x << 16);
  }
  static __device__ __forceinline__ uint16_t narrow(float y) {
    const uint32_t bits = __float_as_uint(y);
    if (y != y) return 0x7fc0u;
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
};

struct Float16 {
  typedef uint16_t Stored;
  typedef uint4 Vector;
  static constexpr int COUNT = 8;
  static __device__ __forceinline__ void unpack(const Vector &from, float *to) {
    unpack_halves<Float16>(from, to);
  }
  static __device__ __forceinline__ float widen(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16;
    const uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13;  // fields where float32 has them
    uint32_t bits;
    if (magnitude >= 0x0f800000u)  // Inf and NaN
      bits = magnitude + 0x70000000u;
    else if (magnitude >= 0x00800000u)  // normal: only the exponent's bias differs
      bits = magnitude + 0x38000000u;
    else  // zero and subnormal: (2^-14 + value) - 2^-14, exact, without a subnormal float32
      bits = __float_as_uint(__uint_as_float(magnitude + 0x38800000u) - 6.103515625e-05f);
    return __uint_as_float(bits | sign);
  }
  static __device__ __forceinline__ uint16_t narrow(float y) {
    const uint32_t bits = __float_as_uint(y), magnitude = bits & 0x7fffffffu;
    const uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    if (y != y) return 0x7e00u;
    if (magnitude >= 0x47800000u) return sign | 0x7c00u;  // from 2^16 on: Inf
    if (magnitude < 0x38800000u)  // below 2^-14: adding 1/2 leaves units of 2^-24, rounded
      return sign | (uint16_t)(__float_as_uint(__uint_as_float(magnitude) + 0.5f) - 0x3f000000u);
    return sign | (uint16_t)((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13);
  }
};
