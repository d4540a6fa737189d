// masks: w as two bit planes, one of the +1 and one of the -1.
//
// Word j of a row holds k = 32j + i in bit i; the planes of a row alternate, word by word: plus,
// minus, plus, ... A group of 8 lanes computes ROWS rows of y in one column: in turn t, lane l takes
// k = 256t + 32l to 256t + 32l + 31 with one load of 8 bytes. A bit selects or negates x by
// integer operations on its bits, so a zero weight adds +0 whatever x is. Both planes are padded
// with zeros to whole words; K is a multiple of 8.
#include "ternary.h"

static constexpr int LANES = 8, GROUPS = 16, ROWS = 4, BITS = 32;

// +x, -x or +0.
static __device__ __forceinline__ float signed_by(float x, uint32_t plus, uint32_t minus) {
  return __uint_as_float((__float_as_uint(x) ^ minus << 31) & (0u - (plus | minus)));
}

template <typename Number>
__global__ void ternary_masks(const Operands<Number> o) {
  const int lane = (int)threadIdx.x;
  const int64_t n = (int64_t)blockIdx.x * GROUPS + threadIdx.y, first = (int64_t)blockIdx.y * ROWS;
  const int64_t words = (o.K + BITS - 1) / BITS;
  float sums[ROWS] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int64_t word = lane; n < o.N && word < words; word += LANES) {
    const uint2 planes = o.w.template vector<uint2>(2 * (n * words + word));
    const int64_t k = word * BITS;
    const int inside = (int)(o.K - k < BITS ? o.K - k : BITS);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      if (first + r >= o.M) continue;
      float sum = 0.0f;
      for (int i = 0; i < inside; i += Number::COUNT) {
        float x[Number::COUNT];
        const int64_t place = (first + r) * o.K + k + i;
        Number::unpack(o.x.template vector<typename Number::Vector>(place), x);
        for (int j = 0; j < Number::COUNT; ++j)
          sum += signed_by(x[j], planes.x >> (i + j) & 1u, planes.y >> (i + j) & 1u);
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
static void launch_masks(const Operands<Number> &o, cudaStream_t stream) {
  const dim3 block(LANES, GROUPS);
  const dim3 grid_size((unsigned)((o.N + GROUPS - 1) / GROUPS),
                       (unsigned)((o.M + ROWS - 1) / ROWS));
  LAUNCH(ternary_masks<Number>, grid_size, block, stream, o);
}

EXPORT(masks, launch_masks)
