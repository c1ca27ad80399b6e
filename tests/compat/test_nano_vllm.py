"""A script for nano-vllm runs here: its calls, its options, its way to read an output, and where it imports from."""

from dataclasses import FrozenInstanceError
from random import Random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from tests.checkpoints import make_checkpoint
from tests.errors import expect

PARAMS = SamplingParams(temperature=0.6, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", vocab_size=10240, max_position_embeddings=4096)
    return LLM(str(folder), enforce_eager=False, max_model_len=4096, tensor_parallel_size=1, num_kvcache_blocks=900)


def test_chat_prompts_as_text(llm):
    chats = [[{"role": "user", "content": text}] for text in ("introduce yourself", "list all primes within 100")]
    tokenizer = llm.get_tokenizer()
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    for output, prompt in zip(llm.generate(prompts, PARAMS), prompts, strict=True):
        assert output.prompt == prompt and output["text"] == output.outputs[0].text
        assert len(output["token_ids"]) == 12


def test_a_benchmark_of_token_ids(llm):
    """Lists of ids beyond any word, parameters for each, no progress bar; read back from the parameters."""
    random = Random(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(5, 60))] for _ in range(20)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=random.randint(2, 9)) for _ in prompts]
    llm.generate(["Benchmark: "], SamplingParams())
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [given.max_tokens for given in params]


def test_an_output_has_two_keys_and_is_no_sequence(llm):
    [output] = llm.generate([[5, 6, 7]], SamplingParams(n=2, max_tokens=3, ignore_eos=True))
    assert output["token_ids"] is output.outputs[0].token_ids
    for key in ("outputs", "prompt", 0, slice(1)):
        with pytest.raises(KeyError, match="the keys 'text' and 'token_ids'"):
            output[key]
    for use in (iter, list, lambda x: "text" in x):
        with pytest.raises(TypeError):
            use(output)
    with pytest.raises(TypeError):
        output["text"] = "x"
    with pytest.raises(FrozenInstanceError):
        output.finished = False


def test_options(checkpoint):
    llm = LLM(str(checkpoint()), kvcache_block_size=8, num_kvcache_blocks=40, hf_config=None, eos=-1)
    assert (llm.engine.config.block_size, llm.engine.config.num_gpu_blocks_override) == (8, 40)
    config = EngineConfig(model="m", kvcache_block_size=256, block_size=256, num_kvcache_blocks=-1)
    assert config == EngineConfig(model="m", block_size=256)
    assert EngineConfig(model="m", kvcache_block_size=256, block_size=None) == config, "None is not given"
    assert EngineConfig(model="m", kvcache_block_size=None, num_kvcache_blocks=None) == EngineConfig(model="m")
    for options, text in (
        (dict(kvcache_block_size=256, block_size=16), "kvcache_block_size and block_size are two names of one option"),
        (dict(num_kvcache_blocks=-1, num_gpu_blocks_override=9), "are two names of one option"),
        (dict(kvcache_block_size=0), "block_size must be"),
        (dict(hf_config={}), "LLM takes 'hf_config' only as None (found {}). examples/move_to_vllm.md lists"),
        (dict(eos=2), "LLM takes 'eos' only as -1 (found 2)"),
    ):
        expect(text, LLM, str(checkpoint()), **options)


IMPORTS = """
from nanovllm.config import Config
from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import LinearBase, ReplicatedLinear, RowParallelLinear
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.llm import LLM
from nanovllm.models.qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3MLP, Qwen3Model
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.loader import load_model
"""


@pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
def test_imports(line):
    names: dict = {}
    exec(line, names)
    for name in line.split("import ")[1].split(", "):
        assert names[name].__module__.startswith("nanovllm.")


def test_names_lead_to_what_the_engine_uses(llm):
    from nanovllm.engine.block_manager import BlockManager
    from nanovllm.engine.model_runner import ModelRunner
    from nanovllm.engine.scheduler import Scheduler
    from nanovllm.layers.layernorm import RMSNorm
    from nanovllm.models.qwen3 import Qwen3ForCausalLM

    engine = llm.engine
    assert isinstance(engine.block_manager, BlockManager) and isinstance(engine.scheduler, Scheduler)
    assert isinstance(engine.model_runner, ModelRunner) and isinstance(engine.model_runner.model, Qwen3ForCausalLM)
    assert isinstance(engine.model_runner.model.norm, RMSNorm)
