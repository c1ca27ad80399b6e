"""Parts of lab 3: a real generation, step by step, and the slots of the KV tensor that each step writes.

The engine is not changed. The lab looks over its shoulder: it keeps the Batch that each step hands to the model runner,
and it compares the whole KV tensor before a step with the tensor after it. It runs in float32, so that the same tokens
come out on every machine.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.draw import color_of, draw_sequences
from chapters.player import actions
from chapters.recording import Recording
from chapters.slots import in_slots
from chapters.story import one_core
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 8, 10, 12
BEGINNING, ENDINGS = "The capital of France is Paris. The", (" capital of Italy is", " capital of Spain is", "")
LONG_TEXT = "The harbour town had a library, and its catalogue was a wall of small drawers full of paper cards. "
# layers, query heads, KV heads, head_dim: from each model's config.json
WELL_KNOWN = {
    "Qwen3-0.6B": (28, 16, 8, 128),
    "Qwen2.5-7B": (28, 28, 4, 128),
    "Llama-2-7B": (32, 32, 32, 128),
    "Llama-3.1-8B": (32, 32, 8, 128),
    "Llama-3.1-70B": (80, 64, 8, 128),
}


class Row(NamedTuple):
    """One token of one step: what the Batch says of it, and whether the tensor changed at its slot."""

    name: str
    position: int
    token: str
    block_id: int
    slot: int
    changed: bool


@dataclass(frozen=True)
class Step:
    number: int
    rows: list[Row]
    tables: dict[str, list[int]]  # name -> block table, as the Batch had it
    changed: list[int]  # slots at which the tensor differs from before, in any layer

    @property
    def written(self) -> list[int]:
        return sorted(row.slot for row in self.rows if row.slot >= 0)

    @property
    def verdict(self) -> str:
        if self.written != self.changed:
            return f"slot_mapping says {self.written}, and the tensor changed in {self.changed}."
        where = f"in slot{'s' * (len(self.changed) > 1)} {_listed(self.changed)} and nowhere else"
        return f"The tensor changed {where}." if self.changed else "The tensor did not change."


class CacheWorld:
    """An engine with a pool of 10 blocks of 8 slots, requests A, B, C ..., and what the last step did to the tensor."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.engine = llm, llm.engine
        self.runner = self.engine.model_runner
        self.cache = self.runner.kv_cache
        self.timing: list[Table] = []
        self._timing_llm: LLM | None = None
        self._watch()
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        """Drop the requests and the cached prefixes, zero the tensor, ask the first prompt."""
        for seq in [*self.engine.scheduler.running, *self.engine.scheduler.waiting]:
            self.engine.abort_request(self._request_ids[seq.seq_id])
        self.llm.reset_prefix_cache()
        self.cache.data.zero_()
        self.names: dict[int, str] = {}
        self._request_ids: dict[int, str] = {}
        self.token_at: dict[int, str] = {}  # slot -> text of the token whose K/V is there
        self.steps: list[Step] = []
        return self.prompt()

    def prompt(self) -> str:
        """Queue the next prompt. All begin with the same block of tokens; every third one is nothing but that."""
        encode = self.engine.tokenizer.encode
        index = len(self.names)
        beginning = (encode(BEGINNING) + encode(LONG_TEXT))[:BLOCK_SIZE]
        token_ids = beginning + encode(ENDINGS[index % len(ENDINGS)], add_special_tokens=False)[:4]
        request_id = self.engine.add_request(None, token_ids, _greedy(MAX_TOKENS), stream=False)
        seq = self.engine.scheduler.waiting[-1]
        self.names[seq.seq_id], self._request_ids[seq.seq_id] = chr(ord("A") + index % 26), request_id
        text = self.engine.tokenizer.decode(token_ids)
        return f"{self.names[seq.seq_id]} asks {text!r}, {len(token_ids)} tokens. The next step admits it."

    def step(self) -> str:
        """One step of the engine, and what it changed in the tensor."""
        if not self.engine.has_unfinished_requests():
            raise ValueError("no request is left to compute: send another prompt, or reset")
        before = self.slots().clone()
        with one_core():
            self.engine.step()
        differs = (self.slots() != before).flatten(2).any(-1)  # [num_blocks, block_size]
        changed = differs.flatten().nonzero().flatten().tolist()
        rows, tables = self._rows(*self._seen, changed), self._tables(*self._seen)
        self.steps.append(Step(len(self.steps) + 1, rows, tables, changed))
        for row in self.last.rows:
            if row.slot >= 0:
                self.token_at[row.slot] = row.token
        return f"step {self.last.number}: {self.last.verdict}"

    def measure(self) -> str:
        """Time a generation with the cache and without it, on a second engine with room for it."""
        if self._timing_llm is None:
            self._timing_llm = timing_llm(self.engine.config.model)
        self.timing = [time_generation(self._timing_llm)[0]]
        with_s, without_s = self.timing[0].columns[2].cells
        return f"with the cache {with_s} s, without {without_s} s (measured on one core; the table is at the bottom)"

    # -- what there is --------------------------------------------------------------------------------------------

    def slots(self) -> Tensor:
        """K and V of all layers, slot by slot: [num_blocks, block_size, 2 * num_layers, num_kv_heads, head_dim]."""
        layers = (in_slots(kv_layer, self.runner.kernels) for kv_layer in self.cache.layers)
        return torch.stack([cache for kv_layer in layers for cache in kv_layer], dim=2)

    @property
    def last(self) -> Step:
        return self.steps[-1]

    @property
    def seqs(self) -> list[Sequence]:
        return [*self.engine.scheduler.running, *self.engine.scheduler.waiting]

    def panels(self) -> list[tuple[str, RenderableType]]:
        tables = "   ".join(f"{self.names[seq.seq_id]} {seq.block_table}" for seq in self.seqs if seq.block_table)
        step: RenderableType = draw_step(self.last) if self.steps else Text("no step yet: press s")
        return [
            (f"KV pool, {BLOCK_SIZE} slots a block, * written last   {tables}", self.draw_slots()),
            (f"step {self.last.number}: {len(self.last.rows)} computed" if self.steps else "the step", step),
            ("sequences", draw_sequences(self.seqs, self.names)),
            ("bytes of K and V for one token, bf16", draw_bytes(self.engine.model_config, self.engine.config.model)),
            ("with the cache and without it (press t)", Group(*self.timing) if self.timing else Text("not timed yet")),
        ]

    def draw_slots(self) -> Text:
        """A row for each block: its owners, and in each slot the token whose K/V is there."""
        text = Text()
        written = self.last.written if self.steps else []
        for block in self.engine.block_manager.blocks:
            owners = [seq for seq in self.seqs if block.block_id in seq.block_table]
            state = "".join(self.names[seq.seq_id] for seq in owners) or ("cached" if block.block_hash else "free")
            style = color_of(owners[0]) if owners else "dim"
            text.append(f"{block.block_id:>2} {state:<7}", style)
            for slot in range(block.block_id * BLOCK_SIZE, (block.block_id + 1) * BLOCK_SIZE):
                mark, here = ("*", f"{style} reverse") if slot in written else (" ", style)
                text.append(f"{mark}{self.token_at.get(slot, '·'):<7}"[:8], here)
            text.append("\n")
        text.rstrip()
        return text

    # -- looking over the engine's shoulder -----------------------------------------------------------------------

    def _watch(self) -> None:
        """Keep each step's Batch, and what layer 0 hands over to be written, on the way through."""
        run_packed, rotary_and_write = self.runner.run_packed, self.runner.kernels.rotary_and_write

        def watched_run(batch: Batch, *others: Any) -> Any:
            self._seen = batch, list(self.engine.scheduler.running)
            return run_packed(batch, *others)

        def watched_write(q: Any, k: Any, v: Any, cos_sin: Any, kv_layer: Any, batch: Batch) -> None:
            rotary_and_write(q, k, v, cos_sin, kv_layer, batch)
            if kv_layer[0].data_ptr() == self.cache.layers[0][0].data_ptr():
                self.layer_0 = {"q": q.clone(), "k": k.clone(), "v": v.clone()}

        self.runner.run_packed = watched_run
        self.runner.kernels = replace(self.runner.kernels, rotary_and_write=watched_write)

    def _rows(self, batch: Batch, seqs: list[Sequence], changed: list[int]) -> list[Row]:
        rows, starts = [], batch.cu_seqlens_q.tolist()
        ids, positions, slots = batch.input_ids.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
        for b, seq in enumerate(seqs):
            for i in range(starts[b], starts[b + 1]):
                block_id = int(batch.block_tables[b, positions[i] // BLOCK_SIZE])
                token = self.engine.tokenizer.decode([ids[i]])
                shown = token.strip() or repr(token)[1:-1]
                rows.append(Row(self.names[seq.seq_id], positions[i], shown, block_id, slots[i], slots[i] in changed))
        return rows

    def _tables(self, batch: Batch, seqs: list[Sequence]) -> dict[str, list[int]]:
        lengths = [-(-num_keys // BLOCK_SIZE) for num_keys in batch.key_lens]
        tables = zip(seqs, batch.block_tables.tolist(), lengths, strict=True)
        return {self.names[seq.seq_id]: table[:length] for seq, table, length in tables}


def load_world(load: Callable[..., LLM]) -> CacheWorld:
    sizes = dict(block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS, max_model_len=32, max_num_seqs=3)
    return CacheWorld(load(dtype="float32", **sizes))


# -- drawings -----------------------------------------------------------------------------------------------------


def draw_step(step: Step) -> Group:
    table = Table("", "token", "position", "block id", "offset", "slot", "tensor there", show_edge=False)
    for row in step.rows:
        at = str(row.position), f"table[{row.position // BLOCK_SIZE}] = {row.block_id}", str(row.position % BLOCK_SIZE)
        table.add_row(row.name, Text(row.token), *at, str(row.slot), "changed" if row.changed else "as it was")
    tables = "   ".join(f"{name} {block_table}" for name, block_table in step.tables.items())
    return Group(table, Text(f"block tables: {tables}"), Text(step.verdict))


def draw_steps(steps: list[Step]) -> Table:
    """Decode steps of one sequence, a line each."""
    table = Table("step", "token", "position", "block table", "slot", "slots that changed")
    for step in steps:
        (row,) = step.rows
        (block_table,) = step.tables.values()
        what = Text(row.token), str(row.position), Text(str(block_table)), str(row.slot), _listed(step.changed)
        table.add_row(str(step.number), *what)
    return table


def draw_bytes(config: ModelConfig, model: str) -> Table:
    """What kv_bytes_per_token of the real ModelConfig says of this model and of well-known ones, 2 bytes a number."""
    table = Table("", "layers", "heads", "MHA", "as it is", "MQA", "8,192 tokens", show_edge=False)
    ours = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    for name, (layers, heads, kv_heads, head_dim) in {Path(model).name: ours, **WELL_KNOWN}.items():
        this = replace(config, num_hidden_layers=layers, head_dim=head_dim)
        sizes = [replace(this, num_key_value_heads=n).kv_bytes_per_token(2) for n in (heads, kv_heads, 1)]
        shape, context = (str(layers), f"{heads} : {kv_heads}"), f"{8192 * sizes[1] / 2**30:.2f} GiB"
        table.add_row(name.removesuffix("-Instruct")[:16], *shape, *(f"{size:,}" for size in sizes), context)
    return table


# -- timing -------------------------------------------------------------------------------------------------------


def timing_llm(model: str) -> LLM:
    max_model_len = min(1040, ModelConfig.from_directory(Path(model)).max_position_embeddings)
    return LLM(model, dtype="float32", max_num_seqs=1, max_model_len=max_model_len)


def time_generation(llm: LLM, num_prompt: int = 128, num_new: int = 16) -> tuple[Table, bool]:
    """A table of one generation with the cache and without, and whether both gave the same tokens."""
    prompt = _tokens(llm, num_prompt)
    _generate(llm, prompt, 2)  # the first run of all also gets its memory from the system
    with_cache = _timed(llm, lambda: _generate(llm, prompt, num_new))
    without = _timed(llm, lambda: _generate_without_cache(llm, prompt, num_new))
    table = Table("", "tokens computed", "seconds", "ms a token", "", show_edge=False)
    for name, (num_tokens, seconds, _) in {"with the cache": with_cache, "without": without}.items():
        times = f"{seconds:.2f}", f"{1e3 * seconds / num_new:.1f}"
        table.add_row(f"{num_prompt} + {num_new} tokens, {name}", f"{num_tokens:,}", *times, "(measured)")
    return table, with_cache[2] == without[2]


def time_contexts(llm: LLM, lengths: tuple[int, ...] = (64, 256, 1024), num_new: int = 5) -> Table:
    """Milliseconds for one more token after a context. A request's first token computes it all, the others do not."""
    table = Table("context", "computed with", "without", "ms with", "ms without", "", show_edge=False)
    for length in lengths:
        if length + num_new > llm.engine.scheduler.max_model_len:
            break
        llm.reset_prefix_cache()
        with one_core():
            metrics = llm.generate(_tokens(llm, length), _greedy(num_new), False)[0].metrics
        start, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        assert start is not None and first is not None and last is not None
        times = f"{1e3 * (last - first) / (num_new - 1):.1f}", f"{1e3 * (first - start):.1f}"
        table.add_row(f"{length:,}", "1", f"{length:,}", *times, "(measured)")
    return table


def _timed(llm: LLM, generate: Callable[[], list[int]]) -> tuple[int, float, list[int]]:
    """(tokens that the model computed, seconds, tokens that came out), from an empty cache."""
    stats = llm.engine.stats
    llm.reset_prefix_cache()
    before, started = stats.num_prefill_tokens + stats.num_decode_tokens, time.perf_counter()
    with one_core():
        token_ids = generate()
    return stats.num_prefill_tokens + stats.num_decode_tokens - before, time.perf_counter() - started, token_ids


def _generate(llm: LLM, prompt: list[int], num_new: int) -> list[int]:
    return llm.generate(prompt, _greedy(num_new), False)[0].outputs[0].token_ids


def _generate_without_cache(llm: LLM, prompt: list[int], num_new: int) -> list[int]:
    """Each token is a request of its own over everything so far, and nothing is found again."""
    tokens = list(prompt)
    for _ in range(num_new):
        llm.reset_prefix_cache()
        tokens += _generate(llm, tokens, 1)
    return tokens[len(prompt) :]


def _tokens(llm: LLM, length: int) -> list[int]:
    ids = llm.get_tokenizer().encode(LONG_TEXT)
    return (ids * (length // len(ids) + 1))[:length]


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _listed(slots: list[int]) -> str:
    """Slots 3, or 3 and 9, or 3 to 9."""
    if not slots:
        return "none"
    if len(slots) > 2 and slots == list(range(slots[0], slots[-1] + 1)):
        return f"{slots[0]} to {slots[-1]}"
    return " and ".join(filter(None, [", ".join(map(str, slots[:-1])), str(slots[-1])]))


# -- the lab ------------------------------------------------------------------------------------------------------


ACTIONS = actions("s|step|step, p|another prompt|prompt, r|reset|reset, t|time it|measure")


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: with the cache, a token takes about as long at any
    context; without it, longer and longer."""
    [_, contexts] = recorded.sheets("With the cache and without it")
    with_cache, without = contexts.column("ms with"), contexts.column("ms without")
    if max(with_cache) > 1.5 * min(with_cache):
        raise ValueError(f"with the cache, a token took {with_cache} ms")
    if any(after < 2 * before for before, after in pairwise(without)) or without[0] < with_cache[0]:
        raise ValueError(f"without the cache, a token took {without} ms, and {with_cache[0]} ms with it")
