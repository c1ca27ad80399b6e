"""Lab of chapter 1: a real model, one token at a time; attention by hand; what a token costs.

Everything runs in float32, so that the probabilities come out the same on every machine.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from chapters.patching import replaced
from chapters.published import PUBLISHED, published_config
from chapters.slots import in_slots
from chapters.story import Story, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.model import Decoder

PROMPT = "Tokenization splits unbelievable words"
QUESTION = "The capital of France is"
NUM_TOKENS = 7
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)
BF16 = 2  # bytes
BYTES_TO_TRAIN = 16  # a parameter: weight and gradient in bf16, and in float32 a copy and Adam's two averages
BATCH_SIZES = (1, 4, 16, 64)
CONTEXTS = (1_024, 8_192, 32_768, 131_072)
BAR = 44

# An H100 SXM by its data sheet: bytes that it reads and additions and multiplications in bf16 that it does, a second.
H100_BYTES_PER_S, H100_FLOPS = 3.35e12, 989e12


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each part of the engine's decoder, built on the meta device: shapes without memory."""
    with torch.device("meta"):
        model = Decoder(config)
    counts = dict.fromkeys(("embeddings", "attention", "MLP", "norms", "output"), 0)
    for name, parameter in model.named_parameters():  # a tied matrix comes once, as embed_tokens
        parts = {"embed": "embeddings", "norm": "norms", "attn": "attention", "mlp": "MLP", "lm_head": "output"}
        counts[next(part for word, part in parts.items() if word in name)] += parameter.numel()
    return counts


def weights_read(config: ModelConfig) -> int:
    """Numbers that one step reads: all, except that of an embedding matrix of its own it reads a row a token."""
    counts = count_parameters(config)
    return sum(counts.values()) - (0 if config.tie_word_embeddings else counts["embeddings"])


def rows_of(cache: Tensor, batch: Batch, b: int) -> Tensor:
    """Sequence b's keys (or values) out of one layer's cache, in order: [m, num_kv_heads, head_dim]."""
    return cache[batch.block_tables[b].long()].flatten(0, 1)[: batch.key_lens[b]]


@contextmanager
def model_watched(llm: LLM) -> Iterator[list[Tensor]]:
    """Collects what the model makes of each step: logits [R, vocab_size]."""
    found: list[Tensor] = []
    runner = llm.engine.model_runner
    sample = runner._sample

    def watched_sample(logits: Tensor, sampling: Any) -> Any:
        found.append(logits)
        return sample(logits, sampling)

    with replaced(runner, "_sample", watched_sample):
        yield found


def next_logits_of(llm: LLM) -> Callable[[list[int]], Tensor]:
    """The engine's model as a function: token ids -> logits [vocab_size] of the next one, all computed from scratch."""

    def next_logits(token_ids: list[int]) -> Tensor:
        llm.reset_prefix_cache()
        with model_watched(llm) as found:
            llm.generate([list(token_ids)], ONE_TOKEN, False)
        return found[-1][0].float().cpu().clone()

    return next_logits


@contextmanager
def attention_watched(llm: LLM) -> Iterator[list[tuple[Tensor, ...]]]:
    """Collects each layer's q, k, v, attention in plain PyTorch and by the kernel of this machine, of one sequence."""
    runner = llm.engine.model_runner
    kernels, found = runner.kernels, list[tuple[Tensor, ...]]()

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out = kernels.paged_attention(q, k_cache, v_cache, batch, window)
        k_cache, v_cache = in_slots((k_cache, v_cache), kernels)
        k, v = (rows_of(cache, batch, 0).clone() for cache in (k_cache, v_cache))
        found.append((q.clone(), k, v, attention.paged_attention(q, k_cache, v_cache, batch, window), out.clone()))
        return out

    with replaced(runner, "kernels", dataclasses.replace(kernels, paged_attention=paged_attention)):
        yield found


def attend(query: list[float], keys: list[list[float]], values: list[list[float]]) -> tuple[list[float], ...]:
    """Attention of one query in one head, as you would do it on paper. Returns dot products, weights and the mix."""
    dots = [sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    shares = [math.exp(dot / math.sqrt(len(query))) for dot in dots]
    weights = [share / sum(shares) for share in shares]
    mix = [sum(w * value[i] for w, value in zip(weights, values, strict=True)) for i in range(len(values[0]))]
    return dots, weights, mix


def piece(llm: LLM, token_id: int) -> str:
    """The text of one token, in quotes; the name of one that is not text."""
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode([token_id], skip_special_tokens=True)
    return escape(repr(text or tokenizer.convert_ids_to_tokens(token_id)))


def table(*columns: str, left: int = 1) -> Table:
    """Its first `left` columns hold text, the others numbers."""
    made = Table(show_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return made


def tell(story: Story) -> None:
    llm = story.load(dtype="float32", max_model_len=256, num_gpu_blocks_override=32, enable_prefix_caching=False)
    name = story.model.rstrip("/").rsplit("/", 1)[-1]
    config: ModelConfig = llm.engine.model_config
    tell_tokens(story, llm, config)
    generated = tell_loop(story, llm)
    tell_loop_without_memory(story, llm, generated)
    tell_heads(story, llm, config)
    tell_weights(story, name, config)
    tell_bottlenecks(story, llm, name, config)
    tell_context(story, llm, name, config)


def tell_tokens(story: Story, llm: LLM, config: ModelConfig) -> None:
    story.part("Text in pieces")
    token_ids = llm.get_tokenizer()(PROMPT).input_ids
    story.say(
        f"The model never sees text. The tokenizer cuts it into pieces of a vocabulary of {config.vocab_size:,}, and "
        "each piece has a number, its token id. A space belongs to the piece that follows it."
    )
    shown = table("position", "piece", "token id", left=2)
    for position, token_id in enumerate(token_ids):
        shown.add_row(str(position), piece(llm, token_id), str(token_id))
    story.show(shown)
    story.say(f"{len(PROMPT.split())} words, {len(PROMPT)} characters, {len(token_ids)} tokens.")


def tell_loop(story: Story, llm: LLM) -> list[int]:
    """Returns what was generated."""
    story.part("One token at a time")
    story.say(
        "At each step the model gives every token of the vocabulary a score. Here are the five best, as probabilities. "
        "Greedy decoding takes the first, appends it, and asks again."
    )
    shown = table("step", "the five best, with their probabilities", left=2)
    before = llm.stats()
    for output in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5)):
        completion = output.outputs[0]
        assert completion.logprobs is not None
        best = sorted(completion.logprobs[-1].items(), key=lambda item: item[1].rank)
        first, *others = (f"{piece(llm, t)} {math.exp(entry.logprob):.0%}" for t, entry in best)
        shown.add_row(str(len(completion.token_ids)), "  ".join([f"[bold]{first}[/]", *others]))
    story.show(shown)
    after = llm.stats()
    story.say(f"The text is now: {escape(PROMPT)}[bold]{escape(completion.text)}[/]")
    num_prompt, num_decoded = (after[n] - before[n] for n in ("num_prefill_tokens", "num_decode_tokens"))
    story.say(
        f"The engine sent {num_prompt} prompt tokens through the model at once, then {num_decoded} tokens one by one: "
        f"{num_prompt + num_decoded} in all. The last token that it chose was never sent through."
    )
    return completion.token_ids


def tell_loop_without_memory(story: Story, llm: LLM, generated: list[int]) -> None:
    story.part("The same loop, with nothing remembered")
    next_logits, token_ids = next_logits_of(llm), llm.get_tokenizer()(PROMPT).input_ids
    num_prompt, before = len(token_ids), llm.stats()
    for _ in range(NUM_TOKENS):
        token_ids.append(int(next_logits(token_ids).argmax()))
    num_sent = llm.stats()["num_prefill_tokens"] - before["num_prefill_tokens"]
    same = "the same tokens" if token_ids[num_prompt:] == generated else "different tokens"
    lengths = " + ".join(str(num_prompt + i) for i in range(3))
    story.say(
        "Now a loop of three lines: it asks the engine's model for the scores of the whole text so far, takes the best "
        f"and appends it. It gets {same}, and sent {lengths} + ... = {num_sent} tokens through the model. "
        "What the engine remembers between its steps, and where, is chapter 3."
    )


def tell_heads(story: Story, llm: LLM, config: ModelConfig) -> None:
    story.part("What the last token looks at")
    token_ids = llm.get_tokenizer()(QUESTION).input_ids
    with attention_watched(llm) as layers:
        llm.generate([QUESTION], ONE_TOKEN, False)
    group, last = config.num_attention_heads // config.num_key_value_heads, len(token_ids) - 1
    found: dict[tuple[int, int], tuple[list[float], ...]] = {}
    for number, (q, k, v, *_) in enumerate(layers):
        for head in range(config.num_attention_heads):
            of_head = (x[:, head // group].tolist() for x in (k, v))
            found[number, head] = attend(q[last, head].tolist(), *of_head)
    story.say(
        f'"{escape(QUESTION)}" has {len(token_ids)} tokens, and the model {config.num_hidden_layers} layers of '
        f"{config.num_attention_heads} heads. When the last token, {piece(llm, token_ids[last])}, goes through, each "
        "head spreads its attention over the tokens so far. For each of these, the head that looks at it most:"
    )
    shown = table("looks at", "layer", "head", *(piece(llm, t) for t in token_ids))
    looks_at = {}
    for position in range(len(token_ids)):
        looks_at[position] = max(found, key=lambda at: found[at][1][position])
        number, head = looks_at[position]
        shares = (f"{weight:.1%}" for weight in found[number, head][1])
        shown.add_row(piece(llm, token_ids[position]), str(number), str(head), *shares)
    story.show(shown)

    story.part("One head, by hand")
    number, head = looks_at[last - 1]
    dots, weights, mix = found[number, head]
    q, k, v, by_torch, by_engine = layers[number]
    story.say(
        f"Layer {number}, head {head}: a query of {config.head_dim} numbers, {len(token_ids)} keys and as many values. "
        f"{group} neighboring query heads share a KV head: query head {head} reads KV head {head} // {group} = "
        f"{head // group}. Each dot product is divided by the square root of {config.head_dim}, and a softmax turns "
        "them into shares."
    )
    shown = table("position", "token", "q · k", "divided", "weight", "", left=2)
    shown.columns[-1].justify = "left"
    for position, (dot, weight) in enumerate(zip(dots, weights, strict=True)):
        scaled = dot / math.sqrt(config.head_dim)
        numbers = f"{dot:.1f}", f"{scaled:.2f}", f"{weight:.1%}"
        shown.add_row(str(position), piece(llm, token_ids[position]), *numbers, "█" * round(weight * BAR))
    story.show(shown)
    story.say("The output is the sum of the values with these weights. Its first numbers, and the engine's:")
    shown = table("computed by", "number 0", "number 1", "number 2", "gap in any head")
    mixes = torch.tensor([[found[n, h][2] for h in range(config.num_attention_heads)] for n in range(len(layers))])
    shown.add_row("hand, in Python", *(f"{x:.3f}" for x in mix[:3]), "")
    engines: tuple[tuple[str, Tensor, int], ...] = (("attention.py", by_torch, 3), ("the engine, here", by_engine, 4))
    for by, out, index in engines:
        gap = float((torch.stack([layer[index][last] for layer in layers]).cpu() - mixes).abs().max())
        first = (f"{x:.3f}" for x in out[last, head, :3].tolist())
        shown.add_row(by, *first, "below 0.0001" if gap < 1e-4 else f"{gap:.4f}")
    story.show(shown)


def tell_weights(story: Story, name: str, config: ModelConfig) -> None:
    story.part("Where the weights are")
    counts = count_parameters(config)
    total = sum(counts.values())
    shown = table("part", "numbers", "share", "MB in bf16")
    for part, count in counts.items():
        if count:
            shown.add_row(part, f"{count:,}", f"{count / total:.1%}", f"{count * BF16 / 1e6:,.1f}")
    shown.add_row("[bold]all[/]", f"{total:,}", "100.0%", f"{total * BF16 / 1e6:,.1f}")
    story.show(shown)
    story.say(
        f"These numbers never change while {name} answers: inference needs {total * BF16 / 1e6:,.0f} MB for them. "
        f"To train it with Adam takes {BYTES_TO_TRAIN} bytes a parameter instead of {BF16}: "
        f"{total * BYTES_TO_TRAIN / 1e6:,.0f} MB, before a single intermediate result is kept for the gradients."
    )


def tell_bottlenecks(story: Story, llm: LLM, name: str, config: ModelConfig) -> None:
    story.part("Two bottlenecks: reading weights, multiplying them")
    num_read = weights_read(config)
    story.say(
        "One step reads every weight once, however many tokens it computes. For each token it does one multiplication "
        "and one addition per weight (in the last product, which gives the logits, for the last token only). "
        f"{name} in float32, one step through the engine, the better of two runs:"
    )
    shown = table("tokens in the step", "weights read, MB", "arithmetic, GFLOP", "the step took", "a token took")
    vocab_size, num_head = config.vocab_size, config.vocab_size * config.hidden_size
    for num_tokens in BATCH_SIZES:
        prompt = [(i * 7919 + 11) % vocab_size for i in range(num_tokens)]
        step_ms = 1e3 * min(stopwatch(lambda: llm.generate([prompt], ONE_TOKEN, False)) for _ in range(2))  # noqa: B023
        sizes = f"{num_read * 4 / 1e6:,.0f}", f"{2 * ((num_read - num_head) * num_tokens + num_head) / 1e9:,.1f}"
        times = f"{step_ms:8.1f} ms (measured)", f"{step_ms / num_tokens:.2f} ms"
        shown.add_row(str(num_tokens), *sizes, *times)
    story.show(shown)
    story.say(
        "The same two numbers for one token of well-known models in bf16, on an H100, which by its data sheet reads "
        f"{H100_BYTES_PER_S / 1e12:.2f} TB/s and computes {H100_FLOPS / 1e12:.0f} TFLOP/s:"
    )
    shown = table("model", "parameters", "read, GB", "reading takes", "GFLOP", "arithmetic takes", "ratio")
    for other, sizes_of in {name: config, **{n: published_config(n) for n in PUBLISHED}}.items():
        total, num_read = sum(count_parameters(sizes_of).values()), weights_read(sizes_of)
        read_ms, compute_ms = num_read * BF16 / H100_BYTES_PER_S * 1e3, 2 * num_read / H100_FLOPS * 1e3
        read = f"{num_read * BF16 / 1e9:.2f}", f"{read_ms:.3f} ms"
        compute = f"{2 * num_read / 1e9:.2f}", f"{compute_ms:.4f} ms"
        shown.add_row(other, f"{total / 1e9:.3f} B", *read, *compute, f"{read_ms / compute_ms:.0f}")
    story.show(shown)
    story.say(
        "Reading takes longer by the same factor for all models: the ratio of the machine's two rates. Not counted as "
        "read is an embedding table that does not also give the logits: a token needs only one row of it."
    )


def tell_context(story: Story, llm: LLM, name: str, config: ModelConfig) -> None:
    story.part("What a long context costs")
    pool = llm.stats()["kv_pool"]
    num_tokens, per_token = pool["num_blocks"] * pool["block_size"], config.kv_bytes_per_token(4)
    story.say(
        "Each token leaves a key and a value in every layer, for the tokens that come after it. This engine has room "
        f"for {num_tokens} tokens: {num_tokens} x {per_token:,} bytes = {num_tokens * per_token:,}, and the tensor "
        f"that it made has {pool['num_bytes']:,} bytes. In bf16 a token takes half of that. In GB:"
    )
    shown = table("model", "bytes/token", *(f"{context // 1024}k" for context in CONTEXTS), "weights", "equal at")
    for other, sizes_of in {name: config, **{n: published_config(n) for n in PUBLISHED}}.items():
        per_token, weights = sizes_of.kv_bytes_per_token(BF16), sum(count_parameters(sizes_of).values()) * BF16
        cells = (f"{context * per_token / 1e9:.2f}" for context in CONTEXTS)
        shown.add_row(other, f"{per_token:,}", *cells, f"{weights / 1e9:.2f}", f"{weights // per_token:,}")
    story.show(shown)
    story.say(
        "Equal at: the number of tokens, of one user or of many, whose keys and values take as much memory as the "
        "model. Whether a model has learned to use so long a text is another matter.\n\n"
        f"{name}, one conversation that grows (█ weights, ▒ keys and values):"
    )
    per_token, weights = config.kv_bytes_per_token(BF16), sum(count_parameters(config).values()) * BF16
    unit = (weights + CONTEXTS[-1] * per_token) / (BAR + 30)
    shown = table("tokens", "MB", "", left=0)
    shown.columns[-1].justify = "left"
    for context in (0, *CONTEXTS):
        kv_bytes = context * per_token
        bar = "█" * max(1, round(weights / unit)) + "▒" * round(kv_bytes / unit)
        shown.add_row(f"{context:,}", f"{(weights + kv_bytes) / 1e6:,.0f}", bar)
    story.show(shown)
