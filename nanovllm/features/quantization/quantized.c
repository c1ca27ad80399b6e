/* Matrix products with weights of 8 and 4 bits (chapter 12). Compiled as worker/cpu/kernels.c is. formats.py has the
 * formats, and the same computation in PyTorch.
 *
 * First the rows of x are quantized, in groups of 32 along k. Then, for 32 outputs side by side, the codes of a group
 * are multiplied with x as integers and added up exactly, in steps of 4 along k, before the sum is scaled:
 *
 *     y += weight's scale * row's scale * (sum of code * x - zero * sum of x)  + minimum * row's scale * sum of x
 *
 * A row's result is the same to the last bit whatever the number of rows beside it, and on every processor.
 */
#include "pool.h"
#include "vectors.h"
#include "integers.h"

#include "activations.h"

enum { BLOCK_ROWS = 32, SLAB_TILES = 240 / MAX_ROWS }; /* the rows of a slab are quantized, then multiplied */
enum { AHEAD_BYTES = 4096 }; /* a single tile prefetches so far ahead; further, and the cache loses what it needs now */

/* quantized_kernels.py has the same fields in the same order, here and below. */
typedef struct {
    const uint8_t *blocks; /* see QuantizedWeight */
    int64_t block_bytes, format, n;
} quantized_part;

typedef struct {
    int64_t num_rows;    /* m */
    num *out;            /* [m][n], n of all parts together; or NULL: */
    float *out_floats;   /* the same, not rounded to num: logits */
    const num *x, *bias; /* [m][k], rows x_stride numbers apart; [n] or NULL */
    x_group *groups;     /* [SLAB_TILES][num_groups][MAX_ROWS] */
    const quantized_part *const *weights; /* [num_weights][num_parts], all weights alike */
    const int64_t *ends, *order; /* see linear_args */
    int64_t num_weights, num_parts, num_blocks, n, k, x_stride;
} quantized_args;

/* Tiles of up to MAX_ROWS rows, each of one weight. Tile t has the rows row[t] to row[t + 1] - 1; the slab's weight i,
 * first_weight + i of all, meets the tiles tile[i] to tile[i + 1] - 1. */
typedef struct {
    const quantized_args *args;
    int64_t first_weight, num_weights, num_tiles, row[SLAB_TILES + 1], tile[SLAB_TILES + 1];
} slab;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t num_groups(int64_t k) { return (k + GROUP_SIZE - 1) / GROUP_SIZE; }

int64_t x_groups_bytes(int64_t k) { return SLAB_TILES * MAX_ROWS * num_groups(k) * sizeof(x_group); }

static void quantize_tiles(const void *args, int64_t first, int64_t end) {
    const slab *s = args;
    const quantized_args q = *s->args;
    for (int64_t t = first; t < end; t++)
        for (int64_t r = s->row[t]; r < s->row[t + 1]; r++) {
            x_group *group = q.groups + t * num_groups(q.k) * MAX_ROWS + r - s->row[t];
            for (int64_t i = 0; i < q.k; i += GROUP_SIZE, group += MAX_ROWS)
                quantize_group(group, q.x + r * q.x_stride + i, smaller(q.k - i, GROUP_SIZE));
        }
}

typedef struct {
    num *out;             /* [rows][n], at the block's first column; or NULL: */
    float *out_floats;    /* the same, not rounded to num */
    const num *bias;      /* [columns] or NULL */
    const x_group *x;     /* [num_groups][MAX_ROWS] */
    const uint8_t *block; /* [num_groups][group_bytes] */
    const uint8_t *ahead; /* what this tile prefetches, */
    int64_t ahead_bytes;  /* so many bytes in each group */
    int64_t rows, columns, n, num_groups;
} block_args;

/* The products of a tile of `rows` rows with one block. The rows behind a->rows are computed and not stored. */
static inline __attribute__((always_inline)) void multiply_block(const int format, int rows, const block_args *a) {
    const int bits = format == Q8_0 ? 8 : 4, code_bytes = BLOCK_ROWS * GROUP_SIZE * bits / 8;
    const int number_bytes = 2 * BLOCK_ROWS * (format == Q4_1 ? 2 : 1); /* scales and minimums */
    const int vecs = rows <= 2 ? BLOCK_ROWS / WIDTH : TILE_VECS;
    for (int column = 0; column < BLOCK_ROWS; column += vecs * WIDTH) {
        floats y[MAX_ROWS][BLOCK_ROWS / WIDTH] = {{{0}}};
        const uint8_t *group = a->block, *ahead = a->ahead;
        const x_group *x = a->x;
        for (int64_t g = 0; g < a->num_groups; g++) {
            ints sum[MAX_ROWS][BLOCK_ROWS / WIDTH];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vecs; v++)
                    sum[r][v] = begin(x[r].offsets[format], bits);
#pragma GCC unroll 2
            for (int half = 0; half < 8 / bits; half++) {
#pragma GCC unroll 2 /* of more, gcc computes all products before the sums, and the registers do not suffice */
                for (int step = 0; step < bits; step++) {
                    const uint8_t *bytes = group + number_bytes + 4 * (step * BLOCK_ROWS + column);
                    ints codes[BLOCK_ROWS / WIDTH];
                    for (int v = 0; v < vecs; v++)
                        codes[v] = codes_at(bytes + 4 * WIDTH * v, bits, half);
                    for (int r = 0; r < rows; r++) {
                        int32_t four;
                        memcpy(&four, x[r].x + 16 * half + 4 * step, 4);
                        for (int v = 0; v < vecs; v++)
                            sum[r][v] = dot(sum[r][v], codes[v], all(four), bits);
                    }
                }
            }
            for (int v = 0; v < vecs; v++) {
                const uint16_t *numbers = (const uint16_t *)group + column + v * WIDTH;
                const floats scale = from_halves(numbers);
                for (int r = 0; r < rows; r++) {
                    const ints total = end(sum[r][v], x[r].offsets[format], bits);
                    y[r][v] = fused_floats(__builtin_convertvector(total, floats) * x[r].scale, scale, y[r][v]);
                    if (format == Q4_1)
                        y[r][v] = fused_floats((floats){0} + x[r].scaled_sum, from_halves(numbers + BLOCK_ROWS), y[r][v]);
                }
            }
            for (int64_t i = 0; i < a->ahead_bytes && column == 0; i += 64)
                __builtin_prefetch(ahead + i);
            ahead += a->ahead_bytes;
            group += number_bytes + code_bytes;
            x += MAX_ROWS;
        }
        for (int r = 0; r < a->rows; r++)
            for (int c = column; c < smaller(a->columns, column + vecs * WIDTH); c++) {
                const float sum = ((float *)y[r])[c - column] + (a->bias ? load(a->bias[c]) : 0);
                if (a->out_floats)
                    a->out_floats[r * a->n + c] = sum;
                else
                    a->out[r * a->n + c] = store(sum);
            }
    }
}

static inline __attribute__((always_inline)) void multiply_tile(const int format, const block_args *a) {
    if (a->rows == 1) /* constants, so that the sums stay in registers */
        multiply_block(format, 1, a);
    else if (a->rows == 2 && MAX_ROWS > 2)
        multiply_block(format, 2, a);
    else
        multiply_block(format, MAX_ROWS, a);
}

/* One block of a weight's outputs, counted through its parts, for each item; weight after weight. */
static void multiply_blocks(const void *args, int64_t first, int64_t end) {
    const slab *s = args;
    const quantized_args q = *s->args;
    for (int64_t item = first; item < end; item++) {
        const int64_t i = item / q.num_blocks, first_tile = s->tile[i], num_tiles = s->tile[i + 1] - first_tile;
        const int64_t w = s->first_weight + i;
        const quantized_part *part = q.weights[q.order ? q.order[w] : w];
        int64_t b = item % q.num_blocks, column = 0, count;
        for (; b >= (count = (part->n + BLOCK_ROWS - 1) / BLOCK_ROWS); part++) {
            b -= count;
            column += part->n;
        }
        const int64_t c = column + b * BLOCK_ROWS, columns = smaller(part->n - b * BLOCK_ROWS, BLOCK_ROWS);
        const int64_t ahead_bytes = part->block_bytes / num_groups(q.k) / num_tiles; /* all tiles: a block */
        const uint8_t *block = part->blocks + b * part->block_bytes;
        const uint8_t *ahead = block + (num_tiles == 1 ? AHEAD_BYTES : part->block_bytes);
        block_args a = {NULL, NULL,    q.bias ? q.bias + c : NULL, NULL, block, ahead, ahead_bytes,
                        0,    columns, q.n,                        num_groups(q.k)};
        for (int64_t t = first_tile; t < first_tile + num_tiles; t++) {
            if (q.out_floats)
                a.out_floats = q.out_floats + s->row[t] * q.n + c;
            else
                a.out = q.out + s->row[t] * q.n + c;
            a.x = q.groups + t * a.num_groups * MAX_ROWS;
            a.rows = s->row[t + 1] - s->row[t];
            switch (part->format) {
            case Q8_0: multiply_tile(Q8_0, &a); break;
            case Q4_0: multiply_tile(Q4_0, &a); break;
            case Q4_1: multiply_tile(Q4_1, &a); break;
            }
            a.ahead += a.ahead_bytes * a.num_groups;
        }
    }
}

/* Fill a slab with the rows from `row` on, the first of them of weight w. Returns the row and sets the weight behind. */
static int64_t fill(slab *s, int64_t row, int64_t *w) {
    s->first_weight = *w;
    s->num_weights = s->num_tiles = s->tile[0] = 0;
    while (*w < s->args->num_weights && s->num_tiles < SLAB_TILES) {
        const int64_t end = *w + 1 < s->args->num_weights ? s->args->ends[*w] : s->args->num_rows;
        for (; row < end && s->num_tiles < SLAB_TILES; row = smaller(row + MAX_ROWS, end))
            s->row[s->num_tiles++] = row;
        s->tile[++s->num_weights] = s->num_tiles;
        if (row == end)
            ++*w;
    }
    s->row[s->num_tiles] = row;
    return row;
}

/* out = x times the weights, + bias (unless it is NULL). */
void quantized_linear(const quantized_args *args) {
    const int64_t row_bytes = num_groups(args->k) * sizeof(x_group);
    quantized_args met = *args;
    slab s;
    s.args = &met;
    met.num_weights = met_weights(args->num_weights, args->ends, args->num_rows);
    for (int64_t row = 0, w = 0; row < args->num_rows;) {
        row = fill(&s, row, &w);
        parallel_for(quantize_tiles, &s, s.num_tiles, 1 + CHUNK_BYTES / 2 / MAX_ROWS / row_bytes);
        const int64_t block_bytes = args->weights[0]->block_bytes * s.num_tiles / s.num_weights;
        parallel_for(multiply_blocks, &s, s.num_weights * args->num_blocks, 1 + CHUNK_BYTES / block_bytes);
    }
}

#include "quantize.c"
