/* Rounding weights to 4 bits by search (chapter 12). A part of quantized.c. q4_1_search.py has the
 * same in PyTorch, and says why.
 *
 * For each group of 32 weights, CUTS times CUTS ranges are tried, cut at both ends, then those half a step around the best
 * one. For the codes that a range gives, the best scale and minimum are those of a weighted straight line through the points
 * (code, weight), for which three sums over the group are enough. The best line is tried as a range, too, REFINEMENTS times.
 *
 * LANES rows are searched side by side, each in a lane of the vectors.
 */
enum { CUTS = 4, COARSE = CUTS * CUTS, FINE = 3 * 3, REFINEMENTS = 2 };
static const float FIRST_CUT = -0.01f, CUT_STEP = 0.05f; /* of the distance from smallest to largest */

/* quantized_kernels.py has the same fields in the same order. */
typedef struct {
    uint8_t *codes;           /* [n][k / 32][16] */
    float *scales, *minimums; /* [n][k / 32]: numbers that float16 has */
    const float *weight;      /* [n][k], finite; k is a multiple of 32 */
    const float *importance;  /* [k]: of the squared error of each input's weights; positive somewhere in each group */
    int64_t n, k;
} search_args;

static inline vec inverse(vec x) { return choose(x > 1e-30f, 1 / choose(x > 1e-30f, x, x * 0 + 1), x * 0); }

static inline vec nearest_code(vec x) { /* x >= 0 after the first line: to an integer is to round down */
    x = choose(x > 0, x, x * 0) + 0.5f;
    x = choose(x < 15.5f, x, x * 0 + 15.5f);
    return __builtin_convertvector(__builtin_convertvector(x, mask), vec);
}

static float as_half(float x) { /* the nearest float16 that is finite: a fitted line may lead beyond all weights */
    uint32_t bits;
    x = x > 65504 ? 65504 : x < -65504 ? -65504 : x;
    if (fabsf(x) < 0x1p-14f) /* a denormal */
        return rintf(x * 0x1p24f) * 0x1p-24f;
    memcpy(&bits, &x, 4);
    bits = (bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu; /* 10 bits of the fraction; ties to even */
    memcpy(&x, &bits, 4);
    return x;
}

typedef struct {
    vec scale, minimum, error, codes[GROUP_SIZE];
} rounding;

/* The nearest codes, with scale and minimum as they are stored. */
static inline void round_groups(rounding *r, const vec *x, const float *w, vec scale, vec minimum) {
    for (int l = 0; l < LANES; l++) {
        r->scale[l] = as_half(scale[l]);
        r->minimum[l] = as_half(minimum[l]);
    }
    const vec per_step = inverse(r->scale);
    r->error = (vec){0};
    for (int i = 0; i < GROUP_SIZE; i++) {
        r->codes[i] = nearest_code((x[i] - r->minimum) * per_step);
        const vec difference = r->codes[i] * r->scale + r->minimum - x[i];
        r->error += w[i] * difference * difference;
    }
}

/* Group g of LANES rows from row first. After row n the last one is repeated. */
static void search_groups(const search_args *a, int64_t first, int64_t g) {
    const float *w = a->importance + g * GROUP_SIZE;
    vec x[GROUP_SIZE], centred[GROUP_SIZE], smallest, largest, mean = {0};
    float total = 0;
    for (int i = 0; i < GROUP_SIZE; i++) {
        for (int l = 0; l < LANES; l++)
            x[i][l] = a->weight[(first + l < a->n ? first + l : a->n - 1) * a->k + g * GROUP_SIZE + i];
        smallest = i ? choose(x[i] < smallest, x[i], smallest) : x[i];
        largest = i ? choose(x[i] > largest, x[i], largest) : x[i];
        mean += w[i] * x[i];
        total += w[i];
    }
    mean /= total;
    for (int i = 0; i < GROUP_SIZE; i++)
        centred[i] = x[i] - mean; /* sums of products with small numbers lose less */
    const vec low = smallest - mean, width = largest - smallest;
    vec best_scale = width / 15, best_minimum = low, best_gain = {0}, cut[2] = {{0}}, centre[2] = {{0}};
    for (int trial = 0; trial < COARSE + FINE + REFINEMENTS; trial++) {
        vec scale = best_scale, minimum = best_minimum, tried[2] = {{0}};
        const int fine = trial - COARSE;
        if (fine == 0)
            memcpy(centre, cut, sizeof(centre));
        if (fine < FINE) {
            for (int end = 0; end < 2; end++)
                tried[end] = fine < 0 ? FIRST_CUT + CUT_STEP * (end ? trial % CUTS : trial / CUTS) + (vec){0}
                                      : centre[end] + CUT_STEP / 2 * ((end ? fine % 3 : fine / 3) - 1);
            scale = width * (1 - tried[0] - tried[1]) / 15;
            minimum = low + width * tried[0];
        }
        const vec per_step = inverse(scale), zero = -minimum * per_step; /* the code that would stand for the mean */
        vec sum = {0}, squares = {0}, products = {0};
        for (int i = 0; i < GROUP_SIZE; i++) {
            const vec q = nearest_code(centred[i] * per_step + zero) - zero;
            sum += w[i] * q;
            squares += w[i] * q * q;
            products += w[i] * q * centred[i];
        }
        const vec variance = squares - sum * sum / total;
        const mask usable = variance > 1e-5f * squares; /* else all codes are the same */
        scale = products / choose(usable, variance, variance * 0 + 1);
        const vec gain = choose(usable, scale * products, variance * 0); /* how far below that of the mean the error is */
        const mask better = gain > best_gain;
        best_minimum = choose(better, -scale * (sum / total + zero), best_minimum);
        best_scale = choose(better, scale, best_scale);
        best_gain = choose(better, gain, best_gain);
        for (int end = 0; end < 2 && fine < 0; end++)
            cut[end] = choose(better, tried[end], cut[end]);
    }
    rounding nearest, found;
    round_groups(&nearest, x, w, (largest - smallest) / 15, smallest); /* the whole range: what nearest rounding takes */
    round_groups(&found, x, w, best_scale, best_minimum + mean);
    for (int l = 0; l < LANES && first + l < a->n; l++) {
        const int64_t at = (first + l) * (a->k / GROUP_SIZE) + g;
        const rounding *r = found.error[l] < nearest.error[l] ? &found : &nearest;
        a->scales[at] = r->scale[l];
        a->minimums[at] = r->minimum[l];
        for (int i = 0; i < GROUP_SIZE / 2; i++)
            a->codes[at * GROUP_SIZE / 2 + i] = (int)r->codes[i][l] | (int)r->codes[i + GROUP_SIZE / 2][l] << 4;
    }
}

static void search_rows(const void *args, int64_t first, int64_t end) {
    const search_args *a = args;
    for (int64_t block = first; block < end; block++)
        for (int64_t g = 0; g < a->k / GROUP_SIZE; g++)
            search_groups(a, block * LANES, g);
}

void search_q4_1(const search_args *args) { parallel_for(search_rows, args, (args->n + LANES - 1) / LANES, 1); }
