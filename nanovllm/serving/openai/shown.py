"""What an answer shows beside the text that was generated: log probabilities, the prompt, token ids.

A text is scored by a completion with echo, logprobs and max_tokens 0: it answers with the prompt's own tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from nanovllm import CompletionOutput, Logprob, RequestOutput, SamplingParams
from nanovllm.checks.values import check_number, check_switch
from nanovllm.features.chat_template.messages import plain_messages
from nanovllm.features.logprobs.entries import decoded_token
from nanovllm.files.token_bytes import token_bytes
from nanovllm.request import Request
from nanovllm.serving.openai.offsets import TextOffsets, byte_name, is_text
from nanovllm.serving.openai.reading import PLAIN, Reading

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SWITCHES = ("echo", "return_token_ids", "return_tokens_as_token_ids", "add_special_tokens")  # fields: true or false
MAX_PROMPT_LOGPROBS = 2_000_000  # of one body, some 400 MB of Python objects until it is answered

Rows = list[tuple[int, dict[int, Logprob] | None]]  # a token, and what is known of its position


def scoring(url: str, body: dict[str, Any], max_logprobs: int, vocab_size: int) -> dict[str, Any]:
    """Sampling parameters for what a body wants to see. max_logprobs: of one position; -1: of all words.

    A completion of max_tokens 0 with echo asks for its prompt alone. Raises ValueError.
    """
    for name in SWITCHES:
        check_switch(name, body.get(name, False))
    num = _num_logprobs_of_chat(body) if url == CHAT else body.get("logprobs")
    if body.get("logprob_token_ids") and num is None:
        raise ValueError(f"logprob_token_ids needs logprobs{': true' if url == CHAT else ''}")
    params: dict[str, Any] = {"logprobs": num, "prompt_logprobs": body.get("prompt_logprobs")}
    for name, given in params.items():
        if given is not None:
            most = vocab_size if max_logprobs == -1 else max_logprobs
            check_number(f"the number of {name}", given, Integral, -1 if most >= vocab_size else 0, most)
            params[name] = vocab_size if given == -1 else given
    if url == COMPLETIONS and body.get("echo") and (num is not None or body.get("max_tokens") == 0):
        params["prompt_logprobs"] = max(params["logprobs"] or 0, params["prompt_logprobs"] or 0)
    if body.get("logprob_token_ids"):  # they take the place of the top tokens
        params["logprobs"] = None
    return params


def _num_logprobs_of_chat(body: dict[str, Any]) -> Any:
    logprobs = body.get("logprobs")
    if logprobs is not None:
        check_switch("logprobs of a chat", logprobs)
    if body.get("top_logprobs") and not logprobs:
        raise ValueError("top_logprobs needs logprobs: true")
    return body.get("top_logprobs", 0) if logprobs else None


@dataclass(frozen=True, slots=True)
class Shown:
    """Without arguments: the text and nothing else.

    num_logprobs      top tokens beside each token of the answer; None: no logprobs
    all_entries       the tokens beside it were named (logprob_token_ids): all of them
    prompt_logprobs   top tokens beside each token of the prompt
    echo              the answer of a completion begins with the prompt
    prefix            of a chat's answer: the message that it goes on with
    token_ids         those of prompt and answer
    ids_as_tokens     tokens beside logprobs are shown as "token_id:17"
    has_nulls         a field that nobody asked for is there, and null: clients of vLLM's server look for it
    reading           of a chat's answer: reasoning, calls of tools and content
    params            with which it was made
    by_text           in a chat's stream each piece of content has the logprobs of its own tokens, and all else has none
    """

    tokenizer: Any = None
    num_logprobs: int | None = None
    all_entries: bool = False
    prompt_logprobs: int | None = None
    echo: bool = False
    prefix: str = ""
    token_ids: bool = False
    ids_as_tokens: bool = False
    has_nulls: bool = False
    reading: Reading = PLAIN
    params: SamplingParams = field(default_factory=SamplingParams)
    by_text: bool = False

    @classmethod
    def of(
        cls,
        tokenizer: Any,
        url: str,
        body: dict[str, Any],
        params: SamplingParams,
        ids_as_tokens: bool = False,
        has_nulls: bool = False,
        reading: Reading = PLAIN,
        by_text: bool = False,
    ) -> "Shown":
        """params: what the body was translated to. ids_as_tokens: where the body does not say."""
        num_prompt_logprobs = body.get("prompt_logprobs")
        echo, prefix = body.get("echo", False), ""
        if url == CHAT and echo:
            [last] = plain_messages(body["messages"][-1:])
            prefix = last["content"] if last["role"] == "assistant" else ""
        num_logprobs = len(params.logprob_token_ids) if params.logprob_token_ids else params.logprobs
        tells_tokens = reading.shows_reasoning or reading.reasoning is None or by_text  # or they would spell it
        return cls(
            tokenizer=tokenizer,
            num_logprobs=num_logprobs if tells_tokens else None,
            all_entries=bool(params.logprob_token_ids),
            prompt_logprobs=params.prompt_logprobs if num_prompt_logprobs == -1 else num_prompt_logprobs,
            echo=echo and url == COMPLETIONS,
            prefix=prefix,
            token_ids=body.get("return_token_ids", False) and tells_tokens,
            ids_as_tokens=body.get("return_tokens_as_token_ids", ids_as_tokens),
            has_nulls=has_nulls,
            reading=reading,
            params=params,
            by_text=by_text,
        )

    @property
    def each_token(self) -> bool:
        """Does a stream have something to say of a token that gave no text?"""
        return (self.num_logprobs is not None and not self.by_text) or self.token_ids

    def check_size(self, requests: Iterable[Request]) -> None:
        """Raise ValueError for more logprobs of prompts than one answer may have."""
        num = sum((made.params.prompt_logprobs or 0) * len(made.prompt_token_ids) for made in requests)
        check_number("the number of logprobs of the prompts", num, Integral, 0, MAX_PROMPT_LOGPROBS)

    def before_text(self, output: RequestOutput) -> str:
        """What the answer begins with."""
        if not self.echo:
            return self.prefix
        return self.tokenizer.decode(output.prompt_token_ids) if output.prompt is None else output.prompt

    def beside_choice(self, url: str, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        """More fields of a choice."""
        fields = self._asked(token_ids=sample.token_ids if self.token_ids else None)
        return fields if url == CHAT else fields | self.prompt_fields(output)

    def beside_delta(
        self, url: str, output: RequestOutput, sample: CompletionOutput, num_sent: int | None
    ) -> dict[str, Any]:
        """The same of a stream's choice. num_sent: of its tokens, sent before; None: this chunk is its first."""
        if not self.token_ids:
            return {}
        prompt = {"prompt_token_ids": output.prompt_token_ids} if num_sent is None and url == COMPLETIONS else {}
        return {"token_ids": sample.token_ids[num_sent or 0 :]} | prompt

    def beside_first_delta(self, url: str, output: RequestOutput) -> dict[str, Any]:
        """Fields of a stream's first chunk, beside its choices."""
        return {"prompt_token_ids": output.prompt_token_ids} if self.token_ids and url == CHAT else {}

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Fields for the prompt: of a completion's choice, of a chat's whole answer."""
        logprobs = None
        if self.prompt_logprobs is not None:
            rows = _rows_of_prompt(output)
            logprobs = [entries and self._plain(token_id, entries) for token_id, entries in rows]
        return self._asked(
            prompt_logprobs=logprobs, prompt_token_ids=output.prompt_token_ids if self.token_ids else None
        )

    def _asked(self, **fields: Any) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if self.has_nulls or value is not None}

    def _plain(self, token_id: int, entries: dict[int, Logprob]) -> dict[str, Any]:
        most = self.prompt_logprobs or 0
        shown = {t: entry for t, entry in entries.items() if t == token_id or entry.rank <= most}
        return {str(t): dict(logprob=e.logprob, rank=e.rank, decoded_token=e.decoded_token) for t, e in shown.items()}

    # -- logprobs -------------------------------------------------------------------------------------------------

    def text_offsets(self, output: RequestOutput) -> TextOffsets:
        """Of a completion's choice, for logprobs()."""
        known, num_before = token_bytes(self.tokenizer), len(self.before_text(output))
        return TextOffsets(known, num_before, output.prompt_token_ids)

    def logprobs(
        self,
        url: str,
        output: RequestOutput,
        sample: CompletionOutput,
        num_sent: int | None = None,
        text_offsets: TextOffsets | None = None,
    ) -> dict[str, Any] | None:
        """Those of a choice: all, or in a stream of the tokens after the first num_sent (None: nothing is sent yet).

        text_offsets: what a stream keeps of its completion's choice.
        """
        if self.num_logprobs is None:
            return None
        first = num_sent or 0
        if url == CHAT:
            return self.logprobs_at(sample, range(first, len(sample.token_ids)))
        rows: Rows = list(zip(sample.token_ids[first:], (sample.logprobs or [])[first:], strict=True))
        growing = text_offsets or self.text_offsets(output)
        offsets = growing.of(sample.token_ids, sample.text, sample.finish_reason is not None, first)
        if self.echo and num_sent is None:
            rows = _rows_of_prompt(output) + rows
            of_prompt = TextOffsets(token_bytes(self.tokenizer))
            offsets = of_prompt.of(output.prompt_token_ids, self.before_text(output), True) + offsets
        return {
            "tokens": [self._key(*row) for row in rows],
            "token_logprobs": [entries and entries[token_id].logprob for token_id, entries in rows],
            "top_logprobs": [entries and self._named_logprobs(token_id, entries) for token_id, entries in rows],
            "text_offset": offsets,
        }

    def logprobs_at(self, sample: CompletionOutput, places: range) -> dict[str, Any]:
        """Those of a chat's choice: of its tokens at these places."""
        assert sample.logprobs is not None  # they were asked for
        return {"content": [self._entry_of_chat(sample.token_ids[at], sample.logprobs[at]) for at in places]}

    def _named_logprobs(self, token_id: int, entries: dict[int, Logprob]) -> dict[str, float]:
        """The chosen token first. Each has a key of its own, also where two look alike."""
        named: dict[str, float] = {}
        for other, entry in {token_id: entries[token_id], **dict(self._beside(entries))}.items():
            name = self._key(other, {other: entry})
            named[f"token_id:{other}" if name in named else name] = entry.logprob
        return named

    def _key(self, token_id: int, entries: dict[int, Logprob] | None) -> str:
        """A token's text; of a part of a character, and of a token without text, its bytes or its id."""
        name, own = self._name(token_id, entries), token_bytes(self.tokenizer).of(token_id)
        if self.ids_as_tokens or (name and is_text(own)):
            return name
        return byte_name(own) if own else f"token_id:{token_id}"

    def _entry_of_chat(self, token_id: int, entries: dict[int, Logprob] | None) -> dict[str, Any]:
        assert entries is not None  # only a prompt's first token has none
        top = [self._entry(*row) for row in self._beside(entries)]
        return self._entry(token_id, entries[token_id]) | {"top_logprobs": top}

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        alone = {token_id: entry}
        own = token_bytes(self.tokenizer).of(token_id)
        return {"token": self._name(token_id, alone), "logprob": entry.logprob, "bytes": list(own)}

    def _beside(self, entries: dict[int, Logprob]) -> list[tuple[int, Logprob]]:
        """The likeliest, or those that were named, in their order."""
        rows = list(entries.items())
        return rows if self.all_entries else sorted(rows, key=lambda row: row[1].rank)[: self.num_logprobs]

    def _name(self, token_id: int, entries: dict[int, Logprob] | None) -> str:
        return f"token_id:{token_id}" if self.ids_as_tokens else self._text(token_id, entries)

    def _text(self, token_id: int, entries: dict[int, Logprob] | None) -> str:
        return (entries[token_id].decoded_token or "") if entries else decoded_token(self.tokenizer, token_id, [])


def _rows_of_prompt(output: RequestOutput) -> Rows:
    known = output.prompt_logprobs or []
    unknown = [None] * (len(output.prompt_token_ids) - len(known))  # of a request that was aborted
    return list(zip(output.prompt_token_ids, [*known, *unknown], strict=True))
