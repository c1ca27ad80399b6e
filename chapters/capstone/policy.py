"""Your policy. Edit this file, then:  python -m chapters capstone run

As it stands, every method does what the engine does by itself. Between two steps the server asks all five, in this
order: whom to refuse, who comes first, how many tokens the step may have, how many draft tokens, and what the blocks
are worth that have been released since. An object of this class lives as long as the run: keep in it what you want to
remember. It decides by what it is given, and by nothing else (README.md says what is refused).
"""

from chapters.capstone.views import Block, Setup, State


class Policy:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def refuse(self, state: State) -> list[int]:
        """Ids of waiting requests that are sent away now. One that has got a token cannot be.

        A refused request is not good. It costs nothing either.
        """
        return []

    def order(self, state: State) -> list[int]:
        """Ids of waiting requests, the first to be admitted first. Those that you leave out keep waiting.

        The refused are not in state.waiting any more. The scheduler admits from the front while there are seats, tokens
        and blocks, and stops at the first that does not fit. If nothing runs and no more requests will come, you must
        name at least one.
        """
        return [request.id for request in state.waiting]

    def token_budget(self, state: State) -> int:
        """How many tokens this step computes, at most; 1 to max_num_batched_tokens.

        Running requests come first: a token for each that is being answered, and what is left of a prompt. The rest is
        for the prompts of those who are admitted. A prompt that does not fit is cut, and goes on in the next step.
        Draft tokens count, too: they get what the others leave of it.
        """
        return self.setup.max_num_batched_tokens

    def num_draft_tokens(self, state: State) -> dict[int, int]:
        """{id: draft tokens in this step} of running requests that have got a token.

        Requests that are not named get none. Each request gets 0 to max_draft_tokens, as far as token_budget() has
        room. Each is one token more in the step. Those before the first wrong one are accepted, and answered at once.
        request.num_checked and num_accepted say what became of the earlier ones.
        """
        return {}

    def worth(self, state: State, block: Block) -> float:
        """What this cached block is worth, whose last user has just gone. The lowest is evicted first.

        Asked when it is released, not again until it is used and released once more. Of blocks of the same worth the
        one released first is evicted first; a block stays as long as any later block of its chain.
        """
        return state.now

    def snapshots(self, num_tokens: int, num_matched: int) -> dict[int, bool] | None:
        """Only with --hybrid: where a request that is admitted with so many tokens leaves snapshots of its state.

        num_matched: tokens at its beginning that were found in the cache, with a snapshot or without. {position: is it
        known to be wanted?}; positions are multiples of block_size below num_tokens. Whoever comes later begins at
        the deepest snapshot that is left of the prompt's cached beginning. None: the engine chooses (chapter 16).
        """
        return None
