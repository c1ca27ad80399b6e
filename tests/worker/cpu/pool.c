/* Every item of every job is computed once, whatever the threads of cpu/pool.c are: prints how many were not. */
#include "../../../nanovllm/worker/cpu/pool.c"

#include <stdio.h>

enum { NUM_ITEMS = 20000, NUM_JOBS = 200 };
static int64_t times[NUM_ITEMS];

static void count(const void *args, int64_t first, int64_t end) {
    (void)args;
    for (int64_t i = first; i < end; i++)
        times[i]++;
}

int main(void) {
    int num_wrong = 0;
    for (int job = 0; job < NUM_JOBS; job++) {
        set_threads(2 + job % 3, NULL); /* helpers come and sleep */
        for (const int64_t until = now_ns() + job % 2 * 3 * SPIN_NS; now_ns() < until;) /* or nod off before the job */
            pause_briefly();
        parallel_for(count, NULL, NUM_ITEMS, 8);
    }
    for (int i = 0; i < NUM_ITEMS; i++)
        num_wrong += times[i] != NUM_JOBS;
    printf("%d helpers, %d wrong\n", (int)pool.num_started, num_wrong);
    return num_wrong != 0;
}
