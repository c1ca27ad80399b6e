/* Attention by Intel's AMX: instructions for matrices of bf16 (amx.h, chapter 10). A part of cpu/heads.c.
 *
 * A query is a row of both products of attention. Pairs of what they sum over lie side by side as in the cache (kv_cache.h):
 *
 *     query          [16][32 dimensions]          weight         [16][32 keys]
 *     key            [16 pairs][16 keys][2]       value          [16 pairs of keys][16 dimensions][2]
 *     score          [16][16 keys]                acc            [16][16 dimensions]
 *
 * A row's bits do not tell how many others there are. A decode with few queries is computed in vectors, which need no
 * copies: it adds up the same products in the same order as a tile does, and so its bits are the same.
 */
#include "amx.h"

enum {
    PART_QUERIES = TASK_ROWS * GROUP, /* that are computed a part of the keys at a time, at most */
    QUERIES_OF_TASK = (PART_QUERIES + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS,
    TILE_DIM = (HEAD_DIM + TILE_K - 1) / TILE_K * TILE_K, /* those after HEAD_DIM are zeros */
    /* Dimensions that are multiplied as they lie in the cache. The others are copied: codes, or what fills no tile. */
#ifdef KV_INT8
    DIM_IN_PLACE = 0,
#else
    DIM_IN_PLACE = HEAD_DIM / TILE_K * TILE_K,
#endif
    UNITS_IN_PLACE = DIM_IN_PLACE / PAIR,
    COPIED_UNITS = TILE_DIM / PAIR - UNITS_IN_PLACE,
    ROW_IN_VECTORS = GROUP <= 2 || (GROUP <= 4 && HEAD_DIM > 64), /* which is faster then, as measured */
    /* Vectors of keys, and of a value, that are computed together for one row, so many that their sums are in registers. */
    ROW_KEYS = GROUP == 1 ? 4 : 2,
    ROW_VALUES = HEAD_VECS % 4 == 0 && GROUP <= 2 ? 4 : HEAD_VECS % 2 == 0 ? 2 : 1,
};

static const float LOG2_E = 1.44269504f;

/* A part's state, for each query of a task. Those after the last one are zeros. Scores, and so max, are binary logarithms
 * of weights: 2^x is less work than e^x. */
typedef struct {
    _Alignas(64) num query[QUERIES_OF_TASK][TILE_DIM], weight[QUERIES_OF_TASK][CHUNK];
    _Alignas(64) float score[QUERIES_OF_TASK][CHUNK], acc[QUERIES_OF_TASK][TILE_DIM];
    _Alignas(64) float sum[QUERIES_OF_TASK][LANES], max[QUERIES_OF_TASK], rescale[QUERIES_OF_TASK];
} tile_state;

/* 2^x for x <= 0, to about 2e-7: 2^n * 2^f with a polynomial for 2^f, |f| <= 0.5. 0 far below, NaN for NaN. */
static inline vec power_of_2(vec x) {
    const vec n = (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT), f = x - n;
    vec p = fused(in_all(1.3333558e-3f), f, in_all(9.6181291e-3f));
    p = fused(p, f, in_all(5.5504109e-2f));
    p = fused(p, f, in_all(2.4022651e-1f));
    p = fused(p, f, in_all(6.9314718e-1f));
    p = fused(p, f, in_all(1));
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
}

/* Bring the max of a query up to date with its scores, of which it sees the keys hidden to visible - 1. */
static inline void find_max(tile_state *s, int m, const key_chunk *kv, int64_t hidden, int64_t visible, float scale) {
    vec largest = in_all(s->max[m]);
    for (int g = 0; g < KEY_VECS; g++) {
        vec score = vec_from(s->score[m] + g * LANES) * score_factors(kv, g * LANES, scale);
        if (hidden > 0 || visible < CHUNK) {
            const mask key = (mask){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + g * LANES;
            score = choose((key >= (int)hidden) & (key < (int)visible), score, in_all(MASKED));
        }
        put(s->score[m] + g * LANES, score);
        largest = larger_of(score, largest);
    }
    s->max[m] = largest_of(largest);
}

/* Make weights of a query's scores, and bring its sum up to date. */
static inline void weigh(tile_state *s, int m, const key_chunk *kv) {
    vec sum = vec_from(s->sum[m]) * s->rescale[m];
    for (int g = 0; g < KEY_VECS; g++) {
        const vec w = power_of_2(vec_from(s->score[m] + g * LANES) - s->max[m]);
        sum += w;
        put_units((unit *)(s->weight[m] + g * LANES), scaled_weights(kv, g * LANES, w));
    }
    put(s->sum[m], sum);
}

/* Weights of a chunk's scores; acc and sum are brought to the new max. */
static void weigh_chunk(tile_state *s, const attention_args *args, const attention_task *task, const key_chunk *kv,
                        int64_t first_key, int num_tiles) {
    const int num_queries = task->num_rows * GROUP;
    for (int t = 0; t < num_tiles * TILE_ROWS; t += TILE_ROWS) {
        const int end = num_queries < t + TILE_ROWS ? num_queries : t + TILE_ROWS;
        const vec before = vec_from(s->max + t);
        for (int m = t; m < end; m++) {
            const int64_t visible = task->num_keys + later_keys(m / GROUP) - first_key;
            find_max(s, m, kv, args->window ? visible - args->window : 0, visible < kv->num_keys ? visible : kv->num_keys,
                     args->scale * LOG2_E);
        }
        const vec rescale = power_of_2(before - vec_from(s->max + t));
        put(s->rescale + t, rescale);
        for (int m = t; m < end; m++)
            weigh(s, m, kv);
        if (_mm512_cmpneq_ps_mask((__m512)rescale, (__m512)in_all(1)))
            for (int m = t; m < end; m++)
                for (int d = 0; d < TILE_DIM; d += LANES)
                    put(s->acc[m] + d, vec_from(s->acc[m] + d) * s->rescale[m]);
    }
}

/* -- both products in tiles. few: there are few rows, which wait for memory and ask for the next chunk early ------ */

/* Add x [rows][x_stride] times columns 0 to 15, which lie at `left`, and 16 to 31, at `right`, y_bytes from one pair to the
 * next, to the sums. rows: of one tile, or, if `two`, of two whole ones. k: numbers of a row. */
static inline void multiply(const num *x, int64_t x_stride, const void *left, const void *right, int64_t y_bytes, int64_t k,
                            int two) {
    const char *l = left, *r = right;
    for (int64_t i = 0; i < k; i += TILE_K) {
        add_products(x + i, x_stride * sizeof(num), l, r, y_bytes, two, 0);
        l += TILE_ROWS * y_bytes;
        r += TILE_ROWS * y_bytes;
    }
}

static void tile_scores(tile_state *s, const key_chunk *kv, const key_chunk *next, int num_tiles, int few) {
    _Alignas(64) unit key[KEY_VECS][COPIED_UNITS][LANES];
    for (int g = 0; g < KEY_VECS; g += 2) {
        for (int i = g; i < g + 2; i++) {
            for (int u = UNITS_IN_PLACE; u < HEAD_UNITS; u++)
                put_unit_vec(key[i][u - UNITS_IN_PLACE], kv_units_at(kv->k[i] + u * kv->k_stride));
            memset(key[i] + HEAD_UNITS - UNITS_IN_PLACE, 0, (TILE_DIM / PAIR - HEAD_UNITS) * sizeof(key[i][0]));
            for (int u = 0; u < HEAD_UNITS && few; u++)
                __builtin_prefetch(next->k[i] + u * next->k_stride, 0, 2);
        }
        finish_writing();
        for (int t = 0; t < num_tiles; t += 2) {
            const num *query = s->query[t * TILE_ROWS];
            const int two = t + 1 < num_tiles;
            zero_sums(two);
            multiply(query, TILE_DIM, kv->k[g], kv->k[g + 1], kv->k_stride * sizeof(num), DIM_IN_PLACE, two);
            multiply(query + DIM_IN_PLACE, TILE_DIM, key[g], key[g + 1], sizeof(key[g][0]), TILE_DIM - DIM_IN_PLACE, two);
            store_sums(s->score[t * TILE_ROWS] + g * LANES, CHUNK, two);
        }
    }
}

static void tile_values(tile_state *s, const key_chunk *kv, const key_chunk *next, int num_tiles, int few) {
    _Alignas(64) unit value[CHUNK / PAIR][TILE_DIM];
    for (int t = 0; t < CHUNK; t += PAIR) {
        if (TILE_DIM > HEAD_DIM)
            memset(value[t / PAIR] + TILE_DIM - TILE_K, 0, TILE_K * sizeof(unit));
        for (int v = 0; v < HEAD_VECS; v++) {
            const int d = first_dim(v);
            put_unit_vec(value[t / PAIR] + d, kv_join_at(kv->v[t] + d, kv->v[t + 1] + d));
            if (few && v % PAIR == 0)
                for (int i = 0; i < PAIR; i++)
                    __builtin_prefetch(next->v[t + i] + d, 0, 2);
        }
    }
    finish_writing();
    for (int d = 0; d < TILE_DIM; d += 2 * LANES)
        for (int t = 0; t < num_tiles; t += 2) {
            float *acc = s->acc[t * TILE_ROWS] + d;
            const int two = t + 1 < num_tiles;
            load_sums(acc, TILE_DIM, two);
            multiply(s->weight[t * TILE_ROWS], CHUNK, value[0] + d, value[0] + d + LANES, sizeof(value[0]), CHUNK, two);
            store_sums(acc, TILE_DIM, two);
        }
}

/* -- both products of one row in vectors: the same bits, and nothing is copied ----------------------------------- */

/* An instruction for tiles adds up the TILE_K products of a sum like this (Intel's manual, TDPBF16PS): those at even places one
 * after another, those at odd places too, then sum + (even + odd). It rounds as `fused` does, and takes denormals for 0. */
static inline void add_sums(float *sum, vec even, vec odd) { put(sum, vec_from(sum) + (even + odd)); }

static inline vec even_of(unit_vec x) { return (vec)_mm512_slli_epi32((__m512i)x, 16); }
static inline vec odd_of(unit_vec x) { return (vec)_mm512_and_si512((__m512i)x, _mm512_set1_epi32((int)0xffff0000)); }

/* Returns the state before. */
static inline unsigned make_denormals_0(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
    finish_writing();
    return before;
}
static inline void leave_denormals(unsigned before) {
    finish_writing();
    _mm_setcsr(before);
}

static void row_scores(tile_state *s, const key_chunk *kv, const key_chunk *next) {
    float query[GROUP][HEAD_DIM];
    for (int m = 0; m < GROUP; m++) {
        for (int d = 0; d < HEAD_DIM; d++)
            query[m][d] = load(s->query[m][d]);
        memset(s->score[m], 0, sizeof(s->score[m]));
    }
    const unsigned before = make_denormals_0();
    for (int g = 0; g < KEY_VECS; g += ROW_KEYS)
        for (int first = 0; first < HEAD_UNITS; first += TILE_K / PAIR) {
            vec even[GROUP][ROW_KEYS] = {{{0}}}, odd[GROUP][ROW_KEYS] = {{{0}}};
            for (int u = first; u < HEAD_UNITS && u < first + TILE_K / PAIR; u++)
                for (int i = 0; i < ROW_KEYS; i++) {
                    const unit_vec key = kv_units_at(kv->k[g + i] + u * kv->k_stride);
                    __builtin_prefetch(next->k[g + i] + u * next->k_stride, 0, 2);
                    for (int m = 0; m < GROUP; m++) {
                        even[m][i] = fused(in_all(query[m][u * PAIR]), even_of(key), even[m][i]);
                        odd[m][i] = fused(in_all(query[m][u * PAIR + 1]), odd_of(key), odd[m][i]);
                    }
                }
            for (int m = 0; m < GROUP; m++)
                for (int i = 0; i < ROW_KEYS; i++)
                    add_sums(s->score[m] + (g + i) * LANES, even[m][i], odd[m][i]);
        }
    leave_denormals(before);
}

/* Vector v of acc begins at v * LANES. */
static void row_values(tile_state *s, const key_chunk *kv, const key_chunk *next) {
    float weight[GROUP][CHUNK];
    for (int m = 0; m < GROUP; m++)
        for (int t = 0; t < CHUNK; t += LANES)
            put(weight[m] + t, floats_at(s->weight[m] + t));
    const unsigned before = make_denormals_0();
    for (int v = 0; v < HEAD_VECS; v += ROW_VALUES)
        for (int first = 0; first < CHUNK; first += TILE_K) {
            vec even[GROUP][ROW_VALUES] = {{{0}}}, odd[GROUP][ROW_VALUES] = {{{0}}};
            for (int t = first; t < first + TILE_K; t += PAIR)
                for (int i = 0; i < ROW_VALUES; i++) {
                    const vec low = kv_floats_at(kv->v[t] + first_dim(v + i));
                    const vec high = kv_floats_at(kv->v[t + 1] + first_dim(v + i));
                    const int line = v + i; /* of the two values at t */
                    __builtin_prefetch(next->v[t + line % PAIR] + line / PAIR * LANES * PAIR, 0, 2);
                    for (int m = 0; m < GROUP; m++) {
                        even[m][i] = fused(in_all(weight[m][t]), low, even[m][i]);
                        odd[m][i] = fused(in_all(weight[m][t + 1]), high, odd[m][i]);
                    }
                }
            for (int m = 0; m < GROUP; m++)
                for (int i = 0; i < ROW_VALUES; i++)
                    add_sums(s->acc[m] + (v + i) * LANES, even[m][i], odd[m][i]);
        }
    leave_denormals(before);
}

/* Attention of an item's rows to its keys up to end_key - 1, in chunks, with an online softmax (FlashAttention,
 * arXiv:2205.14135). then: what the thread computes next, or NULL. */
static void attend_tiles(partial *out, const attention_args *args, const attention_item *item, int64_t end_key,
                         const attention_item *then) {
    const attention_task *task = item->task;
    const int num_queries = task->num_rows * GROUP, num_tiles = (num_queries + TILE_ROWS - 1) / TILE_ROWS;
    key_chunk chunks[2];
    tile_state s;
    for (int m = 0; m < num_tiles * TILE_ROWS; m++) {
        memcpy(s.query[m], m < num_queries ? query_at(args, task, item->kv_head, m) : zeros, sizeof(zeros));
        memset(s.query[m] + HEAD_DIM, 0, sizeof(s.query[m]) - sizeof(zeros));
        memset(s.acc[m], 0, sizeof(s.acc[m]));
        memset(s.sum[m], 0, sizeof(s.sum[m]));
        s.max[m] = MASKED;
        if (m >= num_queries)
            memset(s.weight[m], 0, sizeof(s.weight[m]));
    }
    const int few = task->num_rows < TASK_ROWS, in_vectors = ROW_IN_VECTORS && task->num_rows == 1;
    if (!in_vectors)
        configure_tiles(num_queries < TILE_ROWS ? num_queries : TILE_ROWS, num_tiles > 1 ? TILE_ROWS : 0);
    find_chunk(&chunks[0], args, task, item->kv_head, item->first_key, end_key);
    for (int64_t i = 0, first = item->first_key; first < end_key; i++, first += CHUNK) {
        key_chunk *kv = &chunks[i % 2], *next = &chunks[(i + 1) % 2];
        if (then && first + CHUNK >= end_key)
            find_chunk(next, args, then->task, then->kv_head, then->first_key, then->end_key);
        else
            find_chunk(next, args, task, item->kv_head, first + CHUNK, end_key);
        if (in_vectors)
            row_scores(&s, kv, next);
        else
            tile_scores(&s, kv, next, num_tiles, few);
        weigh_chunk(&s, args, task, kv, first, num_tiles);
        if (in_vectors)
            row_values(&s, kv, next);
        else
            tile_values(&s, kv, next, num_tiles, few);
    }
    if (!in_vectors)
        _tile_release();
    for (int m = 0; m < num_queries; m++) {
        for (int v = 0; v < HEAD_VECS; v++)
            memcpy(out[m].acc + first_dim(v), s.acc[m] + (in_vectors ? v * LANES : first_dim(v)), sizeof(vec));
        out[m].max = s.max[m] <= MASKED ? MASKED : s.max[m] / LOG2_E;
        out[m].sum = sum_of(s.sum[m]);
    }
}
