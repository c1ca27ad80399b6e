/* The numbers and vectors of the C kernels (chapter 10).
 *
 *     num     a number as it lies in memory: bf16, f16 or f32. load() makes a float of it, store() rounds one to it.
 *     vec     LANES floats in one register. Arithmetic on a vec is done in all its lanes at once.
 *     unit    what a lane takes in at a time: one number, or two where the processor has an instruction that multiplies
 *             two pairs of bf16 and adds both products (AVX512-BF16), unless NO_PAIRS is defined. PAIR is how many. A
 *             unit_vec is LANES of them.
 *
 * multiply_add(sum, a, b):
 *
 *     sum       | s0           | s1           | s2           | ...    LANES floats
 *     a         | a0           | a1           | a2           | ...    LANES units
 *     b         | b0           | b1           | b2           | ...    LANES units; all_lanes(b) puts b into each
 *     result    | s0 + a0 * b0 | s1 + a1 * b1 | s2 + a2 * b2 | ...    a0 * b0 is two products if a unit is two numbers
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* -- num -------------------------------------------------------------------------------------------------------- */

static inline float bf16_to_float(uint16_t x) { /* the upper half of a float32 */
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

#if defined(TYPE_bf16)
typedef uint16_t num;
static inline float load(num x) { return bf16_to_float(x); }
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

/* a * b + c, rounded once. Where no instruction does it, libm's fmaf is slow, and in some libraries wrong for denormals.
 * In float64 the product is exact, and a * b + c is exactly sum + error. The sum is rounded to odd: towards zero, and
 * where that loses something, its last bit becomes 1. Rounding that to float32 is right (Boldo and Melquiond,
 * doi:10.1109/TC.2007.70819). */
static inline float fused_float(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, sum = product + c, back = sum - product;
    const double error = (product - (sum - back)) + (c - back);
    const double side = sum * error; /* < 0: sum is too large; NaN: sum is infinite or NaN, and stays so */
    int64_t bits;
    double odd;
    memcpy(&bits, &sum, 8);
    bits = side < 0 ? (bits - 1) | 1 : side > 0 ? bits | 1 : bits;
    memcpy(&odd, &bits, 8);
    return (float)odd;
#endif
}

#ifdef __wasm_simd128__
#include "wasm.h"
#endif

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
static inline vec in_all(float x) { return x - (vec){0}; } /* 0 + x would be computed: it makes 0 of -0 */

/* a * b + c, rounded once. */
static inline vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__wasm_simd128__)
    v128_t x[2], y[2], z[2];
    memcpy(x, &a, sizeof(a));
    memcpy(y, &b, sizeof(b));
    memcpy(z, &c, sizeof(c));
    for (int half = 0; half < 2; half++)
        z[half] = four_fused(x[half], y[half], z[half]);
    memcpy(&c, z, sizeof(c));
    return c;
#else
    float x[LANES], y[LANES], z[LANES]; /* gcc makes no vectors of a loop over the lanes of vectors */
    put(x, a);
    put(y, b);
    put(z, c);
    for (int l = 0; l < LANES; l++)
        z[l] = fused_float(x[l], y[l], z[l]);
    return vec_from(z);
#endif
}

typedef int32_t mask __attribute__((vector_size(4 * LANES))); /* a comparison of vecs: all bits of a lane, or none */
static inline vec choose(mask which, vec yes, vec no) {
    return (vec)((which & (mask)yes) | (~which & (mask)no));
}
static inline vec larger_of(vec a, vec b) { /* b where a or b is NaN: so do the instructions, too */
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX__)
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

static inline float largest_of(vec x) { /* none is NaN */
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    put(lanes, x);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++)
            lanes[l] = lanes[l] > lanes[l + half] ? lanes[l] : lanes[l + half];
    return lanes[0];
#endif
}

/* exp(x) for x <= 0, to about 4e-7: 2^n * e^f with a polynomial for e^f, |f| <= 0.35. Exactly 0 below -88, where n is -127
 * and the power's bits are 0; exactly 1 for 0; NaN for NaN. */
static inline vec exp_negative(vec x) {
    x = larger_of(in_all(-88), x);
    const mask n = __builtin_convertvector(x * 1.44269504f - 0.5f, mask);
    const vec f = fused(__builtin_convertvector(n, vec), in_all(-0.69314718f), x);
    vec p = fused(in_all(0.0013888889f), f, in_all(0.008333334f));
    p = fused(p, f, in_all(0.041666668f));
    p = fused(p, f, in_all(0.16666667f));
    p = fused(p, f, in_all(0.5f));
    p = fused(p, f, in_all(1));
    p = fused(p, f, in_all(1));
    return p * (vec)((n + 127) << 23);
}

static inline vec floats_at(const num *x) { /* gcc makes scalar code of the loop below, six times as slow */
#if defined(TYPE_f32)
    return vec_from(x);
#elif defined(TYPE_bf16) && defined(__AVX512F__)
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

static inline void put_nums(num *to, vec x) { /* each rounded as by store() */
#if defined(TYPE_f32)
    put(to, x);
#elif defined(TYPE_bf16) && defined(__AVX2__)
    const mask bits = (mask)x, up = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)up));
#else
    const __m256i low = (__m256i)(up & 0xffff);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
#endif
#elif defined(TYPE_f16) && defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(TYPE_f16) && defined(__F16C__)
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    float y[LANES];
    put(y, x);
    for (int l = 0; l < LANES; l++)
        to[l] = store(y[l]);
#endif
}

#if defined(TYPE_bf16) && defined(__AVX512BF16__) && !defined(NO_PAIRS)
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
    const __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i which = _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(32)), 16));
    return (unit_vec)_mm512_permutex2var_epi16(_mm512_castsi256_si512(low), which, _mm512_castsi256_si512(high));
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
static inline unit_vec all_lanes(unit x) { return in_all(x); }
static inline vec multiply_add(vec sum, unit_vec a, unit_vec b) { return fused(a, b, sum); }
#endif

static inline void put_unit_vec(unit *to, unit_vec x) { memcpy(to, &x, sizeof(x)); }

/* x, in a register from here on: gcc would fetch it from memory again for each product. */
static inline unit_vec in_register(unit_vec x) {
#ifdef __AVX__ /* without, a vec is no register */
    __asm__("" : "+v"(x));
#endif
    return x;
}

/* -- sums over many numbers ------------------------------------------------------------------------------------- */

/* A sum's bits depend on its order. Here it is the same for every vector length: sixteen partial sums, of which number j
 * takes the numbers j, j + 16, j + 32, ... one after another, and then this tree. */
enum { PARTIAL_SUMS = 16, PARTIAL_VECS = PARTIAL_SUMS / LANES };

static inline float sum_of(const float *partial) {
#if defined(__AVX__)
    const __m256 of_8 = _mm256_loadu_ps(partial) + _mm256_loadu_ps(partial + 8);
    const __m128 of_4 = _mm256_castps256_ps128(of_8) + _mm256_extractf128_ps(of_8, 1);
    const __m128 of_2 = of_4 + _mm_movehl_ps(of_4, of_4);
    return of_2[0] + of_2[1];
#else
    float sum[PARTIAL_SUMS];
    memcpy(sum, partial, sizeof(sum));
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            sum[j] += sum[j + half];
    return sum[0];
#endif
}
