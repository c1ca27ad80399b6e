/* Attention over the block table (chapters 4 and 10). A part of cpu/heads.c.
 *
 * A task is up to TASK_ROWS query rows of one sequence. Each KV head of a task can be computed by another core. If that is
 * too little work for all cores, so can each part of its keys. A part is computed for one KV head, a chunk of keys at a
 * time (attention_prompt.c, attention_decode.c). Part after part is added in their order, also where one core computes all
 * of them: the bits of a row do not tell who computed it.
 */

/* As integers: NaN is then the largest. */
static int is_finite(const partial *out, int num_queries) {
    uint32_t largest = 0;
    for (int m = 0; m < num_queries; m++)
        for (int d = 0; d < HEAD_DIM; d++) {
            uint32_t bits;
            memcpy(&bits, &out[m].acc[d], 4);
            largest = (bits & 0x7fffffff) > largest ? bits & 0x7fffffff : largest;
        }
    return largest < 0x7f800000;
}

/* Add a part to those before it. Each is relative to its own max: both are rescaled to the larger one. */
static void add_part(partial *all, const partial *part, int num_queries) {
    for (int m = 0; m < num_queries; m++) {
        partial *a = all + m;
        const float max = part[m].max > a->max ? part[m].max : a->max;
        const vec rescale = exp_negative((vec){a->max - max, part[m].max - max});
        const float before = rescale[0], now = rescale[1];
        for (int d = 0; d < HEAD_DIM; d++)
            a->acc[d] = a->acc[d] * before + part[m].acc[d] * now;
        a->sum = a->sum * before + part[m].sum * now;
        a->max = max;
    }
}

/* Attention of an item, part after part. then: what the thread computes next, or NULL. */
static void attend(partial *out, const attention_args *args, const attention_item *item, const attention_item *then) {
    const attention_task *task = item->task;
    const int num_queries = task->num_rows * GROUP;
    const int tiles = may_use_tiles();
    if (tiles || (DECODE && task->num_rows == 1)) {
        attention_item left = *item; /* its part comes next */
        forget(out, num_queries);
        while (left.first_key < left.end_key) {
            partial part[PART_QUERIES];
            const attention_item now = left;
            left.first_key = end_of_part(now.first_key, now.end_key);
            const attention_item *after = left.first_key < left.end_key ? &left : then;
            (tiles ? attend_tiles : attend_decode)(part, args, &now, left.first_key, after);
            add_part(out, part, num_queries);
        }
    } else
        attend_prompt(out, args, task, item->kv_head, item->first_key, item->end_key);
    if (task->num_rows == 1 || is_finite(out, num_queries))
        return;
    for (int r = 0; r < task->num_rows; r++) { /* a row without later keys, which it must not see: 0 * NaN is NaN */
        const attention_task row = {task->first_row + r, 1, task->seq, task->num_keys + later_keys(r)};
        const int64_t before = args->window ? (row.num_keys - args->window) / CHUNK * CHUNK : 0;
        const attention_item of_row = {&row, item->kv_head, item->first_key > before ? item->first_key : before,
                                       item->end_key < row.num_keys ? item->end_key : row.num_keys};
        attend(out + r * GROUP, args, &of_row, NULL);
    }
}

static void store_result(const attention_args *args, const attention_task *task, int64_t kv_head, const partial *all) {
    for (int m = 0; m < task->num_rows * GROUP; m++) {
        const int64_t row = task->first_row + m / GROUP, head = kv_head * GROUP + m % GROUP;
        num *out = args->out + (row * args->num_kv_heads * GROUP + head) * HEAD_DIM;
        /* Scores that are NaN, or infinite: the row must not look like a sound one. */
        const float sum = all[m].max <= MASKED || all[m].max > 1e38f ? 0 : all[m].sum;
        for (int d = 0; d < HEAD_DIM; d++)
            out[d] = store(all[m].acc[d] / sum);
    }
}

enum { ADDED_PARTS = 64 }; /* so many, at least, that a thread claims at a time */

int64_t part_keys(void) { return PART_KEYS; }
int64_t unit_size(void) { return PAIR; }
int64_t partial_bytes(void) { return sizeof(partial) * GROUP; }

static attention_item item_at(const attention_args *a, int64_t i) {
    const attention_task *task = a->step->tasks + i / a->num_kv_heads;
    const int64_t hidden = a->window && task->num_keys > a->window ? task->num_keys - a->window : 0;
    return (attention_item){task, i % a->num_kv_heads, hidden / CHUNK * CHUNK,
                            task->num_keys + later_keys(task->num_rows - 1)};
}

static void attend_items(const void *args, int64_t first, int64_t end) {
    const attention_args *a = args;
    partial all[TASK_ROWS * GROUP];
    for (int64_t i = first; i < end; i++) { /* a prompt's last rows take longest, and come last, in small chunks */
        const attention_item item = item_at(a, i), then = item_at(a, i + 1 < end ? i + 1 : i);
        attend(all, a, &item, i + 1 < end ? &then : NULL);
        store_result(a, item.task, item.kv_head, all);
    }
}

/* Part i % num_parts of item i / num_parts: no keys where the item has fewer parts. */
static attention_item part_at(const attention_args *a, int64_t i) {
    attention_item item = item_at(a, i / a->step->num_parts);
    const int64_t begin = (item.first_key / PART_KEYS + i % a->step->num_parts) * PART_KEYS;
    item.first_key = begin > item.first_key ? begin : item.first_key;
    item.end_key = end_of_part(begin, item.end_key);
    return item;
}

static void attend_parts(const void *args, int64_t first, int64_t end) {
    const attention_args *a = args;
    for (int64_t i = first; i < end; i++) {
        const attention_item part = part_at(a, i), then = part_at(a, i + 1 < end ? i + 1 : i);
        if (part.first_key < part.end_key)
            attend(a->step->scratch + i * a->step->most_rows * GROUP, a, &part, i + 1 < end ? &then : NULL);
    }
}

static void add_parts(const void *args, int64_t first, int64_t end) {
    const attention_args *a = args;
    partial all[TASK_ROWS * GROUP];
    for (int64_t i = first; i < end; i++) {
        const attention_item item = item_at(a, i);
        const int64_t first_part = item.first_key / PART_KEYS, last_part = (item.end_key - 1) / PART_KEYS;
        const int num_queries = item.task->num_rows * GROUP;
        forget(all, num_queries);
        for (int64_t part = 0; part <= last_part - first_part; part++)
            add_part(all, a->step->scratch + (i * a->step->num_parts + part) * a->step->most_rows * GROUP, num_queries);
        store_result(a, item.task, item.kv_head, all);
    }
}

void paged_attention(const attention_args *args) {
    const int64_t num_items = args->step->num_tasks * args->num_kv_heads, num_parts = args->step->num_parts;
    if (num_parts == 1) {
        parallel_for(attend_items, args, num_items, 1);
        return;
    }
    parallel_for(attend_parts, args, num_items * num_parts, 1);
    parallel_for(add_parts, args, num_items, 1 + ADDED_PARTS / num_parts);
}
