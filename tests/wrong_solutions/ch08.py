"""Plausible mistakes in the exercises of chapter 8, and a piece of the hint that each must get."""

import hashlib
import random

import torch

# -- keep_top_p -------------------------------------------------------------------------------------------------------


def _top_p(probs, top_p, *, crossing=True, share=True, ties=True, exact=False, zeros=False):
    """The right one, with room for mistakes."""
    values, order = probs.sort(descending=True, stable=True)
    before = values.cumsum(0) - (values if crossing else 0)
    wanted = top_p * (probs.sum() if share else 1.0)
    num = max(int(((before <= wanted) if exact else (before < wanted)).sum()), 1 if crossing else 0)
    kept = torch.zeros_like(probs, dtype=torch.bool)
    kept[order[:num]] = True
    if ties and num:
        kept |= probs >= values[num - 1]
    return kept if zeros else kept & (probs > 0)


def drops_the_token_that_crosses(probs, top_p):
    return _top_p(probs, top_p, crossing=False)


def drops_it_and_keeps_the_first(probs, top_p):
    kept = _top_p(probs, top_p, crossing=False)
    kept[probs.argmax()] = True
    return kept


def adds_up_unsorted(probs, top_p):
    return (probs.cumsum(0) - probs < top_p * probs.sum()) & (probs > 0)


def mask_in_sorted_order(probs, top_p):
    values = probs.sort(descending=True).values
    return (values.cumsum(0) - values < top_p * probs.sum()) & (values > 0)


def one_too_many_at_the_border(probs, top_p):
    return _top_p(probs, top_p, exact=True)


def arbitrary_among_equals(probs, top_p):
    return _top_p(probs, top_p, ties=False)


def mass_of_the_whole_vocabulary(probs, top_p):
    return _top_p(probs, top_p, share=False)


def zeros_come_back(probs, top_p):
    return _top_p(probs, top_p, zeros=True) | (probs == 0)


def sorts_ascending(probs, top_p):
    values, order = probs.sort()
    kept = torch.zeros_like(probs, dtype=torch.bool)
    kept[order] = (values.cumsum(0) - values < top_p * probs.sum()) & (values > 0)
    return kept


def as_a_threshold(probs, top_p):
    """Takes top_p for a probability."""
    return probs >= min(top_p, float(probs.max()))


def gives_ids(probs, top_p):
    return _top_p(probs, top_p).nonzero().flatten()


def scales_the_callers_row(probs, top_p):
    probs /= probs.sum()
    return _top_p(probs, top_p)


# -- min_p_probs ------------------------------------------------------------------------------------------------------


def _normal(probs):
    return probs / probs.sum()


def absolute(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    return _normal(probs.masked_fill(probs < min(min_p, float(probs.max())), 0.0))


def absolute_and_empty(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    return _normal(probs.masked_fill(probs < min_p, 0.0))


def larger_only(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    return _normal(probs.masked_fill(probs <= min_p * probs.max(), 0.0))


def larger_but_the_first(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    kept = probs > min_p * probs.max()
    kept[probs.argmax()] = True
    return _normal(probs.masked_fill(~kept, 0.0))


def not_renormalised(logits, temperature, min_p):
    probs = (logits / temperature).softmax(-1)
    return probs.masked_fill(probs < min_p * probs.max(), 0.0)


def renormalised_before(logits, temperature, min_p):
    probs = _normal((logits / temperature).softmax(-1))
    return probs.masked_fill(probs < min_p * probs.max(), 0.0)


def filters_before_temperature(logits, temperature, min_p):
    probs = logits.softmax(-1)
    return (logits / temperature).masked_fill(probs < min_p * probs.max(), -torch.inf).softmax(-1)


def multiplies_by_temperature(logits, temperature, min_p):
    probs = (logits * temperature).softmax(-1)
    return _normal(probs.masked_fill(probs < min_p * probs.max(), 0.0))


def temperature_on_probabilities(logits, temperature, min_p):
    probs = logits.softmax(-1) / temperature
    return _normal(probs.masked_fill(probs < min_p * probs.max(), 0.0))


def exp_of_large_numbers(logits, temperature, min_p):
    weights = (logits / temperature).exp()
    return _normal(weights.masked_fill(weights < min_p * weights.max(), 0.0))


def share_of_the_largest_logit(logits, temperature, min_p):
    scaled = logits / temperature
    return scaled.masked_fill(scaled < min_p * scaled.max(), -torch.inf).softmax(-1)


# -- draw -------------------------------------------------------------------------------------------------------------


def _uniform(*key):
    digest = hashlib.blake2b(",".join(map(str, key)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _fall(row, u, *, share=True, right=True):
    cumulative = row.cumsum(0)
    target = u * (cumulative[-1] if share else 1.0)
    return int(torch.searchsorted(cumulative, target, right=right))


def _draw(probs, seqs, key, **options):
    return [_fall(row, _uniform(*key(i, seq)), **options) for i, (row, seq) in enumerate(zip(probs, seqs, strict=True))]


def row_in_the_key(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seed, i, s.num_generated_tokens))


def global_random(probs, seqs):
    return [_fall(row, random.random()) for row in probs]


def global_random_seeded(probs, seqs):
    token_ids = []
    for row, seq in zip(probs, seqs, strict=True):
        random.seed(f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}")
        token_ids.append(_fall(row, random.random()))
    return token_ids


def multinomial(probs, seqs):
    return torch.multinomial(probs, 1).squeeze(1).tolist()


def a_fresh_generator_of_the_batch(probs, seqs):
    generator = random.Random(seqs[0].seed)
    return [_fall(row, generator.random()) for row in probs]


def without_position(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seed, s.sample_index))


def without_sample_index(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seed, s.num_generated_tokens))


def without_seed(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.sample_index, s.num_generated_tokens))


def seed_of_the_params(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.sampling_params.seed, s.sample_index, s.num_generated_tokens))


def sum_of_the_three(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seed + s.sample_index + s.num_generated_tokens,))


def glued_together(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (f"{s.seed}{s.sample_index}{s.num_generated_tokens}",))


def python_hash(probs, seqs):
    places = [(s.seed, s.sample_index, s.num_generated_tokens) for s in seqs]
    return [_fall(row, hash(str(place)) % 2**53 / 2**53) for row, place in zip(probs, places, strict=True)]


def seq_id_in_the_key(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seq_id, s.sample_index, s.num_generated_tokens))


CALLS = []


def counts_its_calls(probs, seqs):
    CALLS.append(1)
    return _draw(probs, seqs, lambda i, s: (s.seed, s.sample_index, len(CALLS)))


def takes_the_sum_for_1(probs, seqs):
    return _draw(probs, seqs, lambda i, s: (s.seed, s.sample_index, s.num_generated_tokens), share=False)


def the_most_likely(probs, seqs):
    return probs.argmax(-1).tolist()


def among_the_possible(probs, seqs):
    """All tokens that can be, alike."""
    return _draw((probs > 0).double(), seqs, lambda i, s: (s.seed, s.sample_index, s.num_generated_tokens))


def places_of_a_sorted_row(probs, seqs):
    ordered = probs.sort(descending=True).values
    return _draw(ordered, seqs, lambda i, s: (s.seed, s.sample_index, s.num_generated_tokens))


WRONG = {
    "keep_top_p": [
        (drops_the_token_that_crosses, "the token that reaches or crosses the border is missing"),
        (drops_it_and_keeps_the_first, "the token that reaches or crosses the border is missing"),
        (adds_up_unsorted, "in the order of the ids: sort first"),
        (mask_in_sorted_order, "do the places in your mask belong to the ids?"),
        (one_too_many_at_the_border, "when the mass is reached exactly, the next token is not kept"),
        (arbitrary_among_equals, "exactly as likely as the last one kept are kept, too"),
        (mass_of_the_whole_vocabulary, "top_p is a share of what is there"),
        (zeros_come_back, "it must not come back"),
        (sorts_ascending, "from the least likely one upwards"),
        (as_a_threshold, "not with the probability of a single one"),
        (gives_ids, "return a tensor of bools"),
        (scales_the_callers_row, "probs must stay as it is"),
    ],
    "min_p_probs": [
        (absolute, "min_p is a share of the largest probability"),
        (absolute_and_empty, "min_p is a share of the largest probability"),
        (larger_only, "no token is left: exactly min_p times"),
        (larger_but_the_first, "too few tokens are left"),
        (not_renormalised, "scale what is left to 1"),
        (renormalised_before, "scale what is left to 1"),
        (filters_before_temperature, "temperature comes first"),
        (multiplies_by_temperature, "the logits are divided by the temperature, then softmax"),
        (temperature_on_probabilities, "the logits are divided by the temperature, then softmax"),
        (exp_of_large_numbers, "not a number"),
        (share_of_the_largest_logit, "compared with probabilities, and not with logits?"),
    ],
    "draw": [
        (row_in_the_key, "does the row's place in the batch enter the number?"),
        (global_random, "the global random state has moved"),
        (global_random_seeded, "the global random state has moved"),
        (multinomial, "the global random state has moved"),
        (a_fresh_generator_of_the_batch, "does the row's place in the batch enter the number?"),
        (without_position, "differ only in the position"),
        (without_sample_index, "n=40 would give the same text 40 times"),
        (without_seed, "all get the same token: what does u depend on?"),
        (seed_of_the_params, "seq.sampling_params.seed is None"),
        (sum_of_the_three, "are the three told apart?"),
        (glued_together, "are the three told apart?"),
        (seq_id_in_the_key, "what else enters, its seq_id?"),
        (python_hash, "Python's hash() of a text is another one in each process"),
        (counts_its_calls, "called twice with the same rows"),
        (takes_the_sum_for_1, "the sum may be below 1"),
        (the_most_likely, "all get the same token: what does u depend on?"),
        (among_the_possible, "the likeliest token comes too rarely"),
        (places_of_a_sorted_row, "probability 0 was taken"),
    ],
}
