/* What the files of Gated DeltaNet share: their arguments, rows of scratch memory, and the gates (chapter 16). Compiled
 * as worker/cpu/kernels.c is. */
#pragma once
#include "pool.h"
#include "vectors.h"

enum {
    COLUMNS = 16, /* of a state lie together; one thread has them through all tokens of a step */
    COLUMN_VECS = COLUMNS / LANES,
    SUMS = 4, /* that a sum over the numbers of a key is divided into: number j takes j, j + SUMS, ... */
    MAX_KEY_DIM = 256,
    MAX_VALUE_DIM = 1024,
    MAX_KERNEL = 16,
};

/* See core/snapshots/segments.py. */
typedef struct {
    int64_t source, target, log_slot, first_logged, num_logged, first_row, num_rows, keeps;
} delta_segment;

/* hybrid_c_kernels.py has the same fields in the same order, here and below. */
typedef struct {
    const delta_segment *segments;
    int64_t num_segments, num_logged;
} delta_step;

/* Strides count numbers. conv_size = 2 * key_heads * key_dim + value_heads * value_dim. Padded: a key's numbers to a
 * multiple of SUMS, a value's to one of COLUMNS; after the last there are zeros. */
typedef struct {
    int64_t num_rows;
    num *out;      /* [num_rows][value_heads][value_dim] */
    const num *x;  /* [num_rows], rows x_stride apart: q, k and v of all heads, z, b, a */
    float *states; /* [slots], state_stride apart: [value_heads][padded value_dim / COLUMNS][padded key_dim][COLUMNS] */
    num *windows;  /* [slots], window_stride apart: [kernel_size - 1][conv_size] */
    num *log;      /* [slots], log_stride apart: rows of [conv_size + 2 * value_heads]: q, k, v, b, a */
    const float *conv, *a, *dt_bias; /* [kernel_size][conv_size]; [value_heads] -exp(A_log); [value_heads] */
    const float *norm;               /* [value_dim]; after it, as after conv, COLUMNS numbers can be read */
    /* Scratch memory for R rows, those from the log included, in the order in which a thread reads it. */
    float *keys;    /* [2 * key_heads][R][padded key_dim]: q of all heads, then k */
    float *values;  /* [value_heads * padded value_dim / COLUMNS][R][COLUMNS] */
    float *gates;   /* [value_heads][R][2]: beta and decay */
    float *outputs; /* [value_heads * padded value_dim / COLUMNS][num_rows][COLUMNS] */
    const delta_step *step;
    int64_t x_stride, state_stride, window_stride, log_stride;
    int64_t key_heads, value_heads, key_dim, value_dim, kernel_size;
    float eps;
} delta_args;

static inline int64_t padded_key(const delta_args *a) { return (a->key_dim + SUMS - 1) / SUMS * SUMS; }
static inline int64_t padded_value(const delta_args *a) { return (a->value_dim + COLUMNS - 1) / COLUMNS * COLUMNS; }
static inline int64_t conv_size(const delta_args *a) {
    return 2 * a->key_heads * a->key_dim + a->value_heads * a->value_dim;
}
static inline int64_t scratch_rows(const delta_args *a) { return a->num_rows + a->step->num_logged; }

static inline float float_squares(const float *x, int64_t size) { /* as sum_of_squares() */
    vec sum[PARTIAL_VECS] = {{0}};
    float partial[PARTIAL_SUMS];
    int64_t i = 0;
    for (; i + PARTIAL_SUMS <= size; i += PARTIAL_SUMS)
        for (int v = 0; v < PARTIAL_VECS; v++)
            sum[v] += vec_from(x + i + v * LANES) * vec_from(x + i + v * LANES);
    memcpy(partial, sum, sizeof(partial));
    for (int j = 0; i + j < size; j++)
        partial[j] += x[i + j] * x[i + j];
    return sum_of(partial);
}

static inline vec sigmoid(vec x) {
    const vec e = exp_negative(choose(x < 0, x, -x));
    return choose(x < 0, e, in_all(1)) / (1 + e);
}

static inline vec some_floats(const num *x, int64_t count) { /* LANES at most; after them zeros */
    num padded[LANES] = {0};
    return floats_at(memcpy(padded, x, count * sizeof(num)));
}

/* e^x for x <= 0, to about 1e-11, with nothing but operations in double that every processor rounds alike. A state
 * multiplies the decays of thousands of tokens, and their errors with them. */
static inline double exp_double(double x) {
    if (x < -700)
        return 0;
    const double n = (double)(int64_t)(x * 1.4426950408889634 - 0.5); /* x = n log(2) + f */
    const double f = x - n * 0.693147180369123816 - n * 1.90821492927058770e-10;
    static const double coefficients[] = {1. / 362880, 1. / 40320, 1. / 5040, 1. / 720, 1. / 120,
                                          1. / 24,     1. / 6,     1. / 2,    1,        1};
    double p = 0;
    for (int i = 0; i < 10; i++)
        p = p * f + coefficients[i];
    const int64_t bits = ((int64_t)n + 1023) << 52;
    double power;
    memcpy(&power, &bits, 8);
    return p * power;
}

static inline double log_one_plus(double y) { /* for y in [0, 1]: 2 artanh(y / (2 + y)), as a series */
    const double z = y / (2 + y), square = z * z;
    static const double coefficients[] = {1. / 19, 1. / 17, 1. / 15, 1. / 13, 1. / 11,
                                          1. / 9,  1. / 7,  1. / 5,  1. / 3,  1};
    double sum = 0;
    for (int i = 0; i < 10; i++)
        sum = sum * square + coefficients[i];
    return 2 * z * sum;
}

/* beta and decay of a value head. b: of the head; its a lies value_heads numbers after it. */
static inline void gates_of(float *gates, const num *b, const delta_args *a, int64_t head) {
    const double x = load(b[0]), step = load(b[a->value_heads]) + a->dt_bias[head];
    const double e = exp_double(x < 0 ? x : -x), more = log_one_plus(exp_double(step < 0 ? step : -step));
    gates[0] = (float)((x < 0 ? e : 1) / (1 + e));
    gates[1] = (float)exp_double(a->a[head] * ((step > 0 ? step : 0) + more));
}
