/* The kernels' side of pool.c: how a kernel hands work to all cores. A part of cpu/kernels.c. */
#include <stdint.h>

/* Computes one chunk of a job. Chunks may run at the same time, in any order, and in any thread. */
typedef void work_function(const void *args, int64_t chunk);

/* work(args, chunk) for each chunk from 0 to num_chunks - 1. Returns when all are done. Claiming a chunk takes about as
 * long as reading 2 KB from memory: a chunk should be some microseconds of work, and there should be several for each
 * thread, because a thread that is slower than the others, or that the system stops, should hold few of them.
 *
 * A variable that cpu/kernels.py sets to the function in pool.c: all libraries of a process share one pool. */
void (*parallel_for)(work_function *work, const void *args, int64_t num_chunks);
