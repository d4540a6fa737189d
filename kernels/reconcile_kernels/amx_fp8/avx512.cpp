// Engine avx512_bf16: bfloat16 activations by VDPBF16PS, float32 activations by FMA.
//
// The inner sum adds k in order, pair by pair: VDPBF16PS adds the odd product, then the even one;
// the float32 path adds the even product, then the odd one. Up to 12 rows, the weights are decoded
// into registers and used at once; for more, 32 columns x 128 k are decoded into a panel that
// stays in the first cache, and every 12 rows pass over it.
#include "linear.h"

namespace {

constexpr int ROWS = 12;  // 24 sums, 2 weights and the decoder's tables fill the 32 registers
constexpr int AHEAD = 8192;  // bytes of weights under way from memory, over all streams

// What one number format of x does: its packed pair, and one step of the inner sum.
struct BFloat16 {
  static constexpr int WORDS = 1;  // 32-bit words of a pair
  static inline __attribute__((always_inline)) void step(__m512 &sum, __m512i w, const uint32_t *x) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32((int)*x));
  }
};

struct Float32 {
  static constexpr int WORDS = 2;
  static inline __attribute__((always_inline)) void step(__m512 &sum, __m512i w, const uint32_t *x) {
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
    const __m512 odd =
        _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32((int)0xffff0000u)));
    const float *pair = (const float *)x;
    sum = _mm512_fmadd_ps(even, _mm512_set1_ps(pair[0]), sum);
    sum = _mm512_fmadd_ps(odd, _mm512_set1_ps(pair[1]), sum);
  }
};

// Words of x before the tile of rows from m in block kb: [kb][tile of rows][pair][row], so that
// what is read together lies together. Row by row it would lie 2K bytes apart, which for a power
// of two is the same place in the cache.
template <typename Number>
int64_t place(const Call &call, int64_t m, int64_t kb) {
  return (kb * PAIRS * call.M + m * call.pairs(kb)) * Number::WORDS;
}

// Rows m..m+rows-1 to their places. A subnormal float32 becomes a zero.
template <typename Number>
void pack_rows(const Call &call, int64_t m, int rows, uint32_t *packed) {
  constexpr int W = Number::WORDS;
  const int64_t words = call.K / 2 * W;
  const uint32_t *x = (const uint32_t *)call.x + m * words;
  uint32_t part[ROWS][16];
  for (int64_t kb = 0; kb < call.k_blocks(); ++kb, x += PAIRS * W) {
    uint32_t *out = packed + place<Number>(call, m, kb);
    for (int64_t at = 0; at < call.pairs(kb) * W; at += 16) {
      for (int r = 0; r < rows; ++r)
        for (int i = 0; i < 16; ++i) {
          const uint32_t word = x[r * words + at + i];
          part[r][i] = W == 2 && !(word & 0x7f800000u) ? word & 0x80000000u : word;
        }
      for (int i = 0; i < 16; i += W)
        for (int r = 0; r < rows; ++r)
          for (int j = 0; j < W; ++j) *out++ = part[r][i + j];
    }
  }
}

// All of K for R rows and B blocks of 32 columns from n, weights straight into registers.
template <typename Number, int R, int B>
void strip(const Call &call, const uint32_t *packed, int64_t m, int64_t n) {
  alignas(64) float total[B][R][32] = {};
  const Decoder decode;
  const uint8_t *w[B];
  for (int b = 0; b < B; ++b) w[b] = call.weights(n + b * COLUMNS);
  for (int64_t kb = 0; kb < call.k_blocks(); ++kb) {
    __m512 first[B][R], second[B][R];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b)
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) first[b][r] = second[b][r] = _mm512_setzero_ps();
    const uint32_t *x = packed + place<Number>(call, m, kb);
    for (int64_t pair = call.pairs(kb); pair > 0; --pair, x += R * Number::WORDS) {
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) {
        __m512i left, right;
        _mm_prefetch((const char *)w[b] + AHEAD / B, _MM_HINT_T0);
        decode(_mm512_loadu_si512(w[b]), left, right);
        w[b] += 64;
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          Number::step(first[b][r], left, x + r * Number::WORDS);
          Number::step(second[b][r], right, x + r * Number::WORDS);
        }
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) {
      const Pair scale = scales_of(call, n + b * COLUMNS, kb);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) fold(total[b][r], first[b][r], second[b][r], scale);
    }
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) finish(call, m + r, n + b * COLUMNS, total[b][r]);
}

// Blocks of columns at once: several streams of weights where the registers allow it.
template <typename Number, int R>
void strips(const Call &call, const uint32_t *x, int64_t m, int64_t begin, int64_t end) {
  constexpr int B = R <= 2 ? 4 : R <= 4 ? 3 : R == 5 ? 2 : 1;
  int64_t n = begin;
  for (; n + B * COLUMNS <= end; n += B * COLUMNS) strip<Number, R, B>(call, x, m, n);
  for (; n < end; n += COLUMNS) strip<Number, R, 1>(call, x, m, n);
}

using Strips = void (*)(const Call &, const uint32_t *, int64_t, int64_t, int64_t);
template <typename Number>
constexpr Strips STRIPS[ROWS + 1] = {
    nullptr,           strips<Number, 1>, strips<Number, 2>,  strips<Number, 3>,
    strips<Number, 4>, strips<Number, 5>, strips<Number, 6>,  strips<Number, 7>,
    strips<Number, 8>, strips<Number, 9>, strips<Number, 10>, strips<Number, 11>,
    strips<Number, 12>};

// The first row of each of the near-equal tiles of at most ROWS rows, and M.
std::vector<int64_t> row_tiles(int64_t M) {
  const int64_t count = (M + ROWS - 1) / ROWS;
  std::vector<int64_t> starts;
  for (int64_t t = 0; t <= count; ++t) starts.push_back(M * t / count);
  return starts;
}

// ---------------------------------------------------------------- more rows: panels

template <int R>
void over_panel(const Register *panel, const uint32_t *x, int64_t pairs, const Pair &scale,
                float *total) {
  __m512 first[R], second[R];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) first[r] = second[r] = _mm512_setzero_ps();
#pragma GCC unroll 2
  for (int64_t p = 0; p < pairs; ++p, x += R) {
    _mm_prefetch((const char *)(x + 64 * R), _MM_HINT_T0);  // the next tiles: x fits no near cache
    const __m512i left = panel[2 * p].codes, right = panel[2 * p + 1].codes;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      BFloat16::step(first[r], left, x + r);
      BFloat16::step(second[r], right, x + r);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) fold(total + 32 * r, first[r], second[r], scale);
}

using OverPanel = void (*)(const Register *, const uint32_t *, int64_t, const Pair &, float *);
constexpr OverPanel OVER_PANEL[ROWS + 1] = {
    nullptr,       over_panel<1>, over_panel<2>, over_panel<3>,  over_panel<4>,
    over_panel<5>, over_panel<6>, over_panel<7>, over_panel<8>,  over_panel<9>,
    over_panel<10>, over_panel<11>, over_panel<12>};

void panels(const Call &call, const uint32_t *x, const std::vector<int64_t> &tiles, int64_t begin,
            int64_t end) {
  const Decoder decode;
  const Aligned<Register> panel(2 * PAIRS);
  const Aligned<float> total(call.M * COLUMNS);
  for (int64_t n = begin; n < end; n += COLUMNS) {
    memset(total.data, 0, (size_t)(call.M * COLUMNS) * sizeof(float));
    for (int64_t kb = 0; kb < call.k_blocks(); ++kb) {
      const int64_t pairs = call.pairs(kb);
      const Pair scale = scales_of(call, n, kb);
      decode_panel(decode, call.weights(n) + kb * PAIRS * 64, pairs, panel.data);
      for (size_t t = 0; t + 1 < tiles.size(); ++t) {
        const int64_t m = tiles[t], rows = tiles[t + 1] - m;
        OVER_PANEL[rows](panel.data, x + place<BFloat16>(call, m, kb), pairs, scale,
                         total.data + m * COLUMNS);
      }
    }
    for (int64_t m = 0; m < call.M; ++m) finish(call, m, n, total.data + m * COLUMNS);
  }
}

// ---------------------------------------------------------------- the call

template <typename Number>
void linear(const Call &call) {
  const std::vector<int64_t> tiles = row_tiles(call.M);
  const Aligned<uint32_t> x(call.M * call.K / 2 * Number::WORDS);
  for (size_t t = 0; t + 1 < tiles.size(); ++t)
    pack_rows<Number>(call, tiles[t], (int)(tiles[t + 1] - tiles[t]), x.data);
  over_columns(call, COLUMNS, [&](int64_t begin, int64_t end) {
    if (Number::WORDS == 1 && call.M > ROWS) return panels(call, x.data, tiles, begin, end);
    for (size_t t = 0; t + 1 < tiles.size(); ++t)
      STRIPS<Number>[tiles[t + 1] - tiles[t]](call, x.data, tiles[t], begin, end);
  });
}

void run(const Call &call) {
  if (call.x_type == FLOAT32)
    linear<Float32>(call);
  else
    linear<BFloat16>(call);
}

}  // namespace

EXPORT_LINEAR(amx_fp8_avx512, run)
