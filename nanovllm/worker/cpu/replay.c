/* A step without Python (chapter 10). A part of cpu/kernels.c; cpu/recorded_step.py makes the record. */

/* A function of these files, and its arguments: a struct whose first field is the number of rows. The call has `times` rows
 * for each row of the step. */
typedef struct {
    void (*function)(const void *args);
    int64_t *args, times;
} recorded_call;

/* Make the calls again, one after another, for so many rows of a step. Everything else is where it was. */
void replay(const recorded_call *calls, int64_t num_calls, int64_t num_rows) {
    for (const recorded_call *c = calls; c < calls + num_calls; c++) {
        *c->args = num_rows * c->times;
        c->function(c->args);
    }
}
