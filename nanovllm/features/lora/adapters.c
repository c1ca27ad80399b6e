/* Adapters: y += B (A x), for the rows that meet one (chapter 15). Compiled as worker/cpu/kernels.c is. adapter_rows.py has
 * the same in PyTorch. A task is up to TILE_ROWS rows that meet the same adapter: each number of A and B that is loaded
 * serves all. */
#include "pool.h"
#include "vectors.h"

enum { TILE_ROWS = 4 }; /* as in adapter_rows.py */
enum { PART = 256 };    /* numbers of a row of x that are converted at a time */

typedef struct {
    int64_t slot, num_rows, rows[TILE_ROWS];
} adapter_task;

/* adapter_c_kernel.py has the same fields in the same order. */
typedef struct {
    num *y;                    /* [rows][n]; or NULL: */
    float *y_floats;           /* the same in float32: logits */
    const num *x, *a, *b;      /* [rows][k], rows x_stride apart; [slots][num_parts][max_rank][padded_k]; */
    const int64_t *ranks;      /* [slots][max_rank][n], with LANES numbers after it; [slots] */
    const int64_t *part_ends;  /* [num_parts]: where each part's columns of y end */
    const adapter_task *tasks; /* [num_tasks] */
    int64_t num_parts, max_rank, n, k, padded_k, x_stride;
} adapter_args;

/* inner[j][r] = row j of A times the task's row r of x. Numbers of x after k count as 0. `rows` is a constant, 1 or all, so
 * that the sums stay in registers. */
static inline __attribute__((always_inline)) void multiply_a(const int rows, float (*restrict inner)[TILE_ROWS],
                                                             const adapter_args *args, const adapter_task *task,
                                                             const num *a, int64_t rank) {
    memset(inner, 0, rank * sizeof(*inner));
    for (int64_t first = 0; first < args->k; first += PART) {
        const int64_t count = args->k - first < PART ? args->k - first : PART;
        const int64_t padded = (count + PARTIAL_SUMS - 1) / PARTIAL_SUMS * PARTIAL_SUMS;
        float x[TILE_ROWS][PART] = {{0}};
        for (int r = 0; r < task->num_rows; r++)
            for (int64_t i = 0; i < count; i++)
                x[r][i] = load(args->x[task->rows[r] * args->x_stride + first + i]);
        for (int64_t j = 0; j < rank; j++) {
            vec sum[TILE_ROWS][PARTIAL_VECS] = {{{0}}};
            for (int64_t i = 0; i < padded; i += PARTIAL_SUMS)
                for (int v = 0; v < PARTIAL_VECS; v++) {
                    const vec weights = floats_at(a + j * args->padded_k + first + i + v * LANES);
                    for (int r = 0; r < rows; r++)
                        sum[r][v] += weights * vec_from(x[r] + i + v * LANES);
                }
            for (int r = 0; r < rows; r++) {
                float partial[PARTIAL_SUMS];
                memcpy(partial, sum[r], sizeof(partial));
                inner[j][r] += sum_of(partial);
            }
        }
    }
}

/* The columns first to end - 1 of y += inner times B. */
static inline __attribute__((always_inline)) void add_b(const int rows, const adapter_args *args,
                                                        const adapter_task *task, float (*restrict inner)[TILE_ROWS],
                                                        const num *b, int64_t rank, int64_t first, int64_t end) {
    for (int64_t c = first; c < end; c += LANES) {
        const int lanes = end - c < LANES ? end - c : LANES;
        vec sum[TILE_ROWS] = {{0}};
        for (int64_t j = 0; j < rank; j++) {
            const vec weights = floats_at(b + j * args->n + c);
            for (int r = 0; r < rows; r++)
                sum[r] += weights * inner[j][r];
        }
        for (int r = 0; r < task->num_rows; r++) {
            const int64_t at = task->rows[r] * args->n + c;
            for (int l = 0; l < lanes; l++)
                if (args->y_floats)
                    args->y_floats[at + l] += sum[r][l];
                else
                    args->y[at + l] = store(load(args->y[at + l]) + sum[r][l]);
        }
    }
}

static inline __attribute__((always_inline)) void add_adapter(const int rows, const adapter_args *a,
                                                              const adapter_task *task) {
    const int64_t rank = a->ranks[task->slot];
    const num *b = a->b + task->slot * a->max_rank * a->n;
    float inner[a->max_rank][TILE_ROWS];
    for (int64_t part = 0, column = 0; part < a->num_parts && rank; column = a->part_ends[part++]) {
        multiply_a(rows, inner, a, task, a->a + (task->slot * a->num_parts + part) * a->max_rank * a->padded_k, rank);
        add_b(rows, a, task, inner, b, rank, column, a->part_ends[part]);
    }
}

static void add_adapter_tasks(const void *args, int64_t first, int64_t end) {
    const adapter_args *a = args;
    for (const adapter_task *task = a->tasks + first; task < a->tasks + end; task++)
        if (task->num_rows == 1)
            add_adapter(1, a, task);
        else
            add_adapter(TILE_ROWS, a, task);
}

void add_adapters(const adapter_args *args, int64_t num_tasks) {
    parallel_for(add_adapter_tasks, args, num_tasks, 1);
}
