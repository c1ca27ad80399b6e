"""Grading of the exercises of chapter 9. The ranks are threads (ranks.py): all of them have the student's code."""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from chapters.ch09_tensor_parallelism.ranks import (
    CountedSlice,
    OutOfStep,
    ThreadGroup,
    ThreadRunner,
    make_groups,
    on_the_cpu,
    possible_sizes,
    together,
)
from chapters.expect import cases, differs, ensure, expect, expect_form, unchanged
from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.parallel import ranks as parallel
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.features.parallel.parallel_layers import ParallelDecoder, RowParallelLinear
from nanovllm.files import tensor_files
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.kv_cache import KVCache
from nanovllm.worker.layers import RotaryEmbedding
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder

T = TypeVar("T")
OURS = [(RowParallelLinear, "forward"), (ParallelDecoder, "embed"), (tensor_files, "open_file"), (RankGroup, "share")]
OUR_CODE = [(owner, name, getattr(owner, name)) for owner, name in OURS]
CPU = torch.device("cpu")


@contextmanager
def ours() -> Iterator[None]:
    """The engine's own code for a while, whatever is installed."""
    with ExitStack() as stack:
        for code in OUR_CODE:
            stack.enter_context(replaced(*code))
        yield


def on_ranks(groups: list[ThreadGroup], work: Callable[[ThreadGroup], T]) -> list[T]:
    try:
        return together(groups, work)
    except OutOfStep as error:
        raise Wrong(f"{error}; every rank must call all_reduce, and equally often") from error


# -- a small checkpoint, with biases everywhere and few KV heads ------------------------------------------------------

SMALL = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    dtype="float32",
    vocab_size=24,
    hidden_size=12,
    intermediate_size=18,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=16,
    rms_norm_eps=1e-5,
    attention_bias=True,
    mlp_bias=True,
)
KEPT: list[tempfile.TemporaryDirectory] = []  # until this process ends


@cache
def small_checkpoint() -> tuple[Path, ModelConfig]:
    """On 2 ranks each has a KV head, on 6 ranks three share one."""
    KEPT.append(tempfile.TemporaryDirectory())
    folder = Path(KEPT[-1].name)
    (folder / "config.json").write_text(json.dumps(SMALL), "utf-8")
    config, generator = ModelConfig.from_directory(folder), torch.Generator().manual_seed(9)
    model = Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    tensors = {name: tensor.detach().clone() for name, tensor in model.checkpoint_tensors()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "merged").mkdir()
    merged = {name: p.detach() for name, p in model.named_parameters() if "qkv_proj" in name or "gate_up_proj" in name}
    save_file({f"model.{name}": tensor for name, tensor in merged.items()}, folder / "merged" / "model.safetensors")
    return folder, config


def load_small(group: RankGroup) -> Decoder:
    folder, config = small_checkpoint()
    return load_model(folder, config, torch.float32, CPU, group)


def logits_of(model: Decoder) -> Tensor:
    """Logits after six tokens, by the real decoder; of the whole vocabulary on rank 0."""
    config, seq = small_checkpoint()[1], Sequence([3, 23, 11, 12, 0, 7])
    seq.block_table = [0, 1]
    batch = Batch.from_scheduler_output(SchedulerOutput([ScheduledChunk(seq, 0, 6, 0)], [], 6), 4)
    rotary = RotaryEmbedding(config, 16, torch.float32, CPU)
    return model.logits(model(batch, rotary, KVCache(model.config, 2, 4, torch.float32, CPU), TORCH_KERNELS))


@cache
def expected_logits() -> Tensor:
    with ours(), torch.inference_mode():
        return logits_of(load_small(RankGroup()))


def check_small_decoder(num_reduces: int | None = None) -> None:
    """Six ranks with what is installed now; num_reduces: how many a step must have."""
    groups = make_groups(6)
    [got, *_] = on_ranks(groups, lambda group: logits_of(load_small(group)))
    if differs(expected_logits(), got, 1e-3, 1e-3).any():
        size = float((got - expected_logits()).abs().max())
        hint = "a small decoder with biases gives different logits on 6 ranks than on one"
        raise Wrong(hint, expected="no difference above 0.001", got=f"a difference of {size:.3g}")
    if num_reduces is not None:
        expect(num_reduces, groups[0].num_reduces, "all-reduces of one step of 2 layers")


# -- generation -------------------------------------------------------------------------------------------------------

ENGINES: WeakKeyDictionary[Bench, LLM] = WeakKeyDictionary()  # on several ranks, with weights that our loader has read
TOKENS: WeakKeyDictionary[Bench, list[list[int]]] = WeakKeyDictionary()  # by one rank
# In float32, so that the order in which the ranks' parts are added cannot tip the choice of a token.
OPTIONS: dict[str, Any] = dict(
    dtype="float32", max_model_len=64, max_num_seqs=4, block_size=16, num_gpu_blocks_override=16
)


def make_engine(bench: Bench) -> LLM:
    sizes = possible_sizes(ModelConfig.from_directory(resolve_checkpoint(bench.model)))
    size = 3 if 3 in sizes else [*sizes, 1][0]
    with replaced(parallel, "ParallelRunner", ThreadRunner):
        return LLM(bench.model, tensor_parallel_size=size, **OPTIONS)


def generate(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), False)
    return [output.outputs[0].token_ids for output in outputs]


def check_same_tokens(bench: Bench, fresh: bool = False) -> None:
    """fresh: the weights are read with what is installed now, too."""
    with on_the_cpu():
        if bench not in TOKENS:
            with ours():
                TOKENS[bench] = generate(LLM(bench.model, **OPTIONS))
        engine = ENGINES.pop(bench, None)  # comes back if nothing goes wrong
        if fresh:
            engine = make_engine(bench)
        elif engine is None:
            with ours():
                engine = make_engine(bench)
        engine.reset_prefix_cache()
        try:
            tokens = generate(engine)
        except OutOfStep as error:
            raise Wrong(f"{error}; every rank must call all_reduce, and equally often") from error
    decode, size = engine.get_tokenizer().decode, engine.engine.config.tensor_parallel_size
    for prompt, expected, got in zip(PROMPTS, TOKENS[bench], tokens, strict=True):
        hint = f"{size} ranks of your checkpoint answer {prompt!r} with different tokens than one rank"
        expect(decode(expected), decode(got), hint)
    if not fresh:
        ENGINES[bench] = engine


def check_decoder(function: Any, bench: Bench) -> None:
    """A decoder on 6 ranks: the logits of one rank, two all-reduces a layer and one for the embedding"""
    check_small_decoder(num_reduces=5)


def check_generates(function: Any, bench: Bench) -> None:
    """Real generation on several ranks: the same tokens"""
    check_same_tokens(bench)


# -- row_parallel_forward ---------------------------------------------------------------------------------------------

Forward = Callable[[RowParallelLinear, Tensor], Tensor]


def use_row_parallel_forward(function: Forward) -> AbstractContextManager[None]:
    return replaced(RowParallelLinear, "forward", function)


def whole_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Small ones, so that sums are exact in any order."""
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).float()


class WatchedLinear(RowParallelLinear):
    """The engine's layer; its product counts, and says what is wrong with its arguments."""

    def __init__(self, weight: Tensor, bias: Tensor | None, group: RankGroup) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias is not None, group)
        self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.clone(), requires_grad=False)
        self.product, self.num_products = self._product, 0

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.num_products += 1
        if x.shape[-1] != weight.shape[-1]:
            hint = (
                "layer.product: x must have as many columns as the weight; a row-parallel layer gets its x cut "
                "already: it has this rank's columns and no others"
            )
            raise Wrong(hint, expected=f"x [*, {weight.shape[-1]}]", got=f"x {list(x.shape)}")
        return F.linear(x, weight, bias)


def ask_linear(function: Forward, layer: WatchedLinear, x: Tensor) -> Tensor:
    """One call. Raises Wrong for what is wrong on any number of ranks."""
    changed = "x, weight and bias must stay as they are: all_reduce changes what it is given"
    with unchanged(changed, x, *layer.parameters()):
        got = function(layer, x)
    if not isinstance(got, Tensor):
        raise Wrong("return a tensor", got=repr(got))
    if layer.num_products == 0:
        raise Wrong("call layer.product: the engine may keep the weight in an order that torch's functions do not know")
    return got


def compare_rows(function: Forward, size: int, with_bias: bool) -> None:
    weight, x = whole_numbers(3, 4 * size), whole_numbers(2, 4 * size, seed=1)
    bias = torch.tensor([100.0, 200, 300]) if with_bias else None
    product, added = F.linear(x, weight), 0 if bias is None else bias
    expected = product + added

    def share_of(group: ThreadGroup) -> tuple[Tensor, Tensor]:
        share = slice(4 * group.rank, 4 * group.rank + 4)
        return weight[:, share], x[:, share].clone()

    def work(group: ThreadGroup) -> Tensor:
        part, its_x = share_of(group)
        return ask_linear(function, WatchedLinear(part, bias, group), its_x)

    groups = make_groups(size)
    for group, got in zip(groups, on_ranks(groups, work), strict=True):
        partial = F.linear(*reversed(share_of(group)))
        likely = [
            (expected, f"all_reduce must be called once; it was called {group.num_reduces} times"),
            (partial, "that is this rank's partial sum; the ranks' parts have to be added up"),
            (partial + added, "that is this rank's partial sum; the ranks' parts have to be added up"),
            (expected / size, "the parts are added up, not averaged"),
            (product + size * added, f"the bias is in it {size} times: each of {size} ranks has added it"),
            (product, "the bias is missing"),
        ]
        if got.shape != expected.shape or differs(expected, got, 1e-4, 1e-6).any() or group.num_reduces != 1:
            hint = next((text for other, text in likely if torch.equal(got, other)), "")
            where = f"rank {group.rank} of {size}, a row-parallel layer {'with' if with_bias else 'without'} a bias: "
            raise Wrong(where + hint, expected=expected.tolist(), got=got.tolist())


# -- embed ------------------------------------------------------------------------------------------------------------

Embed = Callable[[ParallelDecoder, Tensor], Tensor]


def use_embed(function: Embed) -> AbstractContextManager[None]:
    return replaced(ParallelDecoder, "embed", function)


def compare_embed(
    function: Embed, size: int, num_words: int, input_ids: list[int], dtype: torch.dtype = torch.float32
) -> None:
    """The table's row w is [w + 1, 100 (w + 1)]; each rank holds num_words of them."""
    config = shard_config(small_checkpoint()[1], 2)
    table = (torch.arange(1.0, size * num_words + 1)[:, None] * torch.tensor([1.0, 100.0])).to(dtype)
    expected = table[input_ids]

    def work(group: ThreadGroup) -> Tensor:
        decoder = ParallelDecoder.__new__(ParallelDecoder)
        nn.Module.__init__(decoder)
        decoder.config = ModelConfig(**vars(config) | {"vocab_size": num_words})
        decoder.group = group
        ids, own = torch.tensor(input_ids), table[group.rank * num_words : (group.rank + 1) * num_words]
        decoder.embed_tokens, decoder.lookup = nn.Parameter(own.clone(), requires_grad=False), F.embedding
        changed = "input_ids and embed_tokens must stay as they are; all_reduce changes what it is given"
        try:
            with unchanged(changed, ids, decoder.embed_tokens):
                got = function(decoder, ids)
        except IndexError as error:
            hint = f"rank {group.rank} holds {num_words} rows and was asked for one that it does not have ({error})"
            raise Wrong(f"{hint}; words of other ranks need a row that exists, and zeros afterwards") from error
        expect_form(expected, got, "the shape and the dtype of what you return")
        return got

    groups = make_groups(size)
    answers = on_ranks(groups, work)
    where = f"{size} ranks of {num_words} words each, input_ids {input_ids}"
    expect(1, groups[0].num_reduces if size > 1 else 1, f"{where}: calls of all_reduce")
    for rank, got in enumerate(answers):
        for row, word in enumerate(input_ids):
            if torch.equal(got[row], expected[row]):
                continue
            owner, extra = word // num_words, got[row, 0] - expected[row, 0]
            hint = f"{where}: row {row} is word {word}, number {word % num_words} of rank {owner}'s"
            if not got[row].any():
                hint += "; nobody has put it in"
            elif extra > 0:
                hint += "; something was added to it: a rank that does not hold a word must add zeros"
            raise Wrong(f"{hint} (answer of rank {rank})", expected=expected[row].tolist(), got=got[row].tolist())


# -- read_share -------------------------------------------------------------------------------------------------------

ReadShare = Callable[[Any, str, ModelConfig, int, int], Tensor]


class StudentFile:
    """An open safetensors file in the real loader; the student's function decides what is read of it."""

    def __init__(self, path: Path, function: ReadShare) -> None:
        self.file, self.function, self.config = OUR_CODE[2][2](path), function, ModelConfig.from_directory(path.parent)
        self.keys = self.file.keys

    def get_slice(self, name: str) -> "StudentSlice":
        return StudentSlice(self, name)


class StudentSlice:
    def __init__(self, file: StudentFile, name: str) -> None:
        self.file, self.name, self.part = file, name, CountedSlice(file.file.get_slice(name))
        self.get_shape, self.get_dtype = self.part.get_shape, self.part.get_dtype

    def __getitem__(self, shares: tuple[tuple[slice, RankGroup], ...]) -> Tensor:
        group, config = shares[0][1], self.file.config
        got = self.file.function(self.part, self.name, config, group.rank, group.size)
        # copy_() would stretch a tensor of a different shape without a word.
        ends = zip(shares, self.get_shape(), strict=True)
        expected = [len(range(*share.indices(size))) for (share, _), size in ends]
        expect(expected, list(got.shape), f"shape of {self.name} on rank {group.rank} of {group.size}")
        return got


@contextmanager
def use_read_share(function: ReadShare) -> Iterator[None]:
    def share(group: RankGroup, whole_size: int, size: int) -> tuple[slice, RankGroup]:
        return OUR_CODE[3][2](group, whole_size, size), group

    with (
        replaced(tensor_files, "open_file", lambda path: StudentFile(path, function)),
        replaced(tensor_files, "PART_NUMBERS", sys.maxsize),  # the student's function reads a share at once
        replaced(RankGroup, "share", share),
    ):
        yield


@cache
def expected_shares(rank: int, size: int) -> dict[str, Tensor]:
    """What the engine's own loader gives to a rank, including the merged weights."""
    with ours():
        model = load_small(RankGroup(rank, size))
    shares = {name: tensor.detach() for name, tensor in model.checkpoint_tensors()}
    return shares | {
        f"model.{name}": p.detach() for name, p in model.named_parameters() if "qkv" in name or "_up" in name
    }


def lines(tensor: Tensor, dim: int) -> list[list[float]]:
    return (tensor if dim == 0 else tensor.T).tolist()


def in_words(whole: Tensor, share: Tensor) -> str:
    """Which rows or columns of the whole tensor these are."""
    for dim, kind in ((0, "rows"), (1, "columns"))[: whole.dim()]:
        everything = lines(whole, dim)
        if share.dim() != whole.dim() or not all(line in everything for line in lines(share, dim)):
            continue
        found = [everything.index(line) for line in lines(share, dim)]
        runs: list[list[int]] = []
        for index in found:
            if runs and index == runs[-1][-1] + 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        spans = ", ".join(f"{run[0]} to {run[-1]}" for run in runs) or "none"
        return f"all {len(found)} {kind}" if found == list(range(len(everything))) else f"{kind} {spans}"
    return f"a tensor of shape {list(share.shape)}"


def hint_for(name: str, whole: Tensor, expected: Tensor, got: Tensor, rank: int, size: int) -> str:
    """The likely mistake."""
    layer = name.split(".")[-2]
    if got.shape == whole.shape and torch.equal(got, whole):
        return ": that is all of it"
    if expected.shape == whole.shape:
        if layer in ("o_proj", "down_proj"):
            return ": a row-parallel layer gives whole outputs, so its bias is not cut"
        return ": norms work on whole vectors and are not cut"
    if got.dim() != whole.dim():
        return ""
    num_rows = whole.shape[0]
    if layer in ("qkv_proj", "gate_up_proj"):
        equal_parts = (whole[rank * n : (rank + 1) * n] for n in (num_rows // size, -(-num_rows // size)))
        exactly = whole[rank * num_rows // size : (rank + 1) * num_rows // size]
        if any(got.shape == part.shape and torch.equal(got, part) for part in (exactly, *equal_parts)):
            return ": the merged tensor is cut into equal parts, across the borders inside it; cut each part of it"
        if layer == "qkv_proj" and size > 2 and got.shape[0] < expected.shape[0]:
            return ": 2 KV heads for 6 ranks, so each rank has a copy of a whole one, in a merged weight as well"
        return ""
    dim = next(d for d in range(whole.dim()) if expected.shape[d] != whole.shape[d])
    kind, num_got = ("row", "column")[dim], got.shape[dim]
    if whole.dim() == 2 and num_got == whole.shape[dim] and got.shape[1 - dim] < whole.shape[1 - dim]:
        what = "row-parallel: a rank has the columns for its part of x" if dim else "column-parallel: a rank has rows"
        return f": {layer} is {what}; the weight is stored as [out, in]"
    if layer in ("k_proj", "v_proj") and size > 2:
        head = rank * 2 // size
        return f": query head {rank} belongs to KV head {head}, so rank {rank} needs a copy of that one, whole"
    owner = next((other for other in range(size) if torch.equal(got, expected_shares(other, size)[name])), None)
    if owner is not None:
        return f": that is the share of rank {owner}"
    everything = lines(whole, dim)
    first, got_first = lines(expected, dim)[0], lines(got, dim)[0]
    if got_first in everything and everything.index(got_first) - everything.index(first) in (1, -1):
        late = everything.index(got_first) > everything.index(first)
        return f": it begins one {kind} too {'late' if late else 'early'}"
    if num_got < expected.shape[dim]:
        together = f"{num_got * size} of {whole.shape[dim]} {kind}s together"
        return f": with so few for each rank, the {size} ranks have {together}"
    return ""


def compare_share(function: ReadShare, names: str, size: int) -> None:
    """names: how names end; of the layers the last one is taken."""
    folder, config = small_checkpoint()
    for ending in names.split():
        name = [name for name in expected_shares(0, size) if f".{name}".endswith(f".{ending}")][-1]
        merged = "qkv" in name or "gate_up" in name
        path = folder / ("merged" if merged else ".") / "model.safetensors"
        with safe_open(path, framework="pt") as file:
            whole = file.get_tensor(name)
            for rank in range(size):
                part, expected = CountedSlice(file.get_slice(name)), expected_shares(rank, size)[name]
                got = function(part, name, config, rank, size)
                where = f"{name} {list(whole.shape)}, rank {rank} of {size}"
                if not isinstance(got, Tensor):
                    raise Wrong(f"{where}: return a tensor", got=repr(got))
                if got.shape != expected.shape or not torch.equal(got, expected):
                    hint = where + hint_for(name, whole, expected, got, rank, size)
                    raise Wrong(hint, expected=in_words(whole, expected), got=in_words(whole, got))
                if part.num_read > got.numel():
                    hint = "more numbers read than returned; ask the file for the slice, part[a:b], not for all"
                    raise Wrong(f"{where}: {hint}", expected=got.numel(), got=part.num_read)


def check_several_kv_heads(function: ReadShare, bench: Bench) -> None:
    """4 KV heads on 2 ranks: two for each"""
    config = replace(small_checkpoint()[1], num_attention_heads=8, num_key_value_heads=4)
    heads = torch.arange(16 * config.head_dim * config.hidden_size).view(16, config.head_dim, config.hidden_size)
    parts = {"k_proj": [heads[8:12]], "v_proj": [heads[12:]], "qkv_proj": [heads[:8], heads[8:12], heads[12:]]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        stored = {
            f"model.layers.0.self_attn.{name}.weight": torch.cat(each).flatten(0, 1) for name, each in parts.items()
        }
        save_file(stored, path)
        with safe_open(path, framework="pt") as file:
            for name, each in zip(stored, parts.values(), strict=True):
                for rank in range(2):
                    expected = torch.cat([part.chunk(2)[rank] for part in each]).flatten(0, 1)
                    got = function(CountedSlice(file.get_slice(name)), name, config, rank, 2)
                    where = f"{name} {list(stored[name].shape)}, 8 query heads and 4 KV heads, rank {rank} of 2"
                    is_right = isinstance(got, Tensor) and got.shape == expected.shape and torch.equal(got, expected)
                    found = in_words(stored[name], got) if isinstance(got, Tensor) else repr(got)
                    ensure(is_right, where, expected=in_words(stored[name], expected), got=found)


def check_loader(function: ReadShare, bench: Bench) -> None:
    """The real loader on 6 ranks: the decoder gives the logits of one rank"""
    check_small_decoder()


def check_read_generates(function: ReadShare, bench: Bench) -> None:
    """Real generation on several ranks that read their shares with it: the same tokens"""
    check_same_tokens(bench, fresh=True)


ROW_CHECKS = cases(
    compare_rows,
    {
        "The partial sums of 3 ranks are added up": [(3, False)],
        "The same with a bias": [(3, True)],
        "A group of one": [(1, True)],
    },
)
EMBED_CHECKS = cases(
    compare_embed,
    {
        "A rank on its own": [(1, 6, [5, 0, 3])],
        "Two ranks, words from the middle of their shares": [(2, 5, [6, 3, 3, 8])],
        "The first and the last word of each rank": [(3, 4, [0, 3, 4, 7, 8, 11])],
        "A step whose words are all on one rank": [(3, 4, [5])],
        "A table in bf16": [(2, 3, [5, 0], torch.bfloat16)],
    },
)
ROWS = "embed_tokens.weight lm_head.weight gate_proj.weight up_proj.weight q_proj.weight"
KV, WHOLE = "k_proj.weight v_proj.weight k_proj.bias", "What is cut, and what is not"
SHARE_CHECKS = cases(
    compare_share,
    {
        "Words, MLP outputs and query heads: rows": [(ROWS, 2)],
        "o_proj and down_proj: columns": [("o_proj.weight down_proj.weight", 2)],
        ("Norms, and biases of row-parallel layers: whole", WHOLE): [
            ("model.norm.weight input_layernorm.weight o_proj.bias down_proj.bias", 2)
        ],
        "Biases of column-parallel layers: as their weights": [("q_proj.bias gate_proj.bias up_proj.bias", 6)],
        ("KV heads, one for each rank", WHOLE): [(KV, 2)],
        ("6 ranks and 2 KV heads", WHOLE): [(f"{KV} q_proj.weight", 6)],
        "Merged weights: each part is cut": [
            ("gate_up_proj.weight qkv_proj.weight qkv_proj.bias", size) for size in (2, 6)
        ],
    },
)

TASKS = [
    Task(
        "row_parallel_forward",
        "Columns, then rows",
        use_row_parallel_forward,
        (*ROW_CHECKS, check_decoder, check_generates),
    ),
    Task("embed", WHOLE, use_embed, (*EMBED_CHECKS, check_decoder, check_generates)),
    Task(
        "read_share",
        "Reading a share",
        use_read_share,
        (*SHARE_CHECKS, check_several_kv_heads, check_loader, check_read_generates),
    ),
]
