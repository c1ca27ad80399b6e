/* What the files of attention share: a task, its result, and the way through the block table. A part of cpu/heads.c.
 *
 * The keys are cut at fixed positions, into chunks of CHUNK for the softmax and into parts of PART_KEYS for the cores. So
 * a row's sums have the same order whatever else a step computes.
 */

enum {
    CHUNK = 64,                                      /* keys of one round of the online softmax */
    PART_KEYS = 256,                                 /* keys that one core computes; a multiple of CHUNK */
    QUERY_VECS = (TASK_ROWS * GROUP + LANES - 1) / LANES, /* vectors that hold the queries of a task, a lane each */
    KEY_VECS = CHUNK / LANES,                        /* vectors that hold a dimension of a chunk's keys */
};
/* The score of a key that a query does not see. Finite: the difference of two is 0. */
static const float MASKED = -1e30f;

/* Rows first_row to first_row + num_rows - 1 of q. The first of them sees the keys 0 to num_keys - 1, the next one key
 * more; with a window each sees only the last of these. Where attention is bidirectional (the patches of an image), all
 * of them see num_keys keys. */
typedef struct {
    int64_t first_row, num_rows, seq, num_keys;
} attention_task;

/* Keys that a task's row sees and its first row does not. */
#ifdef BIDIRECTIONAL
static inline int64_t later_keys(int64_t row) { return (void)row, 0; }
#else
static inline int64_t later_keys(int64_t row) { return row; }
#endif

/* A task for one KV head, or a part of it: the keys first_key to end_key - 1. */
typedef struct {
    const attention_task *task;
    int64_t kv_head, first_key, end_key; /* keys that any row of the task sees; from a chunk's first key on */
} attention_item;

/* A query's attention to some keys is acc / sum, relative to max, the largest score. */
typedef struct {
    float acc[HEAD_DIM], max, sum;
} partial;

static inline void forget(partial *out, int num_queries) {
    for (int m = 0; m < num_queries; m++)
        out[m] = (partial){.max = MASKED};
}

/* What all layers of a step have in common. cpu/c_kernels.py has the same fields in the same order, here and below. */
typedef struct {
    const int32_t *tables;       /* [sequences][table_width]: block ids */
    const attention_task *tasks; /* [num_tasks] */
    partial *scratch;            /* [num_tasks][num_kv_heads][num_parts][most_rows * GROUP], used if num_parts > 1 */
    int64_t table_width, num_tasks;
    int64_t num_parts; /* 1: the parts of a task are computed one after another; more: side by side, so many at most */
    int64_t most_rows; /* of a task */
} attention_step;

/* Strides count numbers. */
typedef struct {
    int64_t num_rows;
    num *out;                     /* [num_rows][num_kv_heads * GROUP][HEAD_DIM] */
    const num *q;                 /* the same, rows q_stride apart */
    const kv_num *k_cache, *v_cache; /* see kv_cache.h; blocks block_stride apart */
    const attention_step *step;
    int64_t q_stride, block_stride, block_size, num_kv_heads;
    int64_t window; /* how many keys a row sees; 0: all */
    float scale;
} attention_args;

/* Where the keys and values of a chunk lie. Vector g of dimension d: k[g] + d / PAIR * k_stride. */
typedef struct {
    const kv_num *k[KEY_VECS], *v[CHUNK]; /* values that no row sees are zeros */
    int64_t k_stride;
    int num_keys;
    kv_num copied[HEAD_DIM * CHUNK]; /* keys, where a vector of them would reach beyond its block */
#ifdef KV_INT8
    float k_scale[CHUNK], v_scale[CHUNK]; /* 0 after the last key, and for values that no row sees */
#endif
} key_chunk;

static const num zeros[HEAD_DIM];
static const kv_num no_value[HEAD_DIM];

#ifdef KV_INT8
static inline float score_factor(const key_chunk *kv, int t, float scale) { return kv->k_scale[t] * scale; }
static inline vec score_factors(const key_chunk *kv, int t, float scale) { return vec_from(kv->k_scale + t) * scale; }
static inline vec scaled_weight(const key_chunk *kv, int t, vec weight) { return weight * kv->v_scale[t]; }
static inline vec scaled_weights(const key_chunk *kv, int t, vec weights) { return weights * vec_from(kv->v_scale + t); }
#else
static inline float score_factor(const key_chunk *kv, int t, float scale) { return (void)kv, (void)t, scale; }
static inline vec score_factors(const key_chunk *kv, int t, float scale) { return (void)kv, (void)t, in_all(scale); }
static inline vec scaled_weight(const key_chunk *kv, int t, vec weight) { return (void)kv, (void)t, weight; }
static inline vec scaled_weights(const key_chunk *kv, int t, vec weights) { return (void)kv, (void)t, weights; }
#endif

/* Find the keys and values first_key to end_key - 1, or as many of them as a chunk holds, through the block table. */
static inline void find_chunk(key_chunk *kv, const attention_args *args, const attention_task *task, int64_t kv_head,
                              int64_t first_key, int64_t end_key) {
    const int32_t *table = args->step->tables + task->seq * args->step->table_width;
    const int64_t size = args->block_size, left = end_key > first_key ? end_key - first_key : 0;
    const int in_place = size % LANES == 0;
    const int64_t seen_from = args->window ? task->num_keys - args->window - first_key : 0; /* by any row */
    int64_t block = first_key / size, place = first_key % size;
    kv->num_keys = left < CHUNK ? left : CHUNK;
    kv->k_stride = in_place ? size * PAIR : CHUNK * PAIR;
    for (int g = 0; g < KEY_VECS; g++)
        kv->k[g] = kv->copied + g * LANES * PAIR;
    for (int t = 0, end; t < kv->num_keys; t = end, place = 0) { /* a block's keys, t to end - 1 */
        const int64_t at = table[block++] * args->block_stride + kv_head * size * KV_SIZE;
        const kv_num *keys = args->k_cache + at + place * PAIR, *values = args->v_cache + at + place * HEAD_DIM;
        end = size - place < kv->num_keys - t ? t + (int)(size - place) : kv->num_keys;
        for (int i = t; i < end; i++)
            kv->v[i] = values + (i - t) * HEAD_DIM;
#ifdef KV_INT8
        for (int i = t; i < end; i++) {
            kv->k_scale[i] = scale_at(args->k_cache + at, size, place + i - t);
            kv->v_scale[i] = scale_at(args->v_cache + at, size, place + i - t);
        }
#endif
        if (in_place)
            for (int i = t; i < end; i += LANES)
                kv->k[i / LANES] = keys + (i - t) * PAIR;
        else
            for (int i = t; i < end; i++)
                for (int d = 0; d < HEAD_DIM; d++)
                    kv->copied[(d / PAIR * CHUNK + i) * PAIR + d % PAIR] = keys[(d / PAIR * size + i - t) * PAIR + d % PAIR];
    }
    for (int t = 0; t < kv->num_keys && t < seen_from; t++) {
        kv->v[t] = no_value; /* 0 * NaN is NaN */
#ifdef KV_INT8
        kv->v_scale[t] = 0;
#endif
    }
    if (in_place) /* any that can be read: their scores are masked */
        for (int g = (kv->num_keys + LANES - 1) / LANES; g < KEY_VECS; g++)
            kv->k[g] = kv->num_keys ? kv->k[0] : args->k_cache;
    for (int t = kv->num_keys; t < CHUNK; t++) {
        kv->v[t] = no_value;
#ifdef KV_INT8
        kv->k_scale[t] = kv->v_scale[t] = 0;
#endif
    }
}

static inline int64_t end_of_part(int64_t first_key, int64_t end_key) {
    const int64_t end = (first_key / PART_KEYS + 1) * PART_KEYS;
    return end < end_key ? end : end_key;
}

/* Query m of a task for one KV head: query head m % GROUP of row m / GROUP. */
static inline const num *query_at(const attention_args *args, const attention_task *task, int64_t kv_head, int m) {
    return args->q + (task->first_row + m / GROUP) * args->q_stride + (kv_head * GROUP + m % GROUP) * HEAD_DIM;
}
