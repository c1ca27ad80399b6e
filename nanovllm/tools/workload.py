"""What prefix caching can do for a workload, known before it is run (chapter 7).

From a log of requests: how much of the prefill reuse could save at best, how large a pool the shared part needs, and
the hit rate against pool size for three eviction policies. LRU is not modelled: the engine's BlockManager plays it.
The other two are bounds to hold it against: a policy that keeps what has been used most often, and the clairvoyant
optimum, which evicts what is needed furthest in the future (Belady 1966). All three count what one request after
another would hit; requests that overlap share more than that (within a step) or hit less (when they fill the pool).
"""

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from nanovllm.checks.values import check_range
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence
from nanovllm.features.chat_template.render import render_chat
from nanovllm.prompts import parse_prompt
from nanovllm.serving.openai.openai_request import MAX_SAMPLES, chat_options, prompts_of, refuse_template
from nanovllm.serving.openai.reading import Parsers

HEADROOM = 1.2
NEVER = 1 << 60
MAX_TOKEN_ID = (1 << 32) - 1  # that a block's hash has room for


@dataclass(frozen=True)
class WorkloadReport:
    """Sizes in blocks unless the name says tokens. reusable: block uses after the first use of the same block."""

    num_requests: int
    num_tokens: int
    num_blocks: int  # full ones: a partly filled last block is never shared
    num_unique_blocks: int
    num_shared_blocks: int  # used by two requests or more
    num_reusable_blocks: int
    max_request_blocks: int
    block_size: int

    @property
    def best_prefill_savings(self) -> float:
        """Share of all prompt tokens that need not be computed with a pool that never evicts."""
        return self.num_reusable_blocks * self.block_size / max(self.num_tokens, 1)

    @property
    def mean_shared_prefix_tokens(self) -> float:
        return self.num_reusable_blocks * self.block_size / max(self.num_requests, 1)

    @property
    def working_set_blocks(self) -> int:
        """The shared blocks with 20 % headroom, and room for the longest request beside them."""
        return math.ceil(self.num_shared_blocks * HEADROOM) + self.max_request_blocks


class LoggedRequest(NamedTuple):
    tokens: array  # 4 bytes for each, where a list of ints has 36
    cache_salt: str | None
    block_hashes: list[bytes]


class Workload:
    """Requests in the order they come, each hashed once."""

    def __init__(self, block_size: int = 16) -> None:
        self.block_size = block_size
        self.requests: list[LoggedRequest] = []
        self._hasher = BlockManager(1, block_size)

    def add(self, token_ids: list[int], cache_salt: str | None = None) -> None:
        if not token_ids:
            raise ValueError("the prompt is empty")
        seq = Sequence(token_ids, cache_salt=cache_salt)
        for index in range(len(token_ids) // self.block_size):
            self._hasher.hash_block(seq, index)
        self.requests.append(LoggedRequest(array("I", token_ids), cache_salt, seq.block_hashes))

    def report(self) -> WorkloadReport:
        uses = Counter(block_hash for seq in self.requests for block_hash in seq.block_hashes)
        return WorkloadReport(
            num_requests=len(self.requests),
            num_tokens=sum(len(seq.tokens) for seq in self.requests),
            num_blocks=uses.total(),
            num_unique_blocks=len(uses),
            num_shared_blocks=sum(count > 1 for count in uses.values()),
            num_reusable_blocks=uses.total() - len(uses),
            max_request_blocks=max((self._num_blocks(seq) for seq in self.requests), default=0),
            block_size=self.block_size,
        )

    def pool_sizes(self, num: int = 8) -> list[int]:
        """Sizes worth comparing: from the longest request alone, in equal ratios, to where nothing is evicted."""
        report = self.report()
        low, high = report.max_request_blocks, report.num_unique_blocks + report.max_request_blocks
        return sorted({round(low * (high / low) ** (i / (num - 1))) for i in range(num)}) if low else []

    def lru_hits(self, num_blocks: int) -> int:
        """Block hits of the engine's own block manager, request after request."""
        manager = BlockManager(num_blocks, self.block_size)
        for request in self.requests:
            seq = Sequence(list(request.tokens), cache_salt=request.cache_salt)
            seq.block_hashes = list(request.block_hashes)
            if manager.allocate_with_prefix(seq):
                seq.num_computed_tokens = len(seq.tokens)
                manager.register_prefix(seq)
                manager.free(seq)
        return manager.stats.hits

    def frequency_hits(self, num_blocks: int) -> int:
        """Block hits when the block used least often so far is evicted; among equals the one used longest ago."""
        uses: Counter[bytes] = Counter()

        def key(block_hash: bytes, index: int, depth: int) -> tuple:
            uses[block_hash] += 1
            return (uses[block_hash], index, -depth)

        return self._simulate(num_blocks, key)

    def optimal_hits(self, num_blocks: int) -> int:
        """Block hits when the block that is needed again last, or never, is evicted."""
        next_uses: list[list[int]] = []
        seen: dict[bytes, int] = {}
        for index in range(len(self.requests) - 1, -1, -1):
            hashes = self.requests[index].block_hashes
            next_uses.append([seen.get(block_hash, NEVER) for block_hash in hashes])
            seen.update(dict.fromkeys(hashes, index))
        next_uses.reverse()
        return self._simulate(num_blocks, lambda block_hash, index, depth: (-next_uses[index][depth], -depth))

    def _simulate(self, num_blocks: int, key: Callable[[bytes, int, int], tuple]) -> int:
        """Hits when the cached block of the smallest key is evicted: key(block_hash, request index, depth there).

        Whenever a block is used, so are those before it: with both keys above, the later ones of a prompt go first.
        """
        keys: dict[bytes, tuple] = {}
        heap: list[tuple[tuple, bytes]] = []
        hits = 0
        for index, seq in enumerate(self.requests):
            hashes = seq.block_hashes
            num_hits = next((i for i, block_hash in enumerate(hashes) if block_hash not in keys), len(hashes))
            needed = self._num_blocks(seq) - num_hits
            if num_hits + needed > num_blocks:
                continue  # does not fit at all
            hits += num_hits
            pinned, aside = set(hashes[:num_hits]), []
            while len(keys) + needed > num_blocks:
                entry = heapq.heappop(heap)
                if keys.get(entry[1]) != entry[0]:
                    continue  # an older key of a block that has been used since, or is gone
                if entry[1] in pinned:
                    aside.append(entry)
                else:
                    del keys[entry[1]]
            for entry in aside:
                heapq.heappush(heap, entry)
            for depth, block_hash in enumerate(hashes):
                keys[block_hash] = key(block_hash, index, depth)
                heapq.heappush(heap, (keys[block_hash], block_hash))
        return hits

    def _num_blocks(self, request: LoggedRequest) -> int:
        return -(-len(request.tokens) // self.block_size)


def parse_requests(line: Any, tokenizer: Any, is_trusted: bool = True) -> list[tuple[list[int], str | None]]:
    """(token ids, cache salt) of each prompt of one request. Raises ValueError.

    It has chat `messages`, a `prompt` or several, or `prompt_token_ids`, or it is a line in OpenAI's batch format with
    one of them in its `body`. is_trusted: it may bring a chat template, which is a program.
    """
    body = line.get("body", line) if isinstance(line, dict) else line
    if not isinstance(body, dict):
        raise ValueError(f"a request is a JSON object, found {type(body).__name__}")
    body = {name: value for name, value in body.items() if value is not None}
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    if "messages" in body:
        if not is_trusted:
            refuse_template(body)
        options = chat_options(body, Parsers())
        options.pop("mm_processor_kwargs", None)  # they are about images alone
        options |= {"add_generation_prompt": body.get("add_generation_prompt", True), "keep_images": _refuse_images}
        prompts = [render_chat(tokenizer, body["messages"], **options) | salt]
    elif "prompt_token_ids" in body:
        prompts = [{"prompt_token_ids": body["prompt_token_ids"]} | salt]
    elif "prompt" in body:
        prompts = prompts_of(body, MAX_SAMPLES)
    else:
        raise ValueError(f"none of messages, prompt, prompt_token_ids among its keys: {', '.join(map(str, body))}")
    parsed = [parse_prompt(tokenizer, prompt)[1:] for prompt in prompts]
    for token_ids, _ in parsed:
        check_range("a token id of a prompt", token_ids, 0, MAX_TOKEN_ID)
    return parsed


def _refuse_images(images: list[Any]) -> NoReturn:
    raise ValueError("prompts with images are not read here: how many tokens one takes depends on its size")


def hit_rates(workload: Workload, sizes: Iterable[int]) -> list[tuple[int, float, float, float]]:
    """(pool size, hit rate of LRU, of the frequency-aware policy, of the optimum), as shares of all full blocks."""
    total = max(workload.report().num_blocks, 1)
    return [
        (
            size,
            workload.lru_hits(size) / total,
            workload.frequency_hits(size) / total,
            workload.optimal_hits(size) / total,
        )
        for size in sizes
    ]
