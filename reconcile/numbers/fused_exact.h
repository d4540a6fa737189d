// The exact sum of any number of doubles, rounded once to nearest, ties to even.
//
// A fixed-point number wide enough for every double ("small superaccumulator": R. M. Neal, Fast
// exact summation using small and large superaccumulators, arXiv:1505.05571, 2015). Integer
// additions commute, so neither the order of the terms nor a split over threads shows.
#ifndef RECONCILE_FUSED_EXACT_H
#define RECONCILE_FUSED_EXACT_H

#include <cmath>
#include <cstdint>
#include <cstring>

class ExactSum {
 public:
  void add(double x) {
    uint64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const int field = static_cast<int>(bits >> 52) & 0x7ff;
    uint64_t mantissa = bits & 0xfffffffffffffull;
    if (field == 0x7ff) {
      special_ += x;  // +inf and -inf give NaN, which stays
      return;
    }
    if (field != 0) mantissa |= 1ull << 52;
    if (mantissa == 0) return;
    // x = mantissa * 2^(position - 1075); a subnormal has the position of the smallest normal
    const int position = field == 0 ? 1 : field;
    const int limb = position >> 5, shift = position & 31;
    const auto below = static_cast<int64_t>((mantissa << shift) & 0xffffffffull);
    const auto above = static_cast<int64_t>(mantissa >> (32 - shift));  // < 2^52
    const int64_t sign = -static_cast<int64_t>(bits >> 63);             // 0 or -1
    limbs_[limb] += (below ^ sign) - sign;
    limbs_[limb + 1] += (above ^ sign) - sign;
    touch(limb, limb + 1);
    if (++pending_ == kPending) normalise();
  }

  void add(ExactSum& other) {
    special_ += other.special_;
    if (other.high_ < 0) return;
    other.normalise();
    for (int k = other.low_; k <= other.high_; ++k) limbs_[k] += other.limbs_[k];
    touch(other.low_, other.high_);
    if (++pending_ == kPending) normalise();
  }

  void clear() {
    for (int k = low_; k <= high_; ++k) limbs_[k] = 0;
    low_ = kLimbs, high_ = -1, pending_ = 0, special_ = 0;
  }

  // The sum as a double: inf beyond the largest, and inf or NaN where such terms were added.
  double value() const {
    if (special_ != 0) return special_;  // NaN too
    ExactSum sum = *this;
    return sum.rounded();
  }

 private:
  static constexpr int kLimbs = 68;  // 2^(32 * 68 - 1075) is far beyond 2^1024 times any count
  static constexpr int kPending = 1 << 10;  // terms below 2^52 that fit in 63 bits

  int64_t limbs_[kLimbs] = {};  // limb k counts units of 2^(32 k - 1075)
  int low_ = kLimbs, high_ = -1;  // the limbs that may differ from 0
  int pending_ = 0;
  double special_ = 0;  // the sum of the terms that are not finite

  void touch(int low, int high) {
    if (low < low_) low_ = low;
    if (high > high_) high_ = high;
  }

  // Brings every limb into [0, 2^32) but the highest, which carries the sign.
  void normalise() {
    pending_ = 0;
    for (int k = low_; k < high_; ++k) carry(k);
    while (high_ >= 0 && (limbs_[high_] >> 32) != 0 && (limbs_[high_] >> 32) != -1) {
      carry(high_);
      ++high_;
    }
  }

  void carry(int k) {
    const int64_t over = limbs_[k] >> 32;  // towards minus infinity
    limbs_[k] &= 0xffffffff;
    limbs_[k + 1] += over;
  }

  double rounded() {
    normalise();
    while (high_ >= low_ && limbs_[high_] == 0) --high_;
    if (high_ < low_) return 0.0;
    if (limbs_[high_] < 0) {
      for (int k = low_; k <= high_; ++k) limbs_[k] = -limbs_[k];
      return -rounded();
    }
    return positive();
  }

  uint64_t limb_or_zero(int k) const { return k < 0 ? 0 : static_cast<uint64_t>(limbs_[k]); }

  double positive() const {
    const int top = high_;
    using Wide = unsigned __int128;
    const Wide window = (static_cast<Wide>(limb_or_zero(top)) << 64) |
                        (static_cast<Wide>(limb_or_zero(top - 1)) << 32) | limb_or_zero(top - 2);
    const int origin = 32 * (top - 2);  // place of the window's lowest bit
    const int leading = 32 * top + 63 - __builtin_clzll(limb_or_zero(top));
    const int last = leading - 52 > 1 ? leading - 52 : 1;  // place of the result's lowest bit
    const int shift = last - origin;                       // at least 12
    auto mantissa = static_cast<uint64_t>(window >> shift);
    const bool half = (window >> (shift - 1)) & 1;
    bool rest = (window & ((static_cast<Wide>(1) << (shift - 1)) - 1)) != 0;
    for (int k = low_; k < top - 2 && !rest; ++k) rest = limbs_[k] != 0;
    if (half && (rest || (mantissa & 1))) ++mantissa;
    return std::ldexp(static_cast<double>(mantissa), last - 1075);
  }
};

#endif
