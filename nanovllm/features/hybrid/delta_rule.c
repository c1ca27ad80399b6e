/* Gated DeltaNet: layers whose memory is a matrix for each value head, whatever the length (chapter 16). delta_rule.py
 * has the same in PyTorch, and says what is computed.
 *
 * Each of three passes divides the layer among the cores in its own way. Whoever has a part goes through all segments of
 * the step with it, in their order: a segment may begin where the one before has ended.
 *
 *     delta_conv     a head: the convolution, then q and k are brought to length 1 (delta_conv.c)
 *     delta_heads    COLUMNS columns of a value head's state: read and changed, token by token
 *     delta_norm     a head of a row: its output is normed and gated
 *
 * Columns of a state never meet. So its bits do not depend on who has which, nor on where a chunk ends.
 */
#include "delta_rule.h"

#include "delta_conv.c"
#include "gates.c"

static inline void add_up(vec *total, vec (*sum)[COLUMN_VECS]) {
    for (int v = 0; v < COLUMN_VECS; v++)
        total[v] = (sum[0][v] + sum[2][v]) + (sum[1][v] + sum[3][v]);
}

/* found = k * state. */
static inline void find(vec *found, const vec *state, const float *k, int64_t key_dim) {
    vec sum[SUMS][COLUMN_VECS] = {{{0}}};
    for (int64_t i = 0; i < key_dim; i += SUMS)
        for (int j = 0; j < SUMS; j++)
            for (int v = 0; v < COLUMN_VECS; v++)
                sum[j][v] = fused(state[(i + j) * COLUMN_VECS + v], in_all(k[i + j]), sum[j][v]);
    add_up(found, sum);
}

/* One token in one pass over the state: to = from * decay + k * change, out = q * to, and, if there is a next token, what
 * its key finds, next * to, as find() computes it. */
static inline __attribute__((always_inline)) void take_in(const int has_next, vec *to, const vec *from, int64_t key_dim,
                                                          float decay, const float *k, const float *q, const float *next,
                                                          const vec *change, vec *out, vec *found) {
    vec read[SUMS][COLUMN_VECS] = {{{0}}}, sum[SUMS][COLUMN_VECS] = {{{0}}};
    for (int64_t i = 0; i < key_dim; i += SUMS)
        for (int j = 0; j < SUMS; j++)
            for (int v = 0; v < COLUMN_VECS; v++) {
                const int64_t at = (i + j) * COLUMN_VECS + v;
                const vec state = fused(in_all(k[i + j]), change[v], from[at] * decay);
                to[at] = state;
                read[j][v] = fused(state, in_all(q[i + j]), read[j][v]);
                if (has_next)
                    sum[j][v] = fused(state, in_all(next[i + j]), sum[j][v]);
            }
    add_up(out, read);
    add_up(found, sum);
}

static const _Alignas(vec) float no_state[MAX_KEY_DIM * COLUMNS];

/* One segment of COLUMNS columns, the item. first: of its rows among all R. */
static void delta_segment_of(const delta_args *a, const delta_segment *s, int64_t first, int64_t item) {
    const int64_t key_dim = padded_key(a), count = s->num_logged + s->num_rows, num_rows = scratch_rows(a);
    const int64_t head = item / (padded_value(a) / COLUMNS), key_head = head / (a->value_heads / a->key_heads);
    const float *q = a->keys + (key_head * num_rows + first) * key_dim, *k = q + a->key_heads * num_rows * key_dim;
    const float *v = a->values + (item * num_rows + first) * COLUMNS, *gates = a->gates + (head * num_rows + first) * 2;
    float *outputs = a->outputs + (item * a->num_rows + s->first_row - s->num_logged) * COLUMNS;
    _Alignas(vec) float discarded[MAX_KEY_DIM * COLUMNS];
    const int64_t place = item * key_dim * COLUMNS;
    const vec *from = (const vec *)(s->source < 0 ? no_state : a->states + s->source * a->state_stride + place);
    vec *to = (vec *)(s->target < 0 ? discarded : a->states + s->target * a->state_stride + place);
    vec found[COLUMN_VECS], change[COLUMN_VECS], out[COLUMN_VECS];
    if (count == 0 && from != to)
        memcpy(to, from, key_dim * COLUMNS * sizeof(float));
    if (count)
        find(found, from, k, key_dim);
    for (int64_t i = 0; i < count; i++, q += key_dim, k += key_dim, v += COLUMNS, gates += 2, from = to) {
        for (int c = 0; c < COLUMN_VECS; c++)
            change[c] = (vec_from(v + c * LANES) - found[c] * gates[1]) * gates[0];
        if (i + 1 < count)
            take_in(1, to, from, key_dim, gates[1], k, q, k + key_dim, change, out, found);
        else
            take_in(0, to, from, key_dim, gates[1], k, q, NULL, change, out, found);
        if (i >= s->num_logged)
            memcpy(outputs + i * COLUMNS, out, sizeof(out));
    }
}

static void delta_heads(const void *args, int64_t first, int64_t end) {
    const delta_args a = *(const delta_args *)args;
    for (int64_t item = first; item < end; item++) {
        int64_t row = 0;
        for (const delta_segment *s = a.step->segments; s < a.step->segments + a.step->num_segments; s++) {
            if (s->num_logged + s->num_rows || s->target >= 0)
                delta_segment_of(&a, s, row, item);
            row += s->num_logged + s->num_rows;
        }
    }
}

static inline __attribute__((always_inline)) void norm_lanes(num *out, const float *x, const float *weight, const num *z,
                                                             float scale, int64_t count) {
    const vec gate = count == LANES ? floats_at(z) : some_floats(z, count);
    num numbers[LANES];
    put_nums(numbers, vec_from(x) * scale * vec_from(weight) * (gate * sigmoid(gate)));
    memcpy(out, numbers, count * sizeof(num));
}

static void delta_norm(const void *args, int64_t first, int64_t end) {
    const delta_args a = *(const delta_args *)args;
    const int64_t num_blocks = padded_value(&a) / COLUMNS;
    for (int64_t item = first; item < end; item++) {
        const int64_t head = item % a.value_heads, row = item / a.value_heads;
        const num *z = a.x + row * a.x_stride + conv_size(&a) + head * a.value_dim;
        num *out = a.out + item * a.value_dim;
        float x[MAX_VALUE_DIM];
        for (int64_t block = 0; block < num_blocks; block++)
            memcpy(x + block * COLUMNS, a.outputs + ((head * num_blocks + block) * a.num_rows + row) * COLUMNS,
                   COLUMNS * sizeof(float));
        const float scale = 1.0f / sqrtf(float_squares(x, a.value_dim) / a.value_dim + a.eps);
        int64_t c = 0;
        for (; c + LANES <= a.value_dim; c += LANES)
            norm_lanes(out + c, x + c, a.norm + c, z + c, scale, LANES);
        if (c < a.value_dim)
            norm_lanes(out + c, x + c, a.norm + c, z + c, scale, a.value_dim - c);
    }
}

void delta_net(const delta_args *args) {
    const int64_t num_blocks = padded_value(args) / COLUMNS;
    parallel_for(delta_conv, args, 2 * args->key_heads + args->value_heads, 1);
    parallel_for(delta_heads, args, args->value_heads * num_blocks, 1);
    parallel_for(delta_norm, args, args->num_rows * args->value_heads, rows_a_chunk(args->value_dim));
}
