// MetaLA's decay, recurrence and epilogue, token by token. A head's state stays in the L1 cache; all other tensors are read or
// written once. Equations: models/mixers/metala.py and models/operators/metala.py.
//
//   g = logsigmoid(a) / 16    alpha = exp(g)    k = 1 - alpha
//   S <- alpha S + k v        o = scale q S     x = o + sigmoid((sum_c q_c w_c k_c) v) - 1/2
//   n = (x - mean) / sqrt(var + eps)            y = SiLU(u) n
//
// Compiled for one REAL (float or bf16), and for KEYS and VALUES, the channels per head, multiples of 16.
// Tokens are consecutive; sequence s is bounds[s] to bounds[s + 1]. The state at the start of every CHUNK tokens is saved for the
// backward pass, at index bounds[s] / CHUNK + s + n for the n-th chunk of sequence s.
#include "vectors.h"

constexpr int K = KEYS / W, V = VALUES / W;

static inline int64_t place(const int64_t* bounds, int64_t s, int64_t heads, int64_t h, int64_t start) {
  return ((bounds[s] / CHUNK + s + (start - bounds[s]) / CHUNK) * heads + h) * KEYS * VALUES;
}

// alpha, k and sigmoid(-a).
static inline void gate(const REAL* a, float* alpha, float* k, float* slope) {
  for (int i = 0; i < K; i++) {
    const vec x = load(a + i * W);
    const vec z = exp(x < 0.0f ? x : -x);
    // log(1 + z) = 2 artanh(z / (2 + z)), to full relative precision: z is at most 1, the next term below 2e-9.
    const vec r = z / (2.0f + z), y = r * r;
    vec series = y * (1.0f / 15) + 1.0f / 13;
    series = series * y + 1.0f / 11;
    series = series * y + 1.0f / 9;
    series = series * y + 1.0f / 7;
    series = series * y + 0.2f;
    series = series * y + 1.0f / 3;
    series = series * y + 1.0f;
    const vec g = ((x < 0.0f ? x : vec{}) - 2.0f * r * series) * 0.0625f;
    const vec decay = exp(g);
    // 1 - exp(g) cancels for small g. The next term of the series is below 1e-8 of the sum.
    vec small = g * (1.0f / 720) + 1.0f / 120;
    small = small * g + 1.0f / 24;
    small = small * g + 1.0f / 6;
    small = small * g + 0.5f;
    small = -g * (small * g + 1.0f);
    store(alpha + i * W, decay);
    store(k + i * W, g > -0.125f ? small : 1.0f - decay);
    if (slope) store(slope + i * W, (x < 0.0f ? vec{} + 1.0f : z) / (1.0f + z));
  }
}

// next = alpha S + k v; returns q next in o.
static inline void step(const float* S, float* next, const float* alpha, const float* k, const float* q, const vec* v, vec* o) {
  vec sum[V] = {};
  for (int c = 0; c < KEYS; c++)
#pragma GCC unroll 16
    for (int j = 0; j < V; j++) {
      const vec s = load(S + c * VALUES + j * W) * alpha[c] + v[j] * k[c];
      store(next + c * VALUES + j * W, s);
      sum[j] += s * q[c];
    }
  for (int j = 0; j < V; j++) o[j] = sum[j];
}

// sigmoid(x) - 1/2, to full relative precision near 0 too.
static inline vec half_tanh(vec x) {
  const vec square = x * x;
  vec series = square * (-17.0f / 80640) + 1.0f / 480;
  series = series * square - 1.0f / 48;
  series = series * square + 0.25f;
  return square < 0.0625f ? x * series : sigmoid(x) - 0.5f;
}

// n, and for the backward pass 1 / sqrt(var + eps) and p = sigmoid(strength v) - 1/2.
static inline float normalized(const vec* o, const vec* v, float strength, float eps, vec* n, vec* p) {
  vec total = {}, square = {};
  for (int j = 0; j < V; j++) {
    p[j] = half_tanh(v[j] * strength);
    n[j] = o[j] + p[j];
    total += n[j];
  }
  const float mean = sum(total) / VALUES;
  for (int j = 0; j < V; j++) {
    n[j] -= mean;
    square += n[j] * n[j];
  }
  const float scale = 1.0f / __builtin_sqrtf(sum(square) / VALUES + eps);
  for (int j = 0; j < V; j++) n[j] *= scale;
  return scale;
}

// q, a: [tokens, heads, KEYS]; v, u, y: [tokens, heads, VALUES]; w: [heads, KEYS]; state: [sequences, heads, KEYS, VALUES],
// in: at the start, out: at the end; starts: the saved states as above, or null.
extern "C" void forward(const REAL* q, const REAL* a, const REAL* v, const REAL* w, const REAL* u, float* state, float* starts,
                        REAL* y, const int64_t* bounds, int64_t sequences, int64_t heads, float scale, float eps, int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t h = 0; h < heads; h++) {
      alignas(64) float S[KEYS * VALUES], alpha[KEYS], k[KEYS], qs[KEYS];
      float* const at = state + (s * heads + h) * KEYS * VALUES;
      std::memcpy(S, at, sizeof S);
      for (int64_t t = bounds[s]; t < bounds[s + 1]; t++) {
        if (starts && (t - bounds[s]) % CHUNK == 0) std::memcpy(starts + place(bounds, s, heads, h, t), S, sizeof S);
        const int64_t key = (t * heads + h) * KEYS, value = (t * heads + h) * VALUES;
        gate(a + key, alpha, k, nullptr);
        vec dot = {}, x[V], o[V], n[V], p[V];
        for (int i = 0; i < K; i++) {
          const vec qi = load(q + key + i * W);
          store(qs + i * W, qi * scale);
          dot += qi * load(w + h * KEYS + i * W) * load(k + i * W);
        }
        for (int j = 0; j < V; j++) x[j] = load(v + value + j * W);
        step(S, S, alpha, k, qs, x, o);
        normalized(o, x, sum(dot), eps, n, p);
        for (int j = 0; j < V; j++) {
          const vec g = load(u + value + j * W);
          store(y + value + j * W, g * sigmoid(g) * n[j]);
        }
      }
      std::memcpy(at, S, sizeof S);
    }
}

// The gradients of q, a, v and u are adjacent in a row of `stride` numbers per token; that of w is float32, one per sequence.
// d_state: in: of the final state, out: of the initial one.
extern "C" void backward(const REAL* q, const REAL* a, const REAL* v, const REAL* w, const REAL* u, const float* starts,
                         const REAL* dy, float* d_state, REAL* dq, REAL* da, REAL* dv, REAL* du, float* dw,
                         const int64_t* bounds, int64_t sequences, int64_t heads, int64_t stride, float scale, float eps,
                         int64_t threads) {
#pragma omp parallel for collapse(2) num_threads(threads)
  for (int64_t s = 0; s < sequences; s++)
    for (int64_t h = 0; h < heads; h++) {
      // For the chunk: the states before each token and after the last, and per token the values that the backward loop reads.
      alignas(64) float S[CHUNK + 1][KEYS * VALUES], alpha[CHUNK][KEYS], k[CHUNK][KEYS], slope[CHUNK][KEYS], qs[CHUNK][KEYS];
      alignas(64) float D[KEYS * VALUES], of_q[KEYS], of_k[KEYS];
      alignas(64) vec o[CHUNK][V];
      float* const at = d_state + (s * heads + h) * KEYS * VALUES;
      std::memcpy(D, at, sizeof D);
      vec of_w[K] = {};
      const int64_t begin = bounds[s], end = bounds[s + 1];
      for (int64_t start = begin + (end - begin - 1) / CHUNK * CHUNK; begin < end && start >= begin; start -= CHUNK) {
        const int count = end - start < CHUNK ? end - start : CHUNK;
        std::memcpy(S[0], starts + place(bounds, s, heads, h, start), sizeof S[0]);
        for (int i = 0; i < count; i++) {
          const int64_t key = ((start + i) * heads + h) * KEYS, value = ((start + i) * heads + h) * VALUES;
          gate(a + key, alpha[i], k[i], slope[i]);
          for (int c = 0; c < K; c++) store(qs[i] + c * W, load(q + key + c * W) * scale);
          vec x[V];
          for (int j = 0; j < V; j++) x[j] = load(v + value + j * W);
          step(S[i], S[i + 1], alpha[i], k[i], qs[i], x, o[i]);
        }
        // d/dg_t = sum over j of (S D) after t + sum over the later tokens of the chunk of q dq - k dk.
        float tail[KEYS];
        for (int c = 0; c < KEYS; c++) {
          vec total = {};
          for (int j = 0; j < V; j++) total += load(S[count] + c * VALUES + j * W) * load(D + c * VALUES + j * W);
          tail[c] = sum(total);
        }
        for (int i = count - 1; i >= 0; i--) {
          const int64_t t = start + i, key = (t * heads + h) * KEYS, value = (t * heads + h) * VALUES;
          vec dot = {}, x[V], n[V], p[V], d[V], mean_d = {}, mean_dn = {}, d_strength = {}, dx[V];
          for (int c = 0; c < K; c++) dot += load(q + key + c * W) * load(w + h * KEYS + c * W) * load(k[i] + c * W);
          for (int j = 0; j < V; j++) x[j] = load(v + value + j * W);
          const float strength = sum(dot), rate = normalized(o[i], x, strength, eps, n, p);
          for (int j = 0; j < V; j++) {
            const vec g = load(u + value + j * W), open = sigmoid(g), of_y = load(dy + value + j * W);
            store(du + t * stride + h * VALUES + j * W, of_y * n[j] * open * (1.0f + g * (1.0f - open)));
            d[j] = of_y * g * open;
            mean_d += d[j];
            mean_dn += d[j] * n[j];
          }
          const float a0 = sum(mean_d) / VALUES, a1 = sum(mean_dn) / VALUES;
          for (int j = 0; j < V; j++) {
            d[j] = (d[j] - a0 - n[j] * a1) * rate;
            const vec through = d[j] * (0.25f - p[j] * p[j]);
            d_strength += through * x[j];
            dx[j] = through * strength;
          }
          const float ds = sum(d_strength);
          for (int c = 0; c < KEYS; c++) {
            vec from_q = {}, from_k = {};
#pragma GCC unroll 16
            for (int j = 0; j < V; j++) {
              const vec whole = load(D + c * VALUES + j * W) + d[j] * qs[i][c];
              from_q += load(S[i + 1] + c * VALUES + j * W) * d[j];
              from_k += whole * x[j];
              dx[j] += whole * k[i][c];
              store(D + c * VALUES + j * W, whole * alpha[i][c]);
            }
            of_q[c] = sum(from_q);
            of_k[c] = sum(from_k);
          }
          for (int c = 0; c < K; c++) {
            const int b = c * W;
            const vec key_c = load(k[i] + b), weight = load(w + h * KEYS + b), query = load(q + key + b);
            const vec g = load(tail + b) + load(qs[i] + b) * load(of_q + b) - key_c * load(of_k + b);
            store(tail + b, g);
            store(dq + t * stride + h * KEYS + b, load(of_q + b) * scale + weight * key_c * ds);
            const vec dk = load(of_k + b) + query * weight * ds;
            store(da + t * stride + h * KEYS + b, (g - dk * load(alpha[i] + b)) * load(slope[i] + b) * 0.0625f);
            of_w[c] += query * key_c * ds;
          }
          for (int j = 0; j < V; j++) store(dv + t * stride + h * VALUES + j * W, dx[j]);
        }
      }
      std::memcpy(at, D, sizeof D);
      for (int c = 0; c < K; c++) store(dw + (s * heads + h) * KEYS + c * W, of_w[c]);
    }
}
