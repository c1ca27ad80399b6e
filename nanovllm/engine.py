"""LLMEngine: requests in, one step at a time, outputs out (chapter 2).

step() makes six calls: poll, propose_drafts, schedule, model_runner.run, update, make_outputs.

`requests` is what the engine has promised. Everything else, queues and KV pool included, can be rebuilt from it, and
that is what happens when an exception comes out of the middle of a step.
"""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from nanovllm import wings
from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.callers import WITHIN_A_STEP, check_process, importing, is_within, notify, watch_forks
from nanovllm.checks.names import known_names
from nanovllm.checks.values import list_of
from nanovllm.config import EngineConfig, check_config
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.detokenizer import Detokenizer
from nanovllm.files.hub import resolve_checkpoint, resolve_tokenizer
from nanovllm.files.tokenizer import load_tokenizer, with_eos
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.prompts import Prompt, check_request
from nanovllm.request import Request, Sample, prefix_order
from nanovllm.sampling_params import RequestOutputKind, SamplingParams
from nanovllm.stats import EngineStats

if TYPE_CHECKING:
    from nanovllm.features.cache_reports.events import KVEventBatch
    from nanovllm.features.callers.metrics import Metric
    from nanovllm.features.lora.adapter import Adapter
    from nanovllm.features.lora.lora_request import LoRARequest
    from nanovllm.worker.model_runner import ModelRunnerOutput

SEEDS_PER_ENGINE_SEED = 1_000_003  # so many requests get seeds before those of the next engine seed begin

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def change(
    method: Callable[Concatenate["LLMEngine", Arguments], Result],
) -> Callable[Concatenate["LLMEngine", Arguments], Result]:
    """A method that changes the engine: if it raises, everything is rebuilt (LLMEngine._change)."""

    @wraps(method)
    def changing(self: "LLMEngine", *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        return self._change(partial(method, self, *args, **options))

    return changing


class LLMEngine:
    """The loop. Not thread-safe: one thread adds, aborts and steps.

    wings       {name: Wing}, what its options have put beside it (wings.py), in the order in which they act
    requests    {request id: Request} of those queued or running
    known_adapters, grammars, image_processor; speculation, tiers, block_times, kv_events: see __getattr__()
    to_abort    {request id: Request} of those that the change in progress, or the next step, ends. Any thread may add
                some, at any time
    check_length   called with each prompt's text before it is tokenized. A server refuses here what a stranger has sent
                to keep it busy (files/prompt_length.py)
    last_scheduled   the newest step's work, even if that step has failed; None until its schedule() has returned
    on_step     called near the end of each step that has chunks: (its SchedulerOutput, requests of which a chunk has
                reached its end). If the step fails after that, it is computed again, and on_step is called for it
                again. What on_step raises is logged.
    """

    @importing()
    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or FileNotFoundError for what cannot work, if possible before any weight is read.

        On a GPU, what else fits in memory is known only after the weights have been loaded, so that error comes later.
        """
        check_process()
        self.config = check_config(config)
        directory = resolve_checkpoint(config.model, config.revision, config.load_format)
        self.directory = directory
        model_config = ModelConfig.from_directory(
            directory, overrides=config.hf_overrides, generation_config=config.generation_config, engine_config=config
        )
        tokenizer_place = resolve_tokenizer(config.tokenizer) if config.tokenizer else directory
        self.tokenizer = load_tokenizer(tokenizer_place)
        wings.use_processors_template(self.tokenizer, tokenizer_place, model_config)
        model_config = wings.for_this_gpu(model_config, config, directory)
        self.model_config = with_eos(model_config, self.tokenizer, directory, config.hf_overrides)
        self.wings: dict[str, wings.Wing] = {}
        self.model_runner = wings.make_runner(config, self.model_config)
        prepared = wings.prepare(self)
        watch_forks()
        self.model_runner.load(directory)
        self.kv_pool = self.model_runner.prepare(wings.largest_image(self))
        self.block_manager = wings.make_block_manager(
            self.kv_pool, enable_prefix_caching=config.enable_prefix_caching, hash_algo=config.prefix_caching_hash_algo
        )
        wings.attach(self, prepared)
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.kv_pool.max_model_len,
            eos_token_ids=self.model_config.eos_token_ids,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            may_run=self.known_adapters.may_run if config.enable_lora else None,
        )
        self.check_length: Callable[[str], None] = lambda text: None
        self.stats = EngineStats()
        self.requests: dict[str, Request] = {}
        self.on_step: Callable[[SchedulerOutput, list[Request]], None] | None = None
        self.last_scheduled: SchedulerOutput | None = None
        self.to_abort: dict[str, Request] = {}
        self._next_index = 0
        self._needs_restart = False  # a change has begun and is not complete
        self._profile: Any = None
        self._in_flight: list[tuple[ScheduledChunk, Request]] = []  # the step's work, which restart() takes back

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig, **neutral: Any) -> "LLMEngine":
        """neutral: what vLLM's has beside it, such as usage_context, at the values that ask for nothing."""
        known_names(neutral, (), "LLMEngine.from_engine_args")
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

        compile_grammar=False: the caller will call compile_grammars() itself. Compiling may take seconds.
        """
        asked = check_request(self, prompt, params, lora_request=lora_request, priority=priority, request_id=request_id)
        samples = []
        for sample_index in range(asked.params.n):
            seq = Sequence(
                asked.token_ids,
                asked.params,
                cache_salt=asked.cache_salt,
                lora_id=asked.lora_id,
                mm_spans=asked.mm_spans,
            )
            seq.sample_index = sample_index
            seq.priority = asked.priority
            # One sample is enough: its logits give the prompt's logprobs, so it computes the whole prompt.
            seq.scores_prompt = sample_index == 0 and asked.params.prompt_logprobs is not None
            seq.parts = {name: part.for_sample() for name, part in asked.parts.items()}
            detokenizer = Detokenizer(self.tokenizer, asked.params, asked.token_ids)
            if asked.params.stop:
                seq.stop_checker = detokenizer
            samples.append(Sample(seq, detokenizer))
        request = Request(
            request_id=request_id or "",
            prompt=asked.text,
            prompt_token_ids=asked.token_ids,
            params=asked.params,
            samples=samples,
            stream=stream,
            metrics=RequestMetrics(arrival_time=time.perf_counter()),
        )
        if compile_grammar:
            self.compile_grammars([request])
        return request

    def compile_grammars(self, requests: list[Request]) -> None:
        """Compile the grammars that these requests' outputs must fit. Raises ValueError. Any thread may call it."""
        if any(request.params.structured_outputs is not None for request in requests):
            self.grammars.compile_for(requests)

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests. Ids and default seeds follow the order given. Raises ValueError for an id that is in use.

        Within one call, requests of one priority are not queued in the order given but sorted by salt, adapter and
        token ids. So prompts with a common prefix come one after another, while it is still cached, even in a small
        pool.
        """
        self.recover()  # before ids are looked up: a restart changes `requests`
        self._assign_ids(requests)  # not within the change: a ValueError of a caller's would empty the cache
        self._queue(sorted(requests, key=prefix_order))
        return [request.request_id for request in requests]

    @change
    def _queue(self, requests: list[Request]) -> None:
        for request in requests:
            for sample in request.samples:
                self.scheduler.add(sample.seq)
        self.requests.update({request.request_id: request for request in requests})

    def _assign_ids(self, requests: list[Request]) -> None:
        """Give each request its id and its samples their seed. Raises ValueError before any is given."""
        chosen: set[str] = set()
        for request in requests:
            if request.request_id in self.requests or request.request_id in chosen:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            if request.request_id:
                chosen.add(request.request_id)
        for request in requests:
            while str(self._next_index) in self.requests or str(self._next_index) in chosen:
                self._next_index += 1
            index = self._next_index
            self._next_index += 1
            request.request_id = request.request_id or str(index)
            for sample in request.samples:
                sample.seq.request_id = request.request_id
                if request.params.seed is None:
                    sample.seq.seed = self.config.seed * SEEDS_PER_ENGINE_SEED + index

    def add_request(
        self, request_id: str | None, prompt: Prompt, params: SamplingParams, *, stream: bool = True, **options: Any
    ) -> str:
        """Check one prompt and queue it. Returns the request's id. If it raises ValueError, the queue is unchanged.

        request_id: None lets the engine choose one. options: lora_request, priority. stream: step() returns an output
        for the request after every step that gave it a token, in the form that params.output_kind asks for.
        """
        options = known_names(options, ("lora_request", "priority"), "add_request")
        request = self.make_request(prompt, params, request_id=request_id, stream=stream, **options)
        if request.params.output_kind is RequestOutputKind.FINAL_ONLY:
            request.stream = False
        if request.params.output_kind is RequestOutputKind.DELTA and request.stream:
            output_kind = wings.load("features.callers.output_kind")
            request.output_filter = output_kind.OutputFilter(RequestOutputKind.DELTA)
        return self.enqueue([request])[0]

    def abort_request(self, request_ids: str | list[str]) -> RequestOutput | None:
        """End one request, or several, by id; abort_requests() takes the requests themselves.

        Returns the last output if one id is given and its request ends now. Otherwise None: for several ids, for an
        unknown id, and for a callback in the middle of a step. That step ends the request and returns its last output.
        Raises ValueError for ids that are not strings.
        """
        if not isinstance(request_ids, str):
            several = list(request_ids) if isinstance(request_ids, Iterable) else request_ids
            ids = list_of(several, str, "request ids", "request_ids")
            self.abort_requests([self.requests[request_id] for request_id in ids if request_id in self.requests])
            return None
        request = self.requests.get(request_ids)
        if request is None:
            return None
        self.abort_requests([request])
        return None if self._in_change() else request.filtered(request.output())

    def abort_requests(self, requests: list[Request]) -> None:
        """End requests at once or, if a callback calls this within a step, at the step's end. Ignores finished ones."""
        self.to_abort.update({request.request_id: request for request in requests})
        if not self._in_change():
            self._abort_now()

    @change
    def _abort_now(self) -> None:
        self._apply_aborts()

    def _apply_aborts(self) -> list[Request]:
        """End the requests in to_abort. Returns those that were still unfinished.

        They stay in to_abort until the next change begins: should this one fail, restart() has to end them again.
        """
        to_abort = list(self.to_abort.values())
        aborted = [request for request in to_abort if self.requests.get(request.request_id) is request]
        self.scheduler.abort(*(sample.seq.seq_id for request in aborted for sample in request.samples))
        for request in aborted:
            del self.requests[request.request_id]
        return aborted

    @change
    def isolate(self, requests: list[Request] | None) -> None:
        """Let nobody but these requests run until isolate(None). All others wait, also those that run now."""
        samples = None if requests is None else [sample for request in requests for sample in request.samples]
        self.scheduler.isolate(None if samples is None else [sample.seq.seq_id for sample in samples])

    @change
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. Returns False, and forgets nothing, while any request holds blocks.

        reset_running_requests: first take the blocks of the running requests. These wait, are computed again and end
        with the same tokens. reset_connector: also forget what is kept outside the pool, in memory and on a disk.
        """
        while reset_running_requests and self.scheduler.running:
            self.scheduler.preempt_last()
        was_reset = self.block_manager.reset_prefix_cache()
        if was_reset and reset_connector:
            for wing in self.wings.values():
                wing.reset()
        return was_reset

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # -- the step -------------------------------------------------------------------------------------------------

    @change
    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns outputs of requests that have ended, and of streamed ones that got a token.

        If anything raises before the step is complete, all sequences wait again with the tokens from before it.
        Requests that a callback aborted in such a step stay aborted, and no later step returns their last output.
        """
        started = time.perf_counter()
        self.last_scheduled = None
        self.poll()
        drafts = self.propose_drafts()
        scheduled = self.schedule(drafts, started)
        result = self.model_runner.run(scheduled)
        progressed = self.update(scheduled, result)
        return self.make_outputs(scheduled, progressed, started)

    def poll(self) -> None:
        """A step begins: tell each wing. Tiers take in blocks that have arrived."""
        for wing in self.wings.values():
            wing.begin_step(self.scheduler)

    def propose_drafts(self) -> dict[int, list[int]]:
        """{seq_id: draft tokens}, which the step checks beside the tokens that it has to compute."""
        drafts: dict[int, list[int]] = {}
        for wing in self.wings.values():
            drafts |= wing.propose(self.scheduler)
        return drafts

    def schedule(self, drafts: dict[int, list[int]], started: float) -> SchedulerOutput:
        """Choose the step's work. started: the step's time, for the metrics of requests that are first worked on."""
        scheduled = self.scheduler.schedule(drafts)
        assert scheduled.chunks or self.scheduler.next_waiting() is None, (
            "no chunk, although a waiting sequence may start"
        )
        for wing in self.wings.values():
            wing.after_schedule(scheduled)
        self._in_flight = [(chunk, self.requests[chunk.seq.request_id]) for chunk in scheduled.chunks]
        self.last_scheduled = scheduled
        for chunk, request in self._in_flight:
            request.mark_scheduled(chunk.seq, started)
        return scheduled

    def update(self, scheduled: SchedulerOutput, result: "ModelRunnerOutput") -> list[Request]:
        """Give sequences and requests what was computed. Returns the requests of chunks that reached their end."""
        self.scheduler.update(scheduled, result.sampled_token_ids)
        now = time.perf_counter()
        progressed = {}
        results = zip(scheduled.chunks, result.logprobs, result.pooled, result.prompt_logprobs, strict=True)
        for chunk, logprobs, pooled, prompt_logprobs in results:
            request = self.requests[chunk.seq.request_id]
            for position, token_logprobs in prompt_logprobs:
                request.add_prompt_logprobs(position, token_logprobs)
            if chunk.reaches_end:
                request.pooled = pooled
                request.add_tokens(chunk, logprobs, now)
                progressed[request.request_id] = request
        for wing in self.wings.values():
            wing.observe(scheduled)
        return list(progressed.values())

    def make_outputs(
        self, scheduled: SchedulerOutput, progressed: list[Request], started: float
    ) -> list[RequestOutput]:
        """Tell on_step, let go of requests that have ended or are to be aborted, and count the step, last of all.

        Returns outputs of requests that have ended, and of streamed ones that got a token and know their prompt.
        """
        if self.on_step is not None and scheduled.chunks:
            notify(self.on_step, scheduled, progressed)
        finished = [request for request in progressed if request.finished]
        for request in finished:
            del self.requests[request.request_id]
        aborted = self._apply_aborts()
        shown = [
            request for request in progressed + aborted if request.finished or (request.stream and request.knows_prompt)
        ]
        unique = {request.request_id: request for request in shown}  # an aborted request may have got a token, too
        outputs = [request.filtered(request.output()) for request in unique.values()]
        self.stats.count_step(scheduled, len(finished), time.perf_counter() - started)
        return [output for output in outputs if output is not None]

    # -- a change that an exception interrupts --------------------------------------------------------------------

    def _change(self, work: Callable[[], Result]) -> Result:
        """work(), which changes the engine. If it raises, everything is rebuilt from the requests.

        If rebuilding fails as well, the next change begins by rebuilding. Raises RuntimeError if a callback begins a
        change in the middle of another.
        """
        check_process()
        # The stack is asked, not a flag: an exception out of any line may leave a flag set.
        if is_within(LLMEngine._change, self, sys._getframe(1)):
            raise RuntimeError(WITHIN_A_STEP)
        if self._needs_restart:
            self.restart()
        self._in_flight = []
        for request_id, request in list(self.to_abort.items()):
            if self.requests.get(request_id) is not request:  # ended by now; until here a restart would end it again
                self.to_abort.pop(request_id, None)
        self._needs_restart = True
        try:
            result = work()
            self._needs_restart = False
        except BaseException:
            self.restart()
            raise
        return result

    def _in_change(self) -> bool:
        """Is this asked by code that a change runs: an observer, a logits processor, a signal handler?"""
        return is_within(LLMEngine._change, self, sys._getframe())

    @change
    def recover(self) -> None:
        """Rebuild what a failed change could not rebuild itself. Every change begins with that; this one does no more.

        Raises RuntimeError within a change.
        """

    def restart(self) -> None:
        """Rebuild everything from the requests. All wait, with the tokens from before the step; nothing is cached.

        It relies on `requests`, `_in_flight` and `to_abort` only, so it may follow an exception in any line, even in
        one of its own.
        """
        self._needs_restart = True
        for chunk, request in self._in_flight:
            self.requests[request.request_id] = request
            request.roll_back(chunk)
        self.requests = {request_id: request for request_id, request in self.requests.items() if not request.finished}
        samples = [sample for request in self.requests.values() for sample in request.samples]
        self.scheduler.restart(sample.seq for sample in samples if not sample.finished)
        self._apply_aborts()
        self._needs_restart = False

    # -- more methods that vLLM's engine has ----------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, as transformers loads it."""
        return self.tokenizer

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def get_metrics(self) -> "list[Metric]":
        """Counters since the engine was built, under vLLM's names."""
        return wings.load("features.callers.metrics").metrics_of(self)

    @property
    def on_kv_events(self) -> "Callable[[KVEventBatch], None] | None":
        """The stepping thread calls this when the set of cached blocks has changed (features/cache_reports/events.py).

        What it raises is logged. It may call stats() and abort() of an LLM, and must not wait for an event loop.
        Setting it raises ValueError without LLM(kv_events_config=...).
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
        if self._profile is not None:
            raise ValueError("a profile is being recorded: stop_profile() ends it")
        self._profile = wings.load("features.callers.profile").Profile.of(self, profile_prefix)

    def stop_profile(self) -> None:
        """End the recording and write its trace. Do nothing if no recording was started."""
        profile, self._profile = self._profile, None
        if profile is not None:
            profile.stop()

    def add_lora(self, lora_request: "LoRARequest") -> bool:
        """Read an adapter before a request names it. Returns False if it is known already. Raises ValueError."""
        return self.known_adapters.add(lora_request)

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that use it keep it to their end. Returns False for an unknown lora_int_id."""
        return self.known_adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The lora_int_ids of all adapters that are known."""
        return {request.lora_int_id for request in self.known_adapters.requests}

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in the CPU's memory, however many others are named. Raises ValueError for an unknown one."""
        return self.known_adapters.pin(lora_id)

    def __getattr__(self, name: str) -> Any:
        """What a wing keeps beside the engine (wings.py), by its name. None for a Wing that no option has asked for."""
        if name in wings.ON_DEMAND:
            # Of two threads that ask at once, both get what the first has put there.
            return vars(self).setdefault(name, wings.load(wings.ON_DEMAND[name]).make(self))
        if name in wings.BESIDE_AN_ENGINE and "wings" in vars(self):
            return self.wings.get(name)
        return object.__getattribute__(self, name)  # raises the AttributeError, also the one of a property's code
