"""What `nanovllm serve` may be told, beside the engine's options. Nothing of a server is imported here."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.checks.names import check_options, option
from nanovllm.checks.values import check_choice, list_of, shorten
from nanovllm.features.chat_template.messages import FORMATS_OF_CONTENT
from nanovllm.features.chat_template.renderer import check_syntax
from nanovllm.features.reasoning.think import OFF, TAGS
from nanovllm.features.tool_calls.parse import FORMATS
from nanovllm.serving.openai.reading import Parsers

# The options by what they are for: `nanovllm serve --help` shows them so.
GROUPS: dict[str, tuple[str, ...]] = {
    "address and access": ("host", "port", "api_key", "allowed_origins"),
    "names": ("served_model_name", "lora_modules", "allow_runtime_lora_updating"),
    "limits": ("max_waiting", "request_timeout", "shutdown_timeout", "max_body_bytes", "max_logprobs"),
    "tool calls and reasoning": ("tool_call_parser", "reasoning_parser", "exclude_tools_when_tool_choice_none"),
    "the chat template": ("chat_template", "default_chat_template_kwargs", "chat_template_content_format"),
    "answers": ("return_tokens_as_token_ids", "enable_force_include_usage", "enable_tokenizer_info_endpoint"),
    "the log and the page": ("disable_log_requests", "disable_log_stats", "classroom"),
}


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nanovllm serve`, beside the engine's."""

    host: str = option("127.0.0.1", "address to listen at; the default is for programs on this machine only")
    port: int = option(8000, "0: any free port", low=0, high=65_535)
    api_key: tuple[str, ...] = option(
        (),
        "requests for /v1 must send one of these (several times, or VLLM_API_KEY); tenants with different keys never "
        "share a prefix",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names by which requests may ask for the model; the first one is shown (default: MODEL; of a checkpoint on "
        "this machine, its folder's name)",
    )
    lora_modules: tuple[str, ...] = option((), "adapters, NAME=PATH, that requests may ask for by their names")
    allow_runtime_lora_updating: bool = option(
        False,
        "let clients load adapters from any folder of this machine: /v1/load_lora_adapter, /v1/unload_lora_adapter "
        "(also VLLM_ALLOW_RUNTIME_LORA_UPDATING=1)",
    )
    max_waiting: int = option(256, "sequences that may wait; requests beyond them are answered by 429", low=1)
    request_timeout: float | None = option(
        None, "seconds that a request may take, waiting included; then it is dropped, and answered by 504", 0.001, 1e6
    )
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C", low=0, high=1e6
    )
    max_body_bytes: int = option(0, "of a request; 0: 2,000,000, or 50,000,000 if the model sees images", low=0)
    allowed_origins: tuple[str, ...] = option(
        (), "web pages elsewhere that may use this server, such as http://localhost:3000, or *"
    )
    classroom: bool = option(False, "the page at / may pause the engine, step it and slow it down")
    max_logprobs: int = option(
        20, "top tokens that a request may ask for at each position; -1: the whole vocabulary", low=-1
    )
    tool_call_parser: str | None = option(
        None, f"how the model writes calls of tools: {', '.join(FORMATS)} (default: what its chat template shows)"
    )
    reasoning_parser: str | None = option(
        None, f"how the model marks its reasoning: {', '.join(TAGS)}, or {OFF} (default: what its chat template shows)"
    )
    exclude_tools_when_tool_choice_none: bool = option(False, "a request with tool_choice none shows no tools")
    chat_template: str | None = option(
        None, "a file with the chat template of all chats, or the template itself (default: the checkpoint's)"
    )
    default_chat_template_kwargs: dict[str, Any] | None = option(
        None, 'what the chat template asks for by name, such as {"enable_thinking": false}; a request may say otherwise'
    )
    chat_template_content_format: str = option(
        "auto", "contents for the chat template: string, openai (lists of parts), or auto: as the template reads them"
    )
    return_tokens_as_token_ids: bool = option(False, "show tokens beside logprobs as token_id:17, not as text")
    enable_force_include_usage: bool = option(False, "put usage into every chunk of a stream, even if not asked for")
    enable_tokenizer_info_endpoint: bool = option(False, "/tokenizer_info shows the tokenizer and the chat template")
    disable_log_requests: bool = option(False, "do not log a line for each request")
    disable_log_stats: bool = option(False, "no line every ten seconds that says how much is done")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.api_key and (key := os.environ.get("VLLM_API_KEY")):
            object.__setattr__(self, "api_key", (key,))
        for name in ("api_key", "served_model_name", "lora_modules"):
            object.__setattr__(self, name, tuple(list_of(getattr(self, name), str, "texts", name)))
        allowed = list_of(self.allowed_origins, str, "texts", "allowed_origins")
        origins = [origin for text in allowed for origin in _origins(text)]
        object.__setattr__(self, "allowed_origins", tuple(origins))
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            raise ValueError("an --api-key travels in a header: it must be printable ASCII without spaces")
        if not isinstance(kwargs := self.default_chat_template_kwargs, dict | None):
            raise ValueError(f"--default-chat-template-kwargs must be a JSON object, found {shorten(kwargs)}")
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", _chat_template(self.chat_template))
        check_choice("--chat-template-content-format", self.chat_template_content_format, FORMATS_OF_CONTENT)
        for name, known in (("tool_call_parser", FORMATS), ("reasoning_parser", (*TAGS, OFF))):
            if getattr(self, name):  # vLLM's reasoning parser is "" by default
                check_choice(f"--{name.replace('_', '-')}", getattr(self, name), known)

    @property
    def parsers(self) -> Parsers:
        return Parsers(
            tool_call=self.tool_call_parser,
            reasoning=self.reasoning_parser,
            exclude_tools_when_none=self.exclude_tools_when_tool_choice_none,
            template_kwargs=self.default_chat_template_kwargs or {},
            content_format=self.chat_template_content_format,
        )


def _chat_template(given: str) -> str:
    """A template's text: that of a file, if there is one of this name, or else, as in vLLM, it is given itself."""
    text = given
    try:
        if os.path.isfile(given):
            text = Path(given).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ValueError(f"--chat-template: {shorten(given)} cannot be read: {error}") from error
    if "{" not in text:
        raise ValueError(f"--chat-template: {shorten(given)} is neither a template's file nor a template")
    try:
        check_syntax(text)
    except ValueError as error:
        raise ValueError(f"--chat-template: {shorten(given)} is no template: {error}") from error
    return text


def _origins(text: str) -> list[str]:
    """One, or several as a JSON list, which is how vLLM's flag has them."""
    if not text.startswith("["):
        return [text]
    try:
        return list_of(json.loads(text), str, "origins", "--allowed-origins")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--allowed-origins takes origins, or a JSON list of them, found {shorten(text)}") from error
