"""What the caller has set of PyTorch changes no token: a default device, a default dtype, autocast, inference mode."""

import ast
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import nanovllm
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.beam_search.params import BeamSearchParams
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker.exact import weights_of
from tests.checkpoints import SMALL
from tests.features.lora.adapters import make_adapter
from tests.gguf_files import of_type, write_gguf
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu

FACTORIES = {
    *("tensor", "as_tensor", "asarray", "scalar_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye"),
    *("logspace", "rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "empty_strided", "Generator"),
}
WITHOUT_DTYPE = {"Generator", "arange"}  # whole numbers from 0 are int64 whatever the default is


def test_every_factory_names_its_device_and_dtype():
    """A call that leaves them out asks for the caller's defaults."""
    silent, num_calls = [], 0
    for path in Path(nanovllm.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            num_calls += 1
            needed = {"device"} if node.func.attr in WITHOUT_DTYPE else {"device", "dtype"}
            if missing := needed - {keyword.arg for keyword in node.keywords}:
                silent.append(f"{path.name}:{node.lineno} {node.func.attr}: {missing}")
    assert not silent and num_calls > 60


# -- the states that a caller's PyTorch may be in; elsewhere: a device that is not the engine's -----------------------


@contextmanager
def default_device(elsewhere: Any) -> Iterator[None]:
    torch.set_default_device(elsewhere)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() is dtype
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[Any], Any]] = {
    "default device": default_device,
    "device as a context": torch.device,
    "float64": lambda elsewhere: default_dtype(torch.float64),
    "bfloat16": lambda elsewhere: default_dtype(torch.bfloat16),
    "autocast": lambda elsewhere: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": lambda elsewhere: torch.inference_mode(),
    "no gradients": lambda elsewhere: torch.no_grad(),
}


@contextmanager
def together(elsewhere: Any) -> Iterator[None]:
    """A state of each kind at once: what any of them changes shows. By night, which of them it is."""
    with ExitStack() as states:
        for state in ("default device", "bfloat16", "autocast", "inference mode"):
            states.enter_context(STATES[state](elsewhere))
        yield


TOGETHER = {"together": together}
EACH = pytest.mark.parametrize("states", [TOGETHER, by_night(STATES)], ids=["together", "one at a time"])

# -- what is asked: (folder, options of the LLM, question) -------------------------------------------------------------

GREEDY = dict(temperature=0, max_tokens=4, ignore_eos=True)
PICTURES = [picture(60, 40), picture(20, 90, 1)]
PROMPTS = [[*range(20, 37), 9], [*range(20, 37), 5, 6], [7, 8, 7, 8, 7, 8, 7]]
SAMPLED = [
    dict(GREEDY, logprobs=2, prompt_logprobs=1),
    dict(seed=1, max_tokens=4, top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.2, n=2),
    dict(seed=2, max_tokens=4, logit_bias={5: 2.0}, bad_words=["gull"], allowed_token_ids=[*range(50)], min_tokens=2),
    dict(seed=3, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="[a-z]{3}"), logprobs=1),
    dict(seed=4, max_tokens=4, logits_processors=[lambda generated, row: row.roll(1)]),
]


def shown(outputs: list) -> list:
    return [(output.prompt_logprobs, [astuple(sample) for sample in output.outputs]) for output in outputs]


def generated(llm: LLM, *params: dict, prompts: Any = PROMPTS, **options: Any) -> list:
    """Twice: cold, and with what is cached."""
    asked = [SamplingParams(**each) for each in params or (GREEDY,)]
    found = [llm.generate(prompts, each, use_tqdm=False, **options) for each in (*asked, asked[0])]
    return [shown(outputs) for outputs in found]


def beams(llm: LLM) -> list:
    found = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], BeamSearchParams(beam_width=2, max_tokens=3))
    return [(beam.tokens, beam.cum_logprob) for beam in found[0].sequences]


def pictures(llm: LLM) -> list:
    prompt = {"prompt": f"two {llm.get_tokenizer().decode(llm.engine.model_config.images.image_token_id)} gulls"}
    return generated(llm, prompts=[prompt | {"multi_modal_data": {"image": image}} for image in PICTURES])


def vectors(llm: LLM) -> list:
    embedded = [output.outputs.embedding for output in llm.embed(["two gulls", "a red boat"], use_tqdm=False)]
    return [embedded, [output.outputs.score for output in llm.score("fox", ["dog", "a boat"], use_tqdm=False)]]


def classes(llm: LLM) -> list:
    return [output.outputs.probs for output in llm.classify(["two gulls", "a red boat"], use_tqdm=False)]


@pytest.fixture(scope="module")
def folders(checkpoint, tmp_path_factory) -> Callable[[str], Path]:
    """folders(name): a checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("of_modes")
        if name == "adapter":
            return make_adapter(folder, checkpoint(), target_modules=["q_proj", "down_proj"], r=4)
        if name == "gguf":
            return write_gguf(checkpoint("llama"), folder / "model.gguf", of_type("Q4_0"))
        if name == "classifier":
            model = AutoModelForSequenceClassification.from_pretrained(checkpoint("qwen3"), dtype=torch.float32)
            model.save_pretrained(folder)
            AutoTokenizer.from_pretrained(checkpoint("qwen3")).save_pretrained(folder)
            return folder
        if name in ("smolvlm", "qwen3_vl"):
            return make_image_checkpoint(folder / "model", name)
        return checkpoint(name)

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make(name)
        return made[name]

    return get


Ask = Callable[[LLM], list]
WORK: dict[str, tuple[str, dict, Ask]] = {
    "everything that a request may say": ("llama", {}, lambda llm: generated(llm, *SAMPLED)),
    "PyTorch's kernels": ("qwen2-window", {"optimizations": ()}, generated),
    "bf16": ("qwen3", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}, generated),
    "yarn": ("qwen3-yarn", {"max_model_len": 128}, generated),
    "experts": ("qwen3-moe", {}, generated),
    "hybrid": ("qwen3.5-moe", {}, generated),
    "int8": ("llama", {"quantization": "int8"}, generated),
    "int4": ("qwen3.5", {"quantization": "int4"}, generated),
    "gguf": ("gguf", {}, generated),
    "dummy weights": ("llama", {"load_format": "dummy"}, generated),
    "drafts of n-grams": ("llama", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, generated),
    "drafts of a model": ("llama", {"speculative_config": {"model": "llama", "num_speculative_tokens": 3}}, generated),
    "a tier": ("qwen3.5", {"cpu_cache_bytes": 1 << 20, "num_gpu_blocks_override": 16, "max_model_len": 60}, generated),
    "beams": ("llama", {}, beams),
    "pictures of tiles": ("smolvlm", {}, pictures),
    "pictures of patches": ("qwen3_vl", {}, pictures),
    "embeddings": ("qwen3", {"runner": "pooling"}, vectors),
    "classes": ("classifier", {}, classes),
}
ON_GPU = "everything that a request may say", "hybrid", "drafts of n-grams", "a tier", "pictures of tiles", "embeddings"


def make_llm(folders: Callable[[str], Path], name: str, **more: Any) -> LLM:
    folder, options, _ = WORK[name]
    options = SMALL | dict(max_num_seqs=4) | options | more
    if (draft := options.get("speculative_config", {}).get("model")) is not None:
        options["speculative_config"] = options["speculative_config"] | {"model": str(folders(draft))}
    return LLM(str(folders(folder)), **options)


@EACH
@pytest.mark.parametrize("name", WORK)
def test_on_a_cpu(folders, name, states):
    ask = WORK[name][2]
    folders(WORK[name][0])
    right = ask(make_llm(folders, name))
    for state, enter in states.items():
        with enter("meta"):
            found = ask(make_llm(folders, name))
        assert found == right, f"{name}, {state}"


@EACH
@pytest.mark.parametrize("name", [ON_GPU[0], *(by_night(name) for name in ON_GPU[1:])])
def test_on_a_gpu(folders, name, states):
    ask = WORK[name][2]
    folders(WORK[name][0])
    with pretend_gpu() as gpu:
        options = dict(enforce_eager=True, max_num_batched_tokens=32)
        right = ask(make_llm(folders, name, **options))
        for state, enter in states.items():
            with enter(gpu.device):
                found = ask(make_llm(folders, name, **options))
            assert found == right, f"{name}, {state}"


@EACH
def test_weights_of_tokens(states):
    """Too close to wrong ones for a few tokens to tell them apart."""
    x = torch.linspace(-25, 0, 1000, dtype=torch.float32, device="cpu")[None]
    right = weights_of(x)
    for state, enter in states.items():
        with enter("meta"):
            assert torch.equal(weights_of(x), right), state


@EACH
def test_adapters(folders, states):
    adapter = LoRARequest("x", 1, str(folders("adapter")))
    options = dict(enable_lora=True, max_lora_rank=8)
    right = generated(LLM(str(folders("llama")), **SMALL, **options), lora_request=adapter)
    for state, enter in states.items():
        with enter("meta"):
            found = generated(LLM(str(folders("llama")), **SMALL, **options), lora_request=adapter)
        assert found == right, state


@pytest.mark.parametrize("state", STATES)
def test_a_state_of_a_part_of_the_time(folders, state):
    """When the LLM is made, or only when it is asked; it comes and goes while a text is streamed."""
    name = "everything that a request may say"
    before = make_llm(folders, name)
    right, prompt = generated(before, *SAMPLED), PROMPTS[0]
    text = [output.outputs[0].token_ids for output in before.stream(prompt, SamplingParams(**GREEDY))]
    with STATES[state]("meta"):
        within = make_llm(folders, name)
        assert generated(before, *SAMPLED) == right
        outputs = before.stream(prompt, SamplingParams(**GREEDY))
        found = [next(outputs).outputs[0].token_ids]
    found += [output.outputs[0].token_ids for output in outputs]
    assert found == text
    assert generated(within, *SAMPLED) == right
    outputs = within.stream(prompt, SamplingParams(**GREEDY))
    found = [next(outputs).outputs[0].token_ids]
    with STATES[state]("meta"):
        found += [output.outputs[0].token_ids for output in outputs]
    assert found == text
