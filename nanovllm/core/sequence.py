"""Sequence: the tokens of one sample, and how far the engine has come with them (chapters 2 and 5).

A sequence knows nothing of schedulers or tensors; they write their progress into it.
"""

from enum import Enum, auto
from itertools import count
from typing import TYPE_CHECKING, Any

from nanovllm.core.block_hash import MMSpan
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput
    from nanovllm.detokenizer import Detokenizer
    from nanovllm.worker.batch import Batch


class SequenceStatus(Enum):
    WAITING = auto()  # in the queue: holds no blocks
    PREFILL = auto()  # running: it has not sampled since its last admission
    DECODE = auto()  # running: it has sampled since its last admission
    FINISHED = auto()


_next_seq_id = count()
NO_TOKEN = -1  # sampled where no token can be chosen: the logits are NaN or infinite (finish_reason "error")


class SequencePart:
    """What a wing keeps beside a sequence. Each method does nothing unless a wing says otherwise.

    Nobody tells a part that tokens were taken back (a failed step, a rejected draft token): it compares what it knows
    with those that the sequence has.

    error            why no token can follow; "" if one can. The sequence then ends with finish_reason "error"
    changes_logits   does it change the logits of the sequence's rows?
    needs_blocks     does it go when the sequence loses its blocks?
    """

    error = ""
    changes_logits = False
    needs_blocks = False

    @property
    def num_bytes(self) -> int:
        """What it holds for as long as the sequence lives."""
        return 0

    def for_sample(self) -> "SequencePart":
        """The part of one sample of a request. The same for all, if it does not change."""
        return self

    def check_stop(self, seq: "Sequence") -> str | None:
        """The finish_reason, if the sequence ends with the token that it has just got."""
        return None

    def advance(self, end: int) -> None:
        """The next step computes the sequence's tokens up to `end`."""

    @staticmethod
    def add_to_batch(batch: "Batch", output: "SchedulerOutput") -> "Batch":
        """The batch of a step, with what it needs for all sequences that have such a part. Called once for all."""
        return batch


class Sequence:
    """One sample of one request.

    tokens                  prompt and generated token ids
    num_computed_tokens     tokens from the beginning whose K/V is in its blocks, or will be after the running step
    num_cached_tokens       how many of them the last admission found in the prefix cache
    block_table             ids of the blocks that hold its K/V, in the order of its tokens; append-only while it runs
    block_hashes            hashes of its full blocks, computed when they are needed and kept (see block_hash.py)
    num_registered_blocks   blocks at its beginning that it has registered or found in the prefix cache
    hash_collision          one of its blocks has the hash of a cached block with other content; from that block on,
                            none of its blocks is registered
    was_admitted            it has had blocks; if it waits, it was preempted, or its step has failed
    awaits_blocks           it waits for K/V that is on its way into the pool (core/tiers); others may pass it
    ended_by_token          an EOS or stop token has ended it, and is its last token
    parts                   {name: SequencePart}, what wings keep beside it: "grammar", "images", ...

    With blocks of 4 tokens, a sequence of 10 whose table is [7, 2, 9]:

        token     0  1  2  3     4  5  6  7     8  9
        block     [    7    ]    [    2    ]    [    9    ]     slot of token 5: 2 * 4 + 1 = 9
    """

    def __init__(
        self,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: int | None = None,
        mm_spans: tuple[MMSpan, ...] = (),
    ) -> None:
        self.seq_id = next(_next_seq_id)
        self.tokens = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.tokens)
        self.sampling_params = sampling_params or SamplingParams()
        self.cache_salt = cache_salt
        self.lora_id = lora_id
        self.mm_spans = tuple(MMSpan(*span) for span in mm_spans)
        self.has_extra_keys = bool(mm_spans) or cache_salt is not None or lora_id is not None

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None  # "stop", "length", "abort" or "error"
        self.stop_reason: int | str | None = None
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_registered_blocks = 0
        self.hash_collision = False
        self.was_admitted = False
        self.awaits_blocks = False
        self.ended_by_token = False

        # Whoever makes the request sets these, most of them for some requests only.
        self.request_id = ""  # the request that this sequence belongs to
        self.priority = 0  # the lowest number comes first
        self.stop_checker: Detokenizer | None = None  # its sample's, if it has stop strings; gets each accepted token
        self.scores_prompt = False  # the logits of its whole prompt are wanted, so it reuses no cached block
        self.is_pooling = False  # its last hidden state is wanted, and no token is sampled (features/pooling)
        self.parts: dict[str, Any] = {}

        # The random numbers of a sample depend on these two and on the token's position in the output (sampler.py).
        # Without a seed in the request, the engine replaces the first.
        seed = self.sampling_params.seed
        self.seed = self.seq_id if seed is None else seed
        self.sample_index = 0

    @property
    def num_generated_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def generated_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)

    def reset(self) -> None:
        """Wait again, with nothing computed. Its blocks have been freed already.

        The next admission sets num_registered_blocks and hash_collision.
        """
        self.status = SequenceStatus.WAITING
        self.block_table = []
        self.parts = {name: part for name, part in self.parts.items() if not part.needs_blocks}
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0

    def truncate(self, num_tokens: int) -> None:
        """Go back to the first num_tokens tokens, as if there had never been more. The sequence is waiting then."""
        del self.tokens[num_tokens:]
        self.block_hashes.clear()  # they are computed again when they are needed
        self.finish_reason = None
        self.stop_reason = None
        self.ended_by_token = False
        self.reset()

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_prompt_tokens}+{self.num_generated_tokens} tokens, "
            f"{self.num_computed_tokens} computed, {self.num_cached_tokens} cached, blocks {self.block_table})"
        )
