"""Bodies that ask for embeddings and scores: OpenAI's /v1/embeddings, Cohere's /rerank, vLLM's /score and /pooling.

One translation for batch jobs and for the server, as openai_request.py is for generated text.
"""

import base64
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from typing import Any, NamedTuple

from nanovllm import LLM
from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_choice, check_number, check_switch, check_text, make_all, shorten
from nanovllm.features.pooling.outputs import PoolingRequestOutput
from nanovllm.features.pooling.params import PoolingParams
from nanovllm.features.pooling.requests import PoolingRequest, Truncation, make_request, pooling_of
from nanovllm.features.pooling.scoring import Pairs
from nanovllm.serving.openai.openai_request import model_of, split_prompt

EMBEDDINGS, POOLING = "/v1/embeddings", "/pooling"
RERANK, SCORE = ("/rerank", "/v1/rerank", "/v2/rerank"), ("/score", "/v1/score")
URLS = (EMBEDDINGS, *RERANK, *SCORE, POOLING)
COMMON = {"model", "truncate_prompt_tokens", "truncation_side", "add_special_tokens", "use_activation"}
COMMON |= {"cache_salt", "priority"}
OF_TEXTS = COMMON | {"input", "dimensions", "encoding_format"}
LENGTHS = ("max_tokens_per_query", "max_tokens_per_doc")
OF_PAIRS = COMMON - {"add_special_tokens"} | {"instruction", "chat_template_kwargs", *LENGTHS}
NAMES = (("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2"))  # of /score
KNOWN_BY_URL = {EMBEDDINGS: OF_TEXTS, POOLING: OF_TEXTS | {"task"}}
KNOWN_BY_URL |= dict.fromkeys(RERANK, OF_PAIRS | {"query", "documents", "top_n", "return_documents"})
KNOWN_BY_URL |= dict.fromkeys(SCORE, OF_PAIRS | {name for names in NAMES for name in names})
MAX_TEXTS = 2048  # of one body: OpenAI's limit
MAX_CHARS_OF_PAIRS = 20_000_000  # of one body's prompts: a classifier reads a query with each of its documents

BODY = "body of an embedding"  # in errors, and in compat/neutral.py

Respond = Callable[[str, list[PoolingRequestOutput]], dict[str, Any]]  # (id, outputs of the requests) -> the answer


class PoolingJob(NamedTuple):
    """A body's requests, and what their outputs are answered with."""

    requests: list[PoolingRequest]
    respond: Respond


def translate(
    llm: LLM,
    url: str,
    body: dict[str, Any],
    served_names: tuple[str, ...],
    salt: str = "",
    request_id: str = "",
    chat_template: str | None = None,
) -> PoolingJob:
    """salt: a tenant's. request_id: what the requests' ids begin with. chat_template: of a classifier's pairs.

    Raises ValueError for what cannot be honoured.
    """
    pooling_of(llm.engine, url)
    body = known_names(body, sorted(KNOWN_BY_URL[url]), BODY)
    model, adapter = model_of(llm, body, served_names)
    own = body.get("cache_salt")
    if own is not None and not (own and isinstance(own, str)):
        raise ValueError(f"cache_salt must be a string that is not empty, found {shorten(own)}")
    asked = _Asked(
        llm=llm,
        model=model,
        adapter=adapter,
        params=PoolingParams(
            use_activation=body.get("use_activation"), dimensions=body.get("dimensions"), task=body.get("task")
        ),
        truncation=Truncation.of(**{name: body[name] for name in Truncation.__dataclass_fields__ if name in body}),
        salt=salt + (own or ""),
        request_id=request_id,
        priority=body.get("priority"),
        chat_template=chat_template,
    )
    if url in (EMBEDDINGS, POOLING):
        return asked.texts(url, body)
    return asked.ranked(body) if url in RERANK else asked.scored(body)


@dataclass(frozen=True)
class _Asked:
    llm: LLM
    model: str
    adapter: Any
    params: PoolingParams
    truncation: Truncation
    salt: str
    request_id: str
    priority: int | None
    chat_template: str | None

    def texts(self, url: str, body: dict[str, Any]) -> PoolingJob:
        form = body.get("encoding_format", "float")
        check_choice("encoding_format", form, ("float", "base64"))
        prompts, engine = texts_or_tokens(body.get("input")), self.llm.engine
        salted = {"cache_salt": self.salt} if self.salt else {}

        def make(numbered: tuple[int, dict[str, Any]]) -> PoolingRequest:
            number, prompt = numbered
            given = f"{self.request_id}-{number}" if self.request_id else None
            task = "embed" if url == EMBEDDINGS else None
            return make_request(
                engine,
                prompt | salted,
                self.params,
                self.adapter,
                self.truncation,
                request_id=given,
                task=task,
                priority=self.priority,
            )

        return PoolingJob(make_all("input", list(enumerate(prompts)), make), partial(self._vectors, url, form))

    def _vectors(self, url: str, form: str, answer_id: str, outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
        kind, name = ("embedding", "embedding") if url == EMBEDDINGS else ("pooling", "data")
        vectors = [shown(output.outputs.data, form) for output in outputs]
        data = [{"index": index, "object": kind, name: vector} for index, vector in enumerate(vectors)]
        return self._list(f"{'embd' if url == EMBEDDINGS else 'pool'}-{answer_id}", data, outputs)

    def _pairs(self, body: dict[str, Any], names: tuple[str, str]) -> tuple[Pairs, list[PoolingRequest]]:
        documents = body.get(names[1])
        if isinstance(documents, list):
            check_number(f"the number of {names[1]}", len(documents), Integral, 1, MAX_TEXTS)
            documents = [d.get("text", d) if isinstance(d, dict) else d for d in documents]
        pairs = Pairs.of(body.get(names[0]), documents, names)
        pooling = self.llm.engine.model_config.pooling
        assert pooling is not None
        is_pair = pooling.task == "classify"
        times = len(pairs.documents) if is_pair and len(pairs.queries) == 1 else 1
        options = body.get("chat_template_kwargs", {})
        if not isinstance(options, dict) or options.keys() - {"instruction"}:
            raise ValueError(f"chat_template_kwargs of a pair may have an instruction, found {shorten(options)}")
        said = options.get("instruction", body.get("instruction"))
        if not isinstance(said, str | None):
            raise ValueError(f"instruction must be a text, found {shorten(said)}")
        num_chars = times * sum(map(len, pairs.queries)) + sum(map(len, pairs.documents))
        num_chars += len(pairs.documents) * len(said or "")  # where it is not refused, each pair's prompt has it
        check_number("the number of characters of all pairs", num_chars, Integral, 0, MAX_CHARS_OF_PAIRS)
        lengths = {name: check_number(name, body.get(name, 0), Integral, 0) for name in LENGTHS}
        num = len(pairs.documents) + (0 if is_pair else len(pairs.queries))
        requests = pairs.make_requests(
            self.llm.engine,
            self.params,
            lora_requests=[self.adapter] * num,
            truncation=self.truncation,
            chat_template=self.chat_template if is_pair else None,
            instruction=said,
            salt=self.salt or None,
            request_id=self.request_id or None,
            priorities=[self.priority] * num,
            **lengths,
        )
        return pairs, requests

    def scored(self, body: dict[str, Any]) -> PoolingJob:
        if (names := next((names for names in NAMES if all(name in body for name in names)), None)) is None:
            known = ", ".join(" and ".join(names) for names in NAMES)
            raise ValueError(f"a body of /score has two lists of texts: {known}; found {shorten(sorted(body))}")
        pairs, requests = self._pairs(body, names)

        def respond(answer_id: str, outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
            scores = pairs.scores(self.llm.engine, outputs)
            data = [{"index": i, "object": "score", "score": each.outputs.score} for i, each in enumerate(scores)]
            return self._list(f"score-{answer_id}", data, outputs)

        return PoolingJob(requests, respond)

    def ranked(self, body: dict[str, Any]) -> PoolingJob:
        check_text("query", body.get("query"))
        shows = check_switch("return_documents", body.get("return_documents", True))
        top_n = check_number("top_n", body.get("top_n", 0), Integral, 0)
        pairs, requests = self._pairs(body, ("query", "documents"))

        def respond(answer_id: str, outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
            scores = [output.outputs.score for output in pairs.scores(self.llm.engine, outputs)]
            best = sorted(range(len(scores)), key=lambda i: -scores[i])[: top_n or None]
            documents = [{"document": {"text": text}} if shows else {} for text in pairs.documents]
            results = [{"index": i, **documents[i], "relevance_score": scores[i]} for i in best]
            return {"id": f"rerank-{answer_id}", "model": self.model, "results": results, "usage": usage_of(outputs)}

        return PoolingJob(requests, respond)

    def _list(self, answer_id: str, data: list[Any], outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
        head = {"id": answer_id, "object": "list", "created": int(time.time()), "model": self.model}
        return head | {"data": data, "usage": usage_of(outputs)}


def texts_or_tokens(given: Any) -> list[dict[str, Any]]:
    """A text, a list of texts, token ids, a list of those: prompts. Raises ValueError."""
    if not isinstance(given, str | list) or given == []:
        raise ValueError(f"input must be a text, a list of texts, token ids or a list of those, found {shorten(given)}")
    prompts = split_prompt(given)
    check_number("the number of texts", len(prompts), Integral, 1, MAX_TEXTS)
    return prompts


def shown(vector: Any, form: str) -> list[float] | str:
    """As numbers, or as the bytes of float32, little end first: what OpenAI's client asks for."""
    if form == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def usage_of(outputs: list[PoolingRequestOutput]) -> dict[str, Any]:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "prompt_tokens_details": cached}
