"""What a script written for vLLM says: parameters, options, flags, engine, prompts. Values: test_vllm.py."""

import argparse
import json
from dataclasses import asdict

import numpy as np
import pytest

from nanovllm import LLM, AsyncEngineArgs, AsyncLLM, EngineArgs, LLMEngine, SamplingParams, TextPrompt, TokensPrompt
from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.names import known_names
from nanovllm.compat.command_line import FlexibleArgumentParser
from nanovllm.compat.neutral import ANY, NEUTRAL, RENAMED
from nanovllm.config import EngineConfig
from nanovllm.features.logits_processors.bad_words import BadWords
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import edit
from tests.errors import expect

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]

USER = [{"role": "user", "content": "two gulls"}]


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(model=str(checkpoint("llama")), dtype="float32", block_size=4, max_num_batched_tokens=7)


# -- SamplingParams ---------------------------------------------------------------------------------------------------


def test_assignment_is_checked():
    params = SamplingParams()
    params.max_tokens, params.stop, params.logit_bias = 5, "x", {"7": 1}
    assert (params.max_tokens, params.stop, params.logit_bias) == (5, ["x"], {7: 1.0})
    expect("top_p must be a number between", setattr, params, "top_p", 2.0)
    expect("did you mean 'temperature'?", setattr, params, "temprature", 0.0)
    expect("SamplingParams takes 'best_of' only as 1 (found 2)", setattr, params, "best_of", 2)
    params.best_of = 1
    assert params.top_p == 1.0 and not hasattr(params, "best_of")
    params.seed = -1
    assert params.seed is None


def test_clone_is_checked_and_shares_nothing():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0})
    copy = params.clone()
    params.stop.append("b")
    params.logit_bias[2] = 1.0
    assert copy == SamplingParams(stop=["a"], logit_bias={1: 2.0})
    params.min_tokens = 20  # the order in which fields are assigned does not matter
    expect("min_tokens (20) is larger than max_tokens (16)", params.clone)
    params.max_tokens = 30
    assert params.clone() == params


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(allowed_token_ids=[]), "allowed_token_ids is empty"),
        (dict(allowed_token_ids=5), "allowed_token_ids must be a list of ids"),
        (dict(bad_words=[""]), "bad_words holds an empty string"),
        (dict(logit_bias=[1]), "logit_bias must be a dict"),
        (dict(logit_bias={"one": 1}), "a token id of logit_bias must be a whole number"),
        (dict(logit_bias={1: "high"}), "logit_bias[1] must be a number"),
        (dict(stop="x", detokenize=False), "stop strings are found in the text"),
        (dict(structured_outputs={"regex": "a"}), "must be a StructuredOutputsParams, found dict"),
        (
            dict(structured_outputs=StructuredOutputsParams(regex="a"), allowed_token_ids=[1]),
            "allowed_token_ids may leave no token of structured_outputs",
        ),
        (dict(detokenize=1), "detokenize must be True or False"),
        (dict(frobnicate=1), "SamplingParams has no argument 'frobnicate' (found 1). examples/move_to_vllm.md lists"),
    ],
)
def test_bad_parameters(options, text):
    expect(text, SamplingParams, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(allowed_token_ids=[320]), "a token id of allowed_token_ids must be a whole number between 0 and 319"),
        (dict(logit_bias={400: 1.0}), "a token id of logit_bias must be"),
        (dict(prompt_logprobs=321), "prompt_logprobs must be a whole number between 0 and 320"),
        (dict(min_tokens=1, allowed_token_ids=[1]), "leave no token to choose"),
    ],
)
def test_what_only_the_checkpoint_rules_out(llm, options, text):
    expect(text, llm.generate, [PROMPT], SamplingParams(**options))


def test_neutral_values():
    """An option of vLLM's is taken at the values that change nothing and at None, and refused at others."""
    says_more = (*RENAMED, "language_model_only")  # what an option of ours says
    for cls, table, given in (
        (EngineConfig, NEUTRAL["LLM"], {"model": "m"}),
        (SamplingParams, NEUTRAL["SamplingParams"], {}),
    ):
        for name, values in table.items():
            for value in (None, *values):
                if name not in says_more or not value:
                    assert cls(**given, **{name: "anything" if value is ANY else value}) == cls(**given)
            if ANY not in values and name not in says_more:
                taken = " or ".join(map(repr, values))
                expect(f"takes {name!r} only as {taken} (found 'surprise')", cls, **given, **{name: "surprise"})
    for what, table in NEUTRAL.items():
        given = {name: next(iter(values), None) for name, values in table.items()}
        assert known_names(given, (), what) == known_names(dict.fromkeys(given), (), what) == {}
    found = "LLM takes 'pipeline_parallel_size' only as 1 (found 2); did you mean 'tensor_parallel_size'?"
    expect(found, EngineConfig, model="m", pipeline_parallel_size=2)
    expect("'pipeline_parallel_size' only as 1 (found True)", EngineConfig, model="m", pipeline_parallel_size=True)
    expect("'trust_remote_code' only as False or True (found 1)", EngineConfig, model="m", trust_remote_code=1)
    for options in ({"cpu_offload_gb": 0.0}, {"cpu_offload_gb": np.float32(0)}, {"watermark": 0}, {"nnodes": 1.0}):
        assert EngineConfig(model="m", **options) == EngineConfig(model="m")
    assert SamplingParams(length_penalty=1) == SamplingParams()
    for is_only, given, limits in (
        (True, None, {"image": 0}),
        (True, {"image": 1, "video": 0}, {"image": 0}),
        (False, {"image": 2}, {"image": 2}),
    ):
        config = EngineConfig(model="m", language_model_only=is_only, limit_mm_per_prompt=given)
        assert config.limit_mm_per_prompt == limits
    expect("language_model_only must be true or false", EngineConfig, model="m", language_model_only="yes")
    expect("cpu_cache_bytes must be a whole number, or one like '8k'", EngineConfig, model="m", cpu_cache_bytes="auto")


# -- engine options ---------------------------------------------------------------------------------------------------


def test_sizes_and_defaults(checkpoint):
    config = EngineConfig(model="m", max_model_len="8k", max_num_batched_tokens="1K", kv_cache_memory_bytes="0.5g")
    assert (config.max_model_len, config.max_num_batched_tokens) == (8000, 1024)
    assert config.kv_cache_memory_bytes == 500_000_000
    assert EngineConfig(model="m", max_model_len=-1, seed=None, enable_prefix_caching=None) == EngineConfig(model="m")
    assert EngineConfig(model="m", prefix_caching_hash_algo="xxhash").prefix_caching_hash_algo == "xxh64"
    assert EngineConfig(model="m", prefix_caching_hash_algo="sha256_cbor").prefix_caching_hash_algo == "sha256"
    expect("max_model_len must be a whole number, or one like '8k'", EngineConfig, model="m", max_model_len="8 kB")
    expect("load_format must be one of auto, safetensors", EngineConfig, model="m", load_format="pt")
    expect("hf_overrides must be a dict", EngineConfig, model="m", hf_overrides=print)
    expect("takes 'skip_tokenizer_init' only as False (found True)", EngineConfig, skip_tokenizer_init=True)


def test_overrides_of_the_configuration(checkpoint, tmp_path):
    folder = str(checkpoint("llama"))
    short = LLM(folder, hf_overrides={"max_position_embeddings": 64})
    assert short.engine.scheduler.max_model_len == 64
    expect("max_position_embeddings must be a whole number", LLM, folder, hf_overrides={"max_position_embeddings": 0})
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "eos_token_id": 9}))
    other = LLM(folder, generation_config=str(tmp_path))
    assert other.get_default_sampling_params().temperature == 0.25
    assert other.engine.model_config.eos_token_ids == {1, 9}, "config.json's and the tokenizer's, too"
    expect("there is no", LLM, folder, generation_config="nowhere", error=FileNotFoundError)


def test_generation_config_vllm(broken):
    edit(broken / "generation_config.json", temperature=0.25)
    assert LLM(str(broken)).get_default_sampling_params().temperature == 0.25
    assert LLM(str(broken), generation_config="vllm").get_default_sampling_params() == SamplingParams()


def test_another_tokenizer(checkpoint, broken):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    llm = LLM(str(broken), tokenizer=str(checkpoint("qwen2")))
    assert llm.generate("the quick", SamplingParams(max_tokens=2))[0].prompt == "the quick"


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_dummy_weights(broken, options):
    """No file of weights; the same weights each time, in every rank."""
    (broken / "model.safetensors").unlink()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llms = [LLM(str(broken), load_format="dummy", **options) for _ in range(2)]
    first, second = (llm.generate([PROMPT], params)[0].outputs[0].token_ids for llm in llms)
    assert first == second and len(set(first)) > 1


# -- flags, engine, prompts -------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    return EngineArgs.add_cli_args(FlexibleArgumentParser())


def test_engine_args_from_the_command_line():
    line = '--model m --max_model_len 8k --no-enable-prefix-caching --swap-space 4 --seed=3 --hf_overrides={"a":1}'
    args = parser().parse_args([*line.split(), "--pipeline-parallel-size", "1", "--trust_remote_code", "False"])
    expected = EngineConfig("m", max_model_len=8000, enable_prefix_caching=False, seed=3, hf_overrides={"a": 1})
    assert asdict(EngineArgs.from_cli_args(args)) == asdict(expected)
    assert EngineArgs.from_cli_args(parser().parse_args([])).model == "Qwen/Qwen3-0.6B"
    offloading = parser().parse_args(["--kv-offloading-size", "0.5"])
    assert EngineArgs.from_cli_args(offloading).cpu_cache_bytes == 1 << 29
    assert EngineConfig(**vars(offloading)).cpu_cache_bytes == 1 << 29
    refused = parser().parse_args(["--skip-tokenizer-init"])
    expect("takes 'skip_tokenizer_init' only as False (found True)", EngineArgs.from_cli_args, refused)
    assert {f"--{name.replace('_', '-')}" for name in NEUTRAL["LLM"]} <= set(parser()._option_string_actions)


def test_engine_as_in_vllms_example(checkpoint):
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(checkpoint("llama")), disable_log_stats=True), usage_context=None, stat_loggers=None
    )
    engine.add_request("a", "the quick", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    engine.add_request(
        "b",
        PROMPT,
        SamplingParams(n=2, max_tokens=5, ignore_eos=True),
        lora_request=None,
        priority=0,
        arrival_time=1.0,
        trace_headers=None,
    )
    expect("lora_request must be a LoRARequest", engine.add_request, "c", PROMPT, SamplingParams(), lora_request="x")
    seen = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        seen.append([output.request_id for output in outputs])
        if len(seen) == 2:
            assert not engine.reset_prefix_cache() and engine.reset_prefix_cache(reset_running_requests=True)
    assert seen[0] == ["b", "a"] or seen[0] == ["a", "b"], "an output of each request after every step"
    assert seen[-1] == ["b"]
    for request_id in "de":
        engine.add_request(request_id, PROMPT, SamplingParams())
    for wrong in (5, 3.5, [["d"]], ["d", None]):
        expect("request_ids must be a list of request ids, found", engine.abort_request, wrong)
    assert engine.abort_request({"d": 1, "e": 2, "unknown": 3}.keys()) is None and not engine.has_unfinished_requests()
    engine.add_request("f", PROMPT, SamplingParams())
    assert engine.abort_request(["unknown", "f"]) is None and not engine.has_unfinished_requests()


def test_an_engine_is_made_of_its_options():
    for make in (LLMEngine, LLMEngine.from_engine_args, LLM.from_engine_args, AsyncLLM.from_engine_args):
        for wrong in ("demo", {"model": "demo"}, None):
            expect("an engine is made of its options, found", make, wrong)
    expect("LLMEngine.from_engine_args has no argument 'x'", LLMEngine.from_engine_args, EngineArgs(), x=1)
    found = "LLMEngine.from_engine_args takes 'stat_loggers' only as [] (found [1])"
    expect(found, LLMEngine.from_engine_args, EngineArgs(), usage_context=None, stat_loggers=[1])
    assert EngineArgs().model == AsyncEngineArgs().model == vars(parser().parse_args([]))["model"]


def test_resetting_the_cache_changes_no_answer(checkpoint):
    llm = LLM(str(checkpoint("llama")), dtype="float32")
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=4)
    [expected] = llm.generate([PROMPT], params)
    growing = llm.stream(PROMPT, params)
    for _ in range(4):
        next(growing)
    assert not llm.reset_prefix_cache() and llm.reset_prefix_cache(reset_running_requests=True)
    *_, last = growing
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids


def test_names_of_llm(llm):
    assert llm.llm_engine is llm.engine
    assert (
        LLM.from_engine_args(EngineArgs(model=llm.engine.config.model)).engine.config.model == llm.engine.config.model
    )
    with pytest.raises(AttributeError, match="'LLM' object has no attribute 'frobnicate'"):
        llm.frobnicate  # noqa: B018
    expect("generate has no argument 'max_tokens'", llm.generate, [PROMPT], max_tokens=5)
    expect("enqueue has no argument 'max_tokens'", llm.enqueue, [PROMPT], max_tokens=5)
    params = SamplingParams(max_tokens=1)
    found = "add_request has no argument 'lora_requests' (found 1); did you mean 'lora_request'?"
    expect(found, llm.engine.add_request, None, PROMPT, params, lora_requests=1)
    llm.enqueue([PROMPT], params, mm_processor_kwargs={})
    assert len(llm.wait_for_completion(use_tqdm=False)) == 1
    expect("lora_request must be a LoRARequest", llm.generate, [PROMPT], lora_request="x")


def test_prompts_as_dicts(llm):
    params = SamplingParams(max_tokens=2, temperature=0)
    same = [PROMPT, TokensPrompt(prompt_token_ids=PROMPT), {"prompt_token_ids": PROMPT, "multi_modal_data": None}]
    outputs = llm.generate(same, params, lora_request=None, priority=[0] * 3)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert llm.generate(TextPrompt(prompt="the quick", cache_salt="s"), params)[0].prompt == "the quick"
    expect("this model sees no images", llm.generate, [{"prompt": "x", "multi_modal_data": {"image": 1}}])


def test_priorities(llm):
    params = SamplingParams(max_tokens=1)
    assert llm.generate([], params, priority=[]) == []
    assert len(llm.generate([PROMPT], params, priority=None)) == len(llm.chat(USER, params, priority=[0])) == 1
    expect("2 prompts need 2 priority (or one for all), found 0", llm.generate, [PROMPT] * 2, params, priority=[])
    expect("found 3", llm.generate, [PROMPT] * 2, params, priority=[0, 0, 0])
    for priorities in ([0, 1], 1, [0, -2]):
        expect("asks for another order than first come", llm.generate, [PROMPT] * 2, params, priority=priorities)
    for priorities in ([0, [0]], [0, False], [0, 0.5]):
        expect("priority must be a whole number", llm.generate, [PROMPT] * 2, params, priority=priorities)
    expect("asks for another order than first come", llm.chat, USER, params, priority=[1])
    expect("asks for another order than first come", llm.engine.add_request, "a", PROMPT, params, priority=1)
    expect("scheduling_policy must be one of fcfs, priority", EngineConfig, model="m", scheduling_policy="lifo")
    expect("generate has no argument 'frobnicate'", llm.generate, [PROMPT], params, priority=[0], frobnicate=1)


# -- what was once wrong ----------------------------------------------------------------------------------------------


def test_a_request_id_that_is_no_string(llm):
    expect("request_id must be a string, found ['x']", llm.engine.add_request, ["x"], PROMPT, SamplingParams())
    expect("request_id must be a string, found 5", llm.engine.add_request, 5, PROMPT, SamplingParams())
    assert llm.generate([PROMPT], SamplingParams(max_tokens=1))[0].finished


def test_overrides_and_the_spellings_of_a_field(checkpoint):
    def read(**overrides):
        return ModelConfig.from_directory(checkpoint("llama-linear-rope"), overrides)

    assert read(rope_theta=5e5).rope_theta == 5e5 and read(rope_theta=5e5).rope_scaling["factor"] == 4.0
    assert read(rope_scaling={"rope_type": "linear", "factor": 2.0}).rope_scaling["factor"] == 2.0
    assert read(rope_parameters={"rope_type": "default"}).rope_theta == 10000.0
    assert read(rope_scaling=None).rope_scaling["rope_type"] == "default"
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope_theta == 7.0
    assert read(torch_dtype="float16").dtype == read(dtype="float16").dtype == "float16"
    assert read(eos_token_id=5).eos_token_ids == {5}
    yarn = read(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128})
    assert yarn.max_position_embeddings == 512 and yarn.rope_theta == 10000.0
    yarn = read(rope_scaling={"rope_type": "yarn", "factor": 2.5})
    assert yarn.max_position_embeddings == 1280, "what config.json says is taken for the length before the scaling"
    expect("rotary scaling must be one of", read, rope_scaling={"rope_type": "su", "factor": 4.0})
    expect("hf_overrides: rope_scaling must be a dict, found 5", read, rope_scaling=5)


def test_the_largest_bias_is_a_number(llm):
    expect("logit_bias[7] must be a number between", SamplingParams, logit_bias={7: 3e38})
    params = SamplingParams(logit_bias={7: 1e10}, repetition_penalty=1e-10, temperature=1e-5, max_tokens=3)
    assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == [7] * 3


def test_bad_words_that_are_no_words(llm):
    params = SamplingParams(bad_words=["\ud800"])
    expect("prompts[0]: bad_words: '\\ud800' is not valid Unicode text", llm.generate, [PROMPT], params)
    assert BadWords(llm.get_tokenizer(), ["the"], vocab_size=5).banned([]).tolist() == []


def test_a_parser_of_ones_own():
    parser = FlexibleArgumentParser()
    parser.add_argument("--my_flag", type=int)
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--my-flag", "3"]).my_flag == parser.parse_args(["--my_flag=3"]).my_flag == 3
    assert parser.parse_args(["--", "--a_b"]).rest == ["--a_b"]


def test_a_class_of_ones_own():
    class Mine(SamplingParams):
        pass

    expect("SamplingParams takes 'best_of' only as 1 (found 2)", Mine, best_of=2)
    expect("SamplingParams has no argument 'cls'", Mine, cls=1)
    expect("max_model_len must be a whole number, or one like", EngineConfig, model="m", max_model_len="9" * 400 + "k")
