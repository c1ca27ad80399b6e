/* Vectors of integers for products with quantized weights (chapter 12). A part of quantized.c.
 *
 *     ints, floats    WIDTH numbers of 32 bits in one register
 *
 * Products of bytes, summed exactly: begin(), then dot() eight times, then end().
 *
 *     codes     | c0 c1 c2 c3         | c4 c5 c6 c7         | ...    4 * WIDTH bytes
 *     x         | x0 x1 x2 x3         | x0 x1 x2 x3         | ...    the same 4 numbers from -127 to 127 for all lanes
 *     sum       | s0                  | s1                  | ...    int32
 *     result    | s0 + c0 * x0 + ...  | s1 + c4 * x0 + ...  | ...
 *
 * Codes of 4 bits are 0 to 15. Those of 8 bits are 0 to 255, or -128 to 127 where the instructions want SIGNED_CODES.
 * A tile has at most MAX_ROWS rows and, for several rows, TILE_VECS vectors of outputs: its sums fit into registers.
 */
#if defined(__AVX512VNNI__)
enum { WIDTH = 16, MAX_ROWS = 6, TILE_VECS = 2, SIGNED_CODES = 0 };
#elif defined(__AVXVNNI__)
enum { WIDTH = 8, MAX_ROWS = 6, TILE_VECS = 2, SIGNED_CODES = 0 };
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
enum { WIDTH = 8, MAX_ROWS = 4, TILE_VECS = 2, SIGNED_CODES = 1 };
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
enum { WIDTH = 4, MAX_ROWS = 4, TILE_VECS = 4, SIGNED_CODES = 1 };
#elif defined(__wasm_simd128__)
enum { WIDTH = 4, MAX_ROWS = 4, TILE_VECS = 2, SIGNED_CODES = 1 };
#else
enum { WIDTH = 8, MAX_ROWS = 1, TILE_VECS = 4, SIGNED_CODES = 1 };
#endif
typedef int32_t ints __attribute__((vector_size(4 * WIDTH)));
typedef float floats __attribute__((vector_size(4 * WIDTH)));

static inline ints all(int32_t x) { return (ints){0} + x; }

/* WIDTH codes in the lower (half = 0) or upper halves of the bytes; of 8 bits: the bytes. */
static inline ints codes_at(const uint8_t *bytes, int bits, int half) {
    ints codes;
    memcpy(&codes, bytes, sizeof(codes));
    if (bits == 4)
        return codes >> (4 * half) & 0x0f0f0f0f;
    return SIGNED_CODES ? codes ^ (int32_t)0x80808080 : codes;
}

/* from_halves: float16 -> float32. fused_floats: a * b + c, rounded once. */

#if defined(__AVX512VNNI__)
static inline ints dot(ints sum, ints codes, ints x, int bits) {
    return (void)bits, (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
}
static inline floats from_halves(const uint16_t *x) {
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}
static inline floats fused_floats(floats a, floats b, floats c) {
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

#elif defined(__AVXVNNI__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
static inline floats from_halves(const uint16_t *x) {
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}
static inline floats fused_floats(floats a, floats b, floats c) {
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#if defined(__AVXVNNI__)
static inline ints dot(ints sum, ints codes, ints x, int bits) {
    return (void)bits, (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
}
#else
/* maddubs adds two products in 16 bits. Four bits times eight, added up over a group, fit in there: 16 * 15 * 127. Of
 * 8-bit codes, 2 * 128 * 127 fits as well if the sign goes to x, and the next instruction widens it to 32 bits. */
static inline ints dot(ints sum, ints codes, ints x, int bits) {
    const __m256i c = (__m256i)codes;
    if (bits == 4)
        return (ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16(c, (__m256i)x));
    const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8((__m256i)x, c));
    return sum + (ints)_mm256_madd_epi16(products, _mm256_set1_epi16(1));
}
#define SUMS_OF_16_BITS
#endif

#elif defined(__ARM_FEATURE_DOTPROD)
static inline ints dot(ints sum, ints codes, ints x, int bits) {
    return (void)bits, (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)x);
}
static inline floats from_halves(const uint16_t *x) { return (floats)vcvt_f32_f16((float16x4_t)vld1_u16(x)); }
static inline floats fused_floats(floats a, floats b, floats c) { return (floats)vfmaq_f32(c, a, b); }

#elif defined(__wasm_simd128__)
static inline ints dot(ints sum, ints codes, ints x, int bits) { /* bytes 0 and 2 of a lane, then 1 and 3, as 16 bits */
    const v128_t even = wasm_i32x4_dot_i16x8(wasm_i16x8_shr(wasm_i16x8_shl((v128_t)codes, 8), 8),
                                             wasm_i16x8_shr(wasm_i16x8_shl((v128_t)x, 8), 8));
    const v128_t odd = wasm_i32x4_dot_i16x8(wasm_i16x8_shr((v128_t)codes, 8), wasm_i16x8_shr((v128_t)x, 8));
    return (void)bits, sum + (ints)even + (ints)odd;
}
static inline floats from_halves(const uint16_t *x) {
    const v128_t bits = wasm_u32x4_load16x4(x), sign = wasm_i32x4_shl(wasm_v128_and(bits, wasm_i32x4_const_splat(0x8000)), 16);
    const floats magnitude = (floats)wasm_i32x4_shl(wasm_v128_and(bits, wasm_i32x4_const_splat(0x7fff)), 13) * 0x1p112f;
    return (floats)wasm_v128_or((v128_t)magnitude, sign);
}
static inline floats fused_floats(floats a, floats b, floats c) {
    return (floats)four_fused((v128_t)a, (v128_t)b, (v128_t)c);
}

#else
static inline ints dot(ints sum, ints codes, ints x, int bits) {
    int8_t c[4 * WIDTH], y[4 * WIDTH];
    memcpy(c, &codes, sizeof(c));
    memcpy(y, &x, sizeof(y));
    for (int i = 0; i < 4 * WIDTH; i++)
        sum[i / 4] += c[i] * y[i];
    return (void)bits, sum;
}
static inline floats from_halves(const uint16_t *x) {
    floats result;
    for (int i = 0; i < WIDTH; i++) {
        const uint32_t bits = (uint32_t)(x[i] & 0x7fff) << 13;
        float y;
        memcpy(&y, &bits, 4);
        result[i] = (x[i] & 0x8000 ? -y : y) * 0x1p112f; /* the difference of the exponents; right for denormals too */
    }
    return result;
}
static inline floats fused_floats(floats a, floats b, floats c) {
    float x[WIDTH], y[WIDTH], z[WIDTH];
    memcpy(x, &a, sizeof(a));
    memcpy(y, &b, sizeof(b));
    memcpy(z, &c, sizeof(c));
    for (int i = 0; i < WIDTH; i++)
        z[i] = fused_float(x[i], y[i], z[i]);
    memcpy(&c, z, sizeof(c));
    return c;
}
#endif

static inline ints begin(int32_t offset, int bits) {
#ifdef SUMS_OF_16_BITS
    if (bits == 4)
        return all(0);
#endif
    return (void)bits, all(offset);
}
static inline ints end(ints sum, int32_t offset, int bits) {
#ifdef SUMS_OF_16_BITS
    if (bits == 4)
        return (ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + offset;
#endif
    return (void)offset, (void)bits, sum;
}
