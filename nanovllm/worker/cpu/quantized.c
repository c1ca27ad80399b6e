/* Matrix products with weights of 8 and 4 bits (chapter 12). A part of cpu/kernels.c. worker/quantized.py has the formats
 * and the same computation in PyTorch.
 *
 * First, each row of activations is quantized in groups of 32 along k. Then, for BLOCK_ROWS outputs side by side and each
 * group, integers are multiplied and added up exactly, in steps of 4 along k, and the sum is scaled:
 *
 *     y += weight scale * row scale * (sum of code * x - zero * sum of x)  + minimum * row scale * sum of x
 *
 * Nothing here can be reordered by a compiler, in spite of -ffast-math: every float operation is followed by a conversion,
 * a store or a fused(). So a row's result is the same to the last bit whatever the number of rows beside it.
 */
#include "integers.h"

enum { Q8_0, Q4_0, Q4_1 }; /* the order of FORMATS in worker/quantized.py */
enum { GROUP_SIZE = 32, BLOCK_ROWS = 32 };
enum { SLAB_ROWS = 240 }; /* that are quantized before they are multiplied: they stay in a core's cache */

/* 32 numbers of a row: scale * x. */
typedef struct {
    int8_t x[GROUP_SIZE];
    float scale, scaled_sum; /* scale * sum of x */
    int32_t offset[2];       /* -zero * sum of x, for Q8_0 and Q4_0 */
} x_group;

/* cpu/kernels.py has the same fields in the same order, here and below. */
typedef struct {
    const uint8_t *blocks; /* see QuantizedWeight */
    int64_t format, n;
} quantized_part;

typedef struct {
    num *out;              /* [m][n]; n of all parts together */
    const num *x, *bias;   /* [m][k], rows x_stride numbers apart; [n] or NULL */
    x_group *groups;       /* [SLAB_ROWS / MAX_ROWS][num_groups][MAX_ROWS] */
    const quantized_part *parts;
    int64_t m, n, k, x_stride, num_parts;
} quantized_args;

static inline int64_t num_groups(int64_t k) { return (k + GROUP_SIZE - 1) / GROUP_SIZE; }

int64_t x_groups_bytes(int64_t k) { return SLAB_ROWS * num_groups(k) * sizeof(x_group); }

static void quantize_group(x_group *group, const num *x, int64_t count) {
    num padded[GROUP_SIZE];
    float numbers[GROUP_SIZE], largest;
    uint32_t bits[GROUP_SIZE], largest_bits = 0;
    if (count < GROUP_SIZE) {
        memset(padded, 0, sizeof(padded));
        x = memcpy(padded, x, count * sizeof(num));
    }
    for (int i = 0; i < GROUP_SIZE; i++)
        numbers[i] = load(x[i]);
    memcpy(bits, numbers, sizeof(bits));
    for (int i = 0; i < GROUP_SIZE; i++) /* as integers: they are in the same order, and NaN is the largest */
        largest_bits = (bits[i] & 0x7fffffff) > largest_bits ? bits[i] & 0x7fffffff : largest_bits;
    memcpy(&largest, &largest_bits, 4);
    double scale = 0, inverse = 0; /* double: their float32 is right to the last bit, however a compiler divides */
    const int finite = largest_bits < 0x7f800000;
    if (finite && largest >= 0x1p-100f) {
        scale = largest / 127.0;
        inverse = 127.0 / largest;
    }
    int32_t sum = 0;
    for (int i = 0; i < GROUP_SIZE; i++) {
        const int32_t q = (int32_t)rintf(numbers[i] * (float)inverse);
        group->x[i] = (int8_t)q;
        sum += q;
    }
    group->scale = (float)scale;
    group->scaled_sum = (float)scale * (float)sum;
    if (!finite)
        for (int i = 0; i < 2; i++)
            memcpy(i ? &group->scale : &group->scaled_sum, &(uint32_t){0x7fc00000}, 4); /* NaN */
    group->offset[0] = SIGNED_CODES ? 0 : -128 * sum;
    group->offset[1] = -8 * sum;
}

static void quantize_rows(const void *args, int64_t first, int64_t end) {
    const quantized_args a = *(const quantized_args *)args;
    const int64_t count = num_groups(a.k);
    for (int64_t r = first; r < end; r++) {
        x_group *group = a.groups + r / MAX_ROWS * count * MAX_ROWS + r % MAX_ROWS;
        for (int64_t i = 0; i < a.k; i += GROUP_SIZE, group += MAX_ROWS)
            quantize_group(group, a.x + r * a.x_stride + i, a.k - i < GROUP_SIZE ? a.k - i : GROUP_SIZE);
    }
}

typedef struct {
    num *out;              /* [rows][n], at the block's first column */
    const num *bias;       /* [columns] or NULL */
    const x_group *x;      /* [num_groups][MAX_ROWS] */
    const uint8_t *block;  /* [num_groups][group_bytes] */
    const char *ahead;     /* what this tile prefetches: a part of the next block, */
    int64_t ahead_bytes;   /* so many bytes in each group */
    int64_t n, num_groups, columns, rows;
} block_args;

/* The products of `rows` rows with one block. */
static inline __attribute__((always_inline)) void multiply_block(const int format, const int rows, const block_args *a) {
    const int bits = format == Q8_0 ? 8 : 4, vecs = rows == 1 ? BLOCK_ROWS / WIDTH : TILE_VECS;
    const int minimums_at = 2 * BLOCK_ROWS, codes_at_byte = minimums_at << (format == Q4_1);
    const int group_bytes = codes_at_byte + BLOCK_ROWS * GROUP_SIZE * bits / 8;
    for (int column = 0; column < BLOCK_ROWS; column += vecs * WIDTH) {
        floats y[MAX_ROWS][BLOCK_ROWS / WIDTH] = {{{0}}};
        const uint8_t *group = a->block;
        const x_group *x = a->x;
        const char *ahead = a->ahead;
        for (int64_t g = 0; g < a->num_groups; g++) {
            ints sum[MAX_ROWS][BLOCK_ROWS / WIDTH];
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < vecs; v++)
                    sum[r][v] = begin(format == Q4_1 ? 0 : x[r].offset[format], bits);
#pragma GCC unroll 2
            for (int half = 0; half < 8 / bits; half++) {
#pragma GCC unroll 2 /* more, and gcc computes all products before it adds them, for which there are not enough registers */
                for (int step = 0; step < bits; step++) {
                    const uint8_t *codes = group + codes_at_byte + 4 * (step * BLOCK_ROWS + column);
                    ints c[BLOCK_ROWS / WIDTH];
                    for (int v = 0; v < vecs; v++)
                        c[v] = codes_at(codes + 4 * WIDTH * v, bits, half);
                    for (int r = 0; r < rows; r++) {
                        int32_t four;
                        memcpy(&four, x[r].x + 16 * half + 4 * step, 4);
                        for (int v = 0; v < vecs; v++)
                            sum[r][v] = dot(sum[r][v], c[v], all(four), bits);
                    }
                }
            }
            for (int v = 0; v < vecs; v++) {
                const uint16_t *numbers = (const uint16_t *)group + column + v * WIDTH;
                const floats scale = from_halves(numbers);
                for (int r = 0; r < rows; r++) {
                    const ints total = end(sum[r][v], format == Q4_1 ? 0 : x[r].offset[format], bits);
                    y[r][v] = fused(__builtin_convertvector(total, floats) * x[r].scale, scale, y[r][v]);
                }
                if (format == Q4_1) {
                    const floats minimum = from_halves(numbers + BLOCK_ROWS);
                    for (int r = 0; r < rows; r++)
                        y[r][v] = fused((floats){0} + x[r].scaled_sum, minimum, y[r][v]);
                }
            }
            if (column == 0)
                for (int64_t i = 0; i < a->ahead_bytes; i += 64)
                    __builtin_prefetch(ahead + i);
            ahead += a->ahead_bytes;
            group += group_bytes;
            x += MAX_ROWS;
        }
        float stored[BLOCK_ROWS];
        for (int r = 0; r < a->rows; r++) {
            memcpy(stored, y[r], vecs * sizeof(floats));
            for (int c = column; c < a->columns && c < column + vecs * WIDTH; c++)
                a->out[r * a->n + c] = store(stored[c - column] + (a->bias ? load(a->bias[c]) : 0));
        }
    }
}

/* Three kinds of tiles are enough: some rows too many take less time than the weights take to arrive. */
static inline __attribute__((always_inline)) void multiply_tile(const int format, const block_args *a) {
    if (a->rows == 1)
        multiply_block(format, 1, a);
    else if (a->rows == 2 && MAX_ROWS > 2)
        multiply_block(format, 2, a);
    else
        multiply_block(format, MAX_ROWS, a);
}

/* The blocks first to end - 1, counted through all parts. */
static void multiply_blocks(const void *args, int64_t first, int64_t end) {
    static const int64_t group_bytes[] = {[Q8_0] = 34 * BLOCK_ROWS, [Q4_0] = 18 * BLOCK_ROWS, [Q4_1] = 20 * BLOCK_ROWS};
    const quantized_args q = *(const quantized_args *)args;
    const int64_t groups = num_groups(q.k), num_tiles = (q.m + MAX_ROWS - 1) / MAX_ROWS;
    int64_t part_first = 0, part_column = 0;
    for (const quantized_part *part = q.parts; part < q.parts + q.num_parts; part++) {
        const int64_t part_end = part_first + (part->n + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t block_bytes = groups * group_bytes[part->format], ahead_bytes = group_bytes[part->format] / num_tiles;
        for (int64_t b = first > part_first ? first : part_first; b < end && b < part_end; b++) {
            const int64_t c = (b - part_first) * BLOCK_ROWS, left = part->n - c, column = part_column + c;
            const uint8_t *block = part->blocks + (b - part_first) * block_bytes;
            block_args a = {q.out + column, q.bias ? q.bias + column : NULL, q.groups, block, (const char *)block + block_bytes,
                            ahead_bytes, q.n, groups, left < BLOCK_ROWS ? left : BLOCK_ROWS, 0};
            for (int64_t r = 0; r < q.m; r += MAX_ROWS) {
                a.rows = q.m - r < MAX_ROWS ? q.m - r : MAX_ROWS;
                switch (part->format) {
                case Q8_0: multiply_tile(Q8_0, &a); break;
                case Q4_0: multiply_tile(Q4_0, &a); break;
                case Q4_1: multiply_tile(Q4_1, &a); break;
                }
                a.out += MAX_ROWS * q.n;
                a.x += groups * MAX_ROWS;
                a.ahead += groups * ahead_bytes;
            }
        }
        part_first = part_end;
        part_column += part->n;
    }
}

/* out = x times the weight, + bias. */
void quantized_linear(const quantized_args *args) {
    quantized_args slab = *args;
    const int64_t groups = num_groups(slab.k);
    int64_t num_blocks = 0;
    for (int64_t i = 0; i < slab.num_parts; i++)
        num_blocks += (slab.parts[i].n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t r = 0; r < args->m; r += SLAB_ROWS) {
        slab.m = args->m - r < SLAB_ROWS ? args->m - r : SLAB_ROWS;
        parallel_for(quantize_rows, &slab, slab.m, 1 + CHUNK_BYTES / (groups * (int64_t)sizeof(x_group)) / 8);
        const int64_t num_tiles = (slab.m + MAX_ROWS - 1) / MAX_ROWS;
        parallel_for(multiply_blocks, &slab, num_blocks, 1 + CHUNK_BYTES / (groups * 34 * BLOCK_ROWS * num_tiles));
        slab.out += SLAB_ROWS * slab.n;
        slab.x += SLAB_ROWS * slab.x_stride;
    }
}
