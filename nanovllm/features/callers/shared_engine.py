"""SharedEngine: several threads use one LLM; whoever steps does it for all of them."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.engine import LLMEngine
from nanovllm.features.callers.fair_lock import FairLock
from nanovllm.features.callers.progress import ctrl_c_after_step, ctrl_c_between_steps, progress_bar
from nanovllm.outputs import RequestOutput
from nanovllm.request import Request
from nanovllm.sampling_params import RequestOutputKind, SamplingParams


class SharedEngine:
    """turns: one thread at a time; outputs: the newest of each request, until its caller takes it.

    enqueued: requests that nobody waits for yet (LLM.enqueue).
    left: ids of those that nobody waits for any more, since the middle of a step.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine, self.turns = engine, FairLock()
        self.outputs: dict[str, RequestOutput] = {}
        self.enqueued: list[Request] = []
        self.left: set[str] = set()

    def enqueue(self, requests: list[Request]) -> set[str]:
        """Queue those that are not yet. Returns all their ids."""
        with self.turns:
            self.engine.enqueue([request for request in requests if not request.request_id])
        return {request.request_id for request in requests}

    def step(self, ours: set[str]) -> list[RequestOutput]:
        """The newest outputs of these requests. If there are none, make a step, for all requests of all threads."""
        with ctrl_c_after_step(), self.turns:
            if self.outputs.keys().isdisjoint(ours):
                self.outputs.update((output.request_id, output) for output in self.engine.step())
                for request_id in self.left:
                    self.outputs.pop(request_id, None)
                self.left.clear()
            return [self.outputs.pop(request_id) for request_id in self.outputs.keys() & ours]

    def filtered(
        self, outputs: Generator[RequestOutput, None, None], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        """The growing outputs of one request, in the form that its output_kind asks for."""
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            return outputs
        from nanovllm.features.callers.output_kind import OutputFilter

        return OutputFilter(params.output_kind).through(outputs)

    def stats(self) -> dict[str, Any]:
        """See LLM.stats."""
        from nanovllm.features.callers.snapshot import snapshot

        with self.turns.unless_mine():
            return snapshot(self.engine)

    def abort(self, request_id: str) -> None:
        """See LLM.abort."""
        with self.turns.unless_mine():
            self.engine.abort_request(request_id)

    @contextmanager
    def progress(self, num_requests: int, show: bool) -> Iterator[Callable[[int], None]]:
        """See progress_bar."""
        bar = progress_bar(self.engine.stats, self.engine.block_manager.stats, num_requests, show)
        with ctrl_c_between_steps(), bar as advance:
            yield advance

    @contextmanager
    def aborted_if_interrupted(self, requests: list[Request]) -> Iterator[None]:
        """Whatever ends the call early, a generator that is closed included: its requests end with it."""
        try:
            yield
        except BaseException:
            with ctrl_c_after_step(), self.turns.unless_mine():
                self.engine.abort_requests(requests)
                for request in requests:
                    self.outputs.pop(request.request_id, None)
                    self.left.add(request.request_id)  # in the middle of a step, which returns its last output
            raise
