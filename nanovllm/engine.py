"""LLMEngine: requests in, one step at a time, outputs out (chapter 2).

A step is four hand-offs: the scheduler chooses the work, the model runner computes it, the scheduler takes the sampled
tokens in, the requests turn them into text. Everything a caller can get wrong is checked before a request enters.
"""

import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import islice
from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks import forks
from nanovllm.checks.prompt_length import length_check
from nanovllm.checks.requests import bad_word_ids, check_params, check_request_id, check_token_ids
from nanovllm.checks.vllm_names import accepted
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.detokenizer import Detokenizer
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.lora.registry import KnownAdapters
from nanovllm.features.lora.request import LoRARequest
from nanovllm.files.config_json import check_eos
from nanovllm.files.hub import resolve_checkpoint, resolve_tokenizer
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.outputs import RequestMetrics, RequestOutput
from nanovllm.prompts import Prompt, parse_prompt
from nanovllm.request import Request, Sample, prefix_order
from nanovllm.sampling_params import SamplingParams
from nanovllm.stats import EngineStats


class LLMEngine:
    """The loop. Not thread-safe: one thread adds, aborts and steps.

    requests         request id -> those queued or running
    request_of_seq   seq_id -> its request; request.samples[seq.sample_index] is its sample
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError or FileNotFoundError, before any weight is read, for what cannot work."""
        forks.check_process()
        directory = resolve_checkpoint(config.model, config.revision, config.load_format)
        model_config = ModelConfig.from_directory(directory, config.hf_overrides, config.generation_config)
        # Here and not at the top: `import nanovllm` stays light, and core/ is usable where torch is not installed.
        from nanovllm.features.parallel.ranks import ParallelRunner
        from nanovllm.features.speculation.draft_model import make_speculation
        from nanovllm.worker.model_runner import ModelRunner

        runner_class = ModelRunner if config.tensor_parallel_size == 1 else ParallelRunner
        self.model_runner: Any = runner_class(config, model_config)
        self.tokenizer = load_tokenizer(resolve_tokenizer(config.tokenizer) if config.tokenizer else directory)
        if not model_config.eos_token_ids:
            eos = check_eos(self.tokenizer.eos_token_id, model_config.vocab_size, directory)
            model_config = replace(model_config, eos_token_ids=eos)
        speculation = make_speculation(config, directory, model_config, self.tokenizer)
        self.config, self.model_config = config, model_config
        forks.watch()
        self.model_runner.load(directory)
        self.kv_pool = self.model_runner.prepare(model_config.eos_token_ids)
        self.block_manager = BlockManager(
            self.kv_pool.num_blocks,
            self.kv_pool.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_algo=config.prefix_caching_hash_algo,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.kv_pool.max_model_len,
            eos_token_ids=model_config.eos_token_ids,
            speculation=speculation,
            max_loras=config.max_loras if config.enable_lora else None,
        )
        self.check_length = length_check(self.tokenizer, self.kv_pool.max_model_len - 1)
        self.adapters = KnownAdapters(model_config, config)
        self.grammars = GrammarCompiler(self.tokenizer, model_config.vocab_size, model_config.eos_token_ids)
        self.stats = EngineStats()
        self.requests: dict[str, Request] = {}
        self.request_of_seq: dict[int, Request] = {}
        self._num_requests = 0
        self._in_step = False
        self.scheduled: SchedulerOutput | None = None  # the newest step's work; None if schedule() has failed
        self.on_step: Callable[[SchedulerOutput, list[Request]], None] | None = None  # told of every step that succeeds
        self._dropped: list[Request] = []  # have finished or were aborted, and are about to be forgotten

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLMEngine":
        return cls(engine_args)

    # -- requests -------------------------------------------------------------------------------------------------

    def make_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        lora_request: LoRARequest | None = None,
        *,
        request_id: str | None = None,
        stream: bool = False,
        compile_grammar: bool = True,
    ) -> Request:
        """Check and tokenize one prompt. Nothing is queued yet. Raises ValueError.

        compile_grammar=False leaves that, which may take seconds, to compile_grammars().
        """
        check_request_id(request_id)
        text, token_ids, cache_salt = parse_prompt(self.tokenizer, prompt, self.check_length)
        check_token_ids(token_ids, self.model_config.vocab_size, self.scheduler.max_model_len)
        params = check_params(params, self.model_config)
        adapter = self.adapters.check(lora_request)
        bad_words = bad_word_ids(self.tokenizer, params.bad_words, self.model_config.vocab_size)  # type: ignore[arg-type]
        samples = []
        for sample_index in range(params.n):
            seq = Sequence(token_ids, params, cache_salt=cache_salt, lora_id=adapter.lora_id if adapter else None)
            seq.sample_index, seq.bad_word_ids, seq.adapter = sample_index, bad_words, adapter
            samples.append(Sample(seq, Detokenizer(self.tokenizer, params)))
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        request = Request(request_id or "", text, token_ids, params, samples, stream, metrics)
        if compile_grammar:
            self.compile_grammars([request])
        return request

    def compile_grammars(self, requests: list[Request]) -> None:
        """What their outputs have to fit; once for those that share it. Raises ValueError. Any thread may do it."""
        compiled: dict[int, Any] = {}
        for request in requests:
            if (asked := request.params.structured_outputs) is not None:
                grammar = compiled.get(id(asked)) or self.grammars.compile(asked)
                compiled[id(asked)] = grammar
                for sample in request.samples:
                    sample.seq.grammar = copy(grammar)

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests. Ids and default seeds follow the order given.

        They are admitted in the order of salt, adapter and token ids, the order of a depth-first walk over their prefix
        tree: prompts with a common prefix come one after another, while it is still cached, even in a small pool.
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

        options: lora_request. stream: step() returns an output for the request after every step that gave it a token.
        """
        options = accepted(options, ("request_id", "prompt", "params", "lora_request", "stream"), "generate")
        return self.enqueue([self.make_request(prompt, params, request_id=request_id, stream=stream, **options)])[0]

    def abort_request(self, request_ids: str | list[str]) -> RequestOutput | None:
        """End one request now, or several. Returns the last output of one; None for several or if there is none."""
        if not isinstance(request_ids, str):
            self.abort_requests([self.requests[i] for i in request_ids if i in self.requests])
            return None
        if (request := self.requests.get(request_ids)) is None:
            return None
        self.abort_requests([request])
        return request.output()

    def abort_requests(self, requests: list[Request]) -> None:
        """End requests now, queued or not. Those that have finished stay as they are."""
        self._settle()
        self.forget(requests)

    def forget(self, requests: list[Request]) -> None:
        """Requests that have finished or are to be aborted: the engine knows nothing of them any more."""
        self._dropped = requests
        seq_ids = [sample.seq.seq_id for request in requests for sample in request.samples]
        self.scheduler.abort(*seq_ids)
        for request in requests:
            if self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]
        for seq_id in seq_ids:
            self.request_of_seq.pop(seq_id, None)
        self._dropped = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. False, with nothing changed, while any request holds blocks.

        reset_running_requests: first let them wait as after a step that failed; they end with the same tokens.
        """
        self._settle()
        if reset_running_requests:
            self.scheduled, self._in_step = None, True
            self._settle()
        return self.block_manager.reset_prefix_cache()

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns outputs of the requests that finished, and of streamed ones that progressed.

        If anything raises, the step is rolled back: its sequences wait again, and the engine stays usable.
        """
        forks.check_process()
        self._settle()
        started, self.scheduled, self._in_step = time.perf_counter(), None, True
        try:
            output = self.scheduled = self.scheduler.schedule()
            assert output.chunks or not self.requests, "requests wait and none can be scheduled"
            self.note_scheduled(output, started)
            token_ids, logprobs = self.model_runner.run(output) if output.chunks else ([], [])
            self.take_prompt_logprobs(output)
            self.scheduler.update(output, token_ids)
            progressed = self.take_tokens(output, logprobs)
            outputs = [request.output() for request in progressed if request.finished or request.stream]
            if self.on_step is not None:
                self.on_step(output, progressed)
        except BaseException:
            self._settle()
            raise
        self._dropped, self._in_step = [request for request in progressed if request.finished], False
        self.stats.note_step(output, len(self._dropped), time.perf_counter() - started)
        self.forget(self._dropped)
        return outputs

    def note_scheduled(self, output: SchedulerOutput, now: float) -> None:
        """Count the step's tokens, and tell the requests that it works on them. now: when the step began."""
        self.stats.note_scheduled(output)
        for chunk in output.chunks:
            self.request_of_seq[chunk.seq.seq_id].note_scheduled(chunk.seq, now)

    def take_tokens(self, output: SchedulerOutput, logprobs: list) -> list[Request]:
        """Give the sampled tokens to their requests, and end sequences at stop strings. Returns these requests."""
        now, progressed, rows = time.perf_counter(), dict[str, Request](), iter(logprobs)
        for chunk in (chunk for chunk in output.chunks if chunk.samples):
            request = self.request_of_seq[chunk.seq.seq_id]
            progressed[request.request_id] = request
            if (stop := request.take_tokens(chunk, list(islice(rows, chunk.num_logits)), now)) is not None:
                self.scheduler.finish(chunk.seq, "stop", stop)
        return list(progressed.values())

    def take_prompt_logprobs(self, output: SchedulerOutput) -> None:
        if any(not chunk.seq.reads_cache for chunk in output.chunks):
            for seq_id, position, found in self.model_runner.take_prompt_logprobs():
                self.request_of_seq[seq_id].take_prompt_logprobs(position, found)

    # -- what an exception has interrupted ------------------------------------------------------------------------

    def _settle(self) -> None:
        """Finish what an exception interrupted, in whatever line: roll a step back, forget the dropped requests.

        It may be interrupted itself; then it is called again before anything else is done.
        """
        if self._in_step:
            self.scheduler.roll_back(self.scheduled)
            for chunk in self.scheduled.chunks if self.scheduled is not None else ():
                if chunk.samples:
                    self.request_of_seq[chunk.seq.seq_id].roll_back(chunk)
            self._dropped, self._in_step = [], False
        elif self._dropped:
            self.forget(self._dropped)
            self.scheduler.roll_back(None)  # blocks that were being freed may be in no table and in no queue
