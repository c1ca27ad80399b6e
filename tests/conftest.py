"""The rules by which a test is slow or for CI, and where fixtures are."""

import os
import re
import sys
from functools import cache
from pathlib import Path

import pytest

# Examples find each other as they do when they are run; packages come first: one is called agents, as an example is.
sys.path.append(str(Path(__file__).parents[1] / "examples"))

# Fixtures that make a test slow: real weights, engines in processes of their own, C kernels compiled anew.
SLOW_FIXTURES = {"demo_checkpoint", "short_demo", "processes", "empty_cache"}
# What makes a test one for CI, beside the marker on a test of its own: files and fixtures of programs that
# `pip install -e ".[test]"` does not bring. Unless it is for the night.
CI_FILES = """test_ray test_ray_serve test_wheel test_notebook test_colab test_page_model test_site test_slides
test_lab_in_browser test_real_tokenizers test_real_templates test_lm_eval test_node_clients test_clients_of_openai_2
test_packers""".split()
CI_FIXTURES = {"browser", "cdn"}
CI_WORDS = re.compile(r"mark\.ci\b|\b(needs_zig|browser|phone|cdn)\b")  # in every other file that has such a test


def pytest_configure(config: pytest.Config) -> None:
    """Fixtures import torch and transformers; the process that hands the tests out, and runs none, starts without."""
    hands_out = getattr(config.option, "numprocesses", 0) and not config.option.collectonly
    if "PYTEST_XDIST_WORKER" in os.environ or not hands_out:
        config.pluginmanager.import_plugin("tests.fixtures")


# Files are handed out to processes as a whole: those that take longest come first, so that nobody waits for the last.
LONGEST = """test_site_labs test_site test_gpu_engine test_examples test_later_labs test_lab_in_browser test_page_model
test_published test_parity test_student test_exercises test_images test_other_systems test_ray test_ray_serve test_wheel
test_journeys test_labs test_interruptions test_kernels test_sampling test_wings test_forced test_chat test_start_memory
test_real_tokenizers test_python_clients test_slides test_colab test_compilers test_digests test_modes""".split()


@cache
def may_be_for_ci(path: Path) -> bool:
    return path.stem in CI_FILES or path.parent.name == "clients" or bool(CI_WORDS.search(path.read_text("utf-8")))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m "ci and ..."` imports no other files: three processes would take half a minute for them."""
    is_test_file = collection_path.match("test_*.py")
    return (is_test_file and config.option.markexpr.startswith("ci and") and not may_be_for_ci(collection_path)) or None


def has_compiler() -> bool:
    from nanovllm.worker.cpu.compiler import find_compiler

    try:
        return bool(find_compiler())
    except OSError:
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not has_compiler():
        lacks = pytest.mark.skip(reason="no C compiler: PyTorch's operations do not promise the same bits")
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(lacks)
    places = {stem: place for place, stem in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONGEST)))
    for item in items:
        fixtures = set(item.fixturenames)
        if (item.path.stem in CI_FILES or CI_FIXTURES & fixtures) and not item.get_closest_marker("nightly"):
            item.add_marker("ci")
        assert not item.get_closest_marker("ci") or may_be_for_ci(item.path), f"CI would not find {item.nodeid}"
        interpreted = item.path.name == "test_triton_kernels.py"  # Triton's interpreter takes a second for a small tile
        if interpreted or SLOW_FIXTURES & fixtures or any(map(item.get_closest_marker, ("ci", "nightly", "soak"))):
            item.add_marker("slow")
