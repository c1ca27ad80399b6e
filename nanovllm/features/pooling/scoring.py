"""Scores of pairs of texts: a query and a document. Two ways, by what the LLM was built for.

A bi-encoder embeds each text once; a pair's score is the cosine of the angle between its two embeddings. A
cross-encoder reads both texts as one prompt and has a head for the score: slower and better, so it ranks what the other
has found. All prompts of one query begin alike, and the prefix cache computes that once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.checks.values import make_all, shorten
from nanovllm.features.chat_template.renderer import RENDERER
from nanovllm.features.pooling.outputs import PoolingOutput, PoolingRequestOutput, ScoringRequestOutput
from nanovllm.features.pooling.params import PoolingParams
from nanovllm.features.pooling.requests import PoolingRequest, Truncation, make_request, pooling_of
from nanovllm.files.tokenizer import tokenize

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
    """A text, or a list of texts. Raises ValueError."""
    texts = given if isinstance(given, list | tuple) else [given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} must be a text or a list of texts, not empty; found {shorten(given)}")
    return list(texts)


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
    ) -> list[PoolingRequest]:
        """Of a bi-encoder, for the queries and then for the documents; else for each pair. Raises ValueError.

        lora_requests: one for each of them. chat_template: of a pair, messages of the roles query and document.
        instruction: what the template may say of the task.
        """
        pooling = pooling_of(engine, "a score")
        if pooling.task == "classify" and pooling.num_labels != 1:
            raise ValueError(f"a score is one number, and this classifier has {pooling.num_labels} labels: classify()")
        prompts: list[Any] = self.queries + self.documents
        if pooling.task == "classify":
            queries = self.queries * (len(self.documents) if len(self.queries) == 1 else 1)
            pairs = list(zip(queries, self.documents, strict=True))
            how = chat_template, instruction, truncation.truncate_prompt_tokens is not None
            prompts = make_all("pairs", pairs, lambda pair: pair_prompt(engine, pair, *how))
        elif chat_template is not None or instruction is not None:
            raise ValueError(
                "a template joins the texts of a pair, and this LLM embeds each alone; write it into the texts"
            )
        adapters = lora_requests or [None] * len(prompts)
        salted = {} if salt is None else {"cache_salt": salt}
        items = [
            (prompt if isinstance(prompt, dict) else {"prompt": prompt}, adapter)
            for prompt, adapter in zip(prompts, adapters, strict=True)
        ]

        def make(numbered: tuple[int, tuple[dict[str, Any], Any]]) -> PoolingRequest:
            number, (prompt, adapter) = numbered
            given = None if request_id is None else f"{request_id}-{number}"
            return make_request(engine, prompt | salted, params, adapter, truncation, given)

        return make_all("texts", list(enumerate(items)), make)

    def scores(self, engine: "LLMEngine", outputs: list[PoolingRequestOutput]) -> list[ScoringRequestOutput]:
        """One a pair, in order. outputs: of the requests, in their order."""
        if engine.model_config.pooling.task == "classify":
            return list(map(ScoringRequestOutput.from_base, outputs))
        queries, documents = outputs[: len(self.queries)], outputs[len(self.queries) :]
        queries *= len(documents) if len(queries) == 1 else 1
        between = [] if engine.tokenizer.pad_token_id is None else [engine.tokenizer.pad_token_id]
        return [cosine(*pair, between) for pair in zip(queries, documents, strict=True)]


def cosine(query: PoolingRequestOutput, document: PoolingRequestOutput, between: list[int]) -> ScoringRequestOutput:
    """The score of two embeddings, whatever their lengths."""
    import torch

    error = query.error or document.error
    data = torch.zeros(1)
    if error is None:
        data = torch.nn.functional.cosine_similarity(query.outputs.data, document.outputs.data, dim=0)
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
    engine: "LLMEngine", pair: tuple[str, str], chat_template: str | None, instruction: str | None, is_cut: bool
) -> dict[str, Any]:
    """One prompt of two texts. Without a template that of Qwen3-Reranker, unless the query brings it; else no template.

    is_cut: make_request() will cut what is too long. Raises ValueError.
    """
    pooling, tokenizer, (query, document) = engine.model_config.pooling, engine.tokenizer, pair
    if chat_template is not None:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        options = {**tokenizer.special_tokens_map} | ({} if instruction is None else {"instruction": instruction})
        try:
            return {"prompt": RENDERER.ask(chat_template, messages, options)}
        except ValueError as error:
            raise ValueError(f"the template does not take a query and a document: {error}") from error
    if pooling.is_reranker and not query.startswith("<|im_start|>"):
        said = instruction or INSTRUCTION
        return {"prompt": QWEN3_RERANKER.format(instruction=said, query=query, document=document)}
    if instruction is not None:
        raise ValueError("an instruction is a template's, and this LLM has none for pairs; write it into the query")
    if pooling.joins_texts:
        return {"prompt": query + document}
    if not is_cut:
        engine.check_length(query + document)
    return {"prompt_token_ids": tokenize(tokenizer, query, text_pair=document)}
