"""What a policy is shown: copies, in tuples, of what a server knows at that moment. No engine object is behind them.

Not among them: how long an answer will be, and who will come.
"""

from typing import NamedTuple


class Setup(NamedTuple):
    """What does not change.

    num_blocks              the memory M, in blocks of block_size tokens
    max_num_seqs            seats: requests that run at a time
    max_num_batched_tokens  tokens of a step, draft tokens included, at most
    max_draft_tokens             of one request in a step, at most
    step_s, token_s         a step takes so many seconds, and so many more for each of its tokens (--real: roughly)
    ttft_limit_s            a request is good if its first token comes within this time after its arrival,
    tpot_limit_s            and if each token after the first takes no longer than this, in the request's mean
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_tokens: int
    step_s: float
    token_s: float
    ttft_limit_s: float
    tpot_limit_s: float


class Request(NamedTuple):
    """A request that waits or runs.

    id                     0 for the first that came, 1 for the next, ...
    beginning              hash of its prompt's first block: equal for prompts that begin alike. "": it has no full one
    num_prompt_tokens      what has to be computed before the first token, if nothing is found in the cache
    num_cached_tokens      waiting: of its tokens, those in the cache now; running: those there when it got its seat
    num_computed_tokens    of all its tokens; 0 while it waits
    num_generated_tokens   so far. Above 0 while it waits: it has been preempted
    first_token_s          when it came; None before that
    num_checked, num_accepted  of its draft tokens
    """

    id: int
    arrival_s: float
    beginning: str
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    first_token_s: float | None = None
    num_checked: int = 0
    num_accepted: int = 0

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed: of a waiting request those that the cache does not have."""
        known = self.num_prompt_tokens + self.num_generated_tokens
        return known - max(self.num_computed_tokens, min(self.num_cached_tokens, known - 1))


class State(NamedTuple):
    """The server before a step. now: seconds, on the clock of arrival_s and first_token_s.

    waiting, running    in the scheduler's order
    num_free_blocks     blocks that nobody uses. Some of them are in the cache
    """

    now: float
    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    num_free_blocks: int


class Block(NamedTuple):
    """A cached block whose last user has just gone.

    block_hash  by which it is found
    beginning   the hash of the first block of its chain
    depth       blocks before it in that chain
    num_uses    requests that have found this hash in the cache so far
    """

    block_hash: str
    beginning: str
    depth: int
    num_uses: int
