// mma: w is decoded to fragments of tensor cores; for many rows of x, on a GPU only.
//
// A block of 4 warps computes 64 rows by 64 columns of y. A stretch of 64 k of w is decoded into
// shared memory in the dtype of x, where 0 and +-1 are exact, beside the same stretch of x; each warp
// multiplies 32 by 32 of it as 2 x 2 fragments of 16 x 16 x 16. Products are exact; the sums are the
// tensor core's float32, whose order and rounding NVIDIA does not document. K is a multiple of 64.
#ifdef __CUDACC__

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>

#include "ternary.h"

static constexpr int TILE = 64, DEPTH = 64, FRAGMENT = 16, THREADS = 128;
static constexpr int STRIDE = DEPTH + 8, OUT_STRIDE = TILE + 4;  // 16-byte rows, other banks

template <typename Number>
struct Core;
template <>
struct Core<BFloat16> {
  typedef __nv_bfloat16 Type;
  static constexpr uint16_t ONE = 0x3f80;
};
template <>
struct Core<Float16> {
  typedef __half Type;
  static constexpr uint16_t ONE = 0x3c00;
};

// 0, +1 or -1 as the bits of the dtype.
template <typename Number>
static __device__ __forceinline__ uint16_t ternary_bits(uint32_t code) {
  const uint32_t size = (code ^ code >> 1) & 1u, sign = code >> 1 & size;
  return (uint16_t)(size * Core<Number>::ONE | sign << 15);
}

template <typename Number>
__global__ void ternary_mma(const Operands<Number> o) {
#if __CUDA_ARCH__ >= 800
  using namespace nvcuda;
  typedef typename Core<Number>::Type Type;
  __shared__ __align__(16) uint16_t tiles[2 * TILE * STRIDE];
  __shared__ __align__(16) float out[TILE * OUT_STRIDE];
  uint16_t *x_tile = tiles, *w_tile = tiles + TILE * STRIDE;
  const int thread = (int)threadIdx.x, warp = thread / 32;
  const int64_t top = (int64_t)blockIdx.y * TILE, left = (int64_t)blockIdx.x * TILE;
  wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float> sums[2][2];
  for (int r = 0; r < 2; ++r)
    for (int j = 0; j < 2; ++j) wmma::fill_fragment(sums[r][j], 0.0f);
  for (int64_t start = 0; start < o.K; start += DEPTH) {
    for (int i = thread * 8; i < TILE * DEPTH; i += THREADS * 8) {
      const int m = i / DEPTH, k = i % DEPTH;
      uint4 eight = {0u, 0u, 0u, 0u};
      if (top + m < o.M) eight = o.x.template vector<uint4>((top + m) * o.K + start + k);
      *(uint4 *)(x_tile + m * STRIDE + k) = eight;
    }
    for (int i = thread; i < TILE * DEPTH / 16; i += THREADS) {
      const int n = i / (DEPTH / 16), word = i % (DEPTH / 16);
      const uint32_t packed =
          left + n < o.N ? o.w.get(((left + n) * o.K + start) / 16 + word) : 0u;
      for (int j = 0; j < 16; ++j)
        w_tile[n * STRIDE + 16 * word + j] = ternary_bits<Number>(packed >> 2 * j & 3u);
    }
    __syncthreads();
    for (int k = 0; k < DEPTH; k += FRAGMENT) {
      wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, Type, wmma::row_major> a[2];
      wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, Type, wmma::col_major> b[2];
      for (int r = 0; r < 2; ++r) {
        const int m = warp / 2 * 32 + r * FRAGMENT, n = warp % 2 * 32 + r * FRAGMENT;
        wmma::load_matrix_sync(a[r], (const Type *)(x_tile + m * STRIDE + k), STRIDE);
        wmma::load_matrix_sync(b[r], (const Type *)(w_tile + n * STRIDE + k), STRIDE);
      }
      for (int r = 0; r < 2; ++r)
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sums[r][j], a[r], b[j], sums[r][j]);
    }
    __syncthreads();
  }
  for (int r = 0; r < 2; ++r)
    for (int j = 0; j < 2; ++j) {
      const int m = warp / 2 * 32 + r * FRAGMENT, n = warp % 2 * 32 + j * FRAGMENT;
      wmma::store_matrix_sync(out + m * OUT_STRIDE + n, sums[r][j], OUT_STRIDE,
                              wmma::mem_row_major);
    }
  __syncthreads();
  for (int i = thread; i < TILE * TILE; i += THREADS) {
    const int64_t m = top + i / TILE, n = left + i % TILE;
    if (m < o.M && n < o.N) o.store(m, n, out[i / TILE * OUT_STRIDE + i % TILE]);
  }
#endif
}

template <typename Number>
static void launch_mma(const Operands<Number> &o, cudaStream_t stream) {
  const dim3 grid_size((unsigned)((o.N + TILE - 1) / TILE), (unsigned)((o.M + TILE - 1) / TILE));
  LAUNCH(ternary_mma<Number>, grid_size, dim3(THREADS), stream, o);
}

EXPORT_ONE(ternary_mma_bfloat16, BFloat16, launch_mma)
EXPORT_ONE(ternary_mma_float16, Float16, launch_mma)
extern "C" const char *ternary_mma_error(int code) { return cudaGetErrorString((cudaError_t)code); }

#else
#error "mma.cu needs nvcc: tensor cores are not emulated"
#endif
