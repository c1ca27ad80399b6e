"""Played time: the engine's Scheduler and BlockManager serve a trace, and a step takes what chapter 14's Cost says.

No model and no torch. Whether a draft token is accepted is drawn beforehand: prompts of one prefix_id are of one kind,
and each kind has a share of draft tokens that are accepted.
"""

import random
from collections import deque
from typing import NamedTuple

from chapters.capstone.answers import Refused
from chapters.capstone.seams import Asked, ChosenDrafts, Client, Seams
from chapters.capstone.trace import Row
from chapters.capstone.views import Setup
from chapters.ch14_many_users.fleet import BLOCK_SIZE, TOKEN, Cost
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.core.snapshots.cache import SnapshotCache
from nanovllm.sampling_params import SamplingParams

KV_BYTES_PER_TOKEN = 131_072  # a model of eight billion parameters: 32 layers, 8 KV heads of 128, two bytes
BLOCK_BYTES = BLOCK_SIZE * KV_BYTES_PER_TOKEN
MEMORY_BYTES = 2 << 30
COST = Cost(step_s=0.012, token_s=0.0001)
TTFT_LIMIT_S, TPOT_LIMIT_S = 1.0, 0.016
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_DRAFT_TOKENS = 64, 2048, 8
MAX_SNAPSHOTS = 24
CHECK_EVERY = 500  # steps


def setup_for(memory_bytes: int = MEMORY_BYTES) -> Setup:
    limits = MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_DRAFT_TOKENS
    return Setup(
        memory_bytes // BLOCK_BYTES, BLOCK_SIZE, *limits, *(COST.step_s, COST.token_s), TTFT_LIMIT_S, TPOT_LIMIT_S
    )


class Drawn:
    """A Proposer whose draft tokens are right or wrong as it was drawn. is_right: seq_id -> for each output token,
    would a draft token in its place be accepted?"""

    first_acceptance, draft_s = 0.0, 0.0

    def __init__(self) -> None:
        self.is_right: dict[int, list[bool]] = {}

    def add(self, seq: Sequence, row: Row) -> None:
        kind = random.Random(f"guesses {row.prefix_id or row.request_id}")
        acceptance = kind.uniform(0.75, 0.95) if kind.random() < 0.5 else kind.uniform(0.0, 0.25)
        rng = random.Random(f"{row.request_id} {row.prefix_id} {row.prompt_tokens}")
        self.is_right[seq.seq_id] = [rng.random() < acceptance for _ in range(row.output_tokens)]

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        return [None] * len(seqs)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        drafts = []
        for seq, num in wanted:
            start = seq.num_generated_tokens
            drafts.append([TOKEN if right else TOKEN + 1 for right in self.is_right[seq.seq_id][start : start + num]])
        return drafts


class Served(NamedTuple):
    """clients: in the order of arrival. end_s: when the last step ended."""

    clients: list[Client]
    end_s: float
    num_steps: int
    num_preemptions: int
    hit_rate: float


class Simulation:
    """asked: the policy, or None: the engine decides by itself."""

    def __init__(self, trace: list[Row], setup: Setup, asked: Asked | None = None, hybrid: bool = False) -> None:
        self.trace, self.setup, self.seams = trace, setup, None
        snapshots = SnapshotCache(max_running=setup.max_num_seqs, max_snapshots=MAX_SNAPSHOTS) if hybrid else None
        self.manager = BlockManager(setup.num_blocks, setup.block_size, snapshots=snapshots)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=setup.num_blocks * setup.block_size,
        )
        self.drawn, self.now, self.num_steps = Drawn(), 0.0, 0
        if asked is not None:
            drafts = ChosenDrafts(self.drawn, setup, setup.max_num_batched_tokens)
            self.seams = Seams(asked, setup, self.scheduler, drafts)
            if snapshots is not None:
                snapshots.policy = self.seams.snapshots
        self.clients = [self._client(index, row) for index, row in enumerate(trace)]
        self.by_seq = {client.seq.seq_id: client for client in self.clients}

    def _client(self, index: int, row: Row) -> Client:
        num_tokens = row.prompt_tokens + row.output_tokens
        if self.manager.num_blocks_for(num_tokens) > self.setup.num_blocks:
            room = self.setup.num_blocks * self.setup.block_size
            raise ValueError(f"request {row.request_id} has {num_tokens:,} tokens, the memory holds {room:,}")
        prefix = list(range(row.prefix_tokens))
        if prefix:
            prefix[0] = 10**6 + random.Random(row.prefix_id).randrange(10**9)
        own = [2 * 10**9 + index, *range(1, row.prompt_tokens - row.prefix_tokens)]
        prompt = (prefix + own)[: row.prompt_tokens]
        seq = Sequence(prompt, SamplingParams(max_tokens=row.output_tokens, ignore_eos=True))
        self.drawn.add(seq, row)
        return Client(index, row.arrival_s, seq)

    def run(self) -> Served:
        """Raises Refused. Every request ends: it is answered, or it was sent away."""
        to_come = deque(self.clients)
        while to_come or self.scheduler.has_unfinished():
            if not self.scheduler.has_unfinished():
                self.now = max(self.now, to_come[0].arrival_s)
            while to_come and to_come[0].arrival_s <= self.now:
                self._come(to_come.popleft())
            if self.seams is not None:
                self.seams.decide(self.now)
            output = self.scheduler.schedule({} if self.seams is None else self.seams.propose_drafts())
            if output.chunks:
                self._step(output)
            elif to_come:  # all who are there are kept waiting
                self.now = max(self.now, to_come[0].arrival_s)
            elif self.scheduler.has_unfinished():
                raise Refused(
                    f"nothing runs, nobody will come, and order() lets {len(self.scheduler.waiting)} wait for ever"
                )
        self.scheduler.check_integrity()
        stats = self.manager.stats
        return Served(self.clients, self.now, self.num_steps, self.scheduler.num_preemptions, stats.hit_rate)

    def _come(self, client: Client) -> None:
        self.scheduler.add(client.seq)
        if self.seams is not None:
            self.seams.add(client)

    def _step(self, output: SchedulerOutput) -> None:
        self.num_steps += 1
        self.now += COST.of(output.num_tokens)
        finished = self.scheduler.update(output, [[TOKEN] * chunk.num_logits for chunk in output.chunks])
        for chunk in output.chunks:
            self.by_seq[chunk.seq.seq_id].note(chunk, self.now)
        if self.seams is not None:
            self.seams.forget(finished)
        if self.num_steps % CHECK_EVERY == 0:
            self.scheduler.check_integrity()


def simulate(trace: list[Row], setup: Setup, asked: Asked | None = None, hybrid: bool = False) -> Served:
    return Simulation(trace, setup, asked, hybrid).run()
