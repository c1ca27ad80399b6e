"""Exercise of chapter 2: the step that ties the two planes together, and a stream of text on top of it.

Write the two functions in this file, then run

    python -m chapters check 2

It puts your engine_step in the place of LLMEngine.step and runs real requests through it. The checks go from easy to
hard and stop at the first that fails, with a hint. Everything you need is in the chapter's text and in the docstrings
below; nanovllm/engine.py has our version.
"""

from collections.abc import Iterator

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine
from nanovllm.prompts import Prompt


def engine_step(engine: LLMEngine) -> list[RequestOutput]:
    """Compute one step of the engine, in place of LLMEngine.step.

    What to do, in this order:

    1. Schedule. engine.scheduler.schedule() returns a SchedulerOutput: its chunks are this step's work. When there are
       no chunks, return [] and count nothing.
    2. engine.note_scheduled(output, now) counts prefill and decode tokens and notes when a request was first worked on.
       Call it once, before anything is computed. now: time.perf_counter() at the beginning of the step.
    3. Run. engine.model_runner.run(output) returns a ModelRunnerOutput. Its token_ids and logprobs are lists with an
       entry for each chunk whose chunk.reaches_end is True, in the order of the chunks. An entry of logprobs is a
       TokenLogprobs, or None where the request did not ask for any.
    4. Update. engine.scheduler.update(output, token_ids) appends the tokens to their sequences and ends those that met
       EOS, a stop token or their length.
    5. Take the tokens. For each chunk that sampled, in order: engine.request_of_seq[chunk.seq.seq_id] is its request,
       and request.add_tokens(chunk, [entry of logprobs], now) lets its text grow (now: time.perf_counter() after the
       update; the list has one entry here, more in an engine that guesses: chapter 13). It returns None, or the stop
       string that the text now ends with; then the sequence has to end, whether or not update has ended it already:
       engine.scheduler.finish(chunk.seq, "stop", stop string).
    6. Make the outputs. Only for requests with a sequence that sampled in this step, each once, in the order of their
       first such sequence: if request.finished (all its samples ended) or request.stream, request.output(); otherwise
       none. Then engine.forget([...]) with the requests that finished.
    7. Count in engine.stats: num_steps + 1; num_output_tokens + the number of sampled tokens; num_finished_requests + 1
       for each request that finished; step_time_s + the seconds of this step.

    Returns the outputs of point 6.

    If anything at all raises in points 1 to 4, KeyboardInterrupt included, call engine.scheduler.roll_back(output) and
    let the same exception go on to the caller. output is None if schedule() itself has raised. The counters of point 7
    stay as they were.

    Example: one request with max_tokens=2 that is not streamed. The first step returns [], the second returns one
    RequestOutput with finished=True, and engine.stats.num_steps has grown by 2.
    """
    raise NotImplementedError


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
    """An iterator over the text that the model adds to a prompt, piece by piece, as it is generated.

    prompt   what LLM.generate takes as one prompt
    params   with n=1

    It is built on these five:

    - llm.engine.make_request(prompt, params, stream=True) checks and tokenizes the prompt; it queues nothing and
      returns a Request. A mistake in the prompt is a ValueError.
    - llm.engine.enqueue([request]) queues it and returns [its id]; from then on that is request.request_id too.
    - llm.engine.step() computes one step and returns a list of RequestOutput, of this request and perhaps of others.
    - output.outputs[0].text is the whole text so far; it only ever grows. output.finished says whether it was the last.
    - llm.engine.abort_request(id) ends a request now; ids that are unknown or finished are ignored.

    What must hold:

    - A piece is the text that is new since the last piece, never "". The pieces joined are the text of the last output.
    - A piece is handed out as soon as there is one: no step is made before the caller asks for the next piece.
    - The ValueError of a bad prompt is raised by the call stream_text(...) itself, not by the first next().
    - Nothing is queued before the first next(): an iterator that nobody reads costs nothing.
    - When the caller stops early (leaves its for loop, so that the iterator is closed) or a step raises, the request is
      aborted: the engine knows nothing of it any more.
    - Outputs of other requests are skipped, and other requests are left alone.

    Example: "".join(stream_text(llm, prompt, params)) == llm.generate(prompt, params)[0].outputs[0].text
    """
    raise NotImplementedError
