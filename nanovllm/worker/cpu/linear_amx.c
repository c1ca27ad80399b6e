/* A tile of a matrix product of bf16 by Intel's AMX: instructions for matrices (chapter 10). A part of cpu/linear.c.
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
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, ROWS = 2 * TILE_ROWS, K_STEP = 32, TILE_BYTES = 64 };

/* Linux gives a process these registers when it asks for them: arch/x86/include/uapi/asm/prctl.h. */
static int can_multiply(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* Registers 0 to 3: sums; 4 and 5: x; 6 and 7: weights. Those of 4 have `upper` rows, those of 5 `lower` ones. */
static inline void configure(int upper, int lower) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int i = 0; i < 8; i++)
        config.row_bytes[i] = config.rows[i] ? TILE_BYTES : 0;
    _tile_loadconfig(&config);
}

static const char *const multiplied_by = "matrices of bf16";

static __thread int configured; /* rows of the tile that this thread's registers are made for; 0: of none */
static inline void begin_tiles(void) { configured = 0; } /* somebody else may have used them */
static inline void end_tiles(void) { _tile_release(); }

static void compute_tile(int64_t rows, const tile_args *args) {
    const int upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
    const num *w = args->weight;
    const char *ahead = args->ahead;
    num last[ROWS][K_STEP] = {{0}}; /* where k is no multiple of K_STEP: its end, filled up with zeros */
    float y[ROWS][COLS];
    if (configured != rows)
        configure(upper, lower);
    configured = rows;
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t i = 0; i < args->k; i += K_STEP) {
        const num *x = args->x + i;
        int64_t stride = args->k;
        if (args->k - i < K_STEP) {
            for (int r = 0; r < rows; r++)
                memcpy(last[r], x + r * stride, (args->k - i) * sizeof(num));
            x = last[0], stride = K_STEP;
        }
        _tile_loadd(4, x, stride * sizeof(num));
        _tile_loadd(6, w, COLS * BESIDE * sizeof(num));
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + LANES * BESIDE, COLS * BESIDE * sizeof(num));
        _tile_dpbf16ps(1, 4, 7);
        if (lower) {
            _tile_loadd(5, x + TILE_ROWS * stride, stride * sizeof(num));
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        for (const char *end = ahead + K_STEP / BESIDE * args->ahead_bytes; ahead < end; ahead += TILE_BYTES)
            __builtin_prefetch(ahead);
        w += COLS * K_STEP;
    }
    _tile_stored(0, y[0], sizeof(y[0]));
    _tile_stored(1, y[0] + LANES, sizeof(y[0]));
    if (lower) {
        _tile_stored(2, y[TILE_ROWS], sizeof(y[0]));
        _tile_stored(3, y[TILE_ROWS] + LANES, sizeof(y[0]));
    }
    put_tile(rows, y, args);
}
