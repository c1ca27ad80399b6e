/* Attention of one row: a decode (chapter 10). A part of cpu/heads.c.
 *
 * The GROUP queries of the row that share a KV head are too few to fill the lanes of a vector, as a prompt's do. So a
 * lane is a key where scores are computed, and a dimension of the head where values are added up (in the drawing a vector
 * has 16 lanes):
 *
 *                     lane 0   lane 1   lane 2        lane 15
 *     query[m][d]    | q      | q      | q      | ... | q      |            dimension d of query m
 *     key[d]         | t0     | t1     | t2     | ... | t15    | t16 ...    dimension d of 16 keys, as they lie in the cache
 *     score[m]       | t0     | t1     | t2     | ... | t15    | t16 ...    sum over d of query[m][d] * key[d]
 *     weight[m]      | t0     | t1     | t2     | ... | t15    | t16 ...    exp(score[m] - max)
 *     value t        | d0     | d1     | d2     | ... | d15    | d16 ...    as it lies in the cache
 *     acc[m]         | d0     | d1     | d2     | ... | d15    | d16 ...    sum over t of weight[m][t] * value t
 *
 * Every number is the sum of the same products in the same order as in attention_prompt.c, so it has the same bits.
 *
 * A decode waits for memory. So it asks for the next chunk of keys and values while it computes with this one, at the end of
 * a part for the first chunk of what the thread computes next. They go to the core's second cache (2 in the prefetches):
 * it waits for more lines at a time than the first one can.
 */
enum {
    /* Whether this file serves the model. Where it does not, a decode is computed as a prompt of one row. */
    DECODE = GROUP <= 8 && HEAD_DIM >= LANES,
    HEAD_VECS = (HEAD_DIM + LANES - 1) / LANES, /* vectors of a value */
    /* Vectors of keys that are computed together, as many as have their sums in registers beside a query and the keys. */
    SCORE_VECS = (GROUP + 1) * 4 < 2 * STEP ? 4 : (GROUP + 1) * 2 < 2 * STEP ? 2 : 1,
    /* Vectors of a value that are computed together, as many as have their sums in registers. */
    VALUE_VECS = HEAD_VECS % 4 == 0 && GROUP * 4 <= STEP ? 4 : HEAD_VECS % 2 == 0 && GROUP * 2 <= STEP ? 2 : 1,
    QUERIES = GROUP < LANES ? LANES : GROUP, /* lanes of a vector, a query each; where DECODE is 0, this is not reached */
};

/* The first dimension of a value's vector. If HEAD_DIM is no multiple of LANES, the last two have some in common, whose sums
 * are computed twice and have the same bits. */
static inline int first_dim(int v) {
    return HEAD_DIM % LANES == 0 || v < HEAD_VECS - 1 ? v * LANES : HEAD_DIM - LANES;
}

/* score[m][t] = query m * key t * scale. */
static inline void decode_scores(float (*restrict score)[CHUNK], const unit (*query)[HEAD_UNITS], const key_chunk *kv,
                                 const key_chunk *next, float scale) {
    for (int g = 0; g * LANES < kv->num_keys; g += SCORE_VECS) {
        vec sum[GROUP][SCORE_VECS] = {{{0}}};
        for (int u = 0; u < HEAD_UNITS; u++) {
            unit_vec key[SCORE_VECS];
            for (int i = 0; i < SCORE_VECS; i++) {
                key[i] = kv_units_at(kv->k[g + i] + u * kv->k_stride);
                __builtin_prefetch(next->k[g + i] + u * next->k_stride, 0, 2);
            }
            for (int m = 0; m < GROUP; m++)
                for (int i = 0; i < SCORE_VECS; i++)
                    sum[m][i] = multiply_add(sum[m][i], all_lanes(query[m][u]), key[i]);
        }
        for (int m = 0; m < GROUP; m++)
            for (int i = 0; i < SCORE_VECS; i++)
                put(score[m] + (g + i) * LANES, sum[m][i] * score_factors(kv, (g + i) * LANES, scale));
    }
}

/* Make weights of a chunk's scores, and bring max and sum up to date. The row sees the keys hidden to num_keys - 1 of it. acc
 * belongs to the old maximum: it has to be multiplied by rescale. */
static inline void decode_softmax(float (*restrict score)[CHUNK], unit (*restrict weight)[CHUNK / PAIR],
                                  const key_chunk *kv, partial *restrict out, float *restrict rescale, int hidden) {
    float below[QUERIES] = {0}; /* old maximum - new one */
    for (int m = 0; m < GROUP; m++) {
        for (int t = 0; t < hidden; t++)
            score[m][t] = MASKED;
        for (int t = kv->num_keys; t < CHUNK; t++)
            score[m][t] = MASKED;
        vec largest = in_all(out[m].max);
        for (int g = 0; g < KEY_VECS; g++)
            largest = larger_of(vec_from(score[m] + g * LANES), largest);
        const float max = largest_of(largest);
        below[m] = out[m].max - max;
        out[m].max = max;
    }
    put(rescale, exp_negative(vec_from(below)));
    for (int m = 0; m < GROUP; m++) {
        vec sum[PARTIAL_VECS] = {{0}};
        float lanes[PARTIAL_SUMS];
        for (int g = 0; g < KEY_VECS; g++) {
            const vec w = exp_negative(vec_from(score[m] + g * LANES) - out[m].max);
            sum[g % PARTIAL_VECS] += w;
            put_units(weight[m] + g * LANES / PAIR, scaled_weights(kv, g * LANES, w));
        }
        memcpy(lanes, sum, sizeof(lanes));
        out[m].sum = out[m].sum * rescale[m] + sum_of(lanes);
    }
}

/* acc = acc * rescale[m] + sum over t of weight[m][t] * value t. */
static inline void decode_values(float (*restrict acc)[HEAD_VECS][LANES], const unit (*weight)[CHUNK / PAIR],
                                 const key_chunk *kv, const key_chunk *next, const float *rescale) {
    for (int v = 0; v < HEAD_VECS; v += VALUE_VECS) {
        vec sum[GROUP][VALUE_VECS];
        for (int m = 0; m < GROUP; m++)
            for (int i = 0; i < VALUE_VECS; i++)
                sum[m][i] = vec_from(acc[m][v + i]) * rescale[m];
        for (int t = 0; t < kv->num_keys; t += PAIR) {
            const kv_num *low = kv->v[t], *high = kv->v[t + PAIR - 1];
            for (int i = 0; i < VALUE_VECS; i++) {
                const unit_vec value = kv_join_at(low + first_dim(v + i), high + first_dim(v + i));
                const int line = v + i; /* of the PAIR values at t */
                __builtin_prefetch(next->v[t + line % PAIR] + line / PAIR * LANES * PAIR, 0, 2);
                for (int m = 0; m < GROUP; m++)
                    sum[m][i] = multiply_add(sum[m][i], all_lanes(weight[m][t / PAIR]), value);
            }
        }
        for (int m = 0; m < GROUP; m++)
            for (int i = 0; i < VALUE_VECS; i++)
                put(acc[m][v + i], sum[m][i]);
    }
}

/* Attention of an item, whose task has one row, to its keys up to end_key - 1, in chunks, with an online softmax
 * (FlashAttention, arXiv:2205.14135). then: what the thread computes next, or NULL. */
static void attend_decode(partial *out, const attention_args *args, const attention_item *item, int64_t end_key,
                          const attention_item *then) {
    const attention_task *task = item->task;
    const int64_t kv_head = item->kv_head, first_key = item->first_key;
    key_chunk chunks[2];
    unit query[GROUP][HEAD_UNITS], weight[GROUP][CHUNK / PAIR];
    float score[GROUP][CHUNK], rescale[QUERIES], acc[GROUP][HEAD_VECS][LANES] = {{{0}}};
    forget(out, GROUP);
    for (int m = 0; m < GROUP; m++)
        for (int u = 0; u < HEAD_UNITS; u++)
            query[m][u] = unit_at(query_at(args, task, kv_head, m) + u * PAIR);
    find_chunk(&chunks[0], args, task, kv_head, first_key, end_key);
    for (int64_t i = 0, first = first_key; first < end_key; i++, first += CHUNK) {
        key_chunk *kv = &chunks[i % 2], *next = &chunks[(i + 1) % 2];
        const int64_t hidden = args->window ? task->num_keys - args->window - first : 0; /* less than CHUNK */
        if (then && first + CHUNK >= end_key)
            find_chunk(next, args, then->task, then->kv_head, then->first_key, then->end_key);
        else
            find_chunk(next, args, task, kv_head, first + CHUNK, end_key);
        decode_scores(score, query, kv, next, args->scale);
        decode_softmax(score, weight, kv, out, rescale, hidden);
        decode_values(acc, weight, kv, next, rescale);
    }
    for (int m = 0; m < GROUP; m++)
        for (int v = 0; v < HEAD_VECS; v++)
            memcpy(out[m].acc + first_dim(v), acc[m][v], sizeof(acc[m][v]));
}
