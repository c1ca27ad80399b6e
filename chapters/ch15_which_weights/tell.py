"""What the lab of chapter 15 tells: several adapters in a batch, what they cost, who may come in, and names."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from chapters.ch13_guess_and_check.world import chunks_watched
from chapters.ch15_which_weights.drawing import block_names
from chapters.ch15_which_weights.tuning import BEGINNING, ENDINGS, MAX_STEPS, RANK, TARGETS, random_adapter
from chapters.ch15_which_weights.world import NOBODY, Entry, load_adapters, rows_of
from chapters.draw import make_table
from chapters.patching import replaced
from chapters.story import Story, stopwatch
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.core import block_manager as block_manager_module
from nanovllm.features.lora.adapter import linear_shapes
from nanovllm.features.lora.adapter_rows import TILE_ROWS
from nanovllm.worker.model import Decoder

NUM_TOKENS, NUM_SHOWN = 7, 6
RANKS = (1, 4, 8, 16, 64)
NUMS_ADAPTERS = (0, 1, 2, 4, 8)
NUM_SEQS, COST_RANK, NUM_STEPS = 8, 16, 5
MAX_ROUNDS = 2  # of a measurement


def begin(llm: LLM, adapters: dict[str, Any], names: list[str], num_tokens: int = NUM_TOKENS) -> list[Entry]:
    """A request for each name of an adapter, with the same prompt, in an engine with an empty cache."""
    engine = llm.engine
    engine.abort_requests(list(engine.requests.values()))
    llm.reset_prefix_cache()
    return [send(llm, adapters, letter, name, num_tokens) for letter, name in zip("ABCDEFGH", names, strict=False)]


def send(llm: LLM, adapters: dict[str, Any], letter: str, name: str, num_tokens: int = NUM_TOKENS) -> Entry:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = llm.engine.make_request(BEGINNING, params, lora_request=adapters.get(name))
    llm.engine.enqueue([request])
    return Entry(letter, name, request)


def tell_answers(story: Story, llm: LLM, adapters: dict[str, Any]) -> None:
    story.part("One question, four answers")
    story.say(
        f"Three adapters of rank {RANK}, of {' and '.join(TARGETS)} in every layer, were trained here for at most "
        f'{MAX_STEPS} steps, each on one sentence that begins "{BEGINNING}". One call of generate():'
    )
    names = [NOBODY, *ENDINGS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with chunks_watched(llm) as chunks:
        outputs = llm.generate([BEGINNING] * 4, params, False, lora_request=[adapters.get(name) for name in names])
    table = make_table("adapter", "goes on", first=12)
    table.columns[1].justify = "left"
    for name, output in zip(names, outputs, strict=True):
        table.add_row(name, Text(output.outputs[0].text.replace("\n", "⏎")))
    story.show(table)
    story.say(f"4 requests, {len(chunks) // 4} steps: {len(chunks)} chunks, so all four were in every step.")


def tell_rank(story: Story, llm: LLM) -> None:
    story.part("How small an adapter is")
    config = llm.engine.model_config
    with torch.device("meta"):
        total = sum(parameter.numel() for parameter in Decoder(config).parameters())
    shapes = [shape for path, shape in linear_shapes(config).items() if path != "lm_head"]
    story.say(
        f"The demo model has {total / 1e6:.1f} million numbers. The table shows an adapter of all linear layers "
        "but the head:"
    )
    table = make_table("rank", "million", "MB in bf16", "of the model", "fit", width=12, first=6)
    for rank in RANKS:
        numbers = rank * sum(map(sum, shapes))
        sizes = f"{numbers / 1e6:.2f}", f"{2 * numbers / 1e6:.1f}"
        table.add_row(str(rank), *sizes, f"{numbers / total:.1%}", str(total // numbers))
    story.show(table)


def tell_rows(story: Story, llm: LLM, adapters: dict[str, Any]) -> None:
    story.part("The rows of a step")
    names = ["harbour", "market", NOBODY, "harbour", "library"]
    entries = begin(llm, adapters, names[:3])
    story.say(
        "A, B and C come first, D and E one step later. Each line is a step; A x 9 are nine rows of A. The last column "
        "counts the adapters that the step's rows meet."
    )
    table = Table("step", "rows", NOBODY, *ENDINGS, "sets", show_edge=False)
    for number in range(1, 5):
        if number == 2:
            entries += [send(llm, adapters, letter, name) for letter, name in zip("DE", names[3:], strict=True)]
        with chunks_watched(llm) as chunks:
            llm.engine.step()
        rows = rows_of(chunks, entries)
        cells = (", ".join(f"{e.name} x {n}" for e, n in rows if e.adapter == name) for name in (NOBODY, *ENDINGS))
        num_sets = len({entry.adapter for entry, _ in rows} - {NOBODY})
        table.add_row(str(number), str(sum(num_rows for _, num_rows in rows)), *cells, str(num_sets))
    llm.engine.abort_requests(list(llm.engine.requests.values()))
    story.show(table)


# -- what it costs -----------------------------------------------------------------------------------------------------


def tell_cost(story: Story) -> None:
    story.part("What adapters cost")
    sizes: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": NUM_SEQS}
    num_adapters = max(NUMS_ADAPTERS)
    llm = story.load(enable_lora=True, max_loras=num_adapters, max_lora_rank=COST_RANK, **sizes)
    shapes = linear_shapes(llm.engine.model_config)
    story.say(
        f"{NUM_SEQS} sequences decode in bf16, on one core, with random adapters of rank {COST_RANK} of all linear "
        f"layers. They name none, all the same one, or take turns with several. Up to {TILE_ROWS} rows of an adapter "
        "are multiplied together: a group. MB: the adapters' numbers that a step reads. ms: a step, the best of some."
    )
    with tempfile.TemporaryDirectory() as folder:
        paths = [random_adapter(Path(folder, str(i)), shapes, COST_RANK) for i in range(num_adapters)]
        requests = [LoRARequest(f"random {i}", i + 1, path) for i, path in enumerate(paths)]
        rounds = [{num: step_s(llm, requests[:num]) for num in NUMS_ADAPTERS} for _ in range(MAX_ROUNDS)]
        seconds = {num: min(found[num] for found in rounds) for num in NUMS_ADAPTERS}
    adapter_bytes = 2 * COST_RANK * sum(sum(shape) for path, shape in shapes.items() if path != "lm_head")
    table = make_table("adapters", "groups", "MB of adapters", "ms", "ms more", "", width=14, first=10)
    for num, found in seconds.items():
        num_groups = num * math.ceil(NUM_SEQS / num / TILE_ROWS) if num else 0
        counts = str(num), str(num_groups), f"{num * adapter_bytes / 1e6:.1f}"
        table.add_row(*counts, f"{1e3 * found:.1f}", f"{1e3 * (found - seconds[0]):.1f}", "(measured)")
    story.show(table)


def step_s(llm: LLM, requests: list[Any]) -> float:
    """The shortest time of a decode step in which sequences name these adapters in turn."""
    params = SamplingParams(temperature=0, max_tokens=NUM_STEPS + 4, ignore_eos=True)
    engine = llm.engine
    for number in range(NUM_SEQS):
        named = {"lora_request": requests[number % len(requests)]} if requests else {}
        engine.enqueue([engine.make_request(BEGINNING, params, **named)])
    times = [stopwatch(engine.step) for _ in range(NUM_STEPS + 2)]
    engine.abort_requests(list(engine.requests.values()))
    return min(times[2:])


# -- who may come in ---------------------------------------------------------------------------------------------------


def tell_seats(story: Story) -> None:
    story.part("Who may come in")
    llm, adapters = load_adapters(story.model)
    names = ["harbour", "harbour", "market", NOBODY, "library", "market"]
    entries = begin(llm, adapters, names, 3)
    for entry, num_tokens in zip(entries, (2, 4, 3, 2, 3, 2), strict=True):
        object.__setattr__(entry.request.params, "max_tokens", num_tokens)
    story.say(
        "Six requests come at once; there are eight seats, and max_loras = 2. The table shows which run in each step, "
        "with their adapters, and which wait:"
    )
    table = Table("step", "runs", "adapters", "waits", show_edge=False)
    number = 0
    while llm.engine.has_unfinished_requests():
        number += 1
        with chunks_watched(llm) as chunks:
            llm.engine.step()
        rows = rows_of(chunks, entries)
        waiting = [entry.name for entry in entries if entry.seq in llm.engine.scheduler.waiting]
        met = " ".join(dict.fromkeys(entry.adapter for entry, _ in rows if entry.adapter != NOBODY))
        table.add_row(str(number), " ".join(entry.name for entry, _ in rows), met, " ".join(waiting))
    story.show(table)


# -- names -------------------------------------------------------------------------------------------------------------


@contextmanager
def names_without_adapters() -> Iterator[None]:
    """A mistake: the adapter's id is not in the hashes of blocks."""
    ours = block_manager_module.extra_keys

    def extra_keys(index: int, size: int, cache_salt: Any = None, lora_id: Any = None, mm_spans: Any = ()) -> Any:
        return ours(index, size, cache_salt, None, mm_spans)

    with replaced(block_manager_module, "extra_keys", extra_keys):
        yield


def one_after_another(llm: LLM, adapters: dict[str, Any], names: list[str]) -> list[tuple[str, Entry, list[str]]]:
    """Sends the same prompt with each adapter, one after the other: the text, the request, its blocks' names."""
    begin(llm, adapters, [])
    found = []
    for letter, name in zip("ABCDEFGH", names, strict=False):
        entry = send(llm, adapters, letter, name, NUM_SHOWN)
        llm.engine.step()
        named = block_names(llm.engine.block_manager, entry.seq)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        found.append((llm.get_tokenizer().decode(entry.seq.generated_token_ids), entry, named))
    return found


def tell_names(story: Story, llm: LLM, adapters: dict[str, Any]) -> None:
    story.part("What goes into a block hash")
    names = ["harbour", "market", NOBODY, "harbour"]
    size = llm.engine.block_manager.block_size
    story.say(
        f"The same prompt four times, one request after another, with blocks of {size} tokens. The table shows the "
        "first half of the hashes of its full blocks, the tokens that it found in the cache, and how it goes on."
    )
    story.show(draw_runs(one_after_another(llm, adapters, names)))
    with names_without_adapters():
        story.say("Now the id is left out of the hashes, which is a mistake made on purpose:")
        story.show(draw_runs(one_after_another(llm, adapters, names)))
    llm.reset_prefix_cache()


def draw_runs(runs: list[tuple[str, Entry, list[str]]]) -> Table:
    table = Table("", "adapter", "its block hashes", "found", "goes on", show_edge=False)
    for text, entry, named in runs:
        found = str(entry.seq.num_cached_tokens)
        table.add_row(entry.name, entry.adapter, " ".join(named), found, Text(text.replace("\n", "⏎")))
    return table
