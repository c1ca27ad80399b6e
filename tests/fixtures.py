"""Fixtures that several files share."""

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nanovllm import LLM
from nanovllm.features.speculation.draft_model import DraftModel
from nanovllm.features.speculation.step_times import StepTimes
from nanovllm.files import demo_model
from nanovllm.files.hub import cache_folder
from nanovllm.tools.demo_model import DemoModelError, demo_model_path
from nanovllm.worker.cpu import memory
from tests.checkpoints import SMALL, VARIANTS, edit, make_checkpoint
from tests.processes import Processes
from tests.site_browser import chromium


def pytest_sessionstart() -> None:
    """Processes of pytest-xdist share the cores: threads that wait for one another would take many times as long."""
    if num_workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 0)):
        num_threads = max(1, (os.cpu_count() or 1) // num_workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))  # of processes that tests start
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    gc.disable()  # while tests are collected
    memory.HUGE_PAGE = 1 << 14  # less of it is touched: most engines of tests take few steps


def pytest_collection_finish() -> None:
    gc.freeze()  # what has been imported, and thousands of tests: every full collection would look at these objects
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or Triton's library lists them as leaks when the process ends


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C as at a terminal: in a shell's background pytest, and all that it starts, would inherit SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def processes() -> Iterator[Processes]:
    with ExitStack() as ends:
        yield Processes(ends)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(variant) -> directory; each is made once a session."""
    made: dict[str, Path] = {}

    def get(variant: str = "llama") -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


@pytest.fixture
def copy_of(tmp_path, checkpoint):
    """copy_of(variant) -> a checkpoint that may be changed."""
    return lambda variant: shutil.copytree(checkpoint(variant), tmp_path / "model")


@pytest.fixture
def broken(copy_of) -> Path:
    """A copy of a checkpoint, to be broken."""
    return copy_of("llama")


@pytest.fixture(scope="session", params=list(VARIANTS))
def every_checkpoint(request, checkpoint) -> Path:
    return checkpoint(request.param)


@pytest.fixture
def llm(checkpoint) -> Iterator[LLM]:
    """A tiny engine with a small pool; checked for integrity after the test."""
    llm = LLM(str(checkpoint()), **SMALL)
    yield llm
    llm.engine.scheduler.check_integrity()
    assert len(llm.engine.block_manager.free_blocks) == 160, "a block was not given back"


@pytest.fixture
def eager_drafts(monkeypatch) -> None:
    """Draft tokens are checked as if rows and drafts cost nothing: with tiny models they would never pay."""
    monkeypatch.setattr(StepTimes, "plain", lambda self, num_rows: 1.0)
    monkeypatch.setattr(StepTimes, "with_drafts", lambda self: lambda num_rows: 1.0)
    monkeypatch.setattr(StepTimes, "num_rows_to_try", lambda self, num_rows: 10**6)
    monkeypatch.setattr(DraftModel, "draft_s", property(lambda self: 0.0, lambda self, value: None), raising=False)


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    try:
        return demo_model_path()
    except DemoModelError as error:
        pytest.skip(f"no demo checkpoint: {error}")


@pytest.fixture
def demo_stand_in(copy_of, tmp_path, monkeypatch) -> Path:
    """A small checkpoint that lies where the demo model does, in a cache folder of this test. It asks to be sampled."""
    kernels = cache_folder() / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cache_folder()
    folder.mkdir(parents=True)
    (folder / "kernels").symlink_to(kernels)
    (folder / demo_model.CHECKPOINT).parent.mkdir()
    path = copy_of("llama").rename(folder / demo_model.CHECKPOINT)
    edit(path / demo_model.GENERATION_CONFIG, do_sample=True, temperature=2.0)
    return path


@pytest.fixture(scope="session")
def demo_gguf(demo_checkpoint) -> Path:
    try:
        return demo_model_path("demo:Q4_1")
    except DemoModelError as error:
        pytest.skip(f"no demo model: {error}")


def in_float32(model: Path, folder: Path) -> Path:
    """The same model, computed in float32: exact enough to compare tokens."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    shutil.copy(model / "config.json", folder)
    edit(folder / "config.json", dtype="float32", torch_dtype="float32")
    return folder


@pytest.fixture(scope="session")
def demo_in_float32(demo_checkpoint, tmp_path_factory) -> Path:
    return in_float32(demo_checkpoint, tmp_path_factory.mktemp("demo"))


@pytest.fixture(scope="session")
def short_demo_in_float32(short_demo, tmp_path_factory) -> Path:
    return in_float32(short_demo, tmp_path_factory.mktemp("short_demo"))


@pytest.fixture(scope="session")
def any_model(tmp_path_factory) -> Path:
    """For labs in which the words do not matter."""
    return make_checkpoint(tmp_path_factory.mktemp("any"), "llama", max_position_embeddings=2048)


@pytest.fixture(scope="session")
def short_demo(demo_checkpoint, tmp_path_factory) -> Path:
    """The demo checkpoint without most of its layers: for what takes any model, and real texts."""
    folder, num_layers = tmp_path_factory.mktemp("short") / "model", 2
    weights = "model.safetensors"  # most of its 270 MB are of layers that are left out: they are not even read
    shutil.copytree(demo_checkpoint, folder, ignore=shutil.ignore_patterns(weights))
    edit(folder / "config.json", num_hidden_layers=num_layers)
    with safe_open(demo_checkpoint / weights, "pt") as file:
        kept = [n for n in file.keys() if ".layers." not in n or int(n.split(".")[2]) < num_layers]  # noqa: SIM118
        save_file({name: file.get_tensor(name) for name in kept}, folder / weights)
    return folder


@pytest.fixture(scope="module")  # Playwright's event loop must have ended where other tests run theirs
def browser() -> Iterator:
    with chromium() as browser:
        yield browser


@pytest.fixture
def phone(browser) -> Iterator:
    """A tab of a phone's width, in which nothing goes wrong."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, reduced_motion="reduce")
    tab = context.new_page()
    tab.set_default_timeout(60_000)
    tab.problems = []
    tab.on("console", lambda message: message.type in ("error", "warning") and tab.problems.append(message.text))
    tab.on("pageerror", lambda error: tab.problems.append(str(error)))
    tab.on("response", lambda got: got.status >= 400 and tab.problems.append(f"{got.status} {got.url}"))
    yield tab
    context.close()
    assert tab.problems == []
