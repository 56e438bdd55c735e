// Sixteen float32 lanes and the storage types float and bfloat16.
//
// With AVX-512 a Lanes is one register; elsewhere it is an array that the compiler vectorises. Every
// operation has one fixed order of arithmetic, so a result never depends on how callers group rows.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define OUTRIDER_AVX512 1
#include <immintrin.h>
#endif

namespace outrider {

constexpr int kLanes = 16;

struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(BFloat16 value) {
  uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

inline void from_float(float value, float* target) { *target = value; }

inline void from_float(float value, BFloat16* target) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    target->bits = static_cast<uint16_t>((bits >> 16) | 0x40u);
  } else {
    target->bits = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
  }
}

// Rounds to the storage type T and back.
template <typename T>
inline float rounded(float value) {
  T stored;
  from_float(value, &stored);
  return to_float(stored);
}

#ifdef OUTRIDER_AVX512

using Lanes = __m512;
using LaneMask = __mmask16;

inline LaneMask first_lanes(int count) {
  return count >= kLanes ? LaneMask(0xffff) : LaneMask((1u << count) - 1u);
}
inline Lanes splat(float value) { return _mm512_set1_ps(value); }
inline Lanes load(const float* source) { return _mm512_loadu_ps(source); }
inline Lanes load(const BFloat16* source) {
  __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline void store(float* target, Lanes value) { _mm512_storeu_ps(target, value); }
inline __m256i bfloat16_bits(Lanes value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(up, nan, quiet), 16));
}
inline void store(BFloat16* target, Lanes value) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), bfloat16_bits(value));
}
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes subtract(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes multiply(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes divide(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes maximum(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes minimum(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
inline Lanes keep(LaneMask mask, Lanes value, float other) {
  return _mm512_mask_mov_ps(_mm512_set1_ps(other), mask, value);
}
inline float sum(Lanes value) { return _mm512_reduce_add_ps(value); }
inline float largest(Lanes value) { return _mm512_reduce_max_ps(value); }

// 2^x for x in [-126, 126], clamped there; relative error below 2^-22.
inline Lanes power_of_two(Lanes x) {
  x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-126.0f)), _mm512_set1_ps(126.0f));
  Lanes whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Lanes part = _mm512_sub_ps(x, whole);
  Lanes result = _mm512_set1_ps(1.5403530e-4f);
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(1.3333558e-3f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(9.6181291e-3f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(5.5504109e-2f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(2.4022651e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(6.9314718e-1f));
  result = _mm512_fmadd_ps(result, part, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(result, whole);
}

// Sums over every fourth lane of four rows: lane 4·i + j of the result belongs to row j.
inline Lanes quarter_sums(const Lanes* rows) {
  __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(rows[0], rows[1]), _mm512_unpackhi_ps(rows[0], rows[1]));
  __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(rows[2], rows[3]), _mm512_unpackhi_ps(rows[2], rows[3]));
  __m512d low_pairs = _mm512_castps_pd(low), high_pairs = _mm512_castps_pd(high);
  return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low_pairs, high_pairs)),
                       _mm512_castpd_ps(_mm512_unpackhi_pd(low_pairs, high_pairs)));
}

// From the quarter sums of four times four rows: lane i of the result is the sum over all lanes of row i.
inline Lanes sums_of_quarters(const Lanes* quads) {
  __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44),
                               _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
  __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44),
                                _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88),
                       _mm512_shuffle_f32x4(first, second, 0xdd));
}

#else

struct Lanes {
  float lane[kLanes];
};
using LaneMask = int;

template <typename Operation>
inline Lanes each(Operation operation) {
  Lanes result;
  for (int i = 0; i < kLanes; ++i) result.lane[i] = operation(i);
  return result;
}

inline LaneMask first_lanes(int count) { return count; }
inline Lanes splat(float value) { return each([&](int) { return value; }); }
template <typename T>
inline Lanes load(const T* source) { return each([&](int i) { return to_float(source[i]); }); }
template <typename T>
inline void store(T* target, Lanes value) {
  for (int i = 0; i < kLanes; ++i) from_float(value.lane[i], target + i);
}
inline Lanes add(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] + b.lane[i]; }); }
inline Lanes subtract(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] - b.lane[i]; }); }
inline Lanes multiply(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] * b.lane[i]; }); }
inline Lanes divide(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] / b.lane[i]; }); }
inline Lanes maximum(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Lanes minimum(Lanes a, Lanes b) { return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; }); }
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
  return each([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline Lanes keep(LaneMask mask, Lanes value, float other) {
  return each([&](int i) { return i < mask ? value.lane[i] : other; });
}
inline float sum(Lanes value) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) value.lane[i] += value.lane[i + width];
  return value.lane[0];
}
inline float largest(Lanes value) {
  float result = value.lane[0];
  for (int i = 1; i < kLanes; ++i) result = value.lane[i] > result ? value.lane[i] : result;
  return result;
}
inline Lanes power_of_two(Lanes x) {
  return each([&](int i) { return std::exp2(std::fmin(std::fmax(x.lane[i], -126.0f), 126.0f)); });
}
inline Lanes quarter_sums(const Lanes* rows) {
  return each([&](int i) {
    const float* lane = rows[i % 4].lane + i / 4 * 4;
    return (lane[0] + lane[2]) + (lane[1] + lane[3]);
  });
}
inline Lanes sums_of_quarters(const Lanes* quads) {
  return each([&](int i) {
    const float* lane = quads[i / 4].lane + i % 4;
    return (lane[0] + lane[8]) + (lane[4] + lane[12]);
  });
}

#endif

}  // namespace outrider
