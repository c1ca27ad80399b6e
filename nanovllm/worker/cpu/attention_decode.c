/* Attention of one row: a decode (chapter 10). A part of cpu/kernels.c.
 *
 * The GROUP queries of the row that share a KV head are too few to fill the lanes of a vector, as a prompt's do. So a
 * lane is a dimension of the head where keys and values are read, and a key in the softmax (in the drawing a vector has
 * 16 lanes):
 *
 *                     lane 0   lane 1   lane 2        lane 15
 *     query[m]       | d0     | d1     | d2     | ... | d15    | d16 ...
 *     key t          | d0     | d1     | d2     | ... | d15    | d16 ...    as they lie in the cache
 *     sum[m][t]      |        |        |        | ... |        |            query[m] * key t, still to be summed up
 *     score[m]       | t0     | t1     | t2     | ... | t15    | t16 ...    the sum over the lanes of sum[m][t]
 *     weight[m]      | t0     | t1     | t2     | ... | t15    | t16 ...    exp(score[m] - running_max[m])
 *     value t        | d0     | d1     | d2     | ... | d15    | d16 ...
 *     acc[m]         | d0     | d1     | d2     | ... | d15    | d16 ...    sum over t of weight[m][t] * value t
 *
 * A decode waits for memory. So it asks for the next chunk of keys and values while it computes with this one.
 */
enum {
    VEC_NUMS = LANES * PAIR, /* numbers of a unit_vec of a query or key */
    HEAD_VECS = HEAD_DIM / VEC_NUMS,
    /* Whether this file serves the model. Where it does not, a decode is computed as a prompt of one row. */
    DECODE = GROUP <= 8 && HEAD_DIM % VEC_NUMS == 0,
    /* Vectors of a value that are computed together, as many as have their sums in registers. */
    VALUE_VECS = HEAD_DIM / LANES % 4 == 0 && GROUP * 4 <= STEP   ? 4
                 : HEAD_DIM / LANES % 2 == 0 && GROUP * 2 <= STEP ? 2
                                                                  : 1,
};

/* score[m][t] = query m * key t * scale. */
static inline void decode_scores(float (*restrict score)[CHUNK], const unit_vec (*query)[HEAD_VECS], const key_chunk *kv,
                                 const key_chunk *next, float scale) {
    for (int t = 0; t < kv->num_padded; t += LANES) {
        vec sum[GROUP][LANES];
        for (int j = 0; j < LANES; j++) {
            unit_vec key[HEAD_VECS];
            prefetch(next->k[t + j]);
            prefetch(next->v[t + j]);
            for (int i = 0; i < HEAD_VECS; i++)
                key[i] = units_at(kv->k[t + j] + i * VEC_NUMS);
            for (int m = 0; m < GROUP; m++) {
                vec s = {0};
                for (int i = 0; i < HEAD_VECS; i++)
                    s = multiply_add(s, key[i], query[m][i]);
                sum[m][j] = s;
            }
        }
        for (int m = 0; m < GROUP; m++)
            put(score[m] + t, sum_lanes(sum[m]) * scale);
    }
}

/* Make weights of a chunk's scores, and bring running_max and running_sum up to date. acc belongs to the old maximum:
 * it has to be multiplied by rescale. */
static inline void decode_softmax(float (*restrict score)[CHUNK], unit (*restrict weight)[CHUNK / PAIR],
                                  float *restrict running_max, float *restrict running_sum, float *restrict rescale,
                                  const key_chunk *kv) {
    for (int m = 0; m < GROUP; m++) {
        float max = running_max[m], sum = 0;
        for (int t = kv->num_keys; t < kv->num_padded; t++)
            score[m][t] = MASKED;
        for (int t = 0; t < kv->num_padded; t++)
            max = score[m][t] > max ? score[m][t] : max;
        for (int t = 0; t < kv->num_padded; t++) {
            score[m][t] = exp_negative(score[m][t] - max);
            sum += score[m][t];
        }
        for (int t = 0; t < kv->num_padded; t += LANES)
            put_units(weight[m] + t / PAIR, vec_from(score[m] + t));
        rescale[m] = exp_negative(running_max[m] - max);
        running_sum[m] = running_sum[m] * rescale[m] + sum;
        running_max[m] = max;
    }
}

/* acc[m] = acc[m] * rescale[m] + sum over t of weight[m][t] * value t. */
static inline void decode_values(float (*restrict acc)[HEAD_DIM], const unit (*weight)[CHUNK / PAIR],
                                 const key_chunk *kv, const float *rescale) {
    for (int d = 0; d < HEAD_DIM; d += VALUE_VECS * LANES) {
        vec sum[GROUP][VALUE_VECS];
        for (int m = 0; m < GROUP; m++)
            for (int i = 0; i < VALUE_VECS; i++)
                sum[m][i] = vec_from(acc[m] + d + i * LANES) * rescale[m];
        for (int t = 0; t < kv->num_padded; t += PAIR) {
            const num *low = kv->v[t] + d, *high = kv->v[t + PAIR - 1] + d;
            for (int i = 0; i < VALUE_VECS; i++) {
                const unit_vec value = join_at(low + i * LANES, high + i * LANES);
                for (int m = 0; m < GROUP; m++)
                    sum[m][i] = multiply_add(sum[m][i], value, all_lanes(weight[m][t / PAIR]));
            }
        }
        for (int m = 0; m < GROUP; m++)
            for (int i = 0; i < VALUE_VECS; i++)
                put(acc[m] + d + i * LANES, sum[m][i]);
    }
}

/* Attention of a task of one row to the keys first_key to end_key - 1, in chunks, with an online softmax
 * (FlashAttention, arXiv:2205.14135). */
static void attend_decode(partial *out, const attention_args *args, const attention_task *task, int64_t kv_head,
                          int64_t first_key, int64_t end_key) {
    key_chunk chunks[2];
    unit_vec query[GROUP][HEAD_VECS];
    float score[GROUP][CHUNK], rescale[GROUP];
    unit weight[GROUP][CHUNK / PAIR];
    for (int m = 0; m < GROUP; m++)
        for (int i = 0; i < HEAD_VECS; i++)
            query[m][i] = units_at(query_at(args, task, kv_head, m) + i * VEC_NUMS);
    find_chunk(&chunks[0], args, task, kv_head, first_key, end_key);
    for (int64_t i = 0, first = first_key; first < end_key; i++, first += CHUNK) {
        key_chunk *kv = &chunks[i % 2], *next = &chunks[(i + 1) % 2];
        find_chunk(next, args, task, kv_head, first + CHUNK, end_key);
        decode_scores(score, query, kv, next, args->scale);
        decode_softmax(score, weight, out->running_max, out->running_sum, rescale, kv);
        decode_values(out->acc, weight, kv, rescale);
    }
}
