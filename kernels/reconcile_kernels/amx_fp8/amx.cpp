// Engine amx: bfloat16 activations by TDPBF16PS, 16 x 16 sums in a tile.
//
// 32 columns x 128 k of weights are decoded into a panel, whose rows of 64 bytes are rows of a B
// tile as they are. The inner sum takes 32 k at a time, as the instruction does: even and odd k
// apart, their sum added to the tile. After 128 k the tile is stored and folded under the scale.
// The same binary runs where the tiles are real and under the emulator of tile instructions.
#include "linear.h"

namespace {

constexpr int TILE = 16;

// Some compilers do not know that a tile instruction reads memory: what was written must be there.
inline void memory_is_written() { __asm__ volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

// Tiles: 0 and 1 are the sums of both halves of the columns for up to 16 rows, 2 and 3 for 16 more;
// 4 and 5 hold x, 6 and 7 the weights.
void configure(int64_t upper, int64_t lower) {
  TileConfig config;
  const auto shape = [&](int tile, int64_t rows) {
    config.rows[tile] = (uint8_t)rows;
    config.bytes_per_row[tile] = rows ? 64 : 0;
  };
  for (const int tile : {0, 1, 4}) shape(tile, upper);
  for (const int tile : {2, 3, 5}) shape(tile, lower);
  for (const int tile : {6, 7}) shape(tile, TILE);
  memory_is_written();
  _tile_loadconfig(&config);
}

// sums [32][32] of one block of k for `upper` rows and, where there are any, `lower` more.
void multiply(const uint16_t *x, int64_t x_stride, const Register *panel, int64_t pairs,
              bool two, float *sums) {
  memory_is_written();
  _tile_zero(0);
  _tile_zero(1);
  if (two) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t p = 0; p < pairs; p += TILE, panel += 2 * TILE, x += 2 * TILE) {
    _tile_loadd(4, x, x_stride);
    _tile_loadd(6, panel, 128);
    _tile_loadd(7, panel + 1, 128);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (two) {
      _tile_loadd(5, (const char *)x + TILE * x_stride, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 128);
  _tile_stored(1, sums + 16, 128);
  if (two) {
    _tile_stored(2, sums + TILE * COLUMNS, 128);
    _tile_stored(3, sums + TILE * COLUMNS + 16, 128);
  }
  memory_is_written();
}

void columns(const Call &call, int64_t begin, int64_t end) {
  const Decoder decode;
  const Aligned<Register> panel(2 * PAIRS);
  const Aligned<float> total(call.M * COLUMNS), sums(2 * TILE * COLUMNS);
  const uint16_t *x = (const uint16_t *)call.x;
  int64_t configured = -1;
  for (int64_t n = begin; n < end; n += COLUMNS) {
    memset(total.data, 0, (size_t)(call.M * COLUMNS) * sizeof(float));
    for (int64_t kb = 0; kb < call.k_blocks(); ++kb) {
      const int64_t pairs = call.pairs(kb);
      const Pair scale = scales_of(call, n, kb);
      const uint8_t *w = call.weights(n) + kb * PAIRS * 64;
      decode_panel(decode, w, pairs, panel.data);
      for (int64_t m = 0; m < call.M; m += 2 * TILE) {
        const int64_t rows = call.M - m < 2 * TILE ? call.M - m : 2 * TILE;
        if (rows != configured)
          configure(rows < TILE ? rows : TILE, rows < TILE ? 0 : rows - TILE);
        configured = rows;
        multiply(x + m * call.K + kb * K_BLOCK, call.K * 2, panel.data, pairs, rows > TILE,
                 sums.data);
        for (int64_t r = 0; r < rows; ++r) {
          const float *row = sums.data + r * COLUMNS;
          fold(total.data + (m + r) * COLUMNS, _mm512_load_ps(row), _mm512_load_ps(row + 16),
               scale);
        }
      }
    }
    for (int64_t m = 0; m < call.M; ++m) finish(call, m, n, total.data + m * COLUMNS);
  }
  _tile_release();
}

void run(const Call &call) {
  over_columns(call, COLUMNS, [&](int64_t begin, int64_t end) { columns(call, begin, end); });
}

}  // namespace

EXPORT_LINEAR(amx_fp8_amx, run)
