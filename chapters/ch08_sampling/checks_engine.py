"""The real sampler with a student's function in it, and a model that generates with it (chapter 8). Needs torch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from chapters.ch08_sampling.checks import ask_choices, ask_draw, ask_min_p, ask_top_p
from chapters.ch08_sampling.choices import choices_by
from chapters.ch08_sampling.company import draws_with, generate_in_order, preemptions_watched
from chapters.expect import expect
from chapters.grading import PROMPTS, Bench, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.worker import sampler
from nanovllm.worker.sampler import SamplingBatch, logit_threshold

OUR_SAMPLE_RANDOMLY = sampler.sample_randomly
OUR_FROM_SEQUENCES = SamplingBatch.from_sequences.__func__
TEXTS = [" a red boat", " a red boat in the fog", " a boat", " the lazy dog", " gulls"]  # the first begins the second


def filtered(logits: Tensor, batch: SamplingBatch, *, with_top_p: bool) -> Tensor:
    """Probabilities [R, vocab_size] after the engine's filters: zeros where they cut, not renormalized."""
    scaled = logits / batch.temperature[:, None]
    top_k = torch.where(batch.top_k > 0, batch.top_k, logits.shape[1]).clamp(max=logits.shape[1])
    top_p = batch.top_p if with_top_p else torch.ones_like(batch.top_p)
    threshold = logit_threshold(scaled, top_k, top_p, batch.min_p)
    return scaled.softmax(-1).masked_fill(scaled < threshold[:, None], 0.0)


def without(batch: SamplingBatch, *names: str) -> SamplingBatch:
    """The same batch with these settings where they do nothing."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    settings: dict[str, Any] = {name: torch.full_like(getattr(batch, name), off[name]) for name in names}
    return replace(batch, **settings)


def use_top_p(function: Callable) -> AbstractContextManager[None]:
    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        probs = filtered(logits, batch, with_top_p=False)
        kept = [ask_top_p(function, row.tolist(), float(p)) for row, p in zip(probs, batch.top_p, strict=True)]
        logits = logits.masked_fill(~torch.tensor(kept), -torch.inf)
        return OUR_SAMPLE_RANDOMLY(logits, without(batch, "top_k", "top_p", "min_p"))

    return draws_with(sample_randomly)


def use_min_p(function: Callable) -> AbstractContextManager[None]:
    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        settings = zip(logits, batch.temperature, batch.min_p, strict=True)
        probs = [ask_min_p(function, row.tolist(), float(t), float(p)) for row, t, p in settings]
        return OUR_SAMPLE_RANDOMLY(torch.tensor(probs).log(), without(batch, "temperature", "min_p"))

    return draws_with(sample_randomly)


@contextmanager
def use_draw(function: Callable) -> Iterator[None]:
    """The sampler gets only numbers, so the sequences are noted where the engine packs them."""
    packed: list[Sequence] = []

    def from_sequences(cls: type, seqs: Any, *args: Any) -> SamplingBatch:
        packed[:] = seqs
        return OUR_FROM_SEQUENCES(cls, seqs, *args)

    def sample_randomly(logits: Tensor, batch: SamplingBatch) -> Tensor:
        probs = filtered(logits, batch, with_top_p=True).double().tolist()
        return torch.tensor(ask_draw(function, probs, [packed[row] for row in batch.random_rows.tolist()]))

    packs = replaced(SamplingBatch, "from_sequences", classmethod(from_sequences))
    with packs, draws_with(sample_randomly):
        yield


def use_choices(function: Callable) -> AbstractContextManager[None]:
    def allowed_tokens(choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
        return ask_choices(function, choices, generated, eos_token_id)

    return choices_by(allowed_tokens)


def same_samples(bench: Bench, *settings: dict[str, Any]) -> None:
    """What is generated with the student's function, and with ours put back for a moment, from an empty cache."""
    params = [SamplingParams(seed=i, max_tokens=12, ignore_eos=True, **each) for i, each in enumerate(settings, 1)]

    def generate() -> list[list[int]]:
        bench.llm.reset_prefix_cache()
        return [output.outputs[0].token_ids for output in bench.llm.generate(PROMPTS, params, False)]

    theirs, text = generate(), bench.llm.get_tokenizer().decode
    with replaced(sampler, "sample_randomly", OUR_SAMPLE_RANDOMLY):
        ours = generate()
    for prompt, options, a, b in zip(PROMPTS, settings, ours, theirs, strict=True):
        expect(text(a), text(b), f"{prompt!r} with {options} continues differently than with our filter")


def generate_with_top_p(function: Callable, bench: Bench) -> None:
    with use_top_p(function):
        first, second = dict(temperature=1.0, top_p=0.9), dict(temperature=1.3, top_p=0.6, top_k=50)
        same_samples(bench, first, second, dict(temperature=0.8, top_p=0.95, min_p=0.02))


def generate_with_min_p(function: Callable, bench: Bench) -> None:
    with use_min_p(function):
        first, second = dict(temperature=1.0, min_p=0.1), dict(temperature=1.5, min_p=0.05, top_k=50)
        same_samples(bench, first, second, dict(temperature=0.7, min_p=0.01, top_p=0.9))


def generate_with_draw(function: Callable, bench: Bench) -> None:
    with use_draw(function):
        generate_in_company(bench)


def generate_in_company(bench: Bench) -> None:
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "num_gpu_blocks_override": 12, "block_size": 8}
    llm = LLM(bench.model, dtype="float32", **sizes)
    watched, text, num_preempted = PROMPTS[0], llm.get_tokenizer().decode, 0
    alone: list[int] = []
    for company, prompts in {
        "alone": [watched],
        "after another request": [PROMPTS[1], watched],
        "after three others, in a pool that is too small,": [PROMPTS[1], PROMPTS[2], "I", watched],
    }.items():
        seeds = [5 if prompt == watched else None for prompt in prompts]
        params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in seeds]
        with preemptions_watched() as preempted:
            got = generate_in_order(llm, prompts, params)[-1].outputs[0].token_ids
        alone = alone or got
        num_preempted = sum(seq.seed == 5 for seq in preempted)
        hint = f"{company} the request (preempted {num_preempted} times) gets different tokens than when it is alone"
        expect(text(alone), text(got), hint)
    assert num_preempted, "the pool of this check is too large"
    [output] = generate_in_order(llm, [watched], [SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True)])
    samples = [text(completion.token_ids) for completion in output.outputs]
    if len(set(samples)) < 3:
        raise Wrong("n=3 gives the same text more than once", expected="three texts", got=samples)
    expect(text(alone[:8]), samples[0], "sample 0 of n=3 is the same as the request on its own")


def generate_with_choices(function: Callable, bench: Bench) -> None:
    with use_choices(function):
        generate_choices(bench)


def generate_choices(bench: Bench) -> None:
    tokenizer, eos_token_ids = bench.llm.get_tokenizer(), bench.llm.engine.model_config.eos_token_ids
    asked = [(TEXTS, dict(temperature=0)), (TEXTS, dict(n=4, seed=1, temperature=1.5)), (TEXTS[2:], dict(seed=2))]
    params = [
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=texts), max_tokens=24, **options)  # pyrefly: ignore[bad-argument-type]
        for texts, options in asked
    ]
    for output, (texts, _) in zip(bench.llm.generate(PROMPTS, params, False), asked, strict=True):
        choices = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
        for completion in output.outputs:
            token_ids, reason = completion.token_ids, completion.finish_reason
            if token_ids[-1:] and token_ids[-1] in eos_token_ids:
                token_ids = token_ids[:-1]
            if token_ids not in choices or reason != "stop":
                hint = (
                    f"the engine generates none of the choices {texts}, finish_reason {reason!r}. "
                    "It asks about several sequences in turn: does anything stay from one call to the next?"
                )
                raise Wrong(hint, expected=choices, got=f"{token_ids}, {tokenizer.decode(token_ids)!r}")
