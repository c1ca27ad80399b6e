"""LLMEngine: requests in, one step at a time, outputs out (chapter 2).

A step is six lines: poll, draft, schedule, run, update, outputs. What a failed step must undo is kept in `_in_flight`.
`requests` is what the engine has promised; everything else, queues and KV pool included, can be made anew from it, and
that is what happens when an exception comes out of the middle of a step.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks import forks
from nanovllm.checks.callbacks import WITHIN_A_STEP, told_to
from nanovllm.checks.names import known_names
from nanovllm.checks.requests import check_request
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import broadcast
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.detokenizer import Detokenizer
from nanovllm.features import assembly
from nanovllm.files.hub import resolve_checkpoint, resolve_tokenizer
from nanovllm.files.prompt_length import length_check
from nanovllm.files.tokenizer import load_tokenizer, with_eos
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.prompts import Prompt
from nanovllm.request import Request, Sample, prefix_order
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.stats import EngineStats

if TYPE_CHECKING:
    from nanovllm.features.cache_reports.events import KVEventBatch
    from nanovllm.features.callers.metrics import Metric
    from nanovllm.features.grammar.grammar import GrammarCompiler
    from nanovllm.features.images.processor import ImageProcessor
    from nanovllm.features.lora.adapter import Adapter
    from nanovllm.features.lora.lora_request import LoRARequest
    from nanovllm.features.lora.registry import KnownAdapters
    from nanovllm.worker.model_runner import ModelRunnerOutput

__path__: list[str] = []  # so that `import nanovllm.engine.arg_utils` works as in vLLM: compat/paths.py finds it

WAIT_S = 0.02  # for blocks from a lower tier, at a time: then the engine hears of other requests


class LLMEngine:
    """The loop. Not thread-safe: one thread adds, aborts and steps.

    requests    {request id: Request} of those queued or running
    scheduled   the newest step's work; None before schedule() has returned
    on_step     called near the end of each step that has chunks: (its SchedulerOutput, requests that got tokens). If
                an exception takes that step back afterwards, its chunks are computed and told again. What it raises is
                logged.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or FileNotFoundError, before any weight is read, for what cannot work."""
        forks.check_process()
        self.config = config
        directory = resolve_checkpoint(config.model, config.revision, config.load_format)
        self.directory = directory
        model_config = ModelConfig.from_directory(directory, config.hf_overrides, config.generation_config, config)
        self.tokenizer = load_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else directory)
        self.model_config = with_eos(model_config, self.tokenizer, directory)
        weight_stamps = assembly.check_cache_options(config, directory)
        self.model_runner = assembly.make_runner(config, self.model_config)
        self.speculation = assembly.make_speculation(config, directory, self.model_config, self.tokenizer)
        forks.watch()
        self.model_runner.load(directory)
        self.kv_pool = self.model_runner.prepare()
        self.block_manager = assembly.make_block_manager(
            self.kv_pool, enable_prefix_caching=config.enable_prefix_caching, hash_algo=config.prefix_caching_hash_algo
        )
        # These read config, model_config, model_runner and block_manager of the engine, which are set by now.
        self.kv_events = assembly.make_kv_events(self)
        self.block_times = assembly.make_block_times(config)
        self.tiers = assembly.make_tiers(self, directory, weight_stamps)
        # kv_events comes last: its followers may look at what the other two have recorded.
        listeners = [each for each in (self.tiers, self.block_times, self.kv_events) if each is not None]
        self.block_manager.on_event = broadcast(*(listener.on_event for listener in listeners))
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.kv_pool.max_model_len,
            eos_token_ids=self.model_config.eos_token_ids,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            may_run=self.known_adapters.may_run if config.enable_lora else None,
        )
        self.check_length = length_check(self.tokenizer, self.kv_pool.max_model_len - 1)
        self.stats = EngineStats()
        self.requests: dict[str, Request] = {}
        self.on_step: Callable[[SchedulerOutput, list[Request]], None] | None = None
        self.scheduled: SchedulerOutput | None = None
        self._num_requests = 0
        self._is_changing = False  # a change is on the stack now: callbacks may not begin another
        self._is_broken = False  # a change has begun and not ended: restart() comes before the next one
        self._in_flight: list[tuple[ScheduledChunk, Request]] = []  # of the step that is being made
        self._to_abort: dict[str, Request] = {}  # what a callback has asked for in the middle of a step

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        return cls(engine_args)

    @cached_property
    def known_adapters(self) -> "KnownAdapters":
        """The LoRA adapters that requests have named."""
        from nanovllm.features.lora.registry import KnownAdapters

        return KnownAdapters(self.model_config, self.config)

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        """Makes what structured outputs must fit."""
        from nanovllm.features.grammar.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)

    @cached_property
    def image_processor(self) -> "ImageProcessor":
        """Makes placeholders and pixels of pictures. Raises ValueError for a model that sees none."""
        from nanovllm.features.images.requests import make_processor

        return make_processor(self)

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
        checked = check_request(self, prompt, params, lora_request, priority, request_id)
        samples = []
        for sample_index in range(checked.params.n):
            seq = Sequence(
                checked.token_ids,
                checked.params,
                cache_salt=checked.cache_salt,
                lora_id=checked.lora_id,
                mm_spans=() if checked.images is None else checked.images.spans,
            )
            seq.sample_index = sample_index
            seq.skip_prefix_cache = sample_index == 0 and checked.params.prompt_logprobs is not None
            checked.add_to(seq)
            detokenizer = Detokenizer(self.tokenizer, checked.params)
            if checked.params.stop:
                seq.stop_checker = detokenizer
            samples.append(Sample(seq, detokenizer))
        request = Request(
            request_id=request_id or "",
            prompt=checked.text,
            prompt_token_ids=checked.token_ids,
            params=checked.params,
            samples=samples,
            stream=stream,
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        if compile_grammar:
            self.compile_grammars([request])
        return request

    def compile_grammars(self, requests: list[Request]) -> None:
        """Make what the outputs of these requests must fit. Raises ValueError. Any thread may call it."""
        if any(request.params.structured_outputs is not None for request in requests):
            self.grammars.compile_for(requests)

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests. Ids and default seeds follow the order given. ValueError for an id that is in use.

        Those of one priority are admitted in the order of salt, adapter and token ids, the order of a depth-first walk
        over their prefix tree: prompts with a common prefix come one after another, while it is still cached, even in a
        small pool.
        """
        self._check_is_whole()
        self._assign_ids(requests)
        try:
            with self._change():
                for request in sorted(requests, key=prefix_order):
                    self.requests[request.request_id] = request
                    for sample in request.samples:
                        self.scheduler.add(sample.seq)
        except BaseException:
            for request in requests:
                if self.requests.get(request.request_id) is request:
                    del self.requests[request.request_id]
            raise
        return [request.request_id for request in requests]

    def _assign_ids(self, requests: list[Request]) -> None:
        """Give each request its id and its samples their seed. Raises ValueError before any is given."""
        chosen: set[str] = set()
        for request in requests:
            if request.request_id in self.requests or request.request_id in chosen:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            if request.request_id:
                chosen.add(request.request_id)
        for request in requests:
            while str(self._num_requests) in self.requests or str(self._num_requests) in chosen:
                self._num_requests += 1
            index = self._num_requests
            self._num_requests += 1
            request.request_id = request.request_id or str(index)
            for sample in request.samples:
                sample.seq.request_id = request.request_id
                if request.params.seed is None:
                    sample.seq.seed = self.config.seed * 1_000_003 + index

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams, *, stream: bool = True, **options: Any
    ) -> str:
        """Check one prompt and queue it. Returns its id (None: chosen). Raises ValueError, with the queue as it was.

        options: lora_request, priority. stream: step() returns an output for the request after every step that gave it
        a token, in the form that params.output_kind says.
        """
        options = known_names(options, ("lora_request", "priority"), "generate")
        request = self.make_request(prompt, params, request_id=request_id, stream=stream, **options)
        if request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            request.stream = False
        if request.params.output_kind is RequestOutputKind.DELTA and request.stream:
            from nanovllm.features.callers.output_kind import OutputFilter

            request.output_filter = OutputFilter(RequestOutputKind.DELTA)
        return self.enqueue([request])[0]

    def abort_request(self, request_ids: str | list[str]) -> RequestOutput | None:
        """End one request, or several.

        Returns the last output if one id is given and its request ends now. Otherwise None: for several ids, for an
        unknown id, and for a callback in the middle of a step. That step ends the request and returns its last output.
        """
        if not isinstance(request_ids, str):
            self.abort_requests([self.requests[i] for i in request_ids if i in self.requests])
            return None
        if (request := self.requests.get(request_ids)) is None:
            return None
        self.abort_requests([request])
        return request.output() if request.finished else None

    def abort_requests(self, requests: list[Request]) -> None:
        """End requests now, queued or not, or at the step's end (abort_request). Ended ones stay as they are."""
        if self._is_changing:
            self._to_abort.update((request.request_id, request) for request in requests)
            return
        with self._change():
            self._abort(requests)

    def _abort(self, requests: list[Request]) -> None:
        self.scheduler.abort(*(sample.seq.seq_id for request in requests for sample in request.samples))
        for request in requests:
            if self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False, with nothing changed, while any request holds blocks.

        reset_running_requests: take their blocks first. They wait, are computed again and end with the same tokens.
        reset_connector: forget what is kept beside the pool, too, in memory and on a disk.
        """
        with self._change():
            while reset_running_requests and self.scheduler.running:
                self.scheduler.preempt_last()
            was_reset = self.block_manager.reset_prefix_cache()
            if was_reset and reset_connector and self.tiers is not None:
                for store in self.tiers.stores:
                    store.reset()
            return was_reset

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns outputs of requests that have ended, and of streamed ones that got a token.

        If anything raises, all sequences wait again with the tokens from before the step. Requests that a callback has
        aborted stay aborted; no later step returns their last output.
        """
        forks.check_process()
        self._begin_change()
        started = time.perf_counter()
        self.scheduled = None
        try:
            self._is_changing = True
            self.poll()
            drafts = self.propose_drafts()
            scheduled = self.schedule(drafts, started)
            result = self.model_runner.run(scheduled)
            progressed = self.update(scheduled, result)
            return self.make_outputs(scheduled, progressed, started)
        except BaseException:
            if self._is_broken:
                self.restart()
            raise
        finally:
            self._is_changing = False

    def poll(self) -> None:
        """Take in blocks that have arrived from lower tiers since the last step."""
        if self.tiers is not None:
            self.tiers.poll(self.scheduler.waiting)
            if self.requests and not self.scheduler.running and self._all_await_blocks():
                self.tiers.wait(WAIT_S)

    def _all_await_blocks(self) -> bool:
        return all(seq.awaits_blocks for seq in self.scheduler.waiting)

    def propose_drafts(self) -> dict[int, list[int]]:
        """{seq_id: tokens that may come next}, which the step checks beside the tokens that it has to compute."""
        return {} if self.speculation is None else self.speculation.propose(self.scheduler)

    def schedule(self, drafts: dict[int, list[int]], started: float) -> SchedulerOutput:
        """Choose the step's work. started: the step's time, for the metrics of requests that are first worked on."""
        scheduled = self.scheduler.schedule(drafts)
        assert scheduled.chunks or self._all_await_blocks(), "no chunk, although a waiting sequence awaits no blocks"
        if self.tiers is not None:
            self.tiers.save_evicted()  # before the step overwrites them
        self._in_flight = [(chunk, self.requests[chunk.seq.request_id]) for chunk in scheduled.chunks]
        self.scheduled = scheduled
        self.stats.count_scheduled(scheduled)
        for chunk, request in self._in_flight:
            request.mark_scheduled(chunk.seq, started)
        return scheduled

    def update(self, scheduled: SchedulerOutput, result: "ModelRunnerOutput") -> list[Request]:
        """Let sequences and requests take what was computed. Returns the requests that got tokens, or a vector."""
        self.scheduler.update(scheduled, result.sampled_token_ids)
        now = time.perf_counter()
        progressed = {}
        results = zip(scheduled.chunks, result.logprobs, result.pooled, result.prompt_logprobs, strict=True)
        for chunk, logprobs, pooled, prompt_logprobs in results:
            request = self.requests[chunk.seq.request_id]
            for position, found in prompt_logprobs:
                request.add_logprobs(request.prompt_logprobs, request.prompt_token_ids, position, found)
            if chunk.reaches_end:
                request.pooled = pooled
                request.add_tokens(chunk, logprobs, now)
                progressed[request.request_id] = request
        if self.speculation is not None:
            self.speculation.observe(scheduled)
        return list(progressed.values())

    def make_outputs(
        self, scheduled: SchedulerOutput, progressed: list[Request], started: float
    ) -> list[RequestOutput]:
        """Tell observers of the step, forget the requests that have ended, and say what the others have."""
        outputs = [request.output() for request in progressed if request.finished or request.stream]
        if self.on_step is not None and scheduled.chunks:
            told_to(self.on_step, scheduled, progressed)
        finished = [request for request in progressed if request.finished]
        for request in finished:
            del self.requests[request.request_id]
        aborted = self._abort_what_callbacks_asked()
        outputs += [request.output() for request in aborted]
        self.stats.count_step(scheduled, len(finished), time.perf_counter() - started)
        self._is_broken = False  # the step is made: nothing takes it back any more

        filters = {request.request_id: request.output_filter for request in progressed + aborted}
        shown = []
        for output in outputs:
            output_filter = filters[output.request_id]
            if output_filter is not None:
                output = output_filter.take(output)
            if output is not None:
                shown.append(output)
        return shown

    def _abort_what_callbacks_asked(self) -> list[Request]:
        """End the requests that a callback has asked to end in the middle of a step. Returns those that had not."""
        aborted = [request for request in self._to_abort.values() if self.requests.get(request.request_id) is request]
        self._abort(aborted)
        return aborted

    # -- a change that an exception interrupts --------------------------------------------------------------------

    def _begin_change(self) -> None:
        """From here until the change is complete, the engine counts as broken."""
        self._check_is_whole()
        self._is_broken = True

    def _check_is_whole(self) -> None:
        """Mend what an exception has left behind. RuntimeError for a callback: it asks in the middle of a step."""
        if self._is_changing:
            raise RuntimeError(WITHIN_A_STEP)
        if self._is_broken:
            self.restart()
        self._in_flight = []
        self._to_abort = {}

    @contextmanager
    def _change(self) -> Iterator[None]:
        """What every other change is made in."""
        self._begin_change()
        try:
            self._is_changing = True
            yield
            self._abort_what_callbacks_asked()
            self._is_broken = False
        finally:
            self._is_changing = False

    def restart(self) -> None:
        """Make everything anew from the requests. All wait, with the tokens from before the step; nothing is cached.

        For an exception in whatever line. Another one in here loses nothing, for the next change begins with this.
        """
        self._is_broken = True
        for chunk, request in self._in_flight:
            self.requests[request.request_id] = request
            request.take_back(chunk)
        self.requests = {request_id: request for request_id, request in self.requests.items() if not request.finished}
        samples = [sample for request in self.requests.values() for sample in request.samples]
        self.scheduler.restart(sample.seq for sample in samples if not sample.finished)
        self._abort_what_callbacks_asked()
        self._is_broken = False

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
        return None if self.kv_events is None else self.kv_events.on_batch

    @on_kv_events.setter
    def on_kv_events(self, follower: "Callable[[KVEventBatch], None] | None") -> None:
        if self.kv_events is None:
            example = 'kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}'
            raise ValueError(f"KV events are not gathered: LLM({example}) asks for them")
        self.kv_events.on_batch = follower

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
        return self.known_adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. What runs with it ends as it began. False if there is none of this lora_int_id."""
        return self.known_adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The lora_int_ids of all adapters that are known."""
        return {request.lora_int_id for request in self.known_adapters.requests}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the CPU's memory, however many others are named. Raises ValueError for an unknown one."""
        return self.known_adapters.pin(lora_id)

    def __getattr__(self, name: str) -> Any:
        """Raises an AttributeError that says what to use instead of a method that vLLM's LLMEngine has."""
        if hasattr(type(self), name):  # one of our properties has raised an AttributeError: show that one
            return object.__getattribute__(self, name)
        from nanovllm.compat.refused import refused_method

        raise refused_method(type(self), name)
