/* The small operations of a decoder layer, for CPUs (chapter 10). The rest is in the files that are included below:
 *
 *     pool.h              work for all cores
 *     vectors.h           number and vector types; wasm.h: those of WebAssembly
 *     kv_cache.h          how keys and values lie in the cache
 *     attention.h         the way through the block table
 *     attention_prompt.c  attention of many queries
 *     attention_decode.c  attention of few queries
 *     attention.c         attention of a step, divided among the cores
 *     linear.c            matrix products; linear_vectors.c, linear_amx.c: a tile of one
 *     adapters.c          small changes of matrix products
 *     quantized.c         matrix products with weights of 8 and 4 bits
 *     quantize.c          weights of 4 bits, made of others
 *     delta_rule.h, delta_conv.c, delta_rule.c    layers whose memory does not grow
 *     gates.c             gates of hybrid models
 *     rows.c, replay.c    what surrounds the layers of a step, and all of its calls made again
 *
 * Compiled at first use by cpu/c_kernels.py with -DTYPE_bf16, -DTYPE_f16 or -DTYPE_f32, -DHEAD_DIM, -DROTARY_DIM if only
 * so many numbers of a head are rotated, -DGROUP (query heads that share a KV head) and -DTILE (query rows of one task, at
 * most), so that inner loops have constant lengths. Each
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
#include "kv_cache.h"
#include "attention.h"

#ifndef ROTARY_DIM
#define ROTARY_DIM HEAD_DIM
#endif

/* So many rows, at least, that a thread claims at a time. A decode of some rows stays in one thread. */
static inline int64_t rows_a_chunk(int64_t row_size) { return 1 + (1 << 14) / row_size; }

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

/* Rotate the first ROTARY_DIM numbers of one head in place. */
static inline void rotate(num *x, const num *restrict cos, const num *restrict sin) {
    enum { HALF = ROTARY_DIM / 2 };
    float x1[HALF], x2[HALF];
    for (int i = 0; i < HALF; i++) {
        x1[i] = load(x[i]);
        x2[i] = load(x[i + HALF]);
    }
    for (int i = 0; i < HALF; i++) {
        x[i] = store(x1[i] * load(cos[i]) - x2[i] * load(sin[i]));
        x[i + HALF] = store(x2[i] * load(cos[i]) + x1[i] * load(sin[i]));
    }
}

/* Strides count numbers. */
typedef struct {
    int64_t num_rows;
    num *q, *k, *v;          /* [num_rows] rows of heads of HEAD_DIM numbers */
    const num *cos, *sin;    /* [num_rows][ROTARY_DIM / 2]; NULL: q and k are not rotated */
    const int64_t *slots;    /* [num_rows]; -1: k and v are not written */
    kv_num *k_cache, *v_cache; /* see kv_cache.h */
    int64_t q_stride, k_stride, v_stride, block_stride;
    int64_t num_kv_heads, block_size;
} rotary_args;

static void rotary_and_write_rows(const void *args, int64_t first, int64_t end) {
    const rotary_args a = *(const rotary_args *)args; /* the compiler knows that no store changes a copy */
    for (int64_t r = first; r < end; r++) {
        num *q = a.q + r * a.q_stride, *k = a.k + r * a.k_stride, *v = a.v + r * a.v_stride;
        if (a.cos) {
            const num *cos = a.cos + r * (ROTARY_DIM / 2), *sin = a.sin + r * (ROTARY_DIM / 2);
            for (int64_t head = 0; head < a.num_kv_heads * GROUP; head++)
                rotate(q + head * HEAD_DIM, cos, sin);
            for (int64_t head = 0; head < a.num_kv_heads; head++)
                rotate(k + head * HEAD_DIM, cos, sin);
        }
        const int64_t slot = a.slots[r];
        if (slot >= 0) {
            const int64_t block = slot / a.block_size * a.block_stride, place = slot % a.block_size;
            for (int64_t head = 0; head < a.num_kv_heads; head++) {
                const int64_t at = block + head * a.block_size * KV_SIZE;
                write_head(a.k_cache + at, a.block_size, place, k + head * HEAD_DIM, place * PAIR, PAIR, a.block_size * PAIR);
                write_head(a.v_cache + at, a.block_size, place, v + head * HEAD_DIM, place * HEAD_DIM, HEAD_DIM, 0);
            }
        }
    }
}

/* Rotate q and k in place, then write k and v to their slots. */
void rotary_and_write(const rotary_args *args) {
    parallel_for(rotary_and_write_rows, args, args->num_rows, rows_a_chunk(args->num_kv_heads * (GROUP + 2) * HEAD_DIM));
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

#include "attention_prompt.c"
#include "attention_decode.c"
#include "attention.c"
#include "linear.c"
#include "adapters.c"
#include "quantized.c"
#include "quantize.c"
#include "delta_rule.h"
#include "delta_conv.c"
#include "delta_rule.c"
#include "gates.c"
#include "rows.c"
#include "replay.c"
