"""The rule by which a test is slow, and where fixtures are."""

import os

import pytest

# Fixtures that make a test slow: real weights, engines in processes of their own, C kernels compiled anew, a browser.
SLOW_FIXTURES = {"demo_checkpoint", "short_demo", "browser", "processes", "kernel", "empty_cache"}


def pytest_configure(config: pytest.Config) -> None:
    """Fixtures import torch and transformers; the process that hands the tests out, and runs none, starts without."""
    hands_out = config.option.numprocesses and not config.option.collectonly
    if "PYTEST_XDIST_WORKER" in os.environ or not hands_out:
        config.pluginmanager.import_plugin("tests.fixtures")


# Files are handed out to processes as a whole: those that take longest come first, so that nobody waits for the last.
LONGEST = """test_later_labs test_labs test_site_labs test_digests test_same_bits test_kernels test_site test_exercises
test_examples test_compilers test_triton_kernels""".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem not in LONGEST)
    for item in items:
        interpreted = item.path.name == "test_triton_kernels.py"  # Triton's interpreter takes a second for a small tile
        if interpreted or SLOW_FIXTURES & set(item.fixturenames) or item.get_closest_marker("soak"):
            item.add_marker("slow")
