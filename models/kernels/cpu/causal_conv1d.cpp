// The depthwise causal convolution of models/layers/short_convolution.py with its activation, forward and backward, in one pass each.
// A task computes COLUMNS channels of a sequence, token by token. Their last TAPS inputs stay in registers or the L1 cache.
// Compiled for one REAL (float or bf16), TAPS, SILU (0 or 1) and COLUMNS, a multiple of 16 that divides the channels.
#include "vectors.h"

constexpr int V = COLUMNS / W, PAST = TAPS - 1;

struct Column {
  vec x[V];
};

static inline Column row(const REAL* p) {
  Column c;
  for (int j = 0; j < V; j++) c.x[j] = load(p + j * W);
  return c;
}

// before: [batch, PAST, channels], x, y: [batch, length, channels]; taps: float [TAPS, channels].
extern "C" void forward(const REAL* before, const REAL* x, const float* taps, REAL* y, int64_t batch, int64_t length,
                        int64_t channels, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t b = 0; b < batch; b++)
    for (int64_t c = 0; c < channels; c += COLUMNS) {
      Column window[TAPS], weight[TAPS];
      for (int i = 0; i < TAPS; i++)
        for (int j = 0; j < V; j++) weight[i].x[j] = load(taps + i * channels + c + j * W);
      for (int i = 0; i < PAST; i++) window[i + 1] = row(before + (b * PAST + i) * channels + c);
      for (int64_t t = 0; t < length; t++) {
        for (int i = 0; i < PAST; i++) window[i] = window[i + 1];
        window[PAST] = row(x + (b * length + t) * channels + c);
        for (int j = 0; j < V; j++) {
          vec total = {};
          for (int i = 0; i < TAPS; i++) total += window[i].x[j] * weight[i].x[j];
          store(y + (b * length + t) * channels + c + j * W, SILU ? total * sigmoid(total) : total);
        }
      }
    }
}

// d_taps: float [batch, TAPS, channels], the sums of each batch row. The other shapes are as in `forward`.
extern "C" void backward(const REAL* before, const REAL* x, const float* taps, const REAL* dy, REAL* d_before, REAL* dx,
                         float* d_taps, int64_t batch, int64_t length, int64_t channels, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t b = 0; b < batch; b++)
    for (int64_t c = 0; c < channels; c += COLUMNS) {
      // through[i]: the gradient of the input at t - PAST + i from the outputs up to t.
      Column window[TAPS], weight[TAPS], of_weight[TAPS] = {}, through[TAPS] = {};
      for (int i = 0; i < TAPS; i++)
        for (int j = 0; j < V; j++) weight[i].x[j] = load(taps + i * channels + c + j * W);
      for (int i = 0; i < PAST; i++) window[i + 1] = row(before + (b * PAST + i) * channels + c);
      for (int64_t t = 0; t < length + PAST; t++) {
        for (int i = 0; i < PAST; i++) through[i] = through[i + 1];
        through[PAST] = Column{};
        if (t < length) {
          for (int i = 0; i < PAST; i++) window[i] = window[i + 1];
          window[PAST] = row(x + (b * length + t) * channels + c);
          for (int j = 0; j < V; j++) {
            vec d = load(dy + (b * length + t) * channels + c + j * W);
            if (SILU) {
              vec total = {};
              for (int i = 0; i < TAPS; i++) total += window[i].x[j] * weight[i].x[j];
              const vec open = sigmoid(total);
              d *= open * (1.0f + total * (1.0f - open));
            }
            for (int i = 0; i < TAPS; i++) {
              of_weight[i].x[j] += d * window[i].x[j];
              through[i].x[j] += d * weight[i].x[j];
            }
          }
        }
        REAL* const out = t < PAST ? d_before + (b * PAST + t) * channels : dx + (b * length + t - PAST) * channels;
        for (int j = 0; j < V; j++) store(out + c + j * W, through[0].x[j]);
      }
      for (int i = 0; i < TAPS; i++)
        for (int j = 0; j < V; j++) store(d_taps + (b * TAPS + i) * channels + c + j * W, of_weight[i].x[j]);
    }
}
