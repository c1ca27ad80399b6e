/* Matrix products with weights that were reordered for them (chapter 10). A part of cpu/kernels.c.
 *
 * With about 32 rows, reading the weights from memory takes about as long as computing with them, so both are done at
 * once: while one block of weights is multiplied, the next one is prefetched. Every weight is read from memory once,
 * and from the cache for the other rows. A tile is ROWS rows times COLS columns; its sums stay in registers. float32,
 * and processors with instructions for matrices (AMX, Arm), are served better by PyTorch's libraries.
 *
 * One step along k, for a block of COLS = 32 columns (outputs):
 *
 *     weight       | column 0 | column 1 | ... | column 31 |    PAIR numbers of each column, in two vectors
 *     x[row]       | x        | x        | ... | x         |    PAIR numbers of the row, the same for all columns
 *     sum[row]     | y0       | y1       | ... | y31       |    += weight * x
 */
enum { ROWS = STEP / 2, COLS = 2 * LANES };

typedef struct {
    num *reordered;
    const num *weight;
    int64_t k;
} reorder_args;

static void reorder_block(const void *args, int64_t block) {
    const reorder_args *a = args;
    num *to = a->reordered + block * COLS * a->k;
    const num *from = a->weight + block * COLS * a->k;
    for (int64_t i = 0; i < a->k; i += PAIR)
        for (int c = 0; c < COLS; c++)
            memcpy(to + i * COLS + c * PAIR, from + c * a->k + i, PAIR * sizeof(num));
}

/* Reorder a weight [n][k] as [n / COLS][k / PAIR][COLS][PAIR]. Returns 0, with nothing done, where PyTorch's libraries
 * should compute this model's products. */
int reorder_weight(num *restrict reordered, const num *restrict weight, int64_t n, int64_t k) {
#if !defined(__x86_64__) || defined(TYPE_f32) || (defined(TYPE_bf16) && defined(__AMX_BF16__))
    return 0;
#endif
    if (n % COLS || k % PAIR)
        return 0;
    parallel_for(reorder_block, &(reorder_args){reordered, weight, k}, n / COLS);
    return 1;
}

typedef struct {
    num *out;              /* [rows][n], at the block's first column */
    const num *x;          /* [rows][k] */
    const num *weight;     /* [k / PAIR][COLS][PAIR]: the block */
    const num *bias;       /* [COLS] or NULL */
    const char *ahead;     /* what this tile prefetches: a part of the next block, */
    int64_t ahead_bytes;   /* so many bytes at each step along k */
    int64_t n, k;
} tile_args;

/* The products of `rows` rows with one block of columns. */
static inline __attribute__((always_inline)) void compute_tile(const int rows, const tile_args *args) {
    const num *w = args->weight, *x = args->x;
    const char *ahead = args->ahead;
    vec sum[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < args->k; i += PAIR) {
        const unit_vec low = units_at(w), high = units_at(w + LANES * PAIR);
        __builtin_prefetch(ahead);
        for (int r = 0; r < rows; r++) {
            const unit_vec u = all_lanes(unit_at(x + r * args->k + i));
            sum[r][0] = multiply_add(sum[r][0], low, u);
            sum[r][1] = multiply_add(sum[r][1], high, u);
        }
        w += COLS * PAIR;
        ahead += args->ahead_bytes;
    }
    float y[ROWS][COLS];
    memcpy(y, sum, sizeof(y));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLS; c++)
            args->out[r * args->n + c] = store(y[r][c] + (args->bias ? load(args->bias[c]) : 0));
}

typedef struct {
    num *out;
    const num *x, *reordered, *bias;
    int64_t m, n, k, num_chunks;
} linear_args;

/* A chunk is a run of blocks of columns. */
static void linear_chunk(const void *args, int64_t chunk) {
    const linear_args *l = args;
    const int64_t num_blocks = l->n / COLS, end = num_blocks * (chunk + 1) / l->num_chunks, k = l->k;
    const int64_t num_tiles = (l->m + ROWS - 1) / ROWS;
    for (int64_t block = num_blocks * chunk / l->num_chunks; block < end; block++) {
        const int64_t c = block * COLS;
        const num *weight = l->reordered + c * k;
        tile_args a = {l->out + c, l->x, weight, l->bias ? l->bias + c : NULL, (const char *)(weight + COLS * k), 0, l->n, k};
        a.ahead_bytes = COLS * PAIR * sizeof(num) / num_tiles; /* all tiles: the next block, once */
        for (int64_t r = 0; r < l->m; r += ROWS) {
            switch (l->m - r < ROWS ? l->m - r : ROWS) { /* `rows` is a constant, so that the sums stay in registers */
            case 1: compute_tile(1, &a); break;
            case 2: compute_tile(2, &a); break;
            case 3: compute_tile(3, &a); break;
            case 4: compute_tile(4, &a); break;
#if defined(__AVX512F__)
            case 5: compute_tile(5, &a); break;
            case 6: compute_tile(6, &a); break;
            case 7: compute_tile(7, &a); break;
            case 8: compute_tile(8, &a); break;
#endif
            }
            a.out += ROWS * l->n;
            a.x += ROWS * k;
            a.ahead += a.ahead_bytes * (k / PAIR);
        }
    }
}

/* out [m][n] = x [m][k] times the reordered weight, + bias (unless it is NULL). */
void linear(num *out, const num *x, const num *reordered, const num *bias, int64_t m, int64_t n, int64_t k) {
    enum { CHUNK_BYTES = 1 << 17 }; /* of weights, at least */
    const int64_t num_blocks = n / COLS, num_chunks = n * k * (int64_t)sizeof(num) / CHUNK_BYTES;
    linear_args args = {out, x, reordered, bias, m, n, k, num_chunks < 1 ? 1 : num_chunks};
    if (args.num_chunks > num_blocks)
        args.num_chunks = num_blocks;
    parallel_for(linear_chunk, &args, args.num_chunks);
}
