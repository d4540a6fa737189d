// What the processor has and the kernel lets programs use, by CPUID, XGETBV and arch_prctl.
#pragma once

#include <cpuid.h>
#include <errno.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace cpu {

struct Leaf {
  uint32_t a = 0, b = 0, c = 0, d = 0;
};

inline Leaf leaf(unsigned number, unsigned sub) {
  Leaf found;
  if (!__get_cpuid_count(number, sub, &found.a, &found.b, &found.c, &found.d)) return Leaf();
  return found;
}

inline bool bit(uint32_t word, int place) { return word >> place & 1; }

// State that the operating system saves: bits of XCR0, or 0 where it does not say.
inline uint64_t saved_state() {
  if (!bit(leaf(1, 0).c, 27)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

// Bits of the answer to `reconcile_cpu_features`; the names are in features.py, in this order.
inline uint32_t features() {
  const Leaf seven = leaf(7, 0), seven_one = leaf(7, 1), one = leaf(1, 0);
  const uint64_t state = saved_state();
  const bool found[] = {
      bit(seven.b, 16),  bit(seven.b, 30), bit(seven.b, 31),       bit(seven.c, 1),
      bit(one.c, 12),    bit(seven_one.a, 5), (state & 0xe6) == 0xe6,  // AVX-512 and its registers
      bit(seven.d, 24),  bit(seven.d, 22),    (state >> 17 & 3) == 3,  // AMX and its tiles
  };
  uint32_t bits = 0, place = 0;
  for (const bool one_of_them : found) bits |= (uint32_t)one_of_them << place++;
  return bits;
}

inline bool tiles_are_real() { return (features() >> 7 & 5) == 5; }

// Linux gives the tiles' state to a process that asks for it; 0, or an errno.
inline int request_tiles() {
  const long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) ? errno : 0;
}

}  // namespace cpu
