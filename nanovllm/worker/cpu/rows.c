/* What a step does with rows before and after its layers (chapter 10). A part of cpu/kernels.c. */

typedef struct {
    int64_t num_rows;
    num *out;            /* [num_rows][size] */
    const num *table;    /* rows of size numbers */
    const int64_t *rows; /* [num_rows]: of the table */
    int64_t size;
} gather_args;

static void gather_some_rows(const void *args, int64_t first, int64_t end) {
    const gather_args *a = args;
    for (int64_t r = first; r < end; r++)
        memcpy(a->out + r * a->size, a->table + a->rows[r] * a->size, a->size * sizeof(num));
}

void gather_rows(const gather_args *args) {
    parallel_for(gather_some_rows, args, args->num_rows, rows_a_chunk(args->size));
}

static void gather_reordered_rows(const void *args, int64_t first, int64_t end) {
    const gather_args *a = args;
    for (int64_t r = first; r < end; r++) {
        const num *row = a->table + a->rows[r] / COLS * COLS * padded_rows(a->size) + a->rows[r] % COLS * BESIDE;
        for (int64_t i = 0; i < a->size; i++)
            a->out[r * a->size + i] = row[i / BESIDE * BESIDE * COLS + i % BESIDE];
    }
}

/* The same, of a table that is a weight in linear.c's order. */
void gather_reordered(const gather_args *args) {
    parallel_for(gather_reordered_rows, args, args->num_rows, rows_a_chunk(args->size));
}

typedef struct {
    int64_t num_rows;
    num *out;            /* [num_rows][size]: normed */
    const num *residual; /* [num_rows][size]: what was normed */
    int64_t size;
} mark_args;

/* Decoder.forward() says why. */
void mark_rows(const mark_args *args) {
    for (int64_t r = 0; r < args->num_rows; r++) {
        num *first = args->out + r * args->size;
        *first = store(load(*first) + 0 * sum_of_squares(args->residual + r * args->size, args->size));
    }
}

typedef struct {
    int64_t num_rows;
    int64_t *token_ids;  /* [num_rows] */
    const float *logits; /* [num_rows][size] */
    int64_t size;
} choice_args;

enum { LOOKED_AT = 256 }; /* logits, of which the largest is found, before anybody asks which one it is */

/* The first of a row's largest numbers; -1 if one is NaN or infinity, or all are -infinity. */
static int64_t first_largest(const float *x, int64_t size) {
    float largest = -INFINITY;
    int64_t at = 0;
    mask is_nan = {0};
    for (int64_t first = 0; first < size; first += LOOKED_AT) {
        vec best = in_all(-INFINITY);
        for (int64_t i = first; i < first + LOOKED_AT && i < size; i += LANES) {
            float padded[LANES]; /* with the last number, which is there already */
            for (int l = 0; l < LANES && i + LANES > size; l++)
                padded[l] = x[i + l < size ? i + l : size - 1];
            const vec now = vec_from(i + LANES > size ? padded : x + i);
            is_nan |= now != now;
            best = larger_of(now, best);
        }
        for (int l = 0; l < LANES; l++)
            if (best[l] > largest) {
                largest = best[l];
                at = first;
            }
    }
    for (int l = 0; l < LANES; l++)
        if (is_nan[l])
            return -1;
    if (!(largest > -INFINITY && largest < INFINITY))
        return -1;
    while (x[at] != largest)
        at++;
    return at;
}

static void most_likely_rows(const void *args, int64_t first, int64_t end) {
    const choice_args *a = args;
    for (int64_t r = first; r < end; r++)
        a->token_ids[r] = first_largest(a->logits + r * a->size, a->size);
}

void most_likely(const choice_args *args) {
    parallel_for(most_likely_rows, args, args->num_rows, rows_a_chunk(args->size));
}
