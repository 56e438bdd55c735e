// What one tile of positions adds to the attention of a few queries.
#pragma once

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace outrider {

constexpr int kTile = 32;

// One tile of K and V in float32, for several rows to share.
template <int kVectors>
struct Tile {
  alignas(64) float keys[kTile * kVectors * kLanes];
  alignas(64) float values[kTile * kVectors * kLanes];

  Lanes key(int t, int v) const { return load(keys + (t * kVectors + v) * kLanes); }
  Lanes value(int t, int v) const { return load(values + (t * kVectors + v) * kLanes); }
};

// The same tile where it lies: what one row reads once needs no copy.
template <typename T, int kVectors>
struct TileInPlace {
  const T* keys[kTile];
  const T* values[kTile];

  Lanes key(int t, int v) const { return load(keys[t] + v * kLanes); }
  Lanes value(int t, int v) const { return load(values[t] + v * kLanes); }
};

// Running softmax of one query vector.
template <int kVectors>
struct Query {
  alignas(64) float query[kVectors * kLanes];
  alignas(64) float weighted[kVectors * kLanes];
  float maximum;
  float total;
};

// What one tile adds to one query: softmax weights against the new maximum, and the decay of what was there.
struct TileWeights {
  alignas(64) float weights[kTile];
  alignas(64) float decay[kLanes];
};

// Products of four keys with each query, and of them the sums over quarters of the lanes, four keys side by side.
template <int kVectors, int kMembers, typename Keys>
void multiply_keys(const Query<kVectors>* states, const Keys& tile, int first, Lanes (*quads)[kTile / 4]) {
  Lanes products[kMembers][4];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    Lanes queries[kMembers];
    for (int m = 0; m < kMembers; ++m) queries[m] = load(states[m].query + v * kLanes);
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const Lanes key = tile.key(first + t, v);
      for (int m = 0; m < kMembers; ++m)
        products[m][t] = v == 0 ? multiply(queries[m], key) : fused(queries[m], key, products[m][t]);
    }
  }
  for (int m = 0; m < kMembers; ++m) quads[m][first / 4] = quarter_sums(products[m]);
}

template <int kVectors>
void weigh_tile(Query<kVectors>& state, const Lanes* quads, int count, float scale, TileWeights& result) {
  Lanes scores[2];
  for (int half = 0; half < 2; ++half) {
    if (half * kLanes >= count) {
      scores[half] = splat(-INFINITY);
      continue;
    }
    const Lanes scaled = multiply(sums_of_quarters(quads + 4 * half), splat(scale));
    scores[half] = keep(first_lanes(count - half * kLanes), scaled, -INFINITY);
  }
  const float highest = std::max(state.maximum, largest(maximum(scores[0], scores[1])));
  Lanes weight_sum = splat(0.0f);
  for (int half = 0; half < 2; ++half) {
    const int valid = std::max(0, count - half * kLanes);
    const Lanes weight = keep(first_lanes(valid), power_of_two(subtract(scores[half], splat(highest))), 0.0f);
    store(result.weights + half * kLanes, weight);
    weight_sum = add(weight_sum, weight);
  }
  store(result.decay, power_of_two(splat(state.maximum - highest)));
  state.total = std::fma(state.total, result.decay[0], sum(weight_sum));
  state.maximum = highest;
}

// Visits a tile with kMembers queries at once: their sums are independent chains, each in the order of positions.
// `pause` is called every four positions, of keys and again of values: work that hides behind the arithmetic.
// A tile has kTile readable keys; what those behind `count` hold changes nothing.
template <int kVectors, int kMembers, typename Keys, typename Pause>
void visit_tile(Query<kVectors>* states, const Keys& tile, int count, float scale, Pause pause) {
  Lanes quads[kMembers][kTile / 4];
  for (int first = 0; first < (count + kLanes - 1) / kLanes * kLanes; first += 4) {
    multiply_keys<kVectors, kMembers>(states, tile, first, quads);
    pause();
  }
  TileWeights tile_weights[kMembers];
  Lanes weighted[kMembers][kVectors];
  for (int m = 0; m < kMembers; ++m) {
    weigh_tile(states[m], quads[m], count, scale, tile_weights[m]);
    const Lanes decay = load(tile_weights[m].decay);
    for (int v = 0; v < kVectors; ++v) weighted[m][v] = multiply(load(states[m].weighted + v * kLanes), decay);
  }
  for (int t = 0; t < count; ++t) {
    for (int v = 0; v < kVectors; ++v) {
      const Lanes value = tile.value(t, v);
      for (int m = 0; m < kMembers; ++m)
        weighted[m][v] = fused(splat(tile_weights[m].weights[t]), value, weighted[m][v]);
    }
    if (t % 4 == 0) pause();
  }
  for (int m = 0; m < kMembers; ++m)
    for (int v = 0; v < kVectors; ++v) store(states[m].weighted + v * kLanes, weighted[m][v]);
}

template <int kVectors, typename Keys, typename Pause>
void visit_tile(Query<kVectors>* states, int num_members, const Keys& tile, int count, float scale, Pause pause) {
  for (; num_members >= 3; num_members -= 3, states += 3) visit_tile<kVectors, 3>(states, tile, count, scale, pause);
  if (num_members == 2) visit_tile<kVectors, 2>(states, tile, count, scale, pause);
  if (num_members == 1) visit_tile<kVectors, 1>(states, tile, count, scale, pause);
}

}  // namespace outrider
