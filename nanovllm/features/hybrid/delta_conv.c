/* Gated DeltaNet, the first pass: the convolution over time, and what it makes of a row (chapter 16). A part of
 * delta_rule.c. */

/* Row i of a segment, from a channel on, as the convolution sees it: before row 0 comes the window. NULL: zeros. */
static inline const num *seen_at(const delta_args *a, const delta_segment *s, int64_t i, int64_t channel) {
    const int64_t size = conv_size(a), log_size = size + 2 * a->value_heads;
    if (i < 0 && s->source < 0)
        return NULL;
    if (i < 0)
        return a->windows + s->source * a->window_stride + (a->kernel_size - 1 + i) * size + channel;
    if (i < s->num_logged)
        return a->log + s->log_slot * a->log_stride + (s->first_logged + i) * log_size + channel;
    return a->x + (s->first_row + i - s->num_logged) * a->x_stride + channel;
}

/* LANES channels, of which the first `count` are stored. */
static inline __attribute__((always_inline)) void convolve_lanes(float *out, const num *const *taps, int64_t num_taps,
                                                                 const float *weights, int64_t stride, int64_t at,
                                                                 int64_t count) {
    vec sum = {0};
    for (int64_t j = 0; j < num_taps; j++, weights += stride)
        if (taps[j]) {
            const vec x = count == LANES ? floats_at(taps[j] + at) : some_floats(taps[j] + at, count);
            sum = fused(x, vec_from(weights), sum);
        }
    sum *= sigmoid(sum);
    memcpy(out, &sum, count * sizeof(float));
}

/* The channels first to first + size - 1 of row i, after convolution and silu; COLUMNS by COLUMNS, block_stride apart. */
static inline void convolve(float *out, int64_t block_stride, const delta_args *a, const delta_segment *s, int64_t i,
                            int64_t first, int64_t size) {
    const num *taps[MAX_KERNEL];
    const float *weights = a->conv + first;
    const int64_t stride = conv_size(a);
    int64_t c = 0;
    for (int64_t j = 0; j < a->kernel_size; j++)
        taps[j] = seen_at(a, s, i - (a->kernel_size - 1) + j, first);
    for (; c + LANES <= size; c += LANES)
        convolve_lanes(out + c / COLUMNS * block_stride + c % COLUMNS, taps, a->kernel_size, weights + c, stride, c,
                       LANES);
    out += c / COLUMNS * block_stride + c % COLUMNS;
    if (c < size)
        convolve_lanes(out, taps, a->kernel_size, weights + c, stride, c, size - c);
}

/* What a segment leaves behind of the channels: rows of draft tokens in the log, and the window. */
static inline void leave_behind(const delta_args *a, const delta_segment *s, int64_t channel, int64_t size) {
    const int64_t log_size = conv_size(a) + 2 * a->value_heads;
    const int64_t before = s->num_logged + s->num_rows - (a->kernel_size - 1);
    for (int64_t i = 0; i < s->num_rows && s->keeps; i++)
        memcpy(a->log + s->log_slot * a->log_stride + i * log_size + channel,
               a->x + (s->first_row + i) * a->x_stride + channel, size * sizeof(num));
    for (int64_t i = 0; i < a->kernel_size - 1 && s->target >= 0; i++) { /* in order: target may be source */
        num *to = a->windows + s->target * a->window_stride + i * conv_size(a) + channel;
        const num *x = seen_at(a, s, before + i, channel);
        if (x)
            memmove(to, x, size * sizeof(num));
        else
            memset(to, 0, size * sizeof(num));
    }
}

/* q or k of a head in all rows of the step: brought to length 1, q divided by the root of its length. */
static void conv_of_key(const delta_args *a, int64_t head) {
    const int64_t size = a->key_dim, padding = padded_key(a) - size;
    const float divisor = head < a->key_heads ? sqrtf(size) : 1;
    float *row = a->keys + head * scratch_rows(a) * padded_key(a);
    for (const delta_segment *s = a->step->segments; s < a->step->segments + a->step->num_segments; s++) {
        for (int64_t i = 0; i < s->num_logged + s->num_rows; i++, row += padded_key(a)) {
            convolve(row, COLUMNS, a, s, i, head * size, size);
            const float scale = 1 / (sqrtf(float_squares(row, size) + 1e-6f) * divisor);
            for (int64_t c = 0; c < size; c++)
                row[c] *= scale;
            memset(row + size, 0, padding * sizeof(float));
        }
        leave_behind(a, s, head * size, size);
    }
}

/* The values of a head in all rows of the step, and its gates. In x, z lies before the gates; the log has no z. */
static void conv_of_value(const delta_args *a, int64_t head) {
    const int64_t size = a->value_dim, channels = conv_size(a);
    const int64_t channel = 2 * a->key_heads * a->key_dim + head * size, gates = channels + a->value_heads * size;
    const int64_t num_blocks = padded_value(a) / COLUMNS, num_rows = scratch_rows(a);
    int64_t row = 0;
    for (const delta_segment *s = a->step->segments; s < a->step->segments + a->step->num_segments; s++) {
        for (int64_t i = 0; i < s->num_logged + s->num_rows; i++, row++) {
            float *value = a->values + (head * num_blocks * num_rows + row) * COLUMNS;
            if (size % COLUMNS) /* what lies after the last */
                memset(value + (num_blocks - 1) * num_rows * COLUMNS, 0, COLUMNS * sizeof(float));
            convolve(value, num_rows * COLUMNS, a, s, i, channel, size);
            const num *b = seen_at(a, s, i, (i < s->num_logged ? channels : gates) + head);
            gates_of(a->gates + (head * num_rows + row) * 2, b, a, head);
        }
        for (int64_t i = 0; i < s->num_rows && s->keeps; i++) {
            num *log = a->log + s->log_slot * a->log_stride + i * (channels + 2 * a->value_heads) + channels + head;
            const num *b = a->x + (s->first_row + i) * a->x_stride + gates + head;
            log[0] = b[0];
            log[a->value_heads] = b[a->value_heads];
        }
        leave_behind(a, s, channel, size);
    }
}

/* An item is a head of q, of k, or of v. */
static void delta_conv(const void *args, int64_t first, int64_t end) {
    const delta_args a = *(const delta_args *)args;
    for (int64_t head = first; head < end; head++)
        if (head < 2 * a.key_heads)
            conv_of_key(&a, head);
        else
            conv_of_value(&a, head - 2 * a.key_heads);
}
