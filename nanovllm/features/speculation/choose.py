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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.features.speculation.step_times import StepTimes

if TYPE_CHECKING:
    from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput

PRIOR_GUESSES = 1.0  # of a sequence: so many count as much as what others' guesses lead to expect
MEMORY = 0.95  # of a sequence's earlier guesses, what counts after a step with more
MEMORY_WITHOUT = 0.98  # after a step with none: what has failed is tried again after a while
MEMORY_OF_DRAFTS = 0.998  # of a draft's seconds, after a step with none: they are measured again after a while
MIN_GAIN = 1.1  # tokens a second that guesses must promise, as a multiple of those without: times are noisy


class Proposer(Protocol):
    """What guesses.

    first_acceptance   the share of guesses that is expected to hold before any was checked
    draft_s            seconds that it takes to make one more guess for every sequence
    """

    first_acceptance: float
    draft_s: float

    def kind(self, seq: Sequence) -> int | None:
        """What a guess for this sequence rests on: each kind holds at a rate of its own. None: there is none."""

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, what may follow its tokens: at most so many tokens, or none."""


def choose_num_guesses(
    acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0
) -> list[int]:
    """How many guesses each sequence gets: those that make the most tokens a second (goodput, arXiv:2406.14066).

    The j-th guess of a sequence adds a token if all of the first j hold: with probability acceptance ** j. So the most
    probable ones are taken first. limits: guesses of each sequence, at most. step_s: seconds of a step with 0, 1, ...
    guesses in all; draft_s: what one more for every sequence takes to make.
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
    """Of guesses of one kind: how many were checked, and how many held, the newest counting most."""

    num_checked: float = 0.0
    num_held: float = 0.0

    def acceptance(self, expected: float) -> float:
        """The share that held. expected: while there are few."""
        return (self.num_held + PRIOR_GUESSES * expected) / (self.num_checked + PRIOR_GUESSES)

    def add(self, num_held: int, num_guesses: int) -> None:
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
        self.of_all: dict[int | None, Record] = {}  # by kind of guess, as of_each
        self.of_each: WeakKeyDictionary[Sequence, dict[int | None, Record]] = WeakKeyDictionary()
        self._asked: dict[Sequence, list[Record]] = {}  # those that the step's guesses were decided by
        self._started = 0.0

    def add_guesses(
        self, scheduler: "Scheduler", chunks: list["ScheduledChunk"], budget: int
    ) -> list["ScheduledChunk"]:
        """The chunks of a step, some with guesses. budget: tokens that the step may still have."""
        self._asked = {}
        counts = self.choose(scheduler, chunks, budget)
        wanted = [i for i, n in enumerate(counts) if n]
        proposals = self.proposer.propose([(chunks[i].seq, counts[i]) for i in wanted]) if wanted else []
        chunks = list(chunks)
        for i, proposal in zip(wanted, proposals, strict=True):
            seq, guesses = chunks[i].seq, proposal[: counts[i]]
            if seq.grammar is not None:
                guesses = seq.grammar.possible(seq.generated_token_ids, guesses)
            guesses = guesses[: self.make_room(scheduler, seq, len(guesses))]
            chunks[i] = replace(chunks[i], end=chunks[i].end + len(guesses), guesses=guesses)
        self._started = time.perf_counter()
        return chunks

    def choose(self, scheduler: "Scheduler", chunks: list["ScheduledChunk"], budget: int) -> list[int]:
        """How many guesses each chunk may have. None where a prompt is computed: arithmetic bounds such a step."""
        num_rows, plain_s = len(chunks), self.times.plain(len(chunks))
        max_guesses = min(budget, self.max_rows - num_rows, self.times.num_rows_to_try(num_rows) - num_rows)
        has_prompts = any(chunk.end - chunk.start > 1 or not chunk.reaches_end for chunk in chunks)
        if plain_s is None or max_guesses <= 0 or has_prompts:
            return [0] * num_rows
        seqs = [chunk.seq for chunk in chunks]
        limits = [min(self.num_speculative_tokens, scheduler.num_tokens_left(seq) - 1) for seq in seqs]
        guessing_s = self.times.guessing()
        step_s = [plain_s, *(guessing_s(num_rows + n) for n in range(1, min(sum(limits), max_guesses) + 1))]
        if all((num_rows + n) / s <= MIN_GAIN * num_rows / plain_s for n, s in enumerate(step_s)):
            return [0] * num_rows  # not even if all guesses held
        kinds = [self.proposer.kind(seq) for seq in seqs]
        limits = [0 if kind is None else limit for limit, kind in zip(limits, kinds, strict=True)]
        acceptances = []
        for seq, kind in zip(seqs, kinds, strict=True):
            everybodys = self.of_all.setdefault(kind, Record())
            own = self.of_each.setdefault(seq, {}).setdefault(kind, Record())
            self._asked[seq] = [own, everybodys]
            acceptances.append(own.acceptance(everybodys.acceptance(self.proposer.first_acceptance)))
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

    def learn_from(self, output: "SchedulerOutput") -> None:
        """The step is over: learn from it."""
        if output.chunks:
            guesses = any(chunk.guesses for chunk in output.chunks)
            self.times.add(output.num_tokens, time.perf_counter() - self._started, guesses)
            if self._asked and not guesses:
                self.proposer.draft_s *= MEMORY_OF_DRAFTS
        for chunk in output.chunks:
            if chunk.seq in self._asked and chunk.seq.status is not SequenceStatus.FINISHED:
                num_held = len(chunk.seq.tokens) - chunk.known_end - 1
                for record in self._asked[chunk.seq]:
                    record.add(num_held, len(chunk.guesses))
