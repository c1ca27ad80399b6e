"""The layout: what nanovllm/README.md says is there, and what may import what."""

import ast
import re
from pathlib import Path

import pytest
import torch

from chapters.site.sources import ROOT, node_of
from nanovllm.worker.cpu.compiler import find_compiler
from tests.image_checkpoints import make_image_checkpoint
from tests.processes import run_programs

PACKAGE = ROOT / "nanovllm"
ROW = re.compile(r"^\| .+ \| \[([\w/]+\.(?:py|c))\]\(([\w/]+\.(?:py|c))\) · `([\w.]+)` \|$", re.MULTILINE)

# What greedy generation from a plain Llama loads, on a CPU with a C compiler: a module that is added here, or in a wing
# below, is a decision.
HEART = """
calls checkpoint checks.callers checks.exits checks.names checks.values
config
core.block_hash core.block_manager core.cache_stats core.integrity core.scheduler core.sequence detokenizer engine
files.config_json files.end_tokens files.hub files.model_fields files.prompt_length files.system files.tensor_files
files.token_bytes files.tokenizer llm outputs prompts request sampling_params stats wings
worker.attention worker.batch worker.c_calls worker.cpu.c_kernels worker.cpu.compiler worker.cpu.memory
worker.cpu.platform worker.cpu.recorded_step worker.cpu.reorder worker.cpu.threads
worker.exact worker.kernels worker.kv_cache worker.layers worker.loader worker.model
worker.model_runner worker.platform worker.sampler
"""
WINGS = """
compat.finder features.callers.fair_lock features.callers.shared_turns
"""
# Two models, on a machine without Pillow: a plain Llama, and one that sees images.
WITHOUT_PILLOW = """
import sys
sys.modules["PIL"] = None
"""
LOADED = """
import sys
from nanovllm import LLM, SamplingParams
LLM(sys.argv[1]).generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
packages = {name.rpartition(".")[0] for name in sys.modules}
print(*(name.removeprefix("nanovllm.") for name in sys.modules.keys() - packages if name.startswith("nanovllm.")))
assert "rich" not in sys.modules, "for a bar that is not drawn"
llm = LLM(sys.argv[2], dtype="float32", block_size=4, num_gpu_blocks_override=50, max_model_len=100)
assert llm.generate("the quick", SamplingParams(max_tokens=3), use_tqdm=False)[0].finished
print(*(name for name in sys.modules if name.startswith("nanovllm.features.images.")))
try:
    llm.chat([{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], use_tqdm=False)
except ValueError as error:
    print(error)
"""
# Adapters, experts, states and a dense layer, on a pretend GPU.
ON_A_GPU = """
import sys
from nanovllm import LLM, SamplingParams
from tests.pretend_gpu import pretend_gpu
params = [SamplingParams(temperature=0, max_tokens=3, logprobs=2), SamplingParams(top_p=0.9, min_p=0.01, max_tokens=3)]
with pretend_gpu(with_triton=False):
    sizes = dict(block_size=4, num_gpu_blocks_override=16, max_model_len=32, max_num_batched_tokens=16, max_num_seqs=2)
    llm = LLM(sys.argv[1], dtype="float32", optimizations=(), enable_lora=True, max_lora_rank=8, **sizes)
    outputs = llm.generate([[5, 6, 7]] * 2, params)
    assert all(len(output.outputs[0].token_ids) == 3 for output in outputs)
print(*(name for name in sys.modules if name.startswith("nanovllm.worker.c")))
"""


@pytest.fixture(scope="module")
def loaded(checkpoint, tmp_path_factory) -> list[list[str]]:
    """The lines that LOADED prints, and those of ON_A_GPU."""
    sees_images = make_image_checkpoint(tmp_path_factory.mktemp("smolvlm"), "smolvlm")
    programs = (LOADED, str(checkpoint("llama")), str(sees_images)), (ON_A_GPU, str(checkpoint("qwen3-next")))
    found = run_programs(*((ROOT, *program) for program in programs), first=WITHOUT_PILLOW)
    return [lines.splitlines() for lines in found]


def section(title: str) -> str:
    return (PACKAGE / "README.md").read_text("utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_place_is_there():
    text = section("What happens where")
    rows = ROW.findall(text)
    assert len(rows) == text.count("\n| ") - 1 > 30
    for shown, path, symbol in rows:
        assert shown == path
        if path.endswith(".c"):
            assert f"\nvoid {symbol}(" in (PACKAGE / path).read_text("utf-8")
        else:
            node_of(f"nanovllm/{path}", symbol)


def test_every_file_of_the_heart_has_its_place_in_the_order():
    text = section("The heart, in the order to read it")
    for path in (*PACKAGE.glob("[!_]*.py"), *PACKAGE.glob("core/[!_]*.py"), *PACKAGE.glob("worker/[!_]*.py")):
        assert f"({path.relative_to(PACKAGE).as_posix()})" in text, path


def test_every_wing_is_named():
    text = section("The wings")
    for pattern in ("*", "core/*", "features/*", "worker/*"):
        for path in PACKAGE.glob(f"{pattern}/__init__.py"):
            folder = path.parent.relative_to(PACKAGE).as_posix()
            assert f"[{folder}/](" in text or folder in ("core", "worker", "features"), folder


def imported(path: Path) -> set[str]:
    """Modules that a file imports when it runs; not those that only annotations need."""
    tree = ast.parse(path.read_text("utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = [ast.Pass()]
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda path: path.name)
def test_the_control_plane_knows_no_wing(path):
    ours = {name for name in imported(path) if name.startswith("nanovllm")}
    assert all(name.startswith("nanovllm.core") or name == "nanovllm.sampling_params" for name in ours)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU, other kernels are loaded")
def test_what_a_plain_llama_loads(loaded):
    try:
        find_compiler()
    except OSError as error:
        pytest.skip(f"without C kernels, others are loaded: {error}")
    assert sorted(loaded[0][0].split()) == sorted(HEART.split() + WINGS.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_a_gpu_imports_nothing_of_a_cpu(loaded):
    """Nothing that compiles C, asks for the machine's memory or sets threads."""
    names = loaded[1][-1].split()
    assert "nanovllm.worker.cuda.platform" in names
    assert not [name for name in names if name.startswith("nanovllm.worker.cpu")]


def test_without_pillow(loaded):
    """A text needs nothing of it, whatever the model sees; a picture is an error that says what to install."""
    _, of_images, error = loaded[0]
    assert of_images == "nanovllm.features.images.image_config"
    assert "images need Pillow: pip install 'nanovllm[images]'" in error


def test_a_listing_is_documentation():
    """Few enough to be seen at a glance; each folder's first line says what it is."""
    files = [path for path in PACKAGE.glob("*.py") if not path.name.startswith("__")]
    folders = [path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(files) <= 12 and len(folders) <= 9
    assert (
        len(list((PACKAGE / "core").glob("[!_]*.py"))) <= 6 and len(list((PACKAGE / "worker").glob("[!_]*.py"))) <= 12
    )
    for folder in [*folders, *(path for path in (PACKAGE / "features").iterdir() if path.name != "__pycache__")]:
        if folder.is_dir():
            assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text("utf-8"))), folder


def test_a_capabilitys_tests_lie_under_its_name():
    for folder in (path.parent for path in (PACKAGE / "features").glob("*/__init__.py")):
        assert list((ROOT / "tests" / "features" / folder.name).glob("test_*.py")), folder.name
