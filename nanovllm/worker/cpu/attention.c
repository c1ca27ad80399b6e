/* Attention over the block table (chapters 4 and 10). A part of cpu/kernels.c.
 *
 * A task is up to TILE query rows of one sequence. Each KV head of a task can be computed by another core. If that is
 * too little work for all cores, the keys are cut into parts. Keys in front of the first row's window are in none of
 * them, and so a lone decode, whose only row it is, needs no mask. attend() computes one part of a task for one KV head, a
 * chunk of keys at a time (attention_prompt.c, attention_decode.c). combine() joins the parts.
 */

/* As integers: with -ffast-math a compiler may assume that there is neither NaN nor infinity. */
static int is_finite(const partial *out, int num_queries) {
    uint32_t largest = 0;
    for (int m = 0; m < num_queries; m++)
        for (int d = 0; d < HEAD_DIM; d++) {
            uint32_t bits;
            memcpy(&bits, &out->acc[m][d], 4);
            largest = (bits & 0x7fffffff) > largest ? bits & 0x7fffffff : largest;
        }
    return largest < 0x7f800000;
}

static void attend(partial *out, const attention_args *args, const attention_task *task, int64_t kv_head,
                   int64_t first_key, int64_t end_key) {
    const int num_queries = task->num_rows * GROUP;
    for (int m = 0; m < (num_queries + LANES - 1) / LANES * LANES; m++) {
        out->running_max[m] = MASKED;
        out->running_sum[m] = 0;
    }
    memset(out->acc, 0, num_queries * sizeof(out->acc[0]));
    if (DECODE && task->num_rows == 1)
        attend_decode(out, args, task, kv_head, first_key, end_key);
    else
        attend_prompt(out, args, task, kv_head, first_key, end_key);
    if (task->num_rows == 1 || is_finite(out, num_queries))
        return;
    for (int r = 0; r < task->num_rows; r++) { /* a row without the keys behind it: NaN outlives a weight of nearly 0 */
        const attention_task row = {task->first_row + r, 1, task->seq, task->num_keys + r};
        const int64_t before = args->window ? row.num_keys - args->window : 0;
        partial alone;
        attend(&alone, args, &row, kv_head, first_key > before ? first_key : before,
               end_key < row.num_keys ? end_key : row.num_keys);
        memcpy(out->acc[r * GROUP], alone.acc, GROUP * sizeof(alone.acc[0]));
        memcpy(out->running_max + r * GROUP, alone.running_max, GROUP * sizeof(float));
        memcpy(out->running_sum + r * GROUP, alone.running_sum, GROUP * sizeof(float));
    }
}

/* Join the parts, each relative to its own running_max: rescale them to the largest, add them up, divide, store. */
static void combine(const attention_args *args, const attention_task *task, int64_t kv_head, const partial *parts,
                    int64_t num_parts) {
    for (int m = 0; m < task->num_rows * GROUP; m++) {
        const int64_t row = task->first_row + m / GROUP, head = kv_head * GROUP + m % GROUP;
        num *out = args->out + (row * args->num_kv_heads * GROUP + head) * HEAD_DIM;
        float acc[HEAD_DIM] = {0}, max = MASKED, sum = 0;
        for (const partial *p = parts; p < parts + num_parts; p++)
            max = p->running_max[m] > max ? p->running_max[m] : max;
        for (const partial *p = parts; p < parts + num_parts; p++) {
            const float rescale = exp_negative(p->running_max[m] - max);
            sum += rescale * p->running_sum[m];
            for (int d = 0; d < HEAD_DIM; d++)
                acc[d] += rescale * p->acc[m][d];
        }
        if (max <= MASKED || max > 1e38f) /* scores that are NaN, or infinite: the row must not look like a sound one */
            sum = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            out[d] = store(acc[d] / sum);
    }
}

int64_t partial_bytes(void) { return sizeof(partial); }

static void attend_items(const void *args, int64_t first, int64_t end) {
    const attention_args *a = args;
    for (int64_t i = first; i < end; i++) { /* a prompt's last rows take longest, and come last, in small chunks */
        const int64_t part = i % a->num_parts, kv_head = i / a->num_parts % a->num_kv_heads;
        const attention_task *task = a->tasks + i / a->num_parts / a->num_kv_heads;
        const int64_t first = a->window && task->num_keys > a->window ? task->num_keys - a->window : 0;
        const int64_t num_keys = task->num_keys + task->num_rows - 1 - first; /* up to the last row's */
        partial alone, *result = a->num_parts > 1 ? a->scratch + i : &alone;
        attend(result, a, task, kv_head, first + num_keys * part / a->num_parts,
               first + num_keys * (part + 1) / a->num_parts);
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
