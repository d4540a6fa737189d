// y[m, n] = scale[n] * sum over k of x[m, k] * w[n, k]  (+ bias[n]), w in {-1, 0, +1}
//
// Two kernels over the packed words of panels.h, one vector lane per row of w:
//
//   bfloat16   VDPBF16PS on bfloat16 x. The products are exact; the sum is float32, k ascending,
//              one accumulator per element of y. The instruction counts subnormals as zero.
//   int8       VPDPBUSD on x quantised per row to int8 by the arithmetic of
//              reconcile/activation.py, per_token_int8; the sum is an exact integer.
//
// The order of the sum is the same for every M, tile and thread: a row has the same bits alone
// and in any batch. Every element of y is written once.
//
//   panels.h       the packed order of w
//   activations.h  the order in which the tiles read x
//   numbers.h      the dtypes of x and y
//   this file      tiles, the walk over them, threads, and the C interface
#include <immintrin.h>
#include <stdint.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

#include "activations.h"
#include "numbers.h"
#include "panels.h"

namespace {

constexpr int TILE_ROWS = 12;             // rows of x in one tile: 12 x 2 sums of 32 registers
constexpr int AHEAD = 2048;               // bytes of w that are asked for ahead of their use
constexpr int STRETCH = 128;              // steps of K that are decoded at once: 16 KB
constexpr int64_t GROUP = 6;              // tiles whose rows of x share the second cache
constexpr int64_t THREAD_WORK = 1 << 23;  // multiply-adds that are worth another thread

struct BFloat16Dot {
  typedef Pairs Layout;
  typedef PairRows Rows;
  typedef __m512 Sum;
  static Sum zero() { return _mm512_setzero_ps(); }
  static __m512i decode(__m512i word) {
    return _mm512_and_si512(word, _mm512_set1_epi32((int)0xC000C000u));
  }
  static __m512i next(__m512i word) { return _mm512_slli_epi32(word, 2); }
  static Sum add(Sum sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
  }
};

struct Int8Dot {
  typedef Quads Layout;
  typedef QuadRows Rows;
  typedef __m512i Sum;
  static Sum zero() { return _mm512_setzero_si512(); }
  static __m512i decode(__m512i word) { return _mm512_and_si512(word, _mm512_set1_epi8(3)); }
  static __m512i next(__m512i word) { return _mm512_srli_epi32(word, 2); }
  static Sum add(Sum sum, __m512i w, __m512i x) { return _mm512_dpbusd_epi32(sum, w, x); }
};

// Scale, bias and the one rounding to y's dtype, for 16 columns of one row.
struct Epilogue {
  const float *scales, *bias;  // scales are padded to whole panels, bias is not
  int divide;                  // whether the scale divides
  void* y;
  int64_t n;

  template <typename Number>
  void store(__m512 sum, int64_t row, int64_t column) const {
    const __mmask16 some = first(n - column);
    const __m512 scale = _mm512_loadu_ps(scales + column);
    __m512 value = divide ? _mm512_div_ps(sum, scale) : _mm512_mul_ps(sum, scale);
    if (bias) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(some, bias + column));
    Number::store((typename Number::Stored*)y + row * n + column, some, value);
  }
};

template <typename Dot>
struct Call {
  const uint32_t* w;
  const typename Dot::Rows& rows;
  const Epilogue& epilogue;
  int64_t blocks;

  // The words of vector `vector` of rows of w, PANEL_ROWS apart from block to block.
  const uint32_t* words(int64_t vector) const {
    return w + vector / VECTORS * blocks * PANEL_ROWS + vector % VECTORS * LANES;
  }
};

// One step of K: sum[m][j] += w[j] * x[m].
template <typename Dot, int MT, int NT>
inline __attribute__((always_inline)) void add_step(typename Dot::Sum (&sum)[MT][NT],
                                                    const __m512i (&w)[NT], const uint32_t* x) {
#pragma GCC unroll 12
  for (int m = 0; m < MT; ++m) {
    const __m512i one = _mm512_set1_epi32((int)x[m]);
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) sum[m][j] = Dot::add(sum[m][j], w[j], one);
  }
}

// Few rows of x: all MT at once, w decoded on the way. Columns from vector `left` on.
template <typename Dot, typename Number, int MT, int NT>
void few_rows(const Call<Dot>& call, int64_t left) {
  const uint32_t* w[NT];
  typename Dot::Sum sum[MT][NT];
  for (int j = 0; j < NT; ++j) {
    w[j] = call.words(left + j);
    for (int m = 0; m < MT; ++m) sum[m][j] = Dot::zero();
  }
  const uint32_t* x = call.rows.of(0);
  for (int64_t block = 0; block < call.blocks; ++block) {
    __m512i word[NT], value[NT];
#pragma GCC unroll 8
    for (int j = 0; j < NT; ++j) {
      const uint32_t* place = w[j] + block * PANEL_ROWS;
      word[j] = _mm512_loadu_si512(place);
      _mm_prefetch((const char*)place + AHEAD, _MM_HINT_T0);
    }
#pragma GCC unroll 8
    for (int step = 0; step < Dot::Layout::STEPS; ++step) {
#pragma GCC unroll 8
      for (int j = 0; j < NT; ++j) {
        value[j] = Dot::decode(word[j]);
        word[j] = Dot::next(word[j]);
      }
      add_step<Dot, MT, NT>(sum, value, x);
      x += MT;
    }
  }
  for (int m = 0; m < MT; ++m)
    for (int j = 0; j < NT; ++j)
      call.epilogue.template store<Number>(call.rows.finish(sum[m][j], m), m, (left + j) * LANES);
}

// Many rows of x: a stretch of K of two vectors is decoded once into the first cache, and every
// tile of rows goes through it. Between stretches the sums wait in memory, exactly.
constexpr int PAIR = 2;

template <typename Dot>
struct PairSums {
  typename Dot::Sum of[PAIR];
};

template <typename Dot>
void decode(const Call<Dot>& call, int64_t left, int64_t begin, int64_t end, __m512i* decoded) {
  for (int64_t block = begin; block < end; ++block)
    for (int j = 0; j < PAIR; ++j) {
      const uint32_t* place = call.words(left + j) + block * PANEL_ROWS;
      __m512i word = _mm512_loadu_si512(place);
      _mm_prefetch((const char*)place + 4 * AHEAD, _MM_HINT_T0);
      for (int step = 0; step < Dot::Layout::STEPS; ++step) {
        decoded[((block - begin) * Dot::Layout::STEPS + step) * PAIR + j] = Dot::decode(word);
        word = Dot::next(word);
      }
    }
}

template <typename Dot, int MT>
void add_stretch(const __m512i* decoded, const uint32_t* x, int64_t steps,
                 PairSums<Dot>* kept) {
  typename Dot::Sum sum[MT][PAIR];
#pragma GCC unroll 12
  for (int m = 0; m < MT; ++m)
    for (int j = 0; j < PAIR; ++j) sum[m][j] = kept[m].of[j];
  for (int64_t step = 0; step < steps; ++step) {
    const __m512i w[PAIR] = {decoded[step * PAIR], decoded[step * PAIR + 1]};
    add_step<Dot, MT, PAIR>(sum, w, x + step * MT);
  }
#pragma GCC unroll 12
  for (int m = 0; m < MT; ++m)
    for (int j = 0; j < PAIR; ++j) kept[m].of[j] = sum[m][j];
}

#define FOR_ROWS(of)                                                                   \
  {                                                                                    \
    nullptr, of(1), of(2), of(3), of(4), of(5), of(6), of(7), of(8), of(9), of(10), of(11), of(12) \
  }

// The tiles from `first` to `last` of the rows that `cut` cuts.
struct Group {
  const Cut& cut;
  int64_t first, last;
  int64_t row() const { return cut.start(first); }
  int64_t rows() const { return cut.start(last) - row(); }
};

template <typename Dot, typename Number>
void many_rows(const Call<Dot>& call, const Group& group, int64_t left) {
#define TILE(rows) add_stretch<Dot, rows>
  static constexpr decltype(&TILE(1)) tiles[TILE_ROWS + 1] = FOR_ROWS(TILE);
#undef TILE
  constexpr int64_t STEPS = Dot::Layout::STEPS, LENGTH = STRETCH / STEPS;
  alignas(64) __m512i decoded[STRETCH * PAIR];
  std::vector<PairSums<Dot>> kept((size_t)group.rows(), PairSums<Dot>{{Dot::zero(), Dot::zero()}});
  for (int64_t begin = 0; begin < call.blocks; begin += LENGTH) {
    const int64_t end = std::min(begin + LENGTH, call.blocks);
    decode(call, left, begin, end, decoded);
    for (int64_t t = group.first; t < group.last; ++t) {
      const int64_t row = group.cut.start(t), rows = group.cut.start(t + 1) - row;
      tiles[rows](decoded, call.rows.of(row) + begin * STEPS * rows, (end - begin) * STEPS,
                  kept.data() + (row - group.row()));
    }
  }
  for (int64_t i = 0; i < group.rows(); ++i)
    for (int j = 0; j < PAIR; ++j) {
      const int64_t m = group.row() + i;
      call.epilogue.template store<Number>(call.rows.finish(kept[(size_t)i].of[j], m), m,
                                           (left + j) * LANES);
    }
}

// Vectors of columns that few rows of x take at once: enough sums to hide the latency of one.
constexpr int width(int64_t rows) { return rows == 1 ? WIDEST : rows <= 4 ? 4 : 2; }

// All rows of x by the vectors of columns from `begin` to `end`.
template <typename Dot, typename Number>
void columns(const Call<Dot>& call, const Cut& cut, int64_t begin, int64_t end) {
#define TILE(rows) few_rows<Dot, Number, rows, width(rows)>
  static constexpr decltype(&TILE(1)) tiles[TILE_ROWS + 1] = FOR_ROWS(TILE);
#undef TILE
  if (cut.tiles == 1) {
    for (int64_t left = begin; left < end; left += width(cut.m)) tiles[cut.m](call, left);
    return;
  }
  for (int64_t t = 0; t < cut.tiles; t += GROUP) {
    const Group group{cut, t, std::min(t + GROUP, cut.tiles)};
    for (int64_t left = begin; left < end; left += PAIR)
      many_rows<Dot, Number>(call, group, left);
  }
}

template <typename Dot, typename Number>
void linear(const typename Number::Stored* x, const uint32_t* w, const Epilogue& epilogue,
            int64_t m, int64_t n, int64_t k, int threads) {
  const Cut cut(m, TILE_ROWS);
  typename Dot::Rows rows(m, k);
  rows.template take<Number>(x, k, cut);
  const Call<Dot> call{w, rows, epilogue, blocks(k)};
  const int64_t parts = widest_tiles(n);
  const int64_t worth = std::max<int64_t>(1, m * n * k / THREAD_WORK);
  const int64_t count = std::min<int64_t>({(int64_t)threads, parts, worth});
  const auto share = [&](int64_t i) {
    columns<Dot, Number>(call, cut, parts * i / count * WIDEST, parts * (i + 1) / count * WIDEST);
  };
  std::vector<std::thread> others;
  int64_t mine = 1;  // share 0 and those for which the system gave no thread
  try {
    for (int64_t i = count - 1; i > 0; --i) {
      mine = i + 1;
      others.emplace_back(share, i);
      mine = i;
    }
  } catch (const std::system_error&) {
  }
  for (int64_t i = 0; i < mine; ++i) share(i);
  for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" {

int64_t ternary_words(int64_t n, int64_t k) { return words(n, k); }

void ternary_pack(int quads, const int8_t* values, uint32_t* packed, int64_t n, int64_t k) {
  if (quads)
    pack<Quads>(values, packed, n, k);
  else
    pack<Pairs>(values, packed, n, k);
}

#define EXPORT(name, Dot, Number)                                                                \
  void name(const void* x, const uint32_t* w, const float* scales, const float* bias, void* y,   \
            int64_t m, int64_t n, int64_t k, int divide, int threads) {                          \
    linear<Dot, Number>((const Number::Stored*)x, w, Epilogue{scales, bias, divide, y, n}, m, n, \
                        k, threads);                                                             \
  }
EXPORT(ternary_bfloat16_bfloat16, BFloat16Dot, BFloat16)
EXPORT(ternary_int8_bfloat16, Int8Dot, BFloat16)
EXPORT(ternary_int8_float16, Int8Dot, Float16)
EXPORT(ternary_int8_float32, Int8Dot, Float32)
}
