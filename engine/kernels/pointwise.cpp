// Row-wise operations between the linears: residual add with RMSNorm, SiLU(gate)·up, row gathers.
// Each row is computed alone, by one thread, in one order; `dim` is a multiple of 16.

#include "simd.h"

namespace outrider {
namespace {

constexpr int64_t kParallelElements = 16384;

// normed = weight · T(x · rsqrt(mean(x²) + epsilon)) with x = T(residual + delta), as in Hugging Face Llama.
template <typename T>
void add_norm_row(T* residual, const T* delta, const T* weight, T* normed, int dim, float epsilon) {
  Lanes squares = splat(0.0f);
  for (int i = 0; i < dim; i += kLanes) {
    Lanes x = load(residual + i);
    if (delta != nullptr) {
      store(residual + i, add(x, load(delta + i)));
      x = load(residual + i);
    }
    squares = fused(x, x, squares);
  }
  const Lanes scale = splat(1.0f / std::sqrt(sum(squares) / static_cast<float>(dim) + epsilon));
  for (int i = 0; i < dim; i += kLanes) {
    store(normed + i, multiply(load(residual + i), scale));
    store(normed + i, multiply(load(normed + i), load(weight + i)));
  }
}

template <typename T>
void add_norm(T* residual, const T* delta, const T* weight, T* normed, int64_t rows, int dim, float epsilon) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t offset = row * dim;
    add_norm_row(residual + offset, delta == nullptr ? nullptr : delta + offset, weight, normed + offset, dim, epsilon);
  }
}

// product = T(silu(gate)) · up; gate_up holds [gate, up] side by side.
template <typename T>
void silu_multiply_row(const T* gate_up, T* product, int dim) {
  const Lanes one = splat(1.0f);
  const Lanes minus_log2_e = splat(-1.44269504f);
  for (int i = 0; i < dim; i += kLanes) {
    const Lanes gate = load(gate_up + i);
    const Lanes activated = divide(gate, add(one, power_of_two(multiply(gate, minus_log2_e))));
    store(product + i, activated);
    store(product + i, multiply(load(product + i), load(gate_up + dim + i)));
  }
}

template <typename T>
void silu_multiply(const T* gate_up, T* product, int64_t rows, int dim) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * dim >= kParallelElements)
  for (int64_t row = 0; row < rows; ++row) {
    silu_multiply_row(gate_up + 2 * row * dim, product + row * dim, dim);
  }
}

}  // namespace
}  // namespace outrider

using outrider::BFloat16;

#define OUTRIDER_EXPORT __attribute__((visibility("default")))

extern "C" {

OUTRIDER_EXPORT void outrider_add_norm_bfloat16(BFloat16* residual, const BFloat16* delta, const BFloat16* weight, BFloat16* normed,
                                int64_t rows, int dim, float epsilon) {
  outrider::add_norm(residual, delta, weight, normed, rows, dim, epsilon);
}

OUTRIDER_EXPORT void outrider_add_norm_float32(float* residual, const float* delta, const float* weight, float* normed, int64_t rows,
                               int dim, float epsilon) {
  outrider::add_norm(residual, delta, weight, normed, rows, dim, epsilon);
}

OUTRIDER_EXPORT void outrider_silu_multiply_bfloat16(const BFloat16* gate_up, BFloat16* product, int64_t rows, int dim) {
  outrider::silu_multiply(gate_up, product, rows, dim);
}

OUTRIDER_EXPORT void outrider_silu_multiply_float32(const float* gate_up, float* product, int64_t rows, int dim) {
  outrider::silu_multiply(gate_up, product, rows, dim);
}
}
