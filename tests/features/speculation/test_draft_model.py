"""Draft models: another checkpoint, or the same in fewer bits, that drafts; and what speculative_config may say."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.grammar import grammar
from nanovllm.features.speculation.choose import Speculation
from nanovllm.features.speculation.speculative_config import SpeculativeConfig
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker.kernels import TORCH_KERNELS
from tests.checkpoints import edit, make_checkpoint
from tests.faults import plant, run_to_end
from tests.features.speculation.test_speculation import OPTIONS, Hostile, assert_same, generate, random_requests
from tests.marks import by_night


@pytest.mark.compiler
@pytest.mark.parametrize(
    "options", [by_night({}), {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 7}], ids=str
)
def test_a_draft_model_changes_nothing(checkpoint, tmp_path, eager_drafts, options):
    """A smaller model with the same vocabulary, whose draft tokens are mostly wrong, and the model itself."""
    smaller = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
    requests = random_requests(random.Random(3), 25)
    expected = generate(LLM(str(checkpoint()), **OPTIONS | options), requests)
    rates = []
    for model in (smaller, checkpoint()):
        config = {"model": str(model), "num_speculative_tokens": 4}
        llm = LLM(str(checkpoint()), speculative_config=config, **OPTIONS | options)
        for _ in ("cold", "warm"):
            found = generate(llm, requests)
            llm.engine._next_index = 0
            assert_same(found, expected)
        rates.append(llm.stats()["acceptance_rate"])
        llm.engine.speculation.proposer.manager.check_integrity()
    assert rates[0] < 0.5 < rates[1]


def test_a_model_agrees_with_itself_at_any_temperature(checkpoint, eager_drafts):
    """The draft samples with the request's noise: equal models draw equal tokens, with penalties and bias, too."""
    params = SamplingParams(temperature=1.3, top_p=0.9, max_tokens=40, ignore_eos=True, frequency_penalty=0.5, seed=4)
    llm = LLM(str(checkpoint()), speculative_config={"model": str(checkpoint())}, **OPTIONS)
    [output] = llm.generate([[5, 6, 7]], params)
    assert output.metrics.acceptance_rate == 1.0 and output.metrics.tokens_per_step > 4
    assert llm.engine.speculation.proposer.drafts, "it keeps its K/V until the next step"
    llm.generate([[9]], params)
    [left] = llm.engine.speculation.proposer.drafts
    assert left.num_prompt_tokens == 1, "what has ended gives its blocks back"


@pytest.mark.compiler
def test_the_model_in_fewer_bits(checkpoint, eager_drafts):
    requests = random_requests(random.Random(6), 12)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    llm = LLM(str(checkpoint()), speculative_config={"method": "self", "quantization": "int8"}, **OPTIONS)
    assert_same(generate(llm, requests), expected)
    assert llm.stats()["acceptance_rate"] > 0.5


@pytest.mark.nightly
def test_ranks_check_what_one_process_drafts(checkpoint, processes, eager_drafts):
    folder, requests = checkpoint(), random_requests(random.Random(8), 8)
    expected = generate(LLM(str(folder), **OPTIONS), requests)
    llm = processes.llm(folder, 2, speculative_config={"model": str(folder)}, **OPTIONS)
    assert_same(generate(llm, requests), expected, 1e-5)
    assert llm.stats()["num_accepted_tokens"] > 10


@pytest.mark.compiler
def test_an_interrupted_draft_begins_anew(checkpoint, eager_drafts, monkeypatch):
    requests = random_requests(random.Random(9), 8)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    llm = LLM(str(checkpoint()), speculative_config={"model": str(checkpoint())}, **OPTIONS)
    draft, rng = llm.engine.speculation.proposer, random.Random(9)
    fault = plant(monkeypatch, draft.runner, "run", lambda n: rng.random() < 0.1, InterruptedError)
    ids = llm.engine.enqueue([llm.engine.make_request(prompt, params) for prompt, params in requests])
    done = run_to_end(llm.engine, InterruptedError)
    assert fault.num_failures > 3
    assert_same([done[i] for i in ids], expected)


@pytest.mark.compiler
def test_a_small_draft_pool_and_few_positions(checkpoint, eager_drafts):
    """Where the draft model has no room, there are no draft tokens, and no harm."""
    requests = random_requests(random.Random(10), 12)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    config = {"model": str(checkpoint()), "max_model_len": 20}
    llm = LLM(str(checkpoint()), speculative_config=config, **OPTIONS)
    draft = llm.engine.speculation.proposer
    while len(draft.manager.free_blocks) > 8:
        draft.manager.free_blocks.popleft().ref_count = 1
    assert_same(generate(llm, requests), expected)
    assert 0 < llm.stats()["num_draft_tokens"] < 1000


def test_other_vocabularies_are_refused(checkpoint, tmp_path, broken):
    model = json.loads((broken / "tokenizer.json").read_text())["model"]
    swapped = {text: {40: 41, 41: 40}.get(i, i) for text, i in model["vocab"].items()}
    edit(broken / "tokenizer.json", model=model | {"vocab": swapped})
    with pytest.raises(ValueError, match=r"another vocabulary: token 40 is .* there and .* in the model"):
        LLM(str(checkpoint()), speculative_config={"model": str(broken)}, **OPTIONS)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LLM(str(checkpoint()), speculative_config={"model": str(tmp_path / "none")}, **OPTIONS)
    with pytest.raises(ValueError, match="int8 already"):
        config = {"method": "self", "quantization": "int8"}
        LLM(str(checkpoint()), quantization="int8", speculative_config=config, **OPTIONS)


@pytest.mark.compiler
def test_a_vocabulary_padded_to_another_size_is_the_same(tmp_path, checkpoint, eager_drafts):
    """Models of a family pad their embeddings differently; no draft token is beyond either.

    A request may name any token that the model has logits for, and a grammar's mask is as wide as these.
    """
    for sizes in ((320, 384), (384, 320)):
        last, regex = sizes[0] - 1, StructuredOutputsParams(regex="[a-z]{3}[0-9]{2,9}")
        kinds: list[dict] = [
            {"structured_outputs": regex}, {"logit_bias": {last: 3.0, 9: 2.0}}, {"logprob_token_ids": [9, last]},
            {"allowed_token_ids": [last, 9, 10]}, {"stop_token_ids": [last], "min_tokens": 5},
        ]  # fmt: skip
        named = [([5, 6, 7], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, **kind)) for kind in kinds]
        requests = random_requests(random.Random(12), 8) + named
        folders = [make_checkpoint(tmp_path / f"{sizes}{i}", "llama", vocab_size=n) for i, n in enumerate(sizes)]
        expected = generate(LLM(str(folders[0]), **OPTIONS), requests)
        llm = LLM(str(folders[0]), speculative_config={"model": str(folders[1])}, **OPTIONS)
        assert_same(generate(llm, requests), expected)
        assert llm.stats()["num_draft_tokens"] > 0


@pytest.mark.parametrize(("max_model_len", "block_size"), [(30, 16), (100, 64), (2, 16), (200, 256)])
def test_room_for_all_positions(checkpoint, max_model_len, block_size):
    """Of each sequence, in whole blocks."""
    options = OPTIONS | {"max_model_len": max_model_len, "max_num_seqs": 1, "block_size": block_size}
    llm = LLM(str(checkpoint()), speculative_config={"model": str(checkpoint())}, **options)
    assert llm.engine.speculation.proposer.max_model_len == max_model_len


def test_snapshots_of_a_hybrid_draft_model(checkpoint):
    """They are bounded as those of the model are."""
    options = {"dtype": "float32", "max_model_len": 96, "state_cache_bytes": 0}
    llm = LLM(str(checkpoint("qwen3.5")), speculative_config={"method": "self"}, **options)
    runners = llm.engine.model_runner, llm.engine.speculation.proposer.runner
    assert [runner.states.slots.max_snapshots for runner in runners] == [0, 0]


def test_rejected_draft_tokens_cost_no_patience(checkpoint, eager_drafts, monkeypatch):
    """A grammar's time is that of its masks, and a draft model asks for masks of its own, which end nobody's answer."""
    monkeypatch.setattr(grammar, "FREE_S", 0.0)
    ticks = iter(range(10**6))
    monkeypatch.setattr(grammar, "time", SimpleNamespace(thread_time=lambda: next(ticks) / 2000))  # a mask takes 0.5 ms
    llm = LLM(str(checkpoint()), speculative_config={"method": "self", "num_speculative_tokens": 8}, **OPTIONS)
    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(regex="[a-z]{30,40}"))
    [output] = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert output.outputs[0].finish_reason != "error"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "method must be one of ngram, draft_model, self, found None"),
        ({"method": "eagle"}, "found 'eagle'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "between 1 and 64, found 0"),
        ({"method": "ngram", "model": "x"}, "model is for draft_model"),
        ({"method": "draft_model"}, "model must be a checkpoint's directory or a hub id, found None"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "is more than prompt_lookup_max=2"),
        ({"method": "ngram", "prompt_lookup_max": 65}, "prompt_lookup_max must be a whole number between 1 and 64"),
        ({"method": "self", "prompt_lookup_max": 2}, "prompt_lookup_max is for ngram"),
        ({"method": "self", "quantization": "int2"}, "one of int8, int4, found 'int2'"),
        ({"method": "ngram", "num_speculative_token": 2}, "did you mean 'num_speculative_tokens'"),
        ({"model": "x", "draft_tensor_parallel_size": 2}, "takes 'draft_tensor_parallel_size' only as 1"),
        ("ngram", "must be a dict"),
    ],
)
def test_bad_configs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        LLM("no/model", speculative_config=config)


def test_defaults():
    assert SpeculativeConfig(model="x").method == "draft_model"
    assert SpeculativeConfig(model=Path("x")) == SpeculativeConfig(model="x")
    assert SpeculativeConfig(method="self").quantization == "int4"
    given = [{}, {"prompt_lookup_max": 5}, {"prompt_lookup_min": 3}, {"prompt_lookup_max": 6, "prompt_lookup_min": 1}]
    found = [SpeculativeConfig(method="ngram", **options) for options in given]
    assert [(c.prompt_lookup_max, c.prompt_lookup_min) for c in found] == [(4, 2), (5, 5), (3, 3), (6, 1)]


@pytest.mark.nightly
@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", None), ("float16", "int8")])
def test_a_draft_row_is_computed_bit_for_bit_as_a_decode(short_demo, dtype, quantization, eager_drafts):
    """By the C kernels, for one stream: the same logprobs, not nearly the same ones."""
    options = dict(dtype=dtype, quantization=quantization, max_model_len=256, max_num_seqs=2)
    params = SamplingParams(temperature=0.5, seed=2, max_tokens=40, ignore_eos=True, logprobs=3)
    requests = [(list(range(100, 130)) * 2, params), ([7, 8, 9], params)]
    plain, drafting = LLM(str(short_demo), **options), LLM(str(short_demo), **options)
    if plain.engine.model_runner.kernels is TORCH_KERNELS:
        pytest.skip("there is no C compiler")
    expected = [output for request in requests for output in generate(plain, [request])]
    answers = [o.prompt_token_ids + o.outputs[0].token_ids for o in expected]
    drafting.engine.wings["speculation"] = Speculation(Hostile(answers, random.Random(1)), 8, 100)
    found = [output for request in requests for output in generate(drafting, [request])]
    assert drafting.stats()["num_accepted_tokens"] > 20
    assert [o.outputs for o in found] == [o.outputs for o in expected]


def test_a_draft_without_a_token_is_empty(checkpoint, eager_drafts):
    llm = LLM(str(checkpoint()), speculative_config={"model": str(checkpoint())}, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [expected] = llm.generate([[5, 6, 7]], params)
    llm.engine.speculation.proposer.runner.model.embed_tokens.data[:] = torch.nan
    [found] = llm.generate([[5, 6, 7]], params)
    assert expected.metrics.num_draft_tokens > 0 == found.metrics.num_draft_tokens
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
