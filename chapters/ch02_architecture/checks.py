"""Checks of chapter 2's exercise."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from chapters.expect import ensure, expect, expect_sane, read_again
from chapters.grading import PROMPTS, Bench, Task, Wrong, answers_as_before
from chapters.patching import replaced
from nanovllm import RequestOutput, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.engine import LLMEngine
from nanovllm.request import Request
from nanovllm.worker.model_runner import ModelRunnerOutput

STEP_SECTION = "One step, line by line"
ERRORS_SECTION = "When something goes wrong"
COMPANY_SECTION = "The second step, and company"


@contextmanager
def use_step(function: Callable[[LLMEngine], list[RequestOutput]]) -> Iterator[None]:
    """The engine makes its steps with this function, which has to do by itself what update and make_outputs do."""

    def step(engine: LLMEngine) -> list[RequestOutput]:
        engine.recover()  # as ours does: the step before is over
        return function(engine)

    def not_yours(name: str) -> Callable[..., Any]:
        def refuses(*args: Any, **named: Any) -> Any:
            raise Wrong(f"engine_step calls engine.{name}(): points 5 and 6 are what you write yourself")

        return refuses

    with ExitStack() as stack:
        stack.enter_context(replaced(LLMEngine, "step", step))
        for name in ("update", "make_outputs"):
            stack.enter_context(replaced(LLMEngine, name, not_yours(name)))
        yield


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, **params)


def add(bench: Bench, name: str | None, prompt: Any, max_tokens: int, *, stream: bool = False, **params: Any) -> None:
    bench.llm.engine.add_request(name, prompt, greedy(max_tokens, **params), stream=stream)


@contextmanager
def sampling(engine: LLMEngine, *steps: list[int]) -> Iterator[None]:
    """The model runner computes as always, and says that it sampled these tokens, step by step."""
    run, todo = engine.model_runner.run, iter(steps)

    def scripted(output: SchedulerOutput) -> ModelRunnerOutput:
        result = run(output)
        rows = iter(next(todo))
        return replace(result, sampled_token_ids=[[next(rows) for _ in found] for found in result.sampled_token_ids])

    with replaced(engine.model_runner, "run", scripted):
        yield


@contextmanager
def writing(engine: LLMEngine, text: str) -> Iterator[int]:
    """The model writes this text. Gives the number of its tokens."""
    token_ids = engine.tokenizer(text, add_special_tokens=False).input_ids
    with sampling(engine, *([token_id] for token_id in token_ids)):
        yield len(token_ids)


def failing(engine: LLMEngine, error: BaseException) -> AbstractContextManager:
    def fails(output: SchedulerOutput) -> ModelRunnerOutput:
        raise error

    return replaced(engine.model_runner, "run", fails)


def steps_until_done(engine: LLMEngine) -> list[list[RequestOutput]]:
    """What each step returned, until no request is left."""
    returned: list[list[RequestOutput]] = []
    while engine.has_unfinished_requests():
        ensure(len(returned) < 20, "requests are left after 20 steps, although there was less to do than that")
        returned.append(make_step(engine))
        hint = (
            "all sequences have ended, but the engine still has a request: after the update check request.finished, "
            "and delete every request that is finished from engine.requests"
        )
        ensure(engine.scheduler.has_unfinished() or not engine.has_unfinished_requests(), hint)
    return returned


def make_step(engine: LLMEngine) -> list[RequestOutput]:
    try:
        outputs = engine.step()
    except ValueError as error:
        if "zip()" not in str(error):
            raise
        hint = (
            "two lists that belong together have different lengths: result.logprobs has an entry for each chunk, and "
            "the entry of each chunk that samples goes through request.add_tokens"
        )
        raise Wrong(hint, got=f"ValueError: {error}") from error
    ensure(isinstance(outputs, list), "a step returns a list", expected="list[RequestOutput]", got=repr(outputs))
    return outputs


def expect_steps(
    bench: Bench, expected: list[list[str]], hint: str = "what the steps returned"
) -> list[list[RequestOutput]]:
    """Steps until all is done, and who must have an output in each."""
    returned = steps_until_done(bench.llm.engine)
    got = [[f"{o.request_id}{' finished' * o.finished}" for o in outputs] for outputs in returned]
    expect(expected, got, hint)
    return returned


# -- engine_step ------------------------------------------------------------------------------------------------------


def nothing_to_do(step: Any, bench: Bench) -> None:
    """with no request, a step returns [] and counts nothing"""
    engine = bench.llm.engine
    num_steps = engine.stats.num_steps
    expect([], make_step(engine), "with nothing to do a step returns an empty list")
    expect(num_steps, engine.stats.num_steps, "a step without chunks is not counted in num_steps")


def one_request(step: Any, bench: Bench) -> None:
    """one request of three tokens: three steps, an output from the last"""
    add(bench, "A", PROMPTS[0], 3)
    [completion] = expect_steps(bench, [[], [], ["A finished"]])[-1][0].outputs
    expect((3, "length"), (len(completion.token_ids), completion.finish_reason), "its tokens, and why it ended")


@read_again(COMPANY_SECTION)
def batch(step: Any, bench: Bench) -> None:
    """three requests in one batch, which end at different steps"""
    for name, prompt, max_tokens in zip("ABC", PROMPTS, (3, 1, 2), strict=True):
        add(bench, name, prompt, max_tokens)
    expect_steps(bench, [["B finished"], ["C finished"], ["A finished"]])


def counters(step: Any, bench: Bench) -> None:
    """engine.stats counts steps, tokens, requests and time"""
    stats = bench.llm.engine.stats
    before = vars(stats).copy()
    add(bench, None, [5, 6, 7, 8, 9], 3)
    add(bench, None, [9, 8, 7], 2)
    steps_until_done(bench.llm.engine)
    got = {name: value - before[name] for name, value in vars(stats).items()}
    ensure(0 < got.pop("step_time_s") < 60, "step_time_s grows by the seconds of each step")
    counts = dict(num_prefill_tokens=8, num_decode_tokens=3, num_output_tokens=5, num_finished_requests=2)
    expect(
        dict.fromkeys(got, 0) | counts | {"num_steps": 3},
        got,
        "the counters of two requests with 5 and 3 prompt tokens, 3 and 2 output tokens; engine.stats.count_step "
        "counts all of them: call it once in a step",
    )


@read_again("From a prompt to a queue")
def two_samples(step: Any, bench: Bench) -> None:
    """n=2: one output, when the last sample has ended"""
    add(bench, "A", PROMPTS[0], 3, n=2, stop_token_ids=[7])
    hint = "sample 0 ends in step 1, sample 1 in step 3: a request is finished when all its samples are"
    with sampling(bench.llm.engine, [7, 5], [5], [6]):
        returned = expect_steps(bench, [[], [], ["A finished"]], hint)
    ids = [completion.token_ids for completion in returned[-1][0].outputs]
    expect([[7], [5, 5, 6]], ids, "tokens of the two samples")

    add(bench, "B", PROMPTS[0], 1, n=2)
    try:
        expect_steps(bench, [["B finished"]], "two samples of a request that end in one step make one output")
    except KeyError as error:
        raise Wrong("two samples of a request end in one step: each request is deleted once") from error


def logprobs(step: Any, bench: Bench) -> None:
    """logprobs reach the output, one dict for each token"""
    add(bench, None, PROMPTS[0], 2, logprobs=2)
    completion = steps_until_done(bench.llm.engine)[-1][0].outputs[0]
    found = completion.logprobs or []
    expect(len(completion.token_ids), len(found), "dicts of logprobs, one for each token")
    for token_id, entries in zip(completion.token_ids, found, strict=True):
        hint = "add_tokens comes after the update: logprobs are those of the newest token"
        ensure(token_id in entries, hint, expected=token_id, got=sorted(entries))


def streamed(step: Any, bench: Bench) -> None:
    """a streamed request has an output after every token, others only at the end"""
    stats = bench.llm.engine.stats
    before = stats.num_finished_requests
    add(bench, "quiet", PROMPTS[0], 3)
    add(bench, "streamed", PROMPTS[1], 4, stream=True)
    expected = [["streamed"], ["streamed"], ["quiet finished", "streamed"], ["streamed finished"]]
    returned = expect_steps(bench, expected)
    lengths = [len(o.outputs[0].token_ids) for outputs in returned for o in outputs if o.request_id == "streamed"]
    expect([1, 2, 3, 4], lengths, "tokens in the outputs of the streamed request")
    hint = "num_finished_requests: an output of a request that goes on is no finished request"
    expect(2, stats.num_finished_requests - before, hint)


def chunked_prompt(step: Any, bench: Bench) -> None:
    """a step that computes only a part of a prompt samples nothing and returns nothing"""
    engine = bench.llm.engine
    add(bench, "A", list(range(5, 15)), 2, stream=True)
    num_output_tokens = engine.stats.num_output_tokens
    hint = (
        "a prompt of 10 tokens, 4 in a step: only chunks whose reaches_end is True give a token, and only requests "
        "that got one have an output"
    )
    with replaced(engine.scheduler, "max_num_batched_tokens", 4):
        expect_steps(bench, [[], [], ["A"], ["A finished"]], hint)
    expect(2, engine.stats.num_output_tokens - num_output_tokens, "num_output_tokens counts sampled tokens")


def stop_string(step: Any, bench: Bench) -> None:
    """a request ends in the step in which its stop string appears"""
    add(bench, "A", PROMPTS[0], 100, stop="two")
    with writing(bench.llm.engine, " one two three four") as num_tokens:
        try:
            returned = steps_until_done(bench.llm.engine)
        except StopIteration:
            returned = []
    hint = "the request went on after its stop string: scheduler.update has ended the sequence; check request.finished"
    ensure(0 < len(returned) < num_tokens, hint)
    completion = returned[-1][0].outputs[0]
    expect(("stop", "two"), (completion.finish_reason, completion.stop_reason), "finish_reason and stop_reason")
    expect("one", completion.text.strip(), "the text before the stop string")


def expect_restarted(engine: LLMEngine, error: BaseException, num_waiting: int) -> None:
    name, scheduler = type(error).__name__, engine.scheduler
    num_steps, caught = engine.stats.num_steps, None
    try:
        engine.step()
    except BaseException as raised:
        caught = raised
    hint = f"{name} is raised inside the step and must reach its caller"
    ensure(isinstance(caught, type(error)), hint, expected=name, got=repr(caught))
    hint = (
        f"after {name} the sequences of the step are still running, as if it had been computed: call engine.restart() "
        "(KeyboardInterrupt is a BaseException and not an Exception)"
    )
    if not scheduler.running:
        hint = (
            f"after {name} a sequence is missing that the failed step had ended: engine.restart() takes back the "
            "tokens of the step, so that it goes on"
        )
    counts = f"running: {len(scheduler.running)}, waiting: {len(scheduler.waiting)}"
    expect(f"running: 0, waiting: {num_waiting}", counts, hint)
    expect(num_steps, engine.stats.num_steps, "a step that failed is not counted in num_steps")
    expect_sane(scheduler, f"after {name} ")


def answers_of(engine: LLMEngine) -> list[list[int]]:
    """Steps until all is done, and the tokens of all answers."""
    return sorted(output.outputs[0].token_ids for outputs in steps_until_done(engine) for output in outputs)


@read_again(ERRORS_SECTION)
def failed_steps(step: Any, bench: Bench) -> None:
    """a model runner that fails: everything is rebuilt, and the next steps give the same tokens"""
    engine = bench.llm.engine

    def fill() -> None:
        for prompt in PROMPTS[:2]:
            add(bench, None, prompt, 4)

    fill()
    expected = answers_of(engine)
    bench.llm.reset_prefix_cache()
    fill()
    with failing(engine, RuntimeError("out of memory")):  # in the prefill
        expect_restarted(engine, RuntimeError(), num_waiting=2)
    make_step(engine)
    with failing(engine, RuntimeError("out of memory")):  # in a decode
        expect_restarted(engine, RuntimeError(), num_waiting=2)
    expect(expected, answers_of(engine), "tokens of requests that lived through two failed steps")


@read_again(ERRORS_SECTION)
def failed_schedule(step: Any, bench: Bench) -> None:
    """schedule() itself fails: everything is rebuilt as well"""
    engine = bench.llm.engine
    add(bench, None, PROMPTS[0], 2)

    def fails(seq: Any) -> Any:
        raise RuntimeError("in the middle of schedule()")

    with replaced(engine.block_manager, "register_prefix", fails):
        expect_restarted(engine, RuntimeError(), num_waiting=1)
    steps_until_done(engine)


@read_again(ERRORS_SECTION)
def failed_late(step: Any, bench: Bench) -> None:
    """an error after the update: the tokens of the step are taken back, including those that ended a sequence"""
    engine = bench.llm.engine
    for prompt in PROMPTS[:2]:
        add(bench, None, prompt, 3)
    expected = answers_of(engine)
    for method in ("add_tokens", "output"):
        for prompt in PROMPTS[:2]:
            add(bench, None, prompt, 3)
        for _ in range(2):
            make_step(engine)
        with failing_at_second_call(method):  # the step in which both end
            expect_restarted(engine, RuntimeError(), num_waiting=2)
        hint = f"a step failed in request.{method}, after its tokens had been appended: restart() takes them back"
        expect(expected, answers_of(engine), hint)


def failing_at_second_call(method: str) -> AbstractContextManager:
    ours, calls = getattr(Request, method), []

    def fails(*args: Any, **named: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError(f"in Request.{method}")
        return ours(*args, **named)

    return replaced(Request, method, fails)


@read_again(ERRORS_SECTION)
def ctrl_c(step: Any, bench: Bench) -> None:
    """Ctrl-C, or a runner that returns too few tokens: everything is rebuilt as well"""
    engine = bench.llm.engine
    add(bench, None, PROMPTS[0], 2)
    with failing(engine, KeyboardInterrupt()):
        expect_restarted(engine, KeyboardInterrupt(), num_waiting=1)
    with replaced(engine.model_runner, "run", lambda output: ModelRunnerOutput()):
        expect_restarted(engine, ValueError(), num_waiting=1)
    steps_until_done(engine)


# -- stream_text ------------------------------------------------------------------------------------------------------


def expect_gone(engine: LLMEngine, when: str, why: str = "abort it in a finally block") -> None:
    expect("0 requests", f"{len(engine.requests)} requests", f"{when}, the engine still has the request: {why}")
    expect_sane(engine.scheduler, f"{when} ")


def pieces_of(stream_text: Any, bench: Bench, text: str, **params: Any) -> list[str]:
    """What is handed out while the model writes this text."""
    with writing(bench.llm.engine, text) as num_tokens:
        pieces = list(stream_text(bench.llm, PROMPTS[0], greedy(num_tokens, **params)))
    hint = "half a character was handed out: a token is not a piece of text; take the difference between two texts"
    ensure("\ufffd" not in "".join(pieces), hint, expected=text, got=pieces)
    ensure("" not in pieces, "a piece is never the empty string: half a character gives no piece yet", got=pieces)
    return pieces


@read_again(STEP_SECTION)
def joined(stream_text: Any, bench: Bench) -> None:
    """the pieces joined are the text, and each piece is new text"""
    pieces = pieces_of(stream_text, bench, " one two three four five")
    hint = "the pieces joined; a piece is only what is new since the last one"
    expect("one two three four five", "".join(pieces).strip(), hint)
    ensure(len(pieces) > 1, "the text comes in pieces, as it is generated", got=pieces)
    expect_gone(bench.llm.engine, "at the end")


def at_once(stream_text: Any, bench: Bench) -> None:
    """a piece is handed out before the next step is made"""
    stats = bench.llm.engine.stats
    with writing(bench.llm.engine, " one two three four five") as num_tokens:
        num_steps = stats.num_steps
        outputs: Any = bench.llm.stream(PROMPTS[0], greedy(num_tokens))
        next(output for output in outputs if output.outputs[0].text)
        needed = stats.num_steps - num_steps
        outputs.close()
    with writing(bench.llm.engine, " one two three four five") as num_tokens:
        pieces = stream_text(bench.llm, PROMPTS[0], greedy(num_tokens))
        num_steps = stats.num_steps
        next(pieces)
        made = stats.num_steps - num_steps
        late = "only when the whole text was there" if made >= num_tokens else "a step late"
        hint = f"the first piece came {late}: hand each out as soon as a step gives it"
        ensure(made <= needed, hint, expected=f"{needed} steps", got=f"{made} steps")
        for _ in pieces:
            pass


@read_again(STEP_SECTION)
def whole_characters(stream_text: Any, bench: Bench) -> None:
    """characters of several tokens come whole, and a stop string never shows"""
    pieces_of(stream_text, bench, "é你好 ok")  # the first token of 你 alone gives no text
    text = "".join(pieces_of(stream_text, bench, " one two three", stop="two"))
    expect("one", text.strip(), "the text before the stop string 'two'")


def bad_prompt(stream_text: Any, bench: Bench) -> None:
    """a bad prompt is a ValueError of the call, and nothing is queued before the first next()"""
    try:
        stream_text(bench.llm, [], SamplingParams())
    except ValueError:
        pass
    else:
        raise Wrong(
            "no ValueError from the call for an empty prompt: a function with yield in it runs nothing before the "
            "first next(), so check in an ordinary function that returns a generator"
        )
    stream_text(bench.llm, PROMPTS[0], SamplingParams())
    expect_gone(bench.llm.engine, "for an iterator that nobody reads", "queue it at the first next()")


def early_end(stream_text: Any, bench: Bench) -> None:
    """a caller that stops early, or a step that fails, leaves nothing behind"""
    engine = bench.llm.engine
    with writing(engine, " one two three four five"):
        pieces = stream_text(bench.llm, PROMPTS[0], greedy(50))
        next(pieces)
        pieces.close()  # what happens when a for loop is left
    expect_gone(engine, "after the caller stopped early")
    with failing(engine, RuntimeError("out of memory")):
        try:
            list(stream_text(bench.llm, PROMPTS[0], greedy(50)))
        except RuntimeError:
            pass
        else:
            raise Wrong("an error of a step must reach the reader of the stream", expected="RuntimeError")
    expect_gone(engine, "after a step that failed")


def text_of(bench: Bench, prompt: str, params: SamplingParams) -> str:
    return bench.llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


@read_again(COMPANY_SECTION)
def with_others(stream_text: Any, bench: Bench) -> None:
    """another request in the engine is neither shown nor disturbed"""
    engine = bench.llm.engine
    expected = text_of(bench, PROMPTS[0], greedy(6))
    add(bench, "other", PROMPTS[1], 60, stream=True)
    got = "".join(stream_text(bench.llm, PROMPTS[0], greedy(6)))
    still_there = list(engine.requests)
    engine.abort_request("other")
    expect(expected, got, "the text of one request beside another: take the outputs with your request_id only")
    expect(["other"], still_there, "the other request should still be running, but it is gone")


@read_again(STEP_SECTION)
def same_text(stream_text: Any, bench: Bench) -> None:
    """for every prompt, the text that generate() gives"""
    for prompt in PROMPTS:
        text = "".join(stream_text(bench.llm, prompt, greedy(12)))
        expect(text_of(bench, prompt, greedy(12)), text, f"the text after {prompt!r}")


STEPS = (nothing_to_do, one_request, batch, counters, two_samples, logprobs, streamed, chunked_prompt, stop_string)
ERRORS = (failed_steps, failed_schedule, failed_late, ctrl_c)
STREAMS = (joined, at_once, whole_characters, bad_prompt, early_end, with_others, same_text)
TASKS = [
    Task("engine_step", STEP_SECTION, use_step, (*STEPS, *ERRORS, answers_as_before)),
    Task("stream_text", ERRORS_SECTION, nullcontext, STREAMS),
]
