// MXFP8 quantiser in one pass: 32 values share a power of two, the codes are E4M3FN.
//
// A group is read once; its byte comes from the bits of max|x|, its codes from x * 2^(127 - byte)
// rounded to nearest even, saturating at 448. Everything is integer arithmetic or an exact product
// by a power of two, so that the vector and the plain code give the same bytes.
//
// Plain C interface:
//   mx_quantise(dtype, x, rows, k, rule, pairs, codes, scales, threads, level)
//     dtype   0 float32, 1 bfloat16; x [rows, k], contiguous
//     rule    0 floor, 1 rceil, 2 ceil, 3 even, 4 floor with codes of zero under byte 0 (Ascend)
//     pairs   scale bytes per row; those beyond ceil(k / 32) are written 0
//     codes   [rows, k], scales [rows, pairs]
//     level   0 portable, 1 AVX-512 where the processor has it
//   mx_level() -> the best level here

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define HAVE_AVX512 1
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2")))
#else
#define HAVE_AVX512 0
#endif

namespace {

constexpr int GROUP = 32;
constexpr uint32_t MAGNITUDE = 0x7fffffff;
enum Rule { FLOOR, RCEIL, CEIL, EVEN, FLOOR_ZEROED };

uint32_t bits(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

float value(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

float load(const float* x, int64_t i) { return x[i]; }
float load(const uint16_t* x, int64_t i) { return value(static_cast<uint32_t>(x[i]) << 16); }

int at_least_0(int byte) { return byte < 0 ? 0 : byte; }

// fl32(amax * fl32(1/448)) up to a power of two.
int rceil(uint32_t amax) {
  const uint32_t s = bits(value(amax) * value(0x3b124925));
  const int exponent = s >> 23, mantissa = s & 0x7fffff;
  const bool up = exponent == 0 ? mantissa > 0x400000 : exponent < 254 && mantissa != 0;
  return exponent + up;
}

// The group's byte from the bits of max|x|; 255 where that is not finite.
int byte_of(uint32_t amax, int rule) {
  const int exponent = amax >> 23;
  if (exponent == 255) return 255;
  switch (rule) {
    case RCEIL: return rceil(amax);
    case CEIL: return at_least_0(exponent - 8 + ((amax & 0x7fffff) != 0));
    case EVEN: {
      const int rounded = (amax + (1u << 19)) >> 23;
      return rounded == 255 ? 255 : at_least_0(rounded - 8);
    }
    default: return at_least_0(exponent - 8);
  }
}

// What a group's elements are multiplied by: 2^(127 - byte), and 0 to blank them.
float factor_of(int byte, int rule) {
  if (byte == 255 || (byte == 0 && rule == FLOOR_ZEROED)) return 0.0f;
  return byte == 254 ? value(0x00400000) : value(static_cast<uint32_t>(254 - byte) << 23);
}

// E4M3FN of a finite number: nearest even, saturating, the sign kept.
uint8_t encode(float x) {
  const uint32_t b = bits(x);
  uint32_t a = b & MAGNITUDE;
  if (a > 0x43e00000) a = 0x43e00000;  // 448
  uint32_t code;
  if (a < 0x3c800000) {  // below 2^-6: multiples of 2^-9, by adding 2^14 in float32
    code = bits(value(a) + 16384.0f) - bits(16384.0f);
  } else {
    code = ((a + 0x7ffff + (a >> 20 & 1)) >> 20) - (120 << 3);
  }
  return static_cast<uint8_t>(code | b >> 24 & 0x80);
}

template <class T>
void group_portable(const T* x, int count, int rule, uint8_t* codes, uint8_t* scale) {
  uint32_t amax = 0;
  for (int i = 0; i < count; i++) {
    const uint32_t a = bits(load(x, i)) & MAGNITUDE;
    if (a > amax) amax = a;
  }
  const int byte = byte_of(amax, rule);
  const float factor = factor_of(byte, rule);
  *scale = static_cast<uint8_t>(byte);
  for (int i = 0; i < count; i++) codes[i] = byte == 255 ? 0 : encode(load(x, i) * factor);
}

#if HAVE_AVX512
AVX512 inline __m512 load16(const float* x) { return _mm512_loadu_ps(x); }
AVX512 inline __m512 load16(const uint16_t* x) {
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

AVX512 inline __m512i magnitude(__m512 x) {
  return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(MAGNITUDE));
}

// `encode` of 16 numbers.
AVX512 inline __m128i encode16(__m512 x) {
  const __m512i all = _mm512_castps_si512(x);
  const __m512i a = _mm512_min_epu32(magnitude(x), _mm512_set1_epi32(0x43e00000));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(a, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(0x7ffff)), odd);
  __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
  const __m512 shift = _mm512_set1_ps(16384.0f);
  const __m512i small = _mm512_sub_epi32(
      _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(a), shift)), _mm512_castps_si512(shift));
  const __mmask16 is_small = _mm512_cmplt_epu32_mask(a, _mm512_set1_epi32(0x3c800000));
  code = _mm512_mask_mov_epi32(code, is_small, small);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(all, 24), _mm512_set1_epi32(0x80));
  return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

template <class T>
AVX512 void group_avx512(const T* x, int rule, uint8_t* codes, uint8_t* scale) {
  const __m512 low = load16(x), high = load16(x + 16);
  const uint32_t amax = _mm512_reduce_max_epu32(_mm512_max_epu32(magnitude(low), magnitude(high)));
  const int byte = byte_of(amax, rule);
  *scale = static_cast<uint8_t>(byte);
  __m256i both = _mm256_setzero_si256();
  if (byte != 255) {
    const __m512 factor = _mm512_set1_ps(factor_of(byte, rule));
    both = _mm256_set_m128i(encode16(_mm512_mul_ps(high, factor)),
                            encode16(_mm512_mul_ps(low, factor)));
  }
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), both);
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

template <class T>
AVX512 int64_t whole_groups_avx512(const T* x, int64_t k, int rule, uint8_t* codes,
                                   uint8_t* scales) {
  int64_t group = 0;
  for (; (group + 1) * GROUP <= k; group++)
    group_avx512(x + group * GROUP, rule, codes + group * GROUP, scales + group);
  return group;
}
#endif

template <class T>
void row(const T* x, int64_t k, int rule, int64_t pairs, uint8_t* codes, uint8_t* scales,
         bool wide) {
  int64_t group = 0;
#if HAVE_AVX512
  if (wide) group = whole_groups_avx512(x, k, rule, codes, scales);
#endif
  for (; group * GROUP < k; group++) {
    const int64_t start = group * GROUP;
    const int count = static_cast<int>(k - start < GROUP ? k - start : GROUP);
    group_portable(x + start, count, rule, codes + start, scales + group);
  }
  std::memset(scales + group, 0, pairs - group);
}

template <class T>
void rows_of(const T* x, int64_t begin, int64_t end, int64_t k, int rule, int64_t pairs,
             uint8_t* codes, uint8_t* scales, bool wide) {
  for (int64_t r = begin; r < end; r++)
    row(x + r * k, k, rule, pairs, codes + r * k, scales + r * pairs, wide);
}

template <class T>
void quantise(const T* x, int64_t rows, int64_t k, int rule, int64_t pairs, uint8_t* codes,
              uint8_t* scales, int threads, bool wide) {
  const int64_t count = threads < 1 ? 1 : threads < rows ? threads : rows;
  const auto share = [&](int64_t i) {
    rows_of(x, rows * i / count, rows * (i + 1) / count, k, rule, pairs, codes, scales, wide);
  };
  std::vector<std::thread> others;
  int64_t mine = 1;  // share 0 and those for which the system gave no thread
  try {
    for (; mine < count; mine++) others.emplace_back(share, mine);
  } catch (...) {
  }
  share(0);
  for (int64_t i = mine; i < count; i++) share(i);
  for (std::thread& other : others) other.join();
}

}  // namespace

extern "C" int mx_level() {
#if HAVE_AVX512
  return has_avx512();
#else
  return 0;
#endif
}

extern "C" void mx_quantise(int dtype, const void* x, int64_t rows, int64_t k, int rule,
                            int64_t pairs, uint8_t* codes, uint8_t* scales, int threads,
                            int level) {
  const bool wide = level > 0 && mx_level() > 0;
  if (dtype == 0)
    quantise(static_cast<const float*>(x), rows, k, rule, pairs, codes, scales, threads, wide);
  else
    quantise(static_cast<const uint16_t*>(x), rows, k, rule, pairs, codes, scales, threads, wide);
}
