// Draws and walks a whole step (C ABI). The plain twin and oracle is decode/sampling/reference.py.

#include <omp.h>

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

// Row of the first child of `row` that holds `token_id`; 0: none.
int64_t child_with(const int64_t* tokens, const int64_t* parents, int64_t num_nodes, int64_t row, int64_t token_id) {
  for (int64_t node = 0; node < num_nodes; ++node)
    if (parents[node] == row && tokens[node] == token_id) return node + 1;
  return 0;
}

}  // namespace
}  // namespace sampling

using namespace sampling;

#pragma GCC visibility push(default)
extern "C" {

// Walk every item's tree. Item i writes up to num_nodes + 1 tokens and rows from its `result` on;
// outcomes[3 i ..]: number of tokens, number of accepted rows, Error.
void outrider_walk(const float* logits, int64_t vocabulary, const Item* items, int64_t num_items, const int64_t* pool,
                   const double* values, int64_t* tokens, int64_t* rows, int64_t* outcomes, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_items > 1)
  for (int64_t i = 0; i < num_items; ++i) {
    const Item& item = items[i];
    Workspace& space = workspace();
    space.constraints.begin(item, pool, values, vocabulary);
    const int64_t* nodes = pool + item.nodes;
    int64_t row = 0, drawn = 0, accepted = 0;
    Error error = kFine;
    while (true) {
      error = process(space, logits + (item.logits_row + row) * vocabulary, vocabulary);
      if (error != kFine) break;
      const uint64_t key = noise_key(item.seed, item.choice, item.position + drawn, item.stream);
      const int64_t token_id = draw(space, item, key);
      tokens[item.result + drawn++] = token_id;
      row = child_with(nodes, nodes + item.num_nodes, item.num_nodes, row, token_id);
      if (row == 0) break;
      rows[item.result + accepted++] = row;
      space.constraints.descend(token_id);
    }
    outcomes[3 * i] = drawn;
    outcomes[3 * i + 1] = accepted;
    outcomes[3 * i + 2] = error;
  }
}

// The distribution after the whole pipeline at `logits_row`, past `path`. probs: [vocabulary].
int64_t outrider_probs(const float* logits, int64_t vocabulary, const Item* item, const int64_t* pool,
                       const double* values, double* probs) {
  Workspace& space = workspace();
  space.constraints.begin(*item, pool, values, vocabulary);
  const Error error = process(space, logits + item->logits_row * vocabulary, vocabulary);
  if (error != kFine) return error;
  std::fill(probs, probs + vocabulary, 0.0);
  if (item->temperature == 0.0) {
    probs[space.row.argmax()] = 1.0;
    return kFine;
  }
  const double inverse_temperature = 1.0 / item->temperature;
  Survivors& kept = space.survivors;
  truncate(space.row, *item, inverse_temperature, kept);
  if (kept.everything) {
    const double total = total_weight(space.row, inverse_temperature);
    for (int64_t at = 0; at < vocabulary; at += kLanes) {
      const Doubles part =
          exp_weights((load(space.row.x, at, vocabulary) - (double)space.row.largest) * inverse_temperature) / total;
      std::memcpy(probs + at, &part, sizeof(double) * std::min<int64_t>(kLanes, vocabulary - at));
    }
    return kFine;
  }
  std::vector<std::pair<int64_t, double>> ordered(kept.ids.size());
  for (size_t i = 0; i < ordered.size(); ++i) ordered[i] = {kept.ids[i], kept.weights[i]};
  std::sort(ordered.begin(), ordered.end());
  double total = 0.0;
  for (const auto& [id, weight] : ordered) total += weight;
  for (const auto& [id, weight] : ordered) probs[id] = weight / total;
  return kFine;
}

// The draw of a race over explicit weights; -1 where none is positive.
int64_t outrider_race(const double* weights, int64_t count, uint64_t key) {
  Race race{key};
  for (int64_t id = 0; id < count; ++id)
    if (weights[id] > 0.0) race.enter(id, weights[id]);
  return race.winner;
}

// Raw log-softmax: of requests[3 i] (row), the chosen id requests[3 i + 1] and the best requests[3 i + 2].
// Request i writes 1 + best entries from starts[i] on: the chosen one, then the best in order.
void outrider_logprobs(const float* logits, int64_t vocabulary, const int64_t* requests, const int64_t* starts,
                       int64_t num_requests, int64_t* ids, double* logprobs, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_requests > 1)
  for (int64_t i = 0; i < num_requests; ++i) {
    Row& row = workspace().row;
    row.scan(logits + requests[3 * i] * vocabulary, vocabulary);
    const double log_total = natural_log(total_weight(row, 1.0));
    const int64_t best = requests[3 * i + 2];
    if (best > 0) row.take_largest(std::min(best, vocabulary));
    for (int64_t entry = 0; entry <= best; ++entry) {
      const bool chosen = entry == 0;
      const bool missing = !chosen && entry > (int64_t)row.keys.size();
      const int64_t id = chosen ? requests[3 * i + 1] : missing ? -1 : key_id(row.keys[entry - 1]);
      ids[starts[i] + entry] = id;
      logprobs[starts[i] + entry] =
          missing ? -INFINITY : ((double)row.x[id] - (double)row.largest) - log_total;
    }
  }
}

void outrider_uniforms(uint64_t key, const int64_t* token_ids, int64_t count, double* uniforms) {
  for (int64_t i = 0; i < count; ++i) uniforms[i] = uniform(key, (uint64_t)token_ids[i]);
}

uint64_t outrider_noise_key(uint64_t seed, uint64_t choice, uint64_t position, uint64_t stream) {
  return noise_key(seed, choice, position, stream);
}

int64_t outrider_item_bytes() { return sizeof(Item); }
}
#pragma GCC visibility pop
