"""Recorded steps against steps that run as they are: the same tokens, and logprobs with the same bits."""

import dataclasses
import gc
import random
import weakref

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import OPTIMIZATIONS
from nanovllm.core.sequence import Sequence
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.worker.cpu import recorded_step
from nanovllm.worker.cpu.recorded_step import NotRecordable, OnlyCalls
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.sampler import SamplingBatch
from tests.checkpoints import VARIANTS
from tests.features.lora.adapters import make_adapter
from tests.features.speculation.test_speculation import OPTIONS, assert_same, generate, hostile, random_requests
from tests.marks import by_night
from tests.worker.cpu.test_kernels import kernels

MAX_ROWS = 64  # of a record here, so that a small crowd has more
AS_IT_IS = tuple(name for name in OPTIMIZATIONS if name != "recorded_step")
SIZES = dict(block_size=4, num_gpu_blocks_override=200, max_model_len=512, max_num_seqs=MAX_ROWS + 8)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(recorded_step, "MAX_ROWS", MAX_ROWS)
    monkeypatch.setattr(recorded_step, "MAX_BYTES", 0)


def load(folder, **options) -> LLM:
    llm = LLM(str(folder), **{"dtype": "float32", **SIZES, **options})
    if llm.engine.model_runner.kernels is TORCH_KERNELS:
        pytest.skip("no C compiler")
    return llm


def watched(llm: LLM) -> list[tuple[int, bool]]:
    """Of each step from now on: its rows, and whether it was replayed."""
    record, steps = llm.engine.model_runner.recorded_steps, []

    def run(batch):
        logits = run_of_record(batch)
        steps.append((len(batch.input_ids), logits is not None))
        return logits

    run_of_record, record.run = record.run, run
    return steps


def crowd() -> tuple[list[list[int]], list[SamplingParams]]:
    """More sequences than a record has rows, with common prefixes, outputs of many lengths; one has a long prompt."""
    rng = random.Random(0)
    prefix = rng.choices(range(10, 300), k=16)
    prompts = [prefix[: rng.randrange(17)] + rng.choices(range(10, 300), k=rng.randrange(1, 9)) for _ in range(71)]
    prompts[3:3] = [rng.choices(range(10, 300), k=300), prefix, prefix]
    params = [
        SamplingParams(temperature=i % 2 * 0.8, seed=i, max_tokens=1 + i % 40, ignore_eos=True, logprobs=i % 3 or None)
        for i in range(len(prompts))
    ]
    params[3] = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=2)
    return prompts, params


def results(llm: LLM, prompts=None, params=None) -> list:
    prompts, params = (prompts, params) if prompts is not None else crowd()
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [(o.token_ids, o.finish_reason, o.cumulative_logprob, o.logprobs) for o in outputs]


def test_the_logits_of_a_replayed_step_are_not_computed_again(checkpoint):
    llm = load(checkpoint())
    head, by_call, steps = llm.engine.model_runner.model.lm_head, [], watched(llm)
    product = head.product
    head.product = lambda x, *more: by_call.append(len(x)) or product(x, *more)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert by_call == [1 for _, is_replayed in steps if not is_replayed] and list(steps[-1]) == [1, True]


BY_DAY = [
    ("qwen2", {}),
    ("mistral-window", {}),
    ("qwen3.5-tied", {"dtype": "bfloat16"}),
    ("qwen3-moe", {"dtype": "bfloat16"}),
    ("llama", {"dtype": "float16"}),
    ("qwen2", {"quantization": "int4"}),
    ("llama", {"dtype": "bfloat16", "quantization": "int8"}),  # the embedding table is in float32
]
BY_NIGHT = [
    *(
        (variant, {})
        for variant in ("llama", "llama-biases", "qwen3", "smollm3", "qwen3.5", "qwen3-moe", "qwen3.5-moe")
    ),
    ("qwen3.5", {"quantization": "int8"}),
    ("qwen3-moe", {"quantization": "int4"}),
    ("llama", {"dtype": "bfloat16"}),
    ("llama", {"quantization": "int8"}),
]


@pytest.mark.parametrize(
    ("variant", "options"),
    [*BY_DAY, *(by_night(*kind) for kind in BY_NIGHT)],
    ids=[f"{variant} {' '.join(options.values())}".strip() for variant, options in BY_DAY + BY_NIGHT],
)
def test_a_recorded_step_has_the_same_bits(checkpoint, variant, options):
    """Steps of 1 row to more than a record has; prefix hits, preemption, keys in several parts."""
    recorded, plain = load(checkpoint(variant), **options), load(checkpoint(variant), optimizations=AS_IT_IS, **options)
    assert plain.engine.model_runner.recorded_steps is None
    steps = watched(recorded)
    assert results(recorded) == results(plain)
    assert all(was_replayed == (num_rows <= MAX_ROWS) for num_rows, was_replayed in steps)
    sizes = {num_rows for num_rows, was_replayed in steps if was_replayed}
    assert {1, 2, 3} < sizes and max(sizes) > MAX_ROWS - 8 and not all(was_replayed for _, was_replayed in steps)
    scheduler = recorded.engine.scheduler
    assert scheduler.num_preemptions > 0 and scheduler.block_manager.stats.hits > 0


@pytest.mark.parametrize("variant", [by_night("llama"), "qwen3.5", by_night("qwen3-moe")])
def test_a_longer_prompt_makes_the_record_longer(checkpoint, variant, monkeypatch):
    """Once; a step with more sequences than have logits in it is computed call by call."""
    monkeypatch.setattr(recorded_step, "MAX_BYTES", 64 << 20)
    options = dict(max_num_batched_tokens=100)
    recorded, plain = (load(checkpoint(variant), **options, **how) for how in ({}, {"optimizations": AS_IT_IS}))
    record, steps = recorded.engine.model_runner.recorded_steps, watched(recorded)
    assert (record.max_rows, record.most_rows) == (MAX_ROWS, 100)
    assert results(recorded) == results(plain)
    assert record.max_rows == 100 and {num_rows for num_rows, was_replayed in steps if was_replayed} > {1, 2, 100}
    inputs = record.inputs
    for prompts in [[7] * 90, [8] * 250], [[token] for token in range(10, 10 + MAX_ROWS + 8)]:
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        assert results(recorded, prompts, params) == results(plain, prompts, params)
    assert record.inputs is inputs and (MAX_ROWS + 8, False) in steps


@pytest.mark.parametrize("error", [MemoryError, NotRecordable])
def test_a_longer_record_that_fails_leaves_the_first_one(checkpoint, error, monkeypatch):
    """Where memory ran out, a step fails. Layers that can no longer be recorded are computed call by call."""
    monkeypatch.setattr(recorded_step, "MAX_BYTES", 64 << 20)
    recorded, plain = load(checkpoint()), load(checkpoint(), optimizations=AS_IT_IS)
    record, long, short = recorded.engine.model_runner.recorded_steps, [[7] * 90], [[8] * 9]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)

    def fail(*args):
        raise error("halfway")

    with monkeypatch.context() as patch:
        patch.setattr(recorded_step.RecordedStep, "_record_logits", fail)
        if error is MemoryError:
            with pytest.raises(MemoryError):
                results(recorded, long, params)
        else:
            assert results(recorded, long, params) == results(plain, long, params)
    steps = watched(recorded)
    assert record.max_rows == MAX_ROWS
    assert results(recorded, short, params) == results(plain, short, params)
    assert all(was_replayed for _, was_replayed in steps)
    assert results(recorded, long, params) == results(plain, long, params)
    assert record.max_rows == record.most_rows == (MAX_ROWS if error is NotRecordable else 2048)


def test_drafts_are_replayed(checkpoint):
    requests, options = random_requests(random.Random(4), 8), OPTIONS | {"dtype": "float32"}
    expected = generate(load(checkpoint(), optimizations=AS_IT_IS, **options), requests)
    recorded = load(checkpoint(), **options)
    hostile(recorded, expected, seed=1)
    steps = watched(recorded)
    assert_same(generate(recorded, requests), expected)
    assert recorded.stats()["num_accepted_tokens"] > 10
    assert all(was_replayed == (num_rows <= MAX_ROWS) for num_rows, was_replayed in steps)


def test_prompt_logprobs_and_penalties(checkpoint):
    params = [
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=1.5),
        SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, allowed_token_ids=[30, 31]),
    ]
    found = [
        [(o.outputs[0].token_ids, o.prompt_logprobs) for o in load(checkpoint(), optimizations=names).generate(
            [[20, 21, 22, 23]] * 3, params, use_tqdm=False)]
        for names in (OPTIMIZATIONS, AS_IT_IS)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.parametrize("options", [{}, {"optimizations": AS_IT_IS}], ids=["recorded", "as it is"])
def test_a_row_whose_square_is_infinite_gives_no_token(checkpoint, options):
    llm = load(checkpoint(), **options)
    with torch.inference_mode():
        llm.engine.model_runner.model.embed_tokens[77] = 1e25
    found = results(llm, [[5, 6], [5, 77], [7, 8]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert [reason for _, reason, *_ in found] == ["length", "error", "length"]


NOT_RECORDABLE = [
    ("llama", {"enforce_eager": True}),
    ("llama", {"optimizations": ("c_kernels", "recorded_step")}),  # PyTorch computes the products
]


@pytest.mark.parametrize(("variant", "options"), NOT_RECORDABLE)
def test_what_pytorch_computes_is_not_recorded(checkpoint, variant, options):
    runner = LLM(str(checkpoint(variant)), dtype="float32", **SIZES, **options).engine.model_runner
    assert runner.recorded_steps is None


def test_the_log_says_what_is_not_recorded(checkpoint, caplog):
    caplog.set_level("INFO", logger="nanovllm")
    load(checkpoint(), optimizations=("c_kernels", "recorded_step"))
    assert "Steps are not recorded: a layer computes aten." in caplog.text


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_architecture_is_recorded(checkpoint, variant):
    """An operation of PyTorch in one layer would make every step several times as much Python, without a word."""
    assert load(checkpoint(variant)).engine.model_runner.recorded_steps is not None


def test_other_kernels_are_used(checkpoint, monkeypatch):
    """Put in the place of those that a record was made with: no step is replayed. Afterwards steps are again."""
    llm, params = load(checkpoint()), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    steps, runner, calls = watched(llm), llm.engine.model_runner, []

    def paged_attention(*args):
        calls.append(args)
        return kernels_before.paged_attention(*args)

    kernels_before = runner.kernels
    expected = results(llm, [[5, 6, 7]], params)
    assert all(was_replayed for _, was_replayed in steps)
    steps.clear()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "kernels", dataclasses.replace(kernels_before, paged_attention=paged_attention))
        assert results(llm, [[5, 6, 7]], params) == expected
    assert len(calls) >= 4 and not steps
    assert results(llm, [[5, 6, 7]], params) == expected
    assert [was_replayed for _, was_replayed in steps] == [True] * 4


def test_an_engine_that_is_dropped_gives_its_memory_back(checkpoint):
    gc.collect()
    gc.disable()
    try:
        llm = load(checkpoint())
        results(llm, [[5, 6, 7]], SamplingParams(max_tokens=3))
        pool = weakref.ref(llm.engine.model_runner.kv_cache)
        del llm
        assert pool() is None
    finally:
        gc.enable()


def test_only_memory_and_views_are_not_calls():
    x, memory = torch.zeros(4, 6), []
    with torch.inference_mode(), OnlyCalls(memory):
        first, second = x.split((2, 4), dim=1)
        x.view(2, 12), first.unflatten(1, (2, 1)), x.contiguous(), x.new_empty(3), torch.empty_like(x)
    assert [len(made) for made in memory] == [3, 4] and second.shape == (4, 4)
    with torch.inference_mode(), OnlyCalls(memory):  # the same places again
        assert x.new_empty(3).data_ptr() == memory[0].data_ptr()
    shared, kinds = [], [((3,), (5,), (3,)), ((3,), (7,), (3,))]
    for shapes in kinds * 3:  # layers of two kinds take turns, and the places of both are enough
        with torch.inference_mode(), OnlyCalls(shared):
            found = [x.new_empty(shape) for shape in shapes]
        assert [tuple(place.shape) for place in found] == [*shapes] and len({id(place) for place in found}) == 3
    assert len(shared) == 5
    copies = [lambda: x + 1, lambda: x.add_(1), lambda: first.reshape(8), lambda: first.contiguous(), lambda: x[[0, 1]]]
    for copy in (*copies, lambda: x[0, 0].item(), lambda: x.tolist(), lambda: torch.tensor([1])):
        with pytest.raises(NotRecordable), torch.inference_mode(), OnlyCalls([]):
            copy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 16, 255, 300, 4099])
def test_most_likely(dtype, size):
    """The first of several that are equal; no token where a number is NaN or infinite, or all are -infinity."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(40, size, generator=generator).mul(3).round()  # many are equal
    logits[3, size // 2], logits[4, -1], logits[5, 0] = torch.nan, torch.inf, -torch.inf
    logits[6], logits[7, :-1], logits[8] = -torch.inf, -torch.inf, 0
    batch = SamplingBatch.from_sequences([Sequence([0], SamplingParams(temperature=0))] * 40)
    found, expected = (each.choose_tokens(logits, batch).tolist() for each in (kernels(dtype, 4, 2, 16), TORCH_KERNELS))
    assert found == expected and found[3] == found[4] == found[6] == -1 and found[7] == size - 1 and found[8] == 0


def test_a_step_with_an_adapter_is_not_replayed(checkpoint, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", checkpoint(), target_modules=["q_proj", "down_proj", "lm_head"])
    prompts, params = [[20, 21, 22]] * 2, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    chosen = [None, LoRARequest("adapter", 1, str(adapter))]
    llms = [load(checkpoint(), enable_lora=True, optimizations=names) for names in (OPTIMIZATIONS, AS_IT_IS)]
    steps = watched(llms[0])
    for adapters in (None, chosen, None):
        found, expected = (llm.generate(prompts, params, use_tqdm=False, lora_request=adapters) for llm in llms)
        assert [o.outputs[0].logprobs for o in found] == [o.outputs[0].logprobs for o in expected]
        assert steps == ([] if adapters else [(6, True), *[(2, True)] * 3])  # the record is not even asked
        steps.clear()
        assert llms[0].reset_prefix_cache()
