/* Attention by Intel's AMX: instructions for matrices of bf16 (amx.h, chapter 10). A part of cpu/heads.c.
 *
 * A query is a row of both products of attention. Pairs of what they sum over lie side by side as in the cache (kv_cache.h):
 *
 *     query          [16][32 dimensions]          weight         [16][32 keys]
 *     key            [16 pairs][16 keys][2]       value          [16 pairs of keys][16 dimensions][2]
 *     score          [16][16 keys]                acc            [16][16 dimensions]
 *
 * A row's bits do not tell how many others there are: a decode is computed as a prompt is, and so its bits are the same.
 */
#include "amx.h"

enum {
    PART_QUERIES = TASK_ROWS * GROUP, /* that are computed a part of the keys at a time, at most */
    QUERIES_OF_TASK = (PART_QUERIES + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS,
};

static const float LOG2_E = 1.44269504f;

/* out [rows][out_stride] = x [rows][x_stride] times columns 0 to 15, which lie at `left`, and 16 to 31, at `right`, y_bytes
 * from one pair to the next; if `more`, that is added to out. rows: of one tile, or, if `two`, of two whole ones. */
static inline void multiply(float *out, int64_t out_stride, const num *x, int64_t x_stride, const void *left,
                            const void *right, int64_t y_bytes, int64_t k, int two, const int more) {
    const char *l = left, *r = right;
    if (more)
        load_sums(out, out_stride, two);
    else
        zero_sums(two);
    for (int64_t i = 0; i < k; i += TILE_K) {
        add_products(x + i, x_stride * sizeof(num), l, r, y_bytes, two, 0);
        l += TILE_ROWS * y_bytes;
        r += TILE_ROWS * y_bytes;
    }
    store_sums(out, out_stride, two);
}

/* A part's state, for each query of a task. Those after the last one are zeros. Scores, and so max, are binary logarithms
 * of weights: 2^x is less work than e^x. */
typedef struct {
    _Alignas(64) num query[QUERIES_OF_TASK][HEAD_DIM], weight[QUERIES_OF_TASK][CHUNK];
    _Alignas(64) float score[QUERIES_OF_TASK][CHUNK], acc[QUERIES_OF_TASK][HEAD_DIM];
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

/* Attention of a task's queries, num_tiles tiles of them, to a chunk of keys. Few queries wait for memory, and ask for the
 * next chunk before, as in attention_decode.c. */
static void attend_chunk(tile_state *s, const attention_args *args, const attention_task *task, const key_chunk *kv,
                         const key_chunk *next, int64_t first_key, int num_tiles) {
    _Alignas(64) unit value[CHUNK / PAIR][HEAD_DIM];
#ifdef KV_INT8
    _Alignas(64) unit key[KEY_VECS][HEAD_UNITS][LANES];
#endif
    const int num_queries = task->num_rows * GROUP, few = task->num_rows < TASK_ROWS;
    for (int g = 0; g < KEY_VECS; g += 2) {
        const void *keys[2];
        int64_t key_bytes = kv->k_stride * sizeof(num);
        for (int i = 0; i < 2; i++) {
            keys[i] = kv->k[g + i];
#ifdef KV_INT8
            for (int u = 0; u < HEAD_UNITS; u++)
                put_unit_vec(key[g + i][u], kv_units_at(kv->k[g + i] + u * kv->k_stride));
            keys[i] = key[g + i], key_bytes = sizeof(key[0][0]);
#endif
            for (int u = 0; u < HEAD_UNITS && few; u++)
                __builtin_prefetch(next->k[g + i] + u * next->k_stride, 0, 2);
        }
        finish_writing();
        for (int t = 0; t < num_tiles; t += 2)
            multiply(s->score[t * TILE_ROWS] + g * LANES, CHUNK, s->query[t * TILE_ROWS], HEAD_DIM, keys[0], keys[1],
                     key_bytes, HEAD_DIM, t + 1 < num_tiles, 0);
    }
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
                for (int d = 0; d < HEAD_DIM; d += LANES)
                    put(s->acc[m] + d, vec_from(s->acc[m] + d) * s->rescale[m]);
    }
    for (int t = 0; t < CHUNK; t += PAIR)
        for (int d = 0; d < HEAD_DIM; d += LANES) {
            put_unit_vec(value[t / PAIR] + d, kv_join_at(kv->v[t] + d, kv->v[t + 1] + d));
            if (few && d % (PAIR * LANES) == 0)
                for (int i = 0; i < PAIR; i++)
                    __builtin_prefetch(next->v[t + i] + d, 0, 2);
        }
    finish_writing();
    for (int d = 0; d < HEAD_DIM; d += 2 * LANES)
        for (int t = 0; t < num_tiles; t += 2)
            multiply(s->acc[t * TILE_ROWS] + d, HEAD_DIM, s->weight[t * TILE_ROWS], CHUNK, value[0] + d,
                     value[0] + d + LANES, sizeof(value[0]), CHUNK, t + 1 < num_tiles, 1);
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
        memcpy(s.query[m], m < num_queries ? query_at(args, task, item->kv_head, m) : zeros, sizeof(s.query[m]));
        memset(s.acc[m], 0, sizeof(s.acc[m]));
        memset(s.sum[m], 0, sizeof(s.sum[m]));
        s.max[m] = MASKED;
        if (m >= num_queries)
            memset(s.weight[m], 0, sizeof(s.weight[m]));
    }
    configure_tiles(num_queries < TILE_ROWS ? num_queries : TILE_ROWS, num_tiles > 1 ? TILE_ROWS : 0);
    find_chunk(&chunks[0], args, task, item->kv_head, item->first_key, end_key);
    for (int64_t i = 0, first = item->first_key; first < end_key; i++, first += CHUNK) {
        key_chunk *kv = &chunks[i % 2], *next = &chunks[(i + 1) % 2];
        if (then && first + CHUNK >= end_key)
            find_chunk(next, args, then->task, then->kv_head, then->first_key, then->end_key);
        else
            find_chunk(next, args, task, item->kv_head, first + CHUNK, end_key);
        attend_chunk(&s, args, task, kv, next, first, num_tiles);
    }
    _tile_release();
    for (int m = 0; m < num_queries; m++) {
        memcpy(out[m].acc, s.acc[m], sizeof(out[m].acc));
        out[m].max = s.max[m] <= MASKED ? MASKED : s.max[m] / LOG2_E;
        out[m].sum = sum_of(s.sum[m]);
    }
}
