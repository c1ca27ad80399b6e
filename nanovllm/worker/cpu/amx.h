/* Matrix products of bf16 by Intel's AMX: registers for matrices, and an instruction that multiplies them (chapter 10).
 *
 * A tile register holds 16 rows of 64 bytes. One instruction multiplies 16 rows, 32 numbers of each, with 32 numbers of 16
 * columns; a pair of neighbours along these 32 lies side by side in a column:
 *
 *     sum[row][column] += the products at even places + those at odd places
 *
 * Both are added up one after another, whatever the number of rows, so a row's bits are its own. They are others than
 * those of vectors of pairs. Products here take up to 32 rows and 32 columns:
 *
 *                 | columns 0-15: 6 | columns 16-31: 7 |
 *     rows 0-15:  4 | sums: 0       | sums: 1          |
 *     rows 16-31: 5 | sums: 2       | sums: 3          |
 */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64, TILE_K = 32 };

/* Linux gives a process these registers when it asks for them: arch/x86/include/uapi/asm/prctl.h. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18, NO = 1, YES };
    static int answer; /* asked once */
    if (!answer)
        answer = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 ? YES : NO;
    return answer == YES;
}

/* After what tiles or their configuration are loaded from was written: gcc 12 does not know that these instructions read. */
static inline void finish_writing(void) { __asm__ volatile("" ::: "memory"); }

/* Of the rows, registers hold the first `upper`, 16 at most, and the `lower` ones after them, if there are any. */
static inline void configure_tiles(int upper, int lower) {
    const int rows[] = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS};
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.row_bytes[i] = rows[i] ? TILE_BYTES : 0;
    }
    finish_writing();
    _tile_loadconfig(&config);
}

/* Sums [rows][stride], of which 32 columns are meant. */
static inline void zero_sums(int lower) {
    _tile_zero(0);
    _tile_zero(1);
    if (lower) {
        _tile_zero(2);
        _tile_zero(3);
    }
}
static inline void load_sums(const float *sums, int64_t stride, int lower) {
    const float *behind = sums + TILE_ROWS * stride;
    const int64_t bytes = stride * sizeof(float);
    _tile_loadd(0, sums, bytes);
    _tile_loadd(1, sums + TILE_ROWS, bytes);
    if (lower) {
        _tile_loadd(2, behind, bytes);
        _tile_loadd(3, behind + TILE_ROWS, bytes);
    }
}
static inline void store_sums(float *sums, int64_t stride, int lower) {
    float *behind = sums + TILE_ROWS * stride;
    const int64_t bytes = stride * sizeof(float);
    _tile_stored(0, sums, bytes);
    _tile_stored(1, sums + TILE_ROWS, bytes);
    if (lower) {
        _tile_stored(2, behind, bytes);
        _tile_stored(3, behind + TILE_ROWS, bytes);
    }
}

/* Add the products of TILE_K numbers of each row with the columns at `left` and `right` to the sums. x_bytes from one row to
 * the next, y_bytes from one pair of the columns to the next. pass_by: what is read of x should not stay in the first cache. */
static inline __attribute__((always_inline)) void add_products(const void *x, int64_t x_bytes, const void *left,
                                                               const void *right, int64_t y_bytes, int lower,
                                                               const int pass_by) {
    const char *behind = (const char *)x + TILE_ROWS * x_bytes;
    if (pass_by)
        _tile_stream_loadd(4, x, x_bytes);
    else
        _tile_loadd(4, x, x_bytes);
    _tile_loadd(6, left, y_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, y_bytes);
    _tile_dpbf16ps(1, 4, 7);
    if (!lower)
        return;
    if (pass_by)
        _tile_stream_loadd(5, behind, x_bytes);
    else
        _tile_loadd(5, behind, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}
