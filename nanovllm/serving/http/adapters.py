"""Adapters that come and go while the server runs: vLLM's endpoints, with its answers. Off unless asked for."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from nanovllm.checks.values import shorten
from nanovllm.features.lora.adapter import MissingAdapter
from nanovllm.serving.async_llm import AsyncLLM
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.http.requests import Refused, read_body
from nanovllm.serving.openai.fields import warning_headers, warning_of, without_unknown
from nanovllm.serving.openai.json_lines import parse_json

logger = logging.getLogger("nanovllm")

VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
FIELDS = ("lora_name", "lora_path", "load_inplace", "is_3d_lora_weight", "lora_int_id")


class AdapterUpdates:
    """names: under which the model itself is served, which no adapter may have. One change at a time."""

    def __init__(self, llm: AsyncLLM, names: tuple[str, ...], options: ServeOptions) -> None:
        self.llm, self.names, self.options = llm, names, options
        self._places = asyncio.Semaphore(1)

    def routes(self) -> list[Route]:
        by_variable = os.environ.get(VARIABLE, "").strip().lower() in ("1", "true")
        if not (by_variable or self.options.allow_runtime_lora_updating):
            return []
        logger.warning("who may ask this server may load adapters from any folder of this machine")
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    async def load(self, request: Request) -> Response:
        """{"lora_name": NAME, "lora_path": FOLDER}; load_inplace: true replaces the adapter of that name."""
        return await self._answer(request, self._load)

    async def unload(self, request: Request) -> Response:
        """{"lora_name": NAME}. Requests that run with the adapter end as they began."""
        return await self._answer(request, self._unload)

    async def _answer(self, request: Request, change: Callable[[dict[str, Any]], str]) -> Response:
        raw = await read_body(request, self.options.max_body_bytes)
        body, left_out = without_unknown(parse_json(raw), FIELDS)
        if not isinstance(name := body.get("lora_name"), str) or not name:
            raise Refused(400, f"lora_name must be text that is not empty, found {shorten(name)}")
        if not name.isprintable():  # it stands in answers and in the log
            raise Refused(400, f"lora_name must be printable, found {shorten(ascii(name))}")
        text = await self.llm.prepare(lambda: change(body), self._places)
        logger.info("%s", text)
        return PlainTextResponse(text, headers=warning_headers(warning_of(left_out)))

    def _load(self, body: dict[str, Any]) -> str:
        known, name = self.llm.engine.known_adapters, body["lora_name"]
        if not isinstance(path := body.get("lora_path"), str) or not path:
            raise Refused(400, f"lora_path must be text that is not empty, found {shorten(path)}")
        if body.get("is_3d_lora_weight"):
            raise Refused(400, "is_3d_lora_weight asks for an adapter of experts; there are none here")
        if name in self.names:
            raise Refused(400, f"the model itself is served as {shorten(name)}; an adapter needs another name")
        adapter = known.numbered(name, path, body.get("load_inplace", False))
        if not adapter.load_inplace and name in known.names:
            raise Refused(400, f"the adapter {shorten(name)} is loaded already; load_inplace: true replaces it")
        try:
            known.add(adapter)
        except MissingAdapter as error:
            raise Refused(404, str(error)) from error
        return f"Success: LoRA adapter '{name}' added successfully."

    def _unload(self, body: dict[str, Any]) -> str:
        known, name = self.llm.engine.known_adapters, body["lora_name"]
        if (adapter := known.named(name)) is None:
            raise Refused(404, f"there is no adapter {shorten(name)}; there is {', '.join(known.names) or 'none'}")
        known.remove(adapter.lora_int_id)
        return f"Success: LoRA adapter '{name}' removed successfully."
