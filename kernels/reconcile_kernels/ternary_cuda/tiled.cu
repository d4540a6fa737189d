// tiled: a block computes 32 rows by 64 columns of y, 16 of them per thread.
//
// A tile of x (as float32) and a tile of w (as packed words), each TILE_K long, are staged in
// shared memory by the whole block; a thread then takes 4 columns from 4 rows. Beyond M, N and K
// the tiles hold zeros. The sum of an element is in the order of k. K is a multiple of 16.
#include "ternary.h"

static constexpr int TILE_M = 32, TILE_N = 64, TILE_K = 64, EACH = 4, THREADS = 128;
static constexpr int WORDS = TILE_K / 16;
static constexpr int X_STRIDE = TILE_K + 1, W_STRIDE = WORDS + 1;  // odd: no bank conflicts

template <typename Number>
__global__ void ternary_tiled(const Operands<Number> o) {
  SHARED(float, x_tile, TILE_M * X_STRIDE);
  SHARED(uint32_t, w_tile, TILE_N * W_STRIDE);
  const int thread = (int)threadIdx.x, row = thread / 16, column = thread % 16;
  const int64_t top = (int64_t)blockIdx.y * TILE_M, left = (int64_t)blockIdx.x * TILE_N;
  float sums[EACH][EACH] = {};
  for (int64_t start = 0; start < o.K; start += TILE_K) {
    for (int i = thread * Number::COUNT; i < TILE_M * TILE_K; i += THREADS * Number::COUNT) {
      const int m = i / TILE_K, k = i % TILE_K;
      float x[Number::COUNT] = {};
      if (top + m < o.M && start + k < o.K)
        Number::unpack(
            o.x.template vector<typename Number::Vector>((top + m) * o.K + start + k), x);
      for (int j = 0; j < Number::COUNT; ++j) x_tile.set(m * X_STRIDE + k + j, x[j]);
    }
    for (int i = thread; i < TILE_N * WORDS; i += THREADS) {
      const int n = i / WORDS, word = i % WORDS;
      const bool inside = left + n < o.N && start + 16 * word < o.K;
      const int64_t place = ((left + n) * o.K + start) / 16 + word;
      w_tile.set(n * W_STRIDE + word, inside ? o.w.get(place) : 0u);
    }
    __syncthreads();
    float parts[EACH][EACH] = {};
    const int words = (int)(o.K - start < TILE_K ? (o.K - start) / 16 : WORDS);
    for (int word = 0; word < words; ++word) {
      uint32_t packed[EACH];
#pragma unroll
      for (int j = 0; j < EACH; ++j)
        packed[j] = w_tile.get((column + 16 * j) * W_STRIDE + word);
      for (int i = 0; i < 16; ++i) {
        float x[EACH];
#pragma unroll
        for (int r = 0; r < EACH; ++r)
          x[r] = x_tile.get((row + 8 * r) * X_STRIDE + 16 * word + i);
#pragma unroll
        for (int j = 0; j < EACH; ++j) {
          const float value = ternary_value(packed[j] >> 2 * i & 3u);
#pragma unroll
          for (int r = 0; r < EACH; ++r) parts[r][j] += x[r] * value;
        }
      }
    }
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int64_t n = left + column + 16 * j;
#pragma unroll
      for (int r = 0; r < EACH; ++r)
        if (n < o.N) sums[r][j] += o.scaled(parts[r][j], n, start);
    }
    __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < EACH; ++r)
#pragma unroll
    for (int j = 0; j < EACH; ++j) {
      const int64_t m = top + row + 8 * r, n = left + column + 16 * j;
      if (m < o.M && n < o.N) o.store(m, n, sums[r][j]);
    }
}

template <typename Number>
static void launch_tiled(const Operands<Number> &o, cudaStream_t stream) {
  const dim3 grid_size((unsigned)((o.N + TILE_N - 1) / TILE_N),
                       (unsigned)((o.M + TILE_M - 1) / TILE_M));
  LAUNCH(ternary_tiled<Number>, grid_size, dim3(THREADS), stream, o);
}

EXPORT(tiled, launch_tiled)
