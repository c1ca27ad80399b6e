/* The activations of vision towers (chapter 10). Compiled as worker/cpu/kernels.c is. */
#include "pool.h"
#include "vectors.h"

/* tower_kernels.py has the same fields in the same order. */
typedef struct {
    int64_t num_rows;
    num *x; /* [num_rows][size], changed in place */
    int64_t size;
    float linear, cubic;
} activation_args;

static inline void activate_lanes(num *to, const num *from, float linear, float cubic) {
    const vec x = floats_at(from), z = x * (linear + cubic * x * x);
    const vec e = exp_negative(choose(z < 0, z, -z)); /* exp(-|z|) never overflows */
    put_nums(to, x * choose(z < 0, e, in_all(1)) / (1 + e));
}

static void activate_rows(const void *args, int64_t first, int64_t end) {
    const activation_args a = *(const activation_args *)args;
    for (int64_t r = first; r < end; r++) {
        num *x = a.x + r * a.size, padded[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= a.size; i += LANES)
            activate_lanes(x + i, x + i, a.linear, a.cubic);
        memcpy(padded, x + i, (a.size - i) * sizeof(num));
        activate_lanes(padded, padded, a.linear, a.cubic);
        memcpy(x + i, padded, (a.size - i) * sizeof(num));
    }
}

/* x = x * sigmoid(linear * x + cubic * x^3). */
void activate(const activation_args *args) {
    parallel_for(activate_rows, args, args->num_rows, rows_a_chunk(args->size));
}
