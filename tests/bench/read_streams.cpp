// Reads two arrays and does nothing else: what memory gives, as the yardstick of a comparison.
//
// One loop over one array understates it, because a processor prefetches several streams at once;
// so each array is read as `streams` regions in lockstep, and the caller takes the best count.

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#define WIDEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define WIDEST
#endif

namespace {

constexpr size_t kStep = 128;
constexpr size_t kWords = kStep / sizeof(uint64_t);

WIDEST uint64_t read_all(const char* a, const char* b, size_t bytes, size_t streams) {
  const size_t region = bytes / streams / kStep * kStep;
  uint64_t found[kWords] = {};
  for (size_t at = 0; at < region; at += kStep) {
    for (size_t k = 0; k < streams; ++k) {
      uint64_t one[kWords], other[kWords];
      std::memcpy(one, a + k * region + at, kStep);
      std::memcpy(other, b + k * region + at, kStep);
      for (size_t w = 0; w < kWords; ++w) found[w] ^= one[w] ^ other[w];
    }
  }
  uint64_t all = 0;
  for (const uint64_t word : found) all ^= word;
  return all;
}

}  // namespace

extern "C" uint64_t read_streams(const char* a, const char* b, size_t bytes, size_t streams,
                                 int threads) {
  std::vector<uint64_t> found(static_cast<size_t>(threads));
  const size_t share = bytes / static_cast<size_t>(threads) / kStep * kStep;
  const auto work = [&](size_t t) {
    found[t] = read_all(a + t * share, b + t * share, share, streams);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < found.size(); ++t) others.emplace_back(work, t);
  work(0);
  for (std::thread& other : others) other.join();
  uint64_t all = 0;
  for (const uint64_t one : found) all ^= one;
  return all;
}
