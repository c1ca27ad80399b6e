"""Plausible wrong solutions of chapter 1's exercises, and a piece of the hint that each must get."""

import torch

from chapters.ch01_inference.solution import causal_attention


def attend(q, k, v, later=None, scale=None):
    """Grouped attention with the mask and the scale of whoever calls."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
    if later is not None:
        scores = scores.masked_fill(later, -torch.inf)
    return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v)


def last_mask(n, m):
    return torch.arange(m) > torch.arange(m - n, m)[:, None]


def no_mask(q, k, v):
    return attend(q, k, v)


def no_scale(q, k, v):
    return attend(q, k, v, last_mask(len(q), len(k)), scale=1.0)


def mask_of_the_first_positions(q, k, v):
    return attend(q, k, v, torch.ones(len(q), len(k)).triu(1).bool())


def does_not_see_itself(q, k, v):
    position = torch.arange(len(k))
    later = position >= position[len(k) - len(q) :, None]
    later[:, 0] = False  # something must be seen
    return attend(q, k, v, later)


def groups_take_turns(q, k, v):
    times = q.shape[1] // k.shape[1]
    return attend(q, k.repeat(1, times, 1), v.repeat(1, times, 1), last_mask(len(q), len(k)))


def softmax_over_heads(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("nhd,mhd->nmh", q, k) * q.shape[2] ** -0.5
    scores = scores.masked_fill(last_mask(len(q), len(k))[..., None], -torch.inf)
    return torch.einsum("nmh,mhd->nhd", scores.softmax(-1), v)


def softmax_by_hand(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    shares = (torch.einsum("nhd,mhd->hnm", q, k) * q.shape[2] ** -0.5).exp()
    shares = shares.masked_fill(last_mask(len(q), len(k)), 0.0)
    return torch.einsum("hnm,mhd->nhd", shares / shares.sum(-1, keepdim=True), v)


def scales_in_place(q, k, v):
    q *= q.shape[2] ** -0.5
    return attend(q, k, v, last_mask(len(q), len(k)), scale=1.0)


def heads_flattened(q, k, v):
    return causal_attention(q, k, v).flatten(1)


def last_row_only(q, k, v):
    return causal_attention(q[-1:], k, v).expand(q.shape).clone()


def only_the_last_token(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    generated, token_ids = [], list(prompt_token_ids)
    while len(generated) < max_tokens:
        generated.append(int(next_logits(token_ids).argmax()))
        if generated[-1] in eos_token_ids:
            break
        token_ids = generated[-1:]
    return generated


def eos_left_out(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    generated = []
    while len(generated) < max_tokens:
        token_id = int(next_logits(prompt_token_ids + generated).argmax())
        if token_id in eos_token_ids:
            break
        generated.append(token_id)
    return generated


def eos_anywhere(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    token_ids = list(prompt_token_ids)
    while len(token_ids) < len(prompt_token_ids) + max_tokens:
        token_ids.append(int(next_logits(token_ids).argmax()))
        if eos_token_ids & set(token_ids):
            break
    return token_ids[len(prompt_token_ids) :]


def prompt_changed(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    num_prompt = len(prompt_token_ids)
    for _ in range(max_tokens):
        prompt_token_ids.append(int(next_logits(prompt_token_ids).argmax()))
        if prompt_token_ids[-1] in eos_token_ids:
            break
    return prompt_token_ids[num_prompt:]


def with_the_prompt(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        token_ids.append(int(next_logits(token_ids).argmax()))
        if token_ids[-1] in eos_token_ids:
            break
    return token_ids


def counts_the_prompt(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    token_ids = list(prompt_token_ids)
    while len(token_ids) < max(max_tokens, len(prompt_token_ids) + 3):
        token_ids.append(int(next_logits(token_ids).argmax()))
        if token_ids[-1] in eos_token_ids:
            break
    return token_ids[len(prompt_token_ids) :][:max_tokens]


def one_call_too_many(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    generated = []
    logits = next_logits(prompt_token_ids)
    for _ in range(max_tokens):
        generated.append(int(logits.argmax()))
        if generated[-1] in eos_token_ids:
            break
        logits = next_logits(prompt_token_ids + generated)
    return generated


def never_ends(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    generated = []
    while True:
        generated.append(int(next_logits(prompt_token_ids + generated).argmax()))
        if generated[-1] in eos_token_ids:
            return generated


def tensors(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    token_ids = list(prompt_token_ids)
    for _ in range(max_tokens):
        token_ids.append(next_logits(token_ids).argmax())
        if int(token_ids[-1]) in eos_token_ids:
            break
    return token_ids[len(prompt_token_ids) :]


def largest_magnitude(next_logits, prompt_token_ids, max_tokens, eos_token_ids):
    generated = []
    while len(generated) < max_tokens:
        generated.append(int(next_logits(prompt_token_ids + generated).abs().argmax()))
        if generated[-1] in eos_token_ids:
            break
    return generated


WRONG = {
    "causal_attention": [
        (no_mask, "must not see positions behind its own"),
        (no_scale, "is each dot product divided by sqrt(head_dim)"),
        (mask_of_the_first_positions, "that of the last position"),
        (does_not_see_itself, "a position sees itself"),
        (groups_take_turns, "neighbours share"),
        (softmax_over_heads, "is that over the keys"),
        (softmax_by_hand, "infinite"),
        (scales_in_place, "q was changed in place"),
        (heads_flattened, "the shape of q"),
        (last_row_only, "must not see positions behind its own"),
    ],
    "greedy_loop": [
        (only_the_last_token, "the model remembers nothing"),
        (eos_left_out, "is the last of the result"),
        (eos_anywhere, "only a generated token ends the text"),
        (prompt_changed, "append to a copy"),
        (with_the_prompt, "the index of the largest logit"),
        (counts_the_prompt, "counts generated tokens"),
        (one_call_too_many, "need not go through the model"),
        (never_ends, "what ends the loop"),
        (tensors, "list of Python ints"),
        (largest_magnitude, "the index of the largest logit"),
    ],
}
