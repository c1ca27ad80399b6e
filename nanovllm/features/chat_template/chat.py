"""A conversation as a prompt of an LLM: its template, and the images that it names."""

from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import known_names
from nanovllm.features.chat_template.render import ChatPrompt, render_chat

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

OPTIONS = (
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "chat_template_content_format",
    "tools",
    "mm_processor_kwargs",
)


def chat_prompt(
    engine: "LLMEngine",
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    cache_salt: str | None,
    mm_processor_kwargs: dict[str, Any] | None,
    is_trusted: bool,
    **options: Any,
) -> ChatPrompt:
    """See LLM.chat_prompt."""
    options = known_names(options, OPTIONS, "chat")
    images = engine.model_config.images
    image_token = keep_images = None
    if images is not None:
        from nanovllm.features.images.sources import ClientImages

        image_token = engine.tokenizer.convert_ids_to_tokens(images.image_token_id)
        keep_images = list if is_trusted else ClientImages
    prompt = render_chat(
        engine.tokenizer,
        messages,
        add_generation_prompt,
        check=engine.check_length,
        keep_images=keep_images,
        image_token=image_token,
        **options,
    )
    if cache_salt is not None:
        prompt["cache_salt"] = cache_salt
    if mm_processor_kwargs:
        if images is not None and not is_trusted:
            from nanovllm.features.images.requests import processor_for

            mm_processor_kwargs = processor_for(engine, is_trusted).client_options(mm_processor_kwargs)
        prompt["mm_processor_kwargs"] = mm_processor_kwargs
    return prompt
