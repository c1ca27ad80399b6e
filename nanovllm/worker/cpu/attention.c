/* Attention over the block table (chapters 4 and 10): a part of cpu/kernels.c, which includes it.
 *
 * The queries of a task are its rows' heads of one KV head. If there are many, each lane of a vector is a query, and keys
 * and values are taken in one number at a time: nothing is transposed, nothing is summed across a vector. If there are
 * few, as in a decode, the lanes are the dimensions of a head. The softmax is the same: a lane is a query.
 */
enum {
    FEW = 8, /* queries at most */
    CHUNK = 64, /* keys between two rounds of the online softmax */
    UNITS = HEAD_DIM / PAIR,
    DIMS = (HEAD_DIM + STEP - 1) / STEP * STEP,
    WIDTH = (TILE * GROUP + LANES - 1) / LANES, /* vectors that hold the queries of a task */
};
typedef struct { /* what attend() leaves behind: unnormalized sums, and the softmax's maximum and denominator */
    float sum[WIDTH][DIMS][LANES], top[WIDTH][LANES], total[WIDTH][LANES];
} partial;
static const num zeros[HEAD_DIM];

/* The online softmax of one chunk: scores [t][lane] -> weights, with the keys that a lane does not see masked. Returns by
 * how much the sums so far shrink. */
static inline vec soften(float (*restrict score)[LANES], unit (*restrict weight)[LANES], float *restrict top,
                         float *restrict total, const int *seen, int count) {
    float shrink[LANES];
    for (int l = 0; l < LANES; l++)
        shrink[l] = top[l];
    for (int t = seen[0]; t < count; t++) /* the first lane sees the fewest */
        for (int l = 0; l < LANES; l++)
            score[t][l] = t < seen[l] ? score[t][l] : -1e30f;
    for (int t = 0; t < count; t++)
        for (int l = 0; l < LANES; l++)
            top[l] = score[t][l] > top[l] ? score[t][l] : top[l];
    for (int l = 0; l < LANES; l++)
        total[l] *= shrink[l] = exp_negative(shrink[l] - top[l]);
    for (int t = 0; t < count; t++)
        for (int l = 0; l < LANES; l++)
            total[l] += score[t][l] = exp_negative(score[t][l] - top[l]);
    for (int t = 0; t < count; t += PAIR)
        for (int l = 0; l < LANES; l++)
            weight[t / PAIR][l] = join_weights(score[t][l], score[t + PAIR - 1][l]);
    vec result;
    memcpy(&result, shrink, sizeof(result));
    return result;
}

/* score[t][m] = key t times query m, for many queries (query[u][m]) and few (query[m][d]). */
static inline void score_many(float (*restrict score)[LANES], const unit (*query)[LANES], const unit (*key)[UNITS], int count,
                              float scale) {
    for (int t = 0; t < count; t += STEP) {
        vec s[STEP] = {{0}};
        const unit *x = key[t];
        for (int u = 0; u < UNITS; u++, x++)
            for (int j = 0; j < STEP; j++)
                s[j] = multiply_add(s[j], query[u], x[j * UNITS]);
        for (int j = 0; j < STEP; j++)
            s[j] *= scale;
        memcpy(score[t], s, sizeof(s));
    }
}

static inline void score_few(float (*restrict score)[LANES], const float (*query)[HEAD_DIM], const num *const *key, int count,
                             float scale, int queries) {
    for (int t = 0; t < count; t++) {
        float x[HEAD_DIM];
        for (int d = 0; d < HEAD_DIM; d++)
            x[d] = load(key[t][d]);
        for (int m = 0; m < queries; m++) {
            float sum = 0;
            for (int d = 0; d < HEAD_DIM; d++)
                sum += query[m][d] * x[d];
            score[t][m] = sum * scale;
        }
    }
}

/* Weighted values on top of the sums so far: sum[d][m] for many queries, sum[m][d] for few. */
static inline void add_many(float (*restrict sum)[LANES], const unit (*weight)[LANES], const unit (*value)[DIMS], int count,
                            vec shrink) {
    for (int d = 0; d < DIMS; d += STEP) {
        vec s[STEP];
        memcpy(s, sum[d], sizeof(s));
        for (int j = 0; j < STEP; j++)
            s[j] *= shrink;
        for (int u = 0; u < count / PAIR; u++)
            for (int j = 0; j < STEP; j++)
                s[j] = multiply_add(s[j], weight[u], value[u][d + j]);
        memcpy(sum[d], s, sizeof(s));
    }
}

static inline void add_few(float (*restrict sum)[DIMS], const unit (*weight)[LANES], const unit (*value)[DIMS], int count,
                           vec shrink, int queries) {
    for (int m = 0; m < queries; m++) {
        vec s[DIMS / LANES];
        memcpy(s, sum[m], sizeof(s));
        for (int j = 0; j < DIMS / LANES; j++)
            s[j] *= shrink[m];
        for (int u = 0; u < count / PAIR; u++)
            for (int j = 0; j < DIMS / LANES; j++)
                s[j] = multiply_add(s[j], value[u] + j * LANES, weight[u][m]);
        memcpy(sum[m], s, sizeof(s));
    }
}

/* Keys first..last for `rows` query rows of one sequence and KV head; row i sees the keys before num_keys + i. They are
 * found through the block table and taken in chunks, with an online softmax (FlashAttention, arXiv:2205.14135). */
static void attend(partial *out, const num *q, int64_t q_stride, int rows, int64_t num_keys, const num *k_cache,
                   const num *v_cache, const int32_t *table, int64_t block_size, int64_t block_stride, int64_t stride,
                   int64_t first, int64_t last, float scale) {
    const int queries = rows * GROUP, width = (queries + LANES - 1) / LANES, few = queries <= FEW;
    unit query[WIDTH][UNITS][LANES], key[CHUNK][UNITS], value[CHUNK / PAIR][DIMS], weight[CHUNK / PAIR][LANES];
    float score[CHUNK][LANES] = {{0}}, few_queries[FEW][HEAD_DIM], few_sums[FEW][DIMS] = {{0}};
    int64_t block = first / block_size, offset = first % block_size;
    memset(value, 0, sizeof(value)); /* what pads a head to DIMS stays 0 */
    for (int m = 0; m < width * LANES; m++) {
        const num *x = m < queries ? q + m / GROUP * q_stride + m % GROUP * HEAD_DIM : zeros;
        for (int u = 0; u < UNITS && !few; u++)
            query[m / LANES][u][m % LANES] = unit_at(x + u * PAIR);
        for (int d = 0; d < HEAD_DIM && m < FEW; d++)
            few_queries[m][d] = load(x[d]);
    }
    for (int w = 0; w < width; w++) {
        memset(out->sum[w], 0, sizeof(out->sum[w]));
        for (int l = 0; l < LANES; l++)
            out->top[w][l] = -1e30f, out->total[w][l] = 0;
    }
    for (; first < last; first += CHUNK) {
        const int count = last - first < CHUNK ? last - first : CHUNK, padded = (count + STEP - 1) / STEP * STEP;
        const num *k[CHUNK], *v[CHUNK];
        for (int t = 0; t < count; t++) {
            const int64_t at = table[block] * block_stride + offset * stride;
            k[t] = k_cache + at, v[t] = v_cache + at;
            for (int d = 0; d < HEAD_DIM; d += 64 / sizeof(num)) /* lines of the cache, all of a chunk's at once */
                __builtin_prefetch(k[t] + d), __builtin_prefetch(v[t] + d);
            if (++offset == block_size)
                offset = 0, block++;
        }
        for (int t = count; t < padded; t++)
            k[t] = v[t] = zeros;
        for (int t = 0; t < padded && !few; t++)
            for (int u = 0; u < UNITS; u++)
                key[t][u] = unit_at(k[t] + u * PAIR);
        for (int t = 0; t < padded; t += PAIR)
            for (int d = 0; d < HEAD_DIM; d++)
                value[t / PAIR][d] = join(v[t][d], v[t + PAIR - 1][d]);
        for (int w = 0; w < width; w++) {
            int seen[LANES];
            for (int l = 0; l < LANES; l++) {
                const int64_t before = num_keys + (w * LANES + l) / GROUP - first;
                seen[l] = before < 0 ? 0 : before < count ? before : count;
            }
            if (few)
                score_few(score, few_queries, k, padded, scale, queries);
            else
                score_many(score, query[w], key, padded, scale);
            const vec shrink = soften(score, weight, out->top[w], out->total[w], seen, padded);
            if (few)
                add_few(few_sums, weight, value, padded, shrink, queries);
            else
                add_many(out->sum[w], weight, value, padded, shrink);
        }
    }
    for (int m = 0; m < queries && few; m++)
        for (int d = 0; d < HEAD_DIM; d++)
            out->sum[m / LANES][d][m % LANES] = few_sums[m][d];
}

/* The softmax over all parts of the keys, for a task's queries; rows of `out` are out_stride numbers apart. */
static void combine(num *out, int64_t out_stride, const partial *parts, int64_t num_parts, int queries) {
    for (int w = 0; w * LANES < queries; w++) {
        float sum[HEAD_DIM][LANES] = {{0}}, top[LANES], total[LANES] = {0}, share[LANES];
        memcpy(top, parts->top[w], sizeof(top));
        for (const partial *p = parts; p < parts + num_parts; p++)
            for (int l = 0; l < LANES; l++)
                top[l] = p->top[w][l] > top[l] ? p->top[w][l] : top[l];
        for (const partial *p = parts; p < parts + num_parts; p++) {
            for (int l = 0; l < LANES; l++)
                share[l] = exp_negative(p->top[w][l] - top[l]), total[l] += share[l] * p->total[w][l];
            for (int d = 0; d < HEAD_DIM; d++)
                for (int l = 0; l < LANES; l++)
                    sum[d][l] += share[l] * p->sum[w][d][l];
        }
        for (int m = w * LANES; m < queries && m < (w + 1) * LANES; m++)
            for (int d = 0; d < HEAD_DIM; d++)
                out[m / GROUP * out_stride + m % GROUP * HEAD_DIM + d] = store(sum[d][m % LANES] / total[m % LANES]);
    }
}

int64_t bytes_of_a_part(void) { return sizeof(partial); }

/* Task i: rows tasks[i][0] .. + tasks[i][1] of q, of sequence tasks[i][2]; the first of them sees tasks[i][3] keys. The
 * keys are cut into `splits` parts, so that one long sequence keeps all cores busy; if there are several, scratch holds
 * the partials of all tasks until they can be combined. out is [rows, num_heads, HEAD_DIM]. */
void paged_attention(num *out, const num *q, int64_t q_stride, const num *k_cache, const num *v_cache,
                     const int32_t *tables, int64_t table_width, const int64_t (*tasks)[4], int64_t num_tasks,
                     int64_t num_kv_heads, int64_t block_size, int64_t block_stride, int64_t splits, float scale,
                     partial *scratch) {
    const int64_t num_items = num_tasks * num_kv_heads, out_stride = num_kv_heads * GROUP * HEAD_DIM;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = num_items * splits - 1; i >= 0; i--) { /* the last rows of a prompt take longest */
        const int64_t part = i % splits, h = i / splits % num_kv_heads, *task = tasks[i / splits / num_kv_heads];
        const int64_t last = task[3] + task[1] - 1, head = h * GROUP * HEAD_DIM;
        partial alone, *p = splits > 1 ? scratch + i : &alone;
        attend(p, q + task[0] * q_stride + head, q_stride, task[1], task[3], k_cache + h * HEAD_DIM,
               v_cache + h * HEAD_DIM, tables + task[2] * table_width, block_size, block_stride, num_kv_heads * HEAD_DIM,
               last * part / splits, last * (part + 1) / splits, scale);
        if (splits == 1)
            combine(out + task[0] * out_stride + head, out_stride, p, 1, task[1] * GROUP);
    }
    for (int64_t i = 0; splits > 1 && i < num_items; i++) {
        const int64_t *task = tasks[i / num_kv_heads], head = i % num_kv_heads * GROUP * HEAD_DIM;
        combine(out + task[0] * out_stride + head, out_stride, scratch + i * splits, splits, task[1] * GROUP);
    }
}
