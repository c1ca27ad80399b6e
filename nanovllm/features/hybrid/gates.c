/* Gates of hybrid models: attention's, and the shared expert's (chapter 16). A part of delta_rule.c. */

typedef struct {
    int64_t num_rows;
    num *out;             /* [num_rows][num_heads][size] */
    const num *x, *gate;  /* as out; rows row_stride apart, heads head_stride */
    int64_t num_heads, size, row_stride, head_stride;
} gate_args;

static void multiply_by_gate_heads(const void *args, int64_t first, int64_t end) {
    const gate_args a = *(const gate_args *)args;
    for (int64_t head = first; head < end; head++) {
        const num *x = a.x + head * a.size;
        const num *gate = a.gate + head / a.num_heads * a.row_stride + head % a.num_heads * a.head_stride;
        for (int64_t i = 0; i < a.size; i += LANES) {
            const int64_t count = a.size - i < LANES ? a.size - i : LANES;
            num numbers[LANES];
            put_nums(numbers, some_floats(x + i, count) * sigmoid(some_floats(gate + i, count)));
            memcpy(a.out + head * a.size + i, numbers, count * sizeof(num));
        }
    }
}

/* out = x * sigmoid(gate). */
void multiply_by_gate(const gate_args *args) {
    parallel_for(multiply_by_gate_heads, args, args->num_rows * args->num_heads, rows_a_chunk(args->size));
}

static void add_gated_rows(const void *args, int64_t first, int64_t end) {
    const gate_args a = *(const gate_args *)args;
    for (int64_t r = first; r < end; r++) {
        const vec weight = sigmoid(in_all(load(a.gate[r * a.row_stride])));
        for (int64_t i = 0; i < a.size; i += LANES) {
            const int64_t count = a.size - i < LANES ? a.size - i : LANES;
            num numbers[LANES], *out = a.out + r * a.size + i;
            put_nums(numbers, fused(weight, some_floats(a.x + r * a.size + i, count), some_floats(out, count)));
            memcpy(out, numbers, count * sizeof(num));
        }
    }
}

/* out += sigmoid(gate) * x, with one gate a row. */
void add_gated(const gate_args *args) { parallel_for(add_gated_rows, args, args->num_rows, rows_a_chunk(args->size)); }
