"""Ranks as threads of one process, so that whatever is put into the engine here is in every rank.

The engine's own ranks are processes (features/parallel/ranks.py). Nothing but that is replaced: RankGroup, RankRunner,
ParallelDecoder, the loader and the driver's ParallelRunner are the real ones. Only the last step of a group operation,
the call of torch.distributed, becomes a meeting of threads, which adds for real.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from threading import Condition, Thread
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from chapters.patching import replaced
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.features.parallel.rank_runner import RankRunner
from nanovllm.features.parallel.ranks import ParallelRunner

T = TypeVar("T")


class OutOfStep(Exception):
    """The ranks did not call the same operations in the same order. As processes, they would wait for ever."""


class Meeting:
    """Where ranks exchange tensors: whichever comes first waits until all have come."""

    def __init__(self, size: int) -> None:
        self.size, self.changed = size, Condition()
        self.brought: dict[int, tuple[str, Tensor]] = {}
        self.num_rounds, self.last_round = 0, list[Tensor]()
        self.ended: dict[int, bool] = {}  # the ranks that are through; True: with an error

    def exchange(self, rank: int, operation: str, x: Tensor) -> list[Tensor]:
        """What each rank has brought to this round."""
        with self.changed:
            number = self.num_rounds
            self.brought[rank] = operation, x.clone()
            if len(self.brought) == self.size:
                self._check()
                self.last_round = [self.brought[rank][1] for rank in range(self.size)]
                self.num_rounds, self.brought = number + 1, {}
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.num_rounds > number or self.ended)
            if self.num_rounds == number:
                away = " and ".join(f"rank {other}" for other in self.ended)
                raise OutOfStep(f"rank {rank} waits in {operation} for {away}, in vain")
            return self.last_round  # nobody can begin the next round before all have taken this one's

    def _check(self) -> None:
        came = {f"{operation} of {list(x.shape)}" for operation, x in self.brought.values()}
        if len(came) > 1:
            raise OutOfStep(f"the ranks meet with different things: {' and '.join(sorted(came))}")

    def leave(self, rank: int, failed: bool) -> None:
        with self.changed:
            self.ended[rank] = failed
            self.changed.notify_all()


@dataclass
class ThreadGroup(RankGroup):
    """The engine's RankGroup, meeting other threads instead of other processes."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))
    num_reduces: int = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_reduces += 1
        return super().all_reduce(x)

    def _add_up(self, x: Tensor) -> None:
        self._together("all_reduce", x)

    def _together(self, operation: str, *args: Any) -> None:
        parts = self.meeting.exchange(self.rank, operation, args[0])
        if operation == "all_reduce":
            add_or_max = torch.maximum if len(args) > 1 else torch.add  # smallest() asks for a maximum
            args[0].copy_(reduce(add_or_max, parts))
        elif args[1] is not None:  # gather, on rank 0
            for place, part in zip(args[1], parts, strict=True):
                place.copy_(part)


def make_groups(size: int) -> list[ThreadGroup]:
    meeting = Meeting(size)
    return [ThreadGroup(rank, size, meeting=meeting) for rank in range(size)]


def together(groups: list[ThreadGroup], work: Callable[[ThreadGroup], T]) -> list[T]:
    """work(group) on every rank at the same time; the answers in the order of ranks. Raises what a rank has raised."""
    answers: dict[int, T] = {}
    errors: dict[int, BaseException] = {}
    meeting = groups[0].meeting
    meeting.ended.clear()

    def live(group: ThreadGroup) -> None:
        try:
            with torch.inference_mode():
                answers[group.rank] = work(group)
        except BaseException as error:
            errors[group.rank] = error
        finally:
            meeting.leave(group.rank, group.rank in errors)

    threads = [Thread(target=live, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The cause before what followed from it; of several causes always the same.
    for rank in sorted(errors, key=lambda rank: (isinstance(errors[rank], OutOfStep), rank)):
        raise errors[rank]
    return [answers[group.rank] for group in groups]


class ThreadRunner(ParallelRunner):
    """The driver's side. Put it in ParallelRunner's place, and LLM(tensor_parallel_size=n) has n threads as ranks."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.config, self.model_config, self.size = config, model_config, config.tensor_parallel_size
        self.groups = make_groups(self.size)
        self.runners = together(self.groups, lambda group: RankRunner(config, model_config, group))

    def load(self, directory: Path) -> None:
        self._ask("load", directory)

    def _ask(self, *message: Any, late: Any = None) -> list[Any]:
        method, *arguments = message
        return together(self.groups, lambda group: getattr(self.runners[group.rank], method)(*arguments))


class CountedSlice:
    """A tensor in a safetensors file, read by slicing; keeps what was read of it."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.num_read = 0
        self.slices: list[Any] = []

    def get_shape(self) -> list[int]:
        return self._part.get_shape()

    def get_dtype(self) -> str:
        return self._part.get_dtype()

    def __getitem__(self, share: Any) -> Tensor:
        tensor = self._part[share]
        self.num_read += tensor.numel()
        self.slices.append(share)
        return tensor


class CountedFile:
    """An open safetensors file; keeps the slices that were asked for."""

    def __init__(self, file: Any) -> None:
        self._file, self.keys = file, file.keys
        self.read: dict[str, CountedSlice] = {}

    def get_slice(self, name: str) -> CountedSlice:
        self.read[name] = CountedSlice(self._file.get_slice(name))
        return self.read[name]


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """No GPU for a while, neither for this process nor for those it starts: three ranks would need three of them."""
    no_gpu = replaced(torch.cuda, "is_available", lambda: False), replaced(torch.cuda, "device_count", lambda: 0)
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""), no_gpu[0], no_gpu[1]:
        yield


def possible_sizes(config: ModelConfig) -> list[int]:
    """Numbers of ranks, more than one, that this model can be split over."""
    sizes = []
    for size in range(2, config.num_attention_heads + 1):
        with suppress(ValueError):
            shard_config(config, size)
            sizes.append(size)
    return sizes
