// Rotary embedding, writing K and V to their slots, and attention over paged K and V.
//
// Exact by construction: a row visits the absolute positions of its own path in order, in tiles of
// kTile, with a running maximum and sum in float32 (Milakov and Gimelshein 2018, "Online normalizer
// calculation for softmax"). Which rows share a call decides only which loads are shared.

#include <algorithm>
#include <vector>

#include "attention_tile.h"
#include "simd.h"

namespace outrider {

// What stays the same over all layers of a step. Mirrors `_StepArrays` in attention_native.py.
struct StepArrays {
  const int32_t* positions;        // [rows] absolute
  const int32_t* tail_begin;       // [rows] first entry of the row's path in tail_slots
  const int32_t* tail_slots;       // slots of positions start, start + 1, … of a path; the first `rows` are write slots
  const int32_t* block_ids;        // block tables, one behind another
  const int32_t* sequence_start;   // [sequences] first position that is not committed
  const int32_t* sequence_chain;   // [sequences] 1: all rows lie on one path
  const int32_t* sequence_blocks;  // [sequences] first entry in block_ids
  const int32_t* units;            // [units][3] sequence, first row, end row
  int32_t num_rows;
  int32_t num_units;
  int32_t block_size;
  int32_t work;                    // positions read by all rows together, a guide for threading
  int32_t heads_at_once;           // KV heads of a task; neither this nor `units` changes a result
};

// Mirrors `_HeadShape` in attention_native.py.
struct HeadShape {
  const float* cosines;  // [positions][head_dim / 2]
  const float* sines;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  float scale;           // of the logits, log2(e) folded in
};

namespace {

// target may be source. Each pair (i, i + half) turns by its own angle, in float32, rounded once.
template <typename T>
void rotate(const T* source, T* target, const float* cosines, const float* sines, int half) {
  if (half % kLanes == 0) {
    for (int i = 0; i < half; i += kLanes) {
      const Lanes first = load(source + i), second = load(source + i + half);
      const Lanes cosine = load(cosines + i), sine = load(sines + i);
      store(target + i, fused(first, cosine, subtract(splat(0.0f), multiply(second, sine))));
      store(target + i + half, fused(second, cosine, multiply(first, sine)));
    }
    return;
  }
  for (int i = 0; i < half; ++i) {
    const float first = to_float(source[i]), second = to_float(source[i + half]);
    from_float(std::fma(first, cosines[i], -(second * sines[i])), target + i);
    from_float(std::fma(second, cosines[i], first * sines[i]), target + i + half);
  }
}

// Rotates Q in place, K into its slot, and copies V into its slot. qkv: [rows][(heads + 2·kv_heads)·head_dim].
template <typename T>
void write_rows(const StepArrays& step, const HeadShape& shape, T* qkv, T* keys, T* values) {
  const int dim = shape.head_dim, half = dim / 2;
  const int64_t kv_width = static_cast<int64_t>(shape.num_kv_heads) * dim;
  const int64_t query_width = static_cast<int64_t>(shape.num_heads) * dim;
#pragma omp parallel for schedule(static) if (step.num_rows >= 16)
  for (int row = 0; row < step.num_rows; ++row) {
    T* queries = qkv + row * (query_width + 2 * kv_width);
    const T* new_keys = queries + query_width;
    const T* new_values = new_keys + kv_width;
    const float* cosines = shape.cosines + static_cast<int64_t>(step.positions[row]) * half;
    const float* sines = shape.sines + static_cast<int64_t>(step.positions[row]) * half;
    T* key_slot = keys + step.tail_slots[row] * kv_width;
    for (int head = 0; head < shape.num_heads; ++head)
      rotate(queries + head * dim, queries + head * dim, cosines, sines, half);
    for (int head = 0; head < shape.num_kv_heads; ++head)
      rotate(new_keys + head * dim, key_slot + head * dim, cosines, sines, half);
    std::memcpy(values + step.tail_slots[row] * kv_width, new_values, kv_width * sizeof(T));
  }
}

// Attention of the rows of one unit for some KV heads. Heads lie side by side in a slot, so a task that takes
// them all reads memory in one stream.
template <typename T, int kVectors>
class UnitAttention {
 public:
  UnitAttention(const StepArrays& step, const HeadShape& shape, const T* keys, const T* values)
      : step_(step), shape_(shape), keys_(keys), values_(values), group_(shape.num_heads / shape.num_kv_heads) {}

  void run(const int32_t* unit, int first_head, int num_heads, const T* qkv, T* output) {
    sequence_ = unit[0];
    first_row_ = unit[1];
    end_row_ = unit[2];
    first_head_ = first_head;
    num_heads_ = num_heads;
    start_queries(qkv);
    int end = 0;
    for (int row = first_row_; row < end_row_; ++row) end = std::max(end, step_.positions[row] + 1);
    const bool chain = step_.sequence_chain[sequence_] != 0;
    const int shared_end = chain ? end : step_.sequence_start[sequence_] / kTile * kTile;
    find_slots(end_row_ - 1, 0, std::min(kTile, shared_end), next_slots_);
    for (int tile_start = 0; tile_start < end; tile_start += kTile) {
      if (tile_start < shared_end)
        visit_shared(tile_start, std::min(kTile, end - tile_start), std::min(kTile, shared_end - tile_start - kTile));
      else
        visit_own(tile_start);
    }
    finish_queries(output);
  }

 private:
  static constexpr int kDim = kVectors * kLanes;
  static constexpr int kInPlace = 3;  // queries of a row that visit a tile at once

  Query<kVectors>& query(int row, int head, int member) {
    return queries_[(static_cast<size_t>(row - first_row_) * num_heads_ + head) * group_ + member];
  }

  int query_head(int head, int member) const { return (first_head_ + head) * group_ + member; }

  void start_queries(const T* qkv) {
    const int64_t width = static_cast<int64_t>(shape_.num_heads + 2 * shape_.num_kv_heads) * kDim;
    queries_.resize(static_cast<size_t>(end_row_ - first_row_) * num_heads_ * group_);
    for (int row = first_row_; row < end_row_; ++row) {
      for (int head = 0; head < num_heads_; ++head) {
        for (int member = 0; member < group_; ++member) {
          Query<kVectors>& state = query(row, head, member);
          const T* source = qkv + row * width + query_head(head, member) * kDim;
          for (int v = 0; v < kVectors; ++v) {
            store(state.query + v * kLanes, load(source + v * kLanes));
            store(state.weighted + v * kLanes, splat(0.0f));
          }
          state.maximum = -INFINITY;
          state.total = 0.0f;
        }
      }
    }
  }

  // Slots of positions tile_start … tile_start + count - 1 of `row`'s path.
  void find_slots(int row, int tile_start, int count, int64_t* slots) const {
    const int start = step_.sequence_start[sequence_];
    const int32_t* blocks = step_.block_ids + step_.sequence_blocks[sequence_];
    const int32_t* tail = step_.tail_slots + step_.tail_begin[row];
    int block = tile_start / step_.block_size, offset = tile_start % step_.block_size;
    for (int t = 0; t < count; ++t) {
      const int position = tile_start + t;
      if (position >= start) {
        slots[t] = tail[position - start];
      } else {
        slots[t] = static_cast<int64_t>(blocks[block]) * step_.block_size + offset;
        if (++offset == step_.block_size) ++block, offset = 0;
      }
    }
  }

  // A tile that all rows of the unit see alike; `next_count` positions of the tile behind it are fetched ahead.
  void visit_shared(int tile_start, int count, int next_count) {
    std::copy(next_slots_, next_slots_ + kTile, slots_);
    find_slots(end_row_ - 1, tile_start + kTile, next_count, next_slots_);
    num_next_ = std::max(0, next_count);
    fetched_ = 0;
    for (int head = 0; head < num_heads_; ++head) {
      visit_head(head, tile_start, count, first_row_, end_row_);
    }
  }

  // A tile in which the rows of a tree may part.
  void visit_own(int tile_start) {
    num_next_ = 0;
    for (int row = first_row_; row < end_row_; ++row) {
      const int count = std::min(kTile, step_.positions[row] + 1 - tile_start);
      if (count <= 0) continue;
      find_slots(row, tile_start, count, slots_);
      for (int head = 0; head < num_heads_; ++head) visit_head(head, tile_start, count, row, row + 1);
    }
  }

  // The tile of slots_ with the queries of some rows; a row alone reads it in place.
  void visit_head(int head, int tile_start, int count, int first_row, int end_row) {
    if (end_row - first_row == 1 && group_ <= kInPlace) {
      for (int t = 0; t < kTile; ++t) {
        const int64_t offset = offset_of(slots_[t < count ? t : 0], head);
        in_place_.keys[t] = keys_ + offset;
        in_place_.values[t] = values_ + offset;
      }
      visit_row(first_row, head, tile_start, in_place_);
      return;
    }
    read_tile(head, count);
    for (int row = first_row; row < end_row; ++row) visit_row(row, head, tile_start, tile_);
  }

  template <typename Keys>
  void visit_row(int row, int head, int tile_start, const Keys& tile) {
    const int count = std::min(kTile, step_.positions[row] + 1 - tile_start);
    if (count <= 0) return;
    visit_tile(&query(row, head, 0), group_, tile, count, shape_.scale, [this, head] { fetch_ahead(head); });
  }

  int64_t offset_of(int64_t slot, int head) const { return (slot * shape_.num_kv_heads + first_head_ + head) * kDim; }

  // A few slots of the tile behind this one, whole and in order, spread over the work so that the memory always has
  // some under way; each head's visit fetches its share.
  void fetch_ahead(int head) {
    const int end = std::min(num_next_ * (head + 1) / num_heads_, fetched_ + 1);
    for (; fetched_ < end; ++fetched_) {
      const int64_t offset = offset_of(next_slots_[fetched_], 0);
      for (int64_t element = 0; element < num_heads_ * kDim; element += 64 / static_cast<int>(sizeof(T))) {
        __builtin_prefetch(keys_ + offset + element, 0, 2);
        __builtin_prefetch(values_ + offset + element, 0, 2);
      }
    }
  }

  // K and V of slots_; the keys behind `count` are zeroed, and never read from slots.
  void read_tile(int head, int count) {
    for (int t = 0; t < count; ++t) {
      const int64_t offset = offset_of(slots_[t], head);
      for (int v = 0; v < kVectors; ++v) {
        store(tile_.keys + t * kDim + v * kLanes, load(keys_ + offset + v * kLanes));
        store(tile_.values + t * kDim + v * kLanes, load(values_ + offset + v * kLanes));
      }
    }
    for (int t = count; t < kTile; ++t)
      for (int v = 0; v < kVectors; ++v) store(tile_.keys + t * kDim + v * kLanes, splat(0.0f));
  }

  void finish_queries(T* output) {
    for (int row = first_row_; row < end_row_; ++row) {
      for (int head = 0; head < num_heads_; ++head) {
        for (int member = 0; member < group_; ++member) {
          const Query<kVectors>& state = query(row, head, member);
          T* target = output + (static_cast<int64_t>(row) * shape_.num_heads + query_head(head, member)) * kDim;
          const Lanes total = splat(state.total);
          for (int v = 0; v < kVectors; ++v)
            store(target + v * kLanes, divide(load(state.weighted + v * kLanes), total));
        }
      }
    }
  }

  const StepArrays& step_;
  const HeadShape& shape_;
  const T* keys_;
  const T* values_;
  int group_;
  int sequence_ = 0;
  int first_row_ = 0;
  int end_row_ = 0;
  int first_head_ = 0;
  int num_heads_ = 0;
  int num_next_ = 0;
  int fetched_ = 0;
  int64_t slots_[kTile] = {};
  int64_t next_slots_[kTile] = {};
  Tile<kVectors> tile_;
  TileInPlace<T, kVectors> in_place_;
  std::vector<Query<kVectors>> queries_;
};

template <typename T, int kVectors>
void attend_units(const StepArrays& step, const HeadShape& shape, const T* qkv, const T* keys, const T* values,
                  T* output) {
  const int heads_at_once = step.heads_at_once;
  const int tasks_per_unit = (shape.num_kv_heads + heads_at_once - 1) / heads_at_once;
  const int num_tasks = step.num_units * tasks_per_unit;
#pragma omp parallel if (num_tasks > 1 && step.work >= 64)
  {
    UnitAttention<T, kVectors> attention(step, shape, keys, values);
#pragma omp for schedule(dynamic, 1)
    for (int task = 0; task < num_tasks; ++task) {
      const int first_head = task % tasks_per_unit * heads_at_once;
      const int num_heads = std::min(heads_at_once, shape.num_kv_heads - first_head);
      attention.run(step.units + 3 * (task / tasks_per_unit), first_head, num_heads, qkv, output);
    }
  }
}

// Returns 0, or 1 where head_dim is not one of those compiled.
template <typename T>
int attend(const StepArrays& step, const HeadShape& shape, T* qkv, T* keys, T* values, T* output) {
  if (shape.head_dim % kLanes != 0) return 1;
  write_rows(step, shape, qkv, keys, values);
  switch (shape.head_dim / kLanes) {
    case 1: attend_units<T, 1>(step, shape, qkv, keys, values, output); return 0;
    case 2: attend_units<T, 2>(step, shape, qkv, keys, values, output); return 0;
    case 4: attend_units<T, 4>(step, shape, qkv, keys, values, output); return 0;
    case 5: attend_units<T, 5>(step, shape, qkv, keys, values, output); return 0;
    case 6: attend_units<T, 6>(step, shape, qkv, keys, values, output); return 0;
    case 8: attend_units<T, 8>(step, shape, qkv, keys, values, output); return 0;
    default: return 1;
  }
}

}  // namespace
}  // namespace outrider

#define OUTRIDER_EXPORT __attribute__((visibility("default")))

extern "C" {

OUTRIDER_EXPORT int outrider_attend_bfloat16(const outrider::StepArrays* step, const outrider::HeadShape* shape,
                             outrider::BFloat16* qkv, outrider::BFloat16* keys, outrider::BFloat16* values,
                             outrider::BFloat16* output) {
  return outrider::attend(*step, *shape, qkv, keys, values, output);
}

OUTRIDER_EXPORT int outrider_attend_float32(const outrider::StepArrays* step, const outrider::HeadShape* shape, float* qkv,
                            float* keys, float* values, float* output) {
  return outrider::attend(*step, *shape, qkv, keys, values, output);
}

}
