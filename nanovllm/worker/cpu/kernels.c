/* The small operations of a decoder layer, for CPUs (chapter 10); cpu/attention.c has attention over the block table,
 * cpu/linear.c the matrix products.
 *
 * Compiled at first use by cpu/kernels.py with -DTYPE_bf16, -DTYPE_f16 or -DTYPE_f32, -DHEAD_DIM, -DGROUP (query heads
 * that share a KV head) and -DTILE (query rows of one task, at most), so that the inner loops have constant lengths. Each
 * function has a slow twin in PyTorch with the same meaning, in kernels.py and attention.py. Numbers are
 * computed in float32 and rounded once.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#if defined(TYPE_bf16)
typedef uint16_t num; /* the upper half of a float32 */
static inline float load(num x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline num store(float x) { /* round to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (num)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#elif defined(TYPE_f16)
typedef _Float16 num;
static inline float load(num x) { return (float)x; }
static inline num store(float x) { return (num)x; }
#else
typedef float num;
static inline float load(num x) { return x; }
static inline num store(float x) { return x; }
#endif

/* exp(x) for x <= 0, to about 2e-7: 2^n * e^f with a polynomial for e^f, |f| <= 0.35. Below -87 it stays at 1e-38, which
 * is nothing beside the 1 of the largest score. Free of branches, so that every compiler makes vectors of it. */
static inline float exp_negative(float x) {
    x = x > -87.0f ? x : -87.0f;
    int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
    float f = x - (float)n * 0.69314718f;
    float p = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * (0.041666668f + f * (0.008333334f + f * 0.0013888889f)))));
    int32_t bits = (n + 127) << 23;
    memcpy(&x, &bits, 4);
    return p * x;
}

/* residual += delta (if there is one), out = residual / rms(residual) * weight; rows of `size` numbers. */
void add_rms_norm(num *out, num *residual, const num *delta, const num *weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows > 16)
    for (int64_t r = 0; r < rows; r++) {
        num *x = residual + r * size, *y = out + r * size;
        float sum = 0;
        for (int64_t i = 0; delta && i < size; i++)
            x[i] = store(load(x[i]) + load(delta[r * size + i]));
        for (int64_t i = 0; i < size; i++)
            sum += load(x[i]) * load(x[i]);
        float scale = 1.0f / sqrtf(sum / size + eps);
        for (int64_t i = 0; i < size; i++)
            y[i] = store(load(x[i]) * scale * load(weight[i]));
    }
}

/* out = silu(gate) * up, from rows that hold gate and then up. */
void silu_and_mul(num *restrict out, const num *restrict gate_up, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 4)
    for (int64_t r = 0; r < rows; r++) {
        const num *gate = gate_up + r * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            float g = load(gate[i]), e = exp_negative(-fabsf(g)); /* exp(-|g|) never overflows */
            out[r * size + i] = store(g * (g < 0 ? e : 1.0f) / (1.0f + e) * load(up[i]));
        }
    }
}

static inline void rotate(num *x, const num *restrict cos, const num *restrict sin) {
    enum { HALF = HEAD_DIM / 2 };
    float a[HALF], b[HALF];
    for (int i = 0; i < HALF; i++)
        a[i] = load(x[i]), b[i] = load(x[i + HALF]);
    for (int i = 0; i < HALF; i++) {
        x[i] = store(a[i] * load(cos[i]) - b[i] * load(sin[i]));
        x[i + HALF] = store(b[i] * load(cos[i]) + a[i] * load(sin[i]));
    }
}

/* Rotate q and k in place, then write k and v to their slots (slot -1: not written). q, k and v are rows of heads of
 * HEAD_DIM numbers, `*_stride` numbers apart; cos and sin are one row a token. The caches are
 * [num_blocks][block_size][num_kv_heads][HEAD_DIM], blocks block_stride numbers apart. */
void rotary_and_write(num *q, int64_t q_stride, num *k, int64_t k_stride, const num *v, int64_t v_stride, const num *cos,
                      const num *sin, const int64_t *slots, num *k_cache, num *v_cache, int64_t rows, int64_t num_kv_heads,
                      int64_t block_size, int64_t block_stride) {
    const int64_t width = num_kv_heads * HEAD_DIM;
#pragma omp parallel for if (rows > 16)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t h = 0; h < num_kv_heads * GROUP; h++)
            rotate(q + r * q_stride + h * HEAD_DIM, cos + r * HEAD_DIM / 2, sin + r * HEAD_DIM / 2);
        for (int64_t h = 0; h < num_kv_heads; h++)
            rotate(k + r * k_stride + h * HEAD_DIM, cos + r * HEAD_DIM / 2, sin + r * HEAD_DIM / 2);
        if (slots[r] >= 0) {
            const int64_t at = slots[r] / block_size * block_stride + slots[r] % block_size * width;
            memcpy(k_cache + at, k + r * k_stride, width * sizeof(num));
            memcpy(v_cache + at, v + r * v_stride, width * sizeof(num));
        }
    }
}

/* A `unit` is what one multiplication takes in from a query: one number, or where the processor multiplies two pairs of
 * bf16 and adds both products (AVX512-BF16), two that follow one another.
 */
#if defined(TYPE_bf16) && defined(__AVX512BF16__)
enum { PAIR = 2, LANES = 16, STEP = 16 }; /* numbers in a unit; in a vector; sums that registers hold at a time */
typedef uint32_t unit;
static inline unit unit_at(const num *x) {
    unit u;
    memcpy(&u, x, sizeof(u));
    return u;
}
static inline unit join(num low, num high) { return low | (unit)high << 16; }
static inline unit join_weights(float low, float high) { return join(store(low), store(high)); }
#else
#ifdef __AVX512F__
enum { PAIR = 1, LANES = 16, STEP = 16 };
#else
enum { PAIR = 1, LANES = 8, STEP = 8 };
#endif
typedef float unit;
static inline unit unit_at(const num *x) { return load(*x); }
static inline unit join(num x, num same) { return (void)same, load(x); }
static inline unit join_weights(float x, float same) { return (void)same, x; }
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));

static inline vec multiply_add(vec sum, const unit *a, unit b) { /* a: one unit for each lane */
#if defined(TYPE_bf16) && defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_set1_epi32((int)b));
#else
    vec x;
    memcpy(&x, a, sizeof(x));
    return sum + x * b;
#endif
}

#include "attention.c"
#include "linear.c"
