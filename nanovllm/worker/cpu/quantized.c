/* Matrix products with weights of 8 and 4 bits (chapter 12). A part of cpu/kernels.c. worker/quantized.py has the
 * formats, and the same computation in PyTorch.
 *
 * First the rows of x are quantized, in groups of 32 along k. Then, for 32 outputs side by side, the codes of a group
 * are multiplied with x as integers and added up exactly, in steps of 4 along k, before the sum is scaled:
 *
 *     y += weight's scale * row's scale * (sum of code * x - zero * sum of x)  + minimum * row's scale * sum of x
 *
 * A row's result is the same to the last bit whatever the number of rows beside it. So, in spite of -ffast-math, no two
 * float operations may follow each other in a way that a compiler can reorder: fused() and conversions stand between.
 */
#include "integers.h"

enum { Q8_0, Q4_0, Q4_1 }; /* the order of FORMATS in worker/quantized.py */
enum { GROUP_SIZE = 32, BLOCK_ROWS = 32, SLAB_ROWS = 240 }; /* a slab is quantized, then multiplied */
enum { AHEAD_BYTES = 4096 }; /* a single tile prefetches so far ahead; further, and the cache loses what it needs now */

/* 32 numbers of a row: scale * x. */
typedef struct {
    int8_t x[GROUP_SIZE];
    float scale, scaled_sum; /* scale * sum of x */
    int32_t offsets[3];      /* -zero * sum of x, for each format */
} x_group;

/* cpu/kernels.py has the same fields in the same order, here and below. */
typedef struct {
    const uint8_t *blocks; /* see QuantizedWeight */
    int64_t block_bytes, format, n;
} quantized_part;

typedef struct {
    num *out;            /* [m][n], n of all parts together */
    const num *x, *bias; /* [m][k], rows x_stride numbers apart; [n] or NULL */
    x_group *groups;     /* [SLAB_ROWS / MAX_ROWS][num_groups][MAX_ROWS] */
    const quantized_part *parts;
    int64_t num_parts, num_blocks, m, n, k, x_stride;
} quantized_args;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t num_groups(int64_t k) { return (k + GROUP_SIZE - 1) / GROUP_SIZE; }
static inline int64_t num_tiles(int64_t m) { return (m + MAX_ROWS - 1) / MAX_ROWS; }

int64_t x_groups_bytes(int64_t k) { return SLAB_ROWS * num_groups(k) * sizeof(x_group); }

static void quantize_group(x_group *group, const num *x, int64_t count) {
    num padded[GROUP_SIZE];
    float numbers[GROUP_SIZE], largest;
    uint32_t largest_bits = 0;
    if (count < GROUP_SIZE)
        x = memcpy(memset(padded, 0, sizeof(padded)), x, count * sizeof(num));
    for (int i = 0; i < GROUP_SIZE; i++) { /* as integers, magnitudes are in the same order, and NaN is the largest */
        uint32_t bits;
        numbers[i] = load(x[i]);
        memcpy(&bits, &numbers[i], 4);
        largest_bits = (bits & 0x7fffffff) > largest_bits ? bits & 0x7fffffff : largest_bits;
    }
    memcpy(&largest, &largest_bits, 4);
    const int finite = largest_bits < 0x7f800000;
    double scale = 0, inverse = 0; /* double: rounded to float32 they are right, however a compiler divides */
    if (finite && largest >= 0x1p-100f)
        scale = largest / 127.0, inverse = 127.0 / largest;
    int32_t sum = 0;
    for (int i = 0; i < GROUP_SIZE; i++) {
        const int32_t q = (int32_t)rintf(numbers[i] * (float)inverse);
        group->x[i] = (int8_t)q;
        sum += q;
    }
    group->scale = (float)scale;
    if (!finite)
        memcpy(&group->scale, &(uint32_t){0x7fc00000}, 4); /* NaN; -ffast-math has no constant for it */
    group->scaled_sum = group->scale * (float)sum;
    group->offsets[Q8_0] = SIGNED_CODES ? 0 : -128 * sum;
    group->offsets[Q4_0] = -8 * sum;
    group->offsets[Q4_1] = 0;
}

static void quantize_rows(const void *args, int64_t first, int64_t end) {
    const quantized_args a = *(const quantized_args *)args;
    for (int64_t r = first; r < end; r++) {
        x_group *group = a.groups + r / MAX_ROWS * MAX_ROWS * num_groups(a.k) + r % MAX_ROWS;
        for (int64_t i = 0; i < a.k; i += GROUP_SIZE, group += MAX_ROWS)
            quantize_group(group, a.x + r * a.x_stride + i, smaller(a.k - i, GROUP_SIZE));
    }
}

typedef struct {
    num *out;             /* [rows][n], at the block's first column */
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
                    y[r][v] = fused(__builtin_convertvector(total, floats) * x[r].scale, scale, y[r][v]);
                    if (format == Q4_1)
                        y[r][v] = fused((floats){0} + x[r].scaled_sum, from_halves(numbers + BLOCK_ROWS), y[r][v]);
                }
            }
            for (int64_t i = 0; i < a->ahead_bytes && column == 0; i += 64)
                __builtin_prefetch(ahead + i);
            ahead += a->ahead_bytes;
            group += number_bytes + code_bytes;
            x += MAX_ROWS;
        }
        for (int r = 0; r < a->rows; r++)
            for (int c = column; c < smaller(a->columns, column + vecs * WIDTH); c++)
                a->out[r * a->n + c] = store(((float *)y[r])[c - column] + (a->bias ? load(a->bias[c]) : 0));
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

/* The blocks first to end - 1, counted through all parts. */
static void multiply_blocks(const void *args, int64_t first, int64_t end) {
    const quantized_args q = *(const quantized_args *)args;
    int64_t column = 0;
    for (const quantized_part *part = q.parts; part < q.parts + q.num_parts; part++) {
        const int64_t count = (part->n + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t ahead_bytes = part->block_bytes / num_groups(q.k) / num_tiles(q.m); /* all tiles: a block */
        for (int64_t b = first < 0 ? 0 : first; b < smaller(end, count); b++) {
            const int64_t c = column + b * BLOCK_ROWS, columns = smaller(part->n - b * BLOCK_ROWS, BLOCK_ROWS);
            const uint8_t *block = part->blocks + b * part->block_bytes;
            const uint8_t *ahead = block + (num_tiles(q.m) == 1 ? AHEAD_BYTES : part->block_bytes);
            block_args a = {q.out + c, q.bias ? q.bias + c : NULL, q.groups, block, ahead, ahead_bytes,
                            0,         columns,                    q.n,      num_groups(q.k)};
            for (int64_t r = 0; r < q.m; r += MAX_ROWS) {
                a.rows = smaller(q.m - r, MAX_ROWS);
                switch (part->format) {
                case Q8_0: multiply_tile(Q8_0, &a); break;
                case Q4_0: multiply_tile(Q4_0, &a); break;
                case Q4_1: multiply_tile(Q4_1, &a); break;
                }
                a.out += MAX_ROWS * q.n;
                a.x += MAX_ROWS * a.num_groups;
                a.ahead += a.ahead_bytes * a.num_groups;
            }
        }
        first -= count, end -= count; /* the next part counts from 0 */
        column += part->n;
    }
}

/* out = x times the weight, + bias (unless it is NULL). */
void quantized_linear(const quantized_args *args) {
    quantized_args slab = *args;
    const int64_t row_bytes = num_groups(slab.k) * sizeof(x_group);
    for (int64_t r = 0; r < args->m; r += SLAB_ROWS) {
        slab.m = smaller(args->m - r, SLAB_ROWS);
        parallel_for(quantize_rows, &slab, slab.m, 1 + CHUNK_BYTES / 2 / row_bytes);
        const int64_t tile_bytes = slab.parts->block_bytes * num_tiles(slab.m);
        parallel_for(multiply_blocks, &slab, slab.num_blocks, 1 + CHUNK_BYTES / tile_bytes);
        slab.out += SLAB_ROWS * slab.n;
        slab.x += SLAB_ROWS * slab.x_stride;
    }
}
