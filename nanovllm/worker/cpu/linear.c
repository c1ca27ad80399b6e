/* Matrix products with weights laid out for them (chapter 10): a part of cpu/kernels.c, which includes it.
 *
 * A batch of 32 rows is too small to hide the weights' way from memory behind arithmetic, and too large to be just a way
 * from memory. So every weight is read once, while the rows before are computed with, and is used from the cache for all
 * rows: ROWS rows and COLS columns at a time, whose sums stay in registers. float32, and processors that multiply
 * matrices by themselves (AMX, Arm), are served better by PyTorch's libraries.
 */
enum { ROWS = STEP / 2, COLS = 2 * LANES };

#if defined(TYPE_bf16) && defined(__AVX512BF16__)
typedef __m512bh weights; /* two for each of LANES columns */
static inline weights load_weights(const num *w) { return (weights)_mm512_loadu_si512(w); }
static inline vec multiply_add_weights(vec sum, weights w, unit x) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, w, (__m512bh)_mm512_set1_epi32((int)x));
}
#else
typedef vec weights;
static inline weights load_weights(const num *w) {
#if defined(TYPE_f16) && defined(__AVX512F__) /* what compilers fail to make of the loop below */
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w));
#endif
    float x[LANES];
    for (int l = 0; l < LANES; l++)
        x[l] = load(w[l]);
    weights result;
    memcpy(&result, x, sizeof(x));
    return result;
}
static inline vec multiply_add_weights(vec sum, weights w, unit x) { return sum + w * x; }
#endif

/* Whether C does this model's products; reorders [n][k] as [n / COLS][k / PAIR][COLS][PAIR] for them. */
int reorder_weight(num *restrict reordered, const num *restrict weight, int64_t n, int64_t k) {
#if !defined(__x86_64__) || defined(TYPE_f32) || (defined(TYPE_bf16) && defined(__AMX_BF16__))
    return 0;
#endif
    if (n % COLS || k % PAIR)
        return 0;
#pragma omp parallel for
    for (int64_t block = 0; block < n; block += COLS)
        for (int64_t i = 0; i < k; i += PAIR)
            for (int c = 0; c < COLS; c++)
                memcpy(reordered + block * k + i * COLS + c * PAIR, weight + (block + c) * k + i, PAIR * sizeof(num));
    return 1;
}

/* `rows` rows of one block of columns. Line by line, it calls for what will be needed next, from `ahead` on. */
static inline __attribute__((always_inline)) void tile(const int rows, num *out, int64_t n, const num *x, int64_t k,
                                                       const num *w, const num *bias, const char *ahead, int64_t step) {
    vec s[ROWS][2] = {{{0}}};
    for (int64_t i = 0; i < k; i += PAIR, w += COLS * PAIR, ahead += step) {
        const weights low = load_weights(w), high = load_weights(w + LANES * PAIR);
        __builtin_prefetch(ahead);
        for (int r = 0; r < rows; r++) {
            const unit u = unit_at(x + r * k + i);
            s[r][0] = multiply_add_weights(s[r][0], low, u), s[r][1] = multiply_add_weights(s[r][1], high, u);
        }
    }
    float y[ROWS][COLS];
    memcpy(y, s, sizeof(y));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < COLS; c++)
            out[r * n + c] = store(y[r][c] + (bias ? load(bias[c]) : 0));
}

/* out [m][n] = x [m][k] times the reordered weight, + bias (if there is one). */
void linear(num *out, const num *x, const num *reordered, const num *bias, int64_t m, int64_t n, int64_t k) {
    const int64_t step = COLS * PAIR * sizeof(num) * ROWS / (m + ROWS - 1); /* of the next block for each of the groups */
#pragma omp parallel for
    for (int64_t c = 0; c < n; c += COLS) {
        const num *w = reordered + c * k, *b = bias ? bias + c : bias;
        const char *ahead = (const char *)(w + COLS * k);
        for (int64_t r = 0; r < m; r += ROWS, ahead += step * (k / PAIR)) {
            num *o = out + r * n + c;
            const num *y = x + r * k;
            switch (m - r < ROWS ? m - r : ROWS) { /* a constant, so that tile() keeps its sums in registers */
            case 1: tile(1, o, n, y, k, w, b, ahead, step); break;
            case 2: tile(2, o, n, y, k, w, b, ahead, step); break;
            case 3: tile(3, o, n, y, k, w, b, ahead, step); break;
            case 4: tile(4, o, n, y, k, w, b, ahead, step); break;
#if defined(__AVX512F__)
            case 5: tile(5, o, n, y, k, w, b, ahead, step); break;
            case 6: tile(6, o, n, y, k, w, b, ahead, step); break;
            case 7: tile(7, o, n, y, k, w, b, ahead, step); break;
            case 8: tile(8, o, n, y, k, w, b, ahead, step); break;
#endif
            }
        }
    }
}
