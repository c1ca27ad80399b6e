/* Matrix products with weights that were reordered for them (chapter 10). A part of cpu/kernels.c.
 *
 * With about 32 rows, reading the weights from memory takes about as long as computing with them, so both are done at
 * once: while one block of weights is multiplied, a later one is prefetched. Every weight is read from memory once, and
 * from the cache for the other rows. A tile is ROWS rows times COLS columns; its sums are in registers. Each of them adds
 * up its products along k one after another, so a row's result is the same to the last bit in every tile. The tiles are
 * computed by linear_vectors.c, or by linear_amx.c.
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
enum { COLS = 2 * LANES };

#if defined(TYPE_bf16) && !defined(EVERYWHERE) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define BY_AMX
enum { MOST_BLOCKS = 1 };
#else
/* Where a unit is one number of 16 bits, x is converted before it is multiplied, once for up to MOST_BLOCKS blocks. */
enum { CONVERTED = PAIR == 1 && sizeof(num) == 2, MOST_BLOCKS = CONVERTED ? 4 : 1 };
#endif

typedef struct {
    const num *weight; /* [k / BESIDE][COLS][BESIDE] */
    const num *bias;   /* [COLS] or NULL */
    const char *ahead; /* what a tile prefetches meanwhile: its part of a later block */
} column_block;

/* A tile of each of num_blocks blocks, whose outputs lie side by side. */
typedef struct {
    num *out;          /* [rows][n], at the first block's first column; or NULL: */
    float *out_floats; /* the same, not rounded to num */
    const num *x;      /* [rows][k] */
    column_block blocks[MOST_BLOCKS];
    int64_t num_blocks;
    int64_t ahead_bytes;   /* that it prefetches for each block at each step along k */
    int64_t n, k, columns; /* columns: of the last block; all but a weight's last one have COLS */
} tile_args;

/* out = y + bias, of block b. */
static inline void put_tile(int64_t rows, float (*y)[COLS], const tile_args *a, int b) {
    const num *block_bias = a->blocks[b].bias;
    const int64_t columns = b < a->num_blocks - 1 ? COLS : a->columns, at = b * COLS;
    if (a->out_floats) {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < columns; c++)
                a->out_floats[r * a->n + at + c] = y[r][c] + (block_bias ? load(block_bias[c]) : 0);
        return;
    }
    num bias[COLS] = {0}, whole[COLS];
    if (block_bias)
        memcpy(bias, block_bias, columns * sizeof(num));
    for (int64_t r = 0; r < rows; r++) {
        num *out = columns == COLS ? a->out + r * a->n + at : whole;
        for (int c = 0; c < COLS; c += LANES)
            put_nums(out + c, vec_from(y[r] + c) + floats_at(bias + c));
        if (out == whole)
            memcpy(a->out + r * a->n + at, whole, columns * sizeof(num));
    }
}

/* Go on to the next rows. */
static inline void next_tile(tile_args *a, int64_t rows) {
    a->x += rows * a->k;
    if (a->out_floats)
        a->out_floats += rows * a->n;
    else
        a->out += rows * a->n;
    for (int b = 0; b < a->num_blocks; b++)
        a->blocks[b].ahead += a->ahead_bytes * ((a->k + BESIDE - 1) / BESIDE);
}

/* Each of the two defines ROWS, the most that a tile has, K_STEP: weights are filled up to a multiple of it along k,
 * SLAB_BYTES: so much of x stays in a core's cache, and blocks_at_once(): how many blocks are computed together. */
#ifdef BY_AMX
#include "linear_amx.c"
#else
#include "linear_vectors.c"
#endif

#ifdef TYPE_f32
typedef uint32_t num_bits;
enum { INFINITE = 0x7f800000 };
#else
typedef uint16_t num_bits;
#ifdef TYPE_f16
enum { INFINITE = 0x7c00 };
#else
enum { INFINITE = 0x7f80 };
#endif
#endif

typedef struct {
    num *reordered;
    const num *weight;
    int64_t n, k;
    int *not_finite; /* set where a number is */
} reorder_args;

static inline int64_t num_col_blocks(int64_t n) { return (n + COLS - 1) / COLS; }
static inline int64_t padded_rows(int64_t k) { return (k + K_STEP - 1) / K_STEP * K_STEP; }

/* A line of the cache of each row after another. */
static void reorder_blocks(const void *args, int64_t first, int64_t end) {
    enum { LINE = 64 / sizeof(num) };
    const reorder_args a = *(const reorder_args *)args;
    const int64_t rows = padded_rows(a.k);
    num_bits largest = 0; /* but for their signs; a NaN's bits are more than those of infinity */
    for (int64_t block = first * COLS; block < end * COLS; block += COLS)
        for (int64_t i = 0; i < rows; i += LINE)
            for (int c = 0; c < COLS; c++) {
                const int64_t left = block + c < a.n ? a.k - i : 0, padded = rows - i < LINE ? rows - i : LINE;
                num_bits line[LINE] = {0};
                num *to = a.reordered + block * rows + i * COLS + c * BESIDE;
                memcpy(line, a.weight + (block + c) * a.k + i, (left < LINE ? left > 0 ? left : 0 : LINE) * sizeof(num));
                for (int j = 0; j < LINE; j++) {
                    const num_bits magnitude = line[j] & (num_bits)-1 >> 1;
                    largest = magnitude > largest ? magnitude : largest;
                }
                for (int j = 0; j < padded; j += BESIDE)
                    memcpy(to + j * COLS, line + j, BESIDE * sizeof(num));
            }
    if (largest >= INFINITE)
        *a.not_finite = 1;
}

/* How many numbers a weight [n][k] takes when it is reordered: whole blocks. */
int64_t reordered_size(int64_t n, int64_t k) { return num_col_blocks(n) * COLS * padded_rows(k); }

/* Reorder rows of a weight [n][k] as [n / COLS][k / BESIDE][COLS][BESIDE], both rounded up and filled with zeros: num_rows
 * from first_row on, a multiple of COLS. Returns CANNOT, with nothing done, where PyTorch's libraries should compute this
 * model's products, or where these rows begin in the middle of a block. */
int reorder_rows(num *restrict reordered, const num *restrict rows, int64_t first_row, int64_t num_rows, int64_t k) {
    enum { CANNOT, NOT_FINITE, DONE }; /* as in c_kernels.py */
    if (k % PAIR || first_row % COLS || !can_multiply())
        return CANNOT;
    int not_finite = 0;
    num *to = reordered + first_row * padded_rows(k);
    parallel_for(reorder_blocks, &(reorder_args){to, rows, num_rows, k, &not_finite}, num_col_blocks(num_rows), 1);
    return not_finite ? NOT_FINITE : DONE;
}

typedef struct {
    int64_t num_rows;
    num *out;          /* [num_rows][n]; or NULL: */
    float *out_floats; /* the same, not rounded to num: logits */
    const num *x, *const *weights, *bias; /* [num_rows][k]; [num_weights] reordered weights; [n] or NULL */
    const int64_t *ends;  /* [num_weights - 1]: weight w meets the rows ends[w - 1] to ends[w] - 1, the last one the rest */
    const int64_t *order; /* [num_weights]: weight w is weights[order[w]]; NULL: weights[w] */
    int64_t num_weights, n, k;
    int64_t gated; /* out is silu(gate) * up: weight and bias have gate's n rows, then up's; n is a multiple of COLS */
} linear_args;

/* Very many rows, as the patches of an image, meet one weight a slab after another: so many rows as stay in the cache while
 * all blocks of the weight pass, and so many that reading the weight for each slab costs little. (Of several weights, each
 * meets few rows.) */
enum { LEAST_SLAB = 128 / ROWS };
static inline int64_t slab_rows(const linear_args *l) {
    const int64_t fit = SLAB_BYTES / (ROWS * l->k * (int64_t)sizeof(num)), most = fit > LEAST_SLAB ? fit : LEAST_SLAB;
    const int64_t num_tiles = (l->num_rows - 1) / ROWS + 1, num_slabs = (num_tiles - 1) / most + 1; /* 1 of no rows */
    return l->num_weights > 1 ? l->num_rows : (num_tiles + num_slabs - 1) / num_slabs * ROWS; /* all about alike */
}

static inline const num *weight_of(const linear_args *l, int64_t w) { return l->weights[l->order ? l->order[w] : w]; }

/* What a tile prefetches at a step along k, so that all of them prefetch a block. */
static inline int64_t ahead_of_tiles(int64_t num_tiles) { return COLS * BESIDE * sizeof(num) / num_tiles; }

/* silu(gate) * up of some blocks of each, for so many rows at once that all stay in the cache. a: gate's blocks, and out's.
 * at_once: blocks, gate's and up's, that are computed together. */
static void compute_gated(int64_t num_rows, tile_args a, int64_t at_once) {
    enum { ROWS_AT_ONCE = 512 / ROWS * ROWS, MOST_COLS = (MOST_BLOCKS > 1 ? MOST_BLOCKS : 2) * COLS };
    _Alignas(64) num y[ROWS_AT_ONCE][MOST_COLS]; /* gate's columns, then up's */
    const int64_t columns = a.num_blocks * COLS, to_up = a.n * padded_rows(a.k);
    for (int64_t left = num_rows; left > 0; left -= ROWS_AT_ONCE) {
        const int64_t rows = smaller(left, ROWS_AT_ONCE);
        tile_args part = {
            .x = a.x,
            .ahead_bytes = ahead_of_tiles((rows + ROWS - 1) / ROWS),
            .n = MOST_COLS,
            .k = a.k,
            .columns = COLS,
        };
        for (int i = 0; i < 2 * a.num_blocks; i++) {
            const int is_up = i >= a.num_blocks;
            const column_block gate = a.blocks[i % a.num_blocks];
            column_block *block = &part.blocks[part.num_blocks++];
            block->weight = gate.weight + is_up * to_up;
            block->bias = gate.bias ? gate.bias + is_up * a.n : NULL;
            if (at_once > 1)
                block->ahead = gate.ahead + is_up * to_up * sizeof(num);
            else
                block->ahead = is_up ? gate.ahead : (const char *)(gate.weight + to_up);
            if (part.num_blocks == at_once || i + 1 == 2 * a.num_blocks) {
                part.out = y[0] + (i + 1 - part.num_blocks) * COLS;
                compute_block(rows, part);
                part.num_blocks = 0;
            }
        }
        for (int64_t r = 0; r < rows; r++, a.out += a.n)
            for (int c = 0; c < columns; c += LANES)
                silu_and_mul_lanes(a.out + c, y[r] + c, y[r] + columns + c);
        a.x += rows * a.k;
    }
}

/* One block of columns of a weight for each item; weight after weight, slab after slab. Some are computed together. */
static void linear_blocks(const void *args, int64_t first, int64_t end) {
    const linear_args l = *(const linear_args *)args;
    const int64_t num_blocks = num_col_blocks(l.n), block_size = COLS * padded_rows(l.k), most_rows = slab_rows(&l);
    begin_tiles();
    for (int64_t item = first; item < end;) {
        const int64_t slab = item / (num_blocks * l.num_weights), w = item / num_blocks % l.num_weights;
        const int64_t place = item % num_blocks, c = place * COLS;
        const int64_t first_row = w ? l.ends[w - 1] : slab * most_rows;
        const int64_t num_rows = smaller(most_rows, (w + 1 < l.num_weights ? l.ends[w] : l.num_rows) - first_row);
        const int64_t at_once = blocks_at_once(num_rows, block_size * sizeof(num));
        const int64_t items = l.gated && at_once > 1 ? at_once / 2 : at_once; /* a block of gate and one of up are one */
        tile_args a = {
            .x = l.x + first_row * l.k,
            .num_blocks = smaller(items, smaller(end - item, num_blocks - place)),
            .ahead_bytes = ahead_of_tiles((num_rows + ROWS - 1) / ROWS),
            .n = l.n,
            .k = l.k,
        };
        item += a.num_blocks;
        a.columns = smaller(COLS, l.n - c - (a.num_blocks - 1) * COLS);
        const int is_beside = place + a.num_blocks < num_blocks || w + 1 == l.num_weights;
        for (int b = 0; b < a.num_blocks; b++) {
            column_block *block = &a.blocks[b];
            block->weight = weight_of(&l, w) + (place + b) * block_size;
            block->bias = l.bias ? l.bias + c + b * COLS : NULL;
            block->ahead = (const char *)(is_beside ? block->weight + a.num_blocks * block_size
                                                    : weight_of(&l, w + 1) + b * block_size);
        }
        if (l.out_floats)
            a.out_floats = l.out_floats + first_row * l.n + c;
        else
            a.out = l.out + first_row * l.n + c;
        if (l.gated)
            compute_gated(num_rows, a, at_once);
        else
            compute_block(num_rows, a);
    }
    end_tiles();
}

/* What the processor multiplies at once, if results have the same bits only where others do that, too; or "". */
const char *bits_depend_on(void) { return multiplied_by(); }

/* out [m][n] = x [m][k] times the weights that were reordered, each row with the one that it meets, + bias. */
void linear(const linear_args *args) {
    linear_args met = *args;
    met.num_weights = met_weights(args->num_weights, args->ends, args->num_rows);
    const int64_t num_slabs = args->num_rows ? (args->num_rows - 1) / slab_rows(&met) + 1 : 0;
    const int64_t num_items = num_slabs * met.num_weights * num_col_blocks(args->n);
    parallel_for(linear_blocks, &met, num_items, 1 + CHUNK_BYTES / (COLS * args->k * sizeof(num)));
}
