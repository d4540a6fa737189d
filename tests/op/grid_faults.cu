// Small kernels, most of them wrong in one way, for test_grid.py. Each runs as run(name) in a block
// or two of 64 threads over arrays of 64 elements and gives a CUDA error code.
#include <string.h>

#include "grid.h"

typedef grid::Global<float> Floats;

__global__ void reverse(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i, in.get(i));
  __syncthreads();
  out.set(i, kept.get(63 - i));
}

// A sum over each warp by shuffles; then over the two warps through shared memory.
__global__ void sum(const Floats in, const Floats out) {
  SHARED(float, kept, 2);
  const int i = (int)threadIdx.x;
  float value = in.get(i);
  for (int far = 16; far; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far);
  if (i % 32 == 0) kept.set(i / 32, value);
  __syncthreads();
  out.set(i, kept.get(0) + kept.get(1));
}

// Groups of eight lanes, apart from each other.
__global__ void groups(const Floats in, const Floats out) {
  const int i = (int)threadIdx.x;
  float value = in.get(i);
  for (int far = 4; far; far /= 2) value += __shfl_xor_sync(0xffffffffu, value, far, 8);
  out.set(i, value);
}

// Within one warp a warp barrier is enough.
__global__ void within_warp(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i, in.get(i));
  __syncwarp();
  out.set(i, kept.get(i ^ 1));
}

__global__ void across_warps(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i, in.get(i));
  __syncwarp();
  if (i >= 32) out.set(i, kept.get(i ^ 32));
}

__global__ void read_too_early(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i, in.get(i));
  out.set(i, kept.get(i / 2));
}

__global__ void written_too_early(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i, in.get(i));
  __syncthreads();
  out.set(i, kept.get((i + 1) % 64));
  kept.set(i, 0.0f);
}

__global__ void written_twice(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  const int i = (int)threadIdx.x;
  kept.set(i / 2, in.get(i));
  __syncthreads();
  out.set(i, kept.get(i / 2));
}

__global__ void never_written(const Floats in, const Floats out) {
  SHARED(float, kept, 64);
  out.set((int)threadIdx.x, kept.get((int)threadIdx.x));
}

__global__ void beyond_shared(const Floats in, const Floats out) {
  SHARED(float, kept, 63);
  kept.set((int)threadIdx.x, in.get((int)threadIdx.x));
}

__global__ void too_much_shared(const Floats in, const Floats out) {
  SHARED(float, kept, 13 * 1024);
  kept.set((int)threadIdx.x, 0.0f);
}

__global__ void some_return(const Floats in, const Floats out) {
  if (threadIdx.x >= 60) return;
  __syncthreads();
}

__global__ void two_barriers(const Floats in, const Floats out) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
}

__global__ void barrier_and_shuffle(const Floats in, const Floats out) {
  if (threadIdx.x % 32 < 16)
    __syncthreads();
  else
    out.set((int)threadIdx.x, __shfl_xor_sync(0xffffffffu, 1.0f, 1));
}

__global__ void lanes_missing(const Floats in, const Floats out) {
  const int i = (int)threadIdx.x;
  if (i % 32 != 31) out.set(i, __shfl_xor_sync(0xffffffffu, in.get(i), 1));
}

__global__ void partial_mask(const Floats in, const Floats out) {
  const int i = (int)threadIdx.x;
  if (i % 32 < 16) out.set(i, __shfl_xor_sync(0xffffu, in.get(i), 1));
}

__global__ void load_beyond(const Floats in, const Floats out) {
  out.set((int)threadIdx.x, in.get((int)threadIdx.x + 1));
}

__global__ void load_before(const Floats in, const Floats out) {
  out.set((int)threadIdx.x, in.get((int)threadIdx.x - 1));
}

__global__ void store_beyond(const Floats in, const Floats out) {
  out.set(2 * (int)threadIdx.x, in.get((int)threadIdx.x));
}

__global__ void vector_beyond(const Floats in, const Floats out) {
  out.set(0, in.vector<float4>(64 - 4 + 4 * (int)(threadIdx.x / 63)).x);
}

__global__ void misaligned(const Floats in, const Floats out) {
  out.set((int)threadIdx.x, in.vector<float4>((int)threadIdx.x % 60).x);
}

__global__ void aligned(const Floats in, const Floats out) {
  const int i = (int)threadIdx.x;
  const float4 four = in.vector<float4>(i / 4 * 4);
  out.set(i, i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w);
}

extern "C" int run(const char *name, float *in, float *out, int blocks) {
  const Floats from(in, 64), to(out, 64);
#define KERNEL(kernel) \
  if (!strcmp(name, #kernel)) LAUNCH(kernel, dim3((unsigned)blocks), dim3(64), nullptr, from, to);
  KERNEL(reverse)
  KERNEL(sum)
  KERNEL(groups)
  KERNEL(aligned)
  KERNEL(within_warp)
  KERNEL(across_warps)
  KERNEL(read_too_early)
  KERNEL(written_too_early)
  KERNEL(written_twice)
  KERNEL(never_written)
  KERNEL(beyond_shared)
  KERNEL(too_much_shared)
  KERNEL(some_return)
  KERNEL(two_barriers)
  KERNEL(barrier_and_shuffle)
  KERNEL(lanes_missing)
  KERNEL(partial_mask)
  KERNEL(load_beyond)
  KERNEL(load_before)
  KERNEL(store_beyond)
  KERNEL(vector_beyond)
  KERNEL(misaligned)
  return (int)cudaGetLastError();
}

extern "C" const char *error_text(int code) { return cudaGetErrorString((cudaError_t)code); }
