"""Scores of pairs of texts: a query and a document. Two ways, by what the LLM was built for.

A bi-encoder embeds each text once; a pair's score is the cosine of the angle between its two embeddings. A
cross-encoder reads both texts as one prompt and has a head for the score: slower and better, so it ranks what the other
has found. All prompts of one query begin alike, and the prefix cache computes that once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.checks.values import make_all, shorten
from nanovllm.features.pooling.cutting import Cut
from nanovllm.features.pooling.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from nanovllm.features.pooling.params import PoolingParams
from nanovllm.features.pooling.requests import PoolingRequest, Truncation, make_request, pooling_of
from nanovllm.prompts import items_of, tokenize

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine

# Qwen3-Reranker was trained on this and on nothing else (its model card).
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


def texts_of(name: str, given: Any) -> list[str]:
    """A text, or a sequence of texts. Raises ValueError."""
    items = items_of(given)
    texts = [given] if items is None else items
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a text or a list of texts, not empty; found {shorten(given)}")
    return texts


@dataclass(frozen=True)
class Pairs:
    """One query to all documents, or one to each. make_requests(), then scores() of their outputs."""

    queries: list[str]
    documents: list[str]

    @classmethod
    def of(cls, queries: Any, documents: Any, names: Sequence[str] = ("data_1", "data_2")) -> "Pairs":
        """Raises ValueError."""
        pairs = cls(texts_of(names[0], queries), texts_of(names[1], documents))
        num, others = len(pairs.queries), len(pairs.documents)
        if num not in (1, others):
            raise ValueError(f"{names[0]} must be one text, or as many as {names[1]}: found {num} and {others}")
        return pairs

    def make_requests(
        self,
        engine: "LLMEngine",
        params: PoolingParams | None = None,
        lora_requests: Sequence[Any] | None = None,
        truncation: Truncation = Truncation(),
        chat_template: str | None = None,
        instruction: str | None = None,
        salt: str | None = None,
        request_id: str | None = None,
        max_tokens_per_query: int = 0,
        max_tokens_per_doc: int = 0,
        priorities: Sequence[int | None] | None = None,
    ) -> list[PoolingRequest]:
        """Requests for the queries and then for the documents of a bi-encoder, else for each pair. Raises ValueError.

        lora_requests, priorities: one for each of them. chat_template: of a pair, messages of the roles query and
        document. instruction: what the template may say of the task. max_tokens_...: each text is cut to so many; 0:
        none is.
        """
        pooling = pooling_of(engine, "a score")
        if pooling.task == "classify" and pooling.num_labels != 1:
            raise ValueError(f"a score is one number, and this classifier has {pooling.num_labels} labels: classify()")
        queries = _cut_all(engine, self.queries, max_tokens_per_query, truncation)
        documents = _cut_all(engine, self.documents, max_tokens_per_doc, truncation)
        prompts: list[Any] = queries + documents
        if pooling.task == "classify":
            pairs = list(zip(queries * (len(documents) if len(queries) == 1 else 1), documents, strict=True))
            prompts = make_all(
                "pairs", pairs, lambda pair: pair_prompt(engine, pair, chat_template, instruction, truncation)
            )
        elif chat_template is not None or instruction is not None:
            raise ValueError(
                "a template joins the texts of a pair, and this LLM embeds each alone; write it into the texts"
            )
        adapters = lora_requests or [None] * len(prompts)
        each_priority = priorities or [None] * len(prompts)
        salted = {} if salt is None else {"cache_salt": salt}

        def make(numbered: tuple[int, tuple[Any, Any, Any]]) -> PoolingRequest:
            number, (given, adapter, priority) = numbered
            prompt = given if isinstance(given, dict) else {"prompt": given}
            made_id = None if request_id is None else f"{request_id}-{number}"
            return make_request(engine, prompt | salted, params, adapter, truncation, made_id, priority=priority)

        return make_all("texts", list(enumerate(zip(prompts, adapters, each_priority, strict=True))), make)

    def scores(self, engine: "LLMEngine", outputs: list[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """One a pair, in order. outputs: of the requests, in their order."""
        if pooling_of(engine, "score()").task == "classify":
            return list(map(ScoringRequestOutput.from_base, outputs))
        queries, documents = outputs[: len(self.queries)], outputs[len(self.queries) :]
        queries *= len(documents) if len(queries) == 1 else 1
        between = [] if engine.tokenizer.pad_token_id is None else [engine.tokenizer.pad_token_id]
        return [cosine(*pair, between) for pair in zip(queries, documents, strict=True)]


def _cut_all(engine: "LLMEngine", texts: list[str], num_tokens: int, truncation: Truncation) -> list[str]:
    if not num_tokens:
        return texts
    return make_all("texts", texts, lambda text: Cut(engine.tokenizer, text, truncation.side(engine)).keep(num_tokens))


def cosine(query: PoolingRequestOutput, document: PoolingRequestOutput, between: list[int]) -> ScoringRequestOutput:
    """The score of two embeddings, whatever their lengths."""
    import torch

    error = query.error or document.error
    data = torch.zeros(1, dtype=torch.float32, device="cpu")
    if error is None:
        data = torch.nn.functional.cosine_similarity(query.outputs.data, document.outputs.data, dim=0).clamp(-1, 1)
    pair = PoolingRequestOutput(
        f"{query.request_id}_{document.request_id}",
        PoolingOutput(data),
        query.prompt_token_ids + between + document.prompt_token_ids,
        query.num_cached_tokens + document.num_cached_tokens,
        finished=True,
        error=error,
    )
    return ScoringRequestOutput.from_base(pair)


def pair_prompt(
    engine: "LLMEngine",
    pair: tuple[str, str],
    chat_template: str | None,
    instruction: str | None,
    truncation: Truncation,
) -> dict[str, Any]:
    """One prompt of two texts. Without a template that of Qwen3-Reranker, unless the query brings it; else no template.

    Where the prompt would be too long, the document is cut before the two are joined: the score is read from the
    template's end, or from the separator at the end. Raises ValueError.
    """
    query, document = pair
    make = _joined(engine, query, document, chat_template, instruction)
    num_kept = truncation.num_kept(engine)
    prompt = make(document)
    if num_kept is None:
        engine.check_length(prompt if isinstance(prompt, str) else query + document)
    token_ids = _token_ids(engine, prompt, truncation)
    if num_kept is None or len(token_ids) <= num_kept:
        return {"prompt_token_ids": token_ids}
    cut = Cut(engine.tokenizer, document, truncation.side(engine))
    num_tokens = cut.num_tokens
    while len(token_ids) > num_kept:  # what is cut may be tokenized otherwise
        num_tokens -= len(token_ids) - num_kept
        if num_tokens <= 0:
            without = len(_token_ids(engine, make(""), truncation))
            raise ValueError(
                f"{num_kept} tokens leave none for the document: the query and what joins them take {without}"
            )
        token_ids = _token_ids(engine, make(cut.keep(num_tokens)), truncation)
    return {"prompt_token_ids": token_ids}


Joined = str | tuple[str, str]  # a prompt, or two texts that the tokenizer joins


def _joined(
    engine: "LLMEngine", query: str, document: str, chat_template: str | None, instruction: str | None
) -> Callable[[str], Joined]:
    """How the query is joined with a document. Raises ValueError."""
    pooling, tokenizer = pooling_of(engine, "score()"), engine.tokenizer
    if chat_template is not None:
        from nanovllm.features.chat_template.renderer import render

        options = {**tokenizer.special_tokens_map} | ({} if instruction is None else {"instruction": instruction})

        def rendered(document: str) -> str:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            try:
                return render(chat_template, messages, options)
            except ValueError as error:
                raise ValueError(f"the template does not take a query and a document: {error}") from error

        return rendered
    if pooling.is_reranker and not query.startswith("<|im_start|>"):
        said = instruction or INSTRUCTION
        return lambda document: QWEN3_RERANKER.format(instruction=said, query=query, document=document)
    if instruction is not None:
        raise ValueError("an instruction is a template's, and this LLM has none for pairs; write it into the query")
    if pooling.is_reranker:
        end = document[found:] if (found := document.rfind("<|im_end|>")) >= 0 else ""
        return lambda document: f"{query}{document.removesuffix(end)}{end}"
    if pooling.joins_texts:
        return lambda document: query + document
    return lambda document: (query, document)


def _token_ids(engine: "LLMEngine", prompt: Joined, truncation: Truncation) -> list[int]:
    text, pair = (prompt, None) if isinstance(prompt, str) else prompt
    return tokenize(engine.tokenizer, text, text_pair=pair, add_special_tokens=truncation.add_special_tokens)
