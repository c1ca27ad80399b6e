/* The small operations of a decoder layer, for CPUs (chapter 10). The rest is in the files that are included below, and in
 * heads.c, which is compiled by itself: what has to do with attention's heads, whose sizes are those of a model.
 *
 *     pool.h              work for all cores
 *     vectors.h           number and vector types; wasm.h: those of WebAssembly
 *     linear.c            matrix products; linear_vectors.c, linear_amx.c: a tile of one
 *     rows.c, replay.c    what surrounds the layers of a step, and all of its calls made again
 *     sampling.c          tokens drawn from logits
 *
 * The C of a wing stands beside it, in features/, and is a library of its own.
 *
 * Compiled at first use by cpu/c_kernels.py with -DTYPE_bf16, -DTYPE_f16 or -DTYPE_f32, and for bf16 with -DEVERYWHERE if
 * bits are to be those of every processor, and -DNO_PAIRS if instructions for pairs do not pay. Each function has a slow
 * twin in PyTorch with the same meaning, in worker/kernels.py, worker/attention.py or worker/sampler.py. All of them compute
 * in float32 and round when they store a result. (A product that goes on to silu rounds gate and up, as two steps would.)
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

#include "linear.c"
#include "rows.c"
#include "sampling.c"
#include "replay.c"
