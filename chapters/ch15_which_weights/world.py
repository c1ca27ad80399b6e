"""The object that the lab of chapter 15 plays with: an engine with adapters.

It computes in float32, so that the tokens are the same on every machine.
"""

from typing import Any, NamedTuple

from chapters.ch13_guess_and_check.world import chunks_watched
from chapters.ch15_which_weights.tuning import BEGINNING, ENDINGS, trained_adapters
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.request import Request

NOBODY = "none"
MAX_LORAS, MAX_RANK, MAX_TOKENS = 2, 8, 10
OPTIONS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 192, "block_size": 4}


class Entry(NamedTuple):
    """A request that was sent."""

    name: str
    adapter: str
    request: Request

    @property
    def seq(self) -> Sequence:
        return self.request.samples[0].seq


def rows_of(chunks: list[ScheduledChunk], entries: list[Entry]) -> list[tuple[Entry, int]]:
    """The requests of a step, and how many rows each has in it."""
    known = {entry.seq.seq_id: entry for entry in entries}
    return [(known[chunk.seq.seq_id], chunk.end - chunk.start) for chunk in chunks]


def load_adapters(model: str, max_loras: int = MAX_LORAS, **options: Any) -> tuple[LLM, dict[str, Any]]:
    """An engine, and what a request says to meet one of the lab's adapters."""
    folder, _ = trained_adapters(str(resolve_checkpoint(model)))
    requests = {name: LoRARequest(name, i, f"{folder.name}/{name}") for i, name in enumerate(ENDINGS, 1)}
    sizes = {**OPTIONS, **options}
    return LLM(model, dtype="float32", enable_lora=True, max_loras=max_loras, max_lora_rank=MAX_RANK, **sizes), requests


class World:
    adapter: str

    def __init__(self, llm: LLM, adapters: dict[str, Any]) -> None:
        self.llm, self.adapters = llm, adapters
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.llm.engine.abort_requests(list(self.llm.engine.requests.values()))
        self.llm.reset_prefix_cache()
        self.entries: list[Entry] = []
        self.rows: list[tuple[Entry, int]] = []  # of the last step
        self.adapter = next(iter(self.adapters))
        return "There are no requests. s sends one, a chooses the adapter that it names, n makes a step."

    def send(self) -> str:
        return self.enter(BEGINNING, self.adapter)

    def send_all(self) -> str:
        """One for each adapter, and one without."""
        for adapter in (NOBODY, *self.adapters):
            self.enter(BEGINNING, adapter)
        return f"Four requests with the same prompt. At most {MAX_LORAS} adapters run at a time."

    def next_adapter(self) -> str:
        names = [*self.adapters, NOBODY]
        self.adapter = names[(names.index(self.adapter) + 1) % len(names)]
        return f"The next request names: {self.adapter}."

    def step(self) -> str:
        if not self.llm.engine.has_unfinished_requests():
            raise ValueError("there are no requests: s sends one")
        with chunks_watched(self.llm) as chunks:
            self.llm.engine.step()
        self.rows = rows_of(chunks, self.entries)
        met, num_rows = {entry.adapter for entry, _ in self.rows}, sum(num_rows for _, num_rows in self.rows)
        return f"{num_rows} rows, and {len(met)} of {len(self.adapters) + 1} sets of weights."

    def typed(self, text: str) -> str:
        return self.enter(text, self.adapter)

    # -- what there is ----------------------------------------------------------------------------------------------

    def enter(self, prompt: str, adapter: str) -> str:
        """Raises ValueError, with all as it was, for a prompt that is too long."""
        params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
        engine = self.llm.engine
        request = engine.make_request(prompt, params, lora_request=self.adapters.get(adapter))
        engine.enqueue([request])
        name = f"#{len(self.entries) + 1}"
        self.entries.append(Entry(name, adapter, request))
        return f"{name} waits: {self.entries[-1].seq.num_prompt_tokens} tokens, adapter: {adapter}."

    @property
    def in_memory(self) -> str:
        """The adapters in slots, the least recently used first."""
        names = {request.lora_int_id: name for name, request in self.adapters.items()}
        slots = self.llm.engine.model_runner.parts["adapters"].slots
        return ", ".join(f"{names[lora_id]} in slot {slot}" for lora_id, slot in slots.items()) or "no adapter"
