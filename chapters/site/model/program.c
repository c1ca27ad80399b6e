/* The engine's C kernels as a WebAssembly program for a page. image.py says what lies where in its memory. */
#include "kernels.c"
#include "quantized.c"
#include "heads.c"

/* A page has one thread. */
static void compute(work_function *work, const void *args, int64_t num_items, int64_t min_chunk) {
    (void)min_chunk;
    work(args, 0, num_items);
}
void (*parallel_for)(work_function *work, const void *args, int64_t num_items, int64_t min_chunk) = compute;

/* Rows of an embedding table with weights of few bits: what quantized_lookup() of features/quantization/formats.py does. */
void look_up(num *out, const quantized_part *table, const int64_t *rows, int64_t num_rows, int64_t k) {
    const int bits = table->format == Q8_0 ? 8 : 4, zero = table->format == Q8_0 ? 128 : table->format == Q4_0 ? 8 : 0;
    const int64_t numbers = table->format == Q4_1 ? 2 : 1, group_bytes = BLOCK_ROWS * (2 * numbers + GROUP_SIZE * bits / 8);
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t i = 0; i < k; i++) {
            const int64_t row = rows[r] % BLOCK_ROWS, at = bits == 8 ? i % GROUP_SIZE : i % (GROUP_SIZE / 2);
            const uint8_t *group = table->blocks + rows[r] / BLOCK_ROWS * table->block_bytes + i / GROUP_SIZE * group_bytes;
            const uint8_t byte = (group + 2 * BLOCK_ROWS * numbers)[4 * (at / 4 * BLOCK_ROWS + row) + at % 4];
            const int code = bits == 8 ? byte : i % GROUP_SIZE < GROUP_SIZE / 2 ? byte & 15 : byte >> 4;
            uint16_t halves[2][WIDTH] = {{0}}; /* scale and minimum */
            for (int n = 0; n < numbers; n++)
                halves[n][0] = ((const uint16_t *)group)[n * BLOCK_ROWS + row];
            out[r * k + i] = store((code - zero) * from_halves(halves[0])[0] + from_halves(halves[1])[0]);
        }
}
