"""Options and checkpoints made of anything at all: a ValueError or FileNotFoundError, or an engine that works."""

import json
from dataclasses import fields, replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.sequence import Sequence
from nanovllm.worker.sampler import SamplingBatch, sample
from tests.marks import by_night

VOCAB_SIZE = 320
OPTIONS = dict(num_gpu_blocks_override=16, max_model_len=64, enforce_eager=True)
REFUSED = (ValueError, FileNotFoundError)

POWERS = [sign * 2**e - d for sign in (1, -1) for e in (31, 32, 62, 63, 64, 80) for d in (0, 1)]
INTEGERS = st.integers(-2, 9) | st.sampled_from([16, 64, 320, 10**400, *POWERS])
FLOATS = st.floats() | st.floats(0, 2) | st.sampled_from([1e-50, 1e-300, 5e-324, 1e-46, 1e38, 1e39, -0.0])
TEXTS = st.text(max_size=5) | st.sampled_from(["float32", "xxh64", "default", "llama3", "full_attention", "\ud800"])
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=4,
)
NUMPY = [np.int64(3), np.uint64(2**64 - 1), np.float32(0.5), np.float16("inf"), np.True_, np.array([1, 2])]
OBJECTS = [Fraction(1, 3), Fraction(10**400), 1j, torch.tensor(1), torch.float32, (1, 2), {1}, range(3), int, object()]
ANYTHING = JSON | st.binary(max_size=3) | st.sampled_from([*NUMPY, *OBJECTS])


def fuzz(check, num_examples: int, **strategies) -> None:
    """The same examples every time; others, and many more, in a long run."""
    chosen = settings(max_examples=num_examples, derandomize=num_examples < 1000, deadline=None, database=None)
    chosen(given(**strategies)(check))()


def at_length(num_examples: int):
    return pytest.param(num_examples, marks=pytest.mark.soak)


def some_of(names: list[str], values=ANYTHING):
    return st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=3)


@pytest.fixture(scope="module")
def tiny(checkpoint):
    return LLM(str(checkpoint()), **OPTIONS)


@pytest.mark.parametrize("num_examples", [200, at_length(80_000)])
def test_sampling_params(tiny, num_examples):
    """What is accepted never chooses a token whose probability is 0, and runs."""
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)).mul(5)
    logits[0, -1] = -torch.inf

    def check(options: dict) -> None:
        try:
            params = SamplingParams(**options)
        except ValueError:
            return
        params = replace(params, n=min(params.n, 2), max_tokens=min(params.max_tokens or 3, 3), min_tokens=0)
        seq = Sequence([5, 6, 7], params)
        seq.tokens += [8, VOCAB_SIZE - 1, 8]
        [token_id], _ = sample(logits.clone(), SamplingBatch.from_sequences([seq], frozenset([1])))
        assert token_id != VOCAB_SIZE - 1
        try:
            [output] = tiny.generate([[5, 6, 7]], params, use_tqdm=False)
        except ValueError:
            return
        assert all(completion.token_ids for completion in output.outputs)

    fuzz(check, num_examples, options=some_of([f.name for f in fields(SamplingParams)]))


@pytest.mark.parametrize("num_examples", [100, at_length(40_000)])
def test_engine_options(checkpoint, num_examples):
    def check(options: dict) -> None:
        try:
            config = EngineConfig(**{"model": str(checkpoint())} | OPTIONS | options)
            # Fewer blocks would be enough, but are many Python objects; ranks are processes.
            if (config.num_gpu_blocks_override or 2**20) < 2**10 and config.tensor_parallel_size not in (2, 4):
                llm = LLM(**{f.name: getattr(config, f.name) for f in fields(config)})
                assert llm.generate([[5]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids
        except REFUSED:
            pass

    names = [f.name for f in fields(EngineConfig) if f.name != "model"]
    fuzz(check, num_examples, options=some_of(names))
    fuzz(check, num_examples // 10, options=some_of(["model"]))


FILES = {
    "config.json": [f.name for f in fields(ModelConfig)]
    + "architectures attention_bias rope_parameters rope_scaling torch_dtype eos_token_id quantization_config".split()
    + "hidden_act use_sliding_window sliding_window layer_types partial_rotary_factor auto_map model_type".split()
    + "max_window_layers no_rope_layers no_rope_layer_interval original_max_position_embeddings".split(),
    "generation_config.json": "eos_token_id temperature top_p top_k min_p repetition_penalty max_new_tokens "
    "do_sample auto_map".split(),
    "tokenizer_config.json": "auto_map tokenizer_class eos_token bos_token chat_template model_max_length "
    "added_tokens_decoder extra_special_tokens backend".split(),
    "tokenizer.json": "version model added_tokens pre_tokenizer decoder normalizer post_processor truncation "
    "padding".split(),
    "model.safetensors.index.json": "weight_map metadata auto_map".split(),
}
ROPE = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
ROPE |= {"original_max_position_embeddings": 64}


def mutations():
    """(file, what changes in it); values are such as were there, mutated, or anything at all."""
    rope = st.builds(lambda changes: ROPE | changes, some_of(list(ROPE), JSON))
    weight_map = st.builds(lambda name: {"weight_map": {"model.norm.weight": name}}, TEXTS | JSON)
    return st.one_of(
        *(st.tuples(st.just(file), some_of(names, JSON)) for file, names in FILES.items()),
        st.tuples(st.just("config.json"), st.builds(lambda value: {"rope_parameters": value}, rope)),
        st.tuples(st.just("model.safetensors.index.json"), weight_map),
        st.tuples(st.sampled_from(list(FILES)), st.binary(max_size=20) | JSON),
    )


@pytest.mark.parametrize("num_examples", [30, by_night(300), at_length(24_000)])
def test_checkpoints(broken, num_examples):
    originals = {name: (broken / name).read_text() for name in FILES if (broken / name).is_file()}

    def check(mutation: tuple) -> None:
        file, change = mutation
        path = broken / file
        if isinstance(change, dict):
            change = json.loads(originals.get(file, "{}")) | change
        path.write_bytes(change if isinstance(change, bytes) else json.dumps(change).encode())
        try:
            llm = LLM(str(broken), **OPTIONS)
            messages = [{"role": "user", "content": "hi"}]
            assert llm.generate(["the fox"], use_tqdm=False)[0].outputs[0].token_ids
            assert llm.chat(messages, use_tqdm=False)[0].outputs[0].token_ids
        except REFUSED:
            pass
        finally:
            path.unlink()
            if file in originals:
                path.write_text(originals[file])

    fuzz(check, num_examples, mutation=mutations())
