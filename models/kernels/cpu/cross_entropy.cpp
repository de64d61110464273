// Cross entropy of rows of logits (models/operators/cross_entropy.py): statistics, and the gradient in place of the logits. Each
// function reads a row once; the row stays in the cache. Compiled for one REAL (float or bf16). The vocabulary is a multiple of 16.
#include "vectors.h"

static inline vec logit(const REAL* z, const float* bias, int64_t j) { return bias ? load(z + j) + load(bias + j) : load(z + j); }

static inline float one(const REAL* z, const float* bias, int64_t j) { return number(z[j]) + (bias ? bias[j] : 0.0f); }

// Per row z + bias (bias may be null): the largest logit, its first index (unless `best` is null), sum exp(z - largest), z[label].
extern "C" void statistics(const REAL* logits, const float* bias, const int64_t* label, float* largest, int64_t* best, float* mass, float* chosen,
                           int64_t rows, int64_t vocab, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    const REAL* const z = logits + row * vocab;
    vec top = logit(z, bias, 0);
    for (int64_t j = 0; j < vocab; j += W) {
      const vec x = logit(z, bias, j);
      top = x > top ? x : top;
    }
    float high = top[0];
    for (int i = 1; i < W; i++) high = top[i] > high ? top[i] : high;
    vec total = {};
    for (int64_t j = 0; j < vocab; j += W) total += exp(logit(z, bias, j) - high);
    largest[row] = high;
    mass[row] = sum(total);
    chosen[row] = one(z, bias, label[row]);
    if (best) {
      int64_t j = 0;
      while (j < vocab - 1 && one(z, bias, j) != high) j++;
      best[row] = j;
    }
  }
}

// logits <- weight (exp(z + bias - log_sum) - [j == label]); a negative label is in another vocabulary shard.
extern "C" void gradient(REAL* logits, const float* bias, const int64_t* label, const float* log_sum, const float* weight, int64_t rows,
                         int64_t vocab, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row++) {
    REAL* const z = logits + row * vocab;
    const float own = label[row] < 0 ? 0.0f : one(z, bias, label[row]);
    for (int64_t j = 0; j < vocab; j += W) store(z + j, exp(logit(z, bias, j) - log_sum[row]) * weight[row]);
    if (label[row] >= 0) {
      const vec at = (exp(vec{} + own - log_sum[row]) - 1.0f) * weight[row];
      REAL narrow[W];
      store(narrow, at);
      z[label[row]] = narrow[0];
    }
  }
}
