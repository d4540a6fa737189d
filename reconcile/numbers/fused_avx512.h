// The AVX-512 way through one block: the same numbers as `block_of_chunks`, 16 elements at a time.
//
// Every function carries its target in an attribute, so that the file compiles without -march
// and the caller decides at run time.
#ifndef RECONCILE_FUSED_AVX512_H
#define RECONCILE_FUSED_AVX512_H

#if defined(__x86_64__)

#include <immintrin.h>

#include "fused_state.h"

#define RECONCILE_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,fma,popcnt")))
#define RECONCILE_AVX512_INLINE RECONCILE_AVX512 __attribute__((always_inline)) inline

namespace avx512 {

inline bool supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

// ------------------------------------------------------------------ 16 elements of a dtype

struct Doubles {
  __m512d lo, hi;
};

template <class T>
constexpr bool kIsWide = std::is_same_v<T, Float64>;

// Whether every R is a C, so that rounding to C keeps it.
template <class C, class R>
constexpr bool kIsExact = std::is_same_v<C, R> || kIsWide<C> ||
                          (std::is_same_v<C, Float32> && !kIsWide<R>);

// The 16 elements as they are in memory; elements outside `mask` are +0.
template <class T, bool kFull>
struct Vector;

template <bool kFull>
struct Vector<Float64, kFull> {
  __m512d lo, hi;
  RECONCILE_AVX512_INLINE static Vector load(const Float64* p, __mmask16 mask) {
    if constexpr (kFull) return {_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)};
    const auto low = static_cast<__mmask8>(mask), high = static_cast<__mmask8>(mask >> 8);
    return {_mm512_maskz_loadu_pd(low, p), _mm512_maskz_loadu_pd(high, p + 8)};
  }
  RECONCILE_AVX512_INLINE Doubles doubles() const { return {lo, hi}; }
};

template <bool kFull>
struct Vector<Float32, kFull> {
  __m512 x;
  RECONCILE_AVX512_INLINE static Vector load(const Float32* p, __mmask16 mask) {
    if constexpr (kFull) return {_mm512_loadu_ps(p)};
    return {_mm512_maskz_loadu_ps(mask, p)};
  }
  RECONCILE_AVX512_INLINE __m512 floats() const { return x; }
  RECONCILE_AVX512_INLINE __m512i codes() const { return _mm512_castps_si512(x); }
};

template <class T, bool kFull>
struct HalfVector {
  __m256i x;
  RECONCILE_AVX512_INLINE static __m256i raw(const T* p, __mmask16 mask) {
    if constexpr (kFull) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm256_maskz_loadu_epi16(mask, p);
  }
  // 16-bit codes in 32-bit lanes, with their sign
  RECONCILE_AVX512_INLINE __m512i codes() const { return _mm512_cvtepi16_epi32(x); }
};

template <bool kFull>
struct Vector<BFloat16, kFull> : HalfVector<BFloat16, kFull> {
  RECONCILE_AVX512_INLINE static Vector load(const BFloat16* p, __mmask16 mask) {
    return {{Vector::raw(p, mask)}};
  }
  RECONCILE_AVX512_INLINE __m512 floats() const {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(this->x), 16));
  }
};

template <bool kFull>
struct Vector<Float16, kFull> : HalfVector<Float16, kFull> {
  RECONCILE_AVX512_INLINE static Vector load(const Float16* p, __mmask16 mask) {
    return {{Vector::raw(p, mask)}};
  }
  RECONCILE_AVX512_INLINE __m512 floats() const { return _mm512_cvtph_ps(this->x); }
};

RECONCILE_AVX512_INLINE Doubles widened(__m512 x) {
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
          _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
}

template <class T, bool kFull>
RECONCILE_AVX512_INLINE Doubles doubles(const Vector<T, kFull>& v) {
  if constexpr (kIsWide<T>) {
    return v.doubles();
  } else {
    return widened(v.floats());
  }
}

// ------------------------------------------------------------------ codes of 16 elements
// Float64 has two vectors of 64-bit codes, every other dtype one vector of 32-bit lanes in which
// a 16-bit code has its sign extended.

template <class T, bool kWide = kIsWide<T>>
struct Codes {
  __m512i x;
};
template <class T>
struct Codes<T, true> {
  __m512i lo, hi;
};

// Eight doubles rounded to odd in float32 (see `odd_float_bits`).
RECONCILE_AVX512_INLINE __m256 odd_floats(__m512d x) {
  const __m256 near = _mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 lost = _mm512_cmp_pd_mask(_mm512_cvtps_pd(near), x, _CMP_NEQ_OQ);
  const __m256i bits = _mm256_castps_si256(near);
  return _mm256_castsi256_ps(_mm256_mask_or_epi32(bits, lost, bits, _mm256_set1_epi32(1)));
}

RECONCILE_AVX512_INLINE __m512 joined(__m256 lo, __m256 hi) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(lo), hi, 1);
}

template <class C>
RECONCILE_AVX512_INLINE __m512i codes_of_floats(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x);
  if constexpr (std::is_same_v<C, Float32>) {
    return bits;
  } else if constexpr (std::is_same_v<C, BFloat16>) {
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i more = _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff));
    const __m512i code = _mm512_srai_epi32(_mm512_add_epi32(bits, more), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(0x7fc0));
  } else {
    return _mm512_cvtepi16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  }
}

// Codes in C's format of 16 elements of a T, rounded once.
template <class C, class T, bool kFull>
RECONCILE_AVX512_INLINE Codes<C> codes(const Vector<T, kFull>& v) {
  if constexpr (kIsWide<C>) {
    const Doubles values = doubles(v);
    return {_mm512_castpd_si512(values.lo), _mm512_castpd_si512(values.hi)};
  } else if constexpr (std::is_same_v<C, T>) {
    return {v.codes()};
  } else if constexpr (!kIsWide<T>) {
    return {codes_of_floats<C>(v.floats())};
  } else if constexpr (std::is_same_v<C, Float32>) {
    const Doubles values = v.doubles();
    constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm512_castps_si512(joined(_mm512_cvt_roundpd_ps(values.lo, mode),
                                       _mm512_cvt_roundpd_ps(values.hi, mode)))};
  } else {
    const Doubles values = v.doubles();
    return {codes_of_floats<C>(joined(odd_floats(values.lo), odd_floats(values.hi)))};
  }
}

template <class C>
RECONCILE_AVX512_INLINE __mmask16 finite_lanes(const Codes<C>& c, const Codes<C>& q) {
  if constexpr (kIsWide<C>) {
    const __m512i size = _mm512_set1_epi64(kMagnitude<C>), inf = _mm512_set1_epi64(C::kInf);
    const __m512i lo = _mm512_max_epu64(_mm512_and_si512(c.lo, size), _mm512_and_si512(q.lo, size));
    const __m512i hi = _mm512_max_epu64(_mm512_and_si512(c.hi, size), _mm512_and_si512(q.hi, size));
    return _mm512_kunpackb(_mm512_cmplt_epu64_mask(hi, inf), _mm512_cmplt_epu64_mask(lo, inf));
  } else {
    const __m512i size = _mm512_set1_epi32(kMagnitude<C>), inf = _mm512_set1_epi32(C::kInf);
    const __m512i most = _mm512_max_epu32(_mm512_and_si512(c.x, size), _mm512_and_si512(q.x, size));
    return _mm512_cmplt_epu32_mask(most, inf);
  }
}

template <class C>
RECONCILE_AVX512_INLINE Codes<C> kept(const Codes<C>& c, __mmask16 mask) {
  if constexpr (kIsWide<C>) {
    return {_mm512_maskz_mov_epi64(static_cast<__mmask8>(mask), c.lo),
            _mm512_maskz_mov_epi64(static_cast<__mmask8>(mask >> 8), c.hi)};
  } else {
    return {_mm512_maskz_mov_epi32(mask, c.x)};
  }
}

RECONCILE_AVX512_INLINE Doubles kept(const Doubles& v, __mmask16 mask) {
  return {_mm512_maskz_mov_pd(static_cast<__mmask8>(mask), v.lo),
          _mm512_maskz_mov_pd(static_cast<__mmask8>(mask >> 8), v.hi)};
}

// `code_order` of 32-bit lanes; `signs` is all ones where the code is negative.
template <class C>
RECONCILE_AVX512_INLINE __m512i order(__m512i code, __m512i signs) {
  const __m512i flip = _mm512_and_si512(signs, _mm512_set1_epi32(kMagnitude<C>));
  return _mm512_sub_epi32(_mm512_xor_si512(code, flip), signs);
}

RECONCILE_AVX512_INLINE __m512i order64(__m512i code) {
  const __m512i signs = _mm512_srai_epi64(code, 63);
  const __m512i flip = _mm512_and_si512(signs, _mm512_set1_epi64(kMagnitude<Float64>));
  return _mm512_sub_epi64(_mm512_xor_si512(code, flip), signs);
}

// ------------------------------------------------------------------ running values of a block
// Plain structs that begin as `{}`: a constructor would be compiled without AVX-512.

struct Sum {
  __m512d lo, hi;
};

template <bool kExactProduct>
RECONCILE_AVX512_INLINE __m512d plus_product(__m512d sum, __m512d a, __m512d b) {
  // one rounding less than a product and an addition, unless the product is exact
  if constexpr (kExactProduct) return _mm512_fmadd_pd(a, b, sum);
  return _mm512_add_pd(sum, _mm512_mul_pd(a, b));
}

struct Running {
  Sum abs, error, power, candidate, dot;
  __m512d amax, bar, max_rel;
  __m512 amax_single, bar_single, max_rel_single;  // instead of these where both are narrow
  __m512i max_ulp, changed_bits;
  int64_t differing, over_1ulp, away, sided;
};

// ------------------------------------------------------------------ one step of 16 elements

// Lanes with r != 0 where rounding to C may have made it 0.
template <class R, bool kFull>
RECONCILE_AVX512_INLINE __mmask16 nonzero(const Vector<R, kFull>& r) {
  if constexpr (kIsWide<R>) {
    const __m512d zero = _mm512_setzero_pd();
    return _mm512_kunpackb(_mm512_cmp_pd_mask(r.hi, zero, _CMP_NEQ_UQ),
                           _mm512_cmp_pd_mask(r.lo, zero, _CMP_NEQ_UQ));
  } else {
    return _mm512_cmp_ps_mask(r.floats(), _mm512_setzero_ps(), _CMP_NEQ_UQ);
  }
}

struct Lanes {
  __mmask16 differ;   // codes that differ, by value
  __mmask16 divides;  // r != 0
};

// Distances in ulps, and the side on which the candidate lies. Lanes that are not finite are 0 in
// both codes.
template <class C, class R, bool kFull>
RECONCILE_AVX512_INLINE Lanes ulps(Running& t, const Codes<C>& c, const Codes<C>& q,
                                   const Vector<R, kFull>& r, __mmask16 finite) {
  __mmask16 differ, over, ahead, moved;
  if constexpr (kIsWide<C>) {
    const __m512i x0 = _mm512_xor_si512(c.lo, q.lo), x1 = _mm512_xor_si512(c.hi, q.hi);
    t.changed_bits = _mm512_or_si512(t.changed_bits, _mm512_or_si512(x0, x1));
    const __m512i c0 = order64(c.lo), c1 = order64(c.hi), q0 = order64(q.lo), q1 = order64(q.hi);
    const __m512i d0 = _mm512_sub_epi64(_mm512_max_epi64(c0, q0), _mm512_min_epi64(c0, q0));
    const __m512i d1 = _mm512_sub_epi64(_mm512_max_epi64(c1, q1), _mm512_min_epi64(c1, q1));
    const __m512i one = _mm512_set1_epi64(1);
    t.max_ulp = _mm512_max_epu64(t.max_ulp, _mm512_max_epu64(d0, d1));
    differ = _mm512_kunpackb(_mm512_test_epi64_mask(d1, d1), _mm512_test_epi64_mask(d0, d0));
    over = _mm512_kunpackb(_mm512_cmpgt_epu64_mask(d1, one), _mm512_cmpgt_epu64_mask(d0, one));
    const __mmask16 above =
        _mm512_kunpackb(_mm512_cmpgt_epi64_mask(c1, q1), _mm512_cmpgt_epi64_mask(c0, q0));
    const __mmask16 negative = _mm512_kunpackb(_mm512_movepi64_mask(q1), _mm512_movepi64_mask(q0));
    moved = _mm512_kunpackb(_mm512_test_epi64_mask(q1, q1), _mm512_test_epi64_mask(q0, q0));
    ahead = above ^ negative;
  } else {
    const __m512i changed = _mm512_xor_si512(c.x, q.x);
    t.changed_bits = _mm512_or_si512(t.changed_bits, changed);
    __m512i distance;
    if (__builtin_expect(_mm512_movepi32_mask(changed) == 0, 1)) {  // each has its sign on both sides
      distance = _mm512_abs_epi32(_mm512_sub_epi32(c.x, q.x));
      ahead = _mm512_cmpgt_epi32_mask(c.x, q.x);  // larger codes are farther from 0
    } else {
      const __m512i c0 = order<C>(c.x, _mm512_srai_epi32(c.x, 31));
      const __m512i q0 = order<C>(q.x, _mm512_srai_epi32(q.x, 31));
      distance = _mm512_sub_epi32(_mm512_max_epi32(c0, q0), _mm512_min_epi32(c0, q0));
      // the sign of a reference that became 0 is that of its code
      ahead = _mm512_cmpgt_epi32_mask(c0, q0) ^ _mm512_movepi32_mask(q.x);
    }
    t.max_ulp = _mm512_max_epu32(t.max_ulp, distance);
    differ = _mm512_test_epi32_mask(distance, distance);
    over = _mm512_cmpgt_epu32_mask(distance, _mm512_set1_epi32(1));
    const __m512i magnitude = _mm512_set1_epi32(kMagnitude<C>);
    moved = kIsExact<C, R> ? _mm512_test_epi32_mask(q.x, magnitude) : nonzero(r) & finite;
  }
  const __mmask16 sided = differ & moved;
  t.differing += __builtin_popcount(differ);
  t.over_1ulp += __builtin_popcount(over);
  t.sided += __builtin_popcount(sided);
  t.away += __builtin_popcount(ahead & sided);
  return {differ, moved};
}

template <class C, class R>
RECONCILE_AVX512_INLINE void sum_up(Running& t, const Doubles& c, const Doubles& r,
                                    const Doubles& error, const Doubles& size) {
  constexpr bool narrow_c = !kIsWide<C>, narrow_r = !kIsWide<R>;
  t.abs.lo = _mm512_add_pd(t.abs.lo, size.lo);
  t.abs.hi = _mm512_add_pd(t.abs.hi, size.hi);
  t.error.lo = plus_product<false>(t.error.lo, error.lo, error.lo);
  t.error.hi = plus_product<false>(t.error.hi, error.hi, error.hi);
  t.power.lo = plus_product<narrow_r>(t.power.lo, r.lo, r.lo);
  t.power.hi = plus_product<narrow_r>(t.power.hi, r.hi, r.hi);
  t.candidate.lo = plus_product<narrow_c>(t.candidate.lo, c.lo, c.lo);
  t.candidate.hi = plus_product<narrow_c>(t.candidate.hi, c.hi, c.hi);
  t.dot.lo = plus_product<narrow_c && narrow_r>(t.dot.lo, c.lo, r.lo);
  t.dot.hi = plus_product<narrow_c && narrow_r>(t.dot.hi, c.hi, r.hi);
}

// Lanes that may hold a new maximum (see `block_of_chunks`), from float64 on either side.
RECONCILE_AVX512_INLINE __mmask16 may_be_maximum(Running& t, const Doubles& size, const Doubles& r,
                                            Lanes lanes) {
  const Doubles amount = {_mm512_abs_pd(r.lo), _mm512_abs_pd(r.hi)};
  t.amax = _mm512_max_pd(t.amax, _mm512_max_pd(amount.lo, amount.hi));
  const __m512d least = _mm512_set1_pd(std::numeric_limits<double>::denorm_min());
  const __m512d lo = _mm512_max_pd(_mm512_mul_pd(t.max_rel, amount.lo), least);
  const __m512d hi = _mm512_max_pd(_mm512_mul_pd(t.max_rel, amount.hi), least);
  const auto low = static_cast<__mmask8>(lanes.divides);
  const auto high = static_cast<__mmask8>(lanes.divides >> 8);
  const __mmask8 found_lo = _mm512_cmp_pd_mask(size.lo, t.bar, _CMP_GE_OQ) |
                            _mm512_mask_cmp_pd_mask(low, size.lo, lo, _CMP_GE_OQ);
  const __mmask8 found_hi = _mm512_cmp_pd_mask(size.hi, t.bar, _CMP_GE_OQ) |
                            _mm512_mask_cmp_pd_mask(high, size.hi, hi, _CMP_GE_OQ);
  return _mm512_kunpackb(found_hi, found_lo);
}

// The same in float32. Rounding keeps the order, so what holds for the exact numbers holds for
// the rounded ones, with the thresholds rounded down (`rounded_down`).
RECONCILE_AVX512_INLINE __mmask16 may_be_maximum(Running& t, __m512 size, __m512 r, Lanes lanes) {
  const __m512 amount = _mm512_abs_ps(r);
  t.amax_single = _mm512_max_ps(t.amax_single, amount);
  const __mmask16 relative = lanes.differ & lanes.divides;
  return _mm512_cmp_ps_mask(size, t.bar_single, _CMP_GE_OQ) |
         _mm512_mask_cmp_ps_mask(relative, size, _mm512_mul_ps(t.max_rel_single, amount),
                                 _CMP_GE_OQ);
}

inline float rounded_down(double x) {
  const auto near = static_cast<float>(x);
  const uint32_t below = bit_cast<uint32_t>(near) - 1;  // x is not negative
  return static_cast<double>(near) > x ? bit_cast<float>(below) : near;
}

// Takes the thresholds from the totals.
RECONCILE_AVX512_INLINE void set_thresholds(Running& t, const State& s, int64_t column) {
  const double bar = s.bar(column);
  t.bar = _mm512_set1_pd(bar);
  t.max_rel = _mm512_set1_pd(s.max_rel.value);
  // no difference of narrow numbers is smaller, unless it is 0
  t.bar_single = _mm512_set1_ps(std::fmax(rounded_down(bar), 0x1p-149f));
  t.max_rel_single = _mm512_set1_ps(rounded_down(s.max_rel.value));
}

__attribute__((noinline)) inline void examine_lanes(State& s, unsigned lanes, const double* c,
                                                    const double* r, int64_t place,
                                                    int64_t column) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int k = __builtin_ctz(lanes);
    examine(s, c[k], r[k], place + k, column + k);
  }
}

template <class C, class R>
__attribute__((noinline)) void count_nonfinite_lanes(State& s, unsigned lanes, const C* c,
                                                     const R* r, int64_t place) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int k = __builtin_ctz(lanes);
    count_nonfinite(s, c[k], r[k], place + k);
    --s.finite;
  }
}

template <class C, class R, bool kFull>
RECONCILE_AVX512_INLINE void step(State& s, Running& t, const C* c, const R* r, int count,
                                  int64_t place, int64_t column, int64_t first_column) {
  const auto mask = static_cast<__mmask16>(kFull ? 0xffff : (1u << count) - 1);
  const auto cv = Vector<C, kFull>::load(c, mask);
  const auto rv = Vector<R, kFull>::load(r, mask);
  Codes<C> cc = codes<C>(cv), qc = codes<C>(rv);
  const __mmask16 finite = finite_lanes<C>(cc, qc);
  Doubles cd = doubles(cv), rd = doubles(rv);
  if (__builtin_expect(finite != 0xffff, 0)) {
    count_nonfinite_lanes(s, static_cast<uint16_t>(~finite), c, r, place);
    cd = kept(cd, finite), rd = kept(rd, finite);
    cc = kept<C>(cc, finite), qc = kept<C>(qc, finite);
  }
  Lanes lanes = ulps<C, R>(t, cc, qc, rv, finite);
  const Doubles error = {_mm512_sub_pd(cd.lo, rd.lo), _mm512_sub_pd(cd.hi, rd.hi)};
  const Doubles size = {_mm512_abs_pd(error.lo), _mm512_abs_pd(error.hi)};
  sum_up<C, R>(t, cd, rd, error, size);
  __mmask16 found;
  if constexpr (kIsWide<C> || kIsWide<R>) {
    found = may_be_maximum(t, size, rd, lanes);
  } else {
    __m512 single_c = cv.floats(), single_r = rv.floats();
    if (__builtin_expect(finite != 0xffff, 0)) {
      single_c = _mm512_maskz_mov_ps(finite, single_c);
      single_r = _mm512_maskz_mov_ps(finite, single_r);
    }
    const __m512 single = _mm512_abs_ps(_mm512_sub_ps(single_c, single_r));
    if constexpr (!std::is_same_v<C, R>)
      lanes.differ = _mm512_cmp_ps_mask(single, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    found = may_be_maximum(t, single, single_r, lanes);
  }
  if (__builtin_expect(found != 0, 0)) {
    alignas(64) double c_values[kLanes], r_values[kLanes];
    _mm512_store_pd(c_values, cd.lo), _mm512_store_pd(c_values + 8, cd.hi);
    _mm512_store_pd(r_values, rd.lo), _mm512_store_pd(r_values + 8, rd.hi);
    examine_lanes(s, found, c_values, r_values, place, column);
    set_thresholds(t, s, first_column);
  }
}

// ------------------------------------------------------------------ one block

// Partial sums of lanes k and k + 8, then 4, 2 and 1 apart: the order of `folded`.
RECONCILE_AVX512_INLINE double folded(const Sum& sum) {
  const __m512d eight = _mm512_add_pd(sum.lo, sum.hi);
  const __m256d four =
      _mm256_add_pd(_mm512_castpd512_pd256(eight), _mm512_extractf64x4_pd(eight, 1));
  const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(four), _mm256_extractf128_pd(four, 1));
  return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

template <class C>
RECONCILE_AVX512_INLINE uint64_t largest(__m512i ulps) {
  if constexpr (kIsWide<C>) return _mm512_reduce_max_epu64(ulps);
  return _mm512_reduce_max_epu32(ulps);
}

// A block of equal bits: three sums are one, two are 0. False where it is no such block.
template <class T>
RECONCILE_AVX512_INLINE bool equal_block(State& s, const T* c, const T* r, int count,
                                         double (&sums)[kSums]) {
  if (count < kLanes || std::memcmp(c, r, kLanes * sizeof(T)) != 0) return false;
  if (std::memcmp(c, r, static_cast<size_t>(count) * sizeof(T)) != 0) return false;
  Sum power{};
  __m512d amax = _mm512_setzero_pd();
  __mmask16 finite = 0xffff;
  for (int i = 0; i < count; i += kLanes) {
    const int left = count - i;
    const auto mask = static_cast<__mmask16>(left >= kLanes ? 0xffff : (1u << left) - 1);
    const auto v = Vector<T, false>::load(r + i, mask);
    const Doubles d = doubles(v);
    const Codes<T> code = codes<T>(v);
    finite &= finite_lanes<T>(code, code);
    amax = _mm512_max_pd(amax, _mm512_max_pd(_mm512_abs_pd(d.lo), _mm512_abs_pd(d.hi)));
    power.lo = plus_product<!kIsWide<T>>(power.lo, d.lo, d.lo);
    power.hi = plus_product<!kIsWide<T>>(power.hi, d.hi, d.hi);
  }
  if (finite != 0xffff) return false;
  s.finite += count;
  s.amax = std::fmax(s.amax, _mm512_reduce_max_pd(amax));
  sums[kAbs] = sums[kError] = 0;
  sums[kPower] = sums[kCandidate] = sums[kDot] = folded(power);
  return true;
}

template <class C, bool kNarrow>
RECONCILE_AVX512_INLINE void take(State& s, const Running& t, double (&sums)[kSums]) {
  s.differing += t.differing;
  s.over_1ulp += t.over_1ulp;
  s.bias += 2 * t.away - t.sided;
  s.bitwise = s.bitwise && _mm512_test_epi32_mask(t.changed_bits, t.changed_bits) == 0;
  const uint64_t ulp = largest<C>(t.max_ulp);
  if (ulp > s.max_ulp) s.max_ulp = ulp;
  const double amax = kNarrow ? static_cast<double>(_mm512_reduce_max_ps(t.amax_single))
                              : _mm512_reduce_max_pd(t.amax);
  if (amax > s.amax) s.amax = amax;
  sums[kAbs] = folded(t.abs);
  sums[kError] = folded(t.error);
  sums[kPower] = folded(t.power);
  sums[kCandidate] = folded(t.candidate);
  sums[kDot] = folded(t.dot);
}

template <class C, class R>
RECONCILE_AVX512 void block(State& s, const C* c, const R* r, Block b, double (&sums)[kSums]) {
  first_elements(s, c, r, b);
  if constexpr (std::is_same_v<C, R>) {
    if (equal_block(s, c, r, b.count, sums)) return;
  }
  s.finite += b.count;
  Running t{};
  set_thresholds(t, s, b.column);
  const int full = b.count / kLanes * kLanes;
  for (int i = 0; i < full; i += kLanes)
    step<C, R, true>(s, t, c + i, r + i, kLanes, b.place + i, b.column + i, b.column);
  if (full < b.count)
    step<C, R, false>(s, t, c + full, r + full, b.count - full, b.place + full, b.column + full,
                      b.column);
  take<C, !kIsWide<C> && !kIsWide<R>>(s, t, sums);
}

}  // namespace avx512

#endif
#endif
