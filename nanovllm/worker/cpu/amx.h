/* Intel's AMX: eight registers of up to 16 rows of 64 bytes, and instructions that multiply matrices in them (chapter 10). */
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16, TILE_BYTES = 64 };

/* Linux gives a process these registers when it asks for them: arch/x86/include/uapi/asm/prctl.h. */
static int may_use_tiles(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

/* After what tiles or their configuration are loaded from was written: gcc 12 does not know that these instructions read. */
static inline void finish_writing(void) { __asm__ volatile("" ::: "memory"); }

/* How many rows each register has, and how many bytes a row. */
static inline void configure_tiles(const int *rows, const int *row_bytes) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = rows[i];
        config.row_bytes[i] = rows[i] ? row_bytes[i] : 0;
    }
    finish_writing();
    _tile_loadconfig(&config);
}
