"""Beam search: against transformers' own, against all continuations, and against a slow twin of vLLM's rules."""

import math
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from nanovllm.features.beam_search.params import BeamSearchSequence
from nanovllm.features.beam_search.search import Search
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import BeamSearchParams, SamplingParams
from tests.checkpoints import SIZES, SMALL, reference_logits, reference_model
from tests.errors import expect
from tests.features.images.test_images import reference_logits as logits_with_images
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [40, 41, 42], list(range(60, 80))]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), **SMALL)


def slow_beams(
    folder: Path, prompt: list[int], params: BeamSearchParams, eos: frozenset[int]
) -> list[tuple[list[int], float]]:
    """The same rules in a few lines: the whole text of each beam is computed anew for each token."""

    def score(beam: tuple[list[int], float]) -> float:
        tokens, total = beam
        return total / (len(tokens) - (tokens[-1] in eos)) ** params.length_penalty

    beams, completed = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        longer = []
        for tokens, total in beams:
            best = reference_logits(folder, tokens)[-1].log_softmax(-1).topk(2 * params.beam_width)
            for logprob, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                is_complete = token in eos and not params.ignore_eos
                (completed if is_complete else longer).append(([*tokens, token], total + logprob))
        beams = sorted(longer, key=score, reverse=True)[: params.beam_width]
    return sorted(completed + beams, key=score, reverse=True)[: params.beam_width]


def check(sequences: list[BeamSearchSequence], expected: list[tuple[list[int], float]]) -> None:
    assert [beam.tokens for beam in sequences] == [tokens for tokens, _ in expected]
    assert [beam.cum_logprob for beam in sequences] == pytest.approx([total for _, total in expected], abs=1e-3)


@pytest.mark.parametrize("options", [dict(), dict(length_penalty=0.0), dict(length_penalty=2.5), dict(ignore_eos=True)])
def test_against_a_slow_twin(checkpoint, options):
    """The most likely token after the prompt is EOS: some beams end early."""
    llm, folder = LLM(str(checkpoint()), **SMALL), checkpoint()
    for prompt in PROMPTS:
        eos = int(reference_logits(folder, prompt)[-1].argmax())
        llm.get_tokenizer().eos_token = llm.get_tokenizer().convert_ids_to_tokens(eos)
        assert llm.get_tokenizer().eos_token_id == eos
        params = BeamSearchParams(beam_width=3, max_tokens=6, **options)
        [output] = llm.beam_search([prompt], params)
        check(output.sequences, slow_beams(folder, prompt, params, llm.engine.model_config.eos_token_ids | {eos}))
        lengths = {len(beam.tokens) for beam in output.sequences}
        if params.ignore_eos:
            assert lengths == {len(prompt) + 6}
        elif params.length_penalty <= 1:  # more favours the long ones
            assert len(prompt) + 1 in lengths
        for beam in output.sequences:
            assert len(beam.logprobs) == len(beam.tokens) - len(prompt)
            chosen = zip(beam.logprobs, beam.tokens[len(prompt) :], strict=True)
            assert beam.cum_logprob == sum(entries[token].logprob for entries, token in chosen)
            assert beam.text == llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=True)


def test_against_transformers(llm, checkpoint):
    """Without a length penalty: with one, a beam that happens to end in EOS counts a token less in vLLM's score."""
    params = BeamSearchParams(4, 8, ignore_eos=True, length_penalty=0.0)
    how = dict(num_beams=4, num_return_sequences=4, max_new_tokens=8, do_sample=False, length_penalty=0.0)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        tokens = torch.tensor([prompt])
        theirs = reference_model(checkpoint()).generate(tokens, eos_token_id=None, pad_token_id=0, **how)
        assert [beam.tokens for beam in output.sequences] == theirs.tolist()


def test_a_width_of_all_words_finds_the_best_of_all(llm, checkpoint):
    vocab_size, prompt = SIZES["vocab_size"], PROMPTS[1]
    [output] = llm.beam_search([prompt], BeamSearchParams(beam_width=vocab_size, max_tokens=2, ignore_eos=True))
    first = reference_logits(checkpoint(), prompt)[-1].log_softmax(-1)
    both = torch.tensor([[*prompt, token] for token in range(vocab_size)])
    with torch.inference_mode():
        second = reference_model(checkpoint())(both).logits[:, -1].log_softmax(-1)
    best = (first[:, None] + second).flatten().topk(20)
    pairs = [[*prompt, *divmod(index, vocab_size)] for index in best.indices.tolist()]
    assert len(output.sequences) == vocab_size
    check(output.sequences[:20], list(zip(pairs, best.values.tolist(), strict=True)))


@pytest.mark.compiler
def test_company_salts_and_limits(checkpoint):
    """Prompts together, a few at a time, in a tight pool: the same beams. What they share comes from the cache."""
    params = BeamSearchParams(beam_width=3, max_tokens=9)
    llm = LLM(str(checkpoint()), **SMALL)
    alone = [llm.beam_search(prompt, params)[0] for prompt in PROMPTS]
    assert llm.stats()["prefix_cache"]["hits"] > 20
    tight = LLM(str(checkpoint()), **SMALL | dict(num_gpu_blocks_override=20, max_model_len=64))
    salted = [{"prompt_token_ids": prompt, "cache_salt": "mine"} for prompt in PROMPTS]
    for found in (
        llm.beam_search(PROMPTS, params),
        llm.beam_search(salted, params, concurrency_limit=2),
        tight.beam_search(PROMPTS, params),
    ):
        for output, expected in zip(found, alone, strict=True):
            assert [(b.tokens, b.cum_logprob) for b in output.sequences] == [
                (b.tokens, b.cum_logprob) for b in expected.sequences
            ]
    short = LLM(str(checkpoint()), **SMALL | dict(max_model_len=24))
    [first, *_, last] = short.beam_search(PROMPTS, BeamSearchParams(2, 1000, ignore_eos=True))
    assert {len(beam.tokens) for output in (first, last) for beam in output.sequences} == {24}
    assert llm.beam_search([], params) == []


def test_nothing_is_asked_once_all_beams_have_ended(checkpoint, monkeypatch):
    """However many tokens are allowed, and whatever is left of the prompts."""
    llm = LLM(str(checkpoint()), **SMALL | dict(max_model_len=24))
    generate, num_asked = llm.generate, []

    def counted(prompts, *options):
        num_asked.append(len(prompts))
        assert prompts, "a call without any beam"
        return generate(prompts, *options)

    monkeypatch.setattr(llm, "generate", counted)
    llm.beam_search(PROMPTS, BeamSearchParams(2, 2**31 - 1, ignore_eos=True))
    assert len(num_asked) == 24 - min(map(len, PROMPTS))


def test_a_text_as_a_prompt(llm):
    [output] = llm.beam_search(["the quick"], BeamSearchParams(beam_width=2, max_tokens=3))
    assert all(beam.text.startswith("the quick") for beam in output.sequences)
    assert output.sequences[0].orig_prompt["prompt"] == "the quick" and output.sequences[0].finish_reason is None
    [greedy] = llm.generate(["the quick"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    [output] = llm.beam_search(["the quick"], BeamSearchParams(1, 3, ignore_eos=True, temperature=1.0))
    assert output.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_5", by_night("idefics3"), by_night("qwen3_vl")])
def test_pictures(kind, tmp_path):
    """Of several prompts, each with its own: scores are transformers', and a beam's prompt can be gone on with."""
    folder = make_image_checkpoint(tmp_path, kind)
    llm = LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=300, max_model_len=300)
    mark = "<image>" if kind in ("smolvlm", "idefics3") else "<|vision_start|><|image_pad|><|vision_end|>"
    pictures = [picture(60, 40), picture(40, 60, 1)]
    prompts = [{"prompt": f"a {mark} boat", "multi_modal_data": {"image": [image]}} for image in pictures]
    params = BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True)
    outputs = llm.beam_search(prompts, params)
    for prompt, output, image in zip(prompts, outputs, pictures, strict=True):
        best, num_prompt_tokens = output.sequences[0], len(output.sequences[0].tokens) - params.max_tokens
        rows = logits_with_images(llm, folder, best.tokens, [image], params.max_tokens).log_softmax(-1)
        chosen = range(num_prompt_tokens, len(best.tokens))
        assert best.cum_logprob == pytest.approx(sum(float(rows[i - 1, best.tokens[i]]) for i in chosen), abs=1e-2)
        one_more = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        [again] = llm.generate(best.orig_prompt | {"prompt_token_ids": best.tokens}, one_more, use_tqdm=False)
        assert again.outputs[0].token_ids == [int(rows[-1].argmax())]
        [greedy] = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        [one] = llm.beam_search([prompt], BeamSearchParams(1, 4, ignore_eos=True))
        assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
    other = {"prompt": "two gulls", "multi_modal_data": outputs[0].sequences[0].orig_prompt["multi_modal_data"]}
    expect("these images belong to another prompt", llm.generate, other)


def test_a_beam_that_fails_goes_no_further():
    def output(reason: str, logprobs: list) -> RequestOutput:
        return RequestOutput(
            "", None, [5], [CompletionOutput(0, "", [], reason, None, 0.0, logprobs)], True, 0, METRICS
        )

    METRICS = RequestMetrics(0.0)
    search = Search(BeamSearchSequence({}, [5], [], None, -1.0), BeamSearchParams(2, 3), eos_token_ids=frozenset({1}))
    search.take_in([output("error", [])])
    [beam] = search.completed
    assert beam.finish_reason == "error" and not search.beams and math.isclose(search.score(beam), -1.0)


def test_no_more_completed_beams_are_kept_than_are_given_back():
    search = Search(BeamSearchSequence({}, [5], []), BeamSearchParams(2, 9), eos_token_ids=frozenset({1}))
    for _ in range(9):
        entries = {token_id: Logprob(-0.1 * token_id, token_id, None) for token_id in range(1, 5)}
        completion = CompletionOutput(0, "", [1], "length", None, 0.0, [entries])
        search.take_in([RequestOutput("", None, [5], [completion], True, 0, RequestMetrics(0.0))] * len(search.beams))
    assert [len(beam.tokens) for beam in search.beams] == [10, 10]
    assert [beam.tokens for beam in search.completed] == [[5, 1], [5, 2, 1]]


def test_what_is_refused(llm):
    params = BeamSearchParams(2, 3)
    expect("params must be BeamSearchParams, found SamplingParams", llm.beam_search, PROMPTS, SamplingParams())
    expect("prompts[1]: token id 5000", llm.beam_search, [[5], [5000]], params)
    expect("3 prompts need 3 lora_request", llm.beam_search, PROMPTS, params, [None])
    expect("priority=1 asks for another order", llm.beam_search, PROMPTS, params, priority=1)
    expect("beam_search has no argument 'use_tdqm'", llm.beam_search, PROMPTS, params, use_tdqm=False)
    expect("did you mean 'concurrency_limit'?", llm.beam_search, PROMPTS, params, concurrency_limits=2)
    expect("concurrency_limit must be a whole number from 1", llm.beam_search, PROMPTS, params, concurrency_limit=0)
    expect("beam_width must be a whole number between 1", BeamSearchParams, 0, 3)
    expect("max_tokens must be a whole number", BeamSearchParams, beam_width=2)
    expect("ignore_eos must be True or False", BeamSearchParams, 2, 3, ignore_eos=1)
    expect("length_penalty must be a number between -30.0 and 30.0", BeamSearchParams, 2, 3, length_penalty=100.0)
    expect("takes 'structured_outputs' only as None", BeamSearchParams, 2, 3, structured_outputs={"regex": "a"})
    expect("did you mean 'beam_width'?", BeamSearchParams, beam_widths=2)
    assert BeamSearchParams(2, 3, include_stop_str_in_output=True) == params
