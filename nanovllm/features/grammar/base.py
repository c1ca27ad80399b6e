"""What the engine asks of a grammar, whoever answers (chapter 8)."""

from nanovllm.core.sequence import Sequence, SequencePart


class GrammarPart(SequencePart):
    """Says which tokens may follow in a sequence, and when its text is complete. See Grammar for the methods."""

    changes_logits = True

    def is_complete(self, token_ids: list[int]) -> bool:
        """Can nothing but EOS follow these tokens, the whole output so far?"""
        raise NotImplementedError

    def check_stop(self, seq: Sequence) -> str | None:
        if not self.is_complete(seq.generated_token_ids):
            return None
        return "error" if self.error else "stop"
