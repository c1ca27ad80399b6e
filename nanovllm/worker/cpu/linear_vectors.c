/* Matrix products, their sums in vectors (chapter 10). A part of cpu/linear.c. */
enum {
    ROWS = LANES == 16 ? 8 : 6, /* of the sums, AVX512's 32 registers hold more than AVX2's 16 */
    K_STEP = BESIDE,
    SLAB_BYTES = 2 << 20,
    CONVERTED_AT_ONCE = ROWS * 128, /* numbers of a tile's rows */
    SHARED_BYTES = 160 << 10,       /* of weights that are computed together: in the second cache, beside the next ones */
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

/* How many blocks' sums are in registers together. Those of one row and one block are too few: each addition waits for the
 * one before. */
static inline int blocks_in_registers(int rows) { return !CONVERTED || rows > 2 ? 1 : rows == 2 ? 2 : MOST_BLOCKS; }

/* Blocks that are computed together. A few rows are done with two sooner than memory brings more. */
static inline int64_t blocks_at_once(int64_t num_rows, int64_t block_bytes) {
    if (!CONVERTED || num_rows == 1)
        return MOST_BLOCKS;
    const int64_t fit = num_rows <= ROWS ? 2 : smaller(SHARED_BYTES / block_bytes, MOST_BLOCKS);
    return fit > 1 ? fit : 1;
}

/* The products along k, from `first` to end - 1, of `rows` rows with `wide` blocks from first_block on; added to y if x is
 * CONVERTED. Number first + i of row r is converted[r * x_stride + i], or x[the same]. */
static inline __attribute__((always_inline)) void multiply_part(const int rows, const int wide, float (*y)[ROWS][COLS],
                                                                const tile_args *args, int64_t first_block,
                                                                int64_t first, int64_t end, const num *x,
                                                                const unit *converted, int64_t x_stride) {
    vec sum[ROWS][MOST_BLOCKS][2];
    const num *w[MOST_BLOCKS];
    const char *ahead[MOST_BLOCKS];
    for (int b = 0; b < wide; b++) {
        w[b] = args->blocks[first_block + b].weight + first * COLS;
        ahead[b] = args->blocks[first_block + b].ahead + first / BESIDE * args->ahead_bytes;
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                sum[r][b][half] = CONVERTED ? vec_from(y[first_block + b][r] + half * LANES) : (vec){0};
    }
    for (int64_t i = 0; i < end - first; i += BESIDE) {
        for (int b = 0; b < wide; b++)
            __builtin_prefetch(ahead[b]);
        for (int s = 0; s < BESIDE / PAIR; s++) {
            unit_vec weights[MOST_BLOCKS][2];
            for (int b = 0; b < wide; b++)
                for (int half = 0; half < 2; half++)
                    weights[b][half] = weights_at(w[b] + half * LANES * BESIDE, s);
            for (int r = 0; r < rows; r++) {
                const int64_t at = r * x_stride + i + s;
                const unit_vec u = in_register(all_lanes(CONVERTED ? converted[at] : unit_at(x + at)));
                for (int b = 0; b < wide; b++)
                    for (int half = 0; half < 2; half++)
                        sum[r][b][half] = multiply_add(sum[r][b][half], weights[b][half], u);
            }
        }
        for (int b = 0; b < wide; b++) {
            w[b] += COLS * BESIDE;
            ahead[b] += args->ahead_bytes;
        }
    }
    for (int b = 0; b < wide; b++)
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++)
                put(y[first_block + b][r] + half * LANES, sum[r][b][half]);
}

/* The products of `rows` rows with all blocks. Where a unit is one number of 16 bits, a part of x is converted first, once
 * for all of them: then a lane gets it with one instruction, not four. */
static inline __attribute__((always_inline)) void compute_rows(const int rows, const tile_args *args) {
    const int wide = blocks_in_registers(rows);
    const int64_t part = CONVERTED ? CONVERTED_AT_ONCE / rows / LANES * LANES : args->k;
    const int64_t num_blocks = MOST_BLOCKS == 1 ? 1 : args->num_blocks;
    float y[MOST_BLOCKS][ROWS][COLS];
    for (int64_t b = 0; b < num_blocks && CONVERTED; b++)
        memset(y[b], 0, rows * sizeof(y[b][0]));
    for (int64_t first = 0; first < args->k; first += part) {
        const int64_t end = smaller(args->k, first + part);
        const num *x = args->x + first;
        unit converted[CONVERTED ? CONVERTED_AT_ONCE : 1];
        for (int r = 0; r < rows && CONVERTED; r++) {
            const num *from = x + r * args->k;
            unit *to = converted + r * part;
            int64_t i = 0;
            for (; i + LANES <= end - first; i += LANES)
                put_unit_vec(to + i, units_at(from + i));
            for (; i < end - first + (end - first) % BESIDE; i++)
                to[i] = i < end - first ? unit_at(from + i) : 0;
        }
        int64_t b = 0;
        for (; b + wide <= num_blocks; b += wide)
            multiply_part(rows, wide, y, args, b, first, end, x, converted, part);
        for (; b + 2 <= num_blocks && wide > 2; b += 2)
            multiply_part(rows, MOST_BLOCKS > 2 ? 2 : 1, y, args, b, first, end, x, converted, part);
        for (; b < num_blocks && wide > 1; b++)
            multiply_part(rows, 1, y, args, b, first, end, x, converted, part);
    }
    for (int64_t b = 0; b < num_blocks; b++)
        put_tile(rows, y[b], args, b);
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

/* The products of rows with a's blocks. */
static void compute_block(int64_t num_rows, tile_args a) {
    for (int64_t r = 0; r < num_rows; r += ROWS, next_tile(&a, ROWS))
        compute_tile(num_rows - r < ROWS ? num_rows - r : ROWS, &a);
}
