/* What has to do with attention's heads, for CPUs: positions, the KV cache, attention (chapters 4 and 10).
 *
 *     kv_cache.h          how keys and values lie in the cache
 *     attention.h         the way through the block table
 *     attention_prompt.c  attention of many queries
 *     attention_decode.c  attention of few queries
 *     attention_amx.c     attention of any number, with instructions for matrices
 *     attention.c         attention of a step, divided among the cores
 *
 * Compiled at first use by cpu/c_kernels.py as kernels.c is, and with the sizes of a model, so that inner loops have
 * constant lengths: -DHEAD_DIM, -DROTARY_DIM if only so many numbers of a head are rotated, -DGROUP (query heads that
 * share a KV head), -DTASK_ROWS (query rows of one task, at most), -DKV_INT8 if the cache holds codes of 8 bits, and
 * -DBIDIRECTIONAL if every row sees every key.
 */
#include "pool.h"
#if defined(TYPE_bf16) && !defined(EVERYWHERE) && defined(__AMX_BF16__) && defined(__AVX512BF16__) \
    && defined(__linux__) && HEAD_DIM % 2 == 0 && HEAD_DIM >= 16
#define TILES /* for which the cache holds pairs: NO_PAIRS does not count in this file */
#undef NO_PAIRS
#endif
#include "vectors.h"
#include "kv_cache.h"
#include "attention.h"

#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM
#endif

/* Rotate the first ROTARY_DIM numbers of one head in place. */
static inline void rotate(num *x, const num *restrict cos, const num *restrict sin) {
    enum { HALF = ROTARY_DIM / 2 };
    float x1[HALF], x2[HALF];
    for (int i = 0; i < HALF; i++) {
        x1[i] = load(x[i]);
        x2[i] = load(x[i + HALF]);
    }
    for (int i = 0; i < HALF; i++) {
        x[i] = store(x1[i] * load(cos[i]) - x2[i] * load(sin[i]));
        x[i + HALF] = store(x2[i] * load(cos[i]) + x1[i] * load(sin[i]));
    }
}

/* Strides count numbers. */
typedef struct {
    int64_t num_rows;
    num *q, *k, *v;          /* [num_rows] rows of heads of HEAD_DIM numbers */
    const num *cos, *sin;    /* [num_rows][ROTARY_DIM / 2]; NULL: q and k are not rotated */
    const int64_t *slots;    /* [num_rows]; -1: k and v are not written */
    kv_num *k_cache, *v_cache; /* see kv_cache.h */
    int64_t q_stride, k_stride, v_stride, block_stride;
    int64_t num_kv_heads, block_size;
} rotary_args;

static void rotary_and_write_rows(const void *args, int64_t first, int64_t end) {
    const rotary_args a = *(const rotary_args *)args; /* the compiler knows that no store changes a copy */
    for (int64_t r = first; r < end; r++) {
        num *q = a.q + r * a.q_stride, *k = a.k + r * a.k_stride, *v = a.v + r * a.v_stride;
        if (a.cos) {
            const num *cos = a.cos + r * (ROTARY_DIM / 2), *sin = a.sin + r * (ROTARY_DIM / 2);
            for (int64_t head = 0; head < a.num_kv_heads * GROUP; head++)
                rotate(q + head * HEAD_DIM, cos, sin);
            for (int64_t head = 0; head < a.num_kv_heads; head++)
                rotate(k + head * HEAD_DIM, cos, sin);
        }
        const int64_t slot = a.slots[r];
        if (slot >= 0) {
            const int64_t block = slot / a.block_size * a.block_stride, place = slot % a.block_size;
            for (int64_t head = 0; head < a.num_kv_heads; head++) {
                const int64_t at = block + head * a.block_size * KV_SIZE;
                write_head(a.k_cache + at, a.block_size, place, k + head * HEAD_DIM, place * PAIR, PAIR, a.block_size * PAIR);
                write_head(a.v_cache + at, a.block_size, place, v + head * HEAD_DIM, place * HEAD_DIM, HEAD_DIM, 0);
            }
        }
    }
}

/* Rotate q and k in place, then write k and v to their slots. */
void rotary_and_write(const rotary_args *args) {
    parallel_for(rotary_and_write_rows, args, args->num_rows, rows_a_chunk(args->num_kv_heads * (GROUP + 2) * HEAD_DIM));
}

#include "attention_prompt.c"
#include "attention_decode.c"
#ifdef TILES
#include "attention_amx.c"
#else
enum { PART_QUERIES = GROUP }; /* that are computed a part of the keys at a time, at most */
static inline int may_use_tiles(void) { return 0; }
#define attend_tiles attend_decode
#endif
#include "attention.c"
