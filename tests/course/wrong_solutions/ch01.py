"""Wrong solutions of chapter 1."""

from tests.course.wrong_solutions import Edit

WRONG = {
    "causal_attention": [
        Edit("heads_flattened", "weights, v)", "weights, v).flatten(1)", "the shape of q"),
        Edit("no_scale", " * q.shape[2] ** -0.5", "", "is each dot product divided by sqrt(head_dim)"),
        Edit("mask_of_first_positions", "position[m - n :, None]", "position[:n, None]", "that of the last position"),
        Edit("no_mask", "scores.masked_fill(later, -torch.inf)", "scores", "must not see positions later than its own"),
        Edit("groups_take_turns", "// group_size", "% k.shape[1]", "neighbors share"),
        Edit("softmax_by_hand", ".softmax(-1)", ".exp()\nweights /= weights.sum(-1, keepdim=True)", "infinite"),
        Edit(
            "scales_in_place",
            "q, k) * q.shape[2] ** -0.5",
            "q.mul_(q.shape[2] ** -0.5), k)",
            "in place; work on new tensors",
        ),
    ],
    "greedy_loop": [
        Edit("never_ends", "len(generated) < max_tokens", "True", "what ends the loop"),
        Edit("one_token_too_many", "< max_tokens", "<= max_tokens", "max_tokens counts generated tokens"),
        Edit("prompt_returned", "return generated", "return token_ids", "without the prompt"),
        Edit("tensors", "int(next_logits(token_ids).argmax())", "next_logits(token_ids).argmax()", "Python ints"),
        Edit("only_the_last_token", "token_ids.append(token_id)", "token_ids = [token_id]", "remembers nothing"),
        Edit("one_call_too_many", "return generated", "next_logits([1])\nreturn generated", "need not go through"),
        Edit("eos_left_out", "break", "return generated[:-1]", "is the last of the result"),
        Edit("eos_anywhere", "token_id in eos_token_ids", "eos_token_ids & set(token_ids)", "only a generated token"),
        Edit("prompt_changed", "list(prompt_token_ids)", "prompt_token_ids", "append to a copy"),
    ],
}
