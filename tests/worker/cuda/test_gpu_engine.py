"""The engine on a pretend GPU, from LLM(...) to the text: the tokens are those of PyTorch on the CPU, in float32.

On a real GPU test_cuda.py asks the same of real kernels.
"""

import asyncio
import gc
import random
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch

from nanovllm import LLM, LoRARequest, PoolingParams, SamplingParams
from nanovllm.features.logprobs import scores
from nanovllm.features.speculation.draft_model import DraftModel
from nanovllm.features.speculation.step_times import StepTimes
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.engine_thread import EngineDied, StepFailed
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda import gpu_kernels, graphs
from nanovllm.worker.kernels import TORCH_KERNELS, rotate
from nanovllm.worker.model_runner import ModelRunner
from tests.checkpoints import HYBRIDS, VARIANTS, make_checkpoint
from tests.features.lora.adapters import make_adapter
from tests.features.speculation.test_speculation import assert_same, generate, random_requests
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night
from tests.parity import SETTINGS, check_setting
from tests.pretend_gpu import PretendGPU, pretend_gpu
from tests.worker.cpu.test_kernels import ragged_batch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU: see test_cuda.py")

ROOT = Path(__file__).parents[3]
PYTORCH, TRITON, GRAPHS = (), ("triton",), ("triton", "cuda_graphs")
FLASH = ("triton", "flash_attn", "cuda_graphs")
# Small enough for Triton's interpreter: the step that measures memory computes max_num_batched_tokens.
OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=64, max_model_len=64, max_num_seqs=4)
OPTIONS["max_num_batched_tokens"] = 24
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


# Triton's interpreter takes seconds for each case: by day one of a kind is enough.
BACKENDS = pytest.mark.parametrize("optimizations", [PYTORCH, by_night(GRAPHS)], ids=["pytorch", "graphs"])


@pytest.fixture
def gpu():
    with pretend_gpu() as gpu:
        yield gpu


def prompts_of(seed: int = 0) -> list[list[int]]:
    """Five, two with a common beginning; together more than a step takes, and more than run at a time."""
    rng = random.Random(seed)
    shared = rng.choices(range(10, 300), k=17)
    return [*(rng.choices(range(10, 300), k=k) for k in (5, 9, 1)), [*shared, 7], [*shared, 8, 9, 10]]


# Enough for most of what Triton's interpreter has to compute.
TWO_SHORT = [[5, 6, 7], [8, 9]]


def tokens_of(llm: LLM, params: SamplingParams | list[SamplingParams] = GREEDY, **options) -> list[list[int]]:
    outputs = llm.generate(prompts_of(), params, use_tqdm=False, **options)
    llm.engine.scheduler.check_integrity()
    return [completion.token_ids for output in outputs for completion in output.outputs]


def counts_of_steps(llm: LLM, gpu: PretendGPU) -> list:
    """(numbers of tokens of a step's chunks, what it has cost) for each step from now on."""
    steps: list = []

    def note(output, requests) -> None:
        steps.append(([chunk.end - chunk.start for chunk in output.chunks], gpu.counts))
        gpu.reset_counts()

    gpu.reset_counts()
    llm.engine.on_step = note
    return steps


# -- every architecture, every backend ---------------------------------------------------------------------------------


BY_DAY = [("qwen2-window", GRAPHS), ("qwen3.5-moe", PYTORCH)]
ARCHITECTURES = [(variant, backend) for variant in VARIANTS for backend in (PYTORCH, GRAPHS)]


@pytest.mark.parametrize(
    ("variant", "optimizations"), [each if each in BY_DAY else by_night(*each) for each in ARCHITECTURES]
)
def test_every_architecture(checkpoint, variant, optimizations):
    """Chunks, prefix hits, and a request that waits; a second time from the cache."""
    expected = tokens_of(LLM(str(checkpoint(variant)), enforce_eager=True, **OPTIONS))
    with pretend_gpu():
        llm = LLM(str(checkpoint(variant)), optimizations=optimizations, **OPTIONS)
        assert tokens_of(llm) == expected
        assert tokens_of(llm, replace(GREEDY, max_tokens=2)) == [token_ids[:2] for token_ids in expected]
        assert llm.engine.block_manager.stats.hits > 10
        is_recorded = llm.engine.model_runner.recorded_steps is not None
        assert is_recorded == (optimizations is GRAPHS and variant not in HYBRIDS and "moe" not in variant)


@pytest.mark.parametrize("variant", [by_night("llama"), "mistral-window"])
def test_flash_attn(checkpoint, variant):
    options = OPTIONS | dict(dtype="bfloat16", block_size=256, num_gpu_blocks_override=8)
    expected = tokens_of(LLM(str(checkpoint(variant)), enforce_eager=True, **options))
    with pretend_gpu(with_flash_attn=True):
        llm = LLM(str(checkpoint(variant)), optimizations=FLASH, **options)
        assert llm.engine.model_runner.kernels.paged_attention.__module__.endswith("flash_attention")
        assert tokens_of(llm) == expected
        assert tokens_of(llm, replace(GREEDY, max_tokens=2)) == [token_ids[:2] for token_ids in expected]


def test_half_precision_with_old_and_new_torch(checkpoint):
    """Logits are float32, whether or not PyTorch multiplies halves into it."""
    options = OPTIONS | dict(dtype="bfloat16", optimizations=PYTORCH)
    found = []
    for torch_version in ((2, 6), (2, 8)):
        with pretend_gpu(torch_version=torch_version):
            llm = LLM(str(checkpoint()), **options)
            found.append(llm.generate(TWO_SHORT, replace(GREEDY, max_tokens=2, logprobs=2), use_tqdm=False))
    assert_same_logprobs(*found)


@pytest.mark.nightly
@pytest.mark.parametrize("setting", ["tiny pool", *SETTINGS[:3]])
def test_greedy_matrix(checkpoint, gpu, setting):
    """Against transformers: preemption, tiny budgets."""
    check_setting(checkpoint(), setting, 4, optimizations=PYTORCH)


@BACKENDS
def test_everything_that_a_request_may_say(checkpoint, optimizations):
    """Temperatures, filters, penalties, biases, masks, grammars, logprobs, samples; chunks and preemption."""
    options = OPTIONS | dict(num_gpu_blocks_override=20, max_model_len=80)
    requests = random_requests(random.Random(5), 10)
    expected = generate(LLM(str(checkpoint()), enforce_eager=True, **options), requests)
    with pretend_gpu():
        found = generate(LLM(str(checkpoint()), optimizations=optimizations, **options), requests)
    assert_same(found, expected, tolerance=1e-5)


def test_batches_between_the_sizes_that_were_recorded(checkpoint, gpu):
    """Rows that pad a batch write nothing: the pool is that of single launches, to the last slot."""
    prompts = [[5], [6, 7], [8, 9, 10], [11, 12, 13, 14]]
    params = [SamplingParams(temperature=0, max_tokens=2 + i, ignore_eos=True) for i in range(4)]
    found = []
    for optimizations in (TRITON, GRAPHS):
        llm = LLM(str(checkpoint()), optimizations=optimizations, **OPTIONS)
        steps = counts_of_steps(llm, gpu)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        found.append(([o.outputs[0].token_ids for o in outputs], llm.engine.model_runner.kv_cache.data.cpu()))
    assert {len(sizes) for sizes, counts in steps if counts.replays} == {1, 2, 3, 4}
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [0, 3])
def test_a_key_that_is_masked_is_not_looked_at(gpu, window):
    """A sequence that ended in NaN leaves it in its blocks: in the slots behind those that the next one has written."""
    batch, num_blocks = ragged_batch(4, [(2, 1), (9, 1), (5, 1)])
    q, k_cache, v_cache = torch.randn(3, 2, 8), *torch.randn(2, num_blocks, 4, 1, 8)
    expected = TORCH_KERNELS.paged_attention(q, k_cache, v_cache, batch, window)
    for table, num_keys in zip(batch.block_tables, batch.key_lens, strict=True):
        for cache in (k_cache, v_cache):
            cache[table[(num_keys - 1) // 4], (num_keys - 1) % 4 + 1 :] = torch.nan
    on_device = [x.to(gpu.device) for x in (q, k_cache, v_cache)]
    found = TORCH_KERNELS.paged_attention(*on_device, batch.to(gpu.device), window)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=0)


# -- the wings ---------------------------------------------------------------------------------------------------------


@BACKENDS
def test_adapters(checkpoint, tmp_path, optimizations):
    """Steps with and without them, in one engine."""
    targets = ["q_proj", "v_proj", "down_proj", "lm_head"]
    path = make_adapter(tmp_path / "adapter", checkpoint(), r=4, target_modules=targets)
    chosen = [None, LoRARequest("one", 1, str(path)), None, LoRARequest("one", 1, str(path)), None]
    plain = tokens_of(LLM(str(checkpoint()), enforce_eager=True, **OPTIONS))
    expected = tokens_of(LLM(str(checkpoint()), enforce_eager=True, enable_lora=True, **OPTIONS), lora_request=chosen)
    with pretend_gpu():
        llm = LLM(str(checkpoint()), optimizations=optimizations, enable_lora=True, **OPTIONS)
        assert tokens_of(llm, lora_request=chosen) == expected != plain
        assert tokens_of(llm) == plain


@pytest.mark.parametrize("method", ["ngram", by_night("draft model")])
def test_draft_tokens(checkpoint, tmp_path, monkeypatch, method):
    monkeypatch.setattr(StepTimes, "plain", lambda self, num_rows: 1.0)
    monkeypatch.setattr(StepTimes, "with_drafts", lambda self: lambda num_rows: 1.0)
    monkeypatch.setattr(StepTimes, "num_rows_to_try", lambda self, num_rows: 10**6)
    monkeypatch.setattr(DraftModel, "draft_s", property(lambda self: 0.0, lambda self, value: None), raising=False)
    params = SamplingParams(temperature=0.7, max_tokens=12, seed=1, ignore_eos=True)
    expected = tokens_of(LLM(str(checkpoint()), enforce_eager=True, **OPTIONS), params)
    config = dict(num_speculative_tokens=3, method="ngram", prompt_lookup_min=1)
    if method == "draft model":
        smaller = make_checkpoint(tmp_path / "draft", "llama", num_hidden_layers=1)
        config = dict(num_speculative_tokens=3, model=str(smaller))
    with pretend_gpu():
        llm = LLM(str(checkpoint()), optimizations=GRAPHS, speculative_config=config, **OPTIONS)
        assert tokens_of(llm, params) == expected
        assert llm.stats()["num_draft_tokens"] > 0


@BACKENDS
def test_embeddings(checkpoint, optimizations):
    options = OPTIONS | dict(runner="pooling")
    given = [dict(prompt_token_ids=prompt) for prompt in prompts_of()]

    def embed(llm: LLM) -> list[list[float]]:
        return [output.outputs.embedding for output in llm.embed(given, pooling_params=PoolingParams(), use_tqdm=False)]

    expected = embed(LLM(str(checkpoint("qwen3")), enforce_eager=True, **options))
    with pretend_gpu():
        found = embed(LLM(str(checkpoint("qwen3")), optimizations=optimizations, **options))
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("option", [dict(quantization="int8"), dict(quantization="int4"), dict(kv_cache_dtype="int8")])
def test_fewer_bits_are_refused(checkpoint, gpu, option):
    with pytest.raises(ValueError, match=r"on a CPU only|needs the C kernels of a CPU"):
        LLM(str(checkpoint()), **option, **OPTIONS)


@pytest.mark.parametrize("variant", [by_night("llama"), "qwen3.5"])
def test_tiers(checkpoint, tmp_path, monkeypatch, variant):
    """What one engine has written, the next one finds; what the pool has evicted comes back from memory."""
    options = OPTIONS | dict(optimizations=PYTORCH, num_gpu_blocks_override=20, cpu_cache_bytes=1 << 20)
    expected = tokens_of(LLM(str(checkpoint(variant)), enforce_eager=True, **OPTIONS))
    with pretend_gpu():
        llm = LLM(str(checkpoint(variant)), prefix_cache_dir=tmp_path / "cache", **options)
        assert tokens_of(llm) == expected == tokens_of(llm)
        llm.engine.tiers.disk.close()
        llm = LLM(str(checkpoint(variant)), prefix_cache_dir=tmp_path / "cache", **options)
        [output] = llm.generate([prompts_of()[4]], GREEDY)
        assert output.num_cached_tokens >= 16 and output.outputs[0].token_ids == expected[4]
        llm.engine.tiers.disk.close()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "another GPU")
        llm = LLM(str(checkpoint(variant)), prefix_cache_dir=tmp_path / "cache", **options)
        assert llm.generate([prompts_of()[4]], GREEDY)[0].num_cached_tokens == 0, "its bits may be others"


@pytest.mark.nightly
def test_two_ranks(checkpoint, tmp_path, monkeypatch):
    """Each has a pretend GPU in a process of its own; gloo takes NCCL's place."""
    (tmp_path / "sitecustomize.py").write_text("from tests.pretend_gpu import be_a_rank; be_a_rank()")
    expected = tokens_of(LLM(str(checkpoint()), enforce_eager=True, **OPTIONS))
    for path in (ROOT, tmp_path):
        monkeypatch.syspath_prepend(path)
    with pretend_gpu(num_gpus=2):
        llm = LLM(str(checkpoint()), optimizations=GRAPHS, tensor_parallel_size=2, **OPTIONS)
        assert tokens_of(llm) == expected == tokens_of(llm)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizations", [PYTORCH, GRAPHS], ids=["pytorch", "graphs"])
def test_the_pool_takes_what_is_left(checkpoint, optimizations):
    options = OPTIONS | dict(num_gpu_blocks_override=None, max_model_len=512)
    with pretend_gpu(total_bytes=1 << 20) as gpu:
        llm = LLM(str(checkpoint()), optimizations=optimizations, **options)
        runner = llm.engine.model_runner
        assert runner.num_blocks < 4 * 512 // 4, "the pool is bounded by memory, not by what could be used"
        tokens_of(llm, replace(GREEDY, max_tokens=2))
        left = torch.cuda.mem_get_info()[0]
        # Never more than 0.9 of the memory, and nearly that: a step's largest tensors are not all in use at once.
        assert 0.1 * gpu.total_bytes - runner.kv_cache.num_bytes / runner.num_blocks < left < 0.3 * gpu.total_bytes


@pytest.mark.parametrize("variant", ["qwen3.5", *(by_night(each) for each in HYBRIDS if each != "qwen3.5")])
def test_states_and_pool_take_what_is_left(checkpoint, variant):
    """How much that is nobody knows until a step has been measured, which needs a slot for a state itself."""
    options, few = OPTIONS | dict(num_gpu_blocks_override=None), replace(GREEDY, max_tokens=2)
    expected = tokens_of(LLM(str(checkpoint(variant)), enforce_eager=True, **OPTIONS), few)
    with pretend_gpu(total_bytes=4 << 20):
        llm = LLM(str(checkpoint(variant)), optimizations=PYTORCH, **options)
        assert tokens_of(llm, few) == expected
        slots = llm.engine.model_runner.states.slots
        assert slots.max_snapshots > 0 and slots.num_bytes < (4 << 20)
        with pytest.raises(ValueError, match="leave no K/V; lower state_cache_bytes"):
            LLM(str(checkpoint(variant)), optimizations=PYTORCH, state_cache_bytes=4 << 20, **options)


def test_a_pool_that_does_not_fit(checkpoint):
    options = OPTIONS | dict(optimizations=PYTORCH, num_gpu_blocks_override=None)
    with pretend_gpu(total_bytes=2 << 20):
        with pytest.raises(ValueError, match=r"the KV pool takes 0.004 GB and the GPU has 0.00\d GB left"):
            LLM(str(checkpoint()), kv_cache_memory_bytes=4 << 20, **options)
        said = r"the weights in .* need 0.0 GB of 0.0 GB|is .* MB too little even without a KV pool|the KV pool gets"
        with pytest.raises(ValueError, match=said):
            LLM(str(checkpoint()), gpu_memory_utilization=0.05, **options)


@pytest.mark.parametrize(("max_model_len", "profiled"), [(13, [13, 11]), (24, [24]), (10, [10, 10, 4])])
def test_the_step_that_measures_memory_is_the_largest(checkpoint, gpu, monkeypatch, max_model_len, profiled):
    run, sizes = ModelRunner.run, []

    def noting(runner, output):
        sizes.append([chunk.end - chunk.start for chunk in output.chunks])
        return run(runner, output)

    monkeypatch.setattr(ModelRunner, "run", noting)
    LLM(str(checkpoint()), optimizations=PYTORCH, **OPTIONS | {"max_model_len": max_model_len})
    assert sizes == [profiled]


@pytest.mark.parametrize("drafts", [False, True])
def test_another_engine_takes_the_place_of_one_that_is_gone(checkpoint, drafts):
    """Its memory is free, though PyTorch's allocator still holds it."""
    options = OPTIONS | dict(optimizations=PYTORCH)
    if drafts:
        options["speculative_config"] = {"model": str(checkpoint()), "num_speculative_tokens": 1}
    sizes = []
    for held_bytes in (0, (1 << 24) - (1 << 16)):
        with pretend_gpu(total_bytes=1 << 24) as gpu:
            torch.empty(held_bytes, dtype=torch.uint8, device=gpu.device)
            assert torch.cuda.mem_get_info()[0] == gpu.total_bytes - held_bytes
            llm = LLM(str(checkpoint()), **options)
            sizes.append(llm.engine.speculation.proposer.runner.num_blocks if drafts else llm.engine.kv_pool.num_blocks)
            del llm
            gc.collect()
    assert sizes[0] == sizes[1]


def test_a_hybrid_model_on_a_gpu_that_others_use(checkpoint):
    """More than gpu_memory_utilization is taken already: a pool whose size is given has one state and no snapshot."""
    with pretend_gpu(total_bytes=16 << 20):
        llm = LLM(str(checkpoint("qwen3.5")), optimizations=PYTORCH, gpu_memory_utilization=0.01, **OPTIONS)
        slots = llm.engine.model_runner.states.slots
        assert (slots.max_running, slots.max_snapshots) == (1, 0)
        outputs = llm.generate(TWO_SHORT, GREEDY, use_tqdm=False)  # one waits for the other
        assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]


# -- what a step costs -------------------------------------------------------------------------------------------------

EVERYTHING = dict(top_p=0.9, top_k=50, repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, seed=1)


def test_an_engine_with_graphs_from_its_first_step_to_its_end(checkpoint, gpu, monkeypatch):
    """One for several questions, as recording takes Triton's interpreter long."""
    sizes = dict(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
    llm = LLM(str(checkpoint()), optimizations=GRAPHS, **OPTIONS | sizes)
    # A decode step is one copy, one replay and one copy back.
    for sampling in (dict(temperature=0), dict(temperature=0.8, logit_bias={5: 1.0}, **EVERYTHING)):
        steps = counts_of_steps(llm, gpu)
        llm.generate(TWO_SHORT, SamplingParams(max_tokens=6, ignore_eos=True, **sampling), use_tqdm=False)
        decodes = [counts for sizes, counts in steps if set(sizes) == {1}]
        assert len(decodes) >= 4
        for counts in decodes:
            more = sampling["temperature"] > 0  # one more copy, of all that the sampler is told
            assert (counts.h2d, counts.replays, counts.d2h, counts.syncs) == (1 + more, 1, 1, 1)
    llm.engine.on_step = None

    # Triton launches on the current GPU, which belongs to the thread: AsyncLLM's is not the caller's.
    torch.cuda.set_device(1)
    [output] = llm.generate([[5, 6, 7]], replace(GREEDY, max_tokens=2), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 2 and torch.cuda.current_device() == 1

    # A buffer that is made anew between two replays is found: the graphs read another one.
    def answers(llm: LLM) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(TWO_SHORT, GREEDY, use_tqdm=False)]

    expected = answers(llm)
    assert answers(llm) == expected
    fill = graphs.DecodeGraphs._fill

    def fill_a_new_one(self, *args) -> None:
        self._inputs = torch.zeros_like(self._inputs)
        fill(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(graphs.DecodeGraphs, "_fill", fill_a_new_one)
        with pytest.raises((AssertionError, IndexError, RuntimeError)):
            assert answers(llm) == expected

    # An engine that is dropped gives its memory back.
    assert gpu.memory_allocated() > 100_000
    del llm
    gc.collect()
    assert gpu.memory_allocated() == 0


LOGPROBS = [
    dict(logprobs=3),
    dict(logprobs=0),
    dict(),
    dict(logprob_token_ids=[300, 7]),
    dict(temperature=0.8, logprobs=64),
]


@pytest.mark.parametrize("prompt_logprobs", [by_night(None), 2])
def test_logprobs_of_a_step_travel_with_its_tokens(checkpoint, gpu, monkeypatch, prompt_logprobs):
    """Of some rows and of all, the top ones and certain ones, of prompts in parts; all is one copy down and one back.

    What the sampler is told is a copy of its own where a graph has the batch's numbers in a buffer of its own.
    """
    monkeypatch.setattr(scores, "ROWS_AT_A_TIME", 8)  # a step's are scored in three parts
    prompts = prompts_of()
    given = dict(temperature=0, max_tokens=4, seed=3, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    params = [SamplingParams(**given | more) for more in LOGPROBS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        expected = LLM(str(checkpoint()), enforce_eager=True, **OPTIONS).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(checkpoint()), optimizations=GRAPHS, **OPTIONS)
    steps = counts_of_steps(llm, gpu)
    found = llm.generate(prompts, params, use_tqdm=False)
    assert_same_logprobs(found, expected)
    assert {counts.replays for _, counts in steps} == {0, 1}
    for sizes, counts in steps:
        assert counts.h2d <= 1 + counts.replays and counts.d2h == counts.syncs == 1, sizes


def test_more_logprobs_than_most_ask_for(checkpoint, gpu):
    """Those of each such row are brought to the host at once, as the vocabulary times all rows would fill a GPU."""
    llm = LLM(str(checkpoint()), optimizations=PYTORCH, **OPTIONS)
    steps = counts_of_steps(llm, gpu)
    params = [replace(GREEDY, logprobs=k) for k in (-1, 2, 65, None)]
    found = llm.generate(prompts_of()[:4], params, use_tqdm=False)
    assert [len(output.outputs[0].logprobs[0]) for output in found[:3]] == [320, 2, 65]
    assert all(counts.d2h == 3 for sizes, counts in steps if sizes == [1, 1, 1, 1])


def assert_same_logprobs(found: list, expected: list) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (ours.outputs[0].logprobs is None) == (theirs.outputs[0].logprobs is None)
        rows = [(each.prompt_logprobs or []) + (each.outputs[0].logprobs or []) for each in (ours, theirs)]
        for row, other in zip(*rows, strict=True):
            assert (row is None) == (other is None)
            for token_id, entry in (row or {}).items():
                assert entry.rank == other[token_id].rank
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("num_layers", "optimizations", "max_tokens"),
    [(4, PYTORCH, 6), (2, TRITON, 1), by_night(1, PYTORCH, 6), by_night(1, TRITON, 6), by_night(4, TRITON, 6)],
)
def test_a_prefill_step_makes_no_copy_per_layer(tmp_path, gpu, num_layers, optimizations, max_tokens):
    folder = make_checkpoint(tmp_path, "llama", num_hidden_layers=num_layers)
    llm = LLM(str(folder), optimizations=optimizations, **OPTIONS)
    steps = counts_of_steps(llm, gpu)
    tokens_of(llm, replace(GREEDY, max_tokens=max_tokens))
    for sizes, counts in steps:
        copies = 1 if optimizations is TRITON else 2  # PyTorch's attention sorts the decodes by length, once a step
        assert counts.h2d <= copies and counts.d2h == counts.syncs <= 1, sizes


# -- threads and faults ------------------------------------------------------------------------------------------------


def test_other_threads_use_the_gpu_while_a_graph_is_recorded(gpu):
    found = []

    def forward() -> torch.Tensor:
        thread = Thread(target=lambda: found.append(torch.ones(2).to(gpu.device).tolist()))
        thread.start()
        thread.join()
        return torch.ones(2, device=gpu.device)

    graphs.record(forward, None, torch.cuda.Stream(gpu.device))
    assert found == [[1, 1]]


@pytest.mark.parametrize("lasts", [True, False])
def test_a_server_whose_gpu_has_a_fault(checkpoint, gpu, lasts):
    """After an illegal access nothing can be computed: the engine has died. Out of memory, only a request is lost."""

    async def ask(llm: AsyncLLM) -> None:
        async for _ in llm.generate([5, 6, 7], GREEDY):
            pass

    async def run() -> None:
        llm = AsyncLLM(str(checkpoint()), optimizations=PYTORCH, **OPTIONS)
        await ask(llm)
        runner = llm.engine.model_runner
        forward = runner.forward

        def failing(batch):
            if lasts:
                gpu.fault = "CUDA error: an illegal memory access was encountered"
                return forward(batch)
            return torch.empty(2 * gpu.total_bytes, dtype=torch.uint8, device=gpu.device)

        runner.forward = failing
        with pytest.raises(EngineDied if lasts else StepFailed, match="illegal memory" if lasts else "out of memory"):
            await ask(llm)
        runner.forward = forward
        if not lasts:
            await ask(llm)
        assert llm.errored == lasts
        llm.shutdown()

    asyncio.run(run())


# -- faults that were there, put back ----------------------------------------------------------------------------------


def whole_heads(q, k, cos, sin) -> None:
    for x in (q, k):
        x.copy_(rotate(x, cos, sin))


def without_lengths(self, tensors, with_tensors=Batch.with_tensors):
    batch = with_tensors(self, tensors)
    for name in ("query_lens", "key_lens"):
        vars(batch).pop(name)
    return batch


def test_heads_that_are_rotated_whole_are_found(checkpoint, gpu, monkeypatch):
    """Qwen3.5 rotates a quarter of each."""
    monkeypatch.setattr(gpu_kernels, "rotate_heads", whole_heads)
    with pytest.raises(RuntimeError, match="size of tensor"):
        LLM(str(checkpoint("qwen3.5")), optimizations=TRITON, **OPTIONS)


def test_a_graph_over_attention_that_asks_the_host_is_found(checkpoint, gpu, monkeypatch):
    monkeypatch.setattr(graphs, "why_no_graphs", lambda runner: None)
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        LLM(str(checkpoint()), optimizations=("cuda_graphs",), **OPTIONS)


def test_lengths_that_are_read_from_the_device_are_found(checkpoint, gpu, monkeypatch):
    monkeypatch.setattr(Batch, "with_tensors", without_lengths)
    llm = LLM(str(checkpoint()), optimizations=PYTORCH, **OPTIONS)
    steps = counts_of_steps(llm, gpu)
    tokens_of(llm)
    assert all(counts.d2h == 3 for sizes, counts in steps if sizes == [1, 1, 1, 1])


@BACKENDS
@pytest.mark.parametrize("kind", [by_night("smolvlm"), by_night("qwen3_vl"), "qwen3_5"])
def test_images(kind, optimizations, tmp_path):
    """Pictures in prompts that are cut into chunks, then the first one again."""
    folder = make_image_checkpoint(tmp_path, kind)
    mark = "<image>" if kind == "smolvlm" else "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"the quick {mark} brown fox"
    prompts = [{"prompt": text, "multi_modal_data": {"image": picture(30, 40, seed)}} for seed in (0, 1)]
    options = OPTIONS | {"max_model_len": 100}

    def answers(llm: LLM) -> list[list[int]]:
        found = llm.generate(prompts, GREEDY, use_tqdm=False) + llm.generate(prompts[0], GREEDY, use_tqdm=False)
        assert found[2].num_cached_tokens > 0
        return [output.outputs[0].token_ids for output in found]

    expected = answers(LLM(str(folder), enforce_eager=True, **options))
    with pretend_gpu():
        assert answers(LLM(str(folder), optimizations=optimizations, **options)) == expected
