"""What runs where torch and numpy cannot be imported, and that `import nanovllm` does not load them."""

import subprocess
import sys
from pathlib import Path

import pytest

STAGE_WITHOUT_TERMINAL = """
import sys
for name in ("torch", "numpy", "transformers", "rich", "marimo"):
    sys.modules[name] = None
from chapters.ch05_scheduler import checks, solution
from chapters.ch04_paged_attention.memories import TwoMemories
from chapters.ch05_scheduler.batching import Comparison
from chapters.ch07_prefix_caching.simulator import Simulator
from chapters.grading import Bench, grade
from chapters.stage import Stage, compare_with_ours
world = TwoMemories()
world.admit()
world.grow()
world = Comparison()
while "All requests have ended" not in world.step():
    pass
compare_with_ours(Stage(8, max_model_len=20), Stage(8, max_model_len=20), seed=1)
print(len(world.ours.ended))
simulator = Simulator()
while "That was the example" not in simulator.example():
    pass
assert grade(checks.TASKS[1], solution.preempt_last, Bench()).open
"""
IMPORT_IS_LIGHT = """
import sys, nanovllm
assert nanovllm.LLM and nanovllm.SamplingParams
print(sorted({"torch", "numpy", "transformers", "rich"} & set(sys.modules)))
"""


def run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.nightly
def test_what_needs_no_torch():
    """With -OO. tests/every_python.py tries it without, on all Pythons of a machine."""
    run("-OO", str(Path(__file__).with_name("without_torch.py")))


def test_the_stage_plays_where_neither_torch_nor_rich_can_be_imported():
    assert run("-c", STAGE_WITHOUT_TERMINAL) == "3"


def test_import_nanovllm_is_light():
    assert run("-c", IMPORT_IS_LIGHT) == "[]"
