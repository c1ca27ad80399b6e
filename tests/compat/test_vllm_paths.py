"""What vLLM's scripts import, and the methods that they call."""

import asyncio
import importlib
import json
import sys

import pytest
from nanovllm.utils.argparse_utils import FlexibleArgumentParser

import nanovllm
from nanovllm import LLM, AsyncEngineArgs, EngineArgs, LLMEngine, RequestOutputKind, SamplingParams
from nanovllm.compat.finder import Finder
from nanovllm.compat.paths import PATHS
from tests.checkpoints import SMALL
from tests.errors import expect

PROMPTS = ["the quick brown fox", "two gulls", [5, 6, 7]]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), **SMALL)


IMPORTS = """
from nanovllm import AsyncEngineArgs, AsyncLLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutputKind, TextPrompt
from nanovllm.config import ProfilerConfig, VllmConfig
from nanovllm.distributed import cleanup_dist_env_and_memory
from nanovllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from nanovllm.engine.async_llm_engine import AsyncLLMEngine
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.entrypoints.chat_utils import ChatCompletionMessageParam
from nanovllm.entrypoints.llm import LLM
from nanovllm.exceptions import VLLMValidationError
from nanovllm.inputs import PromptType, SingletonPrompt, TextPrompt, TokensPrompt
from nanovllm.inputs.data import TokensPrompt
from nanovllm.logger import init_logger
from nanovllm.logprobs import Logprob
from nanovllm.lora.request import LoRARequest
from nanovllm.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from nanovllm.platforms import current_platform
from nanovllm.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from nanovllm.tokenizers import get_tokenizer
from nanovllm.utils import FlexibleArgumentParser, random_uuid
from nanovllm.utils.argparse_utils import FlexibleArgumentParser
from nanovllm.utils.network_utils import get_open_port
from nanovllm.v1.engine.async_llm import AsyncLLM
from nanovllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from nanovllm.v1.engine.llm_engine import LLMEngine
from nanovllm.v1.metrics.reader import Counter, Gauge, Histogram, Vector
from nanovllm.v1.sample.logits_processor import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_what_is_here(line):
    names: dict = {}
    exec(line, names)
    module = importlib.import_module(line.split()[1])
    assert all(names[name.strip()] is getattr(module, name.strip()) for name in line.split("import ")[1].split(","))


def test_one_thing_under_several_paths():
    from nanovllm.v1.engine import async_llm

    from nanovllm.engine import arg_utils
    from nanovllm.serving.async_llm import AsyncLLM

    assert async_llm.AsyncLLM is AsyncLLM is sys.modules["nanovllm"].AsyncLLM
    assert arg_utils.EngineArgs is EngineArgs and issubclass(AsyncEngineArgs, EngineArgs)
    for path in PATHS:
        assert importlib.import_module(path).__name__ == path or path == "nanovllm.lora"


@pytest.mark.parametrize(
    ("line", "error", "text"),
    [
        ("import nanovllm.frob", ModuleNotFoundError, "No module named 'nanovllm.frob'"),
        ("import nanovllm.model_executor.models.llama", ModuleNotFoundError, "named 'nanovllm.model_executor'"),
        ("import nanovllm.engine.scheduling", ModuleNotFoundError, "No module named 'nanovllm.engine.scheduling'"),
        ("import nanovllm.engine.core", ModuleNotFoundError, "No module named 'nanovllm.engine.core'"),
        ("from nanovllm import ModelRegistry", ImportError, "cannot import name 'ModelRegistry' from 'nanovllm'"),
        ("from nanovllm.config import CompilationConfig", ImportError, "cannot import name 'CompilationConfig'"),
        ("from nanovllm.utils import is_moe_layer", ImportError, "cannot import name 'is_moe_layer'"),
        ("import nanovllm.outputs as o; o.SamplingMask", AttributeError, "has no attribute 'SamplingMask'"),
    ],
)
def test_what_is_not_here_is_an_error_of_pythons(line, error, text):
    with pytest.raises(error, match=text):
        exec(line)


def test_classes_that_other_modules_have_here():
    import nanovllm.config as config
    from nanovllm.features.pooling.params import PoolerConfig

    assert config.PoolerConfig is PoolerConfig, "without `from`, too"
    assert "PoolerConfig" not in vars(config) and config.__name__ == "nanovllm.config"


def test_the_names_of_the_package():
    """They are listed three times: for type checkers, for `import *`, and where they are found."""
    assert sorted(nanovllm.__all__) == sorted(name for names in nanovllm._MODULES.values() for name in names)
    assert {"__version__", *nanovllm.__all__} <= {*dir(nanovllm)}
    for name in nanovllm.__all__:
        assert getattr(nanovllm, name) is not None


def test_reloading_the_package_installs_one_finder():
    importlib.reload(nanovllm)
    assert sys.meta_path.count(Finder) == 1


def test_helpers(checkpoint):
    from nanovllm.distributed import cleanup_dist_env_and_memory
    from nanovllm.platforms import current_platform
    from nanovllm.tokenizers import get_tokenizer
    from nanovllm.utils import get_open_port, random_uuid

    assert current_platform.is_cpu() != current_platform.is_cuda() == current_platform.is_cuda_alike()
    assert current_platform.device_type in ("cpu", "cuda") and not current_platform.is_rocm()
    assert len({random_uuid() for _ in range(10)}) == 10 and 0 < get_open_port() < 65536
    folder, options = str(checkpoint()), dict(tokenizer_mode="auto", trust_remote_code=True, revision=None)
    assert get_tokenizer(folder, **options).decode(get_tokenizer(folder)("two gulls").input_ids)
    found = "get_tokenizer takes 'tokenizer_mode' only as 'auto' or 'hf' or 'slow' (found 'mistral')"
    expect(found, get_tokenizer, folder, tokenizer_mode="mistral")
    expect("get_tokenizer takes 'revision' only as None (found 'main')", get_tokenizer, folder, revision="main")
    cleanup_dist_env_and_memory()


# -- options ----------------------------------------------------------------------------------------------------------


def test_options_can_be_read_off_the_parser(checkpoint):
    """Scripts look at what was parsed, change defaults, and hand everything to LLM."""
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model=str(checkpoint()), enable_expert_parallel=True, max_num_seqs=3)
    args = vars(parser.parse_args(["-dp", "2", "--max-model-len", "64"]))
    assert args.pop("data_parallel_size") == 2 and args["pipeline_parallel_size"] == args["tensor_parallel_size"] == 1
    assert (args["seed"], args["quantization"], args["trust_remote_code"]) == (0, None, False)
    config = LLM(**args).engine.config
    assert (config.max_num_seqs, config.max_model_len) == (3, 64)


def test_async_engine_args():
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    args = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "m", "--enable-log-requests", "--seed", "4"]))
    assert args == AsyncEngineArgs(model="m", seed=4, enable_log_requests=False)
    only = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
    assert vars(only.parse_args([])) == {"enable_log_requests": None}


# -- methods ----------------------------------------------------------------------------------------------------------


def test_enqueue_and_wait(llm):
    expected = [output.outputs for output in llm.generate(PROMPTS, PARAMS)]
    assert llm.wait_for_completion() == []
    ids = llm.enqueue(PROMPTS[:2], PARAMS) + llm.enqueue(PROMPTS[2], PARAMS, None)
    assert len(set(ids)) == 3 and llm.engine.get_num_unfinished_requests() == 3
    assert [output.outputs for output in llm.generate(PROMPTS[:1], PARAMS)] == expected[:1], "others run beside it"
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids and [output.outputs for output in outputs] == expected
    assert not llm.engine.has_unfinished_requests() and llm.wait_for_completion() == []
    expect("prompts[0]: the prompt is empty", llm.enqueue, [[]], PARAMS)


def test_metrics(checkpoint):
    from nanovllm.v1.metrics.reader import Counter, Gauge

    llm = LLM(str(checkpoint()), **SMALL, disable_log_stats=False)
    for _ in range(2):
        llm.generate([list(range(5, 22))], PARAMS)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    assert isinstance(metrics["vllm:num_requests_running"], Gauge)
    assert isinstance(metrics["vllm:generation_tokens"], Counter)
    values = {name.removeprefix("vllm:"): metric.value for name, metric in metrics.items()}
    assert (values["generation_tokens"], values["num_requests_running"], values["num_preemptions"]) == (12, 0, 0)
    assert 0 < values["prefix_cache_hits"] <= values["prefix_cache_queries"]
    assert LLMEngine.get_metrics(llm.engine) == llm.get_metrics()


def test_profile(checkpoint, tmp_path):
    where = {"profiler": "torch", "torch_profiler_dir": str(tmp_path / "traces")}
    llm = LLM(str(checkpoint()), **SMALL, profiler_config=where, enforce_eager=True)
    llm.stop_profile()
    llm.start_profile("mine")
    expect("stop_profile() ends it", llm.start_profile)
    llm.generate(PROMPTS[:1], PARAMS)
    llm.stop_profile()
    [trace] = (tmp_path / "traces").iterdir()
    assert trace.name.startswith("mine.")
    assert any("aten::" in event["name"] for event in json.loads(trace.read_text())["traceEvents"])
    expect("profile_prefix must be the beginning of a file's name", llm.start_profile, "../mine")
    expect("LLM(profiler_config=", LLM(str(checkpoint()), **SMALL).start_profile)
    expect("profiler must be one of torch", EngineArgs, model="m", profiler_config=where | {"profiler": "cuda"})
    expect("torch_profiler_dir must be a directory", EngineArgs, model="m", profiler_config={})
    expect(
        "takes 'max_iterations' only as 0 (found 1)",
        EngineArgs,
        model="m",
        profiler_config=where | {"max_iterations": 1},
    )
    expect("profiler_config must be a dict, found 5", EngineArgs, model="m", profiler_config=5)


# -- AsyncLLM, as vLLM's examples and tests use it --------------------------------------------------------------------


def with_engine(checkpoint, work, **options):
    """Await work(engine) in an event loop of its own."""
    from nanovllm.v1.engine.async_llm import AsyncLLM

    async def run():
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(checkpoint()), **SMALL | options))
        try:
            return await work(engine)
        finally:
            engine.shutdown()

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_kinds_of_output(checkpoint, kind):
    """Only the last output is finished; all tokens are there, in the form that was asked for."""
    given = SamplingParams(n=3, temperature=0.5, seed=33, max_tokens=20, ignore_eos=True, output_kind=kind)

    async def work(engine):
        async def one(number):
            stream = engine.generate(request_id=f"r{number}", prompt=PROMPTS[0], sampling_params=given)
            return [output async for output in stream]

        found = await asyncio.gather(*map(one, range(8)))
        assert not engine.output_processor.has_unfinished_requests()
        return found

    [whole] = LLM(str(checkpoint()), **SMALL).generate(PROMPTS[0], given)
    for outputs in with_engine(checkpoint, work):
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        if kind is RequestOutputKind.FINAL_ONLY:
            assert len(outputs) == 1
        taken = outputs if kind is RequestOutputKind.DELTA else outputs[-1:]
        for sample in whole.outputs:
            parts = [part for output in taken for part in output.outputs if part.index == sample.index]
            assert [token for part in parts for token in part.token_ids] == sample.token_ids
            assert "".join(part.text for part in parts) == sample.text


def test_aborting_several_and_leaving(checkpoint):
    long = SamplingParams(max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def work(engine):
        async def count(number, stop_after=None):
            tokens = 0
            async for output in engine.generate(PROMPTS[0], long, f"r{number}"):
                tokens += sum(len(sample.token_ids) for sample in output.outputs)
                if stop_after is not None and tokens >= stop_after:
                    break
            return tokens

        engine.thread.set_pace(0)
        tasks = [asyncio.create_task(count(number)) for number in range(6)]
        await until(engine, "num_waiting", 6)
        engine.thread.set_pace(10)
        await until(engine, "num_steps", 10)
        await engine.abort(["r1", "r4", "unknown"])
        tasks[2].cancel()
        engine.thread.set_pace()
        counts = await asyncio.gather(*tasks, return_exceptions=True)
        assert [0 < counts[number] < 200 for number in (1, 4)] == [True, True]
        assert [counts[number] for number in (0, 3, 5)] == [200] * 3
        assert isinstance(counts[2], asyncio.CancelledError)
        assert await count(1, stop_after=5) >= 5
        assert await count(2) == 200, "an id may be used again"
        assert not engine.has_unfinished_requests()

    with_engine(checkpoint, work)


async def until(engine, name, least):
    """Wait until this count of the engine is that large."""
    while (await engine.stats())[name] < least:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("mode", "reason"), [("keep", "length"), ("abort", "abort"), ("wait", "length")])
def test_pausing(checkpoint, mode, reason):
    given = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0)

    async def work(engine):
        engine.thread.set_pace(5)
        reading = asyncio.create_task(last(engine.generate(PROMPTS[0], given, "r")))
        await until(engine, "num_steps", 5)
        if mode == "wait":  # or it would wait for ever
            engine.thread.set_pace()
        await engine.pause_generation(mode=mode)
        assert await engine.is_paused()
        at_pause = (await engine.stats())["num_steps"]
        late = asyncio.create_task(last(engine.generate(PROMPTS[1], PARAMS, "late")))
        await until(engine, "num_waiting", 1)
        with pytest.raises(ValueError, match="they get no steps until resume_generation"):
            await engine.pause_generation(mode="wait")
        await asyncio.sleep(0.05)
        assert (await engine.stats())["num_steps"] == at_pause and not late.done(), "it is taken, and waits"
        await engine.resume_generation()
        assert not await engine.is_paused()
        assert len((await late).outputs[0].token_ids) == 6
        return await reading

    async def last(stream):
        return [output async for output in stream][-1]

    output = with_engine(checkpoint, work)
    assert output.outputs[0].finish_reason == reason
    if reason == "length":
        assert output.outputs == LLM(str(checkpoint()), **SMALL).generate(PROMPTS[0], given)[0].outputs


def test_state_of_an_async_engine(checkpoint, caplog):
    from nanovllm.v1.engine.exceptions import EngineDeadError

    async def work(engine):
        assert engine.is_running and not engine.errored and not engine.is_stopped
        assert engine.get_tokenizer() is engine.tokenizer and not await engine.is_tracing_enabled()
        with caplog.at_level("INFO", "nanovllm"):
            await engine.do_log_stats()
        assert "0 sequences run, 0 wait" in caplog.text
        with pytest.raises(ValueError, match="mode must be one of abort, wait, keep"):
            await engine.pause_generation(mode="sleep")
        with pytest.raises(ValueError, match=r"AsyncLLM.encode takes 'trace_headers' only as None"):
            await anext(engine.encode(PROMPTS[0], None, "x", trace_headers={"a": "b"}))
        with pytest.raises(ValueError, match="tokenization_kwargs must be a dict"):
            await anext(engine.encode(PROMPTS[0], None, "x", trace_headers=None, tokenization_kwargs=[1]))
        with pytest.raises(ValueError, match=r"'data_parallel_rank' only as None \(found 1\)"):
            await anext(engine.generate(PROMPTS[0], PARAMS, "x", data_parallel_rank=1))
        with pytest.raises(AttributeError, match="'AsyncLLM' object has no attribute 'sleep'"):
            engine.sleep  # noqa: B018
        await engine.wait_for_requests_to_drain()
        assert await engine.reset_prefix_cache()
        return engine

    engine = with_engine(checkpoint, work)
    assert engine.errored and not engine.is_running and isinstance(engine.dead_error, EngineDeadError)
    with pytest.raises(EngineDeadError):
        asyncio.run(engine.check_health())
    expect(
        "takes 'stat_loggers' only as [] (found [",
        type(engine).from_engine_args,
        AsyncEngineArgs(model="m"),
        stat_loggers=[object],
    )
