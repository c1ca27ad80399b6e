"""LLMEngine: requests in, one step at a time, outputs out (chapter 2).

A step is four hand-offs: the scheduler chooses the work, the model runner computes it, the scheduler takes the sampled
tokens in, the detokenizer turns them into text. Everything a caller can get wrong is checked before a request enters.
"""

import time
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.detokenizer import Detokenizer, decode
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import check_number, reject_unknown

Prompt = str | list[int] | dict[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


@dataclass
class Request:
    """A prompt and its samples while they are generated."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    seqs: list[Sequence]
    detokenizers: list[Detokenizer]
    stream: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None  # of the first admission of sample 0
    logprobs: dict[int, list[dict[int, Logprob]]] = field(default_factory=dict)  # sample index -> its tokens

    @property
    def finished(self) -> bool:
        return all(seq.status is SequenceStatus.FINISHED for seq in self.seqs)


@dataclass
class EngineStats:
    """Counters since the engine was built. Prefill counts tokens known before their step, decode those computed one by
    one, output those sampled."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_finished_requests: int = 0
    step_time_s: float = 0.0


class LLMEngine:
    """The loop. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(self, config: EngineConfig) -> None:
        # Here and not at the top: `import nanovllm` stays light, and core/ is usable where torch is not installed.
        from nanovllm.checkpoint import resolve_checkpoint
        from nanovllm.worker.model_runner import ModelRunner, pack
        from nanovllm.worker.parallel import ParallelRunner

        directory = resolve_checkpoint(config.model)
        model_config = ModelConfig.from_directory(directory)
        runner_class = ModelRunner if config.tensor_parallel_size == 1 else ParallelRunner
        self._pack = pack
        self.model_runner: Any = runner_class(config, model_config)
        self.tokenizer = load_tokenizer(directory)
        if not model_config.eos_token_ids and self.tokenizer.eos_token_id is not None:
            model_config = replace(model_config, eos_token_ids=frozenset([self.tokenizer.eos_token_id]))
        self.model_runner.load(directory)
        self.model_runner.prepare()
        self.config, self.model_config = config, model_config
        self.block_manager = BlockManager(
            self.model_runner.num_blocks,
            self.model_runner.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_algo=config.prefix_caching_hash_algo,
        )
        self.scheduler = Scheduler(
            self.block_manager,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=self.model_runner.max_model_len,
            eos_token_ids=model_config.eos_token_ids,
        )
        self.stats = EngineStats()
        self._requests: dict[str, Request] = {}
        self._request_of_seq: dict[int, tuple[Request, int]] = {}  # seq_id -> (its request, its sample index)
        self._num_requests = 0

    # -- requests -------------------------------------------------------------------------------------------------

    def make_request(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, stream: bool = False
    ) -> Request:
        """Check and tokenize one prompt. Nothing is queued yet. Raises ValueError."""
        text, token_ids, cache_salt = parse_prompt(self.tokenizer, prompt)
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, found {type(params).__name__}")
        vocab_size, max_model_len = self.model_config.vocab_size, self.scheduler.max_model_len
        if not token_ids:
            raise ValueError("the prompt is empty: there is no token to continue from")
        if len(token_ids) >= max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens; max_model_len is {max_model_len}, prompt and output "
                f"together, so at most {max_model_len - 1} fit"
            )
        if (at := next((i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size), None)) is not None:
            vocabulary = f"the vocabulary (0 to {vocab_size - 1})"
            raise ValueError(f"token id {token_ids[at]} at position {at} is outside {vocabulary}")
        for token_id in params.stop_token_ids or ():
            check_number("a stop token id", token_id, Integral, 0, vocab_size - 1)
        if params.logprobs is not None:
            check_number("logprobs", params.logprobs, Integral, 0, vocab_size)

        seqs = [Sequence(token_ids, params, cache_salt=cache_salt) for _ in range(params.n)]
        detokenizers = [Detokenizer(self.tokenizer, params.stop, params.min_tokens) for _ in seqs]  # type: ignore[arg-type]
        metrics = RequestMetrics(arrival_time=time.perf_counter())
        return Request(request_id or "", text, token_ids, params, seqs, detokenizers, stream, metrics)

    def enqueue(self, requests: list[Request]) -> list[str]:
        """Queue requests. Ids and default seeds follow the order given.

        They are admitted in the order of salt and token ids, the order of a depth-first walk over their prefix tree:
        prompts with a common prefix come one after another, while it is still cached, even in a small pool.
        """
        for request in requests:
            while str(self._num_requests) in self._requests:  # somebody chose such an id
                self._num_requests += 1
            index = self._num_requests
            self._num_requests += 1
            request.request_id = request.request_id or str(index)
            if request.request_id in self._requests:
                raise ValueError(f"request id {request.request_id!r} is already in use")
            for sample_index, seq in enumerate(request.seqs):
                seq.sample_index = sample_index
                if request.params.seed is None:
                    seq.seed = self.config.seed * 1_000_003 + index
        for request in sorted(requests, key=lambda r: (r.seqs[0].cache_salt or "", r.prompt_token_ids)):
            self._requests[request.request_id] = request
            for sample_index, seq in enumerate(request.seqs):
                self._request_of_seq[seq.seq_id] = (request, sample_index)
                self.scheduler.add(seq)
        return [request.request_id for request in requests]

    def add_request(
        self, prompt: Prompt, params: SamplingParams, *, request_id: str | None = None, stream: bool = False
    ) -> str:
        """Check one prompt and queue it. Returns its id. Raises ValueError, with the queue as it was.

        stream: step() then returns an output for the request after every step that gave it a token.
        """
        return self.enqueue([self.make_request(prompt, params, request_id=request_id, stream=stream)])[0]

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns its last output, or None when there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for seq in request.seqs:
            self.scheduler.abort(seq.seq_id)
        return self._finish(request)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns outputs of the requests that finished, and of streamed ones that progressed.

        If anything raises, the step is rolled back: its sequences wait again, and the engine stays usable.
        """
        started = time.perf_counter()
        output = self.scheduler.schedule()
        try:
            assert output.chunks or not self._requests, "requests wait and none can be scheduled"
            if not output.chunks:
                return []
            self._note_scheduled(output.chunks, started)
            work = self._pack(output, self.block_manager.block_size, self.model_config.eos_token_ids)
            token_ids, logprobs = self.model_runner.run(*work)
            sampled = [chunk.seq for chunk in output.chunks if chunk.samples]
            self.scheduler.update(output, token_ids)
        except BaseException:
            self.scheduler.roll_back(output)
            raise
        now = time.perf_counter()
        progressed: dict[str, Request] = {}
        for seq, token_logprobs in zip(sampled, logprobs, strict=True):
            request, sample_index = self._request_of_seq[seq.seq_id]
            progressed[request.request_id] = request
            self._take_token(request, sample_index, now)
            if token_logprobs is not None:
                request.logprobs.setdefault(sample_index, []).append(self._logprob_dict(seq.tokens[-1], token_logprobs))
        outputs = []
        for request in progressed.values():
            if request.finished:
                self.stats.num_finished_requests += 1
                outputs.append(self._finish(request))
            elif request.stream:
                outputs.append(self._output(request))

        self.stats.num_steps += 1
        self.stats.num_output_tokens += len(sampled)
        self.stats.step_time_s += time.perf_counter() - started
        return outputs

    # -- helpers --------------------------------------------------------------------------------------------------

    def _note_scheduled(self, chunks: list, now: float) -> None:
        for chunk in chunks:
            request, sample_index = self._request_of_seq[chunk.seq.seq_id]
            if chunk.seq.status is SequenceStatus.PREFILL:
                self.stats.num_prefill_tokens += chunk.end - chunk.start
            else:
                self.stats.num_decode_tokens += 1
            if sample_index == 0 and request.num_cached_tokens is None:
                request.num_cached_tokens = chunk.seq.num_cached_tokens
                request.metrics.first_scheduled_time = now

    def _take_token(self, request: Request, sample_index: int, now: float) -> None:
        """Let a sample's text grow by what was sampled, and end it at a stop string."""
        seq, detokenizer = request.seqs[sample_index], request.detokenizers[sample_index]
        if sample_index == 0:
            request.metrics.first_token_time = request.metrics.first_token_time or now
            request.metrics.last_token_time = now
            request.metrics.num_output_tokens = seq.num_generated_tokens
        # Text that nobody reads while it grows is decoded once, at the end.
        if not (request.stream or request.params.stop) or seq.finish_reason == "stop":
            return
        stop = detokenizer.append([seq.tokens[-1]])
        if stop is not None:
            if seq.status is SequenceStatus.FINISHED:  # by length, with the same token
                seq.finish_reason, seq.stop_reason = "stop", stop
            else:
                self.scheduler.finish(seq, "stop", stop)

    def _logprob_dict(self, token_id: int, found: Any) -> dict[int, Logprob]:
        entries = {token_id: Logprob(found.logprob, found.rank, decode(self.tokenizer, [token_id]))}
        for rank, (top_id, logprob) in enumerate(zip(found.top_token_ids, found.top_logprobs, strict=True), start=1):
            entries.setdefault(top_id, Logprob(logprob, rank, decode(self.tokenizer, [top_id])))
        return entries

    def _finish(self, request: Request) -> RequestOutput:
        del self._requests[request.request_id]
        for seq in request.seqs:
            del self._request_of_seq[seq.seq_id]
        return self._output(request)

    def _output(self, request: Request) -> RequestOutput:
        completions = []
        for index, seq in enumerate(request.seqs):
            ids, logprobs, total = seq.generated_token_ids, None, None
            if request.params.logprobs is not None:
                logprobs = list(request.logprobs.get(index, []))
                total = sum(entries[t].logprob for t, entries in zip(ids, logprobs, strict=True))
            text = self._text(seq, request.detokenizers[index])
            ended = seq.finish_reason, seq.stop_reason
            completions.append(CompletionOutput(index, text, ids, *ended, total, logprobs))
        prompt = request.request_id, request.prompt, request.prompt_token_ids
        progress = request.finished, request.num_cached_tokens or 0, replace(request.metrics)
        return RequestOutput(*prompt, completions, *progress)

    def _text(self, seq: Sequence, detokenizer: Detokenizer) -> str:
        if seq.status is not SequenceStatus.FINISHED:
            return detokenizer.visible_text()
        if isinstance(seq.stop_reason, str):
            return detokenizer.text
        ids = seq.generated_token_ids
        return decode(self.tokenizer, ids[:-1] if seq.finish_reason == "stop" else ids)


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer. FileNotFoundError or ValueError when there is none that works."""
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{directory} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(directory))
    except Exception as error:
        raise ValueError(f"the tokenizer in {directory} cannot be loaded: {error}") from error


def parse_prompt(tokenizer: Any, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
    """(text, token ids, cache salt) of a prompt in any of its forms. Raises ValueError."""
    fields = prompt if isinstance(prompt, dict) else {}
    reject_unknown(map(str, fields), PROMPT_KEYS, "a prompt")
    salt = fields.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise ValueError(f"cache_salt must be a string that is not empty, found {salt!r}")
    text = prompt if isinstance(prompt, str) else fields.get("prompt")
    token_ids = prompt if isinstance(prompt, list | tuple) else fields.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt must be a string, found {type(text).__name__}")
    if token_ids is not None:
        types = set(map(type, token_ids)) if isinstance(token_ids, list | tuple) else {str}
        if not all(issubclass(t, Integral) and t is not bool for t in types):
            raise ValueError(f"prompt token ids must be a list of whole numbers, found {_shorten(token_ids)}")
        return text, [int(t) for t in token_ids], salt
    if text is None:
        raise ValueError(
            "a prompt is a string, a list of token ids or a dict with 'prompt' or 'prompt_token_ids', "
            f"found {_shorten(prompt)}"
        )
    try:
        return text, tokenizer(text).input_ids, salt
    except (TypeError, UnicodeError) as error:
        raise ValueError(f"the prompt is not valid Unicode text: {_shorten(text)}") from error


def render_chat(tokenizer: Any, messages: Any, add_generation_prompt: bool = True) -> dict[str, Any]:
    """One conversation as a prompt, by the checkpoint's chat template. Raises ValueError if the template refuses it."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a conversation is a list of messages, not empty; found {_shorten(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise ValueError(
                f"message {index} must be a dict with strings 'role' and 'content', found {_shorten(message)}"
            )
    if not tokenizer.chat_template:
        raise ValueError("this checkpoint has no chat template; use generate() with a prompt of your own")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        # The template has written the special tokens already.
        return {"prompt": text, "prompt_token_ids": tokenizer(text, add_special_tokens=False).input_ids}
    except Exception as error:  # whatever the checkpoint's template raises
        raise ValueError(f"the chat template does not take these messages: {error}") from error


def _shorten(value: Any, limit: int = 80) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= limit else text[:limit] + '...'}"
