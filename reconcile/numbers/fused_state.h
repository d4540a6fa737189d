// Number formats and the running totals of one thread; the portable way through one block.
#ifndef RECONCILE_FUSED_STATE_H
#define RECONCILE_FUSED_STATE_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fused_exact.h"

#define RECONCILE_INLINE __attribute__((always_inline)) inline

constexpr int kLanes = 16;    // element i of a block is added to partial sum i % kLanes
constexpr int kBlock = 1024;  // elements of a row that are summed in float64 before the exact sum
constexpr int kWorst = 5;
constexpr int kBins = 2100;       // frexp exponents -1073 ... 1024 of a double; 1025 for infinity
constexpr int kBinOfZero = 1074;  // the bin of exponent 0

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same width");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ------------------------------------------------------------------ number formats
// A dtype is a type that holds one element; `Order` is wide enough for a difference of codes.

struct Float64 {
  uint64_t bits;
  using Bits = uint64_t;
  static constexpr Bits kInf = 0x7ff0000000000000ull;
};
struct Float32 {
  uint32_t bits;
  using Bits = uint32_t;
  static constexpr Bits kInf = 0x7f800000u;
};
struct BFloat16 {
  uint16_t bits;
  using Bits = uint16_t;
  static constexpr Bits kInf = 0x7f80u;
};
struct Float16 {
  uint16_t bits;
  using Bits = uint16_t;
  static constexpr Bits kInf = 0x7c00u;
};

template <class T>
constexpr typename T::Bits kMagnitude = static_cast<typename T::Bits>(~typename T::Bits{0}) >> 1;

template <class T>
inline bool is_finite(T x) {
  return (x.bits & kMagnitude<T>) < T::kInf;
}
template <class T>
inline bool is_nan(T x) {
  return (x.bits & kMagnitude<T>) > T::kInf;
}

inline double to_double(Float64 x) { return bit_cast<double>(x.bits); }
inline double to_double(Float32 x) { return static_cast<double>(bit_cast<float>(x.bits)); }
inline double to_double(BFloat16 x) {
  return static_cast<double>(bit_cast<float>(static_cast<uint32_t>(x.bits) << 16));
}
inline double to_double(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t size = x.bits & 0x7fffu;
  if (size >= 0x7c00u)  // inf and NaN
    return static_cast<double>(bit_cast<float>(sign | 0x7f800000u | (size & 0x3ffu) << 13));
  if (size < 0x0400u)  // subnormal: a multiple of 2^-24
    return (sign ? -1.0 : 1.0) * static_cast<double>(size) * 0x1p-24;
  return static_cast<double>(bit_cast<float>(sign | ((size << 13) + 0x38000000u)));
}

// Rounds to float32 so that a further rounding to a 16-bit dtype is as good as a single one:
// towards zero, with the last bit set where something was lost ("round to odd").
inline uint32_t odd_float_bits(double x) {
  const float near = static_cast<float>(x);
  const double back = static_cast<double>(near);
  uint32_t bits = bit_cast<uint32_t>(near);
  if (back == x || std::isnan(x)) return bits;
  if (std::fabs(back) > std::fabs(x)) --bits;
  return bits | 1u;
}

inline BFloat16 nearest_bfloat16(uint32_t float_bits) {
  const auto code = static_cast<uint16_t>((float_bits + 0x7fffu + ((float_bits >> 16) & 1u)) >> 16);
  return {(float_bits & 0x7fffffffu) > Float32::kInf ? static_cast<uint16_t>(0x7fc0u) : code};
}

// x rounded once, to nearest with ties to even.
template <class T>
inline T rounded(double x);
template <>
inline Float64 rounded<Float64>(double x) {
  return {bit_cast<uint64_t>(x)};
}
template <>
inline Float32 rounded<Float32>(double x) {
  return {bit_cast<uint32_t>(static_cast<float>(x))};
}
template <>
inline BFloat16 rounded<BFloat16>(double x) {
  return nearest_bfloat16(odd_float_bits(x));
}
template <>
inline Float16 rounded<Float16>(double x) {
  if (std::isnan(x)) return {0x7e00u};
  const uint32_t bits = odd_float_bits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t half;
  if (size >= 0x477ff000u) {  // 65520 and above
    half = 0x7c00u;
  } else if (size >= 0x38800000u) {
    half = (size + 0xfffu + ((size >> 13) & 1u) - 0x38000000u) >> 13;
  } else {  // subnormal: 0.5f has the same step, 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | half)};
}

// The reference's element in the candidate's dtype; bits are kept where the dtypes are equal.
template <class C, class R>
inline C round_to(R r) {
  if constexpr (std::is_same_v<C, R>) {
    return r;
  } else if constexpr (std::is_same_v<C, BFloat16> && std::is_same_v<R, Float32>) {
    return nearest_bfloat16(r.bits);
  } else {
    return rounded<C>(to_double(r));
  }
}

// Place of a code in the order of values; +0 and -0 are both 0.
template <class T>
using Order = std::conditional_t<sizeof(T) == 8, int64_t, int32_t>;

template <class T>
inline Order<T> code_order(T x) {
  using Signed = std::make_signed_t<typename T::Bits>;
  const Order<T> code = static_cast<Signed>(x.bits);
  const Order<T> lowest = std::numeric_limits<Signed>::min();
  return code < 0 ? lowest - code : code;
}

// ------------------------------------------------------------------ running totals

// The kWorst first of (place, value) pairs: NaN, then larger values, then lower places.
struct WorstList {
  int size = 0;
  int64_t place[kWorst] = {};
  double value[kWorst] = {};

  static bool precedes(int64_t place_a, double a, int64_t place_b, double b) {
    if (std::isnan(a) != std::isnan(b)) return std::isnan(a);
    if (a != b && !std::isnan(a)) return a > b;
    return place_a < place_b;
  }

  // Adds a pair, or raises the value at a place that is there already.
  void add(int64_t new_place, double new_value) {
    if (size == kWorst && !precedes(new_place, new_value, place[size - 1], value[size - 1])) return;
    int at = 0;
    while (at < size && place[at] != new_place) ++at;
    if (at < size && !precedes(new_place, new_value, place[at], value[at])) return;
    if (at == size && size < kWorst) ++size;
    if (at == kWorst) --at;  // the last one drops out
    for (; at > 0 && precedes(new_place, new_value, place[at - 1], value[at - 1]); --at) {
      place[at] = place[at - 1];
      value[at] = value[at - 1];
    }
    place[at] = new_place;
    value[at] = new_value;
  }
};

struct Maximum {
  double value = 0;
  int64_t place = -1;  // flat index of the first element that counts; the first of equals
  double candidate = std::numeric_limits<double>::quiet_NaN();
  double reference = std::numeric_limits<double>::quiet_NaN();

  void set(double new_value, int64_t new_place, double c, double r) {
    value = new_value, place = new_place, candidate = c, reference = r;
  }
  // Takes in the maximum of later elements.
  void merge(const Maximum& later) {
    if (later.place >= 0 && (place < 0 || later.value > value)) *this = later;
  }
};

enum SumIndex { kAbs, kError, kPower, kCandidate, kDot, kSums };

struct State {
  int64_t finite = 0, nan_candidate = 0, inf_candidate = 0, nan_reference = 0, inf_reference = 0;
  int64_t mismatch = 0, mismatch_place = -1;
  int64_t differing = 0;  // finite elements only
  int64_t over_1ulp = 0, bias = 0;
  uint64_t max_ulp = 0;
  bool bitwise = true;
  bool seen = false, constant = true;  // any finite pair; whether all its references are equal
  double first_reference = 0;
  double amax = 0;
  Maximum max_abs, max_rel;
  WorstList rows, columns;
  ExactSum sums[kSums];
  uint64_t histogram[kBins] = {};  // bin 0 for errors of 0, then one for each frexp exponent

  // The list of worst columns begins as it would end if all were right, so that it can be kept
  // while the elements pass, without a maximum for every column.
  explicit State(int64_t columns_of_a_row) {
    for (int64_t j = 0; j < kWorst && j < columns_of_a_row; ++j) columns.add(j, 0.0);
  }

  // |c - r| below this changes neither the maximum nor the worst columns, if its column is at
  // least `column`.
  double bar(int64_t column) const {
    const int last = columns.size - 1;
    const double least = columns.value[last];
    const double next = std::isinf(least) ? least : bit_cast<double>(bit_cast<uint64_t>(least) + 1);
    const double found = column <= columns.place[last] ? least : next;
    return found > 0 ? found : std::numeric_limits<double>::denorm_min();
  }

  void finish_row(int64_t row, double error, double power) {
    rows.add(row, power > 0 ? error / power
                            : (error > 0 ? std::numeric_limits<double>::infinity() : 0.0));
  }

  void merge(State& later);
};

inline void State::merge(State& later) {
  finite += later.finite;
  nan_candidate += later.nan_candidate, inf_candidate += later.inf_candidate;
  nan_reference += later.nan_reference, inf_reference += later.inf_reference;
  mismatch += later.mismatch;
  if (mismatch_place < 0) mismatch_place = later.mismatch_place;
  differing += later.differing, over_1ulp += later.over_1ulp, bias += later.bias;
  if (later.max_ulp > max_ulp) max_ulp = later.max_ulp;
  bitwise = bitwise && later.bitwise;
  constant = constant && later.constant &&
             !(seen && later.seen && first_reference != later.first_reference);
  if (!seen) seen = later.seen, first_reference = later.first_reference;
  if (later.amax > amax) amax = later.amax;
  max_abs.merge(later.max_abs);
  max_rel.merge(later.max_rel);
  for (int k = 0; k < later.rows.size; ++k) rows.add(later.rows.place[k], later.rows.value[k]);
  for (int k = 0; k < later.columns.size; ++k)
    columns.add(later.columns.place[k], later.columns.value[k]);
  for (int k = 0; k < kSums; ++k) sums[k].add(later.sums[k]);
  for (int k = 0; k < kBins; ++k) histogram[k] += later.histogram[k];
}

// ------------------------------------------------------------------ one element

// An element that is not finite on at least one side.
template <class C, class R>
void count_nonfinite(State& s, C c, R r, int64_t place) {
  const C q = round_to<C>(r);
  const bool nan_c = is_nan(c), nan_r = is_nan(q);
  s.nan_candidate += nan_c;
  s.nan_reference += nan_r;
  s.inf_candidate += !nan_c && !is_finite(c);
  s.inf_reference += !nan_r && !is_finite(q);
  const bool same = nan_c && nan_r;
  if (!same && c.bits != q.bits) {
    if (s.mismatch++ == 0) s.mismatch_place = place;
  }
  // the bits of a NaN that was converted are nobody's promise
  if (c.bits != q.bits && !(same && !std::is_same_v<C, R>)) s.bitwise = false;
}

// A finite element that may be a maximum.
inline void examine(State& s, double c, double r, int64_t place, int64_t column) {
  const double size = std::fabs(c - r);
  if (size > s.max_abs.value) s.max_abs.set(size, place, c, r);
  if (size > 0) s.columns.add(column, size);
  const double amount = std::fabs(r);
  if (amount > 0 && size >= s.max_rel.value * amount) {  // implied by what follows
    const double relative = size / amount;
    if (relative > s.max_rel.value) s.max_rel.set(relative, place, c, r);
  }
}

// Bin of a difference; bin 0, which no exponent has, for those that are 0.
inline int exponent_bin(double size) {
  const auto field = static_cast<int>(bit_cast<uint64_t>(size) >> 52);
  if (__builtin_expect(field == 0 && size > 0, 0)) {
    int exponent;
    std::frexp(size, &exponent);
    return exponent + kBinOfZero;
  }
  return field == 0 ? 0 : field - 1022 + kBinOfZero;
}

// ------------------------------------------------------------------ one block

// Part of one row: `count` elements from flat index `place`, in column `column` and after it.
struct Block {
  int count;
  int64_t place, column;
};

// The exponents of |c - r| of finite elements.
template <class C, class R>
void count_exponents(State& s, const C* c, const R* r, int count) {
  for (int i = 0; i < count; ++i) {
    if (!is_finite(c[i]) || !is_finite(round_to<C>(r[i]))) continue;
    ++s.histogram[exponent_bin(std::fabs(to_double(c[i]) - to_double(r[i])))];
  }
}

// What is known after few elements: the first that count for the maxima, and whether the
// reference varies.
template <class C, class R>
void first_elements(State& s, const C* c, const R* r, Block block) {
  for (int i = 0; i < block.count; ++i) {
    if (s.max_abs.place >= 0 && s.max_rel.place >= 0 && !s.constant) return;
    if (!is_finite(c[i]) || !is_finite(round_to<C>(r[i]))) continue;
    const double cv = to_double(c[i]), rv = to_double(r[i]);
    if (!s.seen) s.seen = true, s.first_reference = rv;
    s.constant = s.constant && rv == s.first_reference;
    if (s.max_abs.place < 0) s.max_abs.set(0, block.place + i, cv, rv);
    if (s.max_rel.place < 0 && rv != 0) s.max_rel.set(0, block.place + i, cv, rv);
  }
}

// Halves the lanes until one is left.
inline double folded(double (&lanes)[kLanes]) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) lanes[k] += lanes[k + half];
  return lanes[0];
}

// 16 elements as float64 and as places in the candidate's order of codes; 0 where an element is
// not finite, or lies beyond the row. Fixed loops without branches, which compilers vectorise.
template <class C>
struct Chunk {
  double c[kLanes], r[kLanes];
  Order<C> ahead[kLanes], behind[kLanes];
  bool changed;  // any bits that differ

  template <class R>
  RECONCILE_INLINE void load(State& s, const C* candidate, const R* reference, int count,
                             int64_t place) {
    if (__builtin_expect(count == kLanes && load_finite(candidate, reference), 1)) {
      s.finite += kLanes;
      return;
    }
    *this = {};
    for (int k = 0; k < count; ++k) {
      const C q = round_to<C>(reference[k]);
      if (!is_finite(candidate[k]) || !is_finite(q)) {
        count_nonfinite(s, candidate[k], reference[k], place + k);
        continue;
      }
      ++s.finite;
      changed = changed || candidate[k].bits != q.bits;
      c[k] = to_double(candidate[k]), r[k] = to_double(reference[k]);
      ahead[k] = code_order(candidate[k]), behind[k] = code_order(q);
    }
  }

  // False, and nothing loaded, where not all are finite.
  template <class R>
  RECONCILE_INLINE bool load_finite(const C* candidate, const R* reference) {
    using Bits = typename C::Bits;
    C q[kLanes];
    Bits most = 0, changes = 0;
    for (int k = 0; k < kLanes; ++k) q[k] = round_to<C>(reference[k]);
    for (int k = 0; k < kLanes; ++k) {
      const Bits a = candidate[k].bits & kMagnitude<C>, b = q[k].bits & kMagnitude<C>;
      most = a > most ? a : most;
      most = b > most ? b : most;
      changes |= candidate[k].bits ^ q[k].bits;
    }
    if (most >= C::kInf) return false;
    for (int k = 0; k < kLanes; ++k) c[k] = to_double(candidate[k]);
    for (int k = 0; k < kLanes; ++k) r[k] = to_double(reference[k]);
    for (int k = 0; k < kLanes; ++k) ahead[k] = code_order(candidate[k]);
    for (int k = 0; k < kLanes; ++k) behind[k] = code_order(q[k]);
    changed = changes != 0;
    return true;
  }
};

template <class C>
RECONCILE_INLINE void count_ulps(State& s, const Chunk<C>& x) {
  using Distance = std::make_unsigned_t<Order<C>>;
  Distance most = 0;
  int differing = 0, over = 0, bias = 0;
  for (int k = 0; k < kLanes; ++k) {
    const Order<C> high = x.ahead[k] > x.behind[k] ? x.ahead[k] : x.behind[k];
    const Order<C> low = x.ahead[k] > x.behind[k] ? x.behind[k] : x.ahead[k];
    const Distance distance = static_cast<Distance>(high) - static_cast<Distance>(low);
    most = distance > most ? distance : most;
    differing += distance > 0;
    over += distance > 1;
    const int side = (x.ahead[k] > x.behind[k]) - (x.ahead[k] < x.behind[k]);
    bias += ((x.r[k] > 0) - (x.r[k] < 0)) * side;
  }
  s.bitwise = s.bitwise && !x.changed;
  s.differing += differing, s.over_1ulp += over, s.bias += bias;
  if (most > s.max_ulp) s.max_ulp = most;
}

// Adds a block to the totals, and gives its five sums.
template <class C, class R>
RECONCILE_INLINE void block_of_chunks(State& s, const C* c, const R* r, Block block,
                                      double (&sums)[kSums]) {
  first_elements(s, c, r, block);
  double lanes[kSums][kLanes] = {}, amax[kLanes] = {}, size[kLanes];
  double bar = s.bar(block.column);
  for (int i = 0; i < block.count; i += kLanes) {
    const int left = block.count - i, count = left < kLanes ? left : kLanes;
    Chunk<C> x;
    x.load(s, c + i, r + i, count, block.place + i);
    int candidates = 0;
    const double max_rel = s.max_rel.value;
    for (int k = 0; k < kLanes; ++k) {
      const double error = x.c[k] - x.r[k], amount = std::fabs(x.r[k]);
      size[k] = std::fabs(error);
      lanes[kAbs][k] += size[k];
      lanes[kError][k] += error * error;
      lanes[kPower][k] += x.r[k] * x.r[k];
      lanes[kCandidate][k] += x.c[k] * x.c[k];
      lanes[kDot][k] += x.c[k] * x.r[k];
      amax[k] = amount > amax[k] ? amount : amax[k];
      // size / amount > max_rel, after rounding, implies size >= max_rel * amount, after rounding
      candidates |= (size[k] >= bar) |
                    ((size[k] > 0) & (amount > 0) & (size[k] >= max_rel * amount));
    }
    if (__builtin_expect(candidates, 0)) {
      for (int k = 0; k < count; ++k)
        examine(s, x.c[k], x.r[k], block.place + i + k, block.column + i + k);
      bar = s.bar(block.column);
    }
    count_ulps(s, x);
  }
  for (int k = 0; k < kSums; ++k) sums[k] = folded(lanes[k]);
  for (int k = 0; k < kLanes; ++k) s.amax = amax[k] > s.amax ? amax[k] : s.amax;
}

template <class C, class R>
void block_portable(State& s, const C* c, const R* r, Block block, double (&sums)[kSums]) {
  block_of_chunks(s, c, r, block, sums);
}

#if defined(__x86_64__)
// The same source for processors that have AVX2.
template <class C, class R>
__attribute__((target("avx2"))) void block_avx2(State& s, const C* c, const R* r, Block block,
                                                double (&sums)[kSums]) {
  block_of_chunks(s, c, r, block, sums);
}
#endif

#endif
