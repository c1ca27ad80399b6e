/* Matrix products with reordered weights of bf16, by Intel's AMX (amx.h). A part of cpu/linear.c. */
#include "amx.h"

enum {
    ROWS = 2 * TILE_ROWS,
    K_STEP = TILE_K,
    PASS_BY = 1, /* rows of x, so that the weights stay in the first cache */
    SLAB_BYTES = 1 << 20,
    /* A block of weights with k up to MOST_K stays there. One up to twice as large is multiplied in two
     * parts, and the sums of MOST_ROWS rows wait in memory for the second one. */
    MOST_K = 640,
    MOST_ROWS = 512,
};

static int can_multiply(void) { return may_use_tiles(); }

static const char *multiplied_by(void) { return can_multiply() ? "matrices of bf16" : "pairs of bf16"; }

static __thread int configured; /* rows of the tile that this thread's registers are made for; 0: of none */
static inline void begin_tiles(void) { configured = 0; } /* somebody else may have used them */
static inline void end_tiles(void) { _tile_release(); }

static inline int64_t blocks_at_once(int64_t num_rows, int64_t block_bytes) { return (void)num_rows, (void)block_bytes, 1; }

/* The sums of a tile along k, from `from` to end - 1: y, or, after the first part, added to y. */
static void sum_along_k(float (*y)[COLS], int64_t rows, const tile_args *args, int64_t from, int64_t end) {
    const int upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
    const num *w = args->blocks[0].weight + from * COLS, *out = args->out;
    const char *ahead = args->blocks[0].ahead + from / BESIDE * args->ahead_bytes;
    num last[ROWS][K_STEP]; /* where k is no multiple of K_STEP: its end, filled up with zeros */
    if (configured != rows)
        configure_tiles(upper, lower);
    configured = rows;
    if (from)
        load_sums(y[0], COLS, lower);
    else
        zero_sums(lower);
    for (int64_t i = from; i < end; i += K_STEP) {
        const num *x = args->x + i;
        int64_t stride = args->k;
        if (args->k - i < K_STEP) {
            memset(last, 0, sizeof(last));
            for (int r = 0; r < rows; r++)
                memcpy(last[r], x + r * stride, (args->k - i) * sizeof(num));
            x = last[0], stride = K_STEP;
            finish_writing();
        }
        add_products(x, stride * sizeof(num), w, w + LANES * BESIDE, COLS * BESIDE * sizeof(num), lower, PASS_BY);
        for (const char *to = ahead + K_STEP / BESIDE * args->ahead_bytes; ahead < to; ahead += TILE_BYTES)
            __builtin_prefetch(ahead, 0, 2);
        for (int r = 0; r < 2 && out && out < args->out + rows * args->n; r++, out += args->n)
            __builtin_prefetch(out, 1); /* it will be written */
        w += COLS * K_STEP;
    }
    store_sums(y[0], COLS, lower);
}

/* out = y + bias, as put_tile() does it; here one instruction rounds two vectors, and makes 0 of denormals. */
static void put_rows(int64_t rows, float (*y)[COLS], const tile_args *args) {
    vec bias[2] = {{0}};
    if (!args->out || args->columns < COLS) {
        put_tile(rows, y, args, 0);
        return;
    }
    for (int half = 0; half < 2 && args->blocks[0].bias; half++)
        bias[half] = floats_at(args->blocks[0].bias + half * LANES);
    for (int64_t r = 0; r < rows; r++) {
        const vec low = vec_from(y[r]) + bias[0], high = vec_from(y[r] + LANES) + bias[1];
        const __m512bh rounded = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        memcpy(args->out + r * args->n, &rounded, sizeof(rounded));
    }
}

/* The products of rows with a block. */
static void compute_block(int64_t num_rows, tile_args a) {
    _Alignas(TILE_BYTES) float y[MOST_ROWS][COLS];
    const int two = num_rows > 2 * ROWS && a.k > MOST_K && a.k <= 2 * MOST_K;
    const int64_t middle = two ? (a.k / 2 + K_STEP - 1) / K_STEP * K_STEP : a.k;
    for (int64_t left = num_rows; left > 0; left -= MOST_ROWS) {
        tile_args b = a;
        if (two)
            for (int64_t r = 0; r < left && r < MOST_ROWS; r += ROWS, next_tile(&b, ROWS))
                sum_along_k(y + r, left - r < ROWS ? left - r : ROWS, &b, 0, middle);
        for (int64_t r = 0; r < left && r < MOST_ROWS; r += ROWS, next_tile(&a, ROWS)) {
            const int64_t rows = left - r < ROWS ? left - r : ROWS;
            sum_along_k(y + r, rows, &a, two ? middle : 0, a.k);
            put_rows(rows, y + r, &a);
        }
    }
}
