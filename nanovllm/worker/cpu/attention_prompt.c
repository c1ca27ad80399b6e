/* Attention of many queries to one chunk of keys: a prompt (chapter 10). A part of cpu/heads.c.
 *
 * The queries of a task belong to one sequence and one KV head and share every key. Query m is query head m % GROUP of
 * row m / GROUP. A lane is a query, and the numbers of a key or value are taken one by one, each for all lanes (in the
 * drawing a vector has 16):
 *
 *                     lane 0   lane 1   lane 2        lane 15
 *     query[d]       | q0     | q1     | q2     | ... | q15    |    dimension d of 16 queries
 *     key[t][d]      | k      | k      | k      | ... | k      |    dimension d of key t
 *     score[t]       | s0     | s1     | s2     | ... | s15    |    sum over d of query[d] * key[t][d]
 *     weight[t]      | w0     | w1     | w2     | ... | w15    |    exp(score[t] - running_max)
 *     value[t][d]    | v      | v      | v      | ... | v      |    dimension d of value t
 *     acc[d]         | a0     | a1     | a2     | ... | a15    |    sum over t of weight[t] * value[t][d]
 *
 * Where a unit is two numbers (vectors.h), a unit of a query or key is two neighbouring dimensions, and a unit of a
 * weight or value is two neighbouring keys: in both cases neighbours in what a product sums over.
 */
enum {
    VECS = STEP == 16 ? 3 : 2, /* vectors of queries that are computed together, at most: so many share what is loaded */
    PADDED_DIM = (HEAD_DIM + STEP - 1) / STEP * STEP, /* dimensions of value and acc; those after HEAD_DIM are 0 */
};

typedef struct {
    _Alignas(vec) unit key[KEY_VECS][HEAD_UNITS][LANES], value[CHUNK / PAIR][PADDED_DIM];
} unit_chunk;

/* Lay out a chunk's keys and values for multiply_add(), up to num_padded: those after num_keys are multiplied by 0. */
static inline void read_chunk(unit_chunk *units, const key_chunk *kv, int num_padded) {
    for (int g = 0; g * LANES < num_padded; g++)
        for (int u = 0; u < HEAD_UNITS; u++)
            put_unit_vec(units->key[g][u], kv_units_at(kv->k[g] + u * kv->k_stride));
    for (int t = 0; t < num_padded; t += PAIR) {
        for (int d = 0; d < HEAD_DIM; d++)
            units->value[t / PAIR][d] = kv_join(kv->v[t][d], kv->v[t + PAIR - 1][d]);
        for (int d = HEAD_DIM; d < PADDED_DIM; d++)
            units->value[t / PAIR][d] = 0;
    }
}

/* Make weights of a chunk's scores, [t][lane], and bring running_max and running_sum up to date. Lane l sees the keys
 * hidden[l] to visible[l] - 1; neither is less than in the lane before. Returns rescale: acc belongs to the old maximum
 * and has to be multiplied by it.
 *
 * While a lane has seen no key, its running_max is MASKED, and keys that it does not see have weight exp(0) = 1. Its
 * first visible key undoes that: rescale is then 0. */
static inline vec online_softmax(float (*restrict score)[LANES], unit (*restrict weight)[LANES],
                                 const key_chunk *kv, float *restrict running_max, float *restrict running_sum,
                                 const int *hidden, const int *visible, int num_keys) {
    const vec old_max = vec_from(running_max);
    vec max = old_max, sum[PARTIAL_SUMS] = {{0}};
    for (int t = 0; t < hidden[LANES - 1]; t++)
        for (int l = 0; l < LANES; l++)
            score[t][l] = t < hidden[l] ? MASKED : score[t][l];
    for (int t = visible[0]; t < num_keys; t++)
        for (int l = 0; l < LANES; l++)
            score[t][l] = t < visible[l] ? score[t][l] : MASKED;
    for (int t = 0; t < num_keys; t++)
        max = larger_of(vec_from(score[t]), max);
    for (int first = 0; first < num_keys; first += PARTIAL_SUMS) /* j is a constant: the sums stay in registers */
        for (int j = 0; j < PARTIAL_SUMS; j += PAIR) {
            const int t = first + j;
            const vec low = exp_negative(vec_from(score[t]) - max);
            const vec high = PAIR == 1 ? low : exp_negative(vec_from(score[t + PAIR - 1]) - max);
            const unit_vec joined = join_vecs(scaled_weight(kv, t, low), scaled_weight(kv, t + PAIR - 1, high));
            memcpy(weight[t / PAIR], &joined, sizeof(joined));
            sum[j] += low;
            if (PAIR == 2)
                sum[j + 1] += high;
        }
    for (int half = PARTIAL_SUMS / 2; half; half /= 2) /* the tree of sum_of() */
        for (int j = 0; j < half; j++)
            sum[j] += sum[j + half];
    const vec rescale = exp_negative(old_max - max);
    put(running_max, max);
    put(running_sum, vec_from(running_sum) * rescale + sum[0]);
    return rescale;
}

/* Keys, or dimensions of values, that are taken at a time: so many that the sums of `vecs` vectors stay in registers. */
static inline __attribute__((always_inline)) int taken(int vecs) { return vecs == 1 ? STEP : STEP / 2; }

/* score[i][t] for `vecs` vectors of queries, 1 to VECS: each key that is loaded serves all of them. */
static inline __attribute__((always_inline)) void prompt_scores(const int vecs, float (*restrict score)[CHUNK][LANES],
                                                                const unit (*query)[HEAD_UNITS][LANES],
                                                                const unit_chunk *units, const key_chunk *kv,
                                                                int num_keys, float scale) {
    for (int t = 0; t < num_keys; t += taken(vecs)) {
        vec sum[VECS][STEP] = {{{0}}};
        const unit *key = units->key[t / LANES][0] + t % LANES; /* one pointer for all keys: with one for each, registers run out */
        for (int u = 0; u < HEAD_UNITS; u++) {
            unit_vec q[VECS];
            for (int i = 0; i < vecs; i++)
                q[i] = in_register(unit_vec_from(query[i][u]));
            for (int j = 0; j < taken(vecs); j++) {
                const unit_vec k = all_lanes(key[j]);
                for (int i = 0; i < vecs; i++)
                    sum[i][j] = multiply_add(sum[i][j], q[i], k);
            }
            key += LANES;
        }
        for (int i = 0; i < vecs; i++)
            for (int j = 0; j < taken(vecs); j++)
                put(score[i][t + j], sum[i][j] * score_factor(kv, t + j, scale));
    }
}

/* acc[i] = acc[i] * rescale[i] + weight[i] * value. */
static inline __attribute__((always_inline)) void prompt_values(const int vecs, float (*restrict acc)[PADDED_DIM][LANES],
                                                                const unit (*weight)[CHUNK / PAIR][LANES],
                                                                const unit_chunk *units, int num_keys,
                                                                const vec *rescale) {
    for (int d = 0; d < PADDED_DIM; d += taken(vecs)) {
        vec sum[VECS][STEP];
        for (int i = 0; i < vecs; i++)
            for (int j = 0; j < taken(vecs); j++)
                sum[i][j] = vec_from(acc[i][d + j]) * rescale[i];
        for (int u = 0; u < num_keys / PAIR; u++) {
            unit_vec w[VECS];
            for (int i = 0; i < vecs; i++)
                w[i] = in_register(unit_vec_from(weight[i][u]));
            for (int j = 0; j < taken(vecs); j++) {
                const unit_vec v = all_lanes(units->value[u][d + j]);
                for (int i = 0; i < vecs; i++)
                    sum[i][j] = multiply_add(sum[i][j], w[i], v);
            }
        }
        for (int i = 0; i < vecs; i++)
            for (int j = 0; j < taken(vecs); j++)
                put(acc[i][d + j], sum[i][j]);
    }
}

static inline void load_queries(unit (*queries)[HEAD_UNITS][LANES], const attention_args *args,
                                const attention_task *task, int64_t kv_head, int num_vecs) {
    for (int m = 0; m < num_vecs * LANES; m++) {
        const num *q = m < task->num_rows * GROUP ? query_at(args, task, kv_head, m) : zeros;
        for (int u = 0; u < HEAD_UNITS; u++)
            queries[m / LANES][u][m % LANES] = unit_at(q + u * PAIR);
    }
}

/* visible[l]: how many of a chunk's keys lane l of query vector w sees. */
static inline void count_visible(int *visible, const attention_task *task, int w, int64_t first_key, int num_keys) {
    for (int l = 0; l < LANES; l++) {
        const int64_t seen = task->num_keys + later_keys((w * LANES + l) / GROUP) - first_key;
        visible[l] = seen < 0 ? 0 : seen < num_keys ? seen : num_keys;
    }
}

/* A part of the keys is done: add it to those before it, as add_part() does, and forget it. */
static inline void add_part_in_lanes(float (*restrict all)[LANES], float *restrict all_max, float *restrict all_sum,
                                     float (*restrict acc)[LANES], float *restrict running_max,
                                     float *restrict running_sum) {
    const vec max = larger_of(vec_from(running_max), vec_from(all_max));
    const vec before = exp_negative(vec_from(all_max) - max), now = exp_negative(vec_from(running_max) - max);
    for (int d = 0; d < PADDED_DIM; d++) {
        put(all[d], vec_from(all[d]) * before + vec_from(acc[d]) * now);
        put(acc[d], (vec){0});
    }
    put(all_max, max);
    put(all_sum, vec_from(all_sum) * before + vec_from(running_sum) * now);
    put(running_max, in_all(MASKED));
    put(running_sum, (vec){0});
}

/* Attention of a task's rows to the keys first_key to end_key - 1, in chunks, with an online softmax (FlashAttention,
 * arXiv:2205.14135). */
static void attend_prompt(partial *out, const attention_args *args, const attention_task *task, int64_t kv_head,
                          int64_t first_key, int64_t end_key) {
    const int num_queries = task->num_rows * GROUP, num_vecs = (num_queries + LANES - 1) / LANES;
    _Alignas(vec) unit queries[QUERY_VECS][HEAD_UNITS][LANES];
    _Alignas(vec) float all[QUERY_VECS][PADDED_DIM][LANES], acc[QUERY_VECS][PADDED_DIM][LANES];
    _Alignas(vec) float score[VECS][CHUNK][LANES];
    _Alignas(vec) unit weight[VECS][CHUNK / PAIR][LANES];
    float all_max[QUERY_VECS * LANES], all_sum[QUERY_VECS * LANES];
    float running_max[QUERY_VECS * LANES], running_sum[QUERY_VECS * LANES];
    key_chunk kv;
    unit_chunk units;
    vec rescale[VECS];
    int hidden[LANES] = {0};

    load_queries(queries, args, task, kv_head, num_vecs);
    memset(all, 0, num_vecs * sizeof(all[0]));
    memset(acc, 0, num_vecs * sizeof(acc[0]));
    for (int m = 0; m < num_vecs * LANES; m++) {
        all_max[m] = running_max[m] = MASKED;
        all_sum[m] = running_sum[m] = 0;
    }
    for (int64_t first = first_key; first < end_key; first += CHUNK) {
        find_chunk(&kv, args, task, kv_head, first, end_key);
        const int num_padded = (kv.num_keys + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
        read_chunk(&units, &kv, num_padded);
        for (int w = 0, vecs; w < num_vecs; w += vecs) {
            const int left = num_vecs - w;
            vecs = left == 1 ? 1 : left == 2 || left == 4 || VECS == 2 ? 2 : VECS; /* not 3 of 4: the last would be alone */
            if (vecs == 1) /* a constant in each call, so that the sums stay in registers */
                prompt_scores(1, score, queries + w, &units, &kv, num_padded, args->scale);
            else if (vecs == 2)
                prompt_scores(2, score, queries + w, &units, &kv, num_padded, args->scale);
            else
                prompt_scores(VECS, score, queries + w, &units, &kv, num_padded, args->scale);
            for (int i = 0; i < vecs; i++) {
                const int m = (w + i) * LANES;
                int visible[LANES];
                count_visible(visible, task, w + i, first, kv.num_keys);
                if (args->window) /* a row does not see what the row so many positions before it sees */
                    count_visible(hidden, task, w + i, first + args->window, kv.num_keys);
                rescale[i] = online_softmax(score[i], weight[i], &kv, running_max + m, running_sum + m, hidden,
                                            visible, num_padded);
            }
            if (vecs == 1)
                prompt_values(1, acc + w, weight, &units, num_padded, rescale);
            else if (vecs == 2)
                prompt_values(2, acc + w, weight, &units, num_padded, rescale);
            else
                prompt_values(VECS, acc + w, weight, &units, num_padded, rescale);
        }
        if (first + CHUNK >= end_of_part(first, end_key))
            for (int w = 0; w < num_vecs; w++)
                add_part_in_lanes(all[w], all_max + w * LANES, all_sum + w * LANES, acc[w], running_max + w * LANES,
                                  running_sum + w * LANES);
    }
    for (int m = 0; m < num_queries; m++) {
        for (int d = 0; d < HEAD_DIM; d++)
            out[m].acc[d] = all[m / LANES][d][m % LANES];
        out[m].max = all_max[m];
        out[m].sum = all_sum[m];
    }
}
