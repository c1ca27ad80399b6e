"""What an engine is assembled from, by its options and by what its requests ask for. Nothing is loaded before that."""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig

if TYPE_CHECKING:
    from nanovllm.features.grammar.grammar import GrammarCompiler
    from nanovllm.features.lora.registry import KnownAdapters
    from nanovllm.outputs import RequestOutput
    from nanovllm.request import Request


def make_runner(config: EngineConfig, model_config: ModelConfig) -> Any:
    """The model runner, or what stands for one in each of several processes."""
    if config.tensor_parallel_size > 1:
        from nanovllm.features.parallel.ranks import ParallelRunner

        return ParallelRunner(config, model_config)
    from nanovllm.worker.model_runner import ModelRunner

    return ModelRunner(config, model_config)


class Features:
    """known_adapters: those that requests have named. grammars: a compiler of what answers must fit."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, tokenizer: Any) -> None:
        self.config, self.model_config, self.tokenizer = config, model_config, tokenizer

    @cached_property
    def known_adapters(self) -> "KnownAdapters":
        from nanovllm.features.lora.registry import KnownAdapters

        return KnownAdapters(self.model_config, self.config)

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        from nanovllm.features.grammar.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)

    def with_output_kind(self, request: "Request") -> "Request":
        """The same; step() gives what its output_kind asks for."""
        from nanovllm.features.callers.output_kind import OutputFilter, RequestOutputKind

        request.stream &= request.params.output_kind is not RequestOutputKind.FINAL_ONLY
        if request.params.output_kind is RequestOutputKind.DELTA and request.stream:
            request.output_filter = OutputFilter(RequestOutputKind.DELTA)
        return request

    def as_asked(self, outputs: "list[RequestOutput]", requests: "list[Request]") -> "list[RequestOutput]":
        """A step's outputs as their requests want them, once nothing can take the step back."""
        filters = {r.request_id: r.output_filter for r in requests if r.output_filter is not None}
        taken = ((f.take(o) if (f := filters.get(o.request_id)) else o) for o in outputs) if filters else outputs
        return [output for output in taken if output is not None]

    @cached_property
    def beam_search(self) -> Callable[..., Any]:
        from nanovllm.features.beam_search.search import beam_search

        return beam_search

    def scheduler_options(self, directory: Path) -> dict[str, Any]:
        """What the scheduler is given for them. directory: the checkpoint's."""
        options: dict[str, Any] = {"long_prefill_token_threshold": self.config.long_prefill_token_threshold}
        if self.config.enable_lora:
            options["may_run"] = self.known_adapters.may_run
        if self.config.speculative_config is not None:
            from nanovllm.features.speculation.draft_model import make_speculation

            options["speculation"] = make_speculation(self.config, directory, self.model_config, self.tokenizer)
        return options
