"""The wheel: what is in it, and that it works where the clone is not, with each extra alone."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

import nanovllm
from tests.marks import by_night
from tests.processes import LIMIT_S

ROOT = Path(__file__).parents[1]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "nanovllm", "chapters", "examples", "tests")
EXTRAS = {  # the modules that each of them brings
    "gguf": {"gguf"},
    "demo": {"gguf", "accelerate"},
    "ray": {"ray"},
    "labs": {"marimo", "tomli"},
    "structured": {"llguidance"},
    "images": {"PIL"},
    "serve": {"starlette", "uvicorn"},
    "compiler": {"ziglang"},
}
# Beside ordinary text: what an extra is for, as far as it needs no demo model and no terminal. None: where none is.
WORK = {
    "gguf": "from nanovllm.files.gguf_file import GGUFFile",
    "demo": "import nanovllm.tools.demo_model, gguf, accelerate",
    "structured": "params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(regex='[a-z]+'))\n"
    "assert llm.generate('the quick', params, use_tqdm=False)[0].outputs[0].text.isalpha()",
    "images": "from PIL import Image\nfrom nanovllm.features.images.sources import Sources\n"
    "assert Sources().open(Image.new('RGB', (9, 8))).size == (9, 8)",
    "serve": "import nanovllm.serving.http.serve",
    "compiler": "from nanovllm.worker.cpu import compiler\nassert compiler.find_spec('ziglang')",
    None: "from nanovllm.tools import cli\nassert cli.main(['serve', model]) == 2",
}
# For developers; cuda needs a GPU, and ray-serve is for an example, which is in no wheel.
NOT_ALONE = {"ci", "test", "lint", "teach", "clients", "clients-of-openai-2", "cuda", "ray-serve", "site"}
# What one process does with one extra: argv has the modules to hide and the checkpoint.
USE = """
import json, sys
from importlib.machinery import PathFinder

class Hide(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)

hidden, model = set(json.loads(sys.argv[1])), sys.argv[2]
sys.meta_path[sys.meta_path.index(PathFinder)] = Hide
import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams
assert "site-packages" in nanovllm.__file__, nanovllm.__file__
params = SamplingParams(temperature=0, max_tokens=4)
llm = LLM(model, max_model_len=64)
[output] = llm.generate("the quick", params, use_tqdm=False)
exec(sys.argv[3])
assert not hidden & {name.partition(".")[0] for name in sys.modules}
print(json.dumps(output.outputs[0].token_ids))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the project, as a clone has it, with the build system that is installed here."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    for cache in source.rglob("__pycache__"):
        shutil.rmtree(cache)
    pip("wheel", str(source), "--no-deps", "--no-build-isolation", "--wheel-dir", str(out))
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a new environment that has the wheel, and this one's packages behind it, but not the clone."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    # A .pth file in this line's folder is not read: an editable install of the clone stays out.
    (packages / "these.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    pip("--python", str(folder / "bin/python"), "install", "--no-deps", "--no-index", str(wheel))
    return folder / "bin"


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def outside(tmp_path) -> dict:
    """Options of a process in an empty folder, which does not see the clone."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {"cwd": tmp_path, "env": env, "text": True}


@pytest.fixture
def run(installed, outside):
    """run(command, ...) -> what it prints."""

    def run(command: str, *arguments: str) -> str:
        command_line = [str(installed / command), *arguments]
        done = subprocess.run(command_line, capture_output=True, timeout=LIMIT_S, **outside)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_it_holds_the_package_and_nothing_else(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"nanovllm-{nanovllm.__version__}.dist-info"
    assert {name.partition("/")[0] for name in names} == {"nanovllm", info}, "no tests, chapters or examples"
    for pattern in ("**/*.py", "worker/cpu/*.[ch]", "features/*/*.[ch]", "serving/http/page/*"):
        files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "nanovllm").glob(pattern)]
        assert files and names.issuperset(files), pattern
    left_out = {path for path in (ROOT / "nanovllm").rglob("*") if path.is_file()} - {ROOT / name for name in names}
    assert {path.name for path in left_out if path.suffix != ".pyc"} <= {"README.md"}
    assert f"{info}/licenses/LICENSE" in names


def test_its_commands_run(run):
    for help in (run("python", "-m", "nanovllm", "--help"), run("nanovllm", "--help")):
        assert "serve" in help and "run-batch" in help
    assert "site-packages" in run("python", "-c", "import nanovllm; print(nanovllm.__file__)")


@pytest.mark.slow
def test_it_generates_and_serves(run, installed, outside, demo_checkpoint):
    asked = {"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
    options = ["--model", str(demo_checkpoint), "--max-tokens", "5", "--temperature", "0"]
    assert "Paris" in run("nanovllm", "generate", *options, asked["prompt"])
    command = [str(installed / "nanovllm"), "serve", str(demo_checkpoint), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, **outside) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split("the page is ")[1].split("/,")[0]
            body = json.dumps(asked).encode(), {"Content-Type": "application/json"}
            with urlopen(Request(f"{url}/v1/completions", *body), timeout=LIMIT_S) as answer:
                assert "Paris" in json.load(answer)["choices"][0]["text"]
            with urlopen(f"{url}/page/chat.js", timeout=LIMIT_S) as answer:
                assert answer.status == 200
        finally:
            server.terminate()
    assert server.returncode == 0


def test_every_extra_is_known(wheel):
    metadata = zipfile.ZipFile(wheel).read(f"nanovllm-{nanovllm.__version__}.dist-info/METADATA").decode()
    assert set(re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)) == EXTRAS.keys() | NOT_ALONE


@pytest.mark.slow
@pytest.mark.parametrize("extra", [None, *(by_night(extra) for extra in WORK if extra)])
def test_the_engine_runs_with_each_extra_alone(run, checkpoint, extra):
    hidden = set().union(*EXTRAS.values()) - EXTRAS.get(extra, set())
    said = run("python", "-c", USE, json.dumps(sorted(hidden)), str(checkpoint()), WORK[extra])
    assert len(json.loads(said)) == 4
