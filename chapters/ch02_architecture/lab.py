"""Lab of chapter 2: one request through every hand-off of the engine, with the real objects printed.

The engine makes its steps itself. A Tap stands at the hand-offs, lets everything pass, and writes down what went by.
"""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.pretty import pretty_repr
from rich.table import Table

from chapters.patching import replaced
from chapters.story import WIDTH, Story
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.core import sequence
from nanovllm.engine import LLMEngine
from nanovllm.request import Request

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
OTHER_PROMPT = "Once upon a time"

CONTROL_PLANE_ALONE = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None  # from here on, importing it raises ImportError
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence

scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)
scheduler.add(Sequence([11, 12, 13, 14, 15, 16, 17, 18, 19, 20]))
for made_up in (101, 102, 103):
    output = scheduler.schedule()
    spans = [(chunk.start, chunk.end, chunk.reaches_end) for chunk in output.chunks]
    scheduler.update(output, [[made_up] if output.chunks[0].reaches_end else []])
    print(spans, output.chunks[0].seq)
try:
    import nanovllm.worker.model_runner
except ImportError as error:
    print("the data plane:", error)
"""


@dataclass
class Step:
    """What went by in one step. Sequences change later, so they are written down as text at once."""

    scheduled: str = ""
    owners: list[str] = field(default_factory=list)  # of each chunk, the id of its request
    spans: list[str] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    batch: Any = None
    sampling: Any = None
    logits: Any = None  # [R, vocab_size], before the sampler changes them
    sampled_token_ids: list[list[int]] = field(default_factory=list)  # of each chunk
    ended: list[str] = field(default_factory=list)  # what update() returned
    after_update: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class Tap:
    """Listens at the hand-offs inside LLMEngine.step()."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.steps: list[Step] = []

    def step(self) -> Step:
        """Let the engine make one step. Returns what went by."""
        self.steps.append(Step())
        with self._listening():
            self.steps[-1].outputs = self.engine.step()
        return self.steps[-1]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        from nanovllm.worker import model_runner

        engine, seen = self.engine, self.steps[-1]

        def after_schedule(output: Any) -> None:
            seen.scheduled = pretty_repr(output, max_width=WIDTH)
            seen.owners = [chunk.seq.request_id for chunk in output.chunks]
            seen.spans = [f"[{chunk.start}, {chunk.end})" for chunk in output.chunks]
            seen.samples = [chunk.reaches_end for chunk in output.chunks]

        def after_pack(work: Any) -> None:
            seen.batch, seen.sampling = work

        def before_sample(logits: Any, sampling: Any) -> None:
            seen.logits = logits.clone()

        def after_run(result: Any) -> None:
            seen.sampled_token_ids = result.sampled_token_ids

        def before_update(output: Any, sampled_token_ids: list[list[int]]) -> None:
            self._updated = [chunk.seq for chunk in output.chunks]

        def after_update(ended: Any) -> None:
            seen.ended, seen.after_update = list(map(repr, ended)), list(map(repr, self._updated))

        with ExitStack() as stack:
            for owner, name, before, after in (
                (engine.scheduler, "schedule", None, after_schedule),
                (model_runner, "pack", None, after_pack),
                (engine.model_runner, "_sample", before_sample, None),
                (engine.model_runner, "run", None, after_run),
                (engine.scheduler, "update", before_update, after_update),
            ):
                stack.enter_context(replaced(owner, name, _tapped(getattr(owner, name), before, after)))
            yield


def _tapped(function: Callable, before: Callable | None, after: Callable | None) -> Callable:
    def tapped(*args: Any) -> Any:
        if before is not None:
            before(*args)
        result = function(*args)
        if after is not None:
            after(result)
        return result

    return tapped


def tell(story: Story) -> None:
    # float32, so that the logits below are the same on every machine to the digits shown.
    llm = story.load(dtype="float32", max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, block_size=16)
    with replaced(sequence, "_next_seq_id", count()):  # ids from 0, whatever this process did before
        show_layers(story, llm)
        request = show_request(story, llm)
        show_first_step(story, llm, request)
        show_other_steps(story, llm)
        show_two_requests(story, llm)
        show_errors(story, llm)
        show_failure(story, llm)
        show_ctrl_c(story, llm)
    show_control_plane_alone(story)


def show_layers(story: Story, llm: LLM) -> None:
    story.part("Four layers, as objects")
    engine, manager, runner = llm.engine, llm.engine.block_manager, llm.engine.model_runner
    config = engine.model_config
    table = Table("layer", "object", "its file", "what it holds", show_edge=False)
    queues = f"waiting: {len(engine.scheduler.waiting)}, running: {len(engine.scheduler.running)}"
    layers = (
        ("1 API", llm, "calls of threads, one after another"),
        ("2 engine loop", engine, f"requests: {len(engine.requests)}; a tokenizer"),
        ("3 scheduler", engine.scheduler, queues),
        ("  block manager", manager, f"{len(manager.blocks)} blocks of {manager.block_size} tokens, as numbers"),
        ("4 model runner", runner, f"{config.num_hidden_layers} layers, a vocabulary of {config.vocab_size:,}"),
    )
    for layer, thing, holds in layers:
        file = type(thing).__module__.replace("nanovllm.", "").replace(".", "/") + ".py"
        table.add_row(layer, type(thing).__name__, file, holds)
    story.show(table)
    weights, pool = runner.weight_bytes / 1e6, engine.kv_pool.num_bytes / 1e6
    story.say(
        f"Only the last one holds tensors: {weights:,.0f} MB of weights and {pool:,.1f} MB of KV cache, in float32 "
        "for this lab. The block manager speaks of the same blocks, and to it they are numbers in a list."
    )


def show_request(story: Story, llm: LLM) -> Request:
    story.part("A prompt becomes a request")
    engine = llm.engine
    params = SamplingParams(temperature=0, stop=["\n"])
    request = engine.make_request(PROMPT, params, stream=True)
    tokenizer = llm.get_tokenizer()
    story.say(f"make_request({PROMPT!r}, {escape(repr_of(params))}) checks everything, then cuts the text into tokens:")
    table = Table("token id", "text", show_edge=False)
    for token_id in request.prompt_token_ids:
        table.add_row(str(token_id), escape(repr(tokenizer.decode([token_id]))))
    story.show(table)
    [sample] = request.samples
    seq = sample.seq
    story.say(
        f"The Request has {len(request.samples)} Sample, which has a Sequence and a Detokenizer (one of each for "
        f"every sample, n={params.n}):\n\n  {escape(repr(seq))}\n\n"
        f"In the scheduler's queue so far: {len(engine.scheduler.waiting)} sequences."
    )
    [request_id] = engine.enqueue([request])
    story.say(
        f"enqueue() gives it the id {request_id!r}, notes in sequence {seq.seq_id} whose it is, and puts that into "
        f"the queue: {len(engine.scheduler.waiting)} waiting. Nothing has been computed."
    )
    return request


def repr_of(params: SamplingParams) -> str:
    """The fields that differ from the defaults."""
    default = SamplingParams()
    changed = {name: value for name, value in vars(params).items() if value != getattr(default, name)}
    return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def show_first_step(story: Story, llm: LLM, request: Request) -> None:
    story.part("The first step, hand-off by hand-off")
    step, tokenizer = Tap(llm.engine).step(), llm.get_tokenizer()
    story.say("[bold]engine.step()[/] is called once. Inside it:")
    story.say("[bold]a. scheduler.schedule()[/] chooses the work. The whole prompt fits into one step:")
    story.say(escape(step.scheduled))
    story.say(
        f"chunk.reaches_end is {step.samples[0]}: it ends where the known tokens end, so a token will come of it."
    )
    story.say("[bold]b. pack()[/] turns that into arrays. From here on nobody knows a request or a sequence:")
    story.say(escape(pretty_repr(step.batch, max_width=WIDTH)))
    story.say(escape(pretty_repr(step.sampling, max_width=WIDTH)))
    shape = list(step.logits.shape)
    story.say(
        f"[bold]c. model_runner.run()[/] computes the model for all {len(step.batch.input_ids)} tokens at once. Logits "
        f"are made for the rows in logits_rows only, so their shape is {escape(str(shape))}. These are the highest of "
        "the row:"
    )
    table = Table("token id", "text", "logit", show_edge=False)
    values, ids = step.logits[0].topk(3)
    for token_id, value in zip(ids.tolist(), values.tolist(), strict=True):
        table.add_row(str(token_id), escape(repr(tokenizer.decode([token_id]))), f"{value:.2f}")
    story.show(table)
    story.say(
        f"temperature is 0, so the sampler takes the highest. run() returns the token ids of each chunk: "
        f"{escape(str(step.sampled_token_ids))}."
        "\n\n[bold]d. scheduler.update()[/] appends it to the sequence and asks whether that was the end. The "
        "detokenizer, which looks for the stop string, is asked, too:"
    )
    story.say(f"  {escape(step.after_update[0])}")
    [sample] = request.samples
    seq = sample.seq
    story.say(
        f"Sequences that ended: {escape(str(step.ended))}. {len(seq.tokens)} tokens are known now and "
        f"{seq.num_computed_tokens} are computed: one behind. As text the token is "
        f"{escape(repr(sample.detokenizer.text))}.\n\n[bold]e. request.add_tokens()[/] takes what the client may see "
        "of it, and the request's counters grow."
    )
    [output] = step.outputs
    story.say("[bold]f.[/] The request is streamed, so the step returns an output for it, with this CompletionOutput:")
    story.say(escape(pretty_repr(output.outputs[0], max_width=WIDTH)))
    metrics = output.metrics
    story.say(
        f"It waited {1e3 * (metrics.queue_time_s or 0):.1f} ms for its first step; its first token was there after "
        f"{1e3 * (metrics.ttft_s or 0):.1f} ms.",
        measured=True,
    )


def steps_table(llm: LLM, steps: list[Step], first: int) -> Table:
    """One row for each chunk of each step."""
    decode = llm.get_tokenizer().decode
    table = Table("step", "of", "chunk", "input_ids", "slots", "seqlens_k", "sampled", "output", show_edge=False)
    for number, step in enumerate(steps, start=first):
        batch = step.batch
        outputs = {output.request_id: output.outputs[0].finish_reason or "goes on" for output in step.outputs}
        ends = batch.cu_seqlens_q.tolist()
        for b, owner in enumerate(step.owners):
            rows = slice(ends[b], ends[b + 1])
            ids, slots = spaced(batch.input_ids[rows].tolist()), first_to_last(batch.slot_mapping[rows].tolist())
            token = ", ".join(f"{token_id} {decode([token_id])!r}" for token_id in step.sampled_token_ids[b])
            cells = step.spans[b], ids, slots, str(batch.seqlens_k[b].item()), token, outputs.get(owner, "")
            table.add_row(str(number) if b == 0 else "", owner, *map(escape, cells))
    return table


def spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def first_to_last(slots: list[int]) -> str:
    """Slots one after another as a range: 16-19."""
    in_a_row = len(slots) > 1 and slots == list(range(slots[0], slots[-1] + 1))
    return f"{slots[0]}-{slots[-1]}" if in_a_row else spaced(slots)


def show_other_steps(story: Story, llm: LLM) -> None:
    story.part("The other steps: the same hand-offs, different numbers")
    engine, tap = llm.engine, Tap(llm.engine)
    while engine.has_unfinished_requests():
        tap.step()
    story.show(steps_table(llm, tap.steps, 2))
    story.say(
        "Each step computes one token, the one sampled before: its K and V go into the next slot, and it attends to "
        "all tokens so far (seqlens_k). The prompt is not computed again."
    )
    last = tap.steps[-1]
    completion = last.outputs[0].outputs[0]
    found = "its text, which ends with the stop string" if isinstance(completion.stop_reason, str) else "its tokens"
    story.say(f"Sequences that ended in the last update(): {escape(str(last.ended))}. The end was seen in {found}.")
    story.say(escape(pretty_repr(completion, max_width=WIDTH)))
    free, num_blocks = len(engine.block_manager.free_blocks), len(engine.block_manager.blocks)
    story.say(
        f"The engine has forgotten the request: {len(engine.requests)} requests, {free} of {num_blocks} blocks free."
    )


def show_two_requests(story: Story, llm: LLM) -> None:
    story.part("Two requests in one batch")
    engine, tap = llm.engine, Tap(llm.engine)
    engine.add_request("A", OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), stream=False)
    tap.step()
    story.say(
        f"Request A, {OTHER_PROMPT!r}, has made its first step. Now B, {PROMPT!r}, comes in, with temperature 0.8:"
    )
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True)
    engine.add_request("B", PROMPT, params, stream=False)
    while engine.has_unfinished_requests():
        tap.step()
    beside_b = tap.steps[-1].outputs[0].outputs[0].token_ids
    story.show(steps_table(llm, tap.steps, 1))
    both = tap.steps[1]
    story.say("Step 2 has a decode of A and the whole prompt of B, one after another in the same arrays:")
    story.say(escape(pretty_repr(both.batch, max_width=WIDTH)))
    story.say(
        f"Two rows are sampled, of these row {spaced(both.sampling.random_rows.tolist())} at random, with the number "
        f"{both.sampling.noise.item():.4f}, which follows from seed, sample and position alone. B ended before A, "
        "though it came later, and left the batch."
    )
    [alone] = llm.generate(OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    tokens = alone.outputs[0].token_ids
    story.say(f"Alone, A gets the tokens {escape(str(tokens))}; beside B it got {escape(str(beside_b))}.")


def show_errors(story: Story, llm: LLM) -> None:
    story.part("A mistake in a request")
    prompts: list[Any] = ["fine", "", [5] * 200, {"promt": "hello"}]
    try:
        llm.generate(prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    except ValueError as error:
        story.say(f"generate() of four prompts, three of them wrong, raises one ValueError:\n\n{escape(str(error))}")
    story.say(f"Requests queued: {len(llm.engine.requests)}, the good one included.")


def show_failure(story: Story, llm: LLM) -> None:
    story.part("A step that fails")
    engine = llm.engine
    engine.add_request("C", OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), stream=False)
    engine.step()
    [seq] = engine.scheduler.running
    story.say(f"After step 1, running:  {escape(repr(seq))}")

    def fails(*work: Any) -> Any:
        raise RuntimeError("the data plane is out of order")

    with replaced(engine.model_runner, "run", fails):
        try:
            engine.step()
        except RuntimeError as error:
            story.say(f"Step 2 raises RuntimeError: {error}")
    [seq] = engine.scheduler.waiting
    story.say(f"After step 2, waiting:  {escape(repr(seq))}")
    engine.scheduler.check_integrity()
    tap = Tap(engine)
    while engine.has_unfinished_requests():
        tap.step()
    story.say(
        "It keeps its tokens and has given back its blocks. check_integrity() finds nothing wrong. The next steps "
        "follow:"
    )
    story.show(steps_table(llm, tap.steps, 3))

    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    engine.add_request("D", OTHER_PROMPT, params, stream=False)
    with replaced(engine, "restart", lambda: None), replaced(engine.model_runner, "run", fails), suppress(RuntimeError):
        engine.step()
    engine._needs_restart = False  # otherwise the next change would begin with restart()
    [seq] = engine.scheduler.running
    story.say("Now an experiment: the same failure in the first step of D, with restart() taken out. Then E comes in.")
    story.say(f"After step 1, running:  {escape(repr(seq))}")
    engine.add_request("E", PROMPT, params, stream=False)
    tap = Tap(engine)
    tap.step()
    story.show(steps_table(llm, tap.steps, 2))
    story.say(
        "D counts as computed, so its chunk is empty, and the row before the end of an empty chunk is somebody else's: "
        f"D, {OTHER_PROMPT!r}, is given the token of E. No error, and a wrong answer."
    )
    llm.reset_prefix_cache()


def show_ctrl_c(story: Story, llm: LLM) -> None:
    story.part("Ctrl-C in the middle of a step")
    engine, run = llm.engine, llm.engine.model_runner.run
    num_steps, began = engine.stats.num_steps, []

    def interrupted_run(*work: Any) -> Any:
        began.append(work)
        if len(began) == 2:
            signal.raise_signal(signal.SIGINT)  # what Ctrl-C sends
        return run(*work)

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with replaced(engine.model_runner, "run", interrupted_run):
            llm.generate([PROMPT, OTHER_PROMPT], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    except KeyboardInterrupt:
        story.say(
            f"The signal came while step {len(began)} computed. Steps begun: {len(began)}, steps completed: "
            f"{engine.stats.num_steps - num_steps}. Then generate() raised KeyboardInterrupt."
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    engine.scheduler.check_integrity()
    free, num_blocks = len(engine.block_manager.free_blocks), len(engine.block_manager.blocks)
    story.say(f"Its requests are gone: {len(engine.requests)} left, {free} of {num_blocks} blocks free.")
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    story.say(f"And the engine answers the next one: {output.outputs[0].text!r}")


def show_control_plane_alone(story: Story) -> None:
    story.part("The control plane where there is no torch")
    story.say("A fresh Python process in which torch cannot be imported runs the real scheduler, with made-up tokens:")
    command = [sys.executable, "-c", CONTROL_PLANE_ALONE]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    story.say(escape(result.stdout.strip()))
    story.say(
        "Each line but the last is a step: the chunks (start, end, does it sample), and the sequence after it. A "
        "budget of 8 tokens cuts the prompt of 10 in two. The last line says that the model runner "
        "cannot even be imported."
    )
