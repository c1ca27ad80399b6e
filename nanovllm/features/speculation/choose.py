"""Speculation: draft tokens that a step checks beside the tokens that it has to compute (chapter 13).

A step that waits for the bytes of the weights computes a few more rows in little more time. So tokens that may come
next are computed along with the known ones, and each of their rows gives logits. The token of every row is sampled as
always; where it is the draft token, the row after it is right, too. What is sampled does not depend on the drafts, so
the output does not: they can only save steps. (Elsewhere a draft token is accepted with a probability, and only the
distribution of the output is kept: arXiv:2211.17192.)

How many draft tokens a step gets is decided from what was measured: the seconds of steps by their rows, and the share
of each sequence's draft tokens that were accepted.
"""

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.features.speculation.step_times import StepTimes
from nanovllm.wings import Wing

if TYPE_CHECKING:
    from nanovllm.core.scheduler import Scheduler, SchedulerOutput

PRIOR_DRAFTS = 1.0  # of a sequence: so many count as much as what others' draft tokens lead to expect
MEMORY = 0.95  # of a sequence's earlier draft tokens, what counts after a step with more
MEMORY_WITHOUT = 0.98  # after a step with none: what has failed is tried again after a while
MEMORY_OF_DRAFTS = 0.998  # of a draft's seconds, after a step with none: they are measured again after a while
MIN_GAIN = 1.1  # tokens a second that drafts must promise, as a multiple of those without: times are noisy


class Proposer(Protocol):
    """Where draft tokens come from.

    first_acceptance   the share of draft tokens that is expected to be accepted before any was checked
    draft_s            seconds that it takes to make one more draft token for every sequence
    """

    first_acceptance: float
    draft_s: float

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        """For each running sequence the kind of its draft: each kind is accepted at a rate of its own.

        None where there is no draft. It is called once in a step.
        """

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, what may follow its tokens: at most so many tokens, or none."""


def choose_num_draft_tokens(
    acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0
) -> list[int]:
    """How many draft tokens each sequence gets: those that make the most tokens a second (goodput, arXiv:2406.14066).

    The j-th draft token of a sequence adds a token if the first j are all accepted: with probability
    acceptance ** j. So the most probable ones are taken first. limits: draft tokens of each sequence, at most.
    step_s: seconds of a step with 0, 1, ... draft tokens in all; draft_s: what one more for every sequence takes to
    make.
    """
    best, chosen, num_chosen = MIN_GAIN * len(limits) / step_s[0], list[tuple[float, int]](), 0
    before = chosen
    for depth in range(1, max(limits) + 1):
        deeper = [(acceptances[i] ** depth, i) for i, limit in enumerate(limits) if depth <= limit]
        taken = sorted(before + deeper, reverse=True)[: len(step_s) - 1]
        if taken == before:  # deeper ones are less probable still
            break
        before = taken
        num_tokens = float(len(limits))
        for n, (chance, _) in enumerate(taken, 1):
            num_tokens += chance
            if (rate := num_tokens / (step_s[n] + depth * draft_s)) > best:
                best, chosen, num_chosen = rate, taken, n
    counts = Counter(i for _, i in chosen[:num_chosen])
    return [counts[i] for i in range(len(limits))]


@dataclass
class Record:
    """How many draft tokens of one kind were checked, and how many accepted, the newest counting most."""

    num_checked: float = 0.0
    num_accepted: float = 0.0

    def acceptance(self, expected: float) -> float:
        """The share that was accepted. expected: while there are few."""
        return (self.num_accepted + PRIOR_DRAFTS * expected) / (self.num_checked + PRIOR_DRAFTS)

    def add(self, num_accepted: int, num_draft_tokens: int) -> None:
        """After the first one that is not accepted, none is checked."""
        memory = MEMORY if num_draft_tokens else MEMORY_WITHOUT
        self.num_accepted = memory * self.num_accepted + num_accepted
        self.num_checked = memory * self.num_checked + min(num_accepted + 1, num_draft_tokens)


class Speculation(Wing):
    """Proposes the draft tokens of a step, and learns from what became of them.

    num_speculative_tokens  draft tokens of one sequence in a step, at most
    max_rows                rows of a step that give logits, at most: there is memory for so many
    """

    def __init__(self, proposer: Proposer, num_speculative_tokens: int, max_rows: int) -> None:
        self.proposer = proposer
        self.num_speculative_tokens = num_speculative_tokens
        self.max_rows = max_rows
        self.times = StepTimes()
        self.totals: dict[int | None, Record] = {}  # by kind of draft, as records
        self.records: WeakKeyDictionary[Sequence, dict[int | None, Record]] = WeakKeyDictionary()
        self._asked: dict[Sequence, list[Record]] = {}  # those that the step's drafts were decided by
        self._started = 0.0

    def propose(self, scheduler: "Scheduler") -> dict[int, list[int]]:
        """{seq_id: draft tokens} for sequences that the next step works on. Changes nothing of the scheduler."""
        self._asked = {}
        drafts: dict[int, list[int]] = {}
        counts = self.choose(scheduler)
        if counts:
            wanted = list(counts.items())
            for (seq, count), proposal in zip(wanted, self.proposer.propose(wanted), strict=True):
                draft = proposal[:count]
                if (grammar := seq.parts.get("grammar")) is not None:
                    draft = grammar.possible(seq.generated_token_ids, draft)
                drafts[seq.seq_id] = draft
        self._started = time.perf_counter()
        return drafts

    def choose(self, scheduler: "Scheduler") -> dict[Sequence, int]:
        """How many draft tokens each sequence may have, where that is any at all.

        None at all if the next step will compute a prompt: arithmetic bounds such a step.
        """
        seqs = scheduler.running
        num_rows = len(seqs)
        plain_s = self.times.plain(num_rows)
        max_draft_tokens = min(
            scheduler.max_num_batched_tokens - num_rows,
            self.max_rows - num_rows,
            self.times.num_rows_to_try(num_rows) - num_rows,
        )
        if not seqs or plain_s is None or max_draft_tokens <= 0:
            return {}
        has_prompts = any(len(seq.tokens) - seq.num_computed_tokens > 1 for seq in seqs)
        if has_prompts or scheduler.can_admit():  # the latter looks a whole prompt up
            return {}
        limits = [max(0, min(self.num_speculative_tokens, scheduler.num_tokens_left(seq) - 1)) for seq in seqs]
        step_s_with_drafts = self.times.with_drafts()
        num_more = range(1, min(sum(limits), max_draft_tokens) + 1)
        step_s = [plain_s, *(step_s_with_drafts(num_rows + n) for n in num_more)]
        if all((num_rows + n) / s <= MIN_GAIN * num_rows / plain_s for n, s in enumerate(step_s)):
            return {}  # not even if all were accepted
        kinds = self.proposer.kinds(seqs)
        limits = [0 if kind is None else limit for limit, kind in zip(limits, kinds, strict=True)]
        acceptances = []
        for seq, kind in zip(seqs, kinds, strict=True):
            everybodys = self.totals.setdefault(kind, Record())
            own = self.records.setdefault(seq, {}).setdefault(kind, Record())
            self._asked[seq] = [own, everybodys]
            acceptances.append(own.acceptance(everybodys.acceptance(self.proposer.first_acceptance)))
        counts = choose_num_draft_tokens(acceptances, limits, step_s, self.proposer.draft_s)
        return {seq: count for seq, count in zip(seqs, counts, strict=True) if count}

    def observe(self, output: "SchedulerOutput") -> None:
        """The step is over: learn from it."""
        if output.chunks:
            has_drafts = any(chunk.draft_token_ids for chunk in output.chunks)
            self.times.add(output.num_tokens, time.perf_counter() - self._started, has_drafts)
            if self._asked and not has_drafts:
                self.proposer.draft_s *= MEMORY_OF_DRAFTS
        for chunk in output.chunks:
            if chunk.seq in self._asked and chunk.seq.status is not SequenceStatus.FINISHED:
                num_accepted = len(chunk.seq.tokens) - chunk.known_end - 1
                for record in self._asked[chunk.seq]:
                    record.add(num_accepted, len(chunk.draft_token_ids))
