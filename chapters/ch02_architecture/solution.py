"""Our solution of chapter 2's exercise."""

import time
from collections.abc import Iterator

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine
from nanovllm.prompts import Prompt
from nanovllm.request import Request


def engine_step(engine: LLMEngine) -> list[RequestOutput]:
    started = time.perf_counter()
    try:
        engine.poll()
        drafts = engine.propose_drafts()
        scheduled = engine.schedule(drafts, started)
        result = engine.model_runner.run(scheduled)

        engine.scheduler.update(scheduled, result.sampled_token_ids)
        now = time.perf_counter()
        progressed: dict[str, Request] = {}  # a request of several samples is in here once
        for chunk, logprobs in zip(scheduled.chunks, result.logprobs, strict=True):
            if chunk.reaches_end:
                request = engine.requests[chunk.seq.request_id]
                request.add_tokens(chunk, logprobs, now)
                progressed[request.request_id] = request

        outputs = [request.output() for request in progressed.values() if request.finished or request.stream]
        finished = [request for request in progressed.values() if request.finished]
        for request in finished:
            del engine.requests[request.request_id]
        engine.stats.count_step(scheduled, len(finished), time.perf_counter() - started)
        return outputs
    except BaseException:  # KeyboardInterrupt is not an Exception
        engine.restart()
        raise


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
