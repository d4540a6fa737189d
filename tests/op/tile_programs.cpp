// Every tile instruction in every form of address that compilers write, on data of the caller, and
// instructions that a processor refuses. Compiled without a mention of torch: a child process that
// dies of one starts in milliseconds.
#include <immintrin.h>
#include <stdint.h>

#define TILES_READ_MEMORY __asm__ volatile("" ::: "memory")

// c [16][16] += a [16][32] b [16][16][2] under `config`, which is stored back into `stored`.
extern "C" void tile_multiply(const void *config, const void *a, int64_t a_stride, const void *b,
                              int64_t b_stride, void *c, int64_t c_stride, void *stored) {
  TILES_READ_MEMORY;
  _tile_loadconfig(config);
  _tile_storeconfig(stored);
  _tile_loadd(1, a, a_stride);
  _tile_stream_loadd(2, b, b_stride);
  _tile_loadd(0, c, c_stride);
  _tile_dpbf16ps(0, 1, 2);
  _tile_stored(0, c, c_stride);
  _tile_release();
}

static uint8_t at_a_fixed_place[2048];

// 16 rows of 64 bytes, from one place to another, each by another form of address; returns how many.
extern "C" int tile_copies(const uint8_t *from, uint8_t *to) {
  struct alignas(64) {
    uint8_t bytes[64];
  } config = {};
  config.bytes[0] = 1;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes[16 + 2 * tile] = 64;
    config.bytes[48 + tile] = 16;
  }
  TILES_READ_MEMORY;
  __asm__ volatile("ldtilecfg 16(%0)" ::"r"((const uint8_t *)&config - 16) : "memory");
  const uint8_t *far = from - 0x12340;
  register const uint8_t *r12 __asm__("r12") = from;
  register const uint8_t *r13 __asm__("r13") = from;
  register int64_t r14 __asm__("r14") = 16;
  __asm__ volatile(
      "tileloadd (%1,%2,1), %%tmm0\n\ttilestored %%tmm0, (%0,%2,1)\n\t"
      "tileloadd 8(%3,%2,1), %%tmm1\n\ttilestored %%tmm1, 1024(%0,%2,1)\n\t"
      "tileloadd 0x12340(%4,%2,1), %%tmm2\n\ttilestored %%tmm2, 2048(%0,%2,1)\n\t"
      "tileloadd (%5,%7,4), %%tmm3\n\ttilestored %%tmm3, 3072(%0,%2,1)\n\t"
      "tileloadd (%6,%7,4), %%tmm4\n\ttilestored %%tmm4, 4096(%0,%2,1)\n\t"
      "tilezero %%tmm7\n\ttilestored %%tmm7, 5120(%0,%2,1)\n\t"
      :
      : "r"(to), "r"(from), "r"((int64_t)64), "r"(from - 8), "r"(far), "r"(r12), "r"(r13), "r"(r14)
      : "memory");
  // relative to the instruction, and through the stack pointer
  __asm__ volatile("sttilecfg %0" : "=m"(at_a_fixed_place) : : "memory");
  uint8_t on_the_stack[64];
  __asm__ volatile("sttilecfg %0" : "=m"(on_the_stack) : : "memory");
  for (int i = 0; i < 64; ++i) to[6144 + i] = at_a_fixed_place[i];
  for (int i = 0; i < 64; ++i) to[6144 + 64 + i] = on_the_stack[i];
  _tile_release();
  return 6;
}

extern "C" void tile_before_config() { _tile_zero(0); }
extern "C" void tile_int8(const void *config) {
  TILES_READ_MEMORY;
  _tile_loadconfig(config);
  _tile_dpbssd(0, 1, 2);  // a tile instruction that is not emulated
}
extern "C" void tile_twice(const void *config) {
  TILES_READ_MEMORY;
  _tile_loadconfig(config);
  __asm__ volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1");  // tdpbf16ps tmm0, tmm1, tmm1
}
extern "C" void no_instruction() { __asm__ volatile("ud2"); }
