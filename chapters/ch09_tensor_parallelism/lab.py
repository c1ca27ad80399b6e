"""Lab 9: the same model on 1 and on 3 ranks of this machine: who holds what, who reads what, what they tell each other.

The three ranks are the engine's own processes. Two parts need to look inside a rank and use the real layers and the
real loader in this process.
"""

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from chapters.ch09_tensor_parallelism import ranks
from chapters.ch09_tensor_parallelism.ranks import CountedFile, CountedSlice, ThreadGroup
from chapters.draw import make_table
from chapters.patching import replaced
from chapters.recording import Recording
from chapters.story import Story, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.features.parallel.parallel_layers import RowParallelLinear
from nanovllm.files import tensor_files
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.worker.kernels import silu_and_mul
from nanovllm.worker.layers import Linear
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder

OPTIONS: dict[str, Any] = dict(
    dtype="float32",  # so that the order in which parts are added cannot tip the choice of a token
    max_model_len=64,
    max_num_seqs=4,
    block_size=4,
    num_gpu_blocks_override=20,
)
PROMPT = "The capital of France is"
SHARED = "Question: what is the capital of"
COUNTRIES = ("France", "Italy", "Japan", "Egypt")
NUM_TOKENS = 12
NUM_TIMED_STEPS = 6


@dataclass(frozen=True)
class Step:
    """What one step of an engine was. The last three are counted over all ranks' reports and the scheduler's."""

    num_tokens: int
    reduced_bytes: int
    num_hits: int
    num_preempted: int


class World:
    """The model, once on one rank and once on several."""

    def __init__(self, story: Story) -> None:
        self.directory = resolve_checkpoint(story.model)
        self.config = ModelConfig.from_directory(self.directory)
        sizes = ranks.possible_sizes(self.config)
        if not sizes:
            raise ValueError(f"{story.model} cannot be split: its sizes have no common divisor")
        self.size = 3 if 3 in sizes else sizes[0]
        self.local = shard_config(self.config, self.size)
        self.several = story.load(tensor_parallel_size=self.size, **OPTIONS)
        self.alone = story.load(**OPTIONS)

    @property
    def ranks(self) -> Any:
        """The driver's side of the ranks: a ParallelRunner."""
        return self.several.engine.model_runner


def add(llm: LLM, prompt: str, num_tokens: int) -> str:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    return llm.engine.add_request(None, prompt, params, stream=False)


def run(llm: LLM, prompts: list[str]) -> tuple[list[Step], dict[str, list[int]]]:
    """Generate, step by step: what each step was, and the tokens of each prompt."""
    engine, steps, tokens = llm.engine, list[Step](), dict[str, list[int]]()
    for prompt in prompts:
        add(llm, prompt, NUM_TOKENS)
    while engine.has_unfinished_requests():
        before = counters(llm)
        for output in engine.step():
            tokens[str(output.prompt)] = output.outputs[0].token_ids
        steps.append(Step(*(after - earlier for after, earlier in zip(counters(llm), before, strict=True))))
    return steps, tokens


def counters(llm: LLM) -> tuple[int, int, int, int]:
    stats, usage = llm.stats(), llm.engine.model_runner.usage()
    reduced = usage[0]["all_reduced"] if isinstance(usage, list) else 0
    num_tokens = llm.engine.stats.num_prefill_tokens + llm.engine.stats.num_decode_tokens
    return num_tokens, reduced, stats["prefix_cache"]["hits"], stats["num_preemptions"]


def decode_s(llm: LLM) -> float:
    """Seconds of a decode step of one request, the best of a few."""
    request_id = add(llm, PROMPT, NUM_TIMED_STEPS + 2)
    llm.engine.step()
    seconds = min(stopwatch(llm.engine.step) for _ in range(NUM_TIMED_STEPS))
    llm.engine.abort_request(request_id)
    return seconds


def load_share(directory: Path, config: ModelConfig, group: RankGroup) -> tuple[Decoder, dict[str, CountedSlice]]:
    """A rank's model, loaded in this process, and what was read of each tensor."""
    files: list[CountedFile] = []

    def open_counted(path: Path, ours: Callable = tensor_files.open_file) -> CountedFile:
        files.append(CountedFile(ours(path)))
        return files[-1]

    at_once = replaced(tensor_files, "PART_NUMBERS", sys.maxsize)  # large tensors, too: one slice each
    with replaced(tensor_files, "open_file", open_counted), at_once:
        model = load_model(directory, config, torch.float32, torch.device("cpu"), group)
    return model, {name: part for file in files for name, part in file.read.items() if part.slices}


# -- pictures -------------------------------------------------------------------------------------------------------


def numbers(x: Tensor) -> str:
    return " ".join(f"{value:g}" for value in x.flatten().tolist())


def span(share: slice, whole: int) -> str:
    start, stop, _ = share.indices(whole)
    if stop - start == whole:
        return "all"
    return f"{start:,}-{stop - 1:,}" if stop - start > 1 else f"{start}"


def read_of(part: CountedSlice) -> str:
    """What was read of a tensor, in words."""
    shape, [share] = part.get_shape(), part.slices
    spans = [span(one, whole) for one, whole in zip(share, shape, strict=True)]
    kinds = [f"{kind} {text}" for kind, text in zip(("rows", "columns"), spans, strict=False) if text != "all"]
    return ", ".join(kinds) or "all"


# -- the story ------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    with ranks.on_the_cpu():
        tell_pair(story)
        world = World(story)
        try:
            tell_shares(story, world)
            models = tell_reading(story, world)
            tell_messages(story, world)
            tell_generation(story, world)
            tell_last_bits(story, models)
            tell_time(story, world)
            tell_loss(story, world)
        finally:
            world.ranks._end()


def tell_pair(story: Story) -> None:
    story.part("Columns, then rows: one pair of layers by hand")
    first = torch.tensor([[1.0, 2], [3, -1], [0, 1], [-2, 1]])  # [4, 2]
    second, bias = torch.tensor([[1.0, 0, 2, 1], [2, 1, 0, 3]]), torch.tensor([10.0, 20])  # [2, 4], [2]
    x = torch.tensor([[3.0, 1]])  # one token
    story.say(
        "There are two linear layers with a function between them, here max(0, h). The first makes 4 numbers of 2, the "
        "second 2 of 4. They are the engine's Linear and RowParallelLinear. The rows of the first weight are "
        f"{' '.join(f'({numbers(row)})' for row in first)}, those of the second "
        f"{' '.join(f'({numbers(row)})' for row in second)}. The second has a bias, ({numbers(bias)}). On one rank "
        "they compute:"
    )

    def pair(group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the first weight, its columns of the second, and the layers run with them."""
        share = slice(group.rank * 4 // group.size, (group.rank + 1) * 4 // group.size)
        columns = Linear(2, 4 // group.size, bias=False)
        rows = RowParallelLinear(4 // group.size, 2, bias=True, group=group)
        columns.weight, rows.weight = torch.nn.Parameter(first[share]), torch.nn.Parameter(second[:, share])
        rows.bias = torch.nn.Parameter(bias)
        h = columns(x)
        return h, h.relu(), rows(h.relu())

    [(h, activated, y)] = ranks.together(ranks.make_groups(1), pair)
    story.show(f"x = {numbers(x)}    h = {numbers(h)}    max(0, h) = {numbers(activated)}    y = {numbers(y)}")
    story.say(
        "Now come two ranks. Rank 0 has rows 0 and 1 of the first weight, so it gets h's first two numbers, and "
        "columns 0 and 1 of the second, which is all that those two numbers meet. The bias (10 20) is in rank 0's part:"
    )
    groups = ranks.make_groups(2)
    answers = ranks.together(groups, pair)
    table = make_table("rank", "its h", "its max(0, h)", "its partial sum", "after all_reduce")
    for group, (h, activated, y) in zip(groups, answers, strict=True):
        partial = group.meeting.last_round[group.rank]
        table.add_row(str(group.rank), *(numbers(each) for each in (h, activated, partial, y)))
    story.show(table)
    halves = [x[:, [i]] @ first[:, [i]].T for i in (0, 1)]
    early, late = halves[0].relu() + halves[1].relu(), (halves[0] + halves[1]).relu()
    story.say(
        f"The same y, on both ranks. All-reduces for the two layers: {groups[0].num_reduces}. Between them neither "
        "rank needed a number from the other: the function works on each number alone.\n\n"
        "The other way round, with the first weight cut into columns, each rank would have a part of the sum for each "
        f"number of h: a = {numbers(halves[0])} and b = {numbers(halves[1])}. They would have to meet before the "
        "function, too, since it cannot be applied to halves:\n\n"
        f"max(0, a) + max(0, b) is {numbers(early)}, but max(0, a + b) is {numbers(late)}."
    )


def tell_shares(story: Story, world: World) -> None:
    story.part("Who holds what")
    config, local, size = world.config, world.local, world.size
    story.say(
        f"The model in float32 on {size} ranks, each in a process of its own: {size + 1} processes with this one. All "
        "numbers count from 0:"
    )
    table = make_table("rank", "query heads", "KV heads", "MLP columns", "words", "MB of weights", "MB of KV")
    for rank, usage in enumerate(world.ranks.usage()):
        shares = [
            span(RankGroup(rank, size).share(getattr(config, name), getattr(local, name)), 10**9)
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        ]
        table.add_row(str(rank), *shares, *(f"{usage[key] / 1e6:.1f}" for key in ("weights", "kv_cache")))
    runner = world.alone.engine.model_runner
    wholes = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size
    megabytes = (f"{count / 1e6:.1f}" for count in (runner.weight_bytes, world.alone.engine.kv_pool.num_bytes))
    table.add_section()
    table.add_row("1 of 1", *(f"{whole:,} in all" for whole in wholes), *megabytes)
    story.show(table)
    copies = sum(usage["weights"] for usage in world.ranks.usage()) - runner.weight_bytes
    num_norms = 2 * config.num_hidden_layers + 1
    story.say(
        f"Together the ranks hold {copies / 1e6:.2f} MB more than one does alone: each rank has all {num_norms} norms. "
        f"One more copy of them is {num_norms} x {config.hidden_size} x 4 bytes = "
        f"{num_norms * config.hidden_size * 4 / 1e6:.2f} MB."
    )


def tell_reading(story: Story, world: World) -> list[Decoder]:
    """Returns the ranks' models, loaded once more in this process."""
    story.part("Who reads what")
    groups = [RankGroup(rank, world.size) for rank in range(world.size)]
    models, reads = zip(*(load_share(world.directory, world.config, group) for group in groups), strict=True)
    story.say(
        "The loader of each rank runs in this process with a file that notes what it is asked for. No tensor is cut "
        "after reading it; a slice of the file is asked for. The table shows the tensors outside the layers, and those "
        "of layer 0:"
    )
    table = make_table("tensor", "in the file", "rank 0 reads", f"rank {world.size - 1} reads")
    names = [name for name, _ in models[0].checkpoint_tensors()]
    for name in [name for name in names if "layers." not in name or name.startswith("model.layers.0.")]:
        first, last = reads[0][name], reads[-1][name]
        short = name.removeprefix("model.").removesuffix(".weight")
        table.add_row(short, " x ".join(map(str, first.get_shape())), read_of(first), read_of(last))
    story.show(table)
    story.say("These are the numbers read from the file, over all layers:")
    table = make_table("rank", "numbers read", "numbers that it holds")
    for rank, (model, read) in enumerate(zip(models, reads, strict=True)):
        num_read, num_held = sum(part.num_read for part in read.values()), sum(p.numel() for p in model.parameters())
        table.add_row(str(rank), f"{num_read:,}", f"{num_held:,}")
    table.add_section()
    table.add_row("1 of 1", "", f"{world.alone.engine.model_runner.weight_bytes // 4:,}")
    story.show(table)
    q, k, v = models[-1].layers[0].self_attn.qkv_proj.out_sizes
    story.say(
        f"q_proj, k_proj and v_proj lie in the file one by one and in memory as one weight, qkv_proj. Rank "
        f"{world.size - 1} has {q} + {k} + {v} rows of it: its own part of each of the three, one below the other."
    )
    return list(models)


def tell_messages(story: Story, world: World) -> None:
    story.part("One step: what the ranks are told, and what they answer")
    sent, answers, ask = list[tuple](), list[list](), world.ranks._ask

    def overhear(*message: Any, late: Any = None) -> list:
        sent.append(message)
        answers.append(ask(*message, late=late))
        return answers[-1]

    add(world.several, PROMPT, 1)
    with replaced(world.ranks, "_ask", overhear):
        world.several.engine.step()
    method, batch, sampling = sent[0]
    story.say(f"{PROMPT!r}, one step. The driver sends every rank the same message:")
    fields = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seqlens_k", "block_tables", "logits_rows")
    arrays = (f"    Batch.{name} = {getattr(batch, name).tolist()}" for name in fields)
    story.log(f"{method}(", *arrays, f"    SamplingBatch, for {sampling.num_rows} row", ")")
    story.say("It has no request, no sequence and no scheduler in it. These are the answers:")
    found = ((rank, result.sampled_token_ids[0], result.logprobs[0]) for rank, result in enumerate(answers[0]))
    story.log(*(f"rank {rank}: token ids {token_ids}, logprobs {logprobs}" for rank, token_ids, logprobs in found))
    story.say(
        "Every rank has computed the logits of its own words and handed them to rank 0. Rank 0 has sampled, and "
        "answers for the group. The other ranks only say that they are done."
    )
    story.say(f"The message was {len(pickle.dumps(sent[0])):,} bytes long.", measured=True)


def tell_generation(story: Story, world: World) -> None:
    story.part("The same tokens, a small pool, and ranks that do not know about it")
    config, pool = world.config, world.several.engine.kv_pool
    num_reduces, row_bytes = 2 * config.num_hidden_layers + 1, config.hidden_size * 4
    prompts = [f"{SHARED} {country}? Answer:" for country in COUNTRIES]
    story.say(
        f"Four prompts that begin alike, {NUM_TOKENS} tokens each, in a pool of {pool.num_blocks} blocks of "
        f"{pool.block_size}. All-reduces in a step: one after the embedding, two in each of "
        f"{config.num_hidden_layers} layers: {num_reduces}. Each adds up {row_bytes:,} bytes ({config.hidden_size} "
        "numbers) for every token of the step. The bytes in the third column are those that rank 0 counted:"
    )
    steps, tokens = run(world.several, prompts)
    formula = f"{num_reduces} x {row_bytes:,} x tokens"
    table = make_table("step", "tokens", "bytes all-reduced", formula, "hits", "preempted")
    for number, step in enumerate(steps, start=1):
        num_bytes = num_reduces * row_bytes * step.num_tokens
        counts = (f"{count:,}" for count in (step.num_tokens, step.reduced_bytes, num_bytes))
        table.add_row(str(number), *counts, str(step.num_hits or ""), str(step.num_preempted or ""))
    story.show(table)
    alone_steps, alone_tokens = run(world.alone, prompts)
    decode = world.several.get_tokenizer().decode
    lines = []
    for prompt in prompts:
        same = "the same tokens" if tokens[prompt] == alone_tokens[prompt] else "OTHER TOKENS"
        lines.append(f"{same} on 1 and {world.size} ranks: {decode(tokens[prompt])!r}")
    story.log(*lines)
    alike = [step.num_tokens for step in steps] == [step.num_tokens for step in alone_steps]
    story.say(
        f"Hits in the prefix cache: {sum(step.num_hits for step in steps)} blocks. Preemptions: "
        f"{sum(step.num_preempted for step in steps)}. On one rank: {sum(step.num_hits for step in alone_steps)} and "
        f"{sum(step.num_preempted for step in alone_steps)}. Tokens of each step the same: {'yes' if alike else 'no'}. "
        "All of this was decided in the driver. A rank saw slots and block tables, and used them for its own heads."
    )


def tell_last_bits(story: Story, models: list[Decoder]) -> None:
    story.part("The last bits")
    big, one = torch.tensor(1e8), torch.tensor(1.0)
    story.say(
        "float32 keeps about 7 digits, so the order of an addition matters. Let a be 100,000,000 and b be 1: "
        f"(a + b) - a = {(big + one) - big:g} and (a - a) + b = {(big - big) + one:g}."
    )
    mlps = [model.layers[0].mlp for model in models]
    torch.manual_seed(0)
    x = torch.randn(64, mlps[0].gate_up_proj.weight.shape[1])
    with torch.inference_mode():
        parts = [silu_and_mul(mlp.gate_up_proj(x)) for mlp in mlps]
        whole = torch.nn.functional.linear(torch.cat(parts, 1), torch.cat([mlp.down_proj.weight for mlp in mlps], 1))
        partial = [
            mlp.down_proj.product(part, mlp.down_proj.weight, None) for mlp, part in zip(mlps, parts, strict=True)
        ]
    forward, backward = sum(partial[1:], partial[0]), sum(partial[-2::-1], partial[-1])
    story.say(
        f"down_proj of layer 0 with the real weights, for 64 random rows: {whole.numel():,} numbers, each a sum of "
        f"{sum(part.shape[1] for part in parts):,} products. As one sum, and as {len(models)} partial sums, added up:"
    )
    table = make_table("compared", "they differ in", "by at most", "largest number", "")
    for name, a, b in (
        (f"one sum / {len(models)} partial sums", whole, forward),
        ("rank 0 first / rank 0 last", forward, backward),
    ):
        sizes = f"{int((a != b).sum()):,}", f"{float((a - b).abs().max()):.1e}", f"{float(a.abs().max()):.2f}"
        table.add_row(name, *sizes, "(measured)")
    story.show(table)
    story.say(
        "None of the results is the wrong one. A token changes only where two candidates are that close together. In "
        "bfloat16, which keeps 2 to 3 digits, that happens now and then, so this lab compares tokens in float32."
    )


def tell_time(story: Story, world: World) -> None:
    story.part("Is it faster?")
    seconds = [decode_s(world.alone), decode_s(world.several)]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    story.say(f"One decode step with one token, the best of {NUM_TIMED_STEPS}, on {num_cores} cores:")
    table = make_table("ranks", "ms a step", "")
    for size, step_s in zip((1, world.size), seconds, strict=True):
        table.add_row(str(size), f"{step_s * 1e3:.1f}", "(measured)")
    story.show(table)
    num_reduces = 2 * world.config.num_hidden_layers + 1
    story.say(
        f"{world.size} ranks take {seconds[1] / seconds[0]:.1f} times as long as one. They meet {num_reduces} times "
        f"in a step, every {seconds[1] * 1e3 / num_reduces:.1f} ms.",
        measured=True,
    )
    story.say(
        "No device was added. The ranks share the cores and the memory that one rank had to itself: the same number of "
        "weights comes out of the same memory, and the meetings come on top. (If your numbers say otherwise, something "
        "else is running on this machine.)"
    )


def tell_loss(story: Story, world: World) -> None:
    story.part("A rank is lost")
    add(world.several, PROMPT, NUM_TOKENS)
    world.several.engine.step()
    story.say("A request has made its first step. Then rank 1 is killed, and the engine makes the next one:")
    world.ranks._processes[1].kill()
    lines = []
    for _ in range(2):
        try:
            world.several.engine.step()
        except RuntimeError as error:
            lines.append(f"step() raises RuntimeError: {error}")
    num_alive = sum(process.poll() is None for process in world.ranks._processes)
    world.several.engine.scheduler.check_integrity()  # would raise
    [seq] = world.several.engine.scheduler.waiting
    story.log(
        *lines,
        f"ranks that still run: {num_alive}",
        f"scheduler.check_integrity() finds nothing; waiting: a sequence with {seq.num_prompt_tokens}+"
        f"{seq.num_generated_tokens} tokens, {seq.num_computed_tokens} computed",
    )
    story.say(
        "The scheduler's books are in order: they were rebuilt, as in chapter 2, and the sequence waits with "
        "its tokens. But a part of every layer has gone. The engine has ended, has said who was lost, and has taken "
        "the other ranks with it. To go on, build a new LLM and ask again."
    )


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: on one machine, several ranks take longer than one."""
    [sheet] = recorded.sheets("Is it faster?")
    one, several = sheet.column("ms a step")
    if several < 1.5 * one:
        raise ValueError(f"a step of one rank took {one} ms, of several {several}")
