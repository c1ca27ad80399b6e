/* How keys and values lie in the cache: known to heads.c and to its parts alone, of which this is one.
 *
 * A key lies in a column, so that neighbouring keys fill the lanes of a vector:
 *
 *     k_cache    [num_blocks][num_kv_heads][HEAD_UNITS][block_size][PAIR]
 *     v_cache    [num_blocks][num_kv_heads][block_size][HEAD_DIM]
 *
 * With KV_INT8 both hold codes of 8 bits, and after those of a head in a block its scales, bf16 [block_size]: number =
 * code * scale. Codes are multiplied as they are; a key's scale then goes to its score, a value's to its weight.
 */
_Static_assert(HEAD_DIM % PAIR == 0, "a head is whole units");
enum { HEAD_UNITS = HEAD_DIM / PAIR }; /* units of a query or key */

#ifdef KV_INT8

typedef int8_t kv_num;
enum { KV_SIZE = HEAD_DIM + 2 }; /* numbers of the cache that a head of a token takes */

static inline float scale_at(const kv_num *head, int64_t size, int64_t place) { /* of a block's slot */
    uint16_t bits;
    memcpy(&bits, head + size * HEAD_DIM + place * 2, 2);
    return bf16_to_float(bits);
}
static inline vec codes_to_floats(const int8_t *x) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x)));
#else
    float y[LANES];
    for (int l = 0; l < LANES; l++)
        y[l] = x[l];
    return vec_from(y);
#endif
}
static inline unit kv_join(int8_t low, int8_t high) { return join(store(low), store(high)); } /* bf16 has 8 bits, too */
static inline unit_vec kv_join_at(const int8_t *low, const int8_t *high) {
    return join_vecs(codes_to_floats(low), codes_to_floats(high));
}
static inline vec kv_floats_at(const int8_t *x) { return codes_to_floats(x); }
static inline unit_vec kv_units_at(const int8_t *x) {
#if defined(TYPE_bf16) && defined(__AVX512BF16__) && !defined(NO_PAIRS)
    return (unit_vec)_mm512_cvtne2ps_pbh((__m512)codes_to_floats(x + LANES), (__m512)codes_to_floats(x));
#else
    return codes_to_floats(x);
#endif
}
/* The scale of a head is its largest magnitude / 127, rounded up to bf16; NaN for numbers that are not finite. Code d
 * is written to head[first + d / pair * step + d % pair]. */
static inline void write_head(kv_num *head, int64_t size, int64_t place, const num *x, int64_t first, int64_t pair,
                              int64_t step) {
    uint32_t largest = 0, scale_bits;
    for (int d = 0; d < HEAD_DIM; d++) {
        const float number = load(x[d]);
        uint32_t bits;
        memcpy(&bits, &number, 4);
        largest = (bits & 0x7fffffff) > largest ? bits & 0x7fffffff : largest;
    }
    float scale;
    memcpy(&scale, &largest, 4);
    scale /= 127;
    memcpy(&scale_bits, &scale, 4);
    const uint16_t rounded = largest < 0x7f800000 ? (scale_bits + 0xffff) >> 16 : 0x7fc0;
    memcpy(head + size * HEAD_DIM + place * 2, &rounded, 2);
    scale = rounded && rounded != 0x7fc0 ? bf16_to_float(rounded) : INFINITY;
    for (int d = 0; d < HEAD_DIM; d++) {
        const float code = rintf(load(x[d]) / scale);
        head[first + d / pair * step + d % pair] = code == code ? (int8_t)code : 0;
    }
}

#else

typedef num kv_num;
enum { KV_SIZE = HEAD_DIM };
static inline unit kv_join(num low, num high) { return join(low, high); }
static inline unit_vec kv_join_at(const num *low, const num *high) { return join_at(low, high); }
static inline vec kv_floats_at(const num *x) { return floats_at(x); }
static inline unit_vec kv_units_at(const num *x) { return units_at(x); }
static inline void write_head(kv_num *head, int64_t size, int64_t place, const num *x, int64_t first, int64_t pair,
                              int64_t step) {
    (void)size, (void)place;
    for (int d = 0; d < HEAD_DIM; d++)
        head[first + d / pair * step + d % pair] = x[d];
}
#endif
