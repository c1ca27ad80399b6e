/* Matrix products with weights of 8 and 4 bits (chapter 12). Compiled as worker/cpu/kernels.c is. formats.py has the
 * formats, and the same computation in PyTorch.
 *
 * First the rows of x are quantized, in groups of 32 along k. Then, for 32 outputs side by side, the codes of a group
 * are multiplied with x as integers and added up exactly, in steps of 4 along k, before the sum is scaled:
 *
 *     y += weight's scale * row's scale * (sum of code * x - zero * sum of x)  + minimum * row's scale * sum of x
 *
 * A row's result is the same to the last bit whatever the number of rows beside it, and on every processor.
 *
 * The inputs of a group are neighbours in x, unless a part has an order: then they are gathered while x is quantized.
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
    const int32_t *order;  /* [num_groups][GROUP_SIZE]: which number of a row stands there, or -1: none; NULL: as they come */
    int64_t block_bytes, format, n, num_groups;
} quantized_part;

typedef struct {
    int64_t num_rows;    /* m */
    num *out;            /* [m][n], n of all parts together; or NULL: */
    float *out_floats;   /* the same, not rounded to num: logits */
    const num *x, *bias; /* [m][k], rows x_stride numbers apart; [n] or NULL */
    x_group *groups;     /* [SLAB_TILES][num_groups][MAX_ROWS]; num_groups: the largest of all parts */
    const quantized_part *const *weights; /* [num_weights][num_parts], all weights alike */
    const int64_t *ends, *order; /* see linear_args */
    int64_t num_weights, num_parts, n, k, x_stride;
} quantized_args;

/* Tiles of up to MAX_ROWS rows, each of one weight. Tile t has the rows row[t] to row[t + 1] - 1; the slab's weight i,
 * first_weight + i of all, meets the tiles tile[i] to tile[i + 1] - 1. Of each weight, the parts from first_part on are
 * computed, up to end_part: those that read x in one order. They give num_blocks blocks of outputs from `column` on. */
typedef struct {
    const quantized_args *args;
    int64_t first_weight, num_weights, num_tiles, row[SLAB_TILES + 1], tile[SLAB_TILES + 1];
    int64_t first_part, end_part, num_blocks, column;
} slab;

static inline int64_t blocks_of(const quantized_part *part) { return (part->n + BLOCK_ROWS - 1) / BLOCK_ROWS; }

/* Part 0 of the slab's weight i. */
static inline const quantized_part *parts_of(const slab *s, int64_t i) {
    const int64_t w = s->first_weight + i;
    return s->args->weights[s->args->order ? s->args->order[w] : w];
}

int64_t x_groups_bytes(int64_t num_groups) { return SLAB_TILES * MAX_ROWS * num_groups * sizeof(x_group); }

static void quantize_tiles(const void *args, int64_t first, int64_t end) {
    const slab *s = args;
    const quantized_args q = *s->args;
    int64_t i = 0; /* the weight that a tile meets */
    for (int64_t t = first; t < end; t++) {
        while (t >= s->tile[i + 1])
            i++;
        const quantized_part *part = parts_of(s, i) + s->first_part;
        for (int64_t r = s->row[t]; r < s->row[t + 1]; r++) {
            const num *x = q.x + r * q.x_stride;
            x_group *group = q.groups + t * part->num_groups * MAX_ROWS + r - s->row[t];
            for (int64_t k = 0; k < part->num_groups * GROUP_SIZE; k += GROUP_SIZE, group += MAX_ROWS) {
                num gathered[GROUP_SIZE];
                for (int j = 0; part->order && j < GROUP_SIZE; j++)
                    gathered[j] = part->order[k + j] < 0 ? store(0) : x[part->order[k + j]];
                if (part->order)
                    quantize_group(group, gathered, GROUP_SIZE);
                else
                    quantize_group(group, x + k, smaller(q.k - k, GROUP_SIZE));
            }
        }
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

/* The products of a tile of `rows` rows with one block. The rows after a->rows are computed and not stored. */
static inline __attribute__((always_inline)) void multiply_block(const int format, int rows, const block_args *a) {
    const int bits = format == Q4_0 || format == Q4_1 ? 4 : 8, code_bytes = BLOCK_ROWS * GROUP_SIZE * bits / 8;
    const int has_minimum = format == Q4_1 || format == Q8_M, number_bytes = 2 * BLOCK_ROWS * (1 + has_minimum);
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
                    if (has_minimum)
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

/* One block of a weight's outputs, counted through the slab's parts of it, for each item; weight after weight. */
static void multiply_blocks(const void *args, int64_t first, int64_t end) {
    const slab *s = args;
    const quantized_args q = *s->args;
    for (int64_t item = first; item < end; item++) {
        const int64_t i = item / s->num_blocks, first_tile = s->tile[i], num_tiles = s->tile[i + 1] - first_tile;
        const quantized_part *part = parts_of(s, i) + s->first_part;
        int64_t b = item % s->num_blocks, column = s->column;
        for (; b >= blocks_of(part); part++) {
            b -= blocks_of(part);
            column += part->n;
        }
        const int64_t c = column + b * BLOCK_ROWS, columns = smaller(part->n - b * BLOCK_ROWS, BLOCK_ROWS);
        const int64_t ahead_bytes = part->block_bytes / part->num_groups / num_tiles; /* all tiles: a block */
        const uint8_t *block = part->blocks + b * part->block_bytes;
        const uint8_t *ahead = block + (num_tiles == 1 ? AHEAD_BYTES : part->block_bytes);
        block_args a = {NULL, NULL,    q.bias ? q.bias + c : NULL, NULL, block, ahead, ahead_bytes,
                        0,    columns, q.n,                        part->num_groups};
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
            case Q8_M: multiply_tile(Q8_M, &a); break;
            }
            a.ahead += a.ahead_bytes * a.num_groups;
        }
    }
}

/* Fill a slab with the rows from `row` on, the first of them of weight w. Returns the next row and sets its weight. */
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

static int has_one_order(const slab *s, int64_t part, int64_t other) {
    for (int64_t i = 0; i < s->num_weights; i++)
        if (parts_of(s, i)[part].order != parts_of(s, i)[other].order)
            return 0;
    return 1;
}

/* Go on to the next parts, which are at first_part: as many as read x in one order. */
static void take_parts(slab *s) {
    s->num_blocks = 0;
    for (s->end_part = s->first_part; s->end_part < s->args->num_parts; s->end_part++) {
        if (!has_one_order(s, s->end_part, s->first_part))
            break;
        s->num_blocks += blocks_of(parts_of(s, 0) + s->end_part);
    }
}

/* out = x times the weights, + bias (unless it is NULL). */
void quantized_linear(const quantized_args *args) {
    quantized_args met = *args;
    slab s;
    s.args = &met;
    met.num_weights = met_weights(args->num_weights, args->ends, args->num_rows);
    for (int64_t row = 0, w = 0; row < args->num_rows;) {
        row = fill(&s, row, &w);
        s.column = 0;
        for (s.first_part = 0; s.first_part < args->num_parts; s.first_part = s.end_part) {
            take_parts(&s);
            const quantized_part *part = parts_of(&s, 0) + s.first_part;
            const int64_t row_bytes = part->num_groups * sizeof(x_group);
            parallel_for(quantize_tiles, &s, s.num_tiles, 1 + CHUNK_BYTES / 2 / MAX_ROWS / row_bytes);
            const int64_t block_bytes = part->block_bytes * s.num_tiles / s.num_weights;
            parallel_for(multiply_blocks, &s, s.num_weights * s.num_blocks, 1 + CHUNK_BYTES / block_bytes);
            for (int64_t p = s.first_part; p < s.end_part; p++)
                s.column += parts_of(&s, 0)[p].n;
        }
    }
}

#include "quantize.c"
