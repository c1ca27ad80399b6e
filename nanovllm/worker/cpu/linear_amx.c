/* Matrix products of bf16 by Intel's AMX: instructions for matrices (chapter 10). A part of cpu/linear.c.
 *
 * A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows of x, 32 numbers of each, with 32 numbers
 * of 16 columns:
 *
 *     sum[row][column] += the products at even places along k + those at odd places
 *
 * Both are added up one after another, whatever the number of rows, so a row's bits are its own. They are others than
 * those of vectors of pairs. A weight's block, as linear.c lays it out, is two registers side by side.
 *
 *                  | columns 0 to 15 | columns 16 to 31 |
 *                  | weight 0        | weight 1         |
 *     rows 0-15  x | sum 00          | sum 01           |
 *     rows 16-31 x | sum 10          | sum 11           |
 */
#include "amx.h"

enum {
    ROWS = 2 * TILE_ROWS,
    K_STEP = 32,
    SLAB_BYTES = 1 << 20,
    /* A block with k up to MOST_K stays in the first cache while rows pass by. One up to twice as large is multiplied in two
     * parts, and the sums of MOST_ROWS rows wait in memory for the second one. */
    MOST_K = 640,
    MOST_ROWS = 512,
};

static int can_multiply(void) { return may_use_tiles(); }

/* Registers 0 to 3: sums; 4 and 5: x; 6 and 7: weights. Those of 4 have `upper` rows, those of 5 `lower` ones. */
static inline void configure(int upper, int lower) {
    enum { ALL = TILE_BYTES };
    configure_tiles((const int[]){upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS},
                    (const int[]){ALL, ALL, ALL, ALL, ALL, ALL, ALL, ALL});
}

static const char *multiplied_by(void) { return can_multiply() ? "matrices of bf16" : "pairs of bf16"; }

static __thread int configured; /* rows of the tile that this thread's registers are made for; 0: of none */
static inline void begin_tiles(void) { configured = 0; } /* somebody else may have used them */
static inline void end_tiles(void) { _tile_release(); }

static inline void zero_sums(int lower) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
static inline void load_sums(float (*y)[COLS], int lower) {
    _tile_loadd(0, y[0], sizeof(y[0]));
    _tile_loadd(1, y[0] + LANES, sizeof(y[0]));
    if (lower) {
        _tile_loadd(2, y[TILE_ROWS], sizeof(y[0]));
        _tile_loadd(3, y[TILE_ROWS] + LANES, sizeof(y[0]));
    }
}
static inline void store_sums(float (*y)[COLS], int lower) {
    _tile_stored(0, y[0], sizeof(y[0]));
    _tile_stored(1, y[0] + LANES, sizeof(y[0]));
    if (lower) {
        _tile_stored(2, y[TILE_ROWS], sizeof(y[0]));
        _tile_stored(3, y[TILE_ROWS] + LANES, sizeof(y[0]));
    }
}

/* The sums of a tile along k, from `from` to end - 1: y, or, behind the first part, added to y. */
static void add_part(float (*y)[COLS], int64_t rows, const tile_args *args, int64_t from, int64_t end) {
    const int upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
    const num *w = args->weight + from * COLS, *out = args->out;
    const char *ahead = args->ahead + from / BESIDE * args->ahead_bytes;
    num last[ROWS][K_STEP]; /* where k is no multiple of K_STEP: its end, filled up with zeros */
    if (configured != rows)
        configure(upper, lower);
    configured = rows;
    if (from)
        load_sums(y, lower);
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
        _tile_stream_loadd(4, x, stride * sizeof(num)); /* it passes by: the weights stay in the first cache */
        _tile_loadd(6, w, COLS * BESIDE * sizeof(num));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + LANES * BESIDE, COLS * BESIDE * sizeof(num));
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_stream_loadd(5, x + TILE_ROWS * stride, stride * sizeof(num));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (const char *to = ahead + K_STEP / BESIDE * args->ahead_bytes; ahead < to; ahead += TILE_BYTES)
            __builtin_prefetch(ahead, 0, 2);
        for (int r = 0; r < 2 && out && out < args->out + rows * args->n; r++, out += args->n)
            __builtin_prefetch(out, 1); /* it will be written */
        w += COLS * K_STEP;
    }
    store_sums(y, lower);
}

/* out = y + bias. */
static void put_rows(int64_t rows, float (*y)[COLS], const tile_args *args) {
    vec bias[2] = {{0}};
    if (!args->out || args->columns < COLS) {
        put_tile(rows, y, args);
        return;
    }
    for (int half = 0; half < 2 && args->bias; half++)
        bias[half] = floats_at(args->bias + half * LANES);
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
                add_part(y + r, left - r < ROWS ? left - r : ROWS, &b, 0, middle);
        for (int64_t r = 0; r < left && r < MOST_ROWS; r += ROWS, next_tile(&a, ROWS)) {
            const int64_t rows = left - r < ROWS ? left - r : ROWS;
            add_part(y + r, rows, &a, two ? middle : 0, a.k);
            put_rows(rows, y + r, &a);
        }
    }
}
