"""Endpoints for whoever runs the server, and for programs that count tokens: vLLM's, with its answers."""

import asyncio
import re
from numbers import Integral
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm import __version__
from nanovllm.checks.values import check_range, check_switch, list_of, shorten
from nanovllm.prompts import tokenize
from nanovllm.serving.async_llm import AsyncLLM, OpensImages
from nanovllm.serving.http.metrics import Metrics
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import Refused, json_response, read_body, unless_gone
from nanovllm.serving.openai.fields import warning_headers, warning_of, without_unknown
from nanovllm.serving.openai.json_lines import parse_json
from nanovllm.serving.openai.openai_request import (
    MAX_ENTRIES,
    OPTIONS_OF_BODY,
    chat_options,
    check_lengths,
    model_of,
    refuse_template,
)

OF_TEXTS = ("model", "prompt", "add_special_tokens", "return_token_strs")
OF_CHATS = ("model", "messages", "add_generation_prompt", "add_special_tokens", "return_token_strs", *OPTIONS_OF_BODY)
OF_TOKENS = ("model", "tokens")
WHERE = re.compile("_file|_path|local")  # fields of a tokenizer that say where it lies, which is nobody's business
SWITCHES = ("add_generation_prompt", "add_special_tokens", "return_token_strs")


class Operation:
    """llm: whose tokenizer and whose cache. Texts of any length are tokenized, one at a time; nobody else waits."""

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...], options: ServeOptions, metrics: Metrics) -> None:
        self.llm, self.names, self.options, self.metrics = llm, names, options, metrics
        self._places = asyncio.Semaphore(1)

    def routes(self) -> list[Route]:
        routes = [
            Route("/version", self.version),
            Route("/ping", self.ping, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        if self.options.enable_tokenizer_info_endpoint:
            routes.append(Route("/tokenizer_info", self.tokenizer_info))
        return routes

    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def ping(self, request: Request) -> Response:
        """/health under the name that SageMaker asks for."""
        await self.llm.check_health()
        return Response()

    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self.metrics.num_answering})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """?reset_running_requests=true: running requests give their blocks back first, and are computed again.
        reset_external=true: what is kept beside the pool goes, too."""
        success = await self.llm.reset_prefix_cache(
            reset_running_requests=_switch_of_query(request, "reset_running_requests"),
            reset_connector=_switch_of_query(request, "reset_external"),
        )
        return json_response({"success": success})

    async def tokenize(self, request: Request) -> Response:
        """{"prompt": TEXT} or {"messages": [...]}: the tokens that a completion or a chat would have."""
        return await self._answer(request, self._tokens)

    async def detokenize(self, request: Request) -> Response:
        return await self._answer(request, self._text)

    async def _answer(self, request: Request, answer: Any) -> Response:
        raw = await read_body(request, self.options.max_body_bytes)
        return await unless_gone(request.receive, self.llm.prepare(lambda: answer(parse_json(raw)), self._places))

    def _tokens(self, given: dict[str, Any]) -> Response | OpensImages[Response]:
        is_chat = given.get("messages") is not None
        if is_chat and given.get("prompt") is not None:
            raise ValueError("a body has a prompt or messages, found both")
        body, left_out = self._read(given, OF_CHATS if is_chat else OF_TEXTS)
        check_lengths(body, MAX_ENTRIES)
        for name in SWITCHES:
            check_switch(name, body.get(name, False))
        tokenizer = self.llm.llm.get_tokenizer()
        if is_chat:
            refuse_template(body)
            chat = chat_options(body, self.options.parsers)
            add_generation_prompt = body.get("add_generation_prompt", True)
            prompt = self.llm.llm.chat_prompt(body["messages"], add_generation_prompt, is_trusted=False, **chat)
            text, is_special = prompt["prompt"], body.get("add_special_tokens", False)
        else:
            prompt = None
            text, is_special = body.get("prompt"), body.get("add_special_tokens", True)
        if not isinstance(text, str):
            raise ValueError(f"a body has a prompt, which is a text, or messages; found {shorten(given)}")
        if prompt is None or is_special:
            tokens = tokenize(tokenizer, text, add_special_tokens=is_special)
        else:
            tokens = prompt["prompt_token_ids"]

        def respond(tokens: list[int]) -> Response:
            answer = {"count": len(tokens), "max_model_len": self.llm.engine.scheduler.max_model_len, "tokens": tokens}
            strings = tokenizer.convert_ids_to_tokens(tokens) if body.get("return_token_strs") else None
            return json_response(answer | {"token_strs": strings}, headers=warning_headers(warning_of(left_out)))

        def finish() -> Response:
            if prompt is None or "multi_modal_data" not in prompt:
                return respond(tokens)
            from nanovllm.features.images.requests import with_placeholders

            return respond(with_placeholders(self.llm.engine, prompt, tokens))

        return OpensImages.if_any([prompt], finish)

    def _text(self, given: dict[str, Any]) -> Response:
        body, left_out = self._read(given, OF_TOKENS)
        if not isinstance(tokens := body.get("tokens"), list):
            raise ValueError(f"tokens must be a list of ids, found {shorten(tokens)}")
        list_of(tokens, Integral, "ids", "tokens")
        check_range("a token id", tokens, 0, self.llm.engine.model_config.vocab_size - 1)
        text = self.llm.llm.get_tokenizer().decode(tokens)
        return json_response({"prompt": text}, headers=warning_headers(warning_of(left_out)))

    def _read(self, given: dict[str, Any], known: tuple[str, ...]) -> tuple[dict[str, Any], list[str]]:
        body, left_out = without_unknown(given, known)
        model_of(self.llm.llm, body, self.names)
        return body, left_out

    async def tokenizer_info(self, request: Request) -> Response:
        """What tokenizer_config.json says, for clients that tokenize as the server does."""
        tokenizer = self.llm.llm.get_tokenizer()
        info = {name: _plain(value) for name, value in tokenizer.init_kwargs.items() if not WHERE.search(name)}
        info |= {"tokenizer_class": type(tokenizer).__name__, **tokenizer.special_tokens_map}
        return json_response(info | {"chat_template": tokenizer.chat_template})


def _switch_of_query(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise Refused(400, f"{name} must be true or false, found {shorten(value)}")
    return value in ("true", "1")


def _plain(value: Any) -> Any:
    """As JSON has it. An added token is a dict of what it says of itself."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__getstate__") and hasattr(value, "content"):
        return _plain(value.__getstate__())
    return value if isinstance(value, str | int | float | bool | None) else str(value)
