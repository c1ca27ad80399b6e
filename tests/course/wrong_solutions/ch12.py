"""Wrong solutions of chapter 12."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
quantize
    largest_not_magnitude: whatever its sign
        ~ max(map(abs, group)) / top => max(group) / top
    sixteen_steps: scale = (largest - minimum) / 15
        ~ minimum) / last => minimum) / (last + 1)
    divides_by_zero: ZeroDivisionError
        - if scale == 0:
        -     return [zero] * len(group), scale, minimum
        + group = list(group)
    no_clipping: clip it
        ~ [min(max(code, first), last) for code in codes] => codes
    zero_before_it_is_rounded: ZeroDivisionError
        ~ if scale == 0: => if not any(group):
    float32_scales: to_float16 rounds it
        ~ to_float16(max(map(abs, group)) / top) => max(map(abs, group)) / top
    codes_by_the_exact_scale: then divide by the stored scale
        - codes = [round((number - minimum) / scale) + zero for number in group]
        + exact = (max(group) - min(group)) / last if has_minimum else max(map(abs, group)) / (last - zero)
        + codes = [round((number - minimum) / exact) + zero for number in group]
    in_place: has been changed
        - codes = [round((number - minimum) / scale) + zero for number in group]
        + for i in range(len(group)):
        +     group[i] -= minimum
        + codes = [round(number / scale) + zero for number in group]
restore
    forgets_zero: subtract zero from the code
        ~ (code - row.zero) => code
    neighbours_in_a_byte: code i in its low half and code i + 16 in its high half
        ~ codes_of(group, row.bits) => (group if row.bits == 8 else [half for x in group for half in (x & 15, x >> 4)])
    no_minimum: its own scale and its own minimum
        ~ (code - row.zero) + minimum => (code - row.zero)
    keeps_the_places_behind_k: without the places after k
        ~ return numbers[: row.k] => return numbers
group_dot
    forgets_zero: sum(a * (c - zero)) is sum(a * c) - zero * sum(a)
        ~ (total - zero * activation_sum) => total
    minimum_once: each product has a * minimum in it
        ~ minimum * activation_sum) => minimum * 32)
    for_show: dpbusd's sums are thrown away
        - total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
        + dpbusd(0, codes[i : i + 4], activations[i : i + 4])
        + total += sum(c * a for c, a in zip(codes[i : i + 4], activations[i : i + 4], strict=True))
    scales_first: scales come in at the end
        - total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
        + total = dpbusd(total * 1.0, codes[i : i + 4], activations[i : i + 4])
quantized_linear
    leaves_activations_alone: the product with x as it came
        ~ round(number / scale) if scale else 0 => number / scale if scale else 0
    a_scale_a_step: a scale is shared by rows
        @ Activations are harder
        - scale = max(map(abs, group)) / 127
        + scale = max(abs(number) for row in x for number in row[start : start + GROUP_SIZE]) / 127
    a_scale_a_row: a scale is shared by groups
        @ Activations are harder
        ~ max(map(abs, group)) / 127 => max(map(abs, numbers)) / 127
    scales_in_float16: do not round them to float16
        ~ max(map(abs, group)) / 127 => to_float16(max(map(abs, group)) / 127)
    bias_twice: the bias is added once
        ~ value + b for => value + 2 * b for
    divides_by_zero: ZeroDivisionError
        ~ round(number / scale) if scale else 0 => round(number / scale)
unpack_words
    wraps_at_16: 255 plus 1 is 0
        ~ (stored_zero + added) & top => (stored_zero + added) % (16 if bits == 4 else 1 << 16)
    highest_bits_first: the lowest 4 bits of a word hold its first code
        ~ word >> bits * place & top => word >> 32 - bits * (place + 1) & top
    keeps_the_sign: a code is never negative
        ~ word >> bits * place & top => (word >> bits * place) % 16 if place < 7 else word >> 28
    always_four_bits: a word holds 32 // bits codes
        - codes = [0] * len(order)
        + bits, codes = 4, [0] * len(order)
    no_middle: without a stored zero
        ~ zero = 2 ** (bits - 1) if stored_zero is None => zero = 0 if stored_zero is None
    takes_0_for_none: 0 is a zero point
        ~ if stored_zero is None => if not stored_zero
    the_other_way_round: place p holds code order[p]
        ~ codes[index] = word >> bits * place & top => codes[place] = word >> bits * index & top
    as_it_is_stored: zero is what is stored, plus added
        ~ (stored_zero + added) & top => stored_zero
    does_not_wrap: 15 plus 1 is 0
        ~ (stored_zero + added) & top => stored_zero + added
""")
