/* The numbers and vectors of the C kernels (chapter 10).
 *
 *     num     a number as it lies in memory: bf16, f16 or f32. load() makes a float of it, store() rounds one to it.
 *     vec     LANES floats in one register. Arithmetic on a vec is done in all its lanes at once.
 *     unit    what a lane takes in at a time: one number, or two where the processor has an instruction that multiplies
 *             two pairs of bf16 and adds both products (AVX512-BF16). PAIR is how many.
 *
 * multiply_add(sum, a, b), with the same unit b for all lanes:
 *
 *     sum       | s0           | s1           | s2           | ...    LANES floats
 *     a         | a0           | a1           | a2           | ...    LANES units
 *     b         | b            | b            | b            | ...
 *     result    | s0 + a0 * b  | s1 + a1 * b  | s2 + a2 * b  | ...    a0 * b is two products if a unit is two numbers
 */
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* -- num -------------------------------------------------------------------------------------------------------- */

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
static inline float load(num x) {
#if defined(__F16C__) && !defined(__AVX512FP16__) /* gcc 12 makes every conversion wait for the one before it */
    uint16_t bits;
    memcpy(&bits, &x, 2);
    return _cvtsh_ss(bits);
#else
    return (float)x;
#endif
}
static inline num store(float x) { return (num)x; }
#else
typedef float num;
static inline float load(num x) { return x; }
static inline num store(float x) { return x; }
#endif

/* exp(x) for x <= 0, to about 2e-7: 2^n * e^f with a polynomial for e^f, |f| <= 0.35. Below -87 it stays at 1e-38,
 * which is nothing beside the 1 of the largest score. Free of branches, so that every compiler makes vectors of it. */
static inline float exp_negative(float x) {
    x = x > -87.0f ? x : -87.0f;
    int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
    float f = x - (float)n * 0.69314718f;
    float p = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * (0.041666668f + f * (0.008333334f + f * 0.0013888889f)))));
    int32_t bits = (n + 127) << 23;
    memcpy(&x, &bits, 4);
    return p * x;
}

/* -- vec and unit ----------------------------------------------------------------------------------------------- */

/* STEP: sums that are computed together, each a vec in a register of its own. */
#ifdef __AVX512F__
enum { LANES = 16, STEP = 16 };
#else
enum { LANES = 8, STEP = 8 };
#endif
typedef float vec __attribute__((vector_size(4 * LANES)));

static inline vec vec_from(const float *x) { /* LANES floats */
    vec result;
    memcpy(&result, x, sizeof(result));
    return result;
}

#if defined(TYPE_bf16) && defined(__AVX512BF16__)
enum { PAIR = 2 };
typedef uint32_t unit;
static inline unit unit_at(const num *x) { /* x[0] and x[1] */
    unit u;
    memcpy(&u, x, sizeof(u));
    return u;
}
static inline unit join(num low, num high) { return low | (unit)high << 16; }
static inline unit join_floats(float low, float high) { return join(store(low), store(high)); }
static inline vec multiply_add(vec sum, const unit *a, unit b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_loadu_si512(a), (__m512bh)_mm512_set1_epi32((int)b));
}
#else
enum { PAIR = 1 };
typedef float unit;
static inline unit unit_at(const num *x) { return load(*x); }
static inline unit join(num x, num same) { return (void)same, load(x); }
static inline unit join_floats(float x, float same) { return (void)same, x; }
static inline vec multiply_add(vec sum, const unit *a, unit b) { return sum + vec_from(a) * b; }
#endif

/* -- LANES units of a weight, as linear.c lays them out ---------------------------------------------------------- */

#if defined(TYPE_bf16) && defined(__AVX512BF16__)
typedef __m512bh weight_vec;
static inline weight_vec weights_at(const num *w) { return (weight_vec)_mm512_loadu_si512(w); }
static inline vec multiply_add_weights(vec sum, weight_vec w, unit x) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
typedef vec weight_vec;
static inline weight_vec weights_at(const num *w) { /* gcc makes scalar code of the loop below, six times as slow */
#if defined(TYPE_bf16) && defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)w)), 16);
#elif defined(TYPE_bf16) && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)), 16);
#elif defined(TYPE_f16) && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
#elif defined(TYPE_f16) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)w));
#else
    float x[LANES];
    for (int l = 0; l < LANES; l++)
        x[l] = load(w[l]);
    return vec_from(x);
#endif
}
static inline vec multiply_add_weights(vec sum, weight_vec w, unit x) { return sum + w * x; }
#endif
