/* The small operations of a decoder layer and attention over the block table, for CPUs (chapter 10).
 *
 * Compiled at first use by cpu_kernels.py with -DTYPE_bf16, -DTYPE_f16 or -DTYPE_f32, -DHEAD_DIM, -DGROUP (query heads
 * that share a KV head) and -DTILE (query rows of one task, at most), so that the inner loops have constant lengths. Each
 * function has a slow twin in PyTorch with the same meaning, in kernels.py and attention/torch_backend.py. Numbers are
 * computed in float32 and rounded once.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(TYPE_bf16)
typedef uint16_t num; /* the upper half of a float32 */
static inline float load(num x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
static inline num store(float x) { /* round to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (num)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
#elif defined(TYPE_f16)
typedef _Float16 num;
static inline float load(num x) { return (float)x; }
static inline num store(float x) { return (num)x; }
#else
typedef float num;
static inline float load(num x) { return x; }
static inline num store(float x) { return x; }
#endif

/* exp(x) for x <= 0, to about 2e-7: 2^n * e^f with a polynomial for e^f, |f| <= 0.35. Below -87 it stays at 1e-38, which
 * is nothing beside the 1 of the largest score. Free of branches, so that every compiler makes vectors of it. */
static inline float exp_negative(float x) {
    x = x > -87.0f ? x : -87.0f;
    int32_t n = (int32_t)(x * 1.44269504f - 0.5f);
    float f = x - (float)n * 0.69314718f;
    float p = 1 + f * (1 + f * (0.5f + f * (0.16666667f + f * (0.041666668f + f * (0.008333334f + f * 0.0013888889f)))));
    int32_t bits = (n + 127) << 23;
    memcpy(&x, &bits, 4);
    return p * x;
}

/* residual += delta (if there is one), out = residual / rms(residual) * weight; rows of `size` numbers. */
void add_rms_norm(num *out, num *residual, const num *delta, const num *weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows > 16)
    for (int64_t r = 0; r < rows; r++) {
        num *x = residual + r * size, *y = out + r * size;
        float sum = 0;
        for (int64_t i = 0; delta && i < size; i++)
            x[i] = store(load(x[i]) + load(delta[r * size + i]));
        for (int64_t i = 0; i < size; i++)
            sum += load(x[i]) * load(x[i]);
        float scale = 1.0f / sqrtf(sum / size + eps);
        for (int64_t i = 0; i < size; i++)
            y[i] = store(load(x[i]) * scale * load(weight[i]));
    }
}

/* out = silu(gate) * up, from rows that hold gate and then up. */
void silu_and_mul(num *restrict out, const num *restrict gate_up, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 4)
    for (int64_t r = 0; r < rows; r++) {
        const num *gate = gate_up + r * 2 * size, *up = gate + size;
        for (int64_t i = 0; i < size; i++) {
            float g = load(gate[i]), e = exp_negative(-fabsf(g)); /* exp(-|g|) never overflows */
            out[r * size + i] = store(g * (g < 0 ? e : 1.0f) / (1.0f + e) * load(up[i]));
        }
    }
}

static inline void rotate(num *x, const num *restrict cos, const num *restrict sin) {
    enum { HALF = HEAD_DIM / 2 };
    float a[HALF], b[HALF];
    for (int i = 0; i < HALF; i++)
        a[i] = load(x[i]), b[i] = load(x[i + HALF]);
    for (int i = 0; i < HALF; i++) {
        x[i] = store(a[i] * load(cos[i]) - b[i] * load(sin[i]));
        x[i + HALF] = store(b[i] * load(cos[i]) + a[i] * load(sin[i]));
    }
}

/* Rotate q and k in place, then write k and v to their slots (slot -1: not written). q, k and v are rows of heads of
 * HEAD_DIM numbers, `*_stride` numbers apart; cos and sin are one row a token. The caches are
 * [num_blocks][block_size][num_kv_heads][HEAD_DIM], blocks block_stride numbers apart. */
void rotary_and_write(num *q, int64_t q_stride, num *k, int64_t k_stride, const num *v, int64_t v_stride, const num *cos,
                      const num *sin, const int64_t *slots, num *k_cache, num *v_cache, int64_t rows, int64_t num_kv_heads,
                      int64_t block_size, int64_t block_stride) {
    const int64_t width = num_kv_heads * HEAD_DIM;
#pragma omp parallel for if (rows > 16)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t h = 0; h < num_kv_heads * GROUP; h++)
            rotate(q + r * q_stride + h * HEAD_DIM, cos + r * HEAD_DIM / 2, sin + r * HEAD_DIM / 2);
        for (int64_t h = 0; h < num_kv_heads; h++)
            rotate(k + r * k_stride + h * HEAD_DIM, cos + r * HEAD_DIM / 2, sin + r * HEAD_DIM / 2);
        if (slots[r] >= 0) {
            const int64_t at = slots[r] / block_size * block_stride + slots[r] % block_size * width;
            memcpy(k_cache + at, k + r * k_stride, width * sizeof(num));
            memcpy(v_cache + at, v + r * v_stride, width * sizeof(num));
        }
    }
}

#define LANES 16 /* numbers in a vector; compilers split it where registers are shorter */
#define CHUNK 64 /* keys between two rounds of the online softmax */
#define WIDTH ((HEAD_DIM + 2 * LANES - 1) / (2 * LANES) * 2)
#define QUERIES ((TILE * GROUP + 7) / 8 * 8) /* of one task: its rows' heads of one KV head, padded to eight */
typedef float vec __attribute__((vector_size(4 * LANES)));

typedef struct { /* what a task leaves behind: unnormalized sums, and the softmax's maximum and denominator */
    vec sum[QUERIES][WIDTH];
    float top[QUERIES], total[QUERIES];
} partial;

/* Keys first..last for `rows` query rows of one sequence and KV head; row i sees the keys before num_keys + i. Online
 * softmax over chunks of keys, which are found through the block table (FlashAttention, arXiv:2205.14135). */
static void attend(partial *out, const num *q, int64_t q_stride, int64_t rows, int64_t num_keys, const num *k_cache,
                   const num *v_cache, const int32_t *table, int64_t block_size, int64_t block_stride, int64_t stride,
                   int64_t first, int64_t last, float scale) {
    const int64_t queries = rows * GROUP;
    float query[QUERIES][HEAD_DIM], score[QUERIES][CHUNK]; /* what pads them is computed with and never looked at */
    float key[CHUNK][HEAD_DIM], value[CHUNK][WIDTH * LANES], transposed[HEAD_DIM][CHUNK];
    for (int64_t m = 0; m < queries; m++) {
        memset(out->sum[m], 0, sizeof(out->sum[m]));
        out->top[m] = -1e30f, out->total[m] = 0;
        for (int d = 0; d < HEAD_DIM; d++)
            query[m][d] = load(q[m / GROUP * q_stride + m % GROUP * HEAD_DIM + d]) * scale;
    }
    for (; first < last; first += CHUNK) {
        const int count = last - first < CHUNK ? last - first : CHUNK, padded = (count + LANES - 1) / LANES * LANES;
        for (int t = 0; t < count; t++) {
            const int64_t at = table[(first + t) / block_size] * block_stride + (first + t) % block_size * stride;
            for (int d = 0; d < HEAD_DIM; d++)
                key[t][d] = load(k_cache[at + d]), value[t][d] = load(v_cache[at + d]);
        }
        if (queries > 8) { /* many queries: sixteen scores at a time, no sum across a vector */
            for (int d = 0; d < HEAD_DIM; d++)
                for (int t = 0; t < padded; t++)
                    transposed[d][t] = key[t][d];
            for (int64_t m = 0; m < queries; m += 8)
                for (int t = 0; t < padded; t += LANES) {
                    vec s[8] = {{0}}, k;
                    for (int d = 0; d < HEAD_DIM; d++) {
                        memcpy(&k, &transposed[d][t], sizeof(k));
                        for (int j = 0; j < 8; j++)
                            s[j] += query[m + j][d] * k;
                    }
                    for (int j = 0; j < 8; j++)
                        memcpy(&score[m + j][t], &s[j], sizeof(s[j]));
                }
        } else
            for (int t = 0; t < count; t++)
                for (int64_t m = 0; m < queries; m++) {
                    float sum = 0;
                    for (int d = 0; d < HEAD_DIM; d++)
                        sum += query[m][d] * key[t][d];
                    score[m][t] = sum;
                }
        for (int64_t m = 0; m < queries; m++) {
            const int64_t seen = num_keys + m / GROUP - first;
            float top = out->top[m], sum = 0;
            for (int t = seen < 0 ? 0 : seen < count ? seen : count; t < padded; t++)
                score[m][t] = -1e30f;
            for (int t = 0; t < padded; t++)
                top = score[m][t] > top ? score[m][t] : top;
            for (int t = 0; t < padded; t++)
                sum += score[m][t] = exp_negative(score[m][t] - top);
            const float shrink = exp_negative(out->top[m] - top);
            out->top[m] = top, out->total[m] = out->total[m] * shrink + sum;
            for (int w = 0; w < WIDTH; w++)
                out->sum[m][w] *= shrink;
        }
        for (int64_t m = 0; m < queries; m += 4)
            for (int w = 0; w < WIDTH; w += 2) { /* eight sums at a time, as many as are needed to hide their latency */
                vec a[4][2], v[2];
                for (int j = 0; j < 4; j++)
                    memcpy(a[j], &out->sum[m + j][w], sizeof(a[j]));
                for (int t = 0; t < count; t++) {
                    memcpy(v, &value[t][w * LANES], sizeof(v));
                    for (int j = 0; j < 4; j++)
                        a[j][0] += score[m + j][t] * v[0], a[j][1] += score[m + j][t] * v[1];
                }
                for (int j = 0; j < 4; j++)
                    memcpy(&out->sum[m + j][w], a[j], sizeof(a[j]));
            }
    }
}

int64_t bytes_of_a_task(void) { return sizeof(partial); }

/* Task i: rows tasks[i][0] .. + tasks[i][1] of q, of sequence tasks[i][2]; the first of them sees tasks[i][3] keys. The
 * keys are cut into `splits` parts, so that one long sequence keeps all cores busy; scratch holds a partial for each.
 * out is [rows, num_heads, HEAD_DIM]. */
void paged_attention(num *out, const num *q, int64_t q_stride, const num *k_cache, const num *v_cache,
                     const int32_t *tables, int64_t table_width, const int64_t (*tasks)[4], int64_t num_tasks,
                     int64_t num_kv_heads, int64_t block_size,
                     int64_t block_stride, int64_t splits, float scale, partial *scratch) {
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t i = num_tasks * num_kv_heads * splits - 1; i >= 0; i--) { /* the last rows of a prompt take longest */
        const int64_t part = i % splits, h = i / splits % num_kv_heads, *task = tasks[i / splits / num_kv_heads];
        const int64_t last = task[3] + task[1] - 1;
        attend(scratch + i, q + task[0] * q_stride + h * GROUP * HEAD_DIM, q_stride, task[1], task[3],
               k_cache + h * HEAD_DIM, v_cache + h * HEAD_DIM, tables + task[2] * table_width, block_size,
               block_stride, num_kv_heads * HEAD_DIM, last * part / splits, last * (part + 1) / splits, scale);
    }
#pragma omp parallel for
    for (int64_t i = 0; i < num_tasks * num_kv_heads; i++) {
        const int64_t *task = tasks[i / num_kv_heads], h = i % num_kv_heads;
        for (int64_t m = 0; m < task[1] * GROUP; m++) {
            const int64_t row = task[0] + m / GROUP, head = h * GROUP + m % GROUP;
            num *to = out + (row * num_kv_heads * GROUP + head) * HEAD_DIM;
            float sum[HEAD_DIM] = {0}, total = 0, top = -1e30f;
            for (partial *p = scratch + i * splits; p < scratch + (i + 1) * splits; p++)
                top = p->top[m] > top ? p->top[m] : top;
            for (partial *p = scratch + i * splits; p < scratch + (i + 1) * splits; p++) {
                const float weight = exp_negative(p->top[m] - top);
                total += weight * p->total[m];
                for (int d = 0; d < HEAD_DIM; d++)
                    sum[d] += weight * p->sum[m][d / LANES][d % LANES];
            }
            for (int d = 0; d < HEAD_DIM; d++)
                to[d] = store(sum[d] / total);
        }
    }
}
