// Draws as an exponential race: the smallest E(v) / w(v), E = -log u, is the argmax of log t(v) + gumbel(v).
#pragma once

#include <vector>

#include "arithmetic.h"

namespace sampling {

constexpr double kSlack = 1.0 + 1e-7;  // -log u >= 1 - u holds in floating point with this much room

struct Race {
  uint64_t key;
  double best = INFINITY;
  int64_t winner = -1;

  // Ties go to the lowest id, whatever the order of the calls.
  void enter(int64_t token_id, double weight) {
    const double u = uniform(key, (uint64_t)token_id);
    if (weight <= 0.0 || 1.0 - u > best * weight * kSlack) return;
    const double time = -natural_log(u) / weight;
    if (time < best || (time == best && token_id < winner)) {
      best = time;
      winner = token_id;
    }
  }
};

// All of the vocabulary, weights exp((x - largest) / temperature): few logarithms, no memory.
inline int64_t race_all(const float* x, int64_t count, double largest, double inverse_temperature, uint64_t key) {
  Race race{key};
  Words offsets;
  for (int lane = 0; lane < kLanes; ++lane) offsets[lane] = (uint64_t)(lane + 1) * kGolden;
  for (int64_t start = 0; start < count; start += 8 * kLanes) {
    Doubles weights[8];
    Ints any = Ints{};
    const int64_t stop = count - start < 8 * kLanes ? count - start : 8 * kLanes;
    for (int64_t at = 0, part = 0; at < stop; at += kLanes, ++part) {
      const Words hashed = mix((offsets + (key + (uint64_t)(start + at) * kGolden))) >> 11;
      const Doubles late = 1.0 - __builtin_convertvector((Ints)hashed, Doubles) * 0x1p-53;
      weights[part] = exp_weights((load(x, start + at, count) - largest) * inverse_temperature);
      any |= (Ints)(late <= race.best * weights[part] * kSlack) & (Ints)(weights[part] > 0.0);
    }
    if (!(any[0] | any[1] | any[2] | any[3] | any[4] | any[5] | any[6] | any[7])) continue;
    for (int64_t at = 0; at < stop; ++at) race.enter(start + at, weights[at / kLanes][at % kLanes]);
  }
  return race.winner;
}

}  // namespace sampling
