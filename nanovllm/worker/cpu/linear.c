/* Matrix products with weights that were reordered for them (chapter 10). A part of cpu/kernels.c.
 *
 * With about 32 rows, reading the weights from memory takes about as long as computing with them, so both are done at
 * once: while one block of weights is multiplied, the next one is prefetched. Every weight is read from memory once,
 * and from the cache for the other rows. A tile is ROWS rows times COLS columns; its sums stay in registers. Each of them
 * adds up its products along k one after another, so a row's result is the same to the last bit in every tile. Where a
 * processor has instructions for matrices of bf16 (AMX, Arm), PyTorch's libraries use them, and nobody promises that.
 *
 * One step along k, for a block of COLS = 32 columns (outputs):
 *
 *     weight       | column 0 | column 1 | ... | column 31 |    BESIDE numbers of each column, in two vectors
 *     x[row]       | x        | x        | ... | x         |    as many numbers of the row, the same for all columns
 *     sum[row]     | y0       | y1       | ... | y31       |    += weight * x
 *
 * Two bf16 lie side by side also where no instruction multiplies pairs: one shift, or one mask, makes floats of a vector.
 */
#ifdef TYPE_bf16
enum { BESIDE = 2 };
#else
enum { BESIDE = PAIR };
#endif
enum {
    ROWS = LANES == 16 ? 8 : 6, /* of the sums, AVX512's 32 registers hold more than AVX2's 16 */
    COLS = 2 * LANES,
    PART = 256, /* numbers of a row of x that are converted at a time */
    CONVERTED = PAIR == 1 && sizeof(num) == 2,
    CHUNK_BYTES = 32 << 10, /* of weights, at least, that a thread claims at a time */
};

typedef struct {
    num *reordered;
    const num *weight;
    int64_t n, k;
} reorder_args;

static inline int64_t num_col_blocks(int64_t n) { return (n + COLS - 1) / COLS; }
static inline int64_t padded_rows(int64_t k) { return k + k % BESIDE; }

static void reorder_blocks(const void *args, int64_t first, int64_t end) {
    const reorder_args a = *(const reorder_args *)args;
    for (int64_t block = first * COLS; block < end * COLS; block += COLS)
        for (int64_t i = 0; i < padded_rows(a.k); i++)
            for (int c = 0; c < COLS; c++)
                a.reordered[block * padded_rows(a.k) + i / BESIDE * BESIDE * COLS + c * BESIDE + i % BESIDE] =
                    block + c < a.n && i < a.k ? a.weight[(block + c) * a.k + i] : 0;
}

/* How many numbers a weight [n][k] takes when it is reordered: whole blocks. */
int64_t reordered_size(int64_t n, int64_t k) { return num_col_blocks(n) * COLS * padded_rows(k); }

/* Reorder a weight [n][k] as [n / COLS][k / BESIDE][COLS][BESIDE], both rounded up and filled with zeros. Returns 0, with
 * nothing done, where PyTorch's libraries should compute this model's products. */
int reorder_weight(num *restrict reordered, const num *restrict weight, int64_t n, int64_t k) {
#if defined(TYPE_bf16) && !defined(NO_PAIRS) && (defined(__AMX_BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC))
    return 0;
#endif
    if (k % PAIR)
        return 0;
    parallel_for(reorder_blocks, &(reorder_args){reordered, weight, n, k}, num_col_blocks(n), 1);
    return 1;
}

typedef struct {
    num *out;              /* [rows][n], at the block's first column */
    const num *x;          /* [rows][k] */
    const num *weight;     /* [k / BESIDE][COLS][BESIDE]: the block */
    const num *bias;       /* [COLS] or NULL */
    const char *ahead;     /* what this tile prefetches: a part of the next block, */
    int64_t ahead_bytes;   /* so many bytes at each step along k */
    int64_t n, k, columns; /* columns: of the block; all but a weight's last one have COLS */
} tile_args;

/* Units of LANES columns; of numbers that lie side by side and are multiplied one by one, number s. */
static inline unit_vec weights_at(const num *w, int s) {
#if defined(TYPE_bf16)
    if (PAIR == 1) {
        mask pairs;
        memcpy(&pairs, w, sizeof(pairs));
        pairs = s ? pairs & (int32_t)0xffff0000 : pairs << 16;
        return (unit_vec)pairs;
    }
#endif
    return (void)s, units_at(w);
}

/* The products of `rows` rows with one block of columns. Where a unit is one number of 16 bits, x is converted before:
 * then a lane gets it with one instruction, not four. */
static inline __attribute__((always_inline)) void compute_tile(const int rows, const tile_args *args) {
    const num *w = args->weight;
    const char *ahead = args->ahead;
    vec sum[ROWS][2] = {{{0}}};
    for (int64_t first = 0; first < args->k; first += PART) {
        const int64_t count = args->k - first < PART ? args->k - first : PART;
        const num *x = args->x + first;
        unit converted[ROWS][PART];
        for (int r = 0; r < rows && CONVERTED; r++) {
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES)
                put_unit_vec(converted[r] + i, units_at(x + r * args->k + i));
            for (; i < padded_rows(count); i++)
                converted[r][i] = i < count ? unit_at(x + r * args->k + i) : 0;
        }
        for (int64_t i = 0; i < count; i += BESIDE) {
            __builtin_prefetch(ahead);
            for (int s = 0; s < BESIDE / PAIR; s++) {
                const unit_vec low = weights_at(w, s), high = weights_at(w + LANES * BESIDE, s);
                for (int r = 0; r < rows; r++) {
                    const unit_vec u = all_lanes(CONVERTED ? converted[r][i + s] : unit_at(x + r * args->k + i));
                    sum[r][0] = multiply_add(sum[r][0], low, u);
                    sum[r][1] = multiply_add(sum[r][1], high, u);
                }
            }
            w += COLS * BESIDE;
            ahead += args->ahead_bytes;
        }
    }
    float y[ROWS][COLS];
    memcpy(y, sum, sizeof(y));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < args->columns; c++)
            args->out[r * args->n + c] = store(y[r][c] + (args->bias ? load(args->bias[c]) : 0));
}

typedef struct {
    int64_t num_rows;
    num *out;
    const num *x, *const *weights, *bias; /* [num_rows][k]; [num_weights] reordered weights; [n] or NULL */
    const int64_t *ends; /* [num_weights - 1]: weight w meets the rows ends[w - 1] to ends[w] - 1, the last one the rest */
    int64_t num_weights, n, k;
} linear_args;

/* One block of columns of a weight for each item; weight after weight. */
static void linear_blocks(const void *args, int64_t first, int64_t end) {
    const linear_args l = *(const linear_args *)args;
    const int64_t num_blocks = num_col_blocks(l.n);
    for (int64_t item = first; item < end; item++) {
        const int64_t w = item / num_blocks, c = item % num_blocks * COLS;
        const int64_t first_row = w ? l.ends[w - 1] : 0;
        const int64_t num_rows = (w + 1 < l.num_weights ? l.ends[w] : l.num_rows) - first_row;
        const int64_t ahead_bytes = COLS * BESIDE * sizeof(num) / ((num_rows + ROWS - 1) / ROWS); /* all tiles: a block */
        const num *weight = l.weights[w] + c * padded_rows(l.k), *bias = l.bias ? l.bias + c : NULL;
        const num *next_block = c + COLS < l.n || w + 1 == l.num_weights ? weight + COLS * padded_rows(l.k) : l.weights[w + 1];
        tile_args a = {l.out + first_row * l.n + c, l.x + first_row * l.k, weight, bias, (const char *)next_block,
                       ahead_bytes, l.n, l.k, l.n - c < COLS ? l.n - c : COLS};
        for (int64_t r = 0; r < num_rows; r += ROWS) {
            switch (num_rows - r < ROWS ? num_rows - r : ROWS) { /* a constant, so that the sums stay in registers */
            case 1: compute_tile(1, &a); break;
            case 2: compute_tile(2, &a); break;
            case 3: compute_tile(3, &a); break;
            case 4: compute_tile(4, &a); break;
            case 5: compute_tile(5, &a); break;
            case 6: compute_tile(6, &a); break;
#if defined(__AVX512F__)
            case 7: compute_tile(7, &a); break;
            case 8: compute_tile(8, &a); break;
#endif
            }
            a.out += ROWS * l.n;
            a.x += ROWS * l.k;
            a.ahead += a.ahead_bytes * (padded_rows(l.k) / BESIDE);
        }
    }
}

/* out [m][n] = x [m][k] times the weights that were reordered, each row with the one that it meets, + bias. */
void linear(const linear_args *args) {
    const int64_t num_blocks = args->num_rows ? args->num_weights * num_col_blocks(args->n) : 0;
    parallel_for(linear_blocks, args, num_blocks, 1 + CHUNK_BYTES / (COLS * args->k * sizeof(num)));
}
