"""Checks of chapter 2's exercise."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from chapters.expect import read_again
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine

GREEDY: dict[str, Any] = dict(temperature=0, ignore_eos=True)
STEP_SECTION = "One step, line by line"
ERRORS_SECTION = "When something goes wrong"


@contextmanager
def sampling(engine: LLMEngine, *steps: list[int]) -> Iterator[None]:
    """The model runner computes as always, and says that it sampled these tokens, step by step."""
    run, todo = engine.model_runner.run, iter(steps)

    def scripted(*work: Any) -> Any:
        token_ids, logprobs = run(*work)
        return next(todo)[: len(token_ids)], logprobs

    with replaced(engine.model_runner, "run", scripted):
        yield


@contextmanager
def failing(engine: LLMEngine, error: BaseException) -> Iterator[None]:
    def fails(*work: Any) -> Any:
        raise error

    with replaced(engine.model_runner, "run", fails):
        yield


def steps_until_done(engine: LLMEngine, limit: int = 20) -> list[list[RequestOutput]]:
    """What each step returned, until no request is left."""
    returned: list[list[RequestOutput]] = []
    while engine.has_unfinished_requests():
        if len(returned) == limit:
            raise Wrong(f"requests are left after {limit} steps, and there was not so much to do")
        returned.append(make_step(engine))
        if engine.has_unfinished_requests() and not engine.scheduler.has_unfinished():
            raise Wrong(
                "all sequences have ended, and the engine still has a request: ask request.finished after the stop "
                "strings, which may end a sequence, and call engine.forget for every request that is finished"
            )
    if engine.scheduler.has_unfinished():
        raise Wrong(
            "engine.forget was called for a request with a sequence that still runs: a request is finished when all "
            "its samples are"
        )
    return returned


def make_step(engine: LLMEngine) -> list[RequestOutput]:
    try:
        outputs = engine.step()
    except ValueError as error:
        if "zip()" in str(error):
            raise Wrong(
                "two lists that belong together have different lengths: logprobs has an entry for each chunk whose "
                "samples is True, and every sample's logprobs go through request.take_tokens",
                got=f"ValueError: {error}",
            ) from error
        raise
    if not isinstance(outputs, list):
        raise Wrong("a step returns a list", expected="list[RequestOutput]", got=repr(outputs))
    return outputs


def shown(returned: list[list[RequestOutput]]) -> list[list[str]]:
    return [[f"{o.request_id}{' finished' if o.finished else ''}" for o in outputs] for outputs in returned]


def same(hint: str, expected: Any, got: Any) -> None:
    if expected != got:
        raise Wrong(hint, expected=expected, got=got)


# -- engine_step ------------------------------------------------------------------------------------------------------


def nothing_to_do(step: Any, bench: Bench) -> None:
    """with no request, a step returns [] and counts nothing"""
    engine = bench.llm.engine
    num_steps = engine.stats.num_steps
    same("with nothing to do a step returns an empty list", [], step(engine))
    same("a step without chunks is not counted in num_steps", num_steps, engine.stats.num_steps)


def one_request(step: Any, bench: Bench) -> None:
    """one request of three tokens: three steps, an output from the last"""
    engine = bench.llm.engine
    engine.add_request("A", PROMPTS[0], SamplingParams(max_tokens=3, **GREEDY), stream=False)
    returned = steps_until_done(engine)
    same("what the steps returned", [[], [], ["A finished"]], shown(returned))
    [completion] = returned[-1][0].outputs
    same("tokens of the output", 3, len(completion.token_ids))
    same("why it ended", "length", completion.finish_reason)


@read_again("The second step, and company")
def batch(step: Any, bench: Bench) -> None:
    """three requests in one batch, which end at different steps"""
    engine = bench.llm.engine
    for name, prompt, max_tokens in zip("ABC", PROMPTS, (3, 1, 2), strict=True):
        engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, **GREEDY), stream=False)
    same("what the steps returned", [["B finished"], ["C finished"], ["A finished"]], shown(steps_until_done(engine)))


def counters(step: Any, bench: Bench) -> None:
    """engine.stats counts steps, tokens, requests and time"""
    engine = bench.llm.engine
    before = vars(engine.stats).copy()
    engine.add_request(None, [5, 6, 7, 8, 9], SamplingParams(max_tokens=3, **GREEDY), stream=False)
    engine.add_request(None, [9, 8, 7], SamplingParams(max_tokens=2, **GREEDY), stream=False)
    steps_until_done(engine)
    got = {name: value - before[name] for name, value in vars(engine.stats).items()}
    if not 0 < got.pop("step_time_s") < 60:
        raise Wrong("step_time_s grows by the seconds of each step")
    same(
        "the counters of two requests with 5 and 3 prompt tokens, 3 and 2 output tokens; note_scheduled, called once "
        "and before update(), counts the prefill and decode tokens",
        {
            "num_steps": 3,
            "num_prefill_tokens": 8,
            "num_decode_tokens": 3,
            "num_output_tokens": 5,
            "num_finished_requests": 2,
            "num_guessed_tokens": 0,
            "num_accepted_tokens": 0,
        },
        got,
    )


@read_again("From a prompt to a queue")
def two_samples(step: Any, bench: Bench) -> None:
    """n=2: one output, when the last sample has ended"""
    engine = bench.llm.engine
    params = SamplingParams(n=2, max_tokens=3, stop_token_ids=[7], **GREEDY)
    engine.add_request("A", PROMPTS[0], params, stream=False)
    with sampling(engine, [7, 5], [5], [6]):
        returned = steps_until_done(engine)
    same(
        "sample 0 ends in step 1, sample 1 in step 3: a request is finished when all its samples are",
        [[], [], ["A finished"]],
        shown(returned),
    )
    ids = [completion.token_ids for completion in returned[-1][0].outputs]
    same("tokens of the two samples", [[7], [5, 5, 6]], ids)

    engine.add_request("B", PROMPTS[0], SamplingParams(n=2, max_tokens=1, **GREEDY), stream=False)
    try:
        returned = steps_until_done(engine)
    except KeyError as error:
        raise Wrong("two samples of a request end in one step: each request is forgotten once") from error
    same("two samples of a request that end in one step make one output", [["B finished"]], shown(returned))


def logprobs(step: Any, bench: Bench) -> None:
    """logprobs reach the output, one dict for each token"""
    engine = bench.llm.engine
    engine.add_request(None, PROMPTS[0], SamplingParams(max_tokens=2, logprobs=2, **GREEDY), stream=False)
    completion = steps_until_done(engine)[-1][0].outputs[0]
    found = completion.logprobs or []
    same("dicts of logprobs, one for each token", len(completion.token_ids), len(found))
    for token_id, entries in zip(completion.token_ids, found, strict=True):
        if token_id not in entries:
            raise Wrong(
                "take_tokens comes after the update: logprobs are of the newest token",
                expected=token_id,
                got=sorted(entries),
            )


def streamed(step: Any, bench: Bench) -> None:
    """a streamed request has an output after every token, others only at the end"""
    engine = bench.llm.engine
    engine.add_request("quiet", PROMPTS[0], SamplingParams(max_tokens=3, **GREEDY), stream=False)
    engine.add_request("streamed", PROMPTS[1], SamplingParams(max_tokens=4, **GREEDY))
    returned = steps_until_done(engine)
    expected = [["streamed"], ["streamed"], ["quiet finished", "streamed"], ["streamed finished"]]
    same("what the steps returned", expected, shown([sorted(o, key=lambda x: x.request_id) for o in returned]))
    lengths = [len(o.outputs[0].token_ids) for outputs in returned for o in outputs if o.request_id == "streamed"]
    same("tokens in the outputs of the streamed request", [1, 2, 3, 4], lengths)


def chunked_prompt(step: Any, bench: Bench) -> None:
    """a step that computes only a part of a prompt samples nothing and returns nothing"""
    engine = bench.llm.engine
    engine.add_request("A", list(range(5, 15)), SamplingParams(max_tokens=2, **GREEDY))
    num_output_tokens = engine.stats.num_output_tokens
    with replaced(engine.scheduler, "max_num_batched_tokens", 4):
        returned = steps_until_done(engine)
    same(
        "a prompt of 10 tokens, 4 in a step: only chunks whose samples is True give a token, and only requests that "
        "got one have an output",
        [[], [], ["A"], ["A finished"]],
        shown(returned),
    )
    same("num_output_tokens counts sampled tokens", 2, engine.stats.num_output_tokens - num_output_tokens)


def stop_string(step: Any, bench: Bench) -> None:
    """a request ends in the step in which its stop string appears"""
    engine = bench.llm.engine
    token_ids = engine.tokenizer(" one two three four", add_special_tokens=False).input_ids
    engine.add_request("A", PROMPTS[0], SamplingParams(max_tokens=100, stop="two", **GREEDY), stream=False)
    with sampling(engine, *([token_id] for token_id in token_ids)):
        try:
            returned = steps_until_done(engine, limit=len(token_ids))
        except StopIteration:
            returned = []
    if not returned or len(returned) == len(token_ids):
        raise Wrong(
            "the request went on after its stop string: take_tokens returns it, and then scheduler.finish has to end "
            "the sequence"
        )
    completion = returned[-1][0].outputs[0]
    same("finish_reason and stop_reason", ("stop", "two"), (completion.finish_reason, completion.stop_reason))
    same("the text before the stop string", "one", completion.text.strip())


def assert_rolled_back(engine: LLMEngine, error: BaseException, num_waiting: int) -> None:
    name = type(error).__name__
    num_steps, caught = engine.stats.num_steps, None
    try:
        engine.step()
    except BaseException as raised:
        caught = raised
    if not isinstance(caught, type(error)):
        raise Wrong(f"{name} is raised inside the step and must reach its caller", expected=name, got=repr(caught))
    scheduler = engine.scheduler
    if scheduler.running:
        raise Wrong(
            f"after {name} the sequences of the step still run, as if it had been computed: call scheduler.roll_back "
            "(KeyboardInterrupt is a BaseException and no Exception)",
            expected=f"running: 0, waiting: {num_waiting}",
            got=f"running: {len(scheduler.running)}, waiting: {len(scheduler.waiting)}",
        )
    same("all sequences of a failed step wait again", num_waiting, len(scheduler.waiting))
    same("a step that failed is not counted in num_steps", num_steps, engine.stats.num_steps)
    try:
        scheduler.check_integrity()
    except AssertionError as broken:
        raise Wrong(f"the scheduler is not sane after {name}: {broken}") from broken


@read_again(ERRORS_SECTION)
def failed_steps(step: Any, bench: Bench) -> None:
    """a model runner that fails: the step is rolled back, and the next ones give the same tokens"""
    engine = bench.llm.engine
    params = SamplingParams(max_tokens=4, **GREEDY)

    def add() -> None:
        for prompt in PROMPTS[:2]:
            engine.add_request(None, prompt, params, stream=False)

    def tokens(returned: list[list[RequestOutput]]) -> list[list[int]]:
        return sorted(output.outputs[0].token_ids for outputs in returned for output in outputs)

    add()
    expected = tokens(steps_until_done(engine))
    bench.llm.reset_prefix_cache()
    add()
    with failing(engine, RuntimeError("out of memory")):  # in the prefill
        assert_rolled_back(engine, RuntimeError(), num_waiting=2)
    make_step(engine)
    with failing(engine, RuntimeError("out of memory")):  # in a decode
        assert_rolled_back(engine, RuntimeError(), num_waiting=2)
    same("tokens of requests that lived through two failed steps", expected, tokens(steps_until_done(engine)))


@read_again(ERRORS_SECTION)
def failed_schedule(step: Any, bench: Bench) -> None:
    """schedule() itself fails: rolled back as well"""
    engine = bench.llm.engine
    engine.add_request(None, PROMPTS[0], SamplingParams(max_tokens=2, **GREEDY), stream=False)

    def fails(seq: Any) -> Any:
        raise RuntimeError("in the middle of schedule()")

    with replaced(engine.block_manager, "register_prefix", fails):
        assert_rolled_back(engine, RuntimeError(), num_waiting=1)
    steps_until_done(engine)


@read_again(ERRORS_SECTION)
def ctrl_c(step: Any, bench: Bench) -> None:
    """Ctrl-C, or a runner that returns too few tokens: rolled back as well"""
    engine = bench.llm.engine
    engine.add_request(None, PROMPTS[0], SamplingParams(max_tokens=2, **GREEDY), stream=False)
    with failing(engine, KeyboardInterrupt()):
        assert_rolled_back(engine, KeyboardInterrupt(), num_waiting=1)
    with replaced(engine.model_runner, "run", lambda *work: ([], [])):
        assert_rolled_back(engine, AssertionError(), num_waiting=1)
    steps_until_done(engine)


def same_tokens(step: Any, bench: Bench) -> None:
    """generate() with your step gives the tokens of ours"""
    bench.same_tokens()


def use_step(function: Any) -> AbstractContextManager:
    return replaced(LLMEngine, "step", function)


# -- stream_text ------------------------------------------------------------------------------------------------------


def text_of(bench: Bench, prompt: str, params: SamplingParams) -> str:
    return bench.llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def assert_gone(engine: LLMEngine, when: str) -> None:
    if engine.has_unfinished_requests():
        raise Wrong(
            f"{when}, the engine still has the request: abort it in a finally block",
            expected="0 requests",
            got=f"{len(engine.requests)} requests",
        )
    engine.scheduler.check_integrity()


@contextmanager
def writing(engine: LLMEngine, text: str) -> Iterator[int]:
    """The model writes this text, with EOS after it. Gives the number of its tokens."""
    token_ids = engine.tokenizer(text, add_special_tokens=False).input_ids
    with sampling(engine, *([token_id] for token_id in token_ids)):
        yield len(token_ids)


@read_again(STEP_SECTION)
def joined(stream_text: Any, bench: Bench) -> None:
    """the pieces joined are the text, and each piece is new text"""
    engine = bench.llm.engine
    with writing(engine, " one two three four five") as num_tokens:
        params = SamplingParams(max_tokens=num_tokens, **GREEDY)
        pieces = list(stream_text(bench.llm, PROMPTS[0], params))
    if "" in pieces:
        raise Wrong("a piece is never the empty string", got=pieces)
    same(
        "the pieces joined; a piece is only what is new since the last one",
        " one two three four five".strip(),
        "".join(pieces).strip(),
    )
    if len(pieces) < 2:
        raise Wrong("the text comes in pieces, as it is generated", got=pieces)
    assert_gone(engine, "at the end")


def at_once(stream_text: Any, bench: Bench) -> None:
    """a piece is handed out before the next step is made"""
    engine = bench.llm.engine
    num_steps = engine.stats.num_steps
    with writing(engine, " one two three four five") as num_tokens:
        pieces = stream_text(bench.llm, PROMPTS[0], SamplingParams(max_tokens=num_tokens, **GREEDY))
        next(pieces)
        made = engine.stats.num_steps - num_steps
        if made == num_tokens:
            raise Wrong(
                "the first piece came when the whole text was there: hand each out as soon as a step gave it",
                expected=f"fewer than {num_tokens} steps",
                got=f"{made} steps",
            )
        for _ in pieces:
            pass


@read_again(STEP_SECTION)
def whole_characters(stream_text: Any, bench: Bench) -> None:
    """characters of several tokens come whole, and a stop string never shows"""
    engine = bench.llm.engine
    with writing(engine, "é 😀 ok") as num_tokens:
        pieces = list(stream_text(bench.llm, PROMPTS[0], SamplingParams(max_tokens=num_tokens, **GREEDY)))
    if "\ufffd" in "".join(pieces):
        raise Wrong(
            "half a character was handed out: a token is not a piece of text, take the difference of two texts",
            expected="é 😀 ok",
            got=pieces,
        )
    if "" in pieces:
        raise Wrong("a piece is never the empty string: half a character gives no piece yet", got=pieces)
    with writing(engine, " one two three") as num_tokens:
        params = SamplingParams(max_tokens=num_tokens, stop="two", **GREEDY)
        text = "".join(stream_text(bench.llm, PROMPTS[0], params))
    same("the text before the stop string 'two'", "one", text.strip())


def bad_prompt(stream_text: Any, bench: Bench) -> None:
    """a bad prompt is a ValueError of the call, and nothing is queued before the first next()"""
    engine = bench.llm.engine
    try:
        stream_text(bench.llm, [], SamplingParams())
    except ValueError:
        pass
    else:
        raise Wrong(
            "no ValueError from the call for an empty prompt: a function with yield in it runs nothing before the "
            "first next(), so check in an ordinary function that returns a generator"
        )
    stream_text(bench.llm, PROMPTS[0], SamplingParams())  # and nobody reads it
    if engine.has_unfinished_requests():
        raise Wrong(
            "an iterator that nobody reads has queued its request, and nothing will ever abort it: queue at the first "
            "next()",
            expected="0 requests",
            got=f"{len(engine.requests)} requests",
        )


def early_end(stream_text: Any, bench: Bench) -> None:
    """a caller that stops early, or a step that fails, leaves nothing behind"""
    engine = bench.llm.engine
    params = SamplingParams(max_tokens=50, **GREEDY)
    with writing(engine, " one two three four five"):
        pieces = stream_text(bench.llm, PROMPTS[0], params)
        next(pieces)
        pieces.close()  # what happens when a for loop is left
    assert_gone(engine, "after the caller stopped early")
    with failing(engine, RuntimeError("out of memory")):
        try:
            list(stream_text(bench.llm, PROMPTS[0], params))
        except RuntimeError:
            pass
        else:
            raise Wrong("an error of a step must reach the reader of the stream", expected="RuntimeError")
    assert_gone(engine, "after a step that failed")


@read_again("The second step, and company")
def with_others(stream_text: Any, bench: Bench) -> None:
    """another request in the engine is neither shown nor disturbed"""
    engine = bench.llm.engine
    params = SamplingParams(max_tokens=6, **GREEDY)
    expected = text_of(bench, PROMPTS[0], params)
    engine.add_request("other", PROMPTS[1], SamplingParams(max_tokens=60, **GREEDY))
    got = "".join(stream_text(bench.llm, PROMPTS[0], params))
    still_there = "other" in engine.requests
    engine.abort_request("other")
    same("the text of one request, beside another: take the outputs with your request_id only", expected, got)
    if not still_there:
        raise Wrong("the other request was still running, and is gone", expected="other", got="no request")


@read_again(STEP_SECTION)
def same_text(stream_text: Any, bench: Bench) -> None:
    """for every prompt, the text that generate() gives"""
    params = SamplingParams(max_tokens=12, **GREEDY)
    for prompt in PROMPTS:
        expected = text_of(bench, prompt, params)
        same(f"the text after {prompt!r}", expected, "".join(stream_text(bench.llm, prompt, params)))


def use_stream(function: Any) -> AbstractContextManager:
    return nullcontext()  # it stands on the engine, not in it


TASKS = [
    Task(
        "engine_step",
        STEP_SECTION,
        use_step,
        (
            nothing_to_do,
            one_request,
            batch,
            counters,
            two_samples,
            logprobs,
            streamed,
            chunked_prompt,
            stop_string,
            failed_steps,
            failed_schedule,
            ctrl_c,
            same_tokens,
        ),
    ),
    Task(
        "stream_text",
        ERRORS_SECTION,
        use_stream,
        (joined, at_once, whole_characters, bad_prompt, early_end, with_others, same_text),
    ),
]
