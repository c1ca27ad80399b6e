/* Which rows meet which expert, and the sum of what the experts make of them (chapter 17). Compiled as
 * worker/cpu/kernels.c is. */
#include "pool.h"
#include "vectors.h"

/* expert_c_kernels.py has the same fields in the same order, here and below. */
typedef struct {
    int64_t num_rows;
    float *weights;    /* [num_rows][num_chosen] */
    int64_t *chosen;   /* the same */
    const num *scores; /* [num_rows][num_experts] */
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

/* The experts of each row: chosen are the places of its largest scores, weights the same of softmax(scores); normalize: they
 * are scaled to add up to 1. */
void route(const route_args *args) {
    parallel_for(route_rows, args, args->num_rows, rows_a_chunk(args->num_experts * args->num_chosen));
}

typedef struct {
    int64_t num_rows;
    int64_t *rows, *places; /* [num_rows][num_chosen] */
    int64_t *order, *ends;  /* [num_experts] */
    const int64_t *chosen;  /* [num_rows][num_chosen] */
    int64_t num_chosen, num_experts;
} sort_args;

/* Sort the pairs (row, expert) by expert. What the results mean: ExpertRows in features/experts/rows.py. */
void sort_by_expert(const sort_args *args) {
    const sort_args a = *args;
    const int64_t num_pairs = a.num_rows * a.num_chosen;
    int64_t count[a.num_experts], next[a.num_experts], at = 0, end = 0;
    memset(count, 0, sizeof(count));
    for (int64_t pair = 0; pair < num_pairs; pair++)
        count[a.chosen[pair]]++;
    for (int met = 1; met >= 0; met--)
        for (int64_t e = 0; e < a.num_experts; e++)
            if ((count[e] > 0) == met) {
                next[e] = end;
                end += count[e];
                a.order[at] = e;
                a.ends[at++] = end;
            }
    for (int64_t pair = 0; pair < num_pairs; pair++) {
        const int64_t place = next[a.chosen[pair]]++;
        a.places[pair] = place;
        a.rows[place] = pair / a.num_chosen;
    }
}

typedef struct {
    int64_t num_rows;
    num *out;              /* [num_rows][size] */
    const num *x;          /* rows of size numbers */
    const int64_t *places; /* [num_rows][count] */
    const float *weights;  /* the same */
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

/* Row r of out is the sum of `count` rows of x, those at places[r], each times its weight. */
void weighted_sum(const sum_args *args) {
    parallel_for(weighted_sum_rows, args, args->num_rows, rows_a_chunk(args->count * args->size));
}
