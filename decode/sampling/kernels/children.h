// The children that a drafter gives one node: the best by logit, or by logit plus noise.
#pragma once

#include "pipeline.h"

namespace sampling {
namespace {

// The `width` largest logits in order, and their log-softmax; how many there are.
int64_t largest_children(Row& row, int64_t width, int64_t* ids, double* scores) {
  if (width == 0) return 0;
  row.take_largest(width);
  const double log_total = natural_log(total_weight(row, 1.0));
  for (size_t i = 0; i < row.keys.size(); ++i) {
    ids[i] = key_id(row.keys[i]);
    scores[i] = ((double)row.x[ids[i]] - (double)row.largest) - log_total;
  }
  return (int64_t)row.keys.size();
}

// The `width` largest of log d + gumbel in order, and the log-softmax of that; how many there are.
int64_t earliest_children(Workspace& space, const Item& item, int64_t width, int64_t* ids, double* scores) {
  const Row& row = space.row;
  const Survivors& kept = space.survivors;
  const double inverse_temperature = 1.0 / item.temperature;
  Earliest earliest{noise_key(item.seed, item.choice, item.position, item.stream), width};
  truncate(space.row, item, inverse_temperature, space.survivors);
  if (kept.everything) {
    for (int64_t at = 0; at < row.count; at += kLanes) {
      const Doubles exponents = (load(row.x, at, row.count) - (double)row.largest) * inverse_temperature;
      earliest.enter_rated(at, exp_weights(exponents));
    }
  } else {
    std::vector<std::pair<int64_t, double>> ordered(kept.ids.size());
    for (size_t i = 0; i < ordered.size(); ++i) ordered[i] = {kept.ids[i], kept.weights[i]};
    std::sort(ordered.begin(), ordered.end());
    for (const auto& [id, weight] : ordered) earliest.enter_rated(id, weight);
  }
  const double log_total = earliest.log_rate_total();
  int64_t count = 0;
  for (const auto& [time, id] : earliest.sorted()) {
    ids[count] = id;
    scores[count++] = natural_log(1.0 / time) - log_total;
  }
  return count;
}

}  // namespace
}  // namespace sampling
