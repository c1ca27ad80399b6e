"""Lab 9: the same model on 1 and on 3 ranks of this machine: who holds what, who reads what, what they tell each other.

The three ranks are the engine's own processes. Two parts need to look inside a rank and use the real layers and the
real loader in this process.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chapters.ch09_tensor_parallelism import ranks
from chapters.ch09_tensor_parallelism.ranks import CountedFile, CountedSlice
from chapters.patching import replaced
from chapters.recording import Recording
from chapters.story import Story, left_empty, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.files import tensor_files
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder

OPTIONS: dict[str, Any] = dict(
    dtype="float32",  # so that the order in which parts are added cannot tip the choice of a token
    max_model_len=64,
    max_num_seqs=4,
    block_size=4,
    num_gpu_blocks_override=20,
)
PROMPT = "The capital of France is"
NUM_TOKENS = 12
NUM_TIMED_STEPS = 6


@dataclass(frozen=True)
class Step:
    """What one step of an engine was. The last three are counted over all ranks' reports and the scheduler's."""

    num_tokens: int
    reduced_bytes: int
    num_hits: int
    num_preempted: int


class World:
    """The model, once on one rank and once on several."""

    def __init__(self, story: Story) -> None:
        self.directory = resolve_checkpoint(story.model)
        self.config = ModelConfig.from_directory(self.directory)
        sizes = ranks.possible_sizes(self.config)
        if not sizes:
            raise ValueError(f"{story.model} cannot be split: its sizes have no common divisor")
        self.size = 3 if 3 in sizes else sizes[0]
        self.local = shard_config(self.config, self.size)
        self._story = story
        self.several = self.load_several()
        self.alone = story.load(**OPTIONS)

    def load_several(self) -> LLM:
        return self._story.load(tensor_parallel_size=self.size, **OPTIONS)

    @property
    def ranks(self) -> Any:
        """The driver's side of the ranks: a ParallelRunner."""
        return self.several.engine.model_runner


def add(llm: LLM, prompt: str, num_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.engine.add_request(None, prompt, params, stream=False)


def run(llm: LLM, prompts: list[str]) -> tuple[list[Step], list[list[int]]]:
    """Generate, step by step: what each step was, and the tokens for each prompt."""
    engine, steps, tokens = llm.engine, list[Step](), dict[str, list[int]]()
    llm.reset_prefix_cache()  # of what ran before
    with left_empty(llm):
        request_ids = [add(llm, prompt, NUM_TOKENS) for prompt in prompts]
        while engine.has_unfinished_requests():
            before = counters(llm)
            for output in engine.step():
                tokens[output.request_id] = output.outputs[0].token_ids
            steps.append(Step(*(after - earlier for after, earlier in zip(counters(llm), before, strict=True))))
    return steps, [tokens[request_id] for request_id in request_ids]


def counters(llm: LLM) -> tuple[int, int, int, int]:
    stats, usage = llm.stats(), llm.engine.model_runner.usage()
    reduced = usage[0]["all_reduced"] if isinstance(usage, list) else 0
    num_tokens = llm.engine.stats.num_prefill_tokens + llm.engine.stats.num_decode_tokens
    return num_tokens, reduced, stats["prefix_cache"]["hits"], stats["num_preemptions"]


def decode_s(llm: LLM) -> float:
    """Seconds of a decode step of one request, the best of a few."""
    with left_empty(llm):
        add(llm, PROMPT, NUM_TIMED_STEPS + 2)
        llm.engine.step()
        return min(stopwatch(llm.engine.step) for _ in range(NUM_TIMED_STEPS))


def load_share(directory: Path, config: ModelConfig, group: RankGroup) -> tuple[Decoder, dict[str, CountedSlice]]:
    """A rank's model, loaded in this process, and what was read of each tensor."""
    files: list[CountedFile] = []

    def open_counted(path: Path, ours: Callable = tensor_files.open_file) -> CountedFile:
        files.append(CountedFile(ours(path)))
        return files[-1]

    at_once = replaced(tensor_files, "PART_NUMBERS", sys.maxsize)  # large tensors, too: one slice each
    with replaced(tensor_files, "open_file", open_counted), at_once:
        model = load_model(directory, config, torch.float32, torch.device("cpu"), group)
    return model, {name: part for file in files for name, part in file.read.items() if part.slices}


# -- pictures -------------------------------------------------------------------------------------------------------


def numbers(x: Tensor) -> str:
    return " ".join(f"{value:g}" for value in x.flatten().tolist())


def span(share: slice, whole: int) -> str:
    start, stop, _ = share.indices(whole)
    if stop - start == whole:
        return "all"
    return f"{start:,}-{stop - 1:,}" if stop - start > 1 else f"{start}"


def read_of(part: CountedSlice) -> str:
    """What was read of a tensor, in words."""
    shape, [share] = part.get_shape(), part.slices
    spans = [span(one, whole) for one, whole in zip(share, shape, strict=True)]
    kinds = [f"{kind} {text}" for kind, text in zip(("rows", "columns"), spans, strict=False) if text != "all"]
    return ", ".join(kinds) or "all"


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: on one machine, several ranks take longer than one."""
    [sheet] = recorded.sheets("Is it faster?")
    one, several = sheet.column("ms a step")
    if several < 1.5 * one:
        raise ValueError(f"a step of one rank took {one} ms, of several {several}")
