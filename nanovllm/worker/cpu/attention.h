/* What the files of attention share: a task, its result, and the way through the block table. A part of cpu/kernels.c. */

enum {
    CHUNK = 64,                                      /* keys of one round of the online softmax */
    QUERY_VECS = (TILE * GROUP + LANES - 1) / LANES, /* vectors that hold the queries of a task, a lane each */
};
/* The score of a key that a query does not see. Not infinity: with -ffast-math a compiler may assume there is none. */
static const float MASKED = -1e30f;

/* Rows first_row to first_row + num_rows - 1 of q. The first of them sees the keys 0 to num_keys - 1, the next one key
 * more; with a window each sees only the last of these. */
typedef struct {
    int64_t first_row, num_rows, seq, num_keys;
} attention_task;

/* What attend() returns for each query. The attention to a part's keys is acc / running_sum. */
typedef struct {
    float acc[QUERY_VECS * LANES][HEAD_DIM], running_max[QUERY_VECS * LANES], running_sum[QUERY_VECS * LANES];
} partial;

/* Strides count numbers. cpu/c_kernels.py has the same fields in the same order. */
typedef struct {
    num *out;                         /* [rows][num_kv_heads * GROUP][HEAD_DIM] */
    const num *q;                     /* the same, rows q_stride apart */
    const num *k_cache, *v_cache;     /* [num_blocks][block_size][num_kv_heads][HEAD_DIM], blocks block_stride apart */
    const int32_t *tables;            /* [sequences][table_width]: block ids */
    const attention_task *tasks;      /* [num_tasks] */
    partial *scratch;                 /* [num_tasks][num_kv_heads][num_parts], used if num_parts > 1 */
    int64_t q_stride, block_stride, block_size, table_width, num_tasks, num_kv_heads, num_parts;
    int64_t window; /* how many keys a row sees; 0: all */
    float scale;
} attention_args;

/* Where each key and value of a chunk lies in the cache. Behind num_keys there are zeros. */
typedef struct {
    const num *k[CHUNK], *v[CHUNK];
    int num_keys, num_padded; /* num_padded: rounded up to a multiple of STEP */
} key_chunk;

static const num zeros[HEAD_DIM];

/* Find the keys and values first_key to end_key - 1, or as many of them as a chunk holds, through the block table. */
static inline void find_chunk(key_chunk *kv, const attention_args *args, const attention_task *task, int64_t kv_head,
                              int64_t first_key, int64_t end_key) {
    const int32_t *table = args->tables + task->seq * args->table_width;
    const int64_t left = end_key > first_key ? end_key - first_key : 0;
    int64_t block = first_key / args->block_size, offset = first_key % args->block_size;
    kv->num_keys = left < CHUNK ? left : CHUNK;
    kv->num_padded = (kv->num_keys + STEP - 1) / STEP * STEP;
    for (int t = 0; t < kv->num_keys; t++) {
        const int64_t at = table[block] * args->block_stride + (offset * args->num_kv_heads + kv_head) * HEAD_DIM;
        kv->k[t] = args->k_cache + at;
        kv->v[t] = args->v_cache + at;
        offset++;
        if (offset == args->block_size) {
            offset = 0;
            block++;
        }
    }
    for (int t = kv->num_keys; t < CHUNK; t++)
        kv->k[t] = kv->v[t] = zeros;
}

/* Query m of a task for one KV head: query head m % GROUP of row m / GROUP. */
static inline const num *query_at(const attention_args *args, const attention_task *task, int64_t kv_head, int m) {
    return args->q + (task->first_row + m / GROUP) * args->q_stride + (kv_head * GROUP + m % GROUP) * HEAD_DIM;
}

/* Ask memory for the HEAD_DIM numbers of a key or value, without waiting for them. */
static inline void prefetch(const num *x) {
    enum { CACHE_LINE = 64 / sizeof(num) };
    for (int d = 0; d < HEAD_DIM; d += CACHE_LINE)
        __builtin_prefetch(x + d);
}
