"""A nano engine: a paged KV cache with prefix caching, continuous batching, and a Llama in plain PyTorch."""

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
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        """How many blocks all its tokens need."""
        return cdiv(len(self.tokens), self.block_size)

    def block(self, index: int) -> list[int]:
        """The tokens of this block; the last block may have room left."""
        return self.tokens[index * self.block_size : (index + 1) * self.block_size]

    def slot(self, position: int) -> int:
        """Where in the cache K and V of this position are. Slot 0 of block 7 is slot 7 * block_size of the cache."""
        block_id = self.block_table[position // self.block_size]
        return block_id * self.block_size + position % self.block_size

    def has_ended(self, eos_token_ids: Iterable[int]) -> bool:
        """True if max_tokens tokens were generated, or if the last generated one is an EOS token.

        With params.ignore_eos, an EOS token is a token like any other.
        """
        is_eos = bool(self.generated) and self.tokens[-1] in eos_token_ids and not self.params.ignore_eos
        return is_eos or len(self.generated) >= self.params.max_tokens


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
    return hashlib.sha256(parent_hash + b"".join(token.to_bytes(4, "little") for token in token_ids)).digest()


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

    def hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of its first blocks, which must be full. Each is computed once and kept in seq.block_hashes."""
        known = seq.block_hashes
        while len(known) < num_blocks:
            parent_hash = known[-1] if known else b""
            known.append(hash_block(parent_hash, seq.block(len(known))))
        return known[:num_blocks]

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The cached blocks that it can begin with, in order; changes nothing but seq.block_hashes.

        Its last token is in none of them: at least one token must be computed, whose logits give the next.
        """
        hits: list[Block] = []
        for block_hash in self.hashes(seq, (len(seq.tokens) - 1) // self.block_size):
            if block_hash not in self.hash_to_block:
                break
            hits.append(self.hash_to_block[block_hash])
        return hits

    def allocate(self, seq: Sequence) -> bool:
        """Give a sequence without blocks what all its tokens need. False, and nothing has changed, if that is too much.

        First come the cached blocks that it can begin with, then fresh ones from the head of free_blocks. A block that
        somebody uses is not in free_blocks. What a fresh block held before can no longer be found. Sets
        seq.block_table, the blocks' ref_count, and seq.num_computed, the number of tokens that were found.
        """
        hits = self.find_prefix(seq)
        num_fresh = seq.num_blocks - len(hits)
        num_unused_hits = sum(block.ref_count == 0 for block in hits)
        if num_fresh + num_unused_hits > len(self.free_blocks):
            return False
        for block in hits:
            self.free_blocks.pop(block.block_id, None)
            block.ref_count += 1
            seq.block_table.append(block.block_id)
        self.take_fresh(seq, num_fresh)
        seq.num_computed = len(hits) * self.block_size
        return True

    def take_fresh(self, seq: Sequence, num_blocks: int) -> None:
        """Move blocks from the head of the queue to the sequence's table. What they held can no longer be found."""
        for _ in range(num_blocks):
            block_id, block = self.free_blocks.popitem(last=False)
            if block.block_hash is not None:
                del self.hash_to_block[block.block_hash]
                block.block_hash = None
            block.ref_count = 1
            seq.block_table.append(block_id)

    def append_slots(self, seq: Sequence, num_tokens: int) -> bool:
        """Let its table have slots for its first num_tokens tokens, with fresh blocks if it has too few.

        False, and nothing has changed, if there are not enough.
        """
        num_fresh = cdiv(num_tokens, self.block_size) - len(seq.block_table)
        if num_fresh > len(self.free_blocks):
            return False
        self.take_fresh(seq, num_fresh)
        return True

    def register(self, seq: Sequence) -> None:
        """Make the full blocks of its first num_computed tokens findable.

        Where another block with the same content can be found already, it stays the one that is found. If that block
        has since been taken for other content, this call makes the sequence's own block findable.
        """
        for index, block_hash in enumerate(self.hashes(seq, seq.num_computed // self.block_size)):
            block = self.blocks[seq.block_table[index]]
            if block.block_hash is None and block_hash not in self.hash_to_block:
                block.block_hash = block_hash
                self.hash_to_block[block_hash] = block

    def free(self, seq: Sequence) -> None:
        """Take its blocks back; they stay cached. The sequence has no blocks then, and nothing computed.

        What nobody else uses goes to the tail of free_blocks, last block first: a text is evicted from its end. (The
        course's engine puts blocks without a hash at the head. Here all of them go to the tail.)
        """
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.free_blocks[block_id] = block
        seq.block_table = []
        seq.num_computed = 0


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
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        for seq in list(self.running):
            if budget == 0 or seq not in self.running:
                break
            chunk = Chunk(seq, seq.num_computed, min(seq.num_computed + budget, len(seq.tokens)))
            if not self.make_room(seq, chunk.end):
                break
            budget -= self.take(chunk, chunks)
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[0]
            if not self.manager.allocate(seq):
                break
            self.running.append(self.waiting.popleft())
            chunk = Chunk(seq, seq.num_computed, min(seq.num_computed + budget, len(seq.tokens)))
            budget -= self.take(chunk, chunks)
        return chunks

    def take(self, chunk: Chunk, chunks: list[Chunk]) -> int:
        """Put it into the step. Returns how many tokens it has."""
        chunks.append(chunk)
        chunk.seq.num_computed = chunk.end
        self.manager.register(chunk.seq)
        return chunk.end - chunk.start

    def make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Get a running sequence slots for so many tokens, at the cost of the last ones. False if it was the last."""
        while not self.manager.append_slots(seq, num_tokens):
            victim = self.running.pop()
            self.manager.free(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
            if victim is seq:
                return False
        return True

    def update(self, chunks: list[Chunk], token_ids: list[int]) -> list[Sequence]:
        """Append the sampled tokens, one for each chunk that reaches its end. Returns the sequences that have ended.

        Those give back their blocks and are no longer running.
        """
        finished: list[Sequence] = []
        sampled = [chunk.seq for chunk in chunks if chunk.reaches_end]
        for seq, token_id in zip(sampled, token_ids, strict=True):
            seq.tokens.append(token_id)
            if seq.has_ended(self.eos_token_ids):
                self.running.remove(seq)
                self.manager.free(seq)
                finished.append(seq)
        return finished


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
    input_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    cu_seqlens_q = [0]
    logits_rows: list[int] = []
    for chunk in chunks:
        input_ids += chunk.seq.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        slots += [chunk.seq.slot(position) for position in range(chunk.start, chunk.end)]
        cu_seqlens_q.append(len(input_ids))
        if chunk.reaches_end:
            logits_rows.append(len(input_ids) - 1)
    width = max(len(chunk.seq.block_table) for chunk in chunks)
    tables = [chunk.seq.block_table + [0] * (width - len(chunk.seq.block_table)) for chunk in chunks]
    return Batch(
        input_ids=torch.tensor(input_ids),
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        cu_seqlens_q=torch.tensor(cu_seqlens_q),
        seqlens_k=torch.tensor([chunk.end for chunk in chunks]),
        block_tables=torch.tensor(tables),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64),
    )


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
        mean_square = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(mean_square + self.eps))


def rotary_cos_sin(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, each [T, head_dim / 2]: pair i turns by theta ** (-2i / head_dim) a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = positions[:, None].float() * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of numbers by its angle. x: [T, heads, head_dim].

    Numbers i and i + head_dim / 2 of a head are pair i, and the first of them is the one that is turned towards the
    second: (a, b) becomes (a cos - b sin, b cos + a sin).
    """
    cos, sin = cos[:, None], sin[:, None]  # the same for all heads
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
    """Each row attends to the keys of its sequence, from position 0 to its own. Scores are divided by sqrt(head_dim).

    q and the result: [T, num_heads, head_dim]; the caches of a layer: [num_blocks, block_size, num_kv_heads, head_dim].
    All keys and values are in the caches, those of this step included. Query heads share KV heads: of 9 query heads and
    3 KV heads, query heads 0, 1 and 2 have KV head 0.
    """
    out = torch.empty_like(q)
    block_size = k_cache.shape[1]
    starts = batch.cu_seqlens_q.tolist()
    for b, num_keys in enumerate(batch.seqlens_k.tolist()):
        rows = slice(starts[b], starts[b + 1])
        table = batch.block_tables[b, : cdiv(num_keys, block_size)]
        k = k_cache[table].flatten(0, 1)[:num_keys].transpose(0, 1)  # [num_kv_heads, num_keys, head_dim]
        v = v_cache[table].flatten(0, 1)[:num_keys].transpose(0, 1)
        sees = torch.arange(num_keys) <= batch.positions[rows, None]  # [rows, num_keys]
        query = q[rows].transpose(0, 1)  # [num_heads, rows, head_dim]
        found = F.scaled_dot_product_attention(query[None], k[None], v[None], attn_mask=sees, enable_gqa=True)
        out[rows] = found[0].transpose(0, 1)
    return out


class Attention(nn.Module):
    """qkv_proj and o_proj are nn.Linear without a bias. The rows of qkv_proj are q's, then k's, then v's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.sizes = [config.num_attention_heads * config.head_dim, kv_size, kv_size]
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.sizes), bias=False)
        self.o_proj = nn.Linear(self.sizes[0], config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, batch: Batch) -> Tensor:
        """Rotate q and k, write K and V into their slots, attend.

        x: [T, hidden_size]. kv_layer: K and V of this layer, [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in self.qkv_proj(x).split(self.sizes, dim=-1))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k_cache, v_cache = kv_layer
        k_cache.view(-1, *k.shape[1:])[batch.slot_mapping] = k  # before anybody reads: rows may share blocks
        v_cache.view(-1, *v.shape[1:])[batch.slot_mapping] = v
        return self.o_proj(paged_attention(q, k_cache, v_cache, batch).flatten(1))


class MLP(nn.Module):
    """SwiGLU: down_proj(silu(gate) * up). gate_up_proj has gate's rows, then up's; nn.Linear without a bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, hidden_size]. So is the result, as with every layer."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """input_layernorm, self_attn, post_attention_layernorm, mlp: each pair of norm and layer adds to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, batch: Batch) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, kv_layer, batch)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """embed_tokens (nn.Embedding), layers (nn.ModuleList), norm, lm_head (nn.Linear without a bias).

    If config.tie_word_embeddings, lm_head.weight is embed_tokens.weight, the same parameter.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """The logits of batch.logits_rows, [R, vocab_size].

        kv_cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]; this step writes its K and V there.
        """
        x = self.embed_tokens(batch.input_ids)
        cos, sin = rotary_cos_sin(batch.positions, self.config.head_dim, self.config.rope_theta)
        for layer, kv_layer in zip(self.layers, kv_cache, strict=True):
            x = layer(x, cos, sin, kv_layer, batch)
        return self.lm_head(self.norm(x[batch.logits_rows]))


# -- Step 6: its weights -----------------------------------------------------------------------------------------------

MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def load_weights(model: nn.Module, directory: Path) -> None:
    """Fill the model with what the checkpoint's *.safetensors files hold. Raises KeyError if a weight is missing.

    Their names are those of the model's parameters with "model." in front (but not of lm_head.weight), except that
    MERGED names what is one weight here and several there. Weights may be in bfloat16; the model's are float32.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    for name, parameter in model.named_parameters():
        stored_name = name if name.startswith("lm_head") else f"model.{name}"
        stored_names = [stored_name]
        for merged, parts in MERGED.items():
            if merged in name:
                stored_names = [stored_name.replace(merged, part) for part in parts]
        parameter.data.copy_(torch.cat([tensors[each] for each in stored_names]))


# -- Step 7: the sampler -----------------------------------------------------------------------------------------------


def noise(seq: Sequence) -> float:
    """A random number in [0, 1) for the next token. It depends on params.seed and the number of generated tokens alone.

    It looks as if it had nothing to do with the number of any other seed or place.
    """
    digest = hashlib.sha256(f"{seq.params.seed},{len(seq.generated)}".encode()).digest()
    return int.from_bytes(digest[:6], "little") / 2**48


def sample(logits: Tensor, seqs: list[Sequence]) -> list[int]:
    """A token for each of these sequences, of which logits, [R, vocab_size], has a row each.

    With temperature 0, the most likely. Otherwise noise(seq) chooses in softmax(logits / temperature): the first token
    up to which the shares add up to more than it. (Rounded shares may add up to a little less than 1: take care that
    there always is one.)
    """
    token_ids: list[int] = logits.argmax(-1).tolist()
    for row, seq in enumerate(seqs):
        if seq.params.temperature > 0:
            shares = (logits[row].double() / seq.params.temperature).softmax(-1).cumsum(-1)
            token_ids[row] = int(torch.searchsorted(shares, noise(seq) * shares[-1], right=True))
    return token_ids


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
        directory = Path(model)
        config, self.tokenizer = read_checkpoint(directory)
        self.model = Llama(config)
        load_weights(self.model, directory)
        kv_shape = num_blocks, block_size, config.num_key_value_heads, config.head_dim
        self.kv_cache = torch.zeros(config.num_hidden_layers, 2, *kv_shape)
        self.manager = BlockManager(num_blocks, block_size)
        self.scheduler = Scheduler(self.manager, max_num_seqs, max_num_batched_tokens, config.eos_token_ids)

    def add_request(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        """Queue a prompt; a str is encoded by the tokenizer, with its defaults. Returns its sequence.

        Raises ValueError if it is empty, or if its tokens and max_tokens together are more than the pool has slots.
        """
        seq = self.make_sequence(prompt, params)
        self.scheduler.add(seq)
        return seq

    def make_sequence(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        token_ids = self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt
        seq = Sequence(token_ids, params, self.manager.block_size)
        num_slots = len(self.manager.blocks) * self.manager.block_size
        if not token_ids or len(token_ids) + params.max_tokens > num_slots:
            what = f"{len(token_ids)} tokens and an answer of up to {params.max_tokens}"
            raise ValueError(f"a prompt has at least one token, and fits into {num_slots} slots; found {what}")
        return seq

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """Schedule, batch, model, sample, update. Returns the sequences that this step has ended."""
        chunks = self.scheduler.schedule()
        logits = self.model(make_batch(chunks), self.kv_cache)
        token_ids = sample(logits, [chunk.seq for chunk in chunks if chunk.reaches_end])
        return self.scheduler.update(chunks, token_ids)

    def generate(self, prompts: list[str] | list[list[int]], params: SamplingParams) -> list[dict[str, Any]]:
        """Complete the prompts. Returns {"text": ..., "token_ids": ...} of each answer, in the order of the prompts.

        token_ids include the EOS token that ended an answer, and text is what the tokenizer decodes them to. If one of
        the prompts is refused, none is queued.
        """
        seqs = [self.make_sequence(prompt, params) for prompt in prompts]
        for seq in seqs:
            self.scheduler.add(seq)
        while self.scheduler.has_unfinished():
            self.step()
        return [{"text": self.tokenizer.decode(seq.generated), "token_ids": seq.generated} for seq in seqs]
