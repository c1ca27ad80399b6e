"""Every wing can be deleted: a Llama generates the same without it, and what asks for it names the folder."""

import io
import json
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

import nanovllm
from nanovllm import LLM
from nanovllm.features.lora import registry
from tests.gguf_files import write_gguf
from tests.processes import run_programs

PACKAGE = Path(nanovllm.__path__[0])
FEATURES = sorted(f"features/{path.parent.name}" for path in PACKAGE.glob("features/*/__init__.py"))
WINGS = ["serving", "jobs", "tools", "compat", "core/tiers", "core/snapshots", "worker/cuda", *FEATURES]

# What a Llama says, and then what happens when something asks for a wing.
PROGRAM = """
import json, sys
# An editable installation finds a folder where it was.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
import nanovllm
from nanovllm import LLM, SamplingParams

path, *asks = sys.argv[1:]
llm = LLM(path, block_size=4, num_gpu_blocks_override=14, max_model_len=48, max_num_seqs=4)
prompts = [[40 + i for i in range(9)] + [n] for n in range(4)]
fixed = dict(max_tokens=12, ignore_eos=True)
greedy = SamplingParams(temperature=0, **fixed)
told = {"package": nanovllm.__path__[0]}

def token_ids(params):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

told["greedy"] = token_ids(greedy)
told["sampled"] = token_ids(SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, **fixed))
text = llm.generate(prompts[:1], greedy, use_tqdm=False)[0].outputs[0].text
[stopped] = llm.generate(prompts[:1], SamplingParams(temperature=0, stop=[text[2:4]], **fixed), use_tqdm=False)
told["stopped"] = stopped.outputs[0].text, stopped.outputs[0].finish_reason
told["streamed"] = [output.outputs[0].token_ids for output in llm.stream(prompts[1], greedy)][-1]
told["num_cached_tokens"] = stopped.num_cached_tokens
told["num_preemptions"] = llm.engine.scheduler.num_preemptions
llm.engine.scheduler.check_integrity()
errors = []
for ask in asks:
    try:
        exec(ask)
        errors.append("no error")
    except (ValueError, ImportError) as error:
        errors.append(str(error))
print(json.dumps([told, errors]))
"""

ASKS = {  # a wing -> what asks for it. llm is of a plain Llama, at `path`; {variant} is another checkpoint
    "serving": "from nanovllm import AsyncLLM",
    "jobs": "import nanovllm.jobs.run_batch",
    "tools": "import nanovllm.tools.cli",
    "compat": "from nanovllm import EngineArgs",
    "core/tiers": "LLM(path, cpu_cache_bytes=1 << 20)",
    "core/snapshots": "LLM('{qwen3-next}').generate([[1, 2]])",
    "worker/cuda": "import nanovllm.worker.cuda.platform",
    "features/beam_search": "llm.beam_search([[1]], None)",
    "features/cache_reports": "LLM(path, kv_cache_metrics=True)",
    "features/callers": "llm.stats()",
    "features/chat_template": "llm.chat([{'role': 'user', 'content': 'hi'}])",
    "features/experts": "LLM('{qwen3-moe}')",
    "features/grammar": "SamplingParams(structured_outputs={'regex': 'a'})",
    "features/hybrid": "LLM('{qwen3-next}')",
    "features/images": "llm.generate({'prompt_token_ids': [1], 'multi_modal_data': {'image': 'a.png'}})",
    "features/logits_processors": "llm.generate([[1]], SamplingParams(repetition_penalty=1.5))",
    "features/logprobs": "llm.generate([[1]], SamplingParams(logprobs=1))",
    "features/lora": "LLM(path, enable_lora=True)",
    "features/parallel": "LLM(path, tensor_parallel_size=2)",
    "features/pooling": "llm.embed('hi')",
    "features/positions": "LLM('{mistral-window}')",
    "features/published": "LLM('{llama}', hf_overrides={'quantization_config': {'quant_method': 'awq'}})",
    "features/quantization": "LLM(path, quantization='int8')",
    "features/reasoning": "import nanovllm.tools.check_model",
    "features/speculation": "LLM(path, speculative_config={'method': 'ngram', 'num_speculative_tokens': 2})",
    "features/tiers": "LLM(path, prefix_cache_dir=path + '.cache')",
    "features/tool_calls": "import nanovllm.tools.check_model",
}

PAGE = "examples/move_to_vllm.md lists what it takes"
PLAIN = {  # what compat/ would know more about -> what is said without it
    "LLM(path, max_model_length=5)": "LLM has no argument 'max_model_length' (found 5); did you mean 'max_model_len'? "
    + PAGE,
    "LLM(path, swap_space=4)": f"LLM has no argument 'swap_space' (found 4). {PAGE}",
    "SamplingParams(best_of=1)": f"SamplingParams has no argument 'best_of' (found 1). {PAGE}",
    "llm.generate([[5]], max_tokens=5)": f"generate has no argument 'max_tokens' (found 5). {PAGE}",
    "from nanovllm.config import PoolerConfig": "cannot import name 'PoolerConfig' from 'nanovllm.config'",
}

NOT_NEEDED = {  # what asks for one wing -> wings that it does not need
    "llm.generate([[1]], SamplingParams(repetition_penalty=1.5))": ["features/grammar"],
    "LLM(path, quantization='int8').generate([[1]])": ["features/experts", "features/parallel", "features/hybrid"],
    "LLM(path, enable_lora=True).generate([[1]])": ["features/parallel", "features/hybrid"],
    "LLM(path + '.gguf').generate([[1]])": ["features/hybrid", "features/experts", "features/parallel"],
    "LLM(path, runner='pooling').embed('hi')": ["features/hybrid"],
    "LLM(path, runner='pooling').score('hi', 'there')": ["features/chat_template", "features/hybrid"],
}
NOT_NEEDED_BY_NIGHT = {
    "llm.beam_search([[1]], nanovllm.sampling_params.BeamSearchParams(2, 2))": ["features/lora"],
    "LLM(path, tensor_parallel_size=2).generate([[1]], SamplingParams(max_tokens=2))": ["features/grammar"],
}


def house_without(wings: list[str], folder: Path) -> Path:
    """A copy of the package from which these folders are gone."""
    shutil.copytree(PACKAGE, folder / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    for wing in wings:
        shutil.rmtree(folder / "nanovllm" / wing)
    return folder


def reports(path: Path, asks: dict[Path, list[str]]) -> list[tuple[dict, list[str]]]:
    """What PROGRAM tells of the model at `path` in each house, and the errors of what asks for its wings there."""
    found = []
    printed = run_programs(*((folder, PROGRAM, str(path), *asked) for folder, asked in asks.items()))
    for folder, lines in zip(asks, printed, strict=True):
        told, errors = json.loads(lines.splitlines()[-1])
        assert told.pop("package") == str(folder / "nanovllm")
        found.append((told, errors))
    return found


@pytest.fixture(scope="module")
def expected(checkpoint) -> dict:
    """What the whole house says, in this process."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
        patch.setattr(sys, "argv", ["", str(checkpoint())])
        patch.setattr(sys, "meta_path", [*sys.meta_path])
        exec(PROGRAM, {})
    told, _ = json.loads(out.getvalue().splitlines()[-1])
    assert told.pop("package") == str(PACKAGE)
    assert told["num_preemptions"] > 0 and told["num_cached_tokens"] > 0 and told["stopped"][1] == "stop"
    return told


def asked(wing: str, checkpoint: Any) -> str:
    return re.sub(r"\{([a-z0-9-]+)\}", lambda found: str(checkpoint(found[1])), ASKS[wing])


@pytest.fixture(scope="module")
def two_houses(checkpoint, tmp_path_factory) -> list[tuple[dict, list[str]]]:
    """The reports of a house without any wing, and of one that lacks what is not needed."""
    write_gguf(checkpoint(), Path(f"{checkpoint()}.gguf"))
    none, some = (tmp_path_factory.mktemp("house") for _ in range(2))
    house_without(WINGS, none)
    house_without(sorted({wing for wings in NOT_NEEDED.values() for wing in wings}), some)
    asks = [*(asked(wing, checkpoint) for wing in ASKS), *PLAIN]
    return reports(checkpoint(), {none: asks, some: list(NOT_NEEDED)})


def test_all_wings_are_gone(two_houses, expected):
    (told, errors), _ = two_houses
    assert told == expected
    for wing, error in zip(ASKS, errors, strict=False):
        assert "nanovllm/" in error and "is not there" in error, f"{wing}: {error}"
    for error, plain in zip(errors[len(ASKS) :], PLAIN.values(), strict=True):
        assert error.startswith(plain)


@pytest.mark.nightly
@pytest.mark.parametrize("wing", WINGS)
def test_one_wing_is_gone(checkpoint, tmp_path, expected, wing):
    [(told, [error])] = reports(checkpoint(), {house_without([wing], tmp_path): [asked(wing, checkpoint)]})
    assert told == expected
    assert f"nanovllm/{wing}/, which is not there" in error


def test_what_a_wing_does_not_need(two_houses):
    _, (_, errors) = two_houses
    assert dict(zip(NOT_NEEDED, errors, strict=True)) == dict.fromkeys(NOT_NEEDED, "no error")


@pytest.mark.nightly
@pytest.mark.parametrize("ask", NOT_NEEDED_BY_NIGHT)
def test_what_others_do_not_need(checkpoint, tmp_path, ask):
    [(_, errors)] = reports(checkpoint(), {house_without(NOT_NEEDED_BY_NIGHT[ask], tmp_path): [ask]})
    assert errors == ["no error"]


def test_every_wing_is_asked_for():
    assert sorted(ASKS) == sorted(WINGS)


def test_threads_that_ask_at_once_get_the_same(checkpoint, monkeypatch):
    """Two registries of adapters would give one number to two of them."""
    engine, both_make_one = LLM(str(checkpoint())).engine, Barrier(2)
    make = registry.make

    def meet_and_make(engine):
        both_make_one.wait(60)
        return make(engine)

    monkeypatch.setattr(registry, "make", meet_and_make)
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(lambda _: engine.known_adapters, range(2))
    assert one is other is engine.known_adapters
