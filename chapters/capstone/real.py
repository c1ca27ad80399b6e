"""--real: the demo model serves the first requests of a trace, in real time, with the same seams and the same judge.

Lengths are divided, so that a laptop is done in a minute. Requests come faster than the machine answers them by itself,
and the limits are multiples of what one request needs that is alone: each machine has its own.
"""

import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from chapters.capstone.answers import Refused
from chapters.capstone.desk import Desk
from chapters.capstone.judge import BASELINE, Verdict, load_policy, scored, table_of
from chapters.capstone.score import Score
from chapters.capstone.seams import Asked, ChosenDrafts, Client, Seams
from chapters.capstone.simulation import Served
from chapters.capstone.trace import Row
from chapters.capstone.views import Setup
from chapters.runner import Lost, Phase, Run
from chapters.submission import NotLoaded, describe
from nanovllm import LLM, SamplingParams
from nanovllm.request import Request
from nanovllm.tools.bench import measure
from nanovllm.tools.demo_model import demo_model_path

NUM_REQUESTS, DIVISOR = 40, 16
NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_DRAFT_TOKENS = 96, 16, 16, 512, 8
SIZES = NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_DRAFT_TOKENS
YOURS, LOADING_S = "your policy", 900.0
LOAD = 1.3  # requests that come, as a multiple of those that the engine by itself answers
TTFT_LIMIT, TPOT_LIMIT = 6.0, 3.0  # multiples of what a request of mean length needs alone


class Due(NamedTuple):
    due_s: float
    prompt: list[int]
    params: SamplingParams


def lengths_of(row: Row) -> tuple[int, int]:
    """Tokens of its prompt and its answer, as they are served."""
    return max(row.prompt_tokens // DIVISOR, 1), max(row.output_tokens // DIVISOR, 2)


def check_lengths(rows: list[Row]) -> None:
    """Raises ValueError for a request that the pool cannot hold."""
    most = NUM_BLOCKS * BLOCK_SIZE
    for row in rows:
        if sum(lengths_of(row)) > most:
            what = f"request {row.request_id} has {row.prompt_tokens:,} + {row.output_tokens:,}"
            raise ValueError(f"--real serves prompts and answers of up to {most * DIVISOR:,} tokens; {what}")


class RealServer:
    """The engine, and requests that come when they are due. now: seconds since the run began."""

    def __init__(self, model: str, max_model_len: int = NUM_BLOCKS * BLOCK_SIZE) -> None:
        self.llm = LLM(
            model,
            max_model_len=max_model_len,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            num_gpu_blocks_override=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            speculative_config={"method": "ngram", "num_speculative_tokens": MAX_DRAFT_TOKENS},
        )
        self.engine = self.llm.engine
        self.speculation = self.engine.speculation
        self.begun = 0.0

    @property
    def now(self) -> float:
        return time.perf_counter() - self.begun

    def requests(self, rows: list[Row]) -> list[Due]:
        vocab_size, due = self.engine.model_config.vocab_size, []
        for row in rows:
            (num_prompt, num_output), num_prefix = lengths_of(row), row.prefix_tokens // DIVISOR
            of_prefix, own = random.Random(f"prefix {row.prefix_id}"), random.Random(f"own {row.request_id}")
            prompt = [of_prefix.randrange(vocab_size) for _ in range(num_prefix)]
            prompt += [own.randrange(vocab_size) for _ in range(num_prompt - num_prefix)]
            due.append(
                Due(row.arrival_s, prompt, SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True))
            )
        return due

    def setup(self, due: list[Due]) -> Setup:
        """What one request needs that is alone, measured."""
        num_prompt = round(sum(len(each.prompt) for each in due) / len(due))
        measure(self.llm, 1, num_prompt, 2, seed=1)  # the first steps wait for memory
        alone = measure(self.llm, 1, num_prompt, 16)
        limits = TTFT_LIMIT * alone.ttft_s, TPOT_LIMIT * alone.tpot_s
        return Setup(*SIZES, alone.tpot_s, max(alone.ttft_s - alone.tpot_s, 1e-6) / num_prompt, *limits)

    def serve(self, due: list[Due], setup: Setup, asked: Asked | None) -> Served:
        """Raises Refused."""
        engine, scheduler = self.engine, self.engine.scheduler
        self.llm.reset_prefix_cache()
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        engine.wings.pop("speculation", None)
        before, seams = engine.block_manager.stats.snapshot(), None
        if asked is not None:
            assert self.speculation is not None
            drafts = ChosenDrafts(self.speculation.proposer, setup, self.speculation.max_rows)
            engine.wings["speculation"] = drafts
            seams = Seams(asked, setup, scheduler, drafts)
        to_come, clients, requests = deque(due), list[Client](), dict[int, Request]()
        by_seq: dict[int, Client] = {}
        num_steps, preempted, self.begun = 0, scheduler.num_preemptions, time.perf_counter()
        while to_come or engine.has_unfinished_requests():
            while to_come and to_come[0].due_s <= self.now:
                due_s, prompt, params = to_come.popleft()
                request = engine.make_request({"prompt_token_ids": prompt}, params)
                engine.enqueue([request])
                client = Client(len(clients), due_s, request.samples[0].seq)
                clients.append(client)
                requests[client.index] = request
                by_seq[client.seq.seq_id] = client
                if seams is not None:
                    seams.add(client)
            if not engine.has_unfinished_requests():
                time.sleep(max(to_come[0].due_s - self.now, 0.0))
                continue
            for client in seams.decide(self.now) if seams is not None else ():
                engine.abort_requests([requests[client.index]])
            if seams is not None and not seams.has_work:
                if not to_come and engine.has_unfinished_requests():
                    raise Refused("nothing runs, nobody will come, and order() lets the others wait for ever")
                time.sleep(0.001)
                continue
            finished = [output.request_id for output in engine.step()]
            chunks = engine.last_scheduled.chunks if engine.last_scheduled is not None else []
            for chunk in chunks:
                by_seq[chunk.seq.seq_id].note(chunk, self.now)
            if seams is not None:
                seams.forget([c.seq for c in clients if requests[c.index].request_id in finished])
            num_steps += bool(chunks)
        scheduler.check_integrity()
        stats = engine.block_manager.stats.snapshot() - before
        return Served(clients, self.now, num_steps, scheduler.num_preemptions - preempted, stats.hit_rate)

    def stop(self) -> None:
        """After a refusal: nobody is left."""
        self.engine.abort_requests(list(self.engine.requests.values()))


def serve_for_real(policy: Path, rows: list[Row], limit_s: float, console: Console) -> int:
    """limit_s: for the policy alone. Raises ValueError."""
    check_lengths(rows[:NUM_REQUESTS])
    run = Run("chapters.capstone.real:measure_both", policy=str(policy), rows=rows[:NUM_REQUESTS])
    phase, said = Phase("starting", 0), ""
    found: list[Any]
    try:
        with console.status(phase.name) as status:
            while isinstance(heard := run.hear(limit_s if phase.name == YOURS else LOADING_S), Phase):
                phase = heard
                status.update(phase.name)
        said, found = heard
    except Lost as lost:
        if phase.name != YOURS:
            raise ValueError(f"the engine cannot be loaded: {lost}\n{run.printed()}") from None
        found = [[policy.stem, None, str(lost)]]
    finally:
        run.end()
    verdicts = [Verdict(name, score and Score(*score), problem) for name, score, problem in found]
    console.print(said, markup=False)
    console.print(table_of(verdicts))
    console.print("\n".join(filter(None, (verdicts[-1].problem, run.printed()))), markup=False, soft_wrap=True)
    return 0 if verdicts[-1].score is not None else 1


def measure_both(tell: Callable[..., None], policy: str, rows: list[list[Any]]) -> tuple[str, list[Any]]:
    """In the process of a Run: the engine by itself, then with the policy. A sentence, and (name, score, problem)."""
    tell("loading the model")
    server = RealServer(str(demo_model_path()))
    due = server.requests([Row(*row) for row in rows])
    setup = server.setup(due)
    tell("how many does the engine answer if all come at once?")
    end_s = server.serve([each._replace(due_s=0.0) for each in due], setup, None).end_s
    stretch = end_s / LOAD / max(due[-1].due_s, 1e-9)
    due = [each._replace(due_s=each.due_s * stretch) for each in due]
    tell(BASELINE)
    verdicts: list[Any] = [[BASELINE, scored(server.serve(due, setup, None), setup), ""]]
    tell(YOURS)
    name = Path(policy).stem
    try:
        served = server.serve(due, setup, Desk(load_policy(policy), [*setup]))
        verdicts.append([name, scored(served, setup), ""])
    except (Refused, NotLoaded) as refused:
        verdicts.append([name, None, str(refused)])
    except BaseException as error:  # SystemExit, too
        verdicts.append([name, None, f"your policy led to {describe(error, policy)}"])
    limits = f"first token within {setup.ttft_limit_s * 1e3:,.0f} ms, then {setup.tpot_limit_s * 1e3:,.0f} ms a token"
    return f"{len(due)} requests in {due[-1].due_s:.1f} s (measured); good: {limits}", verdicts
