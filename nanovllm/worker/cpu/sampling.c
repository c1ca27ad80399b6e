/* A token for each row of logits, drawn with one uniform number (chapter 8). A part of cpu/kernels.c.
 *
 * worker/sampler.py has the same rule in PyTorch, bit for bit. Two things make that possible. exp_in_steps() rounds after
 * each operation, as PyTorch does. And a weight is rounded to a multiple of QUANTUM: sums of these are exact in float64 for
 * any vocabulary of up to 2^19 tokens, so they do not depend on the order in which anybody adds.
 *
 * Nothing is sorted and nothing is stored. The largest logit of each block says which blocks matter; a histogram over the
 * bits of the logits finds the least logit that top_k or top_p keeps; and only the block in which the chosen token lies is
 * looked at token by token.
 */

enum { BLOCK = 256, MAX_BLOCKS = 2048 }; /* logits, or more if there would be more blocks */
enum { DIGIT_BITS = 11, NUM_DIGITS = 1 << DIGIT_BITS };
static const float NEAR = 7; /* e^7 = 1,097: how much more than others the largest logit weighs */
static const double TO_QUANTA = 0x1.8p18; /* a float64 near it is a multiple of worker/exact.py's QUANTUM */

typedef float half_vec __attribute__((vector_size(2 * LANES)));
typedef uint32_t keys __attribute__((vector_size(4 * LANES)));
typedef double doubles __attribute__((vector_size(4 * LANES))); /* as many as a half_vec has lanes */

typedef struct {
    int64_t num_rows;
    int64_t *token_ids;       /* [rows of the logits] */
    const float *logits;      /* [rows of the logits][size] */
    const int64_t *rows;      /* [num_rows]: those that are drawn for. Everything below has an entry for each of them */
    const float *temperature; /* > 0 */
    const int64_t *top_k;     /* 0: all */
    const float *top_p;
    const float *log_min_p;   /* -infinity: all */
    const double *noise;      /* 0 <= noise < 1, so noise times a sum is less than the sum, even rounded */
    int64_t size;
} draw_args;

typedef struct {
    const float *logits, *largest; /* [size], and of each block */
    int64_t size, block_size, num_blocks;
    float temperature;
    float max, floor; /* scaled logits, which are divided by the temperature: the largest, and the least that is kept */
    int of_tokens;    /* each token weighs 1 */
} row;

/* exp(x) for x <= 0, to about 1e-7. Each operation is rounded by itself, as in exact.py, which says where the numbers
 * come from. */
static inline vec exp_in_steps(vec x) {
    x = choose(x < -30.0f, in_all(-30), x); /* exp(-30) counts as 0: it is less than half of QUANTUM */
    const mask n = __builtin_convertvector(x * 1.44269504f - 0.5f, mask);
    const vec whole = __builtin_convertvector(n, vec);
    const vec f = (x - whole * 0.693359375f) + whole * 2.12194440e-4f; /* ln(2), in two parts */
    vec p = f * 0.0013933647f + 0.0083631802f;
    p = p * f + 0.041666465f;
    p = p * f + 0.16666577f;
    p = p * f + 0.5f;
    p = (p * f) * f + f;
    return (p + 1.0f) * (vec)((n + 127) << 23);
}

static inline vec logits_at(const row *r, int64_t i) {
    if (i + LANES <= r->size)
        return vec_from(r->logits + i);
    float padded[LANES];
    for (int l = 0; l < LANES; l++)
        padded[l] = i + l < r->size ? r->logits[i + l] : -INFINITY;
    return vec_from(padded);
}

/* Of each logit the probability, times a factor that all have in common; 0 if it is not kept. */
static inline vec weights_of(const row *r, vec logits) {
    if (r->of_tokens)
        return in_all(1);
    const vec scaled = logits / r->temperature;
    return choose(scaled >= r->floor, exp_in_steps(scaled - r->max), in_all(0));
}

static inline int keeps_none(const row *r, int64_t b) { return r->largest[b] / r->temperature < r->floor; }

/* Weights are added as multiples of QUANTUM. */
static inline double in_quanta(float weight) { return (weight + TO_QUANTA) - TO_QUANTA; }
static inline doubles plus(doubles sum, vec weights) {
    half_vec half[2];
    memcpy(half, &weights, sizeof(half));
    for (int h = 0; h < 2; h++)
        sum += (__builtin_convertvector(half[h], doubles) + TO_QUANTA) - TO_QUANTA;
    return sum;
}

/* A whole number for each float32, in the same order. */
static inline uint32_t key_of(float x) {
    uint32_t bits;
    x += 0; /* -0 is 0 */
    memcpy(&bits, &x, sizeof(bits));
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
static inline keys keys_of(vec x) {
    const mask bits = (mask)(x + 0);
    return (keys)(bits ^ (bits >> 31 | INT32_MIN));
}
static inline float of_key(uint32_t key) {
    const uint32_t bits = key & 0x80000000 ? key & 0x7fffffff : ~key;
    float x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

/* Bit l is 1 where lane l is set. */
static inline uint32_t bits_of(mask m) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)m, (__m512i)m);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)m);
#else
    uint32_t bits = 0;
    for (int l = 0; l < LANES; l++)
        bits |= (uint32_t)(m[l] & 1) << l;
    return bits;
#endif
}

static double sum_of_lanes(doubles x) {
    double sum = 0;
    for (int l = 0; l < LANES / 2; l++)
        sum += x[l];
    return sum;
}

/* The sum of a block's weights. */
static double sum_of_block(const row *r, int64_t b) {
    doubles sum = {0};
    for (int64_t i = b * r->block_size; i < (b + 1) * r->block_size && i < r->size; i += LANES)
        sum = plus(sum, weights_of(r, logits_at(r, i)));
    return sum_of_lanes(sum);
}

/* The sum of the weights of all blocks. */
static double sum_of_row(const row *r) {
    double sum = 0;
    for (int64_t b = 0; b < r->num_blocks; b++)
        sum += keeps_none(r, b) ? 0 : sum_of_block(r, b);
    return sum;
}

/* Of the logits >= least, the least one of which this holds: all larger ones together weigh less than `limit`. If
 * of_tokens, this is the limit-th largest. A negative limit is a share of the sum of all weights. Each of three passes
 * finds the next bits of the answer's key, by a histogram of the weights of those logits whose keys have the bits before. */
static float border(const row *r, double limit, float least) {
    static const int shifts[] = {32 - DIGIT_BITS, 32 - 2 * DIGIT_BITS, 0};
    uint32_t from = key_of(least), to = key_of(INFINITY), found = 0;
    double above = 0; /* what the logits with larger leading bits weigh */
    const int is_share = limit < 0;
    for (int pass = 0; pass < 3; pass++) {
        double sums[NUM_DIGITS] = {0};
        const int shift = shifts[pass];
        const float low = of_key(from), high = of_key(to);
        for (int64_t b = 0; b < r->num_blocks; b++) {
            if (r->largest[b] < low || keeps_none(r, b))
                continue;
            for (int64_t i = b * r->block_size; i < (b + 1) * r->block_size && i < r->size; i += LANES) {
                const vec logits = logits_at(r, i);
                uint32_t inside = bits_of((logits >= low) & (logits <= high));
                if (!inside)
                    continue;
                const keys digits = keys_of(logits) >> shift & (NUM_DIGITS - 1);
                const vec kept = weights_of(r, logits);
                uint32_t cells[LANES];
                float weights[LANES];
                memcpy(cells, &digits, sizeof(cells));
                put(weights, kept);
                if (r->floor > -INFINITY)
                    inside &= bits_of(kept > 0);
                for (; inside; inside &= inside - 1) {
                    const int l = __builtin_ctz(inside);
                    sums[cells[l]] += in_quanta(weights[l]);
                }
            }
        }
        if (pass == 0 && is_share) {
            double total = 0;
            for (int d = 0; d < NUM_DIGITS; d++)
                total += sums[d];
            limit *= -total;
        }
        int digit = NUM_DIGITS - 1;
        double sum = above;
        for (int d = NUM_DIGITS - 1; d >= 0 && sum < limit; d--)
            if (sums[d] > 0) {
                digit = d;
                above = sum;
                sum += sums[d];
            }
        found |= (uint32_t)digit << shift;
        const uint32_t last = found | ((UINT32_C(1) << shift) - 1);
        from = found > from ? found : from;
        to = last < to ? last : to;
    }
    return of_key(found);
}

static float kth_largest(const row *r, int64_t k) {
    row tokens = *r;
    tokens.of_tokens = 1;
    float least = -INFINITY;
    if (k < r->num_blocks) { /* k blocks have a logit that is not less than the k-th largest of their largest ones */
        const float largest = INFINITY;
        row blocks = tokens;
        blocks.logits = r->largest;
        blocks.largest = &largest;
        blocks.size = blocks.block_size = r->num_blocks;
        blocks.num_blocks = 1;
        least = border(&blocks, k, -INFINITY);
    }
    tokens.floor = least / r->temperature;
    return border(&tokens, k, least);
}

static float larger(float a, float b) { return a > b ? a : b; }

/* The least logit that is kept: all larger ones together are less than this share of the row. Where few blocks have a logit
 * near the largest one, these mostly suffice. Then the histogram is one of few tokens. */
static float border_of_share(const row *r, float share) {
    row near = *r;
    near.floor = larger(r->floor, r->max - NEAR);
    int64_t num_near = 0;
    for (int64_t b = 0; b < r->num_blocks; b++)
        num_near += !keeps_none(&near, b);
    if (2 * num_near < r->num_blocks) {
        const double limit = share * sum_of_row(r);
        if (sum_of_row(&near) >= limit)
            return border(&near, limit, -INFINITY);
    }
    return border(r, -share, -INFINITY);
}

/* A row and its blocks, of which the largest logits go to `largest`. max is not finite if nothing can be chosen. */
static row row_of(const float *logits, int64_t size, float temperature, float *largest) {
    row r = {.logits = logits, .largest = largest, .size = size, .block_size = BLOCK, .temperature = temperature};
    if (size > BLOCK * MAX_BLOCKS)
        r.block_size = (size / MAX_BLOCKS / LANES + 1) * LANES;
    r.num_blocks = (size + r.block_size - 1) / r.block_size;
    mask is_nan = {0};
    float max = -INFINITY;
    for (int64_t b = 0; b < r.num_blocks; b++) {
        vec best = in_all(-INFINITY);
        for (int64_t i = b * r.block_size; i < (b + 1) * r.block_size && i < size; i += LANES) {
            const vec now = logits_at(&r, i);
            is_nan |= now != now;
            best = larger_of(now, best);
        }
        largest[b] = -INFINITY;
        for (int l = 0; l < LANES; l++)
            largest[b] = larger(largest[b], best[l]);
        max = larger(max, largest[b]);
    }
    r.max = bits_of(is_nan) ? NAN : max / temperature;
    r.floor = -INFINITY;
    return r;
}

static int64_t draw_one(const draw_args *a, int64_t at) {
    float largest[MAX_BLOCKS];
    double sums[MAX_BLOCKS], total = 0;
    row r = row_of(a->logits + a->rows[at] * a->size, a->size, a->temperature[at], largest);
    if (!(r.max > -INFINITY && r.max < INFINITY))
        return -1;
    r.floor = r.max + a->log_min_p[at];
    const int64_t top_k = a->top_k[at];
    if (top_k > 0 && top_k < r.size)
        r.floor = larger(r.floor, kth_largest(&r, top_k) / r.temperature);
    if (a->top_p[at] < 1)
        r.floor = larger(r.floor, border_of_share(&r, a->top_p[at]) / r.temperature);

    for (int64_t b = 0; b < r.num_blocks; b++) {
        sums[b] = keeps_none(&r, b) ? 0 : sum_of_block(&r, b);
        total += sums[b];
    }
    const double target = a->noise[at] * total;
    double sum = 0;
    int64_t b = 0;
    while (sum + sums[b] <= target)
        sum += sums[b++];
    int64_t token_id = -1;
    for (int64_t i = b * r.block_size; i < r.size; i += LANES) {
        float weights[LANES];
        put(weights, weights_of(&r, logits_at(&r, i)));
        for (int l = 0; l < LANES; l++) {
            const double weight = in_quanta(weights[l]);
            if (weight > 0)
                token_id = i + l;
            if ((sum += weight) > target)
                return token_id;
        }
    }
    return token_id; /* of more than 2^19 tokens, of which so many weigh 1 that a sum leaves others out */
}

static void draw_rows(const void *args, int64_t first, int64_t end) {
    const draw_args *a = args;
    for (int64_t at = first; at < end; at++)
        a->token_ids[a->rows[at]] = draw_one(a, at);
}

/* token_ids of rows: the first token in the vocabulary's order with which the weights of all that are kept add up to more
 * than noise times their sum; -1 for a row that holds NaN or infinity, or nothing but -infinity. */
void draw(const draw_args *args) { parallel_for(draw_rows, args, args->num_rows, rows_a_chunk(args->size)); }

enum { MOST_TOP = 64 };

typedef struct {
    int64_t num_rows;
    double *totals;         /* [num_rows]: the logarithm of the sum of exp(logit) */
    int64_t *ranks;         /* [num_rows]: of the chosen token; 1 is the most likely one */
    int64_t *top;           /* [num_rows][num_top]: the most likely tokens; of equally likely ones the first come first */
    const float *logits;    /* [rows of the logits][size] */
    const int64_t *rows;    /* [num_rows] */
    const int64_t *chosen;  /* [num_rows]: tokens */
    int64_t num_top, size;  /* num_top <= MOST_TOP and <= size */
} score_args;

/* The sum of exp(logit - max), in the order that sum_of() has. What is less than exp(-30) counts as 0: so tokens that are
 * forbidden, and lanes beyond the row's end, change nothing. */
static double sum_of_exp(const row *r) {
    double partial[PARTIAL_SUMS] = {0};
    for (int64_t i = 0; i < r->size; i += LANES) {
        float e[LANES];
        const vec x = logits_at(r, i) - r->max;
        put(e, choose(x < -30.0f, in_all(0), exp_in_steps(x)));
        for (int l = 0; l < LANES; l++)
            partial[(i + l) % PARTIAL_SUMS] += e[l];
    }
    for (int half = PARTIAL_SUMS / 2; half; half /= 2)
        for (int j = 0; j < half; j++)
            partial[j] += partial[j + half];
    return partial[0];
}

/* The num_top largest logits' tokens. */
static void top_tokens(const row *r, int64_t num_top, int64_t *top) {
    const float least = kth_largest(r, num_top);
    int64_t num_larger = 0, num_equal = 0, equal[MOST_TOP];
    for (int64_t b = 0; b < r->num_blocks; b++)
        for (int64_t i = b * r->block_size; r->largest[b] >= least && i < (b + 1) * r->block_size && i < r->size; i++) {
            const float x = r->logits[i];
            if (x > least) {
                int64_t at = num_larger++;
                for (; at > 0 && r->logits[top[at - 1]] < x; at--)
                    top[at] = top[at - 1];
                top[at] = i;
            } else if (x == least && num_equal < num_top) {
                equal[num_equal++] = i;
            }
        }
    memcpy(top + num_larger, equal, (num_top - num_larger) * sizeof(*top));
}

static void score_some(const void *args, int64_t first, int64_t end) {
    const score_args *a = args;
    for (int64_t at = first; at < end; at++) {
        float largest[MAX_BLOCKS];
        const row r = row_of(a->logits + a->rows[at] * a->size, a->size, 1, largest);
        int64_t *top = a->top + at * a->num_top;
        a->totals[at] = NAN;
        a->ranks[at] = 1;
        memset(top, 0, a->num_top * sizeof(*top));
        if (!(r.max > -INFINITY && r.max < INFINITY))
            continue;
        a->totals[at] = r.max + log(sum_of_exp(&r));
        const float chosen = r.logits[a->chosen[at]];
        for (int64_t b = 0; b < r.num_blocks; b++)
            for (int64_t i = b * r.block_size; largest[b] > chosen && i < (b + 1) * r.block_size && i < r.size; i += LANES)
                a->ranks[at] += __builtin_popcount(bits_of(logits_at(&r, i) > chosen));
        if (a->num_top > 0)
            top_tokens(&r, a->num_top, top);
    }
}

void score_rows(const score_args *args) { parallel_for(score_some, args, args->num_rows, rows_a_chunk(args->size)); }
