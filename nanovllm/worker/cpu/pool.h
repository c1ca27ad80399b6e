/* The kernels' side of pool.c: how a kernel hands work to all cores. A part of each library of kernels. */
#pragma once
#include <stdint.h>

/* Computes the items first to end - 1 of a job. Chunks of items run at the same time, in any order, in any thread. */
typedef void work_function(const void *args, int64_t first, int64_t end);

/* Calls work(args, first, end) for chunks of at least min_chunk items (the last one may be smaller), until all
 * num_items are done. Claiming a chunk takes a fraction of a microsecond, so min_chunk should be some microseconds of
 * work.
 *
 * A variable that cpu/c_kernels.py sets to the function in pool.c: all libraries of a process share one pool. */
void (*parallel_for)(work_function *work, const void *args, int64_t num_items, int64_t min_chunk);

enum { CHUNK_BYTES = 32 << 10 }; /* of weights, at least, that a thread claims at a time */

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* So many rows, at least, that a thread claims at a time. A decode of some rows stays in one thread. */
static inline int64_t rows_a_chunk(int64_t row_size) { return 1 + (1 << 14) / row_size; }

/* Of weights that meet num_rows rows, weight w those up to ends[w]: how many are left without those at the end that no row
 * meets. */
static inline int64_t met_weights(int64_t num_weights, const int64_t *ends, int64_t num_rows) {
    while (num_weights > 1 && ends[num_weights - 2] == num_rows)
        num_weights--;
    return num_weights;
}
