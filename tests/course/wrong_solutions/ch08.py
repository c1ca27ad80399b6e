"""Wrong solutions of chapter 8."""

from tests.course.wrong_solutions import edits

WRONG = edits("""
keep_top_p
    drops_the_token_that_crosses: the token that reaches or crosses the border is missing
        ~ p >= least => p > least
    one_too_many_at_the_border: when the mass is reached exactly, the next token is not kept
        ~ mass >= wanted => mass > wanted
    mask_in_sorted_order: do the places in your mask belong to the ids?
        ~ least for p in probs] => least for p in sorted(probs, reverse=True)]
    arbitrary_among_equals: exactly as likely as the last one kept are kept, too
        @ Three ways to cut
        - return [p >= least for p in probs]
        + kept = [p > least for p in probs]
        + kept[probs.index(least)] = True
        + return kept
    mass_of_the_whole_vocabulary: top_p is a share of what is there
        @ Three ways to cut
        ~ top_p * sum(probs) => top_p
    scales_the_callers_row: probs must stay as it is
        + probs[:] = [p / sum(probs) for p in probs]
        = wanted, mass, least = top_p * sum(probs), 0.0, 0.0
    numbers_for_bools: return a list of bools
        ~ p >= least for => float(p >= least) for
min_p_probs
    absolute: min_p is a share of the largest probability
        ~ if weight >= min_p => if weight >= min(1, min_p * sum(weights))
    multiplies_by_temperature: the logits are divided by the temperature, then softmax
        ~ (x - largest) / temperature => (x - largest) * temperature
    larger_only: too few tokens are left: exactly min_p times
        @ Three ways to cut
        - total = sum(kept)
        + kept = [weight if weight > min_p else 0.0 for weight in weights]
        + total = sum(kept) or 1.0
    not_renormalized: scale what is left to 1
        ~ total = sum(kept) => total = sum(weights)
    filters_before_temperature: temperature comes first
        - kept = [weight if weight >= min_p else 0.0 for weight in weights]
        + kept = [weight if math.exp(x - largest) >= min_p else 0.0 for weight, x in zip(weights, logits, strict=True)]
    exp_of_large_numbers: OverflowError
        - largest = max(logits)
        - weights = [math.exp((x - largest) / temperature) for x in logits]  # shares of the largest probability
        + weights = [math.exp(x / temperature) for x in logits]
        + largest = max(weights)
        + weights = [weight / largest for weight in weights]
draw
    row_in_the_key: does the row's place in the batch enter the number?
        ~ {seq.sample_index} => {len(token_ids)}
    global_random: the global random state has moved
        - u = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        + from random import random
        + u = random()
    position_in_the_sequence: the position is that in the output
        ~ {seq.num_generated_tokens} => {len(seq.tokens)}
    without_position: differ only in the position
        ~ ,{seq.num_generated_tokens} =>
    sum_of_the_three: are the three told apart?
        - f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}"
        + str(seq.seed + seq.sample_index + seq.num_generated_tokens)
    too_few_bits: u needs more bits
        ~ digest_size=8).digest(), "little") >> 11) / 2**53 => digest_size=2).digest(), "little")) / 2**16
    python_hash: Python's hash() of a text is different in each process
        - (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        + hash(key.decode()) % 2**53 / 2**53
    takes_the_sum_for_1: the sum may be below 1
        ~ u * cumulative[-1] => u
    last_takes_what_is_left: walk to u times the row's sum
        - token_ids.append(bisect_right(cumulative, u * cumulative[-1]))
        + last = max(token_id for token_id, p in enumerate(row) if p)
        + token_ids.append(min(bisect_right(cumulative, u), last))
    among_the_possible: the likeliest token comes too rarely
        ~ accumulate(row) => accumulate(p > 0 for p in row)
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
