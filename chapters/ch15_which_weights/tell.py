"""What the lab of chapter 15 tells: several adapters in a batch, what they cost, who may come in, and block hashes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table
from rich.text import Text

from chapters.ch15_which_weights.drawing import block_hashes
from chapters.ch15_which_weights.tuning import BEGINNING
from chapters.ch15_which_weights.world import Entry
from chapters.patching import replaced
from chapters.story import stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core import block_manager as block_manager_module

NUM_TOKENS, NUM_SHOWN = 7, 6
RANKS = (1, 4, 8, 16, 64)
NUMS_ADAPTERS = (0, 1, 2, 4, 8)
NUM_SEQS, COST_RANK, NUM_STEPS = 8, 16, 5
MAX_ROUNDS = 2  # of a measurement


def start_over(llm: LLM, adapters: dict[str, Any], names: list[str]) -> list[Entry]:
    """A request for each name of an adapter, with the same prompt, in an engine with an empty cache."""
    engine = llm.engine
    engine.abort_requests(list(engine.requests.values()))
    llm.reset_prefix_cache()
    return [send(llm, adapters, number, name) for number, name in enumerate(names, 1)]


def send(llm: LLM, adapters: dict[str, Any], number: int, name: str, num_tokens: int = NUM_TOKENS) -> Entry:
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    request = llm.engine.make_request(BEGINNING, params, lora_request=adapters.get(name))
    llm.engine.enqueue([request])
    return Entry(f"#{number}", name, request)


# -- what it costs -----------------------------------------------------------------------------------------------------


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


# -- block hashes ------------------------------------------------------------------------------------------------------


@contextmanager
def hashes_without_adapters() -> Iterator[None]:
    """A mistake: the adapter's id is not in the hashes of blocks."""
    ours = block_manager_module.extra_keys

    def extra_keys(index: int, size: int, cache_salt: Any = None, lora_id: Any = None, mm_spans: Any = ()) -> Any:
        return ours(index, size, cache_salt, None, mm_spans)

    with replaced(block_manager_module, "extra_keys", extra_keys):
        yield


def one_after_another(llm: LLM, adapters: dict[str, Any], names: list[str]) -> list[tuple[str, Entry, list[str]]]:
    """Sends the same prompt with each adapter, one after the other: the text, the request, its block hashes."""
    start_over(llm, adapters, [])
    found = []
    for number, name in enumerate(names, 1):
        entry = send(llm, adapters, number, name, NUM_SHOWN)
        llm.engine.step()
        hashes = block_hashes(llm.engine.block_manager, entry.seq)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        found.append((llm.get_tokenizer().decode(entry.seq.generated_token_ids), entry, hashes))
    return found


def draw_runs(runs: list[tuple[str, Entry, list[str]]]) -> Table:
    table = Table("", "adapter", "its block hashes", "found", "goes on", show_edge=False)
    for text, entry, hashes in runs:
        found = str(entry.seq.num_cached_tokens)
        table.add_row(entry.name, entry.adapter, " ".join(hashes), found, Text(text.replace("\n", "⏎")))
    return table
