// One CUDA C++ source for two compilers. nvcc compiles it as it is; any other C++ compiler finds
// here the few names of CUDA that a kernel without barriers needs, and a launch that loops over
// the grid, block by block and thread by thread, on the calling thread of the CPU.
//
// Not supplied on the CPU: barriers, __shared__ memory, warp collectives, atomics. A thread runs
// from its start to its end before the next one begins, so none of them could work; a source that
// uses one does not compile.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__

#include <cuda_runtime.h>

#define LAUNCH(kernel, grid, block, stream, ...) \
  kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)

#else

#include <string.h>

#define __global__
#define __device__
#define __constant__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __syncthreads() static_assert(false, "grid.h: __syncthreads is not supplied on the CPU")
#define __syncwarp(...) static_assert(false, "grid.h: __syncwarp is not supplied on the CPU")

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

typedef int cudaError_t;
typedef void *cudaStream_t;
static const cudaError_t cudaSuccess = 0;
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaGetLastError() { return cudaSuccess; }
static inline const char *cudaGetErrorString(cudaError_t) { return "no error"; }

static inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float __uint_as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

namespace grid {

// Where the running CUDA thread is; one per thread of the CPU, so that several may launch.
struct Place {
  uint3 block_index, thread_index;
  dim3 block_size, grid_size;
};
static thread_local Place here;

template <typename Body>
static void launch(dim3 grid_size, dim3 block_size, Body body) {
  here.grid_size = grid_size;
  here.block_size = block_size;
  uint3 b, t;
  for (b.z = 0; b.z < grid_size.z; ++b.z)
    for (b.y = 0; b.y < grid_size.y; ++b.y)
      for (b.x = 0; b.x < grid_size.x; ++b.x)
        for (t.z = 0; t.z < block_size.z; ++t.z)
          for (t.y = 0; t.y < block_size.y; ++t.y)
            for (t.x = 0; t.x < block_size.x; ++t.x) {
              here.block_index = b;
              here.thread_index = t;
              body();
            }
}

}  // namespace grid

#define blockIdx (grid::here.block_index)
#define threadIdx (grid::here.thread_index)
#define blockDim (grid::here.block_size)
#define gridDim (grid::here.grid_size)

// The stream is ignored: the launch has finished when it returns.
#define LAUNCH(kernel, grid_size, block_size, stream, ...) \
  ((void)(stream), grid::launch((grid_size), (block_size), [&] { kernel(__VA_ARGS__); }))

#endif
