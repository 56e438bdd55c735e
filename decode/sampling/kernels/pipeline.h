// The pipeline of one row: penalties, bias and bans, then temperature and truncation, then a draw.
#pragma once

#include <memory>

#include "constraints.h"
#include "race.h"
#include "row.h"

namespace sampling {
namespace {

constexpr int64_t kFirstGather = 64;

struct Survivors {
  bool everything = false;  // no truncation: all ids, weights on demand
  std::vector<int64_t> ids;
  std::vector<double> weights;
};

struct Workspace {
  Constraints constraints;
  Row row;
  std::vector<float> adjusted;
  Survivors survivors;
};

Workspace& workspace() {
  static thread_local const std::unique_ptr<Workspace> space = std::make_unique<Workspace>();
  return *space;
}

double weight_of(const Row& row, int64_t id, double inverse_temperature) {
  return exp_weight(((double)row.x[id] - (double)row.largest) * inverse_temperature);
}

double total_weight(const Row& row, double inverse_temperature) {
  Doubles sums = Doubles{};
  for (int64_t at = 0; at < row.count; at += kLanes)
    sums += exp_weights((load(row.x, at, row.count) - (double)row.largest) * inverse_temperature);
  return lane_total(sums);
}

// Append row.keys and their weights in order until the running `sum` reaches `mass`; whether it did.
bool weigh_until(const Row& row, double inverse_temperature, double mass, double& sum, Survivors& out) {
  const int64_t count = (int64_t)row.keys.size();
  for (int64_t at = 0; at < count; at += kLanes) {
    const int64_t lanes = std::min<int64_t>(kLanes, count - at);
    Doubles logits = Doubles{} - INFINITY;
    for (int64_t lane = 0; lane < lanes; ++lane) logits[lane] = (double)row.x[key_id(row.keys[at + lane])];
    const Doubles weights = exp_weights((logits - (double)row.largest) * inverse_temperature);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      out.ids.push_back(key_id(row.keys[at + lane]));
      out.weights.push_back(weights[lane]);
      sum += weights[lane];
      if (sum >= mass) return true;
    }
  }
  return false;
}

void keep_top_k(Row& row, const Item& item, double inverse_temperature, Survivors& out) {
  row.take_largest(item.top_k);
  double all = 0.0;
  weigh_until(row, inverse_temperature, INFINITY, all, out);
  if (item.top_p >= 1.0) return;
  double total = 0.0;
  for (const double weight : out.weights) total += weight;
  const double mass = item.top_p * total;
  double sum = 0.0;
  for (size_t i = 0; i < out.weights.size(); ++i) {
    sum += out.weights[i];
    if (sum < mass) continue;
    out.ids.resize(i + 1);
    out.weights.resize(i + 1);
    return;
  }
}

// Everything below it weighs less than 1 - top_p together; -inf where that says nothing.
float enough_for(const Row& row, const Item& item, double inverse_temperature, double total) {
  const double weight = (1.0 - item.top_p) * total / (double)row.count;
  if (!(weight > 1e-300)) return -INFINITY;
  return (float)((double)row.largest + natural_log(weight) / inverse_temperature);
}

// Slices of the order, each further down, until the mass is there: by rank first, then by factors of e, e^2, e^4.
void keep_top_p(Row& row, const Item& item, double inverse_temperature, Survivors& out) {
  const double total = total_weight(row, inverse_temperature);
  const double mass = item.top_p * total;
  const float last = enough_for(row, item, inverse_temperature, total);
  double sum = 0.0;
  float below = INFINITY, width = (float)item.temperature;
  for (int64_t wanted = kFirstGather;; wanted *= 4) {
    float bound = row.bound_for(wanted);
    if (bound == -INFINITY && below < INFINITY && below > last) {
      bound = std::max(last, below - width);
      if (bound >= below) bound = -INFINITY;
      width *= 2.0f;
    }
    row.gather(bound, below);
    row.sort_keys();
    if (weigh_until(row, inverse_temperature, mass, sum, out) || bound == -INFINITY) return;
    below = bound;
  }
}

void keep_min_p(const Row& row, const Item& item, double inverse_temperature, Survivors& out) {
  const double spread = (natural_log(item.min_p) - 1e-3) / inverse_temperature;
  const float bound = std::nextafterf((float)((double)row.largest + spread), -INFINITY);
  row.visit_at_least(bound, [&](int64_t id) {
    const double weight = weight_of(row, id, inverse_temperature);
    if (weight < item.min_p) return;
    out.ids.push_back(id);
    out.weights.push_back(weight);
  });
}

// Temperature, top-k, top-p, min-p.
void truncate(Row& row, const Item& item, double inverse_temperature, Survivors& out) {
  out.everything = false;
  out.ids.clear();
  out.weights.clear();
  const bool has_top_k = item.top_k > 0 && item.top_k < row.count;
  if (!has_top_k && item.top_p >= 1.0) {
    if (item.min_p > 0.0) keep_min_p(row, item, inverse_temperature, out);
    else out.everything = true;
    return;
  }
  if (has_top_k) keep_top_k(row, item, inverse_temperature, out);
  else keep_top_p(row, item, inverse_temperature, out);
  size_t kept = 0;
  for (size_t i = 0; i < out.weights.size(); ++i) {
    if (out.weights[i] < item.min_p) continue;
    out.ids[kept] = out.ids[i];
    out.weights[kept++] = out.weights[i];
  }
  out.ids.resize(kept);
  out.weights.resize(kept);
}

// Everything before the temperature; `space.row` holds the result.
Error process(Workspace& space, const float* raw, int64_t vocabulary) {
  const float* values = raw;
  bool valid = true;
  const bool active = space.constraints.active();
  if (active) {
    valid = space.constraints.apply(raw, space.adjusted);
    values = space.adjusted.data();
  }
  space.row.scan(values, vocabulary);
  if (!valid || !space.row.valid) return kNotFinite;
  if (space.row.largest > -INFINITY) return kFine;
  return active ? space.constraints.exhausted(raw, space.adjusted) : kNotFinite;
}

int64_t draw(Workspace& space, const Item& item, uint64_t key) {
  Row& row = space.row;
  if (item.temperature == 0.0) return row.argmax();
  const double inverse_temperature = 1.0 / item.temperature;
  truncate(row, item, inverse_temperature, space.survivors);
  if (space.survivors.everything) return race_all(row.x, row.count, row.largest, inverse_temperature, key);
  Race race{key};
  for (size_t i = 0; i < space.survivors.ids.size(); ++i)
    race.enter(space.survivors.ids[i], space.survivors.weights[i]);
  return race.winner;
}

}  // namespace
}  // namespace sampling
