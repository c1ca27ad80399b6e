"""LLMEngine: requests in, one step at a time, outputs out (chapter 2).

A step is four hand-offs: the scheduler chooses the work, the model runner computes it, the scheduler takes the sampled
tokens in, the requests turn them into text. Everything a caller can get wrong is checked before a request enters.
"""

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks import forks
from nanovllm.checks.callbacks import WITHIN_A_STEP, is_within, told_to
from nanovllm.checks.names import known_names
from nanovllm.checks.prompt_length import length_check
from nanovllm.checks.requests import check_request
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.detokenizer import Detokenizer
from nanovllm.features.assembly import Features, make_runner
from nanovllm.files.hub import resolve_checkpoint, resolve_tokenizer
from nanovllm.files.tokenizer import load_tokenizer, with_eos
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.request import Request, Sample, prefix_order
from nanovllm.sampling_params import SamplingParams
from nanovllm.stats import EngineStats

if TYPE_CHECKING:
    from nanovllm.features.cache_reports.events import KVEventBatch
    from nanovllm.features.callers.metrics import Metric
    from nanovllm.features.lora.adapter import Adapter
    from nanovllm.features.lora.request import LoRARequest
    from nanovllm.worker.model_runner import ModelRunnerOutput

__path__: list[str] = []  # vLLM has modules below this one: compat/paths.py knows where they are here


class LLMEngine:
    """The loop. Not thread-safe: one thread adds, aborts and steps.

    requests         request id -> those queued or running
    request_of_seq   seq_id -> its request; request.samples[seq.sample_index] is its sample
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or FileNotFoundError, before any weight is read, for what cannot work."""
        forks.check_process()
        directory = resolve_checkpoint(config.model, config.revision, config.load_format)
        model_config = ModelConfig.from_directory(directory, config.hf_overrides, config.generation_config, config)
        self.config, self.model_runner = config, make_runner(config, model_config)
        self.tokenizer = load_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else directory)
        self.model_config = model_config = with_eos(model_config, self.tokenizer, directory)
        self.features = Features(config, model_config, self.tokenizer, directory)
        scheduler_options = self.features.scheduler_options(directory)
        forks.watch()
        self.model_runner.load(directory)
        self.kv_pool = self.model_runner.prepare(model_config.eos_token_ids)
        self.block_manager = self.features.make_block_manager(self.model_runner, self.kv_pool, directory)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.kv_pool.max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            **scheduler_options,
        )
        self.check_length = length_check(self.tokenizer, self.kv_pool.max_model_len - 1)
        self.stats = EngineStats()
        self.requests: dict[str, Request] = {}
        self.request_of_seq: dict[int, Request] = {}
        # Told of every step that succeeds. What it raises is logged.
        self.on_step: Callable[[SchedulerOutput, list[Request]], None] | None = None
        self.scheduled: SchedulerOutput | None = None  # the newest step's work; None before schedule() has returned
        self._num_requests = 0
        # For _settle(): an exception has left a step unfinished, or these requests not yet forgotten.
        self._in_step = False
        self._dropped: list[Request] = []
        self._to_abort: list[Request] = []  # what a callback has asked for in the middle of a step

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        return cls(engine_args)

    # -- requests -------------------------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: "LoRARequest | Adapter | None" = None,
        priority: int | None = 0,
        *,
        request_id: str | None = None,
        stream: bool = False,
        compile_grammar: bool = True,
    ) -> Request:
        """Check and tokenize one prompt. Nothing is queued yet. Raises ValueError.

        compile_grammar=False leaves that, which may take seconds, to compile_grammars().
        """
        given = check_request(self, prompt, params, lora_request, priority, request_id)
        params, samples = given.params, []
        for sample_index in range(params.n):
            seq = Sequence(given.token_ids, params, cache_salt=given.cache_salt, lora_id=given.lora_id)
            seq.sample_index = sample_index
            given.add_to(seq)
            seq.skip_prefix_cache = sample_index == 0 and params.prompt_logprobs is not None
            samples.append(Sample(seq, Detokenizer(self.tokenizer, params)))
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        request = Request(request_id or "", given.text, given.token_ids, params, samples, stream, metrics)
        if compile_grammar:
            self.compile_grammars([request])
        return request

    def compile_grammars(self, requests: list[Request]) -> None:
        """Make what the outputs of these requests must fit. Raises ValueError. Any thread may call it."""
        if any(request.params.structured_outputs is not None for request in requests):
            self.features.grammars.compile_for(requests)

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests. Ids and default seeds follow the order given.

        Those of one priority are admitted in the order of salt, adapter and token ids, the order of a depth-first walk
        over their prefix tree: prompts with a common prefix come one after another, while it is still cached, even in a
        small pool.
        """
        self._settle()
        try:
            self._enqueue(requests)
        except BaseException:
            self.abort_requests(requests)
            raise
        return [request.request_id for request in requests]

    def _enqueue(self, requests: list[Request]) -> None:
        for request in requests:
            while str(self._num_requests) in self.requests:  # somebody chose such an id
                self._num_requests += 1
            index = self._num_requests
            self._num_requests += 1
            request.request_id = request.request_id or str(index)
            if request.request_id in self.requests:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            if request.params.seed is None:
                for sample in request.samples:
                    sample.seq.seed = self.config.seed * 1_000_003 + index
        for request in sorted(requests, key=prefix_order):
            self.requests[request.request_id] = request
            for sample in request.samples:
                self.request_of_seq[sample.seq.seq_id] = request
                self.scheduler.add(sample.seq)

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams, *, stream: bool = True, **options: Any
    ) -> str:
        """Check one prompt and queue it. Returns its id (None: chosen). Raises ValueError, with the queue as it was.

        options: lora_request, priority. stream: step() returns an output for the request after every step that gave it
        a token, in the form that params.output_kind says.
        """
        options = known_names(options, ("lora_request", "priority"), "generate")
        request = self.make_request(prompt, params, request_id=request_id, stream=stream, **options)
        return self.enqueue([self.features.with_output_kind(request)])[0]

    def abort_request(self, request_ids: str | list[str]) -> RequestOutput | None:
        """End one request now, or several. Returns the last output of one; None for several or if there is none.

        In the middle of a step, from a callback: at the step's end, which returns the last outputs.
        """
        if not isinstance(request_ids, str):
            self.abort_requests([self.requests[i] for i in request_ids if i in self.requests])
            return None
        if (request := self.requests.get(request_ids)) is None:
            return None
        self.abort_requests([request])
        return request.output()

    def abort_requests(self, requests: list[Request]) -> None:
        """End requests now, queued or not, or at the step's end (abort_request). Ended ones stay as they are."""
        if self._in_step and is_within(LLMEngine.step, self, sys._getframe()):
            self._to_abort += requests
            return
        self._settle()
        self.forget(requests)

    def forget(self, requests: list[Request]) -> None:
        """Drop requests, ended or not, from the scheduler and from this engine's tables."""
        self._dropped = requests
        seq_ids = [sample.seq.seq_id for request in requests for sample in request.samples]
        self.scheduler.abort(*seq_ids)
        for request in requests:
            if self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]
        for seq_id in seq_ids:
            self.request_of_seq.pop(seq_id, None)
        self._dropped = []

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False, with nothing changed, while any request holds blocks.

        reset_running_requests: take their blocks first. They wait, are computed again and end with the same tokens.
        reset_connector: forget what is kept beside the pool, too, in memory and on a disk.
        """
        self._settle()
        if reset_running_requests:  # as if a step had failed before anything was scheduled
            self.scheduled, self._in_step = None, True
            self._settle()
        return self.block_manager.reset_prefix_cache() and self.features.reset_tiers(reset_connector)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns outputs of requests that have ended, and of streamed ones that got a token.

        If anything raises, the step is undone: all sequences wait with the tokens from before it, and can go on.
        """
        forks.check_process()
        self._settle()
        started, self.scheduled, self._in_step = time.perf_counter(), None, True
        try:
            tiers = self.features.tiers
            if tiers is not None:
                tiers.poll(self.scheduler.waiting)
            output = self.scheduled = self.scheduler.schedule()
            if tiers is not None:
                tiers.save_evicted()
            if self.requests and not output.chunks:
                self.features.wait_for_blocks()
            self.note_scheduled(output, started)
            result = self.model_runner.run(output)
            self.scheduler.update(output, result.token_ids)
            progressed = self.process_outputs(output, result)
            outputs = [request.output() for request in progressed if request.finished or request.stream]
            if self.on_step is not None and output.chunks:
                told_to(self.on_step, output, progressed)
        except BaseException:
            self._settle()
            raise
        self._dropped, self._in_step = [request for request in progressed if request.finished], False
        self.stats.note_step(output, len(self._dropped), time.perf_counter() - started)
        self.forget(self._dropped)
        aborted = self._abort_asked()
        outputs += [request.output() for request in aborted]
        return self.features.as_asked(outputs, progressed + aborted)

    def note_scheduled(self, output: SchedulerOutput, now: float) -> None:
        """Count the step's tokens, and tell its requests that they are worked on. now: when the step began."""
        self.stats.note_scheduled(output)
        for chunk in output.chunks:
            self.request_of_seq[chunk.seq.seq_id].note_scheduled(chunk.seq, now)

    def process_outputs(self, output: SchedulerOutput, result: "ModelRunnerOutput") -> list[Request]:
        """Let the requests make text and logprobs of what was computed; end sequences at stop strings.

        Returns the requests that have got tokens, or a vector.
        """
        now = time.perf_counter()
        progressed: dict[str, Request] = {}
        row = 0
        for chunk in output.chunks:
            if not chunk.reaches_end:
                continue
            request = self.request_of_seq[chunk.seq.seq_id]
            progressed[request.request_id] = request
            if result.pooled:
                request.pooled = result.pooled[row]
            stop = request.add_tokens(chunk, result.logprobs[row : row + chunk.num_logits], now)
            if stop is not None:
                self.scheduler.finish(chunk.seq, "stop", stop)
            row += chunk.num_logits
        for seq_id, position, logprobs in result.prompt_logprobs:
            request = self.request_of_seq[seq_id]
            request.add_logprobs(request.prompt_logprobs, request.prompt_token_ids, position, logprobs)
        return list(progressed.values())

    def _abort_asked(self) -> list[Request]:
        """End the requests that a callback has asked to end in the middle of a step. Returns those that had not."""
        aborted = [request for request in self._to_abort if self.requests.get(request.request_id) is request]
        self.forget(aborted)
        self._to_abort = []
        return aborted

    # -- what an exception has interrupted ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Finish what an exception has interrupted: undo the step, or go on forgetting requests.

        Called before every other change, so an exception in here loses nothing: the next call begins anew. Raises
        RuntimeError if the step has not ended, and the caller is a callback of its.
        """
        if self._in_step:
            if is_within(LLMEngine.step, self, sys._getframe(1)):
                raise RuntimeError(WITHIN_A_STEP)
            self.scheduler.roll_back(self.scheduled)
            for chunk in self.scheduled.chunks if self.scheduled is not None else ():
                if chunk.reaches_end:
                    self.request_of_seq[chunk.seq.seq_id].roll_back(chunk)
            self._dropped, self._in_step = [], False
        elif self._dropped:
            self.forget(self._dropped)
            self.scheduler.roll_back(None)  # a block that was being freed may be in no table and in no queue
        if self._to_abort:
            self._abort_asked()

    # -- what else vLLM's engine is asked -------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer (of transformers)."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_metrics(self) -> "list[Metric]":
        """Counters since the engine was built, under vLLM's names."""
        from nanovllm.features.callers.metrics import metrics_of

        return metrics_of(self)

    @property
    def on_kv_events(self) -> "Callable[[KVEventBatch], None] | None":
        """Is called by who makes a step, when it has changed which blocks can be found (cache_reports/events.py).

        What it raises is logged. It may ask an LLM for stats() and abort(), and must not wait for an event loop.
        To set it raises ValueError without LLM(kv_events_config=...).
        """
        return None if self.features.kv_events is None else self.features.kv_events.on_batch

    @on_kv_events.setter
    def on_kv_events(self, follower: "Callable[[KVEventBatch], None] | None") -> None:
        if self.features.kv_events is None:
            example = 'kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}'
            raise ValueError(f"KV events are not gathered: LLM({example}) asks for them")
        self.features.kv_events.on_batch = follower

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what PyTorch does until stop_profile(). Raises ValueError without LLM(profiler_config=...)."""
        from nanovllm.features.callers.profile import Profile

        self._profile = Profile.of(self, profile_prefix)

    def stop_profile(self) -> None:
        """Write the trace. Nothing, if none was begun."""
        if (profile := self.__dict__.pop("_profile", None)) is not None:
            profile.stop()

    def add_lora(self, lora_request: "LoRARequest") -> bool:
        """Read an adapter before a request names it. False if it was there. Raises ValueError."""
        return self.features.known_adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. What runs with it ends as it began. False if there is none of this lora_int_id."""
        return self.features.known_adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The lora_int_ids of all adapters that are known."""
        return {request.lora_int_id for request in self.features.known_adapters.requests}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the CPU's memory, however many others are named. Raises ValueError for an unknown one."""
        return self.features.known_adapters.pin(lora_id)

    def __getattr__(self, name: str) -> Any:
        """Raises an AttributeError that says what to use instead of a method that vLLM's LLMEngine has."""
        from nanovllm.compat.refused import refused_method

        raise refused_method(type(self), name)
