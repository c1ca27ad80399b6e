/* Prints a digest of what each kernel computes from fixed inputs. test_digests.py compiles it for several processors, and
 * all must print the same. No pool, no files, no clock: it runs under an emulator and as WebAssembly, too. */
#include "../../../nanovllm/worker/cpu/kernels.c"
#include "../../../nanovllm/worker/cpu/heads.c"
#include "../../../nanovllm/features/experts/experts.c"
#include "../../../nanovllm/features/hybrid/delta_rule.c"
#include "../../../nanovllm/features/lora/adapters.c"
#include "../../../nanovllm/features/quantization/quantized.c"

#include <stdio.h>
#include <stdlib.h>
#ifdef _WIN32
#include <malloc.h>
#define aligned_alloc(alignment, bytes) _aligned_malloc(bytes, alignment)
#endif

static void in_this_thread(work_function *work, const void *args, int64_t num_items, int64_t min_chunk) {
    for (int64_t i = 0; i < num_items; i += min_chunk) /* in chunks, as the pool's threads claim them */
        work(args, i, i + min_chunk < num_items ? i + min_chunk : num_items);
}

static uint64_t state, digest;

static uint32_t random_bits(void) { /* Knuth's MMIX */
    state = state * 6364136223846793005u + 1442695040888963407u;
    return state >> 40; /* 24 bits */
}
static float random_float(float range) { return ((int32_t)random_bits() - (1 << 23)) * (range / (1 << 23)); }

static void *space(int64_t bytes) { /* zeros, aligned as PyTorch's */
    const int64_t rounded = (bytes / 64 + 2) * 64;
    return memset(aligned_alloc(64, rounded), 0, rounded);
}
static num *nums(int64_t count, float range) {
    num *x = space(count * sizeof(num));
    for (int64_t i = 0; i < count; i++)
        x[i] = store(random_float(range));
    return x;
}

static void add_byte(uint8_t byte) { digest = (digest ^ byte) * 0x100000001b3u; } /* FNV-1a */
static void add_bits(uint32_t bits, int bytes) {
    for (int i = 0; i < bytes; i++)
        add_byte(bits >> 8 * i);
}
static void add_floats(const float *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        add_bits(x[i] != x[i] ? 0x7fc00000 : bits, 4); /* which NaN it is differs */
    }
}
static void add_nums(const num *x, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        const float value = load(x[i]);
        add_floats(&value, 1);
    }
}
static void show(const char *name) {
    printf("%s %016llx\n", name, (unsigned long long)digest);
    digest = 0xcbf29ce484222325u;
    state = 1;
}

/* Numbers from the smallest to the largest, by their bits. */
static void show_numbers(void) {
    for (uint32_t i = 0; i < 1 << 20; i++) {
        const uint32_t bits = 0x80000000u | (uint32_t)((uint64_t)i * 0x43000000u >> 20); /* 0 to -128 */
        float x[LANES] = {0};
        memcpy(x, &bits, 4);
        put(x, exp_negative(vec_from(x)));
        add_floats(x, 1);
    }
    for (int i = 0; i < 1 << 20; i++) {
        uint32_t bits[3];
        float x[3];
        for (int j = 0; j < 3; j++)
            bits[j] = (random_bits() << 12 | random_bits() >> 4) & (j < 2 ? 0xbfffffff : 0xffffffff);
        memcpy(x, bits, sizeof(x));
        const vec y = fused((vec){0} + x[0], (vec){0} + x[1], (vec){0} + x[2]);
        float lanes[LANES];
        put(lanes, y);
        add_floats(lanes, 1);
        const float one = fused_float(x[0], x[1], x[2]);
        add_floats(&one, 1);
    }
    show("numbers");
}

static void show_small_operations(void) {
    const int64_t sizes[] = {64, 576, 37};
    for (int i = 0; i < 3; i++) {
        const int64_t size = sizes[i], rows = 3;
        num *residual = nums(rows * size, 3), *out = nums(rows * size, 1), *gate_up = nums(rows * 2 * size, 20);
        add_rms_norm(&(norm_args){rows, out, residual, nums(rows * size, 2), nums(size, 2), 1, size, size, size, 1e-5f, 0});
        add_nums(out, rows * size);
        add_nums(residual, rows * size);
        silu_and_mul(&(silu_args){rows, out, gate_up, size});
        add_nums(out, rows * size);
        const int64_t places[] = {4, 0, 1, 5, 3, 2};
        const float weights[] = {0.3f, 0.7f, 0.9f, 0.2f, 0.11f, 1.7f};
        weighted_sum(&(sum_args){rows, out, gate_up, places, weights, 2, size});
        add_nums(out, rows * size);
        float of_experts[6];
        int64_t chosen[6];
        route(&(route_args){2, of_experts, chosen, gate_up, size, 3, i % 2});
        add_floats(of_experts, 6);
        for (int j = 0; j < 6; j++)
            add_bits((uint32_t)chosen[j], 4);
    }
    show("small");
}

/* Prompts and decodes of two sequences, with a window and without; parts of the keys side by side and not. */
static void show_attention(void) {
    enum { BLOCK = 16, BLOCKS = 48, HEADS = 2, SEQS = 2, KEYS = 700, ROWS_OF_STEP = TASK_ROWS + 3 };
    const int64_t block_numbers = HEADS * BLOCK * KV_SIZE, q_stride = HEADS * (GROUP + 2) * HEAD_DIM;
    kv_num *k_cache = space(BLOCKS * block_numbers * sizeof(kv_num)), *v_cache = space(BLOCKS * block_numbers * sizeof(kv_num));
    int32_t tables[SEQS][BLOCKS];
    for (int b = 0; b < BLOCKS; b++)
        tables[0][b] = b * 5 % BLOCKS, tables[1][b] = b * 7 % BLOCKS;
    num *cos = nums(BLOCK * BLOCKS * HEAD_DIM / 2, 1), *sin = nums(BLOCK * BLOCKS * HEAD_DIM / 2, 1);
    int64_t slots[BLOCK * BLOCKS];
    for (int i = 0; i < BLOCK * BLOCKS; i++)
        slots[i] = i;
    num *qkv = nums(BLOCK * BLOCKS * q_stride, 1), *k = qkv + HEADS * GROUP * HEAD_DIM, *v = k + HEADS * HEAD_DIM;
    rotary_and_write(&(rotary_args){BLOCK * BLOCKS, qkv, k, v, cos, sin, slots, k_cache, v_cache, q_stride, q_stride,
                                    q_stride, block_numbers, HEADS, BLOCK});
    const attention_task tasks[] = {{0, TASK_ROWS, 0, KEYS - TASK_ROWS},
                                    {TASK_ROWS, 1, 1, KEYS},
                                    {TASK_ROWS + 1, 1, 0, 70},
                                    {TASK_ROWS + 2, 1, 1, 1}};
    const int64_t part_counts[] = {1, 3}, windows[] = {0, 100};
    num *out = space(ROWS_OF_STEP * HEADS * GROUP * HEAD_DIM * sizeof(num));
    partial *scratch = space(4 * HEADS * 3 * TASK_ROWS * GROUP * sizeof(partial));
    for (int i = 0; i < 4; i++) {
        const attention_step step = {tables[0], tasks, scratch, BLOCKS, 4, part_counts[i % 2], TASK_ROWS};
        paged_attention(&(attention_args){ROWS_OF_STEP, out, qkv, k_cache, v_cache, &step, q_stride, block_numbers, BLOCK,
                                          HEADS, windows[i / 2], 0.125f});
        add_nums(out, ROWS_OF_STEP * HEADS * GROUP * HEAD_DIM);
    }
    show("attention");
}

static void show_products(void) {
    const int64_t counts[] = {1, 5, 33}, n = 101, k = 300;
    num *reordered = space(reordered_size(n, k) * sizeof(num)), *weight = nums(n * k, 1);
    const num *weights[] = {reordered};
    if (!reorder_rows(reordered, weight, 0, n, k))
        exit(1);
    for (int i = 0; i < 3; i++) {
        num *out = space(counts[i] * n * sizeof(num));
        const num *x = nums(counts[i] * k, 1), *bias = i % 2 ? nums(n, 1) : NULL;
        linear(&(linear_args){counts[i], out, NULL, x, weights, bias, NULL, NULL, 1, n, k});
        add_nums(out, counts[i] * n);
    }
    const int64_t ranks[] = {5}, ends[] = {n}, padded = (k + 15) / 16 * 16;
    const adapter_task tasks[] = {{0, 3, {0, 2, 4}}, {0, 1, {1}}};
    num *y = nums(5 * n, 1), *a = space(5 * padded * sizeof(num)), *in_rows = nums(5 * k, 1);
    for (int64_t j = 0; j < 5; j++)
        memcpy(a + j * padded, in_rows + j * k, k * sizeof(num));
    add_adapters(&(adapter_args){y, NULL, nums(5 * k, 1), a, nums(5 * n + 16, 1), ranks, ends, tasks, 1, 5, n, k, padded, k}, 2);
    add_nums(y, 5 * n);
    show("products");
}

/* Products of 1, 2 and 50 rows with a weight [n][k]. order: see quantized_part. */
static void add_products(int format, int64_t n, int64_t k, int64_t num_groups, const int32_t *order) {
    const int64_t group_bytes[] = {34, 18, 20, 36}, counts[] = {1, 2, 50}, num_blocks = (n + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t block_bytes = num_groups * BLOCK_ROWS * group_bytes[format];
    uint8_t *blocks = space(num_blocks * block_bytes);
    for (int64_t i = 0; i < num_blocks * block_bytes; i++)
        blocks[i] = random_bits() >> 9;
    for (int64_t g = 0; g < num_blocks * num_groups; g++) /* scales and minimums: halves from 2^-7 to 2^-5, or negative */
        for (int i = 0; i < BLOCK_ROWS * (format == Q4_1 || format == Q8_M ? 2 : 1); i++) {
            const uint16_t half = 0x2000 | (random_bits() & 0x87ff);
            memcpy(blocks + g * BLOCK_ROWS * group_bytes[format] + 2 * i, &half, 2);
        }
    const quantized_part part = {blocks, order, block_bytes, format, n, num_groups}, *weights[] = {&part};
    for (int i = 0; i < 3; i++) {
        num *out = space(counts[i] * n * sizeof(num)), *bias = nums(n, 1);
        quantized_linear(&(quantized_args){counts[i], out, NULL, nums(counts[i] * k, 2), bias,
                                           space(x_groups_bytes(num_groups)), weights, NULL, NULL, 1, 1, n, k, k});
        add_nums(out, counts[i] * n);
    }
}

static void show_quantized(void) {
    enum { N = 70, K = 260, GROUPS = 9, K_PADDED = GROUPS * GROUP_SIZE };
    float *weight = space(N * K_PADDED * 4), *importance = space(K_PADDED * 4);
    for (int64_t i = 0; i < N * K_PADDED; i++)
        weight[i] = random_float(1);
    for (int64_t i = 0; i < K_PADDED; i++)
        importance[i] = 1.5f + random_float(1);
    uint8_t *codes = space(N * GROUPS * 16);
    float *scales = space(N * GROUPS * 4), *minimums = space(N * GROUPS * 4);
    search_q4_1(&(search_args){codes, scales, minimums, weight, importance, N, K_PADDED});
    for (int i = 0; i < N * GROUPS * 16; i++)
        add_byte(codes[i]);
    add_floats(scales, N * GROUPS);
    add_floats(minimums, N * GROUPS);
    show("rounding");
    for (int format = Q8_0; format <= Q4_1; format++)
        add_products(format, N, K, GROUPS, NULL);
    show("quantized");
}

/* 8 bits with a minimum; inputs that are gathered, some places without one. */
static void show_published(void) {
    enum { N = 70, K = 200, GROUPS = 9 };
    int32_t order[GROUPS * GROUP_SIZE];
    for (int i = 0; i < GROUPS * GROUP_SIZE; i++)
        order[i] = i % 7 ? (i * 37) % K : -1;
    add_products(Q8_M, N, GROUPS * GROUP_SIZE, GROUPS, NULL);
    add_products(Q4_1, N, K, GROUPS, order);
    show("published");
}

/* The output head: what the three products compute, not rounded to num, and which token is chosen. */
static void show_logits(void) {
    enum { N = 101, K = 300, M = 5, GROUPS = 10, NUM_BLOCKS = 4, BLOCK_BYTES = GROUPS * BLOCK_ROWS * 34 };
    num *reordered = space(reordered_size(N, K) * sizeof(num)), *weight = nums(N * K, 1), *x = nums(M * K, 1);
    const num *weights[] = {reordered};
    float *logits = space(M * N * 4);
    int64_t token_ids[M];
    reorder_rows(reordered, weight, 0, N, K);
    linear(&(linear_args){M, NULL, logits, x, weights, nums(N, 1), NULL, NULL, 1, N, K});
    add_floats(logits, M * N);
    const int64_t ranks[] = {1}, ends[] = {N}, padded = (K + 15) / 16 * 16;
    const adapter_task tasks[] = {{0, 2, {0, 3}}};
    num *a = space(padded * sizeof(num));
    memcpy(a, weight, K * sizeof(num));
    add_adapters(&(adapter_args){NULL, logits, x, a, nums(N + 16, 1), ranks, ends, tasks, 1, 1, N, K, padded, K}, 1);
    add_floats(logits, M * N);
    most_likely(&(choice_args){M, token_ids, logits, N});
    for (int i = 0; i < M; i++)
        add_bits((uint32_t)token_ids[i], 4);
    uint8_t *blocks = space(NUM_BLOCKS * BLOCK_BYTES);
    for (int64_t i = 0; i < NUM_BLOCKS * BLOCK_BYTES; i++)
        blocks[i] = random_bits() >> 9;
    for (int64_t g = 0; g < NUM_BLOCKS * GROUPS; g++)
        for (int i = 0; i < BLOCK_ROWS; i++) {
            const uint16_t half = 0x2000 | (random_bits() & 0x87ff);
            memcpy(blocks + g * BLOCK_ROWS * 34 + 2 * i, &half, 2);
        }
    const quantized_part part = {blocks, NULL, BLOCK_BYTES, Q8_0, N, GROUPS}, *parts[] = {&part};
    quantized_linear(&(quantized_args){M, NULL, logits, x, NULL, space(x_groups_bytes(GROUPS)), parts, NULL, NULL, 1, 1,
                                       N, K, K});
    add_floats(logits, M * N);
    show("logits");
}

/* Tokens that are drawn, and what log probabilities need. Rows whose last vector is not full, ties, and forbidden tokens. */
static void show_sampling(void) {
    enum { ROWS = 8, DRAWS = 64, MOST = 5003, TOP = 6 };
    const int64_t sizes[] = {1, 7, 17, 300, 4096, MOST};
    const float temperatures[] = {1, 0.3f, 0.7f, 1.7f, 12, 1e-3f}, top_ps[] = {1, 0.95f, 0.5f, 0.01f};
    const float log_min_ps[] = {-INFINITY, -5.5f, -1};
    float *logits = space(ROWS * MOST * 4), temperature[DRAWS], top_p[DRAWS], log_min_p[DRAWS];
    double noise[DRAWS], totals[ROWS];
    int64_t rows[DRAWS], top_k[DRAWS], token_ids[ROWS], chosen[ROWS], ranks[ROWS], top[ROWS * TOP];
    for (int s = 0; s < 6; s++) {
        const int64_t size = sizes[s], num_top = size < TOP ? size : TOP;
        for (int64_t i = 0; i < ROWS * size; i++) {
            const float x = random_float(9);
            logits[i] = i % 3 ? x : random_bits() % 8 ? (float)(int32_t)x : -INFINITY;
        }
        for (int64_t r = 0; r < ROWS; r++)
            logits[r * size + r % size] = 0.5f * r;
        for (int i = 0; i < DRAWS; i++) {
            rows[i] = i * 5 % ROWS;
            temperature[i] = temperatures[random_bits() % 6];
            top_k[i] = random_bits() % 3 ? 0 : random_bits() % (size + 2);
            top_p[i] = top_ps[random_bits() % 4];
            log_min_p[i] = log_min_ps[random_bits() % 3];
            noise[i] = random_bits() * 0x1p-24;
        }
        for (int i = 0; i < DRAWS; i += ROWS) { /* each of which has all rows */
            draw(&(draw_args){ROWS, token_ids, logits, rows + i, temperature + i, top_k + i, top_p + i, log_min_p + i,
                              noise + i, size});
            for (int r = 0; r < ROWS; r++)
                add_bits((uint32_t)token_ids[r], 4);
        }
        for (int r = 0; r < ROWS; r++)
            chosen[r] = random_bits() % size;
        score_rows(&(score_args){ROWS, totals, ranks, top, logits, rows, chosen, num_top, size});
        for (int r = 0; r < ROWS; r++) {
            float largest[MAX_BLOCKS];
            const row of = row_of(logits + rows[r] * size, size, 1, largest);
            const double sum = sum_of_exp(&of); /* logarithms come from C libraries, which round the last bit differently */
            uint64_t bits;
            memcpy(&bits, &sum, 8);
            add_bits((uint32_t)bits, 4);
            add_bits((uint32_t)(bits >> 32), 4);
            const float total = (float)totals[r];
            add_floats(&total, 1);
            add_bits((uint32_t)ranks[r], 4);
        }
        for (int i = 0; i < ROWS * num_top; i++)
            add_bits((uint32_t)top[i], 4);
    }
    show("sampling");
}

/* A prompt that leaves a snapshot, one that begins there, guesses into the log, and rows of the log. */
static void show_delta_net(void) {
    enum { SLOTS = 4, ROWS = 14, HEADS = 2, KEY_DIM = 18, VALUE_DIM = 23, KERNEL = 4, LOGGED = 2 };
    const int64_t conv = HEADS * (2 * KEY_DIM + 2 * VALUE_DIM), log = conv + 4 * HEADS, row = log + 2 * HEADS * VALUE_DIM;
    const int64_t state = 2 * HEADS * 32 * 20, in_all = ROWS + LOGGED;
    const delta_segment segments[] = {{-1, 1, 0, 0, 0, 0, 5, 0}, {1, 0, 0, 0, 0, 5, 3, 0}, {1, 2, 2, 0, 0, 8, 1, 0},
                                      {2, -1, 2, 0, 0, 9, 3, 1}, {2, 3, 2, 1, LOGGED, 12, 2, 0}};
    const delta_step step = {segments, 5, LOGGED};
    delta_args a = {ROWS, space(ROWS * 2 * HEADS * VALUE_DIM * sizeof(num)), nums(ROWS * row, 1),
                    space(SLOTS * state * 4), nums(SLOTS * 3 * conv, 1), nums(SLOTS * 3 * log, 1)};
    float *parts[] = {space((KERNEL * conv + COLUMNS) * 4), space(2 * HEADS * 4), space(2 * HEADS * 4),
                      space((VALUE_DIM + COLUMNS) * 4)};
    const int64_t sizes[] = {KERNEL * conv, 2 * HEADS, 2 * HEADS, VALUE_DIM};
    for (int part = 0; part < 4; part++)
        for (int64_t i = 0; i < sizes[part]; i++)
            parts[part][i] = part == 1 ? -1 - random_float(1) : random_float(1);
    a.conv = parts[0], a.a = parts[1], a.dt_bias = parts[2], a.norm = parts[3], a.step = &step, a.eps = 1e-6f;
    a.keys = space(in_all * 2 * HEADS * 20 * 4), a.values = space(in_all * 2 * HEADS * 32 * 4);
    a.gates = space(in_all * 4 * HEADS * 4), a.outputs = space(ROWS * 2 * HEADS * 32 * 4);
    a.x_stride = row, a.state_stride = state, a.window_stride = 3 * conv, a.log_stride = 3 * log;
    a.key_heads = HEADS, a.value_heads = 2 * HEADS, a.key_dim = KEY_DIM, a.value_dim = VALUE_DIM, a.kernel_size = KERNEL;
    delta_net(&a);
    add_nums(a.out, ROWS * 2 * HEADS * VALUE_DIM);
    add_floats(a.states, SLOTS * state);
    add_nums(a.windows, SLOTS * 3 * conv);
    add_nums(a.log, SLOTS * 3 * log);
    const gate_args gate = {ROWS, a.out, nums(ROWS * 46, 2), nums(ROWS * 46, 9), 2, VALUE_DIM, 46, VALUE_DIM};
    multiply_by_gate(&gate);
    add_nums(a.out, ROWS * 46);
    add_gated(&(gate_args){ROWS, a.out, gate.x, gate.gate, 1, 46, 46, 0});
    add_nums(a.out, ROWS * 46);
    show("delta");
}

int main(void) {
    parallel_for = in_this_thread;
    digest = 0xcbf29ce484222325u;
    state = 1;
    show_numbers();
    show_small_operations();
    show_attention();
    show_products();
    show_quantized();
    show_delta_net();
    show_logits();
    show_sampling();
    show_published();
    return 0;
}
