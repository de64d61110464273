// Vectors of 16 float32 in the vector extensions of GCC and Clang, with loads from and stores to bfloat16.
#pragma once
#include <cstdint>
#include <cstring>

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

constexpr int W = 16;

static inline vec load(const float* p) {
  vec x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

static inline vec load(const bf16* p) {
  halves h;
  std::memcpy(&h, p, sizeof h);
  return (vec)(__builtin_convertvector(h, words) << 16);
}

static inline void store(float* p, vec x) { std::memcpy(p, &x, sizeof x); }

// Round to nearest, ties to even; nan stays nan.
static inline void store(bf16* p, vec x) {
#ifdef __AVX512BF16__
  const auto h = __builtin_ia32_cvtneps2bf16_v16sf(x);
#else
  words u = (words)x;
  u = (x == x) ? (u + 0x7fff + ((u >> 16) & 1)) >> 16 : (u >> 16) | 0x40;
  const halves h = __builtin_convertvector(u, halves);
#endif
  std::memcpy(p, &h, sizeof h);
}

static inline float number(float x) { return x; }

static inline float number(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

static inline float sum(vec x) {
  typedef float v8 __attribute__((vector_size(32)));
  typedef float v4 __attribute__((vector_size(16)));
  v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// exp(x) to 2 units in the last place. x is clamped to -87.3 ... 88.7; nan stays nan.
static inline vec exp(vec x) {
  vec z = x > 88.7f ? vec{} + 88.7f : x;
  z = z < -87.3f ? vec{} - 87.3f : z;
  const vec n = (z * 1.44269504f + 12582912.0f) - 12582912.0f;
  const vec r = (z - n * 0.693359375f) + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

static inline vec sigmoid(vec x) { return 1.0f / (1.0f + exp(-x)); }
