// y[m, n] = scale[n] * sum over k of x[m, k] * w[n, k]  (+ bias[n])
//
// w is ternary_k_interleaved: byte j of row n holds k = 4j + i in bits 2i and 2i+1; codes 0, 1, 2
// are 0, +1, -1, and code 3, which no encoder writes, is 0. One thread computes one element of y
// and unpacks the row of w as it goes.
//
// Arithmetic, the same to the bit under nvcc (-fmad=false) and a C++ compiler
// (-ffp-contract=off): the sum is float32, k ascending, one rounding per addition (a product with
// 0 or +-1 is exact); then one rounding for the scale, one for the bias, and one, to nearest even,
// to the dtype of y. x is widened exactly. A NaN result is stored as the positive quiet NaN
// without payload, since the bits of a computed NaN differ between processors.
#include "grid.h"
#include "numbers.h"

static __constant__ const float VALUES[4] = {0.0f, 1.0f, -1.0f, 0.0f};  // of codes 0 to 3

template <typename Number>
__global__ void ternary_naive(const typename Number::Stored *x, const uint8_t *codes,
                              const float *scales, const float *bias,
                              typename Number::Stored *y, int64_t M, int64_t N, int64_t K) {
  const int64_t m = (int64_t)blockIdx.x * blockDim.y + threadIdx.y;
  const int64_t n = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
  if (m >= M || n >= N) return;
  const typename Number::Stored *row = x + m * K;
  const uint8_t *packed = codes + n * (K / 4);
  float sum = 0.0f;
  for (int64_t j = 0; j < K / 4; ++j) {
    const uint32_t byte = packed[j];
    for (int i = 0; i < 4; ++i) sum += Number::widen(row[4 * j + i]) * VALUES[byte >> 2 * i & 3u];
  }
  float result = sum * scales[n];
  if (bias) result += bias[n];
  y[m * N + n] = Number::narrow(result);
}

template <typename Number>
static int launch_naive(const void *x, const uint8_t *codes, const float *scales,
                        const float *bias, void *y, int64_t M, int64_t N, int64_t K, int device,
                        void *stream) {
  typedef typename Number::Stored Stored;
  const cudaError_t chosen = cudaSetDevice(device);
  if (chosen != cudaSuccess) return (int)chosen;
  const dim3 block(32, 4);
  const dim3 grid_size((unsigned)((M + 3) / 4), (unsigned)((N + 31) / 32));
  LAUNCH(ternary_naive<Number>, grid_size, block, (cudaStream_t)stream, (const Stored *)x, codes,
         scales, bias, (Stored *)y, M, N, K);
  return (int)cudaGetLastError();
}

// x [M, K] and y [M, N] in the dtype of the name, codes [N, K/4], scales [N], bias [N] or null;
// all row-major and without gaps, in the memory of `device`. Returns a CUDA error code, 0 if none.
#define EXPORT(name, Number)                                                                    \
  extern "C" int name(const void *x, const uint8_t *codes, const float *scales,                 \
                      const float *bias, void *y, int64_t M, int64_t N, int64_t K, int device,  \
                      void *stream) {                                                           \
    return launch_naive<Number>(x, codes, scales, bias, y, M, N, K, device, stream);            \
  }
EXPORT(ternary_naive_bfloat16, BFloat16)
EXPORT(ternary_naive_float16, Float16)
EXPORT(ternary_naive_float32, Float32)

extern "C" const char *ternary_naive_error(int code) {
  return cudaGetErrorString((cudaError_t)code);
}
