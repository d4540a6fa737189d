// Error statistics of a candidate against a reference in one pass over both.
//
// The numbers are those of the torch code in metrics.py, bit for bit. What makes that possible:
// the terms of a sum are float64; a block of 1024 elements of a row is added up in 16 partial sums
// (element i to i % 16), which are then folded in halves; and the sums of blocks are added exactly
// and rounded once. So neither the number of threads nor the instructions change a bit.
//
//   fused_exact.h   exact sums
//   fused_state.h   number formats, running totals, one block in portable C++
//   fused_avx512.h  one block with AVX-512
//   this file       rows, threads, and the C interface

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "fused_avx512.h"
#include "fused_state.h"

#if defined(__SSE__) || defined(__x86_64__)
#include <xmmintrin.h>
#endif

extern "C" {

// Places are flat indices, -1 where there is none. fused_stats.py reads it by position.
struct FusedStats {
  int64_t finite, nan_candidate, inf_candidate, nan_reference, inf_reference;
  int64_t mismatch, mismatch_place;
  int64_t bitwise_equal, differing, over_1ulp, bias;
  uint64_t max_ulp;
  int64_t max_abs_place, max_rel_place, reference_constant;
  int64_t rows, columns, bins;
  double max_abs, max_abs_candidate, max_abs_reference, max_rel, reference_amax;
  double sums[kSums];
  int64_t row[kWorst], column[kWorst];
  double row_nmse[kWorst], column_max[kWorst];
  int64_t exponent[kBins], count[kBins];  // there only if the histogram is asked for
};

}  // extern "C"

namespace {

// Subnormal numbers count here, whatever the calling thread does with them.
class DefaultFloatMode {
 public:
#if defined(__SSE__) || defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

struct Shape {
  int64_t rows, columns;
  int64_t blocks_of_row() const { return (columns + kBlock - 1) / kBlock; }
  int64_t blocks() const { return rows * blocks_of_row(); }
};

// The sums of a row that is split over threads.
struct PartOfRow {
  int64_t row;
  ExactSum error, power;
};

struct Share {
  State state;
  std::vector<PartOfRow> parts;
  explicit Share(int64_t columns) : state(columns) {}
};

struct Options {
  int threads, level;
  bool histogram;  // costs as much as the rest
};

template <class C, class R>
using BlockFunction = void (*)(State&, const C*, const R*, Block, double (&)[kSums]);

// Blocks `begin` ... `end` - 1, counted over all rows.
template <class C, class R>
void run(Share& share, const C* c, const R* r, Shape shape, int64_t begin, int64_t end,
         BlockFunction<C, R> block, bool histogram) {
  [[maybe_unused]] const DefaultFloatMode mode;
  State& s = share.state;
  const int64_t per_row = shape.blocks_of_row();
  PartOfRow part{};
  for (int64_t at = begin; at < end;) {
    const int64_t row = at / per_row, first = at % per_row;
    const int64_t last = end - row * per_row < per_row ? end - row * per_row : per_row;
    double sums[kSums];
    for (int64_t k = first; k < last; ++k) {
      const int64_t column = k * kBlock, left = shape.columns - column;
      const int64_t place = row * shape.columns + column;
      const auto count = static_cast<int>(left < kBlock ? left : kBlock);
      block(s, c + place, r + place, {count, place, column}, sums);
      if (histogram) count_exponents(s, c + place, r + place, count);
      for (const int name : {kAbs, kCandidate, kDot}) s.sums[name].add(sums[name]);
      if (per_row > 1) part.error.add(sums[kError]), part.power.add(sums[kPower]);
    }
    at = row * per_row + last;
    if (per_row == 1) {
      s.sums[kError].add(sums[kError]), s.sums[kPower].add(sums[kPower]);
      s.finish_row(row, sums[kError], sums[kPower]);
    } else if (last - first == per_row) {
      s.finish_row(row, part.error.value(), part.power.value());
      s.sums[kError].add(part.error), s.sums[kPower].add(part.power);
      part.error.clear(), part.power.clear();
    } else {
      part.row = row;
      share.parts.push_back(part);
      part.error.clear(), part.power.clear();
    }
  }
}

// Rows of which every thread has a part, in the order of the threads.
void join_rows(State& s, std::vector<Share>& shares) {
  PartOfRow whole{-1, {}, {}};
  const auto finish = [&] {
    if (whole.row < 0) return;
    s.finish_row(whole.row, whole.error.value(), whole.power.value());
    s.sums[kError].add(whole.error), s.sums[kPower].add(whole.power);
    whole.error.clear(), whole.power.clear();
  };
  for (Share& share : shares) {
    for (PartOfRow& part : share.parts) {
      if (part.row != whole.row) finish();
      whole.row = part.row;
      whole.error.add(part.error), whole.power.add(part.power);
    }
  }
  finish();
}

void write(const State& s, bool histogram, FusedStats* out) {
  out->finite = s.finite;
  out->nan_candidate = s.nan_candidate, out->inf_candidate = s.inf_candidate;
  out->nan_reference = s.nan_reference, out->inf_reference = s.inf_reference;
  out->mismatch = s.mismatch, out->mismatch_place = s.mismatch_place;
  out->bitwise_equal = s.bitwise;
  out->differing = s.differing + s.mismatch;
  out->over_1ulp = s.over_1ulp, out->bias = s.bias, out->max_ulp = s.max_ulp;
  out->reference_constant = s.constant, out->reference_amax = s.amax;
  out->max_abs = s.max_abs.value, out->max_abs_place = s.max_abs.place;
  out->max_abs_candidate = s.max_abs.candidate, out->max_abs_reference = s.max_abs.reference;
  out->max_rel = s.max_rel.value, out->max_rel_place = s.max_rel.place;
  for (int k = 0; k < kSums; ++k) out->sums[k] = s.sums[k].value();
  out->rows = s.rows.size, out->columns = s.columns.size;
  for (int k = 0; k < kWorst; ++k) {
    out->row[k] = s.rows.place[k], out->row_nmse[k] = s.rows.value[k];
    out->column[k] = s.columns.place[k], out->column_max[k] = s.columns.value[k];
  }
  out->bins = 0;
  for (int k = 1; histogram && k < kBins; ++k) {
    if (s.histogram[k] == 0) continue;
    out->exponent[out->bins] = k - kBinOfZero;
    out->count[out->bins++] = static_cast<int64_t>(s.histogram[k]);
  }
}

// What the instructions of the processor allow: 2 AVX-512, 1 AVX2, 0 anything.
int best_level() {
#if defined(__x86_64__)
  if (avx512::supported()) return 2;
  if (__builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

template <class C, class R>
BlockFunction<C, R> chosen([[maybe_unused]] int level) {
#if defined(__x86_64__)
  if (level >= 2) return avx512::block<C, R>;
  if (level == 1) return block_avx2<C, R>;
#endif
  return block_portable<C, R>;
}

template <class C, class R>
void compare(const void* candidate, const void* reference, Shape shape, Options options,
             FusedStats* out) {
  const auto* c = static_cast<const C*>(candidate);
  const auto* r = static_cast<const R*>(reference);
  const BlockFunction<C, R> block = chosen<C, R>(options.level);
  const int64_t blocks = shape.blocks();
  const int64_t threads = options.threads < 1 ? 1 : options.threads;
  const int64_t count = threads < blocks ? threads : blocks;
  std::vector<Share> shares;
  shares.reserve(static_cast<size_t>(count));
  for (int64_t t = 0; t < count; ++t) shares.emplace_back(shape.columns);
  const auto work = [&](int64_t t) {
    run<C, R>(shares[static_cast<size_t>(t)], c, r, shape, blocks * t / count,
              blocks * (t + 1) / count, block, options.histogram);
  };
  std::vector<std::thread> others;
  int64_t mine = 1;  // share 0 and those for which the system gave no thread
  try {
    for (int64_t t = count - 1; t > 0; --t) others.emplace_back(work, t);
  } catch (const std::exception&) {
    mine = count - static_cast<int64_t>(others.size());
  }
  for (int64_t t = 0; t < mine; ++t) work(t);
  for (std::thread& other : others) other.join();
  State& total = shares[0].state;
  for (int64_t t = 1; t < count; ++t) total.merge(shares[static_cast<size_t>(t)].state);
  join_rows(total, shares);
  write(total, options.histogram, out);
}

template <class C>
void with_reference(int dtype, const void* c, const void* r, Shape shape, Options options,
                    FusedStats* out) {
  switch (dtype) {
    case 0: return compare<C, Float64>(c, r, shape, options, out);
    case 1: return compare<C, Float32>(c, r, shape, options, out);
    case 2: return compare<C, BFloat16>(c, r, shape, options, out);
    default: return compare<C, Float16>(c, r, shape, options, out);
  }
}

}  // namespace

extern "C" {

int reconcile_fused_level() { return best_level(); }

// Dtypes: 0 float64, 1 float32, 2 bfloat16, 3 float16. Both arrays are contiguous
// [rows, columns] with at least one element. `level` asks for at most these instructions: 2
// AVX-512, 1 AVX2, 0 what every processor has. The histogram is empty unless asked for. Returns 0,
// or 1 where memory ran out.
int reconcile_fused_stats(int candidate_dtype, const void* candidate, int reference_dtype,
                          const void* reference, int64_t rows, int64_t columns, int threads,
                          int level, int histogram, FusedStats* out) {
  const Shape shape{rows, columns};
  const Options options{threads, level < best_level() ? level : best_level(), histogram != 0};
  try {
    switch (candidate_dtype) {
      case 0:
        with_reference<Float64>(reference_dtype, candidate, reference, shape, options, out);
        break;
      case 1:
        with_reference<Float32>(reference_dtype, candidate, reference, shape, options, out);
        break;
      case 2:
        with_reference<BFloat16>(reference_dtype, candidate, reference, shape, options, out);
        break;
      default:
        with_reference<Float16>(reference_dtype, candidate, reference, shape, options, out);
    }
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}

// The exact sum of `count` doubles, rounded once: for tests.
double reconcile_exact_sum(const double* x, int64_t count) {
  ExactSum sum;
  for (int64_t i = 0; i < count; ++i) sum.add(x[i]);
  return sum.value();
}

}  // extern "C"
