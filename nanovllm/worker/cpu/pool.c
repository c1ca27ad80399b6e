/* A pool of threads for the C kernels (chapter 10). A library of its own: however many models a process runs, there is
 * one pool.
 *
 * The thread that calls parallel_for() publishes a job: a function and its items. Helpers, and the caller, too, claim
 * chunks of items until none is left. A chunk is half of a thread's fair share of what is left: large ones first, since
 * memory is read fastest in one go, small ones last, so that all threads are done at about the same time (guided
 * self-scheduling: Polychronopoulos and Kuck, 1987). The caller waits for chunks that a helper has claimed, never for a
 * helper itself: beside other programs the system may not run a helper for many milliseconds, and then the caller
 * computes everything alone. (In OpenMP every thread has to arrive.)
 *
 * A waiting thread spins for a short time, since sleeping and waking take several microseconds, and then sleeps, so that a
 * core is free for others: above all for the helper whose chunk is awaited.
 */
#include <pthread.h>
#ifndef _WIN32
#include <signal.h>
#endif
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef void work_function(const void *args, int64_t first, int64_t end);
typedef void team_function(void (*member)(void *), void *data, unsigned num_threads, unsigned flags);

enum {
    SPIN_NS = 100000,      /* longer than the Python code between two kernels of a step takes */
    STACK_BYTES = 8 << 20, /* of a helper; attention needs more than the 512 KB that macOS provides */
    CACHE_LINE = 128,      /* Apple's; others have 64 */
};

static struct {
    /* generation << 32 | number of items that nobody has claimed. One number, so that a helper that was stopped after
     * it had read a job's fields cannot claim items of a later job: its compare-and-swap fails. */
    _Alignas(CACHE_LINE) _Atomic uint64_t ticket;
    /* The job. Written only while all items of the one before are done. */
    _Atomic(work_function *) work;
    _Atomic(const void *) args;
    _Atomic int64_t num_items, min_chunk;

    _Alignas(CACHE_LINE) _Atomic uint32_t num_done; /* items */
    _Atomic uint32_t caller_sleeps;                 /* until all are done */
    _Atomic uint32_t num_sleeping;                  /* helpers, until num_wakeups changes */
    _Atomic uint32_t num_wakeups;
    _Atomic uint32_t num_threads;                   /* that may compute; the caller is one of them */
    _Atomic(team_function *) team;                  /* see set_threads() */
    _Atomic uint32_t busy;                          /* a thread is in parallel_for() */
    uint32_t num_started;                           /* helpers; belongs to the thread that made `busy` 1 */
} pool = {.num_threads = 1};

#ifdef __linux__
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL);
}
static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX); }
#else
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    pthread_mutex_lock(&mutex);
    while (*word == value)
        pthread_cond_wait(&changed, &mutex);
    pthread_mutex_unlock(&mutex);
}
static void wake_all(_Atomic uint32_t *word) {
    (void)word;
    pthread_mutex_lock(&mutex);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}
#endif

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

static void pause_briefly(void) {
    for (int i = 0; i < 16; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#else
        __asm__ volatile("yield");
#endif
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Claim and compute chunks until no item is left. */
static void work_on_job(void) {
    uint64_t ticket = pool.ticket;
    for (int64_t left; (left = (uint32_t)ticket) > 0;) {
        work_function *work = pool.work;
        const void *args = pool.args;
        const int64_t first = pool.num_items - left, half_a_share = left / (2 * pool.num_threads);
        const int64_t count = smaller(left, larger(half_a_share, pool.min_chunk));
        if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket - count))
            continue; /* `ticket` is the new one now, and the fields may be another job's */
        work(args, first, first + count);
        const int64_t num_items = pool.num_items; /* read before the last item counts as done: then a job may follow */
        if ((pool.num_done += count) == num_items && pool.caller_sleeps)
            wake_all(&pool.num_done);
        ticket = pool.ticket;
    }
}

static void *help(void *index) {
    for (;;) {
        for (uint32_t num_threads; (uintptr_t)index >= (num_threads = pool.num_threads);)
            sleep_while(&pool.num_threads, num_threads);
        for (const int64_t until = now_ns() + SPIN_NS; !(uint32_t)pool.ticket && now_ns() < until;)
            pause_briefly();
        /* The caller publishes a job and then looks whether somebody sleeps; here it is the other way round, so that
         * one of the two always sees the other. */
        pool.num_sleeping++;
        const uint32_t num_wakeups = pool.num_wakeups;
        if (!(uint32_t)pool.ticket)
            sleep_while(&pool.num_wakeups, num_wakeups);
        pool.num_sleeping--;
        work_on_job();
    }
    return NULL;
}

#ifndef _WIN32 /* where there is no fork */
static void forget_helpers(void) { /* in the child of a fork: it has a copy of the memory, but not of the threads */
    pool.ticket = pool.caller_sleeps = pool.num_sleeping = pool.busy = pool.num_started = 0;
#ifndef __linux__
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    changed = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
#endif
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, forget_helpers); }
#endif

static void start_helpers(void) {
#ifndef _WIN32
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; pool.num_started + 1 < pool.num_threads;)
        if (pthread_create(&thread, &attributes, help, (void *)(uintptr_t)(pool.num_started + 1)) == 0)
            pool.num_started++;
        else
            pool.num_threads = pool.num_started + 1; /* the system allows no more */
    pthread_attr_destroy(&attributes);
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
}

static void join_team(void *unused) { (void)unused, work_on_job(); }

/* From now on at most num_threads threads compute a job, its caller included. team: NULL, or GOMP_parallel() of the
 * OpenMP runtime that computes PyTorch's matrix products. Its threads then do the helpers' work, too: they spin for
 * milliseconds after each product, and two teams that spin on the same cores are in each other's way. */
void set_threads(uint32_t num_threads, team_function *team) {
    pool.team = team;
    if (atomic_exchange(&pool.num_threads, num_threads) != num_threads)
        wake_all(&pool.num_threads);
}

/* How many threads compute a job. */
uint32_t get_threads(void) { return pool.num_threads; }

/* See pool.h. If the pool works for another thread, the caller computes alone. So it does if the second chunk would be
 * less than half of one: that is done sooner than another thread begins. */
void parallel_for(work_function *work, const void *args, int64_t num_items, int64_t min_chunk) {
    const uint32_t num_threads = pool.num_threads;
    if (2 * num_items < 3 * min_chunk || num_items > INT32_MAX || num_threads < 2 || atomic_exchange(&pool.busy, 1)) {
        work(args, 0, num_items);
        return;
    }
    team_function *team = pool.team;
    if (!team && pool.num_started + 1 < num_threads)
        start_helpers();
    pool.work = work;
    pool.args = args;
    pool.num_items = num_items;
    pool.min_chunk = min_chunk;
    pool.num_done = 0;
    pool.ticket = ((pool.ticket >> 32) + 1) << 32 | (uint64_t)num_items;
    if (team) {
        team(join_team, NULL, num_threads, 0);
    } else if (pool.num_sleeping) {
        pool.num_wakeups++;
        wake_all(&pool.num_wakeups);
    }
    work_on_job();
    for (const int64_t until = now_ns() + SPIN_NS; pool.num_done < num_items && now_ns() < until;)
        pause_briefly();
    pool.caller_sleeps = 1;
    for (uint32_t num_done; (num_done = pool.num_done) < num_items;)
        sleep_while(&pool.num_done, num_done);
    pool.caller_sleeps = 0;
    pool.busy = 0;
}
