// One row of logits: its largest values, in the order (logit descending, id ascending), without sorting all.
#pragma once

#include <algorithm>
#include <vector>

#include "arithmetic.h"

namespace sampling {

constexpr int kColumns = 16;
constexpr int kDepth = 32;
constexpr int64_t kGroup = kColumns * kDepth;
typedef float Column __attribute__((vector_size(64)));
typedef int32_t ColumnMask __attribute__((vector_size(64)));

inline uint32_t ascending_bits(float x) {
  uint32_t bits;
  const float value = x + 0.0f;  // -0 and +0 tie
  std::memcpy(&bits, &value, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline uint64_t order_key(float x, int64_t token_id) {
  return ((uint64_t)(~ascending_bits(x)) << 32) | (uint32_t)token_id;
}

inline int64_t key_id(uint64_t key) { return (int64_t)(key & 0xffffffffu); }

// Column maxima: entry g * 16 + c covers ids g * 512 + c + 16 r. They bound every search for large values.
struct Row {
  const float* x = nullptr;
  int64_t count = 0;
  float largest = -INFINITY;
  bool valid = true;  // no NaN, no +inf
  std::vector<float> maxima, ranked;
  std::vector<uint64_t> keys, spare;
  bool ascending = false;  // `keys` are in the order of their ids

  void scan(const float* values, int64_t vocabulary) {
    x = values;
    count = vocabulary;
    const int64_t groups = (count + kGroup - 1) / kGroup;
    maxima.resize(groups * kColumns);
    ColumnMask bad = ColumnMask{};
    Column all = Column{} - INFINITY;
    for (int64_t group = 0; group < groups; ++group) {
      Column best = Column{} - INFINITY;
      for (int depth = 0; depth < kDepth; ++depth) {
        const int64_t at = group * kGroup + depth * kColumns;
        if (at >= count) break;
        Column values16 = Column{} - INFINITY;
        if (at + kColumns <= count) std::memcpy(&values16, x + at, sizeof(values16));
        else std::memcpy(&values16, x + at, sizeof(float) * (count - at));
        bad |= ~(values16 <= __FLT_MAX__);
        best = values16 > best ? values16 : best;
      }
      std::memcpy(&maxima[group * kColumns], &best, sizeof(best));
      all = best > all ? best : all;
    }
    largest = -INFINITY;
    valid = true;
    for (int column = 0; column < kColumns; ++column) {
      largest = std::max(largest, all[column]);
      valid = valid && !bad[column];
    }
  }

  template <typename Visit>
  void visit_at_least(float bound, Visit visit) const {
    for (int64_t entry = 0; entry < (int64_t)maxima.size(); ++entry) {
      if (!(maxima[entry] >= bound)) continue;
      const int64_t first = entry / kColumns * kGroup + entry % kColumns;
      const int64_t stop = std::min(count, first + kGroup);
      for (int64_t id = first; id < stop; id += kColumns)
        if (x[id] >= bound) visit(id);
    }
  }

  int64_t argmax() const {
    int64_t best = count;
    visit_at_least(largest, [&](int64_t id) { best = std::min(best, id); });
    return best;
  }

  // The `wanted`-th largest column maximum: at least `wanted` values are not below it. -inf: take them all.
  float bound_for(int64_t wanted) {
    if (wanted >= (int64_t)maxima.size()) return -INFINITY;
    ranked = maxima;
    std::nth_element(ranked.begin(), ranked.begin() + (wanted - 1), ranked.end(), std::greater<float>());
    return ranked[wanted - 1];
  }

  // Fill `keys` with all values in [bound, below), unordered; -inf never counts.
  void gather(float bound, float below) {
    keys.clear();
    int64_t columns = 0;
    for (const float most : maxima) columns += most >= bound;
    ascending = columns > (int64_t)maxima.size() / 4;  // then a straight pass is cheaper than going by column
    if (ascending) {
      for (int64_t id = 0; id < count; ++id)
        if (x[id] >= bound && x[id] < below && x[id] > -INFINITY) keys.push_back(order_key(x[id], id));
      return;
    }
    visit_at_least(bound, [&](int64_t id) {
      if (x[id] < below) keys.push_back(order_key(x[id], id));
    });
  }

  void sort_keys() {
    if (keys.size() < 768) {
      std::sort(keys.begin(), keys.end());
      return;
    }
    spare.resize(keys.size());
    for (const int shift : {0, 11, 22, 32, 43, 54}) {
      if (shift < 32 && ascending) continue;
      const uint64_t mask = shift == 22 || shift == 54 ? 0x3ffu : 0x7ffu;
      size_t starts[2049] = {0};
      for (const uint64_t key : keys) ++starts[((key >> shift) & mask) + 1];
      for (uint64_t digit = 0; digit < mask; ++digit) starts[digit + 1] += starts[digit];
      for (const uint64_t key : keys) spare[starts[(key >> shift) & mask]++] = key;
      keys.swap(spare);
    }
  }

  // The `wanted` largest, in order.
  void take_largest(int64_t wanted) {
    gather(bound_for(wanted), INFINITY);
    if (wanted < (int64_t)keys.size()) {
      std::nth_element(keys.begin(), keys.begin() + wanted, keys.end());
      keys.resize(wanted);
      ascending = false;
    }
    sort_keys();
  }
};

}  // namespace sampling
