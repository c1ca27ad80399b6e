"""Your nano engine, step by step: README.md says what to write, and why. `python -m chapters nano check` grades it.

Each docstring is a contract. Add whatever methods and functions of your own you like.
"""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from chapters.nano_engine.given import read_checkpoint
from nanovllm.checkpoint import ModelConfig


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


# -- Step 1: a sequence and its blocks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. With temperature 0, each token is the most likely one."""

    temperature: float = 0.0
    max_tokens: int = 16
    ignore_eos: bool = False
    seed: int = 0


class Sequence:
    """A prompt, what was generated after it, and where its keys and values are.

    tokens          token ids of the prompt and of the answer so far
    num_computed    tokens from the beginning whose K/V is in the cache
    block_table     the blocks that hold it, in order
    block_hashes    hashes of its first full blocks, as far as anybody has asked: no block is hashed twice
    """

    def __init__(self, prompt: list[int], params: SamplingParams, block_size: int) -> None:
        self.tokens = list(prompt)
        self.num_prompt_tokens = len(prompt)
        self.params = params
        self.block_size = block_size
        self.num_computed = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []

    @property
    def generated(self) -> list[int]:
        """The answer so far."""
        raise NotImplementedError

    @property
    def num_blocks(self) -> int:
        """How many blocks all its tokens need."""
        raise NotImplementedError

    def block(self, index: int) -> list[int]:
        """The tokens of this block; the last block may have room left."""
        raise NotImplementedError

    def slot(self, position: int) -> int:
        """Where in the cache K and V of this position are. Slot 0 of block 7 is slot 7 * block_size of the cache."""
        raise NotImplementedError

    def has_ended(self, eos_token_ids: Iterable[int]) -> bool:
        """True if max_tokens tokens were generated, or if the last generated one is an EOS token.

        With params.ignore_eos, an EOS token is a token like any other.
        """
        raise NotImplementedError


# -- Step 2: the block manager -----------------------------------------------------------------------------------------


@dataclass
class Block:
    """A block of the pool. Its hash is None unless it is cached."""

    block_id: int
    ref_count: int = 0
    block_hash: bytes | None = None


def hash_block(parent_hash: bytes, token_ids: list[int]) -> bytes:
    """The hash of a full block: of its tokens, and through its parent's hash of all before them. b"": it has no parent.

    Nobody compares contents, so no two of them may have one hash: take a long one, such as hashlib's sha256.
    """
    raise NotImplementedError


class BlockManager:
    """Hands out the pool's blocks, and finds those that hold a prefix already.

    blocks          the pool; index == block_id
    free_blocks     {block_id: Block} of blocks that nobody uses, the one to be taken next first
    hash_to_block   {hash: Block} of the cached blocks, whether anybody uses them or not
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.free_blocks: OrderedDict[int, Block] = OrderedDict(enumerate(self.blocks))
        self.hash_to_block: dict[bytes, Block] = {}

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks that it can begin with, in order; changes nothing but seq.block_hashes.

        Its last token is in none of them: at least one token must be computed, whose logits give the next.
        """
        raise NotImplementedError

    def allocate(self, seq: Sequence) -> bool:
        """Give a sequence without blocks what all its tokens need. False, and nothing has changed, if that is too much.

        First come the cached blocks that it can begin with, then fresh ones from the head of free_blocks. A block that
        somebody uses is not in free_blocks. What a fresh block held before can no longer be found. Sets
        seq.block_table, the blocks' ref_count, and seq.num_computed, the number of tokens that were found.
        """
        raise NotImplementedError

    def append_slots(self, seq: Sequence, num_tokens: int) -> bool:
        """Let its table have slots for its first num_tokens tokens, with fresh blocks if it has too few.

        False, and nothing has changed, if there are not enough.
        """
        raise NotImplementedError

    def register(self, seq: Sequence) -> None:
        """Make the full blocks of its first num_computed tokens findable.

        Where another block with the same content can be found already, it stays the one that is found. If that block
        has since been taken for other content, this call makes the sequence's own block findable.
        """
        raise NotImplementedError

    def free(self, seq: Sequence) -> None:
        """Take its blocks back; they stay cached. The sequence has no blocks then, and nothing computed.

        What nobody else uses goes to the tail of free_blocks, last block first: a text is evicted from its end. (The
        course's engine puts blocks without a hash at the head. Here all of them go to the tail.)
        """
        raise NotImplementedError


# -- Step 3: the scheduler ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chunk:
    """What a step computes of a sequence: its tokens from start to end, without end."""

    seq: Sequence
    start: int
    end: int

    @property
    def reaches_end(self) -> bool:
        """Only then is a token sampled: the logits of a chunk that ends inside a prompt are of no use.

        Ask before the token is appended: afterwards the chunk no longer reaches the end.
        """
        return self.end == len(self.seq.tokens)


class Scheduler:
    """Chooses what each step computes.

    waiting            sequences without blocks, the one to be admitted next first
    running            sequences with blocks, in the order in which they were admitted
    num_preemptions    how often a sequence has lost its blocks before its end
    """

    def __init__(
        self, manager: BlockManager, max_num_seqs: int, max_num_batched_tokens: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most max_num_batched_tokens tokens in all.

        1. Each running sequence, in order, gets what it has left to compute, or what is left of the budget.
        2. If there are no blocks for that, the last running sequence is preempted: it loses its blocks and waits before
           all others. So on until there are enough; a sequence may have to preempt itself.
        3. The first waiting sequence is admitted and gets a chunk, too, and so on, as long as there are budget, places
           (max_num_seqs) and blocks for all its tokens. Nobody passes one that has to wait. (The course's engine admits
           nobody in a step that preempted. Here that needs no rule of its own.)

        A chunk counts as computed when it is scheduled: num_computed is its end, and its full blocks are registered, so
        that a sequence admitted later in the same step finds them.
        """
        raise NotImplementedError

    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens, one for each chunk that reaches its end. Returns the sequences that have ended.

        Those give back their blocks and are no longer running.
        """
        raise NotImplementedError


# -- Step 4: the batch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A step as tensors: T tokens of B sequences, one sequence after the other, without padding.

    input_ids, positions    [T]
    slot_mapping            [T]        where K and V of each token go
    cu_seqlens_q            [B + 1]    sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    seqlens_k               [B]        where the chunk ends: the number of keys that its last row sees, its own included
    block_tables            [B, most blocks]    padded with 0
    logits_rows             [R]        the last row of each chunk that reaches its end
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_tables: Tensor
    logits_rows: Tensor


def make_batch(chunks: list[Chunk]) -> Batch:
    """The batch of a step, whose sequences have slots for their chunks. All its tensors are int64."""
    raise NotImplementedError


# -- Step 5: the model -------------------------------------------------------------------------------------------------

# A config has vocab_size, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
# head_dim, rms_norm_eps, rope_theta, tie_word_embeddings and, for step 8, eos_token_ids.


class RMSNorm(nn.Module):
    """Each row, divided by the square root of (its mean square + eps), times weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def rotary_cos_sin(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, each [T, head_dim / 2]: pair i turns by theta ** (-2i / head_dim) a position."""
    raise NotImplementedError


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of numbers by its angle. x: [T, heads, head_dim].

    Numbers i and i + head_dim / 2 of a head are pair i, and the first of them is the one that is turned towards the
    second: (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    raise NotImplementedError


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
    """Each row attends to the keys of its sequence, from position 0 to its own. Scores are divided by sqrt(head_dim).

    q and the result: [T, num_heads, head_dim]; the caches of a layer: [num_blocks, block_size, num_kv_heads, head_dim].
    All keys and values are in the caches, those of this step included. Query heads share KV heads: of 9 query heads and
    3 KV heads, query heads 0, 1 and 2 have KV head 0.
    """
    raise NotImplementedError


class Attention(nn.Module):
    """qkv_proj and o_proj are nn.Linear without a bias. The rows of qkv_proj are q's, then k's, then v's."""

    def __init__(self, config: ModelConfig) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, batch: Batch) -> Tensor:
        """Rotate q and k, write K and V into their slots, attend.

        x: [T, hidden_size]. kv_layer: K and V of this layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        raise NotImplementedError


class MLP(nn.Module):
    """SwiGLU: down_proj(silu(gate) * up). gate_up_proj has gate's rows, then up's; nn.Linear without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size]. So is the result, as with every layer."""
        raise NotImplementedError


class DecoderLayer(nn.Module):
    """input_layernorm, self_attn, post_attention_layernorm, mlp: each pair of norm and layer adds to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, batch: Batch) -> Tensor:
        raise NotImplementedError


class Llama(nn.Module):
    """embed_tokens (nn.Embedding), layers (nn.ModuleList), norm, lm_head (nn.Linear without a bias).

    If config.tie_word_embeddings, lm_head.weight is embed_tokens.weight, the same parameter.
    """

    def __init__(self, config: ModelConfig) -> None:
        raise NotImplementedError

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """The logits of batch.logits_rows, [R, vocab_size].

        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; this step writes its K and V there.
        """
        raise NotImplementedError


# -- Step 6: its weights -----------------------------------------------------------------------------------------------

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_weights(model: nn.Module, directory: Path) -> None:
    """Fill the model with what the checkpoint's *.safetensors files hold. Raises KeyError if a weight is missing.

    Their names are those of the model's parameters with "model." in front (but not of lm_head.weight), except that
    MERGED names what is one weight here and several there. Weights may be in bfloat16; the model's are float32.
    """
    raise NotImplementedError


# -- Step 7: the sampler -----------------------------------------------------------------------------------------------


def noise(seq: Sequence) -> float:
    """A random number in [0, 1) for the next token. It depends on params.seed and the number of generated tokens alone.

    It looks as if it had nothing to do with the number of any other seed or place.
    """
    raise NotImplementedError


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """A token for each of these sequences, of which logits, [R, vocab_size], has a row each.

    With temperature 0, the most likely. Otherwise noise(seq) chooses in softmax(logits / temperature): the first token
    up to which the shares add up to more than it. (Rounded shares may add up to a little less than 1: take care that
    there always is one.)
    """
    raise NotImplementedError


# -- Step 8: the engine ------------------------------------------------------------------------------------------------


class LLM:
    """A model, loaded and ready, in float32 on the CPU.

    num_blocks, block_size    of the KV cache
    max_num_seqs              sequences that run at a time
    max_num_batched_tokens    tokens that a step computes, at most
    """

    def __init__(
        self,
        model: str,
        *,
        num_blocks: int = 512,
        block_size: int = 16,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
    ) -> None:
        raise NotImplementedError

    def add_request(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        """Queue a prompt; a str is encoded by the tokenizer, with its defaults. Returns its sequence.

        Raises ValueError if it is empty, or if its tokens and max_tokens together are more than the pool has slots.
        """
        raise NotImplementedError

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Schedule, batch, model, sample, update. Returns the sequences that this step has ended."""
        raise NotImplementedError

    def generate(self, prompts: list[str] | list[list[int]], params: SamplingParams) -> list[dict[str, Any]]:
        """Complete the prompts. Returns {"text": ..., "token_ids": ...} of each answer, in the order of the prompts.

        token_ids include the EOS token that ended an answer, and text is what the tokenizer decodes them to. If one of
        the prompts is refused, none is queued.
        """
        raise NotImplementedError
