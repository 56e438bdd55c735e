// Sampling arithmetic: IEEE double operations in a fixed order, so that numpy gives the same bits.
// Compile with -ffp-contract=off. The twin of decode/sampling/arithmetic.py and noise.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace sampling {

constexpr int kLanes = 8;
typedef double Doubles __attribute__((vector_size(64)));
typedef int64_t Ints __attribute__((vector_size(64)));
typedef uint64_t Words __attribute__((vector_size(64)));
typedef float Floats __attribute__((vector_size(32)));

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2High = 0x1.62e42fee00000p-1;
constexpr double kLn2Low = 0x1.a39ef35793c76p-33;
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
constexpr double kSmallest = -708.0;           // exp is 0 below
constexpr int kTerms = 14;
// 1/k! for k = 13 .. 0.
constexpr double kInverseFactorial[kTerms] = {
    1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0,
    1.0 / 40320.0,      1.0 / 5040.0,      1.0 / 720.0,      1.0 / 120.0,     1.0 / 24.0,
    1.0 / 6.0,          1.0 / 2.0,         1.0,              1.0};

// exp(s) for s <= 0: 2^n * (Taylor polynomial of degree 13 in s - n ln 2).
inline Doubles exp_weights(Doubles s) {
  const Doubles shifted = s * kLog2E + kRound;
  const Doubles whole = shifted - kRound;
  const Doubles rest = (s - whole * kLn2High) - whole * kLn2Low;
  Doubles sum = Doubles{} + kInverseFactorial[0];
  for (int k = 1; k < kTerms; ++k) sum = sum * rest + kInverseFactorial[k];
  const Ints scaled = (Ints)sum + ((Ints)shifted << 52);
  return s < kSmallest ? Doubles{} : (Doubles)scaled;
}

inline double exp_weight(double s) { return exp_weights(Doubles{} + s)[0]; }

// log(x) for finite x > 0: x = 2^e * m, m in [sqrt(1/2), sqrt(2)), log m = 2 artanh((m - 1) / (m + 1)).
inline double natural_log(double x) {
  int exponent = 0;
  double mantissa = std::frexp(x, &exponent);
  if (mantissa < 0.7071067811865476) {
    mantissa = mantissa * 2.0;
    exponent -= 1;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double z = s * s;
  double sum = 1.0 / 25.0;
  for (int odd = 23; odd >= 1; odd -= 2) sum = sum * z + 1.0 / odd;
  return exponent * kLn2High + ((s + s) * sum + exponent * kLn2Low);
}

// As `natural_log`, for eight normal numbers > 0.
inline Doubles natural_logs(Doubles x) {
  const Ints bits = (Ints)x;
  Ints exponents = (bits >> 52) - 1022;
  Doubles mantissas = (Doubles)((bits & 0xfffffffffffffll) | 0x3fe0000000000000ll);
  const Ints small = (Ints)(mantissas < 0.7071067811865476);
  mantissas = small ? mantissas * 2.0 : mantissas;
  exponents += small;
  const Doubles s = (mantissas - 1.0) / (mantissas + 1.0);
  const Doubles z = s * s;
  Doubles sum = Doubles{} + 1.0 / 25.0;
  for (int odd = 23; odd >= 1; odd -= 2) sum = sum * z + 1.0 / odd;
  return __builtin_convertvector(exponents, Doubles) * kLn2High +
         ((s + s) * sum + __builtin_convertvector(exponents, Doubles) * kLn2Low);
}

inline double lane_total(Doubles sums) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The finaliser of splitmix64 (Steele, Lea, Flood 2014; constants of Stafford's "Mix13").
template <typename Word>
inline Word mix(Word x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

inline uint64_t noise_key(uint64_t seed, uint64_t choice, uint64_t position, uint64_t stream) {
  uint64_t key = mix(seed + kGolden);
  key = mix((key ^ choice) + kGolden);
  key = mix((key ^ position) + kGolden);
  return mix((key ^ stream) + kGolden);
}

inline uint64_t noise_bits(uint64_t key, uint64_t token_id) {
  const uint64_t bits = mix(key + (token_id + 1) * kGolden) >> 11;
  return bits ? bits : 1;
}

// k * 2^-53 with k in [1, 2^53).
inline double uniform(uint64_t key, uint64_t token_id) { return (double)noise_bits(key, token_id) * 0x1p-53; }

// Of the eight ids from `first` on.
inline Doubles uniforms(uint64_t key, int64_t first) {
  Words offsets;
  for (int lane = 0; lane < kLanes; ++lane) offsets[lane] = (uint64_t)(first + lane + 1) * kGolden;
  Words bits = mix(offsets + key) >> 11;
  bits -= (Words)(bits == 0);
  return __builtin_convertvector((Ints)bits, Doubles) * 0x1p-53;
}

inline Doubles load(const float* x, int64_t at, int64_t count) {
  Floats values = Floats{} - INFINITY;
  const int64_t left = count - at;
  if (left >= kLanes) std::memcpy(&values, x + at, sizeof(values));
  else std::memcpy(&values, x + at, sizeof(float) * left);
  return __builtin_convertvector(values, Doubles);
}

}  // namespace sampling
