"""SharedCalls: an LLM that several threads use at once, with a progress bar, and with Ctrl-C between two steps.

Whoever steps does it for all threads: each waits for its turn, and may find that another's step has brought what it
waits for.
"""

from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial
from typing import TypeVar

from nanovllm.checks.exits import finish_at_exit
from nanovllm.engine import LLMEngine
from nanovllm.features.callers.ctrl_c import between_steps
from nanovllm.features.callers.fair_lock import FairLock
from nanovllm.features.callers.progress import progress_bar
from nanovllm.llm import Calls
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request

Result = TypeVar("Result")


class SharedCalls(Calls):
    """See Calls for the methods that an LLM calls."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.turns = FairLock()
        self.enqueued: dict[str, Request] = {}  # nobody waits for these yet
        finish_at_exit(self.turns)

    def run(self, work: Callable[[], Result]) -> Result:
        return self.turns.run(work)

    def ask(self, work: Callable[[], Result]) -> Result:
        return self.turns.run(work, within=True)

    def around(self, call: Callable[[], Result]) -> Result:
        return between_steps(self.engine, call)

    def complete(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        def complete() -> list[RequestOutput]:
            unfinished = set(self._in_turn(partial(self._enqueue, requests)))
            with progress_bar(self.engine.stats, self.engine.block_manager.stats, len(requests), use_tqdm) as advance:
                while unfinished:
                    unfinished = self._in_turn(partial(self._step, unfinished))
                    advance(len(requests) - len(unfinished))
            return [request.output() for request in requests]

        try:
            return between_steps(self.engine, complete)
        except BaseException:
            self._drop(requests)
            raise

    def stream(self, request: Request) -> Generator[RequestOutput, None, None]:
        num_tokens, finished = 0, False
        try:
            self._in_turn(partial(self._enqueue, [request]))
            while not finished:
                output = self._in_turn(partial(self._step_of_stream, request, num_tokens))
                if output is not None:
                    num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
                    finished = output.finished
                    yield output
        except BaseException:  # also when the iterator is closed
            self.engine.to_abort[request.request_id] = request  # first of all: Ctrl-C may interrupt any call
            self._drop([request])
            raise

    def enqueue(self, requests: list[Request]) -> list[str]:
        try:
            return self._in_turn(partial(self._enqueue_for_later, requests))
        except BaseException:
            self._drop(requests)
            raise

    def wait(self, use_tqdm: bool) -> list[RequestOutput]:
        requests = list(self.enqueued.values())
        outputs = self.complete(requests, use_tqdm)
        self._in_turn(partial(self._end, requests))
        return outputs

    def _drop(self, requests: list[Request]) -> None:
        """End requests that nobody waits for any more: now or, in the middle of a step, with its end."""
        self.engine.to_abort.update({request.request_id: request for request in requests})
        with suppress(RuntimeError):  # of a thread that waits for its turn already: the next step ends them
            self._in_turn(partial(self._end, requests), within=True)

    def _in_turn(self, work: Callable[[], Result], within: bool = False) -> Result:
        """work(), while no other thread changes the engine; a Ctrl-C takes effect afterwards."""
        return between_steps(self.engine, partial(self.turns.run, work, within=within))

    # In a turn of this thread. Another thread's step may have brought what this one waits for, and has served it, too.

    def _enqueue(self, requests: list[Request]) -> list[str]:
        """Queue those that are not queued yet. Returns all their ids."""
        self.engine.enqueue([request for request in requests if not request.request_id])
        return [request.request_id for request in requests]

    def _enqueue_for_later(self, requests: list[Request]) -> list[str]:
        request_ids = self._enqueue(requests)
        self.enqueued.update(zip(request_ids, requests, strict=True))
        return request_ids

    def _end(self, requests: list[Request]) -> None:
        """Nobody waits for these any more."""
        self.engine.abort_requests(requests)
        ended = {request.request_id for request in requests}
        self.enqueued = {name: request for name, request in self.enqueued.items() if name not in ended}

    def _step(self, request_ids: set[str]) -> set[str]:
        """Make a step unless all of these requests have ended. Returns the ids of those that have not."""
        engine = self.engine
        if request_ids.isdisjoint(engine.requests):
            engine.recover()  # unless the step that ended them is taken back here
        elif not engine.step():
            return request_ids  # none has ended in this step, and looking for those that others have ended takes time
        return request_ids & engine.requests.keys()

    def _step_of_stream(self, request: Request, num_tokens: int) -> RequestOutput | None:
        """Make a step unless the request has ended, or has more tokens than these. None if it has no more yet."""

        def has_news() -> bool:
            return request.finished or request.num_generated_tokens > num_tokens

        self.engine.recover()
        if not has_news():
            self.engine.step()
        return request.output() if has_news() else None
