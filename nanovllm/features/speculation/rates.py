"""GuessRates: how many guesses there were, and how many became output (chapter 13)."""


class GuessRates:
    """Counters of tokens and guesses (chapter 13), and what follows from them."""

    num_output_tokens: int
    num_guessed_tokens: int
    num_accepted_tokens: int

    def count(self, num_guesses: int, num_taken: int, sign: int = 1) -> None:
        """A step has checked guesses and given tokens. sign: -1 takes it back."""
        self.num_output_tokens += sign * num_taken
        self.num_guessed_tokens += sign * num_guesses
        self.num_accepted_tokens += sign * max(num_taken - 1, 0)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of guesses that became output; None where nothing was guessed."""
        return self.num_accepted_tokens / self.num_guessed_tokens if self.num_guessed_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gives a sequence it samples for: 1, and the guesses that hold. None before the first."""
        return self.num_output_tokens / (self.num_output_tokens - self.num_accepted_tokens or 1) or None
