"""Calls: what an LLM's methods do with its engine, turn by turn (chapter 2).

A turn queues requests, makes a step, or drops requests. Between two turns of a call, other threads may have theirs.
"""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TypeVar

from nanovllm.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request

Result = TypeVar("Result")


class Turns:
    """When calls of an LLM may use its engine. Here, at once: that is all that one thread needs.

    If features/callers/ is there, an LLM has its SharedTurns: several threads may call at the same time, Ctrl-C comes
    between two steps, and a progress bar is drawn.
    """

    def call(self, work: Callable[[], Result]) -> Result:
        """work(), a whole call, which asks take() for each of its turns."""
        return work()

    def take(self, work: Callable[[], Result], *, within: bool = False) -> Result:
        """work(), which changes the engine or reads from it, in one turn.

        within: code that a step calls may ask for it in the middle of that step.
        """
        return work()

    def progress(self, total: int, show: bool) -> AbstractContextManager[Callable[[int], None]]:
        """Gives a function to call with the number of finished requests, of `total`."""
        return nullcontext(lambda num_done: None)


class Calls:
    """What an LLM does with its engine, call after call.

    The engine is used in turns. Whoever steps does it for all: between two turns of one call, another thread's step may
    have brought what this one waits for.

    enqueued    {request id: Request} of those that nobody waits for yet
    """

    def __init__(self, engine: LLMEngine, turns: Turns) -> None:
        self.engine = engine
        self.turns = turns
        self.enqueued: dict[str, Request] = {}

    def complete(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Queue requests, unless they are queued already, and make steps until all have ended."""

        def until_finished() -> list[RequestOutput]:
            unfinished = set(self.turns.take(partial(self._enqueue, requests)))
            with self.turns.progress(len(requests), use_tqdm) as advance:
                while unfinished:
                    unfinished = self.turns.take(partial(self._step, unfinished))
                    advance(len(requests) - len(unfinished))
            return [request.output() for request in requests]

        try:
            return self.turns.call(until_finished)
        except BaseException:
            self._drop(requests)
            raise

    def stream(self, request: Request) -> Generator[RequestOutput, None, None]:
        """Queue a request. Yields its output after each step that has given it a token, and once it has ended."""
        num_tokens, finished = 0, False
        try:
            self._in_one_turn(partial(self._enqueue, [request]))
            while not finished:
                output = self._in_one_turn(partial(self._step_of_stream, request, num_tokens))
                if output is not None:
                    num_tokens = sum(len(sample.token_ids) for sample in output.outputs)
                    finished = output.finished
                    yield output
        except BaseException:  # also when the iterator is closed
            self.engine.to_abort[request.request_id] = request  # before any call: Ctrl-C may interrupt it
            self._drop([request])
            raise

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests for wait()."""
        try:
            return self._in_one_turn(partial(self._enqueue_for_later, requests))
        except BaseException:
            self._drop(requests)
            raise

    def wait(self, use_tqdm: bool) -> list[RequestOutput]:
        """Compute what was enqueued."""
        requests = list(self.enqueued.values())
        outputs = self.complete(requests, use_tqdm)
        self._in_one_turn(partial(self._end, requests))
        return outputs

    def _drop(self, requests: list[Request]) -> None:
        """End requests that nobody waits for any more: now or, in the middle of a step, with its end."""
        self.engine.to_abort.update({request.request_id: request for request in requests})
        with suppress(RuntimeError):  # a signal handler has interrupted a wait for a turn: the next step ends them
            self._in_one_turn(partial(self._end, requests), within=True)

    def _in_one_turn(self, work: Callable[[], Result], *, within: bool = False) -> Result:
        """work(), a call that needs no more than one turn."""
        return self.turns.call(partial(self.turns.take, work, within=within))

    # In a turn.

    def _enqueue(self, requests: list[Request]) -> list[str]:
        """Queue those that are not queued yet: an LLM's requests get their ids then. Returns all their ids."""
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
        """Make a step unless all of these requests have ended. Returns those ids that still have to be waited for."""
        if request_ids.isdisjoint(self.engine.requests):
            self.engine.recover()  # if the step that ended them has failed, they come back here
            return request_ids & self.engine.requests.keys()
        ended = {output.request_id for output in self.engine.step() if output.finished}
        request_ids -= ended  # those that others' steps have ended go with the last: looking for them takes time
        return request_ids

    def _step_of_stream(self, request: Request, num_tokens: int) -> RequestOutput | None:
        """Make a step unless the request has ended, or has more tokens than these. None if it has no more yet."""

        def has_news() -> bool:
            return request.finished or (request.knows_prompt and request.num_generated_tokens > num_tokens)

        self.engine.recover()
        if not has_news():
            self.engine.step()
        return request.output() if has_news() else None
