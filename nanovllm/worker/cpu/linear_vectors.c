/* Matrix products, their sums in vectors (chapter 10). A part of cpu/linear.c. */
enum {
    ROWS = LANES == 16 ? 8 : 6, /* of the sums, AVX512's 32 registers hold more than AVX2's 16 */
    K_STEP = BESIDE,
    SLAB_BYTES = 2 << 20,
    CONVERTED = PAIR == 1 && sizeof(num) == 2,
};

/* Where an Arm processor has instructions for matrices of bf16, PyTorch's libraries use them. Nobody promises that their
 * sums have one order. */
static inline int can_multiply(void) {
#if defined(TYPE_bf16) && !defined(EVERYWHERE) && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 0;
#else
    return 1;
#endif
}

static inline const char *multiplied_by(void) { return PAIR == 2 ? "pairs of bf16" : ""; }

static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

/* Units of LANES columns; of numbers that lie side by side and are multiplied one by one, number s. */
static inline unit_vec weights_at(const num *w, int s) {
#if defined(TYPE_bf16)
    if (PAIR == 1) {
        mask pairs;
        memcpy(&pairs, w, sizeof(pairs));
        pairs = s ? pairs & (int32_t)0xffff0000 : pairs << 16;
        return (unit_vec)pairs;
    }
#endif
    return (void)s, units_at(w);
}

/* The products of `rows` rows with one block of columns. Where a unit is one number of 16 bits, x is converted before:
 * then a lane gets it with one instruction, not four. */
static inline __attribute__((always_inline)) void compute_rows(const int rows, const tile_args *args) {
    const num *w = args->weight;
    const char *ahead = args->ahead;
    vec sum[ROWS][2] = {{{0}}};
    for (int64_t first = 0; first < args->k; first += PART) {
        const int64_t count = args->k - first < PART ? args->k - first : PART;
        const num *x = args->x + first;
        unit converted[ROWS][PART];
        for (int r = 0; r < rows && CONVERTED; r++) {
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES)
                put_unit_vec(converted[r] + i, units_at(x + r * args->k + i));
            for (; i < count + count % BESIDE; i++)
                converted[r][i] = i < count ? unit_at(x + r * args->k + i) : 0;
        }
        for (int64_t i = 0; i < count; i += BESIDE) {
            __builtin_prefetch(ahead);
            for (int s = 0; s < BESIDE / PAIR; s++) {
                const unit_vec low = weights_at(w, s), high = weights_at(w + LANES * BESIDE, s);
                for (int r = 0; r < rows; r++) {
                    const unit_vec u = all_lanes(CONVERTED ? converted[r][i + s] : unit_at(x + r * args->k + i));
                    sum[r][0] = multiply_add(sum[r][0], low, u);
                    sum[r][1] = multiply_add(sum[r][1], high, u);
                }
            }
            w += COLS * BESIDE;
            ahead += args->ahead_bytes;
        }
    }
    float y[ROWS][COLS];
    memcpy(y, sum, sizeof(y));
    put_tile(rows, y, args);
}

static void compute_tile(int64_t rows, const tile_args *a) {
    switch (rows) { /* a constant, so that the sums stay in registers */
    case 1: compute_rows(1, a); break;
    case 2: compute_rows(2, a); break;
    case 3: compute_rows(3, a); break;
    case 4: compute_rows(4, a); break;
    case 5: compute_rows(5, a); break;
    case 6: compute_rows(6, a); break;
#if defined(__AVX512F__)
    case 7: compute_rows(7, a); break;
    case 8: compute_rows(8, a); break;
#endif
    }
}

/* The products of rows with a block. */
static void compute_block(int64_t num_rows, tile_args a) {
    for (int64_t r = 0; r < num_rows; r += ROWS, next_tile(&a, ROWS))
        compute_tile(num_rows - r < ROWS ? num_rows - r : ROWS, &a);
}
