"""Lab 11: the engine's own benchmark, throughput against latency, requests that arrive over time, and six lies.

Every number is measured here and now: by nanovllm.tools.bench, by the metrics of the engine's requests, and by a second
engine (transformers) in a process of its own.
"""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean, median_low
from tempfile import TemporaryFile
from time import perf_counter

from rich.text import Text

import nanovllm.engine
from chapters import draw
from chapters.ch11_benchmarks.timing import Arrival, SkippingClock
from chapters.course import ROOT
from chapters.patching import replaced
from chapters.recording import Recording
from chapters.story import Story, left_empty
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.tools.bench import Measurement, measure

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
INPUT_LEN, OUTPUT_LEN = 32, 20  # of the sweep over batch sizes
BATCH, LONG_INPUT = 8, 128  # of the runs that are lied about
NUM_ARRIVALS, NUM_SEATS = 36, 8  # of the runs in which requests arrive over time
ARRIVING_INPUT, ARRIVING_OUTPUT = 48, (4, 12)
LOADS = (0.4, 0.8, 1.6)  # shares of what the engine managed when all came at once
PATIENCE_S = 2.5  # a measurement is repeated while this lasts
QUESTIONS = (
    "What is the capital of Germany?",
    "What is the capital of Japan?",
    "What is 3 + 4? Answer with a number only.",
    "Is snow white? Answer with one word.",
    "What colour is grass? One word.",
    "What is the capital of Italy? One word.",
    "How many legs has a spider? Answer with a number only.",
    "What is the opposite of hot? One word.",
)


# -- the engine under the stopwatch ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Served:
    """What came of requests that arrived over time."""

    metrics: list[RequestMetrics]
    metrics_handed: list[RequestMetrics]  # the same, if a request's clock started when it was handed in
    seconds: float  # from the first arrival to the last token
    num_counted: float  # requests in the engine, averaged over time, counted before each step

    @property
    def requests_per_s(self) -> float:
        return len(self.metrics) / self.seconds

    @property
    def mean_latency_s(self) -> float:
        return mean((each.last_token_time or 0.0) - each.arrival_time for each in self.metrics)

    @property
    def mean_tpot_s(self) -> float:
        return mean(each.tpot_s or 0.0 for each in self.metrics)

    @property
    def ttft_p50_s(self) -> float:
        return median_low(ttfts_s(self.metrics))

    @property
    def ttft_p99_s(self) -> float:
        """With fewer than 100 requests the slowest is the p99."""
        return max(ttfts_s(self.metrics))

    def goodput(self, ttft_limit_s: float, tpot_limit_s: float) -> float:
        kept = [each for each in self.metrics if (each.ttft_s or 0.0) <= ttft_limit_s]
        return sum((each.tpot_s or 0.0) <= tpot_limit_s for each in kept) / self.seconds


def ttfts_s(metrics: list[RequestMetrics]) -> list[float]:
    return [each.ttft_s or 0.0 for each in metrics]


class World:
    """The engine on a checkpoint, and random prompts that share nothing."""

    def __init__(self, story: Story) -> None:
        sizes = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "max_model_len": 512}
        started = perf_counter()
        self.llm: LLM = story.load(**sizes, num_gpu_blocks_override=512, block_size=16)
        self.start_s, self.seed = perf_counter() - started, 0

    def run(self, new_prompts: bool = True) -> Measurement:
        """One of the runs that are lied about."""
        self.seed += new_prompts
        return measure(self.llm, BATCH, LONG_INPUT, OUTPUT_LEN, seed=self.seed)

    def sweep(self) -> list[list[Measurement]]:
        """For each batch size up to three runs; a round is over all sizes, so that all see the same machine."""
        started = perf_counter()
        rounds: list[list[Measurement]] = []
        while len(rounds) < 3 and (len(rounds) < 2 or perf_counter() - started < PATIENCE_S):
            rounds.append([measure(self.llm, n, INPUT_LEN, OUTPUT_LEN, seed=len(rounds)) for n in BATCH_SIZES])
        return [list(runs) for runs in zip(*rounds, strict=True)]

    def arrivals(self, requests_per_s: float | None, run: str) -> list[Arrival]:
        """Random moments: the gaps are exponential, as if many people decided independently. None: all at once.

        The gaps are the same for every rate but for their unit, and so are the lengths; each run has its own prompts.
        """
        gaps, lengths, prompts = random.Random(11), random.Random(12), random.Random(run)
        vocab_size, due_s, arrivals = self.llm.engine.model_config.vocab_size, 0.0, []
        for _ in range(NUM_ARRIVALS):
            params = SamplingParams(temperature=0, max_tokens=lengths.randint(*ARRIVING_OUTPUT), ignore_eos=True)
            prompt = [prompts.randrange(vocab_size) for _ in range(ARRIVING_INPUT)]
            arrivals.append(Arrival(due_s, prompt, params))
            due_s += gaps.expovariate(requests_per_s) if requests_per_s else 0.0
        return arrivals

    def serve(self, arrivals: list[Arrival]) -> Served:
        """Open loop: each request comes at its moment."""
        engine, outputs = self.llm.engine, list[RequestOutput]()
        with self.watched() as watch:
            watch.expect(arrivals)
            while watch.to_come or engine.has_unfinished_requests():
                watch.let_in()
                outputs += engine.step()
        return watch.served(outputs)

    def serve_closed(self, arrivals: list[Arrival], num_clients: int) -> Served:
        """Closed loop: so many clients, and each sends its next request when the last one is answered."""
        engine, to_come, outputs = self.llm.engine, list(arrivals), []
        with self.watched() as watch:
            while to_come or engine.has_unfinished_requests():
                while to_come and len(engine.scheduler.running) + len(engine.scheduler.waiting) < num_clients:
                    arrival = to_come.pop(0)
                    engine.add_request(None, arrival.prompt_token_ids, arrival.params, stream=False)
                outputs += engine.step()
        return watch.served(outputs)

    @contextmanager
    def watched(self) -> Iterator["Watch"]:
        """Idle time is skipped, the seats are few, and somebody counts who is there."""
        engine, watch = self.llm.engine, Watch(self.llm)
        with (
            left_empty(self.llm),
            replaced(nanovllm.engine, "time", watch.clock),
            replaced(engine, "step", watch.step),
            replaced(engine, "enqueue", watch.enqueue),
            replaced(engine.scheduler, "max_num_seqs", NUM_SEATS),
        ):
            yield watch


class Watch:
    """Stands beside the engine: notes when requests are handed in, and counts before each step how many are there."""

    def __init__(self, llm: LLM) -> None:
        self.engine, self.clock = llm.engine, SkippingClock()
        self.our_step, self.our_enqueue = llm.engine.step, llm.engine.enqueue
        self.request_seconds, self.handed_s = 0.0, dict[str, float]()
        self.to_come: list[tuple[float, Arrival]] = []  # (its moment on the clock, who comes then)
        self.due_s: dict[str, float] = {}

    def expect(self, arrivals: list[Arrival]) -> None:
        now_s = self.clock.perf_counter()
        self.to_come = [(now_s + arrival.due_s, arrival) for arrival in arrivals]

    def let_in(self) -> None:
        """Everybody whose moment has come. Where nobody is there, the clock is put forward to the next one's."""
        if not self.engine.has_unfinished_requests():
            self.clock.sleep(max(self.to_come[0][0] - self.clock.perf_counter(), 0.0))
        now_s = self.clock.perf_counter()
        num_due = sum(due_s <= now_s for due_s, _ in self.to_come)
        for due_s, arrival in self.to_come[:num_due]:
            request_id = self.engine.add_request(None, arrival.prompt_token_ids, arrival.params, stream=False)
            self.due_s[request_id] = due_s
        del self.to_come[:num_due]

    def step(self) -> list[RequestOutput]:
        num_there = len(self.engine.scheduler.running) + len(self.engine.scheduler.waiting)
        before = self.clock.perf_counter()
        outputs = self.our_step()
        self.request_seconds += num_there * (self.clock.perf_counter() - before)
        return outputs

    def enqueue(self, requests: list) -> list[str]:
        ids = self.our_enqueue(requests)
        self.handed_s |= dict.fromkeys(ids, self.clock.perf_counter())
        return ids

    def served(self, outputs: list[RequestOutput]) -> Served:
        handed = [replace(output.metrics, arrival_time=self.handed_s[output.request_id]) for output in outputs]
        # In the closed loop nobody is due before they are there.
        due_s = {output.request_id: output.metrics.arrival_time for output in outputs} | self.due_s
        due = [replace(output.metrics, arrival_time=due_s[output.request_id]) for output in outputs]
        seconds = max(each.last_token_time or 0.0 for each in due) - min(each.arrival_time for each in due)
        return Served(due, handed, seconds, self.request_seconds / seconds)


# -- pictures -------------------------------------------------------------------------------------------------------


make_table = partial(draw.make_table, width=10)


def draw_curve(points: list[tuple[float, float, str]], x_name: str, y_name: str) -> Text:
    """Points (x, y, label) and dots between neighbours, on axes that begin at 0."""
    width, height = 64, 14
    x_max, y_max = max(x for x, _, _ in points) * 1.08, max(y for _, y, _ in points) * 1.08
    cells = [[" "] * width for _ in range(height)]

    def put(x: float, y: float, text: str) -> None:
        column, row = int(x / x_max * (width - 1)), height - 1 - int(y / y_max * (height - 1))
        for i, char in enumerate(text[: width - column]):
            cells[row][column + i] = char

    for (x, y, _), (next_x, next_y, _) in pairwise(points):
        for i in range(41):
            put(x + (next_x - x) * i / 40, y + (next_y - y) * i / 40, "·")
    for x, y, label in points:
        put(x, y, f"● {label}")
    lines = [f"{y_name:>12}"]
    for row, line in enumerate(cells):
        tick = f"{y_max * (height - 1 - row) / (height - 1):,.0f}" if row % 3 == 1 else ""
        lines.append(f"{tick:>11} {'┤' if tick else '│'}{''.join(line)}".rstrip())
    lines.append(" " * 12 + "└" + ("─" * 15 + "┴") * 4)
    ticks = "".join(f"{x_max * (16 * i - 1) / (width - 1):>16.1f}" for i in range(1, 5))
    lines.append(f"{'0':>13}{ticks}   {x_name}")
    return Text("\n".join(lines))


def cached_tokens(world: World) -> int:
    """How many prompt tokens a run that is repeated finds in the cache; the engine says so of each request."""
    rng = random.Random(f"{world.seed},{BATCH}")  # as measure() draws them
    vocab_size = world.llm.engine.model_config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(LONG_INPUT)] for _ in range(BATCH)]
    outputs = world.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), False)
    return sum(output.num_cached_tokens for output in outputs)


def ask_questions(world: World, ignore_eos: bool) -> tuple[float, int]:
    """(requests per second, output tokens) of real questions, with an empty cache."""
    llm = world.llm
    llm.reset_prefix_cache()
    prompts: list = list(QUESTIONS)
    if llm.get_tokenizer().chat_template:
        prompts = [llm.chat_prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=ignore_eos)
    started = perf_counter()
    outputs = llm.generate(prompts, params, False)
    seconds = perf_counter() - started
    return len(prompts) / seconds, sum(len(output.outputs[0].token_ids) for output in outputs)


class Peer:
    """An engine in a process of its own (peer.py)."""

    def __init__(self, name: str, model: str) -> None:
        self._name = name
        self._errors = TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (close() does it)
        command = [sys.executable, "-m", "chapters.ch11_benchmarks.peer", name, model]
        self._process = subprocess.Popen(
            command, cwd=ROOT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def says(self) -> str:
        """The next line it prints. Raises ValueError, with its last words, when it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            status = self._process.wait()
            self._errors.seek(0)
            last_words = self._errors.read().rstrip().rpartition("\n")[-1] or "without a word"
            raise ValueError(f"{self._name}, started by peer.py, has ended with status {status}: {last_words}")
        return line.strip()

    def seconds(self, work: list[tuple[list[int], int]]) -> float:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which says() tells
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        return float(self.says())

    def close(self) -> None:
        """Without input it ends by itself."""
        self._process.communicate()
        self._errors.close()


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: a larger batch gives more tokens a second, and under
    more load the first token comes later."""
    batches = recorded.sheets("The four numbers, and throughput against latency")[0].column("output tokens/s")
    if batches != sorted(batches):
        raise ValueError(f"batches of {BATCH_SIZES} gave {batches} tokens/s")
    usual = recorded.sheets("Requests that arrive when they like")[0].column("TTFT p50")
    if usual[: len(LOADS)] != sorted(usual[: len(LOADS)]):
        raise ValueError(f"loads of {LOADS} had a usual TTFT of {usual} ms")
