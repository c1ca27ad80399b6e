"""Our solution of chapter 2's exercise."""

import time
from collections.abc import Iterator

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine
from nanovllm.prompts import Prompt
from nanovllm.request import Request


def engine_step(engine: LLMEngine) -> list[RequestOutput]:
    started, output = time.perf_counter(), None
    try:
        output = engine.scheduler.schedule()
        if not output.chunks:
            return []
        engine.note_scheduled(output, started)
        result = engine.model_runner.run(output)
        engine.scheduler.update(output, result.token_ids)
    except BaseException:  # KeyboardInterrupt is not an Exception
        engine.scheduler.roll_back(output)
        raise

    now = time.perf_counter()
    sampling = [chunk for chunk in output.chunks if chunk.reaches_end]
    progressed: dict[str, Request] = {}  # a request of several samples is in here once
    for chunk, token_logprobs in zip(sampling, result.logprobs, strict=True):
        request = engine.request_of_seq[chunk.seq.seq_id]
        progressed[request.request_id] = request
        stop = request.add_tokens(chunk, [token_logprobs], now)
        if stop is not None:
            engine.scheduler.finish(chunk.seq, "stop", stop)

    # Only now, when stop strings have been looked for in every sample.
    finished = [request for request in progressed.values() if request.finished]
    outputs = [request.output() for request in progressed.values() if request.finished or request.stream]
    engine.forget(finished)
    engine.stats.num_finished_requests += len(finished)
    engine.stats.num_steps += 1
    engine.stats.num_output_tokens += len(sampling)
    engine.stats.step_time_s += time.perf_counter() - started
    return outputs


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
    # Not a generator itself: nothing in a generator function runs before the first next(), and this must.
    request = llm.engine.make_request(prompt, params, stream=True)
    return _deltas(llm.engine, request)


def _deltas(engine: LLMEngine, request: Request) -> Iterator[str]:
    try:
        [request_id] = engine.enqueue([request])
        shown, finished = "", False
        while not finished:
            for output in engine.step():
                if output.request_id != request_id:
                    continue
                finished, text = output.finished, output.outputs[0].text
                delta, shown = text[len(shown) :], text
                if delta:
                    yield delta
    finally:  # after an error, or when the caller leaves its loop; a request that has finished is unknown and ignored
        engine.abort_request(request.request_id)
