/* The small operations of a decoder layer, for CPUs (chapter 10). The rest is in the files that are included below, and in
 * heads.c, which is compiled by itself: what has to do with attention's heads, whose sizes are those of a model.
 *
 *     pool.h              work for all cores
 *     vectors.h           number and vector types; wasm.h: those of WebAssembly
 *     linear.c            matrix products; linear_vectors.c, linear_amx.c: a tile of one
 *     adapters.c          small changes of matrix products
 *     quantized.c         matrix products with weights of 8 and 4 bits
 *     quantize.c          weights of 4 bits, made of others
 *     delta_rule.h, delta_conv.c, delta_rule.c    layers whose memory does not grow
 *     gates.c             gates of hybrid models
 *     rows.c, replay.c    what surrounds the layers of a step, and all of its calls made again
 *
 * Compiled at first use by cpu/c_kernels.py with -DTYPE_bf16, -DTYPE_f16 or -DTYPE_f32: so often, whatever the models. Each
 * function has a slow twin in PyTorch with the same meaning, in worker/kernels.py or worker/attention.py. All of them
 * compute in float32 and round once, when they store a result.
 * What a decoder layer calls takes one struct, whose first field is the number of rows: replay.c says why.
 *
 * The bits of a row's result depend on nothing but the row's own numbers and the weights: every sum has one order, which
 * neither the other rows nor the number of threads nor the length of vectors changes. A compiler may not change it
 * either: what it may do is in cpu/compiler.py, and fused() says where a product and a sum are rounded once.
 */
#include "pool.h"
#include "vectors.h"

/* cpu/c_kernels.py has the same fields in the same order, here and below. */
typedef struct {
    int64_t num_rows;
    num *out, *residual; /* [num_rows][num_heads][size]; rows and heads of residual are row_stride and head_stride apart */
    const num *delta, *weight; /* as residual, or NULL; [size] */
    int64_t num_heads, row_stride, head_stride, size;
    float eps, offset;
} norm_args;

static inline float sum_of_squares(const num *x, int64_t size) {
    vec sum[PARTIAL_VECS] = {{0}};
    float partial[PARTIAL_SUMS];
    int64_t i = 0;
    for (; i + PARTIAL_SUMS <= size; i += PARTIAL_SUMS)
        for (int v = 0; v < PARTIAL_VECS; v++) {
            const vec numbers = floats_at(x + i + v * LANES);
            sum[v] += numbers * numbers;
        }
    memcpy(partial, sum, sizeof(partial));
    for (int j = 0; i + j < size; j++)
        partial[j] += load(x[i + j]) * load(x[i + j]);
    return sum_of(partial);
}

static void add_rms_norm_heads(const void *args, int64_t first, int64_t end) {
    const norm_args a = *(const norm_args *)args;
    for (int64_t head = first; head < end; head++) {
        const int64_t at = head / a.num_heads * a.row_stride + head % a.num_heads * a.head_stride;
        const int64_t whole = a.size / LANES * LANES; /* numbers in whole vectors */
        num *x = a.residual + at, *y = a.out + head * a.size;
        if (a.delta) {
            for (int64_t i = 0; i < whole; i += LANES)
                put_nums(x + i, floats_at(x + i) + floats_at(a.delta + at + i));
            for (int64_t i = whole; i < a.size; i++)
                x[i] = store(load(x[i]) + load(a.delta[at + i]));
        }
        const float scale = 1.0f / sqrtf(sum_of_squares(x, a.size) / a.size + a.eps);
        for (int64_t i = 0; i < whole; i += LANES)
            put_nums(y + i, floats_at(x + i) * scale * (a.offset + floats_at(a.weight + i)));
        for (int64_t i = whole; i < a.size; i++)
            y[i] = store(load(x[i]) * scale * (a.offset + load(a.weight[i])));
    }
}

/* residual += delta (unless it is NULL), out = residual / rms(residual) * (offset + weight), for each head of `size`
 * numbers. */
void add_rms_norm(const norm_args *args) {
    parallel_for(add_rms_norm_heads, args, args->num_rows * args->num_heads, rows_a_chunk(args->size));
}

typedef struct {
    int64_t num_rows;
    num *restrict out;           /* [num_rows][size] */
    const num *restrict gate_up; /* [num_rows][2 * size] */
    int64_t size;
} silu_args;

static inline void silu_and_mul_lanes(num *out, const num *gate, const num *up) {
    const vec g = floats_at(gate), e = exp_negative(choose(g < 0, g, -g)); /* exp(-|g|) never overflows */
    put_nums(out, g * choose(g < 0, e, in_all(1)) / (1 + e) * floats_at(up));
}

static void silu_and_mul_rows(const void *args, int64_t first, int64_t end) {
    const silu_args a = *(const silu_args *)args;
    for (int64_t r = first; r < end; r++) {
        const num *gate = a.gate_up + r * 2 * a.size;
        const num *up = gate + a.size;
        num *out = a.out + r * a.size, padded[3][LANES] = {{0}};
        int64_t i = 0;
        for (; i + LANES <= a.size; i += LANES)
            silu_and_mul_lanes(out + i, gate + i, up + i);
        memcpy(padded[0], gate + i, (a.size - i) * sizeof(num));
        memcpy(padded[1], up + i, (a.size - i) * sizeof(num));
        silu_and_mul_lanes(padded[2], padded[0], padded[1]);
        memcpy(out + i, padded[2], (a.size - i) * sizeof(num));
    }
}

/* out = silu(gate) * up, from rows that hold gate and then up. */
void silu_and_mul(const silu_args *args) {
    parallel_for(silu_and_mul_rows, args, args->num_rows, rows_a_chunk(2 * args->size));
}

typedef struct {
    float *weights;
    int64_t *chosen;
    const num *scores;
    int64_t num_experts, num_chosen, normalize;
} route_args;

static const float TAKEN = -1, LEAST = -1e30f; /* less than a probability; less than scores */

static void route_rows(const void *args, int64_t first, int64_t end) {
    const route_args a = *(const route_args *)args;
    const int64_t padded = (a.num_experts + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
    float p[padded];
    for (int64_t r = first; r < end; r++) {
        float max = LEAST, partial[PARTIAL_SUMS], *weights = a.weights + r * a.num_chosen;
        vec sum[PARTIAL_VECS] = {{0}};
        for (int64_t i = 0; i < padded; i++) {
            p[i] = i < a.num_experts ? load(a.scores[r * a.num_experts + i]) : -INFINITY;
            max = p[i] > max ? p[i] : max;
        }
        for (int64_t i = 0; i < padded; i += LANES) {
            const vec e = exp_negative(vec_from(p + i) - max);
            sum[i / LANES % PARTIAL_VECS] += e;
            put(p + i, e);
        }
        memcpy(partial, sum, sizeof(partial));
        float total = sum_of(partial), of_chosen = 0;
        for (int64_t c = 0; c < a.num_chosen; c++) {
            int64_t best = -1; /* the largest that is left; the first of equal ones */
            for (int64_t i = 0; i < a.num_experts; i++)
                if (p[i] != TAKEN && (best < 0 || p[i] > p[best]))
                    best = i;
            weights[c] = p[best] / total;
            of_chosen += weights[c];
            a.chosen[r * a.num_chosen + c] = best;
            p[best] = TAKEN;
        }
        for (int64_t c = 0; c < a.num_chosen && a.normalize; c++)
            weights[c] /= of_chosen;
    }
}

/* The experts of each row: weights [rows][num_chosen] are the largest of softmax(scores [rows][num_experts]), chosen are
 * their places; normalize: the weights are scaled to add up to 1. */
void route(float *weights, int64_t *chosen, const num *scores, int64_t rows, int64_t num_experts, int64_t num_chosen,
           int64_t normalize) {
    const route_args args = {weights, chosen, scores, num_experts, num_chosen, normalize};
    parallel_for(route_rows, &args, rows, rows_a_chunk(num_experts * num_chosen));
}

typedef struct {
    num *out;
    const num *x;
    const int64_t *places;
    const float *weights;
    int64_t count, size;
} sum_args;

static void weighted_sum_rows(const void *args, int64_t first, int64_t end) {
    const sum_args a = *(const sum_args *)args;
    for (int64_t r = first; r < end; r++)
        for (int64_t i = 0; i < a.size; i += LANES) {
            const int lanes = a.size - i < LANES ? a.size - i : LANES;
            float sum[LANES] = {0};
            for (const int64_t *at = a.places + r * a.count; at < a.places + (r + 1) * a.count; at++)
                for (int l = 0; l < lanes; l++)
                    sum[l] += a.weights[at - a.places] * load(a.x[*at * a.size + i + l]);
            for (int l = 0; l < lanes; l++)
                a.out[r * a.size + i + l] = store(sum[l]);
        }
}

/* out [rows][size]: row r is the sum of `count` rows of x, those at places[r], each times its weight. */
void weighted_sum(num *out, const num *x, const int64_t *places, const float *weights, int64_t rows, int64_t count,
                  int64_t size) {
    parallel_for(weighted_sum_rows, &(sum_args){out, x, places, weights, count, size}, rows, rows_a_chunk(count * size));
}

#include "linear.c"
#include "adapters.c"
#include "quantized.c"
#include "quantize.c"
#include "delta_rule.h"
#include "delta_conv.c"
#include "delta_rule.c"
#include "gates.c"
#include "rows.c"
#include "sampling.c"
#include "replay.c"
