"""What a request asks for that changes its logits, checked and put beside its sequences."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine
    from nanovllm.prompts import Asked


def read(engine: "LLMEngine", asked: "Asked") -> None:
    """See wings.READERS."""
    params, classes = asked.params, engine.config.logits_processors
    if params.bad_words:
        from nanovllm.features.logits_processors.bad_words import BadWords  # a table of all tokens' bytes

        asked.parts["bad_words"] = BadWords(engine.tokenizer, list(params.bad_words), engine.model_config.vocab_size)
    if params.repetition_penalty != 1.0:
        from nanovllm.features.logits_processors.prompt_ids import PromptIds

        asked.parts["prompt_ids"] = PromptIds()
    if not params.logits_processors and not classes:
        return
    if engine.config.tensor_parallel_size > 1:
        raise ValueError("logits_processors need tensor_parallel_size=1: a function cannot be sent to the ranks")
    from nanovllm.features.logits_processors.functions import CallersFunctions

    makers = []
    if classes:
        from nanovllm.features.logits_processors.classes import check_classes

        makers = check_classes(engine, params)
    asked.parts["functions"] = CallersFunctions(params.logits_processors, makers)
