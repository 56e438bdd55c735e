// Penalties, bias and bans of one choice along a draft path (DESIGN §5), applied to the ids they touch only.
#pragma once

#include <algorithm>
#include <vector>

#include "arithmetic.h"

namespace sampling {

// Mirrors decode/sampling/native.py ITEM_DTYPE: 8-byte fields only. Offsets are into `pool` or `values`.
struct Item {
  int64_t logits_row, num_nodes, nodes, path, path_count;
  uint64_t seed, choice, position, stream;
  int64_t top_k;
  double temperature, top_p, min_p, repetition, presence, frequency;  // temperature 0: greedy
  int64_t prompt, prompt_count, output, output_count, bias, bias_count, bias_values;
  int64_t bad_words, bad_words_count, tail, tail_count, stops, stops_count, min_remaining, result;
};

enum Error : int64_t { kFine = 0, kNotFinite = 1, kBadWords = 2, kMinTokens = 3 };

class Constraints {
 public:
  void begin(const Item& item, const int64_t* pool, const double* values, int64_t vocabulary) {
    item_ = &item;
    pool_ = pool;
    values_ = values;
    for (const int64_t id : touched_) counts_[id] = seen_[id] = 0;
    touched_.clear();
    if ((int64_t)seen_.size() < vocabulary) {
      seen_.resize(vocabulary, 0);
      counts_.resize(vocabulary, 0);
    }
    vocabulary_ = vocabulary;
    depth_ = 0;
    tail_.assign(pool + item.tail, pool + item.tail + item.tail_count);
    penalised_ = item.repetition != 1.0 || item.presence != 0.0 || item.frequency != 0.0;
    if (penalised_) {
      for (int64_t i = 0; i < item.prompt_count; ++i) see(pool[item.prompt + i], 0);
      for (int64_t i = 0; i < item.output_count; ++i) see(pool[item.output + 2 * i], pool[item.output + 2 * i + 1]);
    }
    for (int64_t i = 0; i < item.path_count; ++i) descend(pool[item.path + i]);
  }

  void descend(int64_t token_id) {
    ++depth_;
    if (penalised_) see(token_id, 1);
    if (item_->bad_words_count) tail_.push_back(token_id);
  }

  bool active() const {
    return penalised_ || item_->bias_count || item_->bad_words_count || stops_active();
  }

  // The row after penalties, bias, bad words and min_tokens. False: a raw value that counts is NaN or +inf.
  bool apply(const float* raw, std::vector<float>& row, Error last = kMinTokens) {
    row.assign(raw, raw + vocabulary_);
    bool valid = true;
    if (penalised_)
      for (const int64_t id : touched_) row[id] = penalise(row[id], counts_[id]);
    for (int64_t i = 0; i < item_->bias_count; ++i) {
      const int64_t id = pool_[item_->bias + i];
      if (in_vocabulary(id)) row[id] = row[id] + (float)values_[item_->bias_values + i];
    }
    auto ban = [&](int64_t id) {
      if (!in_vocabulary(id)) return;
      valid = valid && (raw[id] <= __FLT_MAX__);
      row[id] = -INFINITY;
    };
    if (last >= kBadWords) ban_words(ban);
    if (last >= kMinTokens && stops_active())
      for (int64_t i = 0; i < item_->stops_count; ++i) ban(pool_[item_->stops + i]);
    return valid;
  }

  // Which stage left nothing of `raw`.
  Error exhausted(const float* raw, std::vector<float>& row) {
    for (const Error last : {kFine, kBadWords}) {
      apply(raw, row, last);
      if (*std::max_element(row.begin(), row.end()) == -INFINITY) return last == kFine ? kNotFinite : last;
    }
    return kMinTokens;
  }

 private:
  bool in_vocabulary(int64_t id) const { return id >= 0 && id < vocabulary_; }
  bool stops_active() const { return item_->stops_count && depth_ < item_->min_remaining; }

  void see(int64_t id, int64_t times) {
    if (!in_vocabulary(id)) return;
    if (!seen_[id]) touched_.push_back(id);
    seen_[id] = 1;
    counts_[id] += (int32_t)times;
  }

  float penalise(float x, int32_t times) const {
    const float repetition = (float)item_->repetition;
    if (repetition != 1.0f) x = x > 0.0f ? x / repetition : x * repetition;
    if (times == 0) return x;
    x = x - (float)item_->frequency * (float)times;
    return x - (float)item_->presence;
  }

  template <typename Ban>
  void ban_words(Ban ban) const {
    const int64_t* word = pool_ + item_->bad_words;
    for (int64_t i = 0; i < item_->bad_words_count; ++i) {
      const int64_t before = word[0] - 1;
      const int64_t* ids = word + 1;
      if (before <= (int64_t)tail_.size() && std::equal(ids, ids + before, tail_.end() - before)) ban(ids[before]);
      word += 1 + word[0];
    }
  }

  const Item* item_ = nullptr;
  const int64_t* pool_ = nullptr;
  const double* values_ = nullptr;
  int64_t vocabulary_ = 0, depth_ = 0;
  bool penalised_ = false;
  std::vector<char> seen_;
  std::vector<int32_t> counts_;
  std::vector<int64_t> touched_, tail_;
};

}  // namespace sampling
