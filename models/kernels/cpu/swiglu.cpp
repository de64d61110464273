// SiLU(gate) * up, forward and backward, in one pass each. Compiled for one REAL (float or bf16).
#include "vectors.h"

// All tensors have `count` numbers, a multiple of 16.
extern "C" void forward(const REAL* gate, const REAL* up, REAL* y, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t i = 0; i < count; i += W) {
    const vec g = load(gate + i);
    store(y + i, g * sigmoid(g) * load(up + i));
  }
}

extern "C" void backward(const REAL* gate, const REAL* up, const REAL* dy, REAL* d_gate, REAL* d_up, int64_t rows,
                         int64_t columns, int64_t stride, int64_t threads) {
#pragma omp parallel for num_threads(threads)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t j = 0; j < columns; j += W) {
      const int64_t i = row * columns + j, out = row * stride + j;
      const vec g = load(gate + i), d = load(dy + i), open = sigmoid(g);
      store(d_gate + out, d * load(up + i) * open * (1.0f + g * (1.0f - open)));
      store(d_up + out, d * g * open);
    }
}
