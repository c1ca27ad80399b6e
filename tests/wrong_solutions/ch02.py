"""Plausible wrong solutions of chapter 2, each with a piece of the hint that must catch it."""

import time
from collections.abc import Iterator
from typing import Any

from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import SequenceStatus
from nanovllm.engine import LLMEngine


def _compute(engine: LLMEngine, output: Any) -> tuple:
    engine.note_scheduled(output, time.perf_counter())
    token_ids, logprobs = engine.model_runner.run(output)
    sampled = [chunk.seq for chunk in output.chunks if chunk.samples]
    engine.scheduler.update(output, token_ids)
    return sampled, logprobs


def _take(engine: LLMEngine, sampled: list, logprobs: list) -> dict:
    progressed = {}
    for seq, entry in zip(sampled, logprobs, strict=True):
        request = engine.request_of_seq[seq.seq_id]
        progressed[request.request_id] = request
        if (stop := request.take_token(seq, entry, time.perf_counter())) is not None:
            engine.scheduler.finish(seq, "stop", stop)
    return progressed


def _outputs(engine: LLMEngine, requests: Any, num_sampled: int, stream: bool = True) -> list:
    outputs = []
    for request in requests:
        if request.finished:
            engine.stats.num_finished_requests += 1
            outputs.append(engine.finish_request(request))
        elif request.stream and stream:
            outputs.append(request.output())
    engine.stats.num_steps += 1
    engine.stats.num_output_tokens += num_sampled
    engine.stats.step_time_s += 1e-3
    return outputs


def _safely(engine: LLMEngine) -> tuple | None:
    output = engine.scheduler.schedule()
    if not output.chunks:
        return None
    try:
        return _compute(engine, output)
    except BaseException:
        engine.scheduler.roll_back(output)
        raise


def counts_idle_steps(engine):
    done = _safely(engine)
    if done is None:
        engine.stats.num_steps += 1
        return []
    return _outputs(engine, _take(engine, *done).values(), len(done[0]))


def asks_samples_after_update(engine):
    output = engine.scheduler.schedule()
    if not output.chunks:
        return []
    try:
        _, logprobs = _compute(engine, output)
    except BaseException:
        engine.scheduler.roll_back(output)
        raise
    sampled = [chunk.seq for chunk in output.chunks if chunk.samples]
    return _outputs(engine, _take(engine, sampled, logprobs).values(), len(sampled))


def never_finishes(engine):
    done = _safely(engine)
    if done is None:
        return []
    requests = [request for request in _take(engine, *done).values() if not request.finished]
    return _outputs(engine, requests, len(done[0]))


def returns_one_output(engine):
    done = _safely(engine)
    if done is None:
        return []
    outputs = _outputs(engine, _take(engine, *done).values(), len(done[0]))
    return outputs[0] if outputs else []


def notes_after_update(engine):
    output = engine.scheduler.schedule()
    if not output.chunks:
        return []
    token_ids, logprobs = engine.model_runner.run(output)
    sampled = [chunk.seq for chunk in output.chunks if chunk.samples]
    engine.scheduler.update(output, token_ids)
    engine.note_scheduled(output, time.perf_counter())
    return _outputs(engine, _take(engine, sampled, logprobs).values(), len(sampled))


def forgets_the_counters(engine):
    done = _safely(engine)
    if done is None:
        return []
    before = vars(engine.stats).copy()
    outputs = _outputs(engine, _take(engine, *done).values(), len(done[0]))
    engine.stats.num_output_tokens = before["num_output_tokens"]
    return outputs


def ends_with_the_first_sample(engine):
    done = _safely(engine)
    if done is None:
        return []
    requests = list(_take(engine, *done).values())
    outputs = [
        engine.finish_request(r) for r in requests if any(s.seq.status is SequenceStatus.FINISHED for s in r.samples)
    ]
    engine.stats.num_finished_requests += len(outputs)
    outputs += [r.output() for r in requests if r.stream and not r.finished]
    _outputs(engine, [], len(done[0]))
    return outputs


def finishes_once_a_sample(engine):
    done = _safely(engine)
    if done is None:
        return []
    requests = [engine.request_of_seq[seq.seq_id] for seq in done[0]]
    _take(engine, *done)
    return _outputs(engine, requests, len(done[0]))


def forgets_logprobs(engine):
    done = _safely(engine)
    if done is None:
        return []
    return _outputs(engine, _take(engine, done[0], [None] * len(done[0])).values(), len(done[0]))


def forgets_streams(engine):
    done = _safely(engine)
    if done is None:
        return []
    return _outputs(engine, _take(engine, *done).values(), len(done[0]), stream=False)


def shows_all_streams(engine):
    done = _safely(engine)
    if done is None:
        return []
    _take(engine, *done)
    return _outputs(engine, list(engine.requests.values()), len(done[0]))


def asks_before_taking(engine):
    """The requests that finished are looked up before the stop strings."""
    done = _safely(engine)
    if done is None:
        return []
    requests = {engine.request_of_seq[seq.seq_id].request_id: 0 for seq in done[0]}
    finished = [r for i in requests if (r := engine.requests[i]).finished]
    progressed = _take(engine, *done)
    outputs = _outputs(engine, finished, len(done[0]))
    return outputs + [r.output() for i, r in progressed.items() if r.stream and i in engine.requests]


def never_rolls_back(engine):
    output = engine.scheduler.schedule()
    if not output.chunks:
        return []
    sampled, logprobs = _compute(engine, output)
    return _outputs(engine, _take(engine, sampled, logprobs).values(), len(sampled))


def swallows_the_error(engine):
    try:
        done = _safely(engine)
    except Exception:
        return []
    if done is None:
        return []
    return _outputs(engine, _take(engine, *done).values(), len(done[0]))


def catches_exception_only(engine):
    output = engine.scheduler.schedule()
    if not output.chunks:
        return []
    try:
        sampled, logprobs = _compute(engine, output)
    except Exception:
        engine.scheduler.roll_back(output)
        raise
    return _outputs(engine, _take(engine, sampled, logprobs).values(), len(sampled))


def updates_outside_of_try(engine):
    output = engine.scheduler.schedule()
    if not output.chunks:
        return []
    try:
        engine.note_scheduled(output, time.perf_counter())
        token_ids, logprobs = engine.model_runner.run(output)
    except BaseException:
        engine.scheduler.roll_back(output)
        raise
    sampled = [chunk.seq for chunk in output.chunks if chunk.samples]
    engine.scheduler.update(output, token_ids)
    return _outputs(engine, _take(engine, sampled, logprobs).values(), len(sampled))


def _read(engine: LLMEngine, request_id: str) -> Iterator[str]:
    shown, finished = "", False
    while not finished:
        for output in engine.step():
            if output.request_id == request_id:
                finished, text = output.finished, output.outputs[0].text
                if text != shown:
                    yield text[len(shown) :]
                shown = text


def cumulative(llm: LLM, prompt: Any, params: SamplingParams):
    for output in llm.stream(prompt, params):
        if output.outputs[0].text:
            yield output.outputs[0].text


def empty_pieces(llm: LLM, prompt: Any, params: SamplingParams):
    shown = ""
    for output in llm.stream(prompt, params):
        yield output.outputs[0].text[len(shown) :]
        shown = output.outputs[0].text
    yield ""


def all_at_the_end(llm: LLM, prompt: Any, params: SamplingParams):
    yield from llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text


def token_by_token(llm: LLM, prompt: Any, params: SamplingParams):
    for output in llm.stream(prompt, params):
        if piece := llm.get_tokenizer().decode(output.outputs[0].token_ids[-1:]):
            yield piece


def checks_at_first_next(llm: LLM, prompt: Any, params: SamplingParams):
    request_id = llm.engine.add_request(prompt, params, stream=True)
    try:
        yield from _read(llm.engine, request_id)
    finally:
        llm.engine.abort_request(request_id)


def queues_at_the_call(llm: LLM, prompt: Any, params: SamplingParams):
    request_id = llm.engine.add_request(prompt, params, stream=True)

    def read():
        try:
            yield from _read(llm.engine, request_id)
        finally:
            llm.engine.abort_request(request_id)

    return read()


def never_aborts(llm: LLM, prompt: Any, params: SamplingParams):
    request = llm.engine.make_request(prompt, params, stream=True)

    def read():
        yield from _read(llm.engine, llm.engine.enqueue([request])[0])

    return read()


def aborts_at_close_only(llm: LLM, prompt: Any, params: SamplingParams):
    request = llm.engine.make_request(prompt, params, stream=True)

    def read():
        [request_id] = llm.engine.enqueue([request])
        try:
            yield from _read(llm.engine, request_id)
        except GeneratorExit:
            llm.engine.abort_request(request_id)

    return read()


def takes_any_output(llm: LLM, prompt: Any, params: SamplingParams):
    request = llm.engine.make_request(prompt, params, stream=True)

    def read():
        llm.engine.enqueue([request])
        shown, finished = "", False
        try:
            while not finished:
                for output in llm.engine.step()[:1]:
                    finished, text = output.finished, output.outputs[0].text
                    if text != shown:
                        yield text[len(shown) :]
                    shown = text
        finally:
            llm.engine.abort_request(request.request_id)

    return read()


def aborts_everybody(llm: LLM, prompt: Any, params: SamplingParams):
    request = llm.engine.make_request(prompt, params, stream=True)

    def read():
        try:
            yield from _read(llm.engine, llm.engine.enqueue([request])[0])
        finally:
            for request_id in list(llm.engine.requests):
                llm.engine.abort_request(request_id)

    return read()


ROLL_BACK = "call scheduler.roll_back"
WRONG = {
    "engine_step": [
        (counts_idle_steps, "a step without chunks is not counted"),
        (asks_samples_after_update, "ask chunk.samples before scheduler.update()"),
        (never_finishes, "_finish for every request"),
        (returns_one_output, "a step returns a list"),
        (notes_after_update, "before update(), counts the prefill"),
        (forgets_the_counters, "the counters of two requests"),
        (ends_with_the_first_sample, "a request is finished when all its samples are"),
        (finishes_once_a_sample, "_finish is called once for the request"),
        (forgets_logprobs, "go through request.take_token"),
        (forgets_streams, "what the steps returned"),
        (shows_all_streams, "only requests that got one have an output"),
        (asks_before_taking, "ask request.finished after the stop "),
        (never_rolls_back, ROLL_BACK),
        (swallows_the_error, "must reach its caller"),
        (catches_exception_only, "after KeyboardInterrupt the sequences"),
        (updates_outside_of_try, "after ValueError the sequences"),
    ],
    "stream_text": [
        (cumulative, "only what is new"),
        (empty_pieces, "never the empty string"),
        (all_at_the_end, "came when the whole text was there"),
        (token_by_token, "half a character"),
        (checks_at_first_next, "runs nothing before the"),
        (queues_at_the_call, "queue at the first"),
        (never_aborts, "after the caller stopped early, the engine still has the request"),
        (aborts_at_close_only, "after a step that failed, the engine still has the request"),
        (takes_any_output, "take the outputs with your request_id only"),
        (aborts_everybody, "is gone"),
    ],
}
