"""LLM: the public API, shaped like vLLM's offline one, so that a script moves between the two by its import.

llm = LLM("path/or/hub-id")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
    print(output.outputs[0].text)
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nanovllm import wings
from nanovllm.calls import Calls
from nanovllm.checks.names import known_names
from nanovllm.checks.values import make_all
from nanovllm.config import EngineConfig, check_config
from nanovllm.engine import LLMEngine
from nanovllm.outputs import RequestOutput
from nanovllm.prompts import Prompt, items_of, one_per_prompt, split_prompts
from nanovllm.request import Request
from nanovllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanovllm.features.beam_search.params import BeamSearchOutput, BeamSearchParams
    from nanovllm.features.cache_reports.events import KVEventBatch
    from nanovllm.features.callers.metrics import Metric
    from nanovllm.features.chat_template.render import ChatPrompt
    from nanovllm.features.lora.lora_request import LoRARequest
    from nanovllm.features.pooling.outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )
    from nanovllm.features.pooling.params import PoolingParams

Message = dict[str, Any]


class LLM:
    """A model, loaded and ready. Options are those of nanovllm.config.EngineConfig. Several threads may use it at once.

    The constructor raises ValueError or FileNotFoundError for an option or a checkpoint that can't work, if possible
    before it reads any weight.

    Methods do their work here or in a wing, and reach the engine only through these two (calls.py):

    turns   when a call may use the engine
    calls   what it does there: queue requests, make steps, drop requests
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = self.llm_engine = LLMEngine(EngineConfig(model=model, **options))
        self.turns = wings.make_turns(self.engine)  # SharedTurns; Turns, if features/callers/ has been deleted
        self.calls = Calls(self.engine, self.turns)

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> "LLM":
        return cls(**vars(check_config(engine_args)))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: int | Sequence[int] | None = None,
        **vllm_options: Any,
    ) -> list[RequestOutput]:
        """Complete prompts. Returns one output for each prompt, in the order of the prompts.

        A prompt is a string, a list of token ids, or a dict with "prompt" or "prompt_token_ids" and perhaps
        "cache_salt". Several prompts come in any sequence: a list, a deque, a column of a data set, a pandas Series, an
        array. sampling_params is one for all or one for each; None takes the checkpoint's defaults. use_tqdm shows a
        progress bar, on a terminal or in a notebook. lora_request is an adapter for all prompts, or a sequence with an
        adapter or None for each. priority is a number for all or a sequence with one for each; it needs
        scheduling_policy="priority", and the lowest number comes first. vllm_options: other arguments of vLLM's
        generate(), accepted at values that change nothing here.

        Two requests share K/V only if they have the same cache_salt, or if neither has one. So a fast first token never
        tells one tenant that another tenant has sent the same text. A salt does not hide load: another tenant's
        requests still queue before yours and evict your blocks, and both can be timed.

        Raises one ValueError, before any work is done, that lists the bad prompts by index (at most twenty). Ctrl-C
        takes effect between two steps: the call's requests are dropped, and the LLM stays usable.
        """
        requests = self._requests("generate", prompts, sampling_params, lora_request, priority, vllm_options)
        return self.calls.complete(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: int | Sequence[int] | None = None,
        *,
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, each a list of {"role", "content"}, with the chat template.

        options: those in features/chat_template/chat.py; render_chat() in render.py, beside it, explains them.
        """
        items = items_of(messages)
        conversations: list[Any] = [items_of(item) for item in items or ()]  # None for a message, which is a dict
        if not conversations or None in conversations:  # one conversation, a list of messages
            conversations = [messages if items is None else items]

        def make_prompt(conversation: list[Message]) -> "ChatPrompt":
            return self.chat_prompt(conversation, add_generation_prompt, cache_salt, **options)

        prompts = make_all("conversations", conversations, make_prompt)
        return self.generate(prompts, sampling_params, use_tqdm, lora_request, priority)

    def chat_prompt(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        cache_salt: str | None = None,
        *,
        mm_processor_kwargs: dict[str, Any] | None = None,
        is_trusted: bool = True,
        **options: Any,
    ) -> "ChatPrompt":
        """One conversation as a prompt for generate() or stream(). Raises ValueError if the template refuses it.

        mm_processor_kwargs: options of the model's image processor. is_trusted: the messages may name any image file of
        this machine; False: those below allowed_local_media_path.
        """
        chat = wings.load("features.chat_template.chat")
        return chat.chat_prompt(
            self.engine,
            messages,
            add_generation_prompt=add_generation_prompt,
            cache_salt=cache_salt,
            mm_processor_kwargs=mm_processor_kwargs,
            is_trusted=is_trusted,
            **options,
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: "LoRARequest | None" = None,
        priority: int | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield growing outputs of one prompt, the last with finished=True. Text only ever grows.

        sampling_params.output_kind may ask for what is new each time (DELTA), or for the last output (FINAL_ONLY).
        The prompt is checked at once and queued when the first output is asked for. Leaving the loop early aborts it.
        """
        params = self._params_list(sampling_params, 1)[0]
        outputs = self.calls.stream(self.engine.make_request(prompt, params, lora_request, priority, stream=True))
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            return outputs
        return wings.load("features.callers.output_kind").OutputFilter(params.output_kind).through(outputs)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: "BeamSearchParams",
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
        **options: Any,
    ) -> "list[BeamSearchOutput]":
        """Find the most probable continuations of prompts, with vLLM's names and scores (features/beam_search).

        concurrency_limit: the number of prompts in progress at the same time. options: priority, as in generate().
        Raises ValueError.
        """
        options |= {"lora_request": lora_request, "use_tqdm": use_tqdm, "concurrency_limit": concurrency_limit}
        beam_search = wings.load("features.beam_search.search").beam_search
        return self.turns.call(partial(beam_search, self, prompts, params, **options))

    def abort(self, request_id: str) -> None:
        """End a streamed request: its iterator yields a last output (finish_reason "abort"). Unknown ids are ignored.

        A callback that a step runs (a logits processor, on_step, on_kv_events) may call abort(), stats() and
        get_metrics(); the request then ends when the step ends. Any other call that needs the engine raises
        RuntimeError in the middle of a step.
        """
        self.turns.take(partial(self.engine.abort_request, request_id), within=True)

    def stats(self) -> dict[str, Any]:
        """Counters of engine, scheduler, KV pool and prefix cache since the LLM was built.

        prefix_cache counts blocks, except for hit_tokens, which counts tokens. Its recent_hit_rate is the hit rate of
        the last 1,000 admissions since the cache was reset, and its utilization is the share of the pool that is
        cached. For an interval, subtract two engine.block_manager.stats.snapshot().

        batch_invariant says where a prompt's logits have the same bits whatever runs beside it: "on every processor",
        "on processors that multiply pairs of bf16" (AVX512-BF16), "on processors that multiply matrices of bf16"
        (AMX), or "not promised". Of a model that sees images it also says where these are looked at with the same bits.
        end_tokens maps each token id that ends an answer to who says so: files of the checkpoint, the tokenizer,
        hf_overrides. images is there once an image has come: tower_runs, one for each image that was looked at, and
        tower_bytes, of its weights on all ranks.
        """
        snapshot = wings.load("features.callers.snapshot").snapshot
        return self.turns.take(partial(snapshot, self.engine), within=True)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes, as LLMEngine.reset_prefix_cache describes it."""
        return self.turns.take(partial(self.engine.reset_prefix_cache, reset_running_requests, reset_connector))

    def get_default_sampling_params(self) -> SamplingParams:
        """The checkpoint's generation_config.json as SamplingParams, with vLLM's defaults for what it leaves out."""
        return SamplingParams(**self.engine.model_config.generation)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None" = None,
        priority: int | Sequence[int] | None = None,
        **vllm_options: Any,
    ) -> list[str]:
        """Queue prompts and compute nothing yet. The arguments are those of generate(). Returns the requests' ids."""
        requests = self._requests("enqueue", prompts, sampling_params, lora_request, priority, vllm_options)
        return self.calls.enqueue(requests)

    def wait_for_completion(self, output_type: Any = None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Compute what was enqueued. Returns one output for each prompt, in the order in which the prompts came.

        output_type is accepted because vLLM has it. The outputs are RequestOutputs, whatever it says.
        """
        return self.calls.wait(use_tqdm)

    def get_tokenizer(self) -> Any:
        """The checkpoint's tokenizer, as transformers loads it."""
        return self.engine.tokenizer

    def get_metrics(self) -> "list[Metric]":
        """Counters since the engine was built, under vLLM's names; stats() has more, under ours."""
        return self.turns.take(self.engine.get_metrics, within=True)

    @property
    def on_kv_events(self) -> "Callable[[KVEventBatch], None] | None":
        """A function that is called when the set of cached blocks has changed. See LLMEngine.on_kv_events."""
        return self.engine.on_kv_events

    @on_kv_events.setter
    def on_kv_events(self, follower: "Callable[[KVEventBatch], None] | None") -> None:
        self.engine.on_kv_events = follower

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what PyTorch does until stop_profile(). Raises ValueError without LLM(profiler_config=...)."""
        self.engine.start_profile(profile_prefix)

    def stop_profile(self) -> None:
        """End the recording and write its trace. Do nothing if no recording was started."""
        self.engine.stop_profile()

    # -- with runner="pooling": arguments and errors are those of features/pooling/calls.py ------------------------

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: "PoolingParams | Sequence[PoolingParams] | None" = None,
        **options: Any,
    ) -> "list[PoolingRequestOutput]":
        """Compute what embed() or classify() returns, as a tensor in outputs.data.

        The option pooling_task is needed, and says which of the two: "embed" or "classify".
        """
        return wings.load("features.pooling.calls").encode(self, prompts, pooling_params, **options)

    def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> "list[EmbeddingRequestOutput]":
        """Compute an embedding of each prompt: outputs.embedding, a list of numbers, scaled to length 1 by default."""
        return wings.load("features.pooling.calls").embed(self, prompts, **options)

    def classify(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> "list[ClassificationRequestOutput]":
        """Compute outputs.probs of each prompt: a number for each label of the checkpoint."""
        return wings.load("features.pooling.calls").classify(self, prompts, **options)

    def score(
        self, data_1: str | list[str], data_2: str | list[str], /, **options: Any
    ) -> "list[ScoringRequestOutput]":
        """Compute outputs.score of each pair of a query and a document.

        data_1 is one query, or a list with a query for each document; data_2 is one document or a list of documents.
        """
        return wings.load("features.pooling.calls").score(self, data_1, data_2, **options)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _requests(
        self,
        method: str,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: "LoRARequest | Sequence[LoRARequest | None] | None",
        priority: int | Sequence[int] | None,
        vllm_options: dict[str, Any],
    ) -> list[Request]:
        prompt_list = split_prompts(prompts)
        # Raises ValueError for an unknown name, and for an option of vLLM's whose value would change something. The
        # names are for the error's suggestion; use_tqdm may come from enqueue(), where vLLM has it.
        known_names(vllm_options, ("prompts", "sampling_params", "use_tqdm", "lora_request", "priority"), method)
        params_list = self._params_list(sampling_params, len(prompt_list))
        adapters = one_per_prompt("lora_request", lora_request, len(prompt_list))
        priorities = one_per_prompt("priority", priority, len(prompt_list))

        def make_request(index: int) -> Request:
            return self.engine.make_request(
                prompt_list[index], params_list[index], lora_request=adapters[index], priority=priorities[index]
            )

        return make_all("prompts", list(range(len(prompt_list))), make_request)

    def _params_list(self, params: SamplingParams | Sequence[SamplingParams] | None, num: int) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        return one_per_prompt("sampling_params", params, num)
