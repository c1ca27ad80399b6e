"""The real engine beside what a student's function says of its steps (chapter 6). Needs torch."""

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch.nn.modules.module import register_module_forward_hook

from chapters.ch06_prefill_decode.checks import Cost, Pack, ask_cost, expect_cost, show
from chapters.ch06_prefill_decode.meter import Meter
from chapters.expect import ensure, expect
from chapters.grading import Bench
from chapters.patching import replaced
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import Batch
from nanovllm.worker.model_runner import ModelRunner, ModelRunnerOutput

OUR_RUN = ModelRunner.run
OUR_FROM_SCHEDULER_OUTPUT = Batch.from_scheduler_output


def generate_with_step_cost(function: Cost, bench: Bench) -> None:
    """Each step of the engine is predicted before it runs, and counted while it runs."""

    def run(runner: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        predicted = ask_cost(function, runner.model_config, runner.dtype.itemsize, output.chunks)
        counted = Meter()
        hook = register_module_forward_hook(counted)
        try:
            # A step that is replayed from a CUDA graph runs no Python: nothing could be counted in it.
            with replaced(runner, "recorded_steps", None):
                result = OUR_RUN(runner, output)
        finally:
            hook.remove()
        expect_cost(predicted, counted.cost(), f"a step of the engine with {show(output.chunks)}, counted while it ran")
        return result

    with replaced(ModelRunner, "run", run):
        compare_tokens(bench, replaced(ModelRunner, "run", OUR_RUN))


def generate_with_pack(function: Pack, bench: Bench) -> None:
    """Each step of the engine is packed by the student's function, and compared with ours before kernels trust it."""

    def from_scheduler_output(cls: type[Batch], output: SchedulerOutput, block_size: int) -> Batch:
        ours = OUR_FROM_SCHEDULER_OUTPUT(output, block_size)
        sums, most, rows = ours.cu_seqlens_q.tolist(), ours.seqlens_k.tolist(), ours.logits_rows.tolist()
        cu_seqlens_q, seqlens_k, logits_rows = function(output.chunks)
        # Kernels trust these numbers and would read elsewhere in memory.
        expect(sums, list(cu_seqlens_q), "cu_seqlens_q of a step")
        fit = len(seqlens_k) == len(most) and all(1 <= n <= m for n, m in zip(seqlens_k, most, strict=True))
        ensure(fit, "seqlens_k of a step", expected=most, got=seqlens_k)
        fit = len(logits_rows) == len(rows) and all(0 <= row < len(ours.input_ids) for row in logits_rows)
        ensure(fit, "logits_rows of a step", expected=rows, got=logits_rows)
        return replace(
            ours,
            cu_seqlens_q=torch.tensor(cu_seqlens_q, dtype=torch.int32),
            seqlens_k=torch.tensor(seqlens_k, dtype=torch.int32),
            logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
            max_key_len=max(seqlens_k),
        )

    with replaced(Batch, "from_scheduler_output", classmethod(from_scheduler_output)):
        compare_tokens(bench, replaced(Batch, "from_scheduler_output", OUR_FROM_SCHEDULER_OUTPUT))


def compare_tokens(bench: Bench, ours: AbstractContextManager) -> None:
    """With our tokens, in whole prompts and in chunks. ours: in which the engine has our code again."""
    bench.same_tokens()
    with replaced(bench.llm.engine.scheduler, "max_num_batched_tokens", 5):
        with ours:
            expected = bench.generate()
        bench.same_tokens(expected)
