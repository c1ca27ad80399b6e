"""A person's mistake gets a ValueError or FileNotFoundError that says what was found and what would work."""

import json
import re
import shutil

import pytest

from nanovllm import LLM, SamplingParams


def expect(text: str, call, *args, error=ValueError, **kwargs) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call(*args, **kwargs)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(temprature=1), "did you mean 'temperature'"),
        (dict(best_of=2), "SamplingParams has no argument 'best_of'"),
        (dict(temperature=-0.1), "temperature must be a number from 0.0, found -0.1"),
        (dict(temperature="warm"), "found 'warm' (str)"),
        (dict(temperature=float("nan")), "temperature must be a number"),
        (dict(top_p=0), "top_p must be above 0"),
        (dict(top_p=1.5), "top_p must be a number between 0.0 and 1.0, found 1.5"),
        (dict(top_k=2.5), "top_k must be a whole number"),
        (dict(top_k=-2), "top_k must be a whole number from -1"),
        (dict(min_p=2), "min_p must be a number between"),
        (dict(n=0), "n must be a whole number from 1, found 0"),
        (dict(n=True), "found True (bool)"),
        (dict(max_tokens=0), "max_tokens must be a whole number from 1"),
        (dict(max_tokens=3, min_tokens=4), "min_tokens (4) is larger than max_tokens (3)"),
        (dict(stop=""), "empty string"),
        (dict(stop=[1]), "stop must be a list of strings"),
        (dict(stop_token_ids="7"), "stop_token_ids must be a list of ids"),
        (dict(seed=1.5), "seed must be a whole number"),
        (dict(logprobs=-1), "logprobs must be a whole number from 0"),
        (dict(repetition_penalty=0), "repetition_penalty must be above 0"),
        (dict(presence_penalty=3), "presence_penalty must be a number between -2.0 and 2.0"),
        (dict(ignore_eos="yes"), "ignore_eos must be True or False"),
    ],
)
def test_sampling_params(options, text):
    expect(text, SamplingParams, **options)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (dict(max_model_length=5), "LLM has no argument 'max_model_length'; did you mean 'max_model_len'"),
        (dict(dtype="int8"), "dtype must be one of"),
        (dict(max_num_seqs=0), "max_num_seqs must be a whole number from 1"),
        (dict(block_size=-1), "block_size must be a whole number"),
        (dict(gpu_memory_utilization=90), "gpu_memory_utilization must be a number between"),
        (dict(prefix_caching_hash_algo="md5"), "prefix_caching_hash_algo must be one of xxh64, sha256"),
        (dict(enable_prefix_caching="no"), "enable_prefix_caching must be True or False"),
        (dict(max_model_len=100_000), "max_model_len=100000 is more than the model's 512 positions"),
        (dict(max_model_len=512, num_gpu_blocks_override=5), "does not fit in the KV pool of 5 blocks x 16 tokens"),
        (dict(max_model_len=512, kv_cache_memory_bytes=100_000), "does not fit in the KV pool"),
        (dict(kv_cache_memory_bytes=10), "one block of 16 tokens needs"),
        (dict(num_gpu_blocks_override=1, block_size=1), "does not fit in the KV pool"),
    ],
)
def test_engine_options(checkpoint, options, text):
    expect(text, LLM, str(checkpoint()), **options)


def test_pool_decides_max_model_len_when_nobody_else_does(checkpoint):
    llm = LLM(str(checkpoint()), num_gpu_blocks_override=5)
    assert llm.engine.scheduler.max_model_len == 80
    expect("at most 79 fit", llm.generate, [[5] * 80])
    assert len(llm.generate([[5] * 79])[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([5] * 256, "the prompt has 256 tokens; max_model_len is 256"),
        ([5, 320], "token id 320 at position 1 is outside the vocabulary (0 to 319)"),
        ([-1], "token id -1 at position 0"),
        ([1, "a"], "whole numbers"),
        ([True, 2], "whole numbers"),
        (7, "a prompt is a string, a list of token ids or a dict"),
        (None, "a prompt is a string"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"prompt": 3}, "prompt must be a string, found int"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a string that is not empty"),
        ("half a pair: \ud83d", "not valid Unicode"),
    ],
)
def test_prompts(llm, prompt, text):
    expect(text, llm.generate, [[5, 6], prompt])
    expect(text, llm.stream, prompt)
    assert not llm.engine.has_unfinished_requests() and llm.stats()["num_steps"] == 0


def test_all_bad_prompts_are_listed_and_nothing_is_started(llm):
    with pytest.raises(ValueError) as info:
        llm.generate(["fine", "", [999], "fine too"])
    assert str(info.value).splitlines()[0].startswith("prompts[1]: ")
    assert str(info.value).splitlines()[1].startswith("prompts[2]: ")
    with pytest.raises(ValueError, match="and 80 more"):
        llm.generate([""] * 100)
    expect("2 prompts need 2 sampling_params", llm.generate, ["a", "b"], [SamplingParams()])
    expect("must be a SamplingParams, found dict", llm.generate, ["a"], {"temperature": 0})
    expect(
        "a stop token id must be a whole number between 0 and 319",
        llm.generate,
        "a",
        SamplingParams(stop_token_ids=[320]),
    )
    expect("logprobs must be a whole number between 0 and 320", llm.generate, "a", SamplingParams(logprobs=321))
    assert llm.stats()["num_steps"] == 0 and not llm.engine.scheduler.waiting


def test_messages(llm):
    user = {"role": "user", "content": "hi"}
    expect("at most 9 messages", llm.chat, [user] * 10)
    expect(
        "conversations[1]: the chat template does not take these messages: at most 9", llm.chat, [[user], [user] * 10]
    )
    expect("unknown role wizard", llm.chat, [{"role": "wizard", "content": "hi"}])
    expect("message 0 must be a dict with strings 'role' and 'content'", llm.chat, [{"role": "user"}])
    expect("message 0 must be a dict", llm.chat, [{"role": "user", "content": ["hi"]}])
    expect("not empty", llm.chat, [])
    llm.get_tokenizer().chat_template = None
    expect("no chat template", llm.chat, [user])


def test_request_id_in_use(llm):
    llm.engine.add_request("a", SamplingParams(), request_id="x")
    expect("request id 'x' is already in use", llm.engine.add_request, "b", SamplingParams(), request_id="x")
    assert len(llm.engine.scheduler.waiting) == 1
    llm.abort("x")


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, checkpoint):
    """A copy of a checkpoint, to be broken."""
    return shutil.copytree(checkpoint("llama"), tmp_path / "model")


def edit(path, **changes) -> None:
    config = json.loads(path.read_text())
    for name, value in changes.items():
        config[name] = value
        if value is None:
            del config[name]
    path.write_text(json.dumps(config))


def test_no_such_model(tmp_path, broken, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expect("does not exist", LLM, "/no/such/folder", error=FileNotFoundError)
    expect("does not exist", LLM, "nosuchmodel", error=FileNotFoundError)
    expect("is a file", LLM, str(broken / "config.json"), error=FileNotFoundError)
    expect("could not be downloaded", LLM, "nobody-here/no-such-model", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (["config.json"], "has no config.json"),
        (["tokenizer.json", "tokenizer_config.json"], "has no tokenizer"),
        (["model.safetensors"], "has no *.safetensors file, only"),
    ],
)
def test_missing_files(broken, files, text):
    for name in files:
        (broken / name).unlink()
    expect(text, LLM, str(broken), error=FileNotFoundError)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (dict(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not one of LlamaForCausalLM, Qwen2"),
        (dict(architectures=None), "none named"),
        (dict(hidden_size=None, rms_norm_eps=None), "lacks hidden_size, rms_norm_eps"),
        (dict(hidden_size="big"), "hidden_size must be a whole number"),
        (dict(hidden_act="gelu"), "hidden_act is 'gelu', only 'silu'"),
        (dict(quantization_config={"quant_method": "awq"}), "quantized (awq)"),
        (dict(sliding_window=4096), "sliding-window attention is not supported"),
        (dict(num_key_value_heads=3), "4 query heads cannot share 3 KV heads"),
        (
            dict(rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0}),
            "'yarn' is not one of default, linear",
        ),
        (dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "lacks low_freq_factor, high_freq_factor"),
        (dict(dtype="int8"), "weights of dtype 'int8'"),
        (dict(intermediate_size=100), "wrong shape: model.layers.0.mlp.gate_proj.weight is [96, 64]"),
        (dict(num_hidden_layers=3), "missing: model.layers.2."),
        (dict(num_hidden_layers=1), "not part of a LlamaForCausalLM: model.layers.1."),
    ],
)
def test_config(broken, changes, text):
    edit(broken / "config.json", **changes)
    expect(text, LLM, str(broken), num_gpu_blocks_override=64)


def test_unreadable_files(broken):
    weights = broken / "model.safetensors"
    whole = weights.read_bytes()
    for length in (0, 5, 1000, len(whole) - 1):
        weights.write_bytes(whole[:length])
        expect("is not a whole safetensors file", LLM, str(broken), num_gpu_blocks_override=64)
    (broken / "tokenizer.json").write_text("{")
    expect("tokenizer", LLM, str(broken))
    (broken / "config.json").write_text("{")
    expect("cannot be read as JSON", LLM, str(broken))
    (broken / "config.json").write_text("[]")
    expect("must hold a JSON object", LLM, str(broken))


def test_index_that_names_a_missing_file(broken):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    expect("names files that are not there", LLM, str(broken), error=FileNotFoundError, num_gpu_blocks_override=64)
    (broken / "model.safetensors.index.json").write_text("{}")
    expect("is not an index", LLM, str(broken), num_gpu_blocks_override=64)


def test_old_spellings_of_a_config(broken):
    """rope_theta + rope_scaling and torch_dtype, as transformers 4 wrote them, give the same model."""
    [before] = LLM(str(broken), num_gpu_blocks_override=64).generate([[5, 6, 7]], SamplingParams(temperature=0))
    edit(
        broken / "config.json",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling=None or {},
        dtype=None,
        torch_dtype="float32",
    )
    llm = LLM(str(broken), num_gpu_blocks_override=64)
    assert llm.generate([[5, 6, 7]], SamplingParams(temperature=0))[0].outputs == before.outputs
