"""Wrong solutions of chapter 8."""

from tests.course.wrong_solutions import Edit

TOP_P = """
    values = probs.sort(descending=True).values
    mass_before = values.cumsum(0) - values  # of the tokens that are likelier than this one
    num_kept = int((mass_before < top_p * probs.sum()).sum())
    # Compared with the last one kept, so that its equals pass, wherever the sort has put them.
    return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)
"""
MIN_P = """
    probs = (logits / temperature).softmax(-1)
    probs = probs.masked_fill(probs < min_p * probs.max(), 0.0)
    return probs / probs.sum()
"""
KEY = 'f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}"'
U = '(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53'
CHOICE = "torch.searchsorted(cumulative, u * cumulative[-1], right=True)"

NEXT = "[choice[at] if len(choice) > at else eos_token_id for choice in fitting]"
FITTING = "fitting = [choice for choice in choices if choice[:at] == generated]"

WRONG = {
    "keep_top_p": [
        Edit(
            "drops_the_token_that_crosses",
            "probs >= values[",
            "probs > values[",
            "the token that reaches or crosses the border is missing",
        ),
        Edit(
            "drops_it_and_keeps_the_first",
            "values.cumsum(0) - values",
            "values.cumsum(0)",
            "the token that reaches or crosses the border is missing",
        ),
        Edit(
            "adds_up_unsorted",
            TOP_P,
            """
            mass_before = probs.cumsum(0) - probs
            return (mass_before < top_p * probs.sum()) & (probs > 0)
            """,
            "in the order of the ids: sort first",
        ),
        Edit(
            "mask_in_sorted_order",
            "return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)",
            "return (mass_before < top_p * probs.sum()) & (values > 0)",
            "do the places in your mask belong to the ids?",
        ),
        Edit(
            "one_too_many_at_the_border",
            "mass_before < ",
            "mass_before <= ",
            "when the mass is reached exactly, the next token is not kept",
        ),
        Edit(
            "arbitrary_among_equals",
            "return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)",
            """
            kept = torch.zeros_like(probs, dtype=torch.bool)
            kept[probs.argsort(descending=True, stable=True)[:num_kept]] = True
            return kept
            """,
            "exactly as likely as the last one kept are kept, too",
        ),
        Edit("mass_of_the_whole_vocabulary", "top_p * probs.sum()", "top_p", "top_p is a share of what is there"),
        Edit("zeros_come_back", "& (probs > 0)", "| (probs == 0)", "it must not come back"),
        Edit(
            "sorts_ascending",
            TOP_P,
            """
            values, order = probs.sort()
            mass_before = values.cumsum(0) - values
            kept = torch.zeros_like(probs, dtype=torch.bool)
            kept[order] = (mass_before < top_p * probs.sum()) & (values > 0)
            return kept
            """,
            "from the least likely one upwards",
        ),
        Edit(
            "as_a_threshold",
            "values[max(num_kept, 1) - 1]",
            "min(top_p, float(probs.max()))",
            "not with the probability of a single one",
        ),
        Edit(
            "gives_ids",
            "(probs >= values[max(num_kept, 1) - 1]) & (probs > 0)",
            "(probs >= values[max(num_kept, 1) - 1]).nonzero().flatten()",
            "return a tensor of bools",
        ),
        Edit(
            "scales_the_callers_row",
            "values = probs.sort(descending=True).values",
            """
            probs /= probs.sum()
            values = probs.sort(descending=True).values
            """,
            "probs must stay as it is",
        ),
    ],
    "min_p_probs": [
        Edit(
            "absolute",
            "min_p * probs.max()",
            "min(min_p, float(probs.max()))",
            "min_p is a share of the largest probability",
        ),
        Edit("absolute_and_empty", "min_p * probs.max()", "min_p", "min_p is a share of the largest probability"),
        Edit("larger_only", "probs < min_p", "probs <= min_p", "no token is left: exactly min_p times"),
        Edit(
            "larger_but_the_first",
            "probs < min_p * probs.max()",
            "(probs <= min_p * probs.max()) & (torch.arange(len(probs)) != probs.argmax())",
            "too few tokens are left",
        ),
        Edit("not_renormalised", "return probs / probs.sum()", "return probs", "scale what is left to 1"),
        Edit(
            "renormalised_before",
            """
            probs = probs.masked_fill(probs < min_p * probs.max(), 0.0)
            return probs / probs.sum()
            """,
            """
            probs = probs / probs.sum()
            return probs.masked_fill(probs < min_p * probs.max(), 0.0)
            """,
            "scale what is left to 1",
        ),
        Edit(
            "filters_before_temperature",
            MIN_P,
            """
            probs = logits.softmax(-1)
            return (logits / temperature).masked_fill(probs < min_p * probs.max(), -torch.inf).softmax(-1)
            """,
            "temperature comes first",
        ),
        Edit(
            "multiplies_by_temperature",
            "logits / temperature",
            "logits * temperature",
            "the logits are divided by the temperature, then softmax",
        ),
        Edit(
            "temperature_on_probabilities",
            "(logits / temperature).softmax(-1)",
            "logits.softmax(-1) / temperature",
            "the logits are divided by the temperature, then softmax",
        ),
        Edit("exp_of_large_numbers", ".softmax(-1)", ".exp()", "not a number"),
        Edit(
            "share_of_the_largest_logit",
            MIN_P,
            """
            scaled = logits / temperature
            return scaled.masked_fill(scaled < min_p * scaled.max(), -torch.inf).softmax(-1)
            """,
            "compared with probabilities, and not with logits?",
        ),
    ],
    "draw": [
        Edit(
            "row_in_the_key",
            "{seq.sample_index}",
            "{len(token_ids)}",
            "does the row's place in the batch enter the number?",
        ),
        Edit(
            "global_random",
            f"u = {U}",
            """
            import random

            u = random.random()
            """,
            "the global random state has moved",
        ),
        Edit(
            "global_random_seeded",
            f"u = {U}",
            """
            torch.manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little"))
            u = float(torch.rand(()))
            """,
            "the global random state has moved",
        ),
        Edit("multinomial", CHOICE, "torch.multinomial(row, 1)", "the global random state has moved"),
        Edit(
            "a_fresh_generator_of_the_batch",
            f"""
            token_ids = []
            for row, seq in zip(probs, seqs, strict=True):
                key = {KEY}.encode()
                # 53 bits are what a float holds: all 64 could be rounded up to 1.
                u = {U}
            """,
            """
            token_ids = []
            generator = torch.Generator().manual_seed(seqs[0].seed)
            for row in probs:
                u = float(torch.rand((), generator=generator))
            """,
            "does the row's place in the batch enter the number?",
        ),
        Edit("without_position", ",{seq.num_generated_tokens}", "", "differ only in the position"),
        Edit("without_sample_index", ",{seq.sample_index}", "", "n=40 would give the same text 40 times"),
        Edit("without_seed", "{seq.seed},", "", "all get the same token: what does u depend on?"),
        Edit("seed_of_the_params", "{seq.seed}", "{seq.sampling_params.seed}", "seq.sampling_params.seed is None"),
        Edit(
            "sum_of_the_three",
            KEY,
            "str(seq.seed + seq.sample_index + seq.num_generated_tokens)",
            "are the three told apart?",
        ),
        Edit(
            "glued_together",
            KEY,
            'f"{seq.seed}{seq.sample_index}{seq.num_generated_tokens}"',
            "are the three told apart?",
        ),
        Edit("seq_id_in_the_key", "{seq.seed}", "{seq.seq_id}", "what else enters, its seq_id?"),
        Edit(
            "python_hash",
            U,
            "hash(key.decode()) % 2**53 / 2**53",
            "Python's hash() of a text is another one in each process",
        ),
        Edit(
            "counts_its_calls",
            f"""
            token_ids = []
            for row, seq in zip(probs, seqs, strict=True):
                key = {KEY}.encode()
            """,
            """
            token_ids = []
            draw.calls = getattr(draw, "calls", 0) + 1
            for row, seq in zip(probs, seqs, strict=True):
                key = f"{seq.seed},{seq.sample_index},{draw.calls}".encode()
            """,
            "called twice with the same rows",
        ),
        Edit("takes_the_sum_for_1", "u * cumulative[-1]", "u", "the sum may be below 1"),
        Edit("the_most_likely", CHOICE, "row.argmax()", "all get the same token: what does u depend on?"),
        Edit(
            "among_the_possible",  # all tokens that can be, alike
            "row.cumsum(0)",
            "(row > 0).double().cumsum(0)",
            "the likeliest token comes too rarely",
        ),
        Edit(
            "places_of_a_sorted_row",
            "row.cumsum(0)",
            "row.sort(descending=True).values.cumsum(0)",
            "probability 0 was taken",
        ),
    ],
    "allowed_tokens": [
        Edit(
            "never_ends",
            NEXT,
            "[choice[at] for choice in fitting if len(choice) > at]",
            "Where a choice is complete, EOS may come",
        ),
        Edit(
            "ends_only_where_nothing_else_comes",
            f"return {NEXT}",
            "return [choice[at] for choice in fitting if len(choice) > at] or [eos_token_id]",
            "the output is a whole choice and may end: EOS is missing",
        ),
        Edit(
            "ends_as_soon_as_it_can",
            FITTING,
            f"""
            if generated in choices:
                return [eos_token_id]
            {FITTING}
            """,
            "the output may also go on",
        ),
        Edit("may_always_end", "for choice in fitting]", "for choice in fitting] + [eos_token_id]", "in the middle of"),
        Edit("runs_past_the_end", "choice[at] if len(choice) > at else eos_token_id", "choice[at]", "IndexError"),
        Edit("the_first_that_fits", "for choice in fitting]", "for choice in fitting[:1]]", "several choices begin"),
        Edit(
            "the_place_alone",
            "if choice[:at] == generated",
            "if len(choice) >= at",
            "in a choice that begins otherwise",
        ),
        Edit(
            "the_newest_token_alone",
            "if choice[:at] == generated",
            "if choice[at - 1 : at] == generated[-1:] or not generated",
            "in a choice that begins otherwise",
        ),
        Edit(
            "the_same_tokens_in_any_order",
            "choice[:at] == generated",
            "sorted(choice[:at]) == sorted(generated)",
            "in a choice that begins otherwise",
        ),
        Edit(
            "behind_the_first_such_token",
            "choice[at] if len(choice) > at else eos_token_id",
            "(choice + [eos_token_id])[choice.index(generated[-1]) + 1 if generated else 0]",
            "and not next in it",
        ),
        Edit(
            "all_that_is_left_of_a_choice",
            NEXT,
            "[token_id for choice in fitting for token_id in choice[at:] or [eos_token_id]]",
            "and not next in it",
        ),
        Edit(
            "skips_token_0",
            f"return {NEXT}",
            "return [token_id for choice in fitting if (token_id := (choice + [eos_token_id])[at])]",
            "several choices begin",
        ),
        Edit(
            "a_set",
            NEXT,
            "{choice[at] if len(choice) > at else eos_token_id for choice in fitting}",
            "return a list of token ids",
        ),
        Edit(
            "throws_choices_away",
            FITTING,
            """
            for choice in list(choices):
                if choice[:at] != generated:
                    choices.remove(choice)
            fitting = choices
            """,
            "choices and generated must stay as they are",
        ),
        Edit(
            "keeps_what_still_fits",
            FITTING,
            """
            kept = allowed_tokens.kept if generated else choices  # what the last call left, of whatever sequence
            fitting = allowed_tokens.kept = [choice for choice in kept if choice[at - 1 : at] == generated[-1:]]
            """,
            "does anything stay from one call to the next?",
        ),
    ],
}
