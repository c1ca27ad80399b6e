"""Requests in different company: their order in the batch is chosen, and preemptions are collected."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from chapters.patching import replaced
from chapters.story import left_empty, one_core
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.outputs import RequestOutput
from nanovllm.worker import model_runner, sampler
from nanovllm.worker.sampler import SamplingBatch


@contextmanager
def draws_with(sample_randomly: Callable[[Tensor, SamplingBatch], Tensor]) -> Iterator[None]:
    """Engines draw their tokens with this function, in place of the sampler's and of the one in C."""

    def sample_rows(logits: Tensor, batch: SamplingBatch, *kernels: Any) -> Any:
        return sampler.sample_rows(logits, batch)

    with replaced(model_runner, "sample_rows", sample_rows), replaced(sampler, "sample_randomly", sample_randomly):
        yield


@contextmanager
def preemptions_watched() -> Iterator[list[Sequence]]:
    """Collects the sequences that are preempted."""
    found: list[Sequence] = []
    ours = Scheduler.schedule

    def schedule(scheduler: Scheduler, drafts: Mapping[int, list[int]]) -> SchedulerOutput:
        output = ours(scheduler, drafts)
        found.extend(output.preempted)
        return output

    with replaced(Scheduler, "schedule", schedule):
        yield found


def generate_in_order(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    """From an empty cache, requests admitted in the order given. (generate() sorts them by their tokens.)"""
    llm.reset_prefix_cache()
    outputs: dict[str, RequestOutput] = {}
    with one_core(), left_empty(llm):
        ids = [llm.engine.add_request(None, *request, stream=False) for request in zip(prompts, params, strict=True)]
        while llm.engine.has_unfinished_requests():
            outputs.update((output.request_id, output) for output in llm.engine.step())
    return [outputs[request_id] for request_id in ids]
