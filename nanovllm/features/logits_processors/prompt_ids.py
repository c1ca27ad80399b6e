"""The different tokens of a prompt, which repetition_penalty looks at in each step (chapter 8)."""

from array import array

from nanovllm.core.sequence import Sequence, SequencePart


class PromptIds(SequencePart):
    """Found once, for all samples of a request: a long prompt takes milliseconds."""

    def __init__(self) -> None:
        self._known: frozenset[int] | None = None
        self._ids = array("q")

    def with_generated(self, seq: Sequence) -> "array[int]":
        """The different tokens of a sequence with this prompt: those of the prompt first."""
        if self._known is None:  # in the first step: placeholders of images may still be put in before
            known = frozenset(seq.tokens[: seq.num_prompt_tokens])
            self._ids = array("q", known)
            self._known = known
        return self._ids + array("q", set(seq.generated_token_ids) - self._known)
