"""logits_processors: functions of the caller's, in every way in which a row may be sampled."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.logits_processors.functions import CallersFunctions, num_arguments
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker.sampler import SamplingBatch, sample
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.features.speculation.test_speculation import Hostile, reckless

PROMPT = [5, 6, 7, 8, 9]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def no_even(generated: list[int], row: torch.Tensor) -> torch.Tensor:
    row[::2] = -torch.inf
    return row


def count_up(prompt: list[int], generated: list[int], row: torch.Tensor) -> torch.Tensor:
    """The tokens that follow the prompt's last one. +infinity, as vLLM's scripts write it."""
    row[prompt[-1] + 1 + len(generated)] = torch.inf
    return row


def fails_later(generated: list[int], row: torch.Tensor) -> torch.Tensor:
    row.zero_()
    return [row][len(generated) // 3]


def test_what_is_chosen_and_what_is_reported(llm):
    """Greedy and drawn; logprobs are of the raw logits; who has no function is left alone."""
    drawn = replace(GREEDY, temperature=1.5, seed=3, logprobs=2)
    plain = llm.generate([PROMPT] * 2, [GREEDY, drawn])
    params = [replace(p, logits_processors=[no_even]) for p in (GREEDY, drawn)]
    params += [replace(p, logits_processors=[count_up, no_even]) for p in (GREEDY, drawn)]
    odd, drawn_odd, counted, drawn_counted, *others = llm.generate([PROMPT] * 6, [*params, GREEDY, drawn])
    for output in (odd, drawn_odd):
        assert len(output.outputs[0].token_ids) == 10 and all(token % 2 for token in output.outputs[0].token_ids)
    for output in (counted, drawn_counted):  # one after another: what count_up wants, no_even may rule out
        assert output.outputs[0].token_ids[1::2] == [11, 13, 15, 17, 19]
        assert all(token % 2 for token in output.outputs[0].token_ids)
    assert [o.outputs[0] for o in others] == [o.outputs[0] for o in plain]
    raw = plain[1].outputs[0].logprobs[0]
    assert {t: e for t, e in drawn_odd.outputs[0].logprobs[0].items() if t in raw}.items() <= raw.items()


def test_the_prompt_comes_first_where_three_are_taken(llm):
    params = replace(GREEDY, n=2, temperature=1.0, logits_processors=[count_up])
    [output] = llm.generate([PROMPT], params)
    assert [sample.token_ids for sample in output.outputs] == [list(range(10, 20))] * 2


def test_order():
    """After the bias, before penalties and temperature."""
    seen = []

    def look(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        seen.append((list(generated), row.tolist()))
        return row * 2

    params = SamplingParams(
        temperature=0, logit_bias={3: 5.0}, allowed_token_ids=[1, 3], repetition_penalty=4.0, logits_processors=[look]
    )
    seq = Sequence([3], params)
    seq.parts["functions"] = CallersFunctions(params.logits_processors)
    logits = torch.tensor([[9.0, 4.0, 9.0, 1.0]])
    assert sample(logits, SamplingBatch.from_sequences([seq]))[0] == [1]
    assert seen == [([], [-torch.inf, 4.0, -torch.inf, 6.0])]
    assert logits.tolist() == [[-torch.inf, 8.0, -torch.inf, 3.0]]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (fails_later, "(fails_later) failed: IndexError: list index out of range ("),
        (lambda generated, row: None, "it must return the row, [320], found None"),
        (lambda generated, row: row[:5], "it must return the row, [320], found [5]"),
        (lambda generated, row: row.fill_(torch.nan), "the logits hold NaN"),
    ],
)
def test_a_failure_ends_its_own_request(llm, caplog, function, text):
    params = replace(GREEDY, logits_processors=[no_even, function], n=2)
    request = llm.engine.make_request(PROMPT, params)
    other = llm.engine.make_request(PROMPT, replace(GREEDY, logits_processors=[no_even]))
    llm.engine.enqueue([request, other])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    num_before = 3 if function is fails_later else 0
    for sample_ in request.samples:
        assert sample_.seq.finish_reason == "error" and text in sample_.error
        assert sample_.seq.num_generated_tokens == num_before
    assert text in caplog.text
    [alone] = llm.generate([PROMPT], replace(GREEDY, logits_processors=[no_even]))
    assert other.output().outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_is_no_failure_of_a_function_undoes_the_step(llm):
    """Ctrl-C in the middle of a function: the request goes on with the next step, and ends as it would have."""
    interrupts = [KeyboardInterrupt]

    def interrupted(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        if len(generated) == 4 and interrupts:
            raise interrupts.pop()
        return no_even(generated, row)

    [expected] = llm.generate([PROMPT], replace(GREEDY, logits_processors=[no_even]))
    request = llm.engine.make_request(PROMPT, replace(GREEDY, logits_processors=[interrupted]))
    llm.engine.enqueue([request])
    with pytest.raises(KeyboardInterrupt):
        while True:
            llm.engine.step()
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert request.output().outputs[0].token_ids == expected.outputs[0].token_ids


def test_with_drafts_and_preemption(checkpoint):
    """Functions that look at what came before; draft tokens for which one fails cost nothing if they are rejected."""

    def moody(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        if generated[-1:] == [300]:  # which is never chosen, and often drafted
            raise RuntimeError("a draft token")
        row[300] = -torch.inf
        return row.roll(len(generated) + sum(generated[-2:]))

    prompts = [[i, *PROMPT] for i in range(20, 26)]
    params = [replace(GREEDY, max_tokens=20, logits_processors=[moody], temperature=i % 2, seed=i) for i in range(6)]
    params[0] = replace(params[0], max_tokens=12, logits_processors=[fails_at_ten])
    folder = str(checkpoint())
    expected = [o.outputs[0] for o in LLM(folder, **SMALL).generate(prompts, params)]
    assert [o.finish_reason for o in expected] == ["error"] + ["length"] * 5 and len(expected[0].token_ids) == 10
    speculative = {"method": "ngram", "num_speculative_tokens": 6}
    llm = LLM(folder, **SMALL | dict(num_gpu_blocks_override=24, max_model_len=64), speculative_config=speculative)
    known = [prompt + output.token_ids for prompt, output in zip(prompts, expected, strict=True)]
    known += [prompt + output.token_ids[:7] + [300, 4, 5] for prompt, output in zip(prompts, expected, strict=True)]
    llm.engine.wings["speculation"] = reckless(Hostile(known, random.Random(0)), random.Random(0))
    assert [o.outputs[0] for o in llm.generate(prompts, params)] == expected
    assert llm.stats()["num_accepted_tokens"] > 0 and llm.stats()["num_preemptions"] > 0


def fails_at_ten(generated: list[int], row: torch.Tensor) -> torch.Tensor:
    assert len(generated) < 10
    return row


def test_a_grammar_cannot_be_left(llm):
    pytest.importorskip("llguidance")

    def anything(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(row)

    fitting = StructuredOutputsParams(choice=["two gulls", "a red boat"])
    params = SamplingParams(max_tokens=40, structured_outputs=fitting, logits_processors=[anything], seed=1)
    assert llm.generate([PROMPT], params)[0].outputs[0].text in ("two gulls", "a red boat")


def test_what_is_refused(llm):
    expect("logits_processors must be a list of functions", SamplingParams, logits_processors=no_even)
    for wrong in (5, "f", None, lambda: 0, lambda row: row, lambda a, b, c, d: d):
        expect("which cannot be called as f(generated_token_ids", SamplingParams, logits_processors=[wrong])
    assert SamplingParams(logits_processors=None) == SamplingParams(logits_processors=[]) == SamplingParams()
    scaled = partial(lambda generated, row, scale: row * scale, scale=2.0)
    assert [num_arguments(f) for f in (no_even, count_up, scaled, lambda *args: args[-1], max)] == [2, 3, 2, 2, 2]


def test_ranks_refuse(llm, monkeypatch):
    object.__setattr__(llm.engine.config, "tensor_parallel_size", 2)
    expect(
        "logits_processors need tensor_parallel_size=1",
        llm.generate,
        [PROMPT],
        SamplingParams(logits_processors=[no_even]),
    )
