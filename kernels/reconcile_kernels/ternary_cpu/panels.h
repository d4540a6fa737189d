// How packed ternary weights lie in memory: an order in which the kernels decode with one shift and
// one AND, and read every byte once, in sequence.
//
// Rows come in panels of 64, K in blocks of 16; N is padded to 128 rows and K to whole blocks, with
// zero weights. One 32-bit word holds the 16 codes of one row in one block; the words are ordered
// [panel][block][row of the panel].
#pragma once

#include <stdint.h>

namespace {

constexpr int LANES = 16;   // rows of one vector: 32-bit words of 512 bits
constexpr int BLOCK = 16;   // k of one word
constexpr int VECTORS = 4;  // vectors of one panel
constexpr int WIDEST = 8;   // vectors of the widest tile, to which N is padded
constexpr int PANEL_ROWS = VECTORS * LANES;

inline int64_t widest_tiles(int64_t n) { return (n + WIDEST * LANES - 1) / (WIDEST * LANES); }
inline int64_t panels(int64_t n) { return widest_tiles(n) * WIDEST / VECTORS; }
inline int64_t blocks(int64_t k) { return (k + BLOCK - 1) / BLOCK; }
inline int64_t words(int64_t n, int64_t k) { return panels(n) * blocks(k) * PANEL_ROWS; }

// A dot product of bfloat16 pairs. Half h of a word holds the codes of k = 2 step + h, step 0 in
// its two highest bits: shifted there, they are the sign and the highest exponent bit of bfloat16,
// so that `& 0xC000` leaves 0, +2 or -2.
struct Pairs {
  static constexpr int K = 2, STEPS = BLOCK / K;
  static uint32_t code(int value) { return value == 0 ? 0u : value > 0 ? 1u : 3u; }
  static int place(int k) { return 16 * (k % 2) + 14 - 2 * (k / 2); }
};

// A dot product of four unsigned with four signed bytes. Byte t of a word holds the codes of
// k = 4 step + t, step 0 in its two lowest bits: `& 3` leaves the weight plus one.
struct Quads {
  static constexpr int K = 4, STEPS = BLOCK / K;
  static uint32_t code(int value) { return (uint32_t)(value + 1); }
  static int place(int k) { return 8 * (k % 4) + 2 * (k / 4); }
};

// values [n, k] in {-1, 0, +1} to words(n, k) packed words.
template <typename Layout>
void pack(const int8_t* values, uint32_t* packed, int64_t n, int64_t k) {
  const int64_t count = blocks(k);
  for (int64_t row = 0; row < panels(n) * PANEL_ROWS; ++row) {
    const int8_t* source = values + row * k;
    uint32_t* target = packed + row / PANEL_ROWS * count * PANEL_ROWS + row % PANEL_ROWS;
    for (int64_t block = 0; block < count; ++block) {
      uint32_t word = 0;
      for (int i = 0; i < BLOCK; ++i) {
        const int64_t column = block * BLOCK + i;
        const int value = row < n && column < k ? source[column] : 0;
        word |= Layout::code(value) << Layout::place(i);
      }
      target[block * PANEL_ROWS] = word;
    }
  }
}

}  // namespace
