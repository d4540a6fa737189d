// One CUDA C++ source for two compilers. nvcc compiles it as it is; any other C++ compiler finds
// here the names of CUDA that a kernel needs, and a launch that runs the grid on the CPU
// (emulator.h): barriers, shared memory and warp shuffles work, and what a GPU would answer with
// wrong numbers or a dead context is an error that names the block and the thread.
//
// Memory goes through three names, which cost nothing under nvcc:
//
//   Global<T>           an array in global memory with its length: get, set, and vector<V>, an
//                       aligned load of several elements at once
//   SHARED(T, s, count) an array of the block, Shared<T> s: get and set
//   LAUNCH(kernel, grid, block, stream, ...)   a launch; on the CPU it has finished when it returns
//
// A warp collective takes all 32 lanes of its warp.
#pragma once

#include <stdint.h>

#ifdef __CUDACC__

#include <cuda_runtime.h>

namespace grid {

template <typename T>
struct Global {
  T* start;
  __host__ __device__ Global(T* start_, int64_t) : start(start_) {}
  __device__ __forceinline__ T get(int64_t i) const { return start[i]; }
  __device__ __forceinline__ void set(int64_t i, T value) const { start[i] = value; }
  template <typename V>
  __device__ __forceinline__ V vector(int64_t i) const {
    return *(const V*)(start + i);
  }
};

template <typename T>
struct Shared {
  T* start;
  __device__ __forceinline__ T get(int i) const { return start[i]; }
  __device__ __forceinline__ void set(int i, T value) const { start[i] = value; }
};

}  // namespace grid

#define SHARED(T, name, count)          \
  __shared__ T name##_storage[(count)]; \
  const grid::Shared<T> name { name##_storage }

#define LAUNCH(kernel, grid_size, block_size, stream, ...) \
  kernel<<<(grid_size), (block_size), 0, (stream)>>>(__VA_ARGS__)

#else

#include "emulator.h"

#define __global__
#define __device__
#define __constant__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))

typedef int cudaError_t;
typedef void* cudaStream_t;
static const cudaError_t cudaSuccess = 0;
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
static inline cudaError_t cudaGetLastError() { return grid::last_error(); }
static inline const char* cudaGetErrorString(cudaError_t code) { return grid::error_text(code); }

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

#define threadIdx (grid::here().thread_index)
#define blockIdx (grid::here().block_index)
#define blockDim (grid::here().block_size)
#define gridDim (grid::here().grid_size)
#define __syncthreads() grid::barrier(__LINE__)
#define __syncwarp() ((void)grid::exchange(0u, __LINE__))

template <typename T>
static inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
  return grid::shuffle_xor(mask, value, lanes, width);
}

#define SHARED(T, name, count) const grid::Shared<T> name = grid::shared<T>(#name, (count))

// The stream is ignored.
#define LAUNCH(kernel, grid_size, block_size, stream, ...) \
  ((void)(stream), grid::launch((grid_size), (block_size), [&] { kernel(__VA_ARGS__); }))

#endif
