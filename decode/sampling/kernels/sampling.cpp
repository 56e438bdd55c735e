// Draws and walks a whole step (C ABI). The plain twin and oracle is decode/sampling/reference.py.

#include <omp.h>

#include "children.h"

namespace sampling {
namespace {

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

// The first `wanted` draws without replacement from explicit weights, in order; how many there are.
int64_t outrider_earliest(const double* weights, int64_t count, uint64_t key, int64_t wanted, int64_t* ids) {
  Earliest earliest{key, wanted};
  for (int64_t id = 0; id < count; ++id)
    if (weights[id] > 0.0) earliest.enter(id, weights[id]);
  int64_t drawn = 0;
  for (const auto& [time, id] : earliest.sorted()) ids[drawn++] = id;
  return drawn;
}

// Up to widths[i] children at item i's logits row, past its path: ids and scores from starts[i] on.
// counts[i]: how many; -1 where nothing can be drawn.
void outrider_children(const float* logits, int64_t vocabulary, const Item* items, int64_t num_items,
                       const int64_t* pool, const double* values, const int64_t* widths, const int64_t* starts,
                       int64_t* ids, double* scores, int64_t* counts, int64_t num_threads) {
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1 && num_items > 1)
  for (int64_t i = 0; i < num_items; ++i) {
    const Item& item = items[i];
    Workspace& space = workspace();
    space.constraints.begin(item, pool, values, vocabulary);
    counts[i] = -1;
    if (process(space, logits + item.logits_row * vocabulary, vocabulary) != kFine) continue;
    int64_t* const first = ids + starts[i];
    double* const score = scores + starts[i];
    counts[i] = item.temperature == 0.0 ? largest_children(space.row, widths[i], first, score)
                                        : earliest_children(space, item, widths[i], first, score);
  }
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
