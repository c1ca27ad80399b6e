"""Wrong solutions of chapter 12."""

from tests.course.wrong_solutions import Edit

NIBBLES = "codes = torch.cat((codes & 15, codes >> 4), dim=-1)"
TOTAL = "total -= weight.format.zero * activation_sums[:, g, None]"

WRONG = {
    "quantize": [
        Edit("largest_not_magnitude", "groups.abs().amax(-1) / top", "groups.amax(-1) / top", "whatever its sign"),
        Edit("cuts_off", "(groups / divisors[..., None]).round()", "(groups / divisors[..., None]).trunc()", "are off"),
        Edit("forgets_zero", ".add(format.zero).clamp(first, last)", ".clamp(first, last)", "are off"),
        Edit("zero_is_128", ".add(format.zero)", ".add(format.zero and 128)", "zero is format.zero"),
        Edit(
            "all_codes_up",  # the scale is too small by one step in 128: the largest number is cut off
            "top = 2 ** (format.bits - 1) - 1",
            "top = 2 ** (format.bits - 1)",
            "scale = largest magnitude / 127",
        ),
        Edit(
            "sixteen_steps",
            "minimums.float()) / last",
            "minimums.float()) / (last + 1)",
            "scale = (largest - minimum) / 15",
        ),
        Edit("nan_for_zeros", "torch.where(scales == 0, 1, scales.float())", "scales.float()", "0 / 0 is nan"),
        Edit(
            "codes_of_the_exact_scale",
            """
                scales = (groups.abs().amax(-1) / top).half()
            divisors = torch.where(scales == 0, 1, scales.float())  # 0 / 0 is nan
            """,
            """
                scales = (groups.abs().amax(-1) / top).half()
            divisors = groups.abs().amax(-1) / (2 ** (format.bits - 1) - 1)
            divisors = (groups.amax(-1) / last if format.has_minimum else divisors).clamp_min(1e-9)
            """,
            "divide by the stored scale",
        ),
        Edit(
            "float32_scales",
            "groups.abs().amax(-1) / top).half()",
            "groups.abs().amax(-1) / top)",
            "scales has another",
        ),
        Edit(
            "one_scale",
            "groups.abs().amax(-1) / top",
            "groups.abs().amax().expand(groups.shape[:-1]) / top",
            "is wrong",
        ),
        Edit("in_place", "groups = groups - minimums", "groups -= minimums", "has been changed"),
    ],
    "restore": [
        Edit(
            "subtracts_in_uint8",
            "(codes.float() - groups.format.zero)",
            "(codes - groups.format.zero)",
            "127 - 128 is 255",
        ),
        Edit(
            "forgets_zero",
            "(codes.float() - groups.format.zero)",
            "codes.float()",
            "subtract zero from the code",
            "A group and its scale",
        ),
        Edit(
            "neighbours_in_a_byte",
            "torch.cat((codes & 15, codes >> 4), dim=-1)",
            "torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)",
            "code i in its low half and code i + 16 in its high half",
        ),
        Edit(
            "high_half_first",
            "(codes & 15, codes >> 4)",
            "(codes >> 4, codes & 15)",
            "byte i holds code i in its low half",
        ),
        Edit(
            "no_minimum",
            "weight = weight + groups.minimums.float()[..., None]",
            "pass",
            "its own scale and its own minimum",
        ),
        Edit(
            "minimum_is_scaled",
            """
            weight = (codes.float() - groups.format.zero) * groups.scales.float()[..., None]
            if groups.minimums is not None:
                weight = weight + groups.minimums.float()[..., None]
            """,
            """
            weight = codes.float() - groups.format.zero
            if groups.minimums is not None:
                weight = weight + groups.minimums.float()[..., None]
            weight = weight * groups.scales.float()[..., None]
            """,
            "its own scale and its own minimum",
        ),
        Edit(
            "keeps_the_places_behind_k",
            "weight.flatten(1)[:, : groups.k]",
            "weight.flatten(1)",
            "without the places behind k",
        ),
        Edit(
            "multiplies_in_float16",
            "(codes.float() - groups.format.zero) * groups.scales.float()[..., None]",
            "((codes.half() - groups.format.zero) * groups.scales[..., None]).float()",
            "float16",
            "A group and its scale",
        ),
    ],
    "group_dot": [
        Edit(
            "forgets_zero",
            "(total - zero * activation_sum)",
            "total",
            "sum(a * (c - zero)) is sum(a * c) - zero * sum(a)",
        ),
        Edit(
            "takes_zero_off_once",
            "zero * activation_sum)",
            "zero)",
            "sum(a * (c - zero)) is sum(a * c) - zero * sum(a)",
        ),
        Edit("signed_codes", "codes[i : i + 4]", "[code - zero for code in codes[i : i + 4]]", "ints from 0 to 255"),
        Edit("minimum_once", "minimum * activation_sum)", "minimum * 32)", "each product has a * minimum in it"),
        Edit(
            "minimum_unscaled",
            "return activation_scale * (scale * (total - zero * activation_sum) + minimum * activation_sum)",
            "return activation_scale * scale * (total - zero * activation_sum) + minimum * activation_sum",
            "each product has a * minimum in it",
        ),
        Edit(
            "scales_first",
            "total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])",
            "total = dpbusd(total * 1.0, codes[i : i + 4], activations[i : i + 4])",
            "scales come in at the end",
        ),
        Edit(
            "multiplies_itself",
            "total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])",
            "total += sum(c * a for c, a in zip(codes[i : i + 4], activations[i : i + 4]))",
            "are to be done by dpbusd",
        ),
        Edit("half_of_it", "range(0, 32, 4)", "range(0, 16, 4)", "the sum of the products"),
    ],
    "quantized_linear": [
        Edit(
            "leaves_activations_alone",
            "groups / activation_scales[..., None]).round()",
            "groups / activation_scales[..., None])",
            "the product with x as it came",
        ),
        Edit(
            "a_scale_a_row",
            "activation_scales = groups.abs().amax(-1) / 127",
            "activation_scales = groups.abs().amax((-1, -2))[:, None].expand(groups.shape[:2]) / 127",
            "a scale for each group of 32 activations",
        ),
        Edit(
            "a_scale_a_step",
            "activation_scales = groups.abs().amax(-1) / 127",
            "activation_scales = groups.abs().amax((0, -1)).expand(groups.shape[:2]) / 127",
            "a scale is shared by rows",
            "Activations are harder",
        ),
        Edit(
            "a_scale_for_all",
            "activation_scales = groups.abs().amax(-1) / 127",
            "activation_scales = groups.abs().amax().expand(groups.shape[:2]) / 127",
            "a scale is shared by groups",
        ),
        Edit(
            "nan_for_zeros",
            "torch.where(activation_scales[..., None] == 0, 0, groups / activation_scales[..., None])",
            "(groups / activation_scales[..., None])",
            "a group of zeros stays zero",
        ),
        Edit("forgets_zero", TOTAL, "", "round each group of 32 with its own scale"),
        Edit(
            "forgets_the_minimum",
            "group_y += activation_sums[:, g, None] * weight.minimums[:, g].float()",
            "pass",
            "zero and the minimum meet the sum",
            "Whole numbers times whole numbers",
        ),
        Edit(
            "bias_in_every_group",
            "y += activation_scales[:, g, None] * group_y",
            "y += activation_scales[:, g, None] * group_y + (0 if bias is None else bias.float())",
            "the bias is added once",
        ),
        Edit("always_float32", ".to(x.dtype)", "", "return [T, n] in x's dtype"),
        Edit(
            "forgets_the_last_group",
            "for g in range(codes.shape[1]):",
            "for g in range(x.shape[1] // 32):",
            "the bias is added once",
        ),
    ],
}
