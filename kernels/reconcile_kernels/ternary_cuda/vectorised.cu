// vectorised: eight lanes share a row of w and read it 64 codes at a time.
//
// A group of 8 lanes computes ROWS rows of y in one column. In turn t, lane l takes the words of
// k = 512t + 64l to 512t + 64l + 63 with one load of 16 bytes, so that a group reads 128
// neighbouring bytes, and x with loads of 16 bytes; a turn that begins beyond K is left out. The
// lanes' sums are folded by three shuffles. K is a multiple of 64.
#include "ternary.h"

static constexpr int LANES = 8, GROUPS = 16, ROWS = 4, CODES = 64;

template <typename Number>
__global__ void ternary_vectorised(const Operands<Number> o) {
  const int lane = (int)threadIdx.x;
  const int64_t n = (int64_t)blockIdx.x * GROUPS + threadIdx.y, first = (int64_t)blockIdx.y * ROWS;
  float sums[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
  // Lanes without a column stay: a shuffle takes all lanes of a warp.
  for (int64_t k = (int64_t)lane * CODES; n < o.N && k < o.K; k += LANES * CODES) {
    const uint4 packed = o.w.template vector<uint4>((n * o.K + k) / 16);
    const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= o.M) continue;
      const int64_t row = (first + r) * o.K + k;
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < CODES; i += Number::COUNT) {
        float x[Number::COUNT];
        Number::unpack(o.x.template vector<typename Number::Vector>(row + i), x);
#pragma unroll
        for (int j = 0; j < Number::COUNT; ++j)
          sum += x[j] * ternary_value(words[(i + j) / 16] >> 2 * ((i + j) % 16) & 3u);
      }
      sums[r] += o.scaled(sum, n, k);
    }
  }
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int far = LANES / 2; far; far /= 2)
      sums[r] += __shfl_xor_sync(0xffffffffu, sums[r], far, LANES);
  if (lane != 0 || n >= o.N) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
    if (first + r < o.M) o.store(first + r, n, sums[r]);
}

template <typename Number>
static void launch_vectorised(const Operands<Number> &o, cudaStream_t stream) {
  const dim3 block(LANES, GROUPS);
  const dim3 grid_size((unsigned)((o.N + GROUPS - 1) / GROUPS),
                       (unsigned)((o.M + ROWS - 1) / ROWS));
  LAUNCH(ternary_vectorised<Number>, grid_size, block, stream, o);
}

EXPORT(vectorised, launch_vectorised)
