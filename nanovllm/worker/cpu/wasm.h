/* What vectors.h and features/quantization/integers.h want of WebAssembly, whose vectors have four numbers, and which cannot fuse a product and
 * a sum. */
#include <wasm_simd128.h>

/* a * b + c of the lower two lanes, rounded once. As fused_float() computes it. */
static inline v128_t two_fused(v128_t a, v128_t b, v128_t c) {
    const v128_t product = wasm_f64x2_mul(wasm_f64x2_promote_low_f32x4(a), wasm_f64x2_promote_low_f32x4(b));
    const v128_t added = wasm_f64x2_promote_low_f32x4(c), zero = wasm_i64x2_const_splat(0);
    const v128_t sum = wasm_f64x2_add(product, added), back = wasm_f64x2_sub(sum, product);
    const v128_t error = wasm_f64x2_add(wasm_f64x2_sub(product, wasm_f64x2_sub(sum, back)), wasm_f64x2_sub(added, back));
    const v128_t side = wasm_f64x2_mul(sum, error), too_large = wasm_f64x2_lt(side, zero);
    const v128_t inexact = wasm_v128_and(wasm_v128_or(too_large, wasm_f64x2_gt(side, zero)), wasm_i64x2_const_splat(1));
    return wasm_f32x4_demote_f64x2_zero(wasm_v128_or(wasm_i64x2_add(sum, too_large), inexact));
}

/* a * b + c, rounded once. */
static inline v128_t four_fused(v128_t a, v128_t b, v128_t c) {
    const v128_t upper_a = wasm_i64x2_shuffle(a, a, 1, 1), upper_b = wasm_i64x2_shuffle(b, b, 1, 1);
    const v128_t upper = two_fused(upper_a, upper_b, wasm_i64x2_shuffle(c, c, 1, 1));
    return wasm_i64x2_shuffle(two_fused(a, b, c), upper, 0, 2);
}
