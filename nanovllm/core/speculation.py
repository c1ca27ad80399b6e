"""Speculation: guesses that a step checks beside the tokens that it has to compute (chapter 13).

A step that waits for the bytes of the weights computes a few more rows in little more time. So tokens that may come
next are computed along with the known ones, and each of their rows gives logits. The token of every row is sampled as
always; where it is the one that was guessed, the row behind it is right, too. What is sampled does not depend on the
guesses, so the output does not: they can only save steps. (Elsewhere a guess is accepted with a probability, and only
the distribution of the output is kept: arXiv:2211.17192.)

How many guesses a step gets is decided from what was measured: the seconds of steps by their rows, and the share of
each sequence's guesses that held.
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from nanovllm.core.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput

FIRST_ACCEPTANCE = 0.5  # the share of guesses that hold, of a sequence that has made none
PRIOR_GUESSES = 1.0  # so many guesses count as much as that assumption
MEMORY = 0.95  # of a sequence's earlier guesses, what counts after a step with more
MEMORY_WITHOUT = 0.98  # after a step with none: what has failed is tried again after a while
MIN_GAIN = 1.03  # tokens a second that guesses must promise, as a multiple of those without: times are noisy
NUM_TIMES = 5  # steps of one size whose median is their time
MAX_AGE = 200  # steps; what was measured before is forgotten, for machines get busy and quiet


class Proposer(Protocol):
    """What guesses. draft_s: seconds that one more guess takes it, for all sequences together."""

    draft_s: float

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, what may follow its tokens: at most so many tokens, or none."""


class StepTimes:
    """Seconds of steps by their number of rows, as measured. Sizes that are nearly alike count together.

    A step with guesses may take another way than one without of the same size (CUDA graphs), so they count apart.
    """

    def __init__(self) -> None:
        # guesses or none -> size -> its seconds, its rows, the step when it was measured last
        self._times: dict[bool, dict[int, tuple[deque[float], int, int]]] = {False: {}, True: {}}
        self._num_steps = 0

    def note(self, num_rows: int, seconds: float, guesses: bool) -> None:
        self._num_steps += 1
        octave = num_rows.bit_length()
        size = num_rows if octave < 4 else 4 * octave + (num_rows >> octave - 3)  # from 8 on, four in an octave
        times = self._times[guesses].pop(size, (deque(maxlen=NUM_TIMES),))[0]
        times.append(seconds)
        self._times[guesses][size] = times, num_rows, self._num_steps
        for sizes in self._times.values():
            for old in [s for s, (*_, step) in sizes.items() if step <= self._num_steps - MAX_AGE]:
                del sizes[old]

    def plain(self, num_rows: int) -> float | None:
        """Of a step without guesses. None: nothing so small has been measured."""
        points = self._points(self._times[False])
        return line(points, num_rows) if points and points[0][0] <= num_rows else None

    def guessing(self) -> Callable[[int], float]:
        """Of a step with guesses, of so many rows. What has not been measured is assumed to be as without them."""
        points = self._points(self._times[False] | self._times[True])
        return lambda num_rows: line(points, num_rows)

    def num_rows_to_try(self, num_rows: int) -> int:
        """What a step of more rows than were ever measured takes is found out in small paces."""
        largest = max((rows for sizes in self._times.values() for _, rows, _ in sizes.values()), default=0)
        return max(num_rows, largest) * 5 // 4 + 4

    @staticmethod
    def _points(sizes: dict[int, tuple[deque[float], int, int]]) -> list[tuple[int, float]]:
        return sorted((rows, median(times)) for times, rows, _ in sizes.values())


def line(points: list[tuple[int, float]], x: int) -> float:
    """The height at x of the line through points, which are in order; level before the first and behind the last."""
    i = bisect_left(points, (x, 0.0))
    (x0, y0), (x1, y1) = points[max(i - 1, 0)], points[min(i, len(points) - 1)]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0) if x0 < x <= x1 else y1


def choose_num_guesses(
    acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0
) -> list[int]:
    """How many guesses each sequence gets, so that the step makes the most tokens a second (goodput, arXiv:2406.14066).

    The j-th guess of a sequence adds a token if all of the first j hold: with probability acceptance ** j. So the most
    probable ones are taken first. limits: guesses of each sequence, at most. step_s: seconds of a step with 0, 1, 2, ...
    guesses in all, and draft_s what it takes to make one more for every sequence.
    """
    pairs = ((i, j) for i, limit in enumerate(limits) for j in range(1, limit + 1))
    chances = sorted(((acceptances[i] ** j, i, j) for i, j in pairs), reverse=True)
    best, chosen = MIN_GAIN * len(limits) / step_s[0], []
    for depth in range(1, max(limits) + 1):
        taken = [(chance, i) for chance, i, j in chances if j <= depth][: len(step_s) - 1]
        num_tokens = float(len(limits))
        for n, (chance, _) in enumerate(taken, 1):
            num_tokens += chance
            if (rate := num_tokens / (step_s[n] + depth * draft_s)) > best:
                best, chosen = rate, [i for _, i in taken[:n]]
    return [chosen.count(i) for i in range(len(limits))]


@dataclass
class Record:
    """Of one sequence: guesses that were checked, and those of them that held, the newest counting most."""

    num_checked: float = 0.0
    num_held: float = 0.0

    @property
    def acceptance(self) -> float:
        return (self.num_held + PRIOR_GUESSES * FIRST_ACCEPTANCE) / (self.num_checked + PRIOR_GUESSES)

    def note(self, num_held: int, num_guesses: int) -> None:
        """Behind the first guess that fails, none is checked."""
        memory = MEMORY if num_guesses else MEMORY_WITHOUT
        self.num_held = memory * self.num_held + num_held
        self.num_checked = memory * self.num_checked + min(num_held + 1, num_guesses)


class Speculation:
    """Gives chunks their guesses.

    num_speculative_tokens  guesses of one sequence in a step, at most
    max_rows                rows of a step that give logits, at most: there is memory for so many
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int, max_rows: int) -> None:
        self.proposer, self.num_speculative_tokens, self.max_rows = proposer, num_speculative_tokens, max_rows
        self.times = StepTimes()
        self.records: WeakKeyDictionary[Sequence, Record] = WeakKeyDictionary()
        self._started = 0.0

    def extend(self, scheduler: "Scheduler", chunks: list["ScheduledChunk"], budget: int) -> list["ScheduledChunk"]:
        """The chunks of a step, some with guesses. budget: tokens that the step may still have."""
        counts = self.choose(scheduler, chunks, budget)
        wanted = [(chunk.seq, n) for chunk, n in zip(chunks, counts, strict=True) if n]
        proposals = dict(zip((seq for seq, _ in wanted), self.proposer.propose(wanted), strict=True)) if wanted else {}
        extended = []
        for chunk, n in zip(chunks, counts, strict=True):
            guesses = proposals.get(chunk.seq, [])[:n]
            if chunk.seq.grammar is not None:
                guesses = chunk.seq.grammar.possible(chunk.seq.generated_token_ids, guesses)
            if guesses := guesses[: self.make_room(scheduler, chunk.seq, len(guesses))]:
                chunk = replace(chunk, end=chunk.end + len(guesses), guesses=guesses)
            extended.append(chunk)
        self._started = time.perf_counter()
        return extended

    def choose(self, scheduler: "Scheduler", chunks: list["ScheduledChunk"], budget: int) -> list[int]:
        """How many guesses each chunk may have. None where a prompt is computed: such a step waits for no bytes."""
        num_rows, plain_s = len(chunks), self.times.plain(len(chunks))
        max_guesses = min(budget, self.max_rows - num_rows, self.times.num_rows_to_try(num_rows) - num_rows)
        if plain_s is None or max_guesses <= 0 or any(chunk.end - chunk.start > 1 for chunk in chunks):
            return [0] * num_rows
        seqs = [chunk.seq for chunk in chunks]
        limits = [min(self.num_speculative_tokens, scheduler.num_tokens_left(seq) - 1) for seq in seqs]
        acceptances = [self.records.setdefault(seq, Record()).acceptance for seq in seqs]
        guessing_s = self.times.guessing()
        step_s = [plain_s, *(guessing_s(num_rows + n) for n in range(1, min(sum(limits), max_guesses) + 1))]
        return choose_num_guesses(acceptances, limits, step_s, self.proposer.draft_s)

    def make_room(self, scheduler: "Scheduler", seq: Sequence, num_guesses: int) -> int:
        """Get slots for guesses, fresh blocks only if nobody else may need them. Returns for how many there are."""
        manager = scheduler.block_manager
        num_slots = len(seq.block_table) * manager.block_size - seq.num_computed_tokens
        num_spare = 0 if scheduler.waiting else len(manager.free_blocks) - len(scheduler.running)
        if manager.num_blocks_for(num_guesses - num_slots) > max(num_spare, 0):
            num_guesses = num_slots
        manager.append_slots(seq, num_guesses)
        return num_guesses

    def note(self, output: "SchedulerOutput") -> None:
        """The step is over: learn from it."""
        guesses = any(chunk.guesses for chunk in output.chunks)
        self.times.note(output.num_tokens, time.perf_counter() - self._started, guesses)
        for chunk in output.chunks:
            if chunk.samples and chunk.seq.status is not SequenceStatus.FINISHED:
                num_held = len(chunk.seq.tokens) - chunk.known_end - 1
                self.records.setdefault(chunk.seq, Record()).note(num_held, len(chunk.guesses))
