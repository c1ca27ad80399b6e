/* Activations in groups, as products with quantized weights read them (chapter 12). A part of quantized.c. */
enum { Q8_0, Q4_0, Q4_1, Q8_M, NUM_FORMATS }; /* the order of FORMATS in features/quantization/formats.py */
enum { GROUP_SIZE = 32 };

/* 32 numbers of a row: scale * x. */
typedef struct {
    int8_t x[GROUP_SIZE];
    float scale, scaled_sum;      /* scale * sum of x */
    int32_t offsets[NUM_FORMATS]; /* -zero * sum of x, for each format */
} x_group;

static void quantize_group(x_group *group, const num *x, int64_t count) {
    num padded[GROUP_SIZE];
    float numbers[GROUP_SIZE], largest;
    uint32_t largest_bits = 0;
    if (count < GROUP_SIZE)
        x = memcpy(memset(padded, 0, sizeof(padded)), x, count * sizeof(num));
    for (int i = 0; i < GROUP_SIZE; i++) { /* as integers, magnitudes are in the same order, and NaN is the largest */
        uint32_t bits;
        numbers[i] = load(x[i]);
        memcpy(&bits, &numbers[i], 4);
        largest_bits = (bits & 0x7fffffff) > largest_bits ? bits & 0x7fffffff : largest_bits;
    }
    memcpy(&largest, &largest_bits, 4);
    const int finite = largest_bits < 0x7f800000;
    double scale = 0, inverse = 0; /* double: rounded to float32 they are right, however a compiler divides */
    if (finite && largest >= 0x1p-100f)
        scale = largest / 127.0, inverse = 127.0 / largest;
    int32_t sum = 0;
    for (int i = 0; i < GROUP_SIZE; i++) {
        const int32_t q = (int32_t)rintf(numbers[i] * (float)inverse);
        group->x[i] = (int8_t)q;
        sum += q;
    }
    group->scale = (float)scale;
    if (!finite)
        group->scale = NAN;
    group->scaled_sum = group->scale * (float)sum;
    group->offsets[Q8_0] = group->offsets[Q8_M] = SIGNED_CODES ? 0 : -128 * sum;
    group->offsets[Q4_0] = -8 * sum;
    group->offsets[Q4_1] = 0;
}
