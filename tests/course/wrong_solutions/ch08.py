"""Wrong solutions of chapter 8."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
keep_top_p
    drops_the_token_that_crosses: the token that reaches or crosses the border is missing
        ~ probs >= values[ => probs > values[
    one_too_many_at_the_border: when the mass is reached exactly, the next token is not kept
        ~ mass_before < top_p => mass_before <= top_p
    mask_in_sorted_order: do the places in your mask belong to the ids?
        - return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)
        + return (mass_before < top_p * probs.sum()) & (values > 0)
    arbitrary_among_equals: exactly as likely as the last one kept are kept, too
        - return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)
        + kept = torch.zeros_like(probs, dtype=torch.bool)
        + kept[probs.argsort(descending=True, stable=True)[:num_kept]] = True
        + return kept
    mass_of_the_whole_vocabulary: top_p is a share of what is there
        ~ top_p * probs.sum() => top_p
    scales_the_callers_row: probs must stay as it is
        + probs /= probs.sum()
        = values = probs.sort(descending=True).values
min_p_probs
    absolute: min_p is a share of the largest probability
        ~ min_p * probs.max() => min(min_p, float(probs.max()))
    multiplies_by_temperature: the logits are divided by the temperature, then softmax
        ~ logits / temperature => logits * temperature
    larger_only: too few tokens are left: exactly min_p times
        ~ probs < min_p => probs <= min_p
    not_renormalised: scale what is left to 1
        ~ return probs / probs.sum() => return probs
    filters_before_temperature: temperature comes first
        = probs = (logits / temperature).softmax(-1)
        + cold = logits.softmax(-1)
        + return (logits / temperature).masked_fill(cold < min_p * cold.max(), -torch.inf).softmax(-1)
    exp_of_large_numbers: not a number
        ~ .softmax(-1) => .exp()
draw
    row_in_the_key: does the row's place in the batch enter the number?
        ~ {seq.sample_index} => {len(token_ids)}
    global_random: the global random state has moved
        - u = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        + u = float(torch.rand(()))
    without_position: differ only in the position
        ~ ,{seq.num_generated_tokens} =>
    sum_of_the_three: are the three told apart?
        - f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}"
        + str(seq.seed + seq.sample_index + seq.num_generated_tokens)
    python_hash: Python's hash() of a text is another one in each process
        - (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        + hash(key.decode()) % 2**53 / 2**53
    takes_the_sum_for_1: the sum may be below 1
        ~ u * cumulative[-1] => u
    among_the_possible: the likeliest token comes too rarely
        ~ row.cumsum(0) => (row > 0).double().cumsum(0)
allowed_tokens
    ends_only_where_nothing_else_comes: the output is a whole choice and may end: EOS is missing
        - return [choice[at] if len(choice) > at else eos_token_id for choice in fitting]
        + return [choice[at] for choice in fitting if len(choice) > at] or [eos_token_id]
    may_always_end: in the middle of
        ~ for choice in fitting] => for choice in fitting] + [eos_token_id]
    the_newest_token_alone: in a choice that begins otherwise
        ~ if choice[:at] == generated => if choice[at - 1 : at] == generated[-1:] or not generated
    skips_token_0: several choices begin
        - return [choice[at] if len(choice) > at else eos_token_id for choice in fitting]
        + return [token_id for choice in fitting if (token_id := (choice + [eos_token_id])[at])]
    throws_choices_away: choices and generated must stay as they are
        - fitting = [choice for choice in choices if choice[:at] == generated]
        + for choice in list(choices):
        +     if choice[:at] != generated:
        +         choices.remove(choice)
        + fitting = choices
    keeps_what_still_fits: does anything stay from one call to the next?
        - fitting = [choice for choice in choices if choice[:at] == generated]
        + kept = allowed_tokens.kept if generated else choices  # what the last call left, of whatever sequence
        + fitting = allowed_tokens.kept = [choice for choice in kept if choice[at - 1 : at] == generated[-1:]]
""")
