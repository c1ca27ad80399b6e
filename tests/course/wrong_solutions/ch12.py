"""Wrong solutions of chapter 12."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
quantize
    largest_not_magnitude: whatever its sign
        ~ groups.abs().amax(-1) / top => groups.amax(-1) / top
    sixteen_steps: scale = (largest - minimum) / 15
        ~ minimums.float()) / last => minimums.float()) / (last + 1)
    nan_for_zeros: 0 / 0 is nan
        ~ torch.where(scales == 0, 1, scales.float()) => scales.float()
    float32_scales: scales has another
        ~ groups.abs().amax(-1) / top).half() => groups.abs().amax(-1) / top)
    in_place: has been changed
        ~ groups = groups - minimums => groups -= minimums
restore
    subtracts_in_uint8: 127 - 128 is 255
        ~ (codes.float() - groups.format.zero) => (codes - groups.format.zero)
    neighbours_in_a_byte: code i in its low half and code i + 16 in its high half
        ~ torch.cat((codes & 15, codes >> 4), dim=-1) => torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    no_minimum: its own scale and its own minimum
        ~ weight = weight + groups.minimums.float()[..., None] => pass
    keeps_the_places_behind_k: without the places behind k
        ~ weight.flatten(1)[:, : groups.k] => weight.flatten(1)
group_dot
    forgets_zero: sum(a * (c - zero)) is sum(a * c) - zero * sum(a)
        ~ (total - zero * activation_sum) => total
    minimum_once: each product has a * minimum in it
        ~ minimum * activation_sum) => minimum * 32)
    scales_first: scales come in at the end
        - total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
        + total = dpbusd(total * 1.0, codes[i : i + 4], activations[i : i + 4])
quantized_linear
    leaves_activations_alone: the product with x as it came
        ~ groups / activation_scales[..., None]).round() => groups / activation_scales[..., None])
    a_scale_a_step: a scale is shared by rows
        @ Activations are harder
        - activation_scales = groups.abs().amax(-1) / 127
        + activation_scales = groups.abs().amax((0, -1)).expand(groups.shape[:2]) / 127
    bias_in_every_group: the bias is added once
        - y += activation_scales[:, g, None] * group_y
        + y += activation_scales[:, g, None] * group_y + (0 if bias is None else bias.float())
    always_float32: return [T, n] in x's dtype
        ~ .to(x.dtype) =>
""")
