"""The control plane runs where torch and numpy cannot be imported, and `import nanovllm` does not load them."""

import subprocess
import sys

SCHEDULE_WITHOUT_TORCH = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None  # importing it raises ImportError
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
manager = BlockManager(8, 4)
scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
scheduler.add(Sequence(list(range(10))))
output = scheduler.schedule()
scheduler.update(output, [1])
scheduler.check_integrity()
print(output.num_tokens)
"""
STAGE_WITHOUT_TERMINAL = """
import sys
for name in ("torch", "numpy", "transformers", "rich", "textual"):
    sys.modules[name] = None
from chapters.ch05_scheduler import checks, solution
from chapters.ch04_paged_attention.memories import TwoMemories
from chapters.ch05_scheduler.batching import Comparison
from chapters.ch07_prefix_caching.simulator import Simulator
from chapters.grading import BenchWithoutModel, grade
from chapters.stage import Stage, compare_with_ours
world = TwoMemories()
world.admit()
world.grow()
world = Comparison()
while not world.step():
    pass
compare_with_ours(Stage(8, max_model_len=20), Stage(8, max_model_len=20), seed=1)
print(len(world.ours.ended))
simulator = Simulator()
while "That was the example" not in simulator.example():
    pass
assert grade(checks.TASKS[1], solution.preempt_last, BenchWithoutModel()).open
"""
IMPORT_IS_LIGHT = """
import sys, nanovllm
assert nanovllm.LLM and nanovllm.SamplingParams
print(sorted({"torch", "numpy", "transformers", "rich"} & set(sys.modules)))
"""


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_core_schedules_where_torch_cannot_be_imported():
    assert run(SCHEDULE_WITHOUT_TORCH) == "10"


def test_the_stage_plays_where_neither_torch_nor_rich_can_be_imported():
    assert run(STAGE_WITHOUT_TERMINAL) == "3"


def test_import_nanovllm_is_light():
    assert run(IMPORT_IS_LIGHT) == "[]"
