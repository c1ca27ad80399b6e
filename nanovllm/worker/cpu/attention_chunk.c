/* Attention to one chunk of keys: scores, online softmax, weighted sum of values (chapter 10). A part of cpu/kernels.c.
 *
 * The queries of a task belong to one sequence and one KV head and share every key. Query m is query head m % GROUP of
 * row m / GROUP. What a lane is depends on how many queries there are (in the drawings a vector has 16 lanes):
 *
 * Many queries (a prompt): a lane is a query. The numbers of a key or value are taken one by one, each for all lanes.
 *
 *                     lane 0   lane 1   lane 2        lane 15
 *     query[d]       | q0     | q1     | q2     | ... | q15    |    dimension d of 16 queries
 *     key[t][d]      | k      | k      | k      | ... | k      |    dimension d of key t
 *     score[t]       | s0     | s1     | s2     | ... | s15    |    sum over d of query[d] * key[t][d]
 *     weight[t]      | w0     | w1     | w2     | ... | w15    |    exp(score[t] - running_max)
 *     value[t][d]    | v      | v      | v      | ... | v      |    dimension d of value t
 *     acc[d]         | a0     | a1     | a2     | ... | a15    |    sum over t of weight[t] * value[t][d]
 *
 * Few queries (a decode has GROUP of them): most of these lanes would be empty, so a lane is a dimension of the head.
 *
 *                     lane 0   lane 1   lane 2        lane 15
 *     query[m]       | d0     | d1     | d2     | ... | d15    | d16 ...    query m
 *     key[t]         | d0     | d1     | d2     | ... | d15    | d16 ...    score[t][m]: sum of all query[m] * key[t]
 *     weight[t][m]   | w      | w      | w      | ... | w      | w   ...
 *     value[t]       | d0     | d1     | d2     | ... | d15    | d16 ...
 *     acc[m]         | d0     | d1     | d2     | ... | d15    | d16 ...    sum over t of weight[t][m] * value[t]
 *
 * The softmax is the same for both: a lane of score[t] and weight[t] is a query.
 *
 * Where a unit is two numbers (vectors.h), a unit of a query or key is two neighbouring dimensions, and a unit of a
 * weight or value is two neighbouring keys: in both cases neighbours in what a product sums over.
 */
enum {
    CHUNK = 64,                                       /* keys of one round of the online softmax */
    FEW = 8,                                          /* so many queries are few; not more than LANES */
    HEAD_UNITS = HEAD_DIM / PAIR,                     /* units of a query or key */
    PADDED_DIM = (HEAD_DIM + STEP - 1) / STEP * STEP, /* dimensions of value and acc; those behind HEAD_DIM are 0 */
    QUERY_VECS = (TILE * GROUP + LANES - 1) / LANES,  /* vectors that hold the queries of a task, a lane each */
};
/* The score of a key that a query does not see. Not infinity: with -ffast-math a compiler may assume there is none. */
static const float MASKED = -1e30f;

typedef struct {
    _Alignas(vec) unit many[QUERY_VECS][HEAD_UNITS][LANES]; /* many or few is filled, as the drawings show */
    float few[FEW][HEAD_DIM];
} query_set;

typedef struct {
    _Alignas(vec) unit key[CHUNK][HEAD_UNITS]; /* for many queries only */
    _Alignas(vec) unit value[CHUNK / PAIR][PADDED_DIM];
    const num *k[CHUNK], *v[CHUNK]; /* where each key and value lies in the cache */
    int num_padded;                 /* number of keys, rounded up to a multiple of STEP with zeros */
} kv_chunk;

/* Make weights of a chunk's scores, [t][lane], and bring running_max and running_sum up to date. Lane l sees the first
 * visible[l] keys, lane 0 the fewest. Returns rescale: acc belongs to the old maximum and has to be multiplied by it.
 *
 * While a lane has seen no key, its running_max is MASKED, and keys that it does not see have weight exp(0) = 1. Its
 * first visible key undoes that: rescale is then 1e-38. */
static inline vec online_softmax(float (*restrict score)[LANES], unit (*restrict weight)[LANES],
                                 float *restrict running_max, float *restrict running_sum, const int *visible,
                                 int num_keys) {
    float old_max[LANES], rescale[LANES];
    for (int l = 0; l < LANES; l++)
        old_max[l] = running_max[l];
    for (int t = visible[0]; t < num_keys; t++)
        for (int l = 0; l < LANES; l++)
            score[t][l] = t < visible[l] ? score[t][l] : MASKED;
    for (int t = 0; t < num_keys; t++)
        for (int l = 0; l < LANES; l++)
            running_max[l] = score[t][l] > running_max[l] ? score[t][l] : running_max[l];
    for (int l = 0; l < LANES; l++) {
        rescale[l] = exp_negative(old_max[l] - running_max[l]);
        running_sum[l] *= rescale[l];
    }
    for (int t = 0; t < num_keys; t++)
        for (int l = 0; l < LANES; l++) {
            score[t][l] = exp_negative(score[t][l] - running_max[l]);
            running_sum[l] += score[t][l];
        }
    for (int t = 0; t < num_keys; t += PAIR)
        for (int l = 0; l < LANES; l++)
            weight[t / PAIR][l] = join_floats(score[t][l], score[t + PAIR - 1][l]);
    return vec_from(rescale);
}

static inline void scores_many(float (*restrict score)[LANES], const unit (*query)[LANES], const kv_chunk *kv,
                               float scale) {
    for (int t = 0; t < kv->num_padded; t += STEP) {
        vec sum[STEP] = {{0}};
        const unit *key = kv->key[t]; /* one pointer for all STEP keys: with STEP pointers, registers run out */
        for (int u = 0; u < HEAD_UNITS; u++) {
            for (int j = 0; j < STEP; j++)
                sum[j] = multiply_add(sum[j], query[u], key[j * HEAD_UNITS]);
            key++;
        }
        for (int j = 0; j < STEP; j++)
            sum[j] *= scale;
        memcpy(score[t], sum, sizeof(sum));
    }
}

static inline void scores_few(float (*restrict score)[LANES], const float (*query)[HEAD_DIM], const kv_chunk *kv,
                              float scale, int num_queries) {
    for (int t = 0; t < kv->num_padded; t++) {
        float key[HEAD_DIM];
        for (int d = 0; d < HEAD_DIM; d++)
            key[d] = load(kv->k[t][d]);
        for (int m = 0; m < num_queries; m++) {
            float sum = 0;
            for (int d = 0; d < HEAD_DIM; d++)
                sum += query[m][d] * key[d];
            score[t][m] = sum * scale;
        }
    }
}

/* acc = acc * rescale + weight * value, with acc [d][lane]. */
static inline void add_values_many(float (*restrict acc)[LANES], const unit (*weight)[LANES], const kv_chunk *kv,
                                   vec rescale) {
    for (int d = 0; d < PADDED_DIM; d += STEP) {
        vec sum[STEP];
        memcpy(sum, acc[d], sizeof(sum));
        for (int j = 0; j < STEP; j++)
            sum[j] *= rescale;
        for (int u = 0; u < kv->num_padded / PAIR; u++)
            for (int j = 0; j < STEP; j++)
                sum[j] = multiply_add(sum[j], weight[u], kv->value[u][d + j]);
        memcpy(acc[d], sum, sizeof(sum));
    }
}

/* The same with acc [m][d]. */
static inline void add_values_few(float (*restrict acc)[PADDED_DIM], const unit (*weight)[LANES], const kv_chunk *kv,
                                  vec rescale, int num_queries) {
    for (int m = 0; m < num_queries; m++) {
        vec sum[PADDED_DIM / LANES];
        memcpy(sum, acc[m], sizeof(sum));
        for (int j = 0; j < PADDED_DIM / LANES; j++)
            sum[j] *= rescale[m];
        for (int u = 0; u < kv->num_padded / PAIR; u++)
            for (int j = 0; j < PADDED_DIM / LANES; j++)
                sum[j] = multiply_add(sum[j], kv->value[u] + j * LANES, weight[u][m]);
        memcpy(acc[m], sum, sizeof(sum));
    }
}
