"""Lab 11: the engine's own benchmark, throughput against latency, requests that arrive over time, and six lies.

Every number is measured here and now: by nanovllm.tools.bench, by the metrics of the engine's requests, and by a second
engine (transformers) in a process of its own.
"""

import gc
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from statistics import mean, median, median_low
from time import perf_counter

from rich.text import Text

import nanovllm.engine
from chapters import draw
from chapters.ch11_benchmarks.timing import Arrival, SkippingClock
from chapters.course import ROOT
from chapters.patching import replaced
from chapters.recording import Recording
from chapters.story import Story
from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.tools.bench import Measurement, measure

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
INPUT_LEN, OUTPUT_LEN = 32, 20  # of the sweep over batch sizes
BATCH, LONG_INPUT = 8, 128  # of the runs that are lied about
NUM_RUNS = 5
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
PEERS = ("nanovllm", "transformers, padded batch")


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

    def arrivals(self, requests_per_s: float | None) -> list[Arrival]:
        """Random moments: the gaps are exponential, as if many people decided independently. None: all at once.

        The gaps are the same for every rate but for their unit, and so are the lengths; the prompts are new.
        """
        gaps, lengths, prompts = random.Random(11), random.Random(12), random.Random(f"{requests_per_s}")
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


# -- the story ------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    world = World(story)
    first = tell_first_run(story, world)
    tell_curve(story, world)
    loaded = tell_arrivals(story, world)
    tell_lies(story, world, first, loaded)
    del world.llm  # its memory and its threads
    gc.collect()
    tell_peers(story)
    tell_vllm(story)


def tell_first_run(story: Story, world: World) -> list[Measurement]:
    story.part("The first run is different")
    story.say(
        f"The engine has just been loaded. A batch of {BATCH} requests, {LONG_INPUT} random prompt tokens and "
        f"{OUTPUT_LEN} output tokens each; then the same with different random prompts, twice."
    )
    runs = [world.run() for _ in range(3)]
    table = make_table("run", "TTFT, ms", "TPOT, ms", "latency, s", "output tokens/s")
    for number, run in enumerate(runs, start=1):
        times = f"{run.ttft_s * 1e3:.0f}", f"{run.tpot_s * 1e3:.1f}", f"{run.latency_s:.2f}"
        table.add_row(str(number), *times, f"{run.output_tokens_per_s:.0f}", "(measured)")
    story.show(table)
    story.say(f"Loading took {world.start_s:.1f} s before that.", measured=True)
    story.say(
        "The first run may touch memory that nobody has touched before, and the operating system hands it out page by "
        "page; threads start, buffers get their size. None of that happens again. How much of it is left for the first "
        "run depends on the engine: this one does a part while it loads. From here on it is warm."
    )
    return runs


def tell_curve(story: Story, world: World) -> None:
    story.part("The four numbers, and throughput against latency")
    measure(world.llm, max(BATCH_SIZES), INPUT_LEN, 2, seed=99)  # buffers for the largest batch
    sweep = world.sweep()
    story.say(
        f"{INPUT_LEN} prompt tokens, {OUTPUT_LEN} output tokens a request, all submitted at once. The table shows "
        "medians of up to three runs, and next to them the lowest and the highest throughput:"
    )
    table = make_table("batch", "TTFT, ms", "TPOT, ms", "latency, s", "output tokens/s", "lowest - highest")
    points = []
    for batch_size, runs in zip(BATCH_SIZES, sweep, strict=True):
        ttft_s, tpot_s = median(run.ttft_s for run in runs), median(run.tpot_s for run in runs)
        latency_s, rates = median(run.latency_s for run in runs), sorted(run.output_tokens_per_s for run in runs)
        times = f"{ttft_s * 1e3:.0f}", f"{tpot_s * 1e3:.1f}", f"{latency_s:.2f}"
        spread = f"{rates[0]:.0f} - {rates[-1]:.0f}"
        table.add_row(str(batch_size), *times, f"{median(rates):.0f}", spread, "(measured)")
        points.append((tpot_s * 1e3, median(rates), str(batch_size)))
    story.show(table)
    story.say(
        "The same as a picture, with a point for each batch size: it shows how long one user waits for a token, and "
        "how many tokens all get together:"
    )
    story.show(draw_curve(points, "TPOT, ms (measured)", "tokens/s"))
    gain, price = points[-1][1] / points[0][1], points[-1][0] / points[0][0]
    story.say(
        f"From a batch of 1 to one of {BATCH_SIZES[-1]}: {gain:.1f} times the throughput; each token {price:.1f} "
        "times as slow.",
        measured=True,
    )
    story.say("Neither end of the curve is the engine's speed. Each point is; a number without its point says nothing.")


def tell_arrivals(story: Story, world: World) -> Served:
    story.part("Requests that arrive when they like")
    at_once = world.serve(world.arrivals(None))
    story.say(
        f"Now {NUM_ARRIVALS} requests of {ARRIVING_INPUT} prompt tokens and {ARRIVING_OUTPUT[0]} to "
        f"{ARRIVING_OUTPUT[1]} output tokens, at most {NUM_SEATS} running at a time. First they come all at once, as "
        "in every benchmark so far:"
    )
    story.say(f"{at_once.requests_per_s:.1f} requests a second: the engine's capacity for this work.", measured=True)
    story.say(
        "Then they come at random moments (the same list of gaps each time, stretched to the load), whether or not the "
        "engine has time. A load of 80% means: 0.8 times the capacity arrives. The last row is another kind of "
        f"benchmark: {NUM_SEATS} clients, each of which sends its next request when the last one is answered. TTFT is "
        "in ms:"
    )
    rows = {f"{load:.0%}": world.serve(world.arrivals(load * at_once.requests_per_s)) for load in LOADS}
    rows["closed"] = world.serve_closed(world.arrivals(-1.0), NUM_SEATS)
    light = rows[f"{LOADS[0]:.0%}"]
    limits = 2 * light.ttft_p50_s, 2 * light.mean_tpot_s
    worst_s = max(served.ttft_p99_s for served in rows.values())
    table = make_table("load", "requests/s", "TTFT p50", "TTFT p99", "latency, s", "goodput", width=8)
    table.add_column("TTFT p99", width=14)
    for name, served in rows.items():
        bar = "█" * max(1, round(served.ttft_p99_s / worst_s * 14))
        ttfts = f"{served.ttft_p50_s * 1e3:.0f}", f"{served.ttft_p99_s * 1e3:.0f}"
        rest = f"{served.mean_latency_s:.2f}", f"{served.goodput(*limits):.1f}", bar, "(measured)"
        table.add_row(name, f"{served.requests_per_s:.1f}", *ttfts, *rest)
    story.show(table)
    story.say(
        f"Goodput: requests a second with a TTFT of at most {limits[0] * 1e3:.0f} ms and a TPOT of at most "
        f"{limits[1] * 1e3:.0f} ms.",
        measured=True,
    )
    story.say(
        f"These limits are twice the usual values at a load of {LOADS[0]:.0%}. Well below the capacity a request waits "
        "for little more than its own work. Near it, those who come in a crowd wait for each other, and p99 leaves p50 "
        "behind. Above it the queue grows as long as requests come: with twice as many requests the waits would be "
        f"longer still. The closed loop never has more than {NUM_SEATS} requests in the system: the others wait "
        "politely outside, where nobody measures. (If the rows contradict this, something else has used the machine in "
        "between: see the spread at the end of part 4.)\n\nLittle's law: the requests in the system, on average, are "
        "the requests per second times the seconds each stays. On the left is the product of two numbers above; on the "
        "right is what was counted before each step:"
    )
    table = make_table("load", "requests/s", "x latency, s", "= in the system", "counted")
    for name, served in rows.items():
        product = served.requests_per_s * served.mean_latency_s
        factors = f"{served.requests_per_s:.1f}", f"{served.mean_latency_s:.3f}"
        table.add_row(name, *factors, f"{product:.1f}", f"{served.num_counted:.1f}", "(measured)")
    story.show(table)
    story.say(
        "The counted number is a little smaller where requests come at random: those that are due while a step runs "
        "are handed in after it, and whoever counts before it cannot see them."
    )
    return rows[f"{LOADS[-1]:.0%}"]


def tell_lies(story: Story, world: World, first: list[Measurement], loaded: Served) -> None:
    story.part("Six lies")
    runs = [world.run() for _ in range(NUM_RUNS)]
    rates = [run.output_tokens_per_s for run in runs]
    honest = median(rates)
    again = world.run(new_prompts=False)  # the prompts of the last run, which the cache still holds
    num_cached = cached_tokens(world)
    to_end, to_limit = (ask_questions(world, ignore_eos) for ignore_eos in (False, True))
    table = draw.make_table("the benchmark", "unit", "it says", "honest", "factor", width=7, first=7)
    table.columns[1].justify = "left"
    with_loading = BATCH * OUTPUT_LEN / (world.start_s + first[0].latency_s)
    warm = mean(run.output_tokens_per_s for run in first[1:])
    with_prompts = honest * (LONG_INPUT + OUTPUT_LEN) / OUTPUT_LEN
    ttft_ms = median_low(ttfts_s(loaded.metrics_handed)) * 1e3, loaded.ttft_p50_s * 1e3
    for name, unit, says, is_so in (
        ("starts its clock before loading", "output tokens/s", with_loading, warm),
        ("sends the same prompts twice", "output tokens/s", again.output_tokens_per_s, rates[-1]),
        ("counts prompt tokens as throughput", "tokens/s", with_prompts, honest),
        ("lets answers end when they like", "requests/s", to_end[0], to_limit[0]),
        (f"shows the best of {NUM_RUNS} runs", "output tokens/s", max(rates), honest),
        ("starts clocks at the hand-over", "TTFT p50, ms", *ttft_ms),
    ):
        table.add_row(name, unit, f"{says:.1f}", f"{is_so:.1f}", f"{says / is_so:.2f}", "(measured)")
    story.show(table)
    story.say(
        "Honest is, in this order: the mean of the second and the third run of part 1; the run before, in which the "
        f"same prompts were new; the median of {NUM_RUNS} runs, output tokens only; the same questions, EOS ignored; "
        f"the median of the {NUM_RUNS} runs; the load of {LOADS[-1]:.0%} with clocks that start when a request is due."
        f"\n\nThe same prompts twice: {num_cached} of {BATCH * LONG_INPUT} prompt tokens came from the prefix cache. "
        "The engine did nothing wrong, the second run had less to do. All prompts are random here and share nothing, "
        "and still a benchmark that is merely repeated is wrong."
    )
    story.say(
        f"Answers that end when they like: {to_end[1]} tokens instead of {to_limit[1]} for the same "
        f"{len(QUESTIONS)} questions.",
        measured=True,
    )
    story.say(f"The {NUM_RUNS} runs, in output tokens/s: {' '.join(f'{rate:.0f}' for rate in rates)}", measured=True)
    spread = (max(rates) - min(rates)) / honest
    story.say(f"From the slowest to the fastest: {spread:.0%} of the median.", measured=True)
    story.say("A difference between two engines that is smaller than this needs more runs before it is one.")


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
        self._name, command = name, [sys.executable, "-m", "chapters.ch11_benchmarks.peer", name, model]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def says(self) -> str:
        """The next line it prints. Raises ValueError when it has ended."""
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise ValueError(f"the process of {self._name} has ended without an answer (started by peer.py)")
        return line.strip()

    def seconds(self, work: list[tuple[list[int], int]]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        return float(self.says())

    def close(self) -> None:
        """Without input it ends by itself."""
        self._process.communicate()


def tell_peers(story: Story) -> None:
    story.part("The same work on another engine")
    story.say(
        "nanovllm and transformers, each in a process of its own, from the same checkpoint in bf16, on the same cores. "
        "Both load, both do a small piece of work to warm up; then they take turns at three pieces. A piece: 6 "
        "requests, 16 to 48 random prompt tokens, 8 to 20 output tokens, EOS ignored, the same for both."
    )
    rng = random.Random(0)

    def piece(num: int) -> list[tuple[list[int], int]]:
        return [(rng.choices(range(100, 300), k=rng.randint(16, 48)), rng.randint(8, 20)) for _ in range(num)]

    peers = {name: Peer(name, story.model) for name in PEERS}
    try:
        for peer in peers.values():
            peer.says()
        warm_up, pieces = piece(2), [piece(6) for _ in range(3)]
        for peer in peers.values():
            peer.seconds(warm_up)
        rates: dict[str, list[float]] = {name: [] for name in PEERS}
        for work in pieces:
            for name, peer in peers.items():
                rates[name].append(sum(num for _, num in work) / peer.seconds(work))
    finally:
        for peer in peers.values():
            peer.close()
    table = draw.make_table("engine", "output tokens/s, three pieces", "median", width=8, first=8)
    for name, values in rates.items():
        table.add_row(name, "  ".join(f"{rate:.0f}" for rate in values), f"{median(values):.0f}", "(measured)")
    story.show(table)
    ratio = median(rates[PEERS[0]]) / median(rates[PEERS[1]])
    story.say(f"The first does {ratio:.1f} times the output tokens of the second in the same time.", measured=True)
    story.say(
        "What this does not say: transformers pads the batch and runs until its longest answer is done, which is how "
        "it is used, not the best that could be made of it. Six short requests on this machine are one point; "
        "examples/bench_peers.py has others, with time to first token, a single stream, start and memory."
    )


def tell_vllm(story: Story) -> None:
    story.part("vLLM")
    if find_spec("vllm"):
        story.say("vLLM is installed in this Python. To put it beside this engine, on the same work:")
        story.show(Text("    python examples/bench_peers.py --only nanovllm 'vLLM, compiled' 'vLLM, eager'"))
    else:
        story.say(
            "vLLM is not installed in this Python, so nothing is said about it here. It may live in an environment of "
            "its own; name that environment's Python:"
        )
        command = "python examples/bench_peers.py --vllm-python PATH --only nanovllm 'vLLM, compiled' 'vLLM, eager'"
        story.show(Text(f"    {command}"))


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: a larger batch gives more tokens a second, and under
    more load the first token comes later."""
    batches = recorded.sheets("The four numbers, and throughput against latency")[0].column("output tokens/s")
    if batches != sorted(batches):
        raise ValueError(f"batches of {BATCH_SIZES} gave {batches} tokens/s")
    usual = recorded.sheets("Requests that arrive when they like")[0].column("TTFT p50")
    if usual[: len(LOADS)] != sorted(usual[: len(LOADS)]):
        raise ValueError(f"loads of {LOADS} had a usual TTFT of {usual} ms")
