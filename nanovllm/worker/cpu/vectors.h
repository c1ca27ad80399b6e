/* The numbers and vectors of the C kernels (chapter 10).
 *
 *     num     a number as it lies in memory: bf16, f16 or f32. load() makes a float of it, store() rounds one to it.
 *     vec     LANES floats in one register. Arithmetic on a vec is done in all its lanes at once.
 *     unit    what a lane takes in at a time: one number, or two where the processor has an instruction that multiplies
 *             two pairs of bf16 and adds both products (AVX512-BF16). PAIR is how many. A unit_vec is LANES of them.
 *
 * multiply_add(sum, a, b):
 *
 *     sum       | s0           | s1           | s2           | ...    LANES floats
 *     a         | a0           | a1           | a2           | ...    LANES units
 *     b         | b0           | b1           | b2           | ...    LANES units; all_lanes(b) puts b into each
 *     result    | s0 + a0 * b0 | s1 + a1 * b1 | s2 + a2 * b2 | ...    a0 * b0 is two products if a unit is two numbers
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
static inline void put(float *to, vec x) { memcpy(to, &x, sizeof(x)); }

static inline vec floats_at(const num *x) { /* gcc makes scalar code of the loop below, six times as slow */
#if defined(TYPE_bf16) && defined(__AVX512F__)
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#elif defined(TYPE_bf16) && defined(__AVX2__)
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
#elif defined(TYPE_f16) && defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif defined(TYPE_f16) && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
#else
    float y[LANES];
    for (int l = 0; l < LANES; l++)
        y[l] = load(x[l]);
    return vec_from(y);
#endif
}

#if defined(TYPE_bf16) && defined(__AVX512BF16__)
enum { PAIR = 2 };
typedef uint32_t unit;
typedef __m512bh unit_vec;
static inline unit unit_at(const num *x) { /* x[0] and x[1] */
    unit u;
    memcpy(&u, x, sizeof(u));
    return u;
}
static inline unit join(num low, num high) { return low | (unit)high << 16; }
static inline unit_vec unit_vec_from(const unit *x) { return (unit_vec)_mm512_loadu_si512(x); }
static inline unit_vec units_at(const num *x) { return (unit_vec)_mm512_loadu_si512(x); }
static inline unit_vec joined(__m256i low, __m256i high) { /* 16 bf16 each */
    return (unit_vec)_mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}
static inline unit_vec join_at(const num *low, const num *high) {
    return joined(_mm256_loadu_si256((const __m256i *)low), _mm256_loadu_si256((const __m256i *)high));
}
static inline __m256i rounded(vec x) { return (__m256i)_mm512_cvtneps_pbh((__m512)x); }
static inline unit_vec join_vecs(vec low, vec high) { return joined(rounded(low), rounded(high)); }
static inline void put_units(unit *to, vec x) { _mm256_storeu_si256((__m256i *)to, rounded(x)); }
static inline unit_vec all_lanes(unit x) { return (unit_vec)_mm512_set1_epi32((int)x); }
static inline vec multiply_add(vec sum, unit_vec a, unit_vec b) { return (vec)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
enum { PAIR = 1 };
typedef float unit;
typedef vec unit_vec;
static inline unit unit_at(const num *x) { return load(*x); }
static inline unit join(num x, num same) { return (void)same, load(x); }
static inline unit_vec unit_vec_from(const unit *x) { return vec_from(x); }
static inline unit_vec units_at(const num *x) { return floats_at(x); }
static inline unit_vec join_at(const num *x, const num *same) { return (void)same, units_at(x); }
static inline unit_vec join_vecs(vec x, vec same) { return (void)same, x; }
static inline void put_units(unit *to, vec x) { put(to, x); }
static inline unit_vec all_lanes(unit x) { return (vec){0} + x; }
static inline vec multiply_add(vec sum, unit_vec a, unit_vec b) { return sum + a * b; }
#endif

static inline void put_unit_vec(unit *to, unit_vec x) { memcpy(to, &x, sizeof(x)); }

/* x, in a register from here on: gcc would fetch it from memory again for each product. */
static inline unit_vec in_register(unit_vec x) {
#ifdef __AVX__ /* without, a vec is no register */
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* -- sums over lanes -------------------------------------------------------------------------------------------- */

/* interleave(a, b): a's and b's lanes in turn, those of their lower halves or those of their upper halves. */
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t lane_numbers __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lane_numbers){__VA_ARGS__})
#endif
#ifdef __AVX512F__
#define INTERLEAVE_LOW(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define INTERLEAVE_HIGH(a, b) SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
#define INTERLEAVE_LOW(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define INTERLEAVE_HIGH(a, b) SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#endif

/* Lane l of the result is the sum of all lanes of x[l]. Each round halves the number of vectors. With 4 lanes:
 *
 *     x[0]    | a0      | a1      | a2      | a3      |
 *     x[1]    | b0      | b1      | b2      | b3      |    and c in x[2], d in x[3]
 *     x[0]    | a0 + a2 | c0 + c2 | a1 + a3 | c1 + c3 |    interleaved with x[2]; x[1] with x[3]
 *     x[0]    | a       | b       | c       | d       |    interleaved with x[1] */
static inline void halve(vec *x, int half) {
    for (int i = 0; i < half; i++)
        x[i] = INTERLEAVE_LOW(x[i], x[i + half]) + INTERLEAVE_HIGH(x[i], x[i + half]);
}
static inline vec sum_lanes(vec *x) {
    if (LANES == 16)
        halve(x, 8);
    halve(x, 4);
    halve(x, 2);
    halve(x, 1);
    return x[0];
}
