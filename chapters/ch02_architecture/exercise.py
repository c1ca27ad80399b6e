"""Exercise of chapter 2: the step that ties the two planes together, and a stream of text on top of it.

Write the two functions in this file, then run

    python -m chapters check 2

It puts your engine_step in place of LLMEngine.step and runs real requests through it. The checks go from easy to hard
and stop at the first one that fails, with a hint. Everything you need is in the chapter's text and in the docstrings
below; nanovllm/engine.py has our version.
"""

from collections.abc import Iterator

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine
from nanovllm.prompts import Prompt


def engine_step(engine: LLMEngine) -> list[RequestOutput]:
    """Compute one step of the engine, in place of LLMEngine.step.

    The first four of the six lines exist already; call them in this order. In line 3, now is time.perf_counter() at the
    beginning of the step.

    1. engine.poll()
    2. engine.propose_drafts() returns the drafts. Here there are none: {}.
    3. engine.schedule(drafts, now) returns a SchedulerOutput. Its chunks are this step's work; there may be none.
    4. engine.model_runner.run(scheduled) returns a ModelRunnerOutput. Its lists, among them sampled_token_ids and
       logprobs, have an entry for each chunk, in the order of the chunks.

    The last two are yours: write what engine.update and engine.make_outputs do, without calling them.

    5. Update. engine.scheduler.update(scheduled, sampled_token_ids) appends the tokens to their sequences and ends
       those that met EOS, a stop token, a stop string or their length. Then update the requests:
       engine.requests[request id] is a Request, chunk.seq.request_id says which request a chunk belongs to, and
       request.add_tokens(chunk, its entry of logprobs, now) adds to the request's text and logprobs (here now is
       time.perf_counter() after the update). Do this only for chunks that sampled, which chunk.reaches_end says.
    6. Make the outputs. Consider only the requests that got a token in this step, each once, in the order of their
       first such chunk. A request has an output, request.output(), if request.finished (all its samples have ended) or
       request.stream; the others have none. Delete the finished ones from engine.requests: the engine has kept its
       promise. When all of this is done, count the step:
       engine.stats.count_step(scheduled, number of requests that finished, seconds that the step took).

    Returns the outputs of point 6.

    An exception may come out of any line: out of memory, a bug, KeyboardInterrupt. Whichever it is, and wherever it
    comes from, call engine.restart() and let the same exception go on to the caller. restart() takes back the tokens of
    this step, makes all sequences wait again and forgets the KV cache.

    Example: one request with max_tokens=2 that is not streamed. The first step returns [], the second returns one
    RequestOutput with finished=True, and engine.stats.num_steps has grown by 2.
    """
    raise NotImplementedError


def stream_text(llm: LLM, prompt: Prompt, params: SamplingParams) -> Iterator[str]:
    """An iterator over the text that the model adds to a prompt, piece by piece, as it is generated.

    prompt   what LLM.generate takes as one prompt
    params   with n=1

    Build it on these five:

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
    - When the caller stops early (leaves its for loop, so that the iterator is closed) or a step raises an exception,
      the request is aborted, and the engine no longer knows about it.
    - Outputs of other requests are skipped, and other requests are left alone.

    Example: "".join(stream_text(llm, prompt, params)) == llm.generate(prompt, params)[0].outputs[0].text
    """
    raise NotImplementedError
