"""What outputs of a growing request hold: all so far, what is new, or nothing before its end (vLLM's output_kind)."""

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from nanovllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from nanovllm.outputs import CompletionOutput, RequestOutput


class OutputFilter:
    """Makes outputs of one request, which hold everything, into those that its caller asked for, in their order."""

    def __init__(self, kind: RequestOutputKind) -> None:
        self.kind = kind
        self._seen: dict[int, CompletionOutput] = {}  # sample index -> what was handed out of it
        self._before: dict[int, CompletionOutput] = {}  # the same, before the newest one

    def roll_back(self, index: int, num_tokens: int) -> None:
        """A sample goes back to so many tokens: the step that gave it more has failed, and nobody got its outputs."""
        if index in self._seen and len(self._seen[index].token_ids) > num_tokens:
            if (before := self._before.pop(index, None)) is None:
                del self._seen[index]
            else:
                self._seen[index] = before

    def take(self, output: "RequestOutput") -> "RequestOutput | None":
        """None: there is nothing to tell yet."""
        if self.kind is RequestOutputKind.CUMULATIVE or (self.kind is RequestOutputKind.FINAL_ONLY and output.finished):
            return output
        if self.kind is RequestOutputKind.FINAL_ONLY:
            return None
        prompt_logprobs = None if self._seen else output.prompt_logprobs
        news = [new for sample in output.outputs if (new := self._news(sample)) is not None]
        if not news and not output.finished:
            return None
        return replace(output, outputs=news, prompt_logprobs=prompt_logprobs)

    def through(self, growing: "Generator[RequestOutput, None, None]") -> "Generator[RequestOutput, None, None]":
        """Leaving this loop closes `growing`, too."""
        with closing(growing):
            for output in growing:
                if (taken := self.take(output)) is not None:
                    yield taken

    def _news(self, sample: "CompletionOutput") -> "CompletionOutput | None":
        if (before := self._seen.get(sample.index)) is None:
            self._seen[sample.index] = sample
            return sample if sample.token_ids or sample.finished() else None
        num_tokens, num_chars = len(before.token_ids), len(before.text)
        if before.finished() or (not sample.finished() and len(sample.token_ids) == num_tokens):
            return None
        self._before[sample.index], self._seen[sample.index] = before, sample
        logprobs = None if sample.logprobs is None else sample.logprobs[num_tokens:]
        return replace(sample, text=sample.text[num_chars:], token_ids=sample.token_ids[num_tokens:], logprobs=logprobs)
