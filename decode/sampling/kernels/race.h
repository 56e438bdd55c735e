// Draws as an exponential race: the smallest E(v) / w(v), E = -log u, is the argmax of log t(v) + gumbel(v).
#pragma once

#include <algorithm>
#include <utility>
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

// The first `wanted` arrivals of a race, which are draws without replacement; ties to the lowest id.
class Earliest {
 public:
  Earliest(uint64_t key, int64_t wanted) : key_(key), wanted_(wanted) {}

  void enter(int64_t token_id, double weight) {
    const double u = uniform(key_, (uint64_t)token_id);
    if (weight <= 0.0 || 1.0 - u > latest() * weight * kSlack) return;
    arrive(token_id, -natural_log(u) / weight);
  }

  // As `enter`, and adds 1 / time to the rates, which `log_rate_total` sums. Lane j holds the ids j, j + 8, ...
  void enter_rated(int64_t token_id, double weight) {
    const double time = -natural_log(uniform(key_, (uint64_t)token_id)) / weight;
    rates_[token_id % kLanes] += 1.0 / time;
    arrive(token_id, time);
  }

  // `enter_rated` of the eight ids from `first` on, which is a multiple of 8; weight 0: absent.
  void enter_rated(int64_t first, Doubles weights) {
    const Doubles times = -natural_logs(uniforms(key_, first)) / weights;
    rates_ += 1.0 / times;
    const Ints early = (Ints)(times <= Doubles{} + latest());
    if (!(early[0] | early[1] | early[2] | early[3] | early[4] | early[5] | early[6] | early[7])) return;
    for (int lane = 0; lane < kLanes; ++lane) arrive(first + lane, times[lane]);
  }

  // Log of the sum of all rates.
  double log_rate_total() const { return natural_log(lane_total(rates_)); }

  // (time, id), earliest first.
  const std::vector<std::pair<double, int64_t>>& sorted() {
    std::sort(first_.begin(), first_.end());
    return first_;
  }

 private:
  double latest() const {
    if (wanted_ == 0) return -INFINITY;
    return (int64_t)first_.size() < wanted_ ? INFINITY : first_.front().first;
  }

  void arrive(int64_t token_id, double time) {
    const std::pair<double, int64_t> arrival{time, token_id};
    if (!(time < INFINITY) || wanted_ == 0) return;
    if ((int64_t)first_.size() == wanted_) {
      if (!(arrival < first_.front())) return;
      std::pop_heap(first_.begin(), first_.end());
      first_.pop_back();
    }
    first_.push_back(arrival);
    std::push_heap(first_.begin(), first_.end());
  }

  uint64_t key_;
  int64_t wanted_;
  std::vector<std::pair<double, int64_t>> first_;  // a heap, the latest in front
  Doubles rates_ = Doubles{};
};

}  // namespace sampling
