"""DraftRates: how many draft tokens there were, and how many became output (chapter 13)."""


class DraftRates:
    """Counters of output tokens and draft tokens, and what follows from them."""

    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def count(self, num_draft_tokens: int, num_new_tokens: int, sign: int = 1) -> None:
        """A step has checked draft tokens and given new tokens. sign: -1 takes it back."""
        self.num_output_tokens += sign * num_new_tokens
        self.num_draft_tokens += sign * num_draft_tokens
        self.num_accepted_tokens += sign * max(num_new_tokens - 1, 0)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of draft tokens that became output; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gives a sequence it samples for: 1, and the accepted ones. None before the first."""
        return self.num_output_tokens / (self.num_output_tokens - self.num_accepted_tokens or 1) or None
