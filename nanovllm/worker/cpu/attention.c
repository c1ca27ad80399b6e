/* Attention over the block table (chapters 4 and 10). A part of cpu/kernels.c.
 *
 * A task is up to TILE query rows of one sequence. Each KV head of a task can be computed by another core. If that is
 * too little work for all cores, the keys are cut into parts. attend() computes one part of a task for one KV head, a
 * chunk of keys at a time (attention_chunk.c). combine() joins the parts.
 */

/* Rows first_row to first_row + num_rows - 1 of q. The first of them sees num_keys keys, the next one key more. */
typedef struct {
    int64_t first_row, num_rows, seq, num_keys;
} attention_task;

/* What attend() returns, a lane for each query. The attention to a part's keys is acc / running_sum. */
typedef struct {
    float acc[QUERY_VECS][PADDED_DIM][LANES], running_max[QUERY_VECS][LANES], running_sum[QUERY_VECS][LANES];
} partial;

/* Strides count numbers. cpu/kernels.py has the same fields in the same order. */
typedef struct {
    num *out;                         /* [rows][num_kv_heads * GROUP][HEAD_DIM] */
    const num *q;                     /* the same, rows q_stride apart */
    const num *k_cache, *v_cache;     /* [num_blocks][block_size][num_kv_heads][HEAD_DIM], blocks block_stride apart */
    const int32_t *tables;            /* [sequences][table_width]: block ids */
    const attention_task *tasks;      /* [num_tasks] */
    partial *scratch;                 /* [num_tasks][num_kv_heads][num_parts], used if num_parts > 1 */
    int64_t q_stride, block_stride, block_size, table_width, num_tasks, num_kv_heads, num_parts;
    float scale;
} attention_args;

static const num zeros[HEAD_DIM];

static inline void load_queries(query_set *queries, const attention_args *args, const attention_task *task,
                                int64_t kv_head, int num_vecs, int few) {
    for (int m = 0; m < num_vecs * LANES; m++) {
        const int64_t row = task->first_row + m / GROUP, head = kv_head * GROUP + m % GROUP;
        const num *q = m < task->num_rows * GROUP ? args->q + row * args->q_stride + head * HEAD_DIM : zeros;
        if (!few)
            for (int u = 0; u < HEAD_UNITS; u++)
                queries->many[m / LANES][u][m % LANES] = unit_at(q + u * PAIR);
        else if (m < FEW)
            for (int d = 0; d < HEAD_DIM; d++)
                queries->few[m][d] = load(q[d]);
    }
}

/* Find a chunk's keys and values through the block table, and lay them out for multiply_add(). */
static inline void read_chunk(kv_chunk *kv, const attention_args *args, const attention_task *task, int64_t kv_head,
                              int64_t first_key, int num_keys, int few) {
    enum { CACHE_LINE = 64 / sizeof(num) };
    const int32_t *table = args->tables + task->seq * args->table_width;
    int64_t block = first_key / args->block_size, offset = first_key % args->block_size;
    kv->num_padded = (num_keys + STEP - 1) / STEP * STEP;
    for (int t = 0; t < num_keys; t++) {
        const int64_t at = table[block] * args->block_stride + (offset * args->num_kv_heads + kv_head) * HEAD_DIM;
        kv->k[t] = args->k_cache + at;
        kv->v[t] = args->v_cache + at;
        for (int d = 0; d < HEAD_DIM; d += CACHE_LINE) { /* memory fetches all of a chunk's lines at once */
            __builtin_prefetch(kv->k[t] + d);
            __builtin_prefetch(kv->v[t] + d);
        }
        offset++;
        if (offset == args->block_size) {
            offset = 0;
            block++;
        }
    }
    for (int t = num_keys; t < kv->num_padded; t++) {
        kv->k[t] = zeros;
        kv->v[t] = zeros;
    }
    if (!few)
        for (int t = 0; t < kv->num_padded; t++)
            for (int u = 0; u < HEAD_UNITS; u++)
                kv->key[t][u] = unit_at(kv->k[t] + u * PAIR);
    for (int t = 0; t < kv->num_padded; t += PAIR) {
        for (int d = 0; d < HEAD_DIM; d++)
            kv->value[t / PAIR][d] = join(kv->v[t][d], kv->v[t + PAIR - 1][d]);
        for (int d = HEAD_DIM; d < PADDED_DIM; d++)
            kv->value[t / PAIR][d] = 0;
    }
}

/* visible[l]: how many of a chunk's keys lane l of query vector w sees. */
static inline void count_visible(int *visible, const attention_task *task, int w, int64_t first_key, int num_keys) {
    for (int l = 0; l < LANES; l++) {
        const int64_t seen = task->num_keys + (w * LANES + l) / GROUP - first_key;
        visible[l] = seen < 0 ? 0 : seen < num_keys ? seen : num_keys;
    }
}

/* Attention of a task to the keys first_key to end_key - 1, in chunks, with an online softmax (FlashAttention,
 * arXiv:2205.14135). */
static void attend(partial *out, const attention_args *args, const attention_task *task, int64_t kv_head,
                   int64_t first_key, int64_t end_key) {
    const int num_queries = task->num_rows * GROUP, num_vecs = (num_queries + LANES - 1) / LANES;
    const int few = num_queries <= FEW; /* then num_vecs is 1 */
    query_set queries;
    kv_chunk kv;
    unit weight[CHUNK / PAIR][LANES];
    float score[CHUNK][LANES] = {{0}}, few_acc[FEW][PADDED_DIM] = {{0}};

    load_queries(&queries, args, task, kv_head, num_vecs, few);
    for (int w = 0; w < num_vecs; w++)
        for (int l = 0; l < LANES; l++) {
            out->running_max[w][l] = MASKED;
            out->running_sum[w][l] = 0;
        }
    memset(out->acc, 0, num_vecs * sizeof(out->acc[0]));

    for (int64_t first = first_key; first < end_key; first += CHUNK) {
        const int num_keys = end_key - first < CHUNK ? end_key - first : CHUNK;
        read_chunk(&kv, args, task, kv_head, first, num_keys, few);
        for (int w = 0; w < num_vecs; w++) {
            float *running_max = out->running_max[w], *running_sum = out->running_sum[w];
            int visible[LANES];
            count_visible(visible, task, w, first, num_keys);
            if (few)
                scores_few(score, queries.few, &kv, args->scale, num_queries);
            else
                scores_many(score, queries.many[w], &kv, args->scale);
            const vec rescale = online_softmax(score, weight, running_max, running_sum, visible, kv.num_padded);
            if (few)
                add_values_few(few_acc, weight, &kv, rescale, num_queries);
            else
                add_values_many(out->acc[w], weight, &kv, rescale);
        }
    }
    if (few)
        for (int m = 0; m < num_queries; m++)
            for (int d = 0; d < HEAD_DIM; d++)
                out->acc[0][d][m] = few_acc[m][d];
}

/* Join the parts, each relative to its own running_max: rescale them to the largest, add them up, divide, store. */
static void combine(const attention_args *args, const attention_task *task, int64_t kv_head, const partial *parts,
                    int64_t num_parts) {
    const int num_queries = task->num_rows * GROUP;
    for (int w = 0; w * LANES < num_queries; w++) {
        float acc[HEAD_DIM][LANES] = {{0}}, running_max[LANES], running_sum[LANES] = {0}, rescale[LANES];
        memcpy(running_max, parts->running_max[w], sizeof(running_max));
        for (const partial *p = parts; p < parts + num_parts; p++)
            for (int l = 0; l < LANES; l++)
                running_max[l] = p->running_max[w][l] > running_max[l] ? p->running_max[w][l] : running_max[l];
        for (const partial *p = parts; p < parts + num_parts; p++) {
            for (int l = 0; l < LANES; l++) {
                rescale[l] = exp_negative(p->running_max[w][l] - running_max[l]);
                running_sum[l] += rescale[l] * p->running_sum[w][l];
            }
            for (int d = 0; d < HEAD_DIM; d++)
                for (int l = 0; l < LANES; l++)
                    acc[d][l] += rescale[l] * p->acc[w][d][l];
        }
        for (int l = 0; l < LANES && w * LANES + l < num_queries; l++) {
            const int64_t m = w * LANES + l, row = task->first_row + m / GROUP, head = kv_head * GROUP + m % GROUP;
            num *out = args->out + (row * args->num_kv_heads * GROUP + head) * HEAD_DIM;
            for (int d = 0; d < HEAD_DIM; d++)
                out[d] = store(acc[d][l] / running_sum[l]);
        }
    }
}

int64_t partial_bytes(void) { return sizeof(partial); }

static void attend_items(const void *args, int64_t first, int64_t end) {
    const attention_args *a = args;
    const int64_t num_items = a->num_tasks * a->num_kv_heads * a->num_parts;
    for (int64_t reversed = first; reversed < end; reversed++) { /* the last rows of a prompt take longest */
        const int64_t i = num_items - 1 - reversed;
        const int64_t part = i % a->num_parts, kv_head = i / a->num_parts % a->num_kv_heads;
        const attention_task *task = a->tasks + i / a->num_parts / a->num_kv_heads;
        const int64_t num_keys = task->num_keys + task->num_rows - 1; /* of the last row */
        partial alone, *result = a->num_parts > 1 ? a->scratch + i : &alone;
        attend(result, a, task, kv_head, num_keys * part / a->num_parts, num_keys * (part + 1) / a->num_parts);
        if (a->num_parts == 1)
            combine(a, task, kv_head, result, 1);
    }
}

void paged_attention(const attention_args *args) {
    const int64_t num_parts = args->num_parts, num_heads = args->num_kv_heads, num_items = args->num_tasks * num_heads;
    parallel_for(attend_items, args, num_items * num_parts, 1);
    if (num_parts > 1)
        for (int64_t i = 0; i < num_items; i++)
            combine(args, args->tasks + i / num_heads, i % num_heads, args->scratch + i * num_parts, num_parts);
}
