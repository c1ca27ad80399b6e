"""The object that the lab of chapter 13 plays with: a text that the real engine continues, step by step, with
draft tokens.

The engine computes in float32, so that the tokens are the same on every machine.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple
from unittest.mock import patch

from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.choose import Proposer, Speculation
from nanovllm.features.speculation.ngrams import NgramProposer
from nanovllm.files.hub import resolve_checkpoint

TEXTS = {
    "a quotation": (
        "The ferry to the island leaves at nine from the old pier. It returns at five, and the crew waits for nobody. "
        "A ticket costs six euros, and children travel free.\n\nThe same text again, word for word:\n\nThe ferry to"
    ),
    "a list": (
        "Monday: rain, 12 degrees, wind from the west.\nTuesday: sun, 18 degrees, wind from the south.\n"
        "Wednesday: fog, 9 degrees, no wind.\nThursday: rain, 11 degrees, wind from the"
    ),
    "a story": "The lighthouse keeper had not spoken to anyone for three weeks when the boat",
}
NGRAMS, ITSELF, NOBODY = "n-grams", "the model itself in 8 bits", "nowhere"
SOURCES = (NGRAMS, ITSELF, NOBODY)
LONGEST, SHORTEST = 4, 2  # n-grams
NUMS_DRAFT_TOKENS = (4, 8, 1, 2)
TEMPERATURES = (0.0, 0.5, 1.0)
MAX_TOKENS, SEED = 160, 3
OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 1, "num_gpu_blocks_override": 72, "block_size": 8}


class Step(NamedTuple):
    """What a step did for a sequence: draft tokens that were computed, and the tokens that it got.

    The last one it got was sampled after those that were accepted, unless an accepted one ends the text.
    """

    draft_token_ids: list[int]
    taken: list[int]

    @property
    def num_accepted(self) -> int:
        pairs = zip(self.draft_token_ids, self.taken, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    @property
    def num_checked(self) -> int:
        """After the first draft token that is rejected, none is checked."""
        return min(len(self.taken), len(self.draft_token_ids))


def expected_run(acceptance: float, num_draft_tokens: int) -> float:
    """Tokens that a step gives: the j-th draft token adds one if the first j are accepted. 1 + a + a**2 + ..."""
    return sum(acceptance**j for j in range(num_draft_tokens + 1))


class Always(Speculation):
    """As many draft tokens as are allowed in every step, whatever they gain. (The engine decides by the clock.)"""

    def choose(self, scheduler: Scheduler) -> dict[Sequence, int]:
        counts = {}
        for seq in scheduler.running:
            count = min(self.num_speculative_tokens, scheduler.num_tokens_left(seq) - 1)
            is_decode = len(seq.tokens) - seq.num_computed_tokens == 1
            if is_decode and count > 0:
                counts[seq] = count
        return counts


class Proposes:
    """A Proposer (features/speculation/choose.py) that asks this function for so many tokens for a sequence."""

    first_acceptance, draft_s = 0.5, 0.0

    def __init__(self, draft_for: Callable[[Sequence, int], list[int]]) -> None:
        self.draft_for = draft_for

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        return [0] * len(seqs)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.draft_for(seq, num_draft_tokens) for seq, num_draft_tokens in wanted]


@contextmanager
def steps_watched(llm: LLM) -> Iterator[list[Step]]:
    """Collects the steps of all sequences that sampled."""
    steps: list[Step] = []
    ours: Callable = llm.engine.scheduler.update

    def update(output: SchedulerOutput, sampled_token_ids: list[list[int]]) -> list[Sequence]:
        finished = ours(output, sampled_token_ids)
        chunks = [chunk for chunk in output.chunks if chunk.reaches_end]
        steps.extend(Step(chunk.draft_token_ids, chunk.seq.tokens[chunk.known_end :]) for chunk in chunks)
        return finished

    with replaced(llm.engine.scheduler, "update", update):
        yield steps


@contextmanager
def chunks_watched(llm: LLM) -> Iterator[list[ScheduledChunk]]:
    """Collects the chunks of the steps."""
    found: list[ScheduledChunk] = []
    ours = llm.engine.scheduler.schedule

    def schedule(drafts: dict[int, list[int]]) -> SchedulerOutput:
        output = ours(drafts)
        found.extend(output.chunks)
        return output

    with replaced(llm.engine.scheduler, "schedule", schedule):
        yield found


@contextmanager
def drafting(llm: LLM, proposer: Proposer | None, num_draft_tokens: int) -> Iterator[None]:
    """For a while, this engine always checks this many draft tokens. proposer None: it checks none."""
    with patch.dict(llm.engine.wings):
        llm.engine.wings.pop("speculation", None)
        if proposer is not None:
            llm.engine.wings["speculation"] = Always(proposer, num_draft_tokens, 10**6)
        yield


def load_own_draft(llm: LLM) -> Any:
    """The model itself in 8 bits, as a DraftModel."""
    # Needs torch, which half of the exercises does not.
    from nanovllm.features.speculation.draft_model import make_speculation

    engine = llm.engine
    config = replace(engine.config, speculative_config={"method": "self", "quantization": "int8"})
    directory = resolve_checkpoint(config.model, config.revision)
    speculation = make_speculation(config, directory, engine.model_config, engine.tokenizer)
    assert speculation is not None
    return speculation.proposer


class World:
    """A text, where how many draft tokens come from, and the steps so far."""

    source: str
    num_draft_tokens: int
    temperature: float

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer = llm, llm.get_tokenizer()
        self._own_draft: Any = None
        self._ngrams = NgramProposer(LONGEST, SHORTEST)
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.source, self.num_draft_tokens, self.temperature = NGRAMS, NUMS_DRAFT_TOKENS[0], 0.0
        self.begin(TEXTS["a quotation"])
        what = "The prompt is computed, and the first token is sampled"
        return f"{what}. n makes a step, e twenty; the field takes a text of your own."

    def step(self, num_steps: int = 1) -> str:
        if self.seq.finish_reason is not None:
            raise ValueError("the text has ended: x takes a different text, the field one of yours, and r starts over")
        with drafting(self.llm, self.proposer, self.num_draft_tokens), steps_watched(self.llm) as steps:
            for _ in range(num_steps):
                if self.seq.finish_reason is None:
                    self.llm.engine.step()
        self.steps += steps
        return f"{sum(len(step.taken) for step in steps)} tokens in {len(steps)} step{'s' * (len(steps) != 1)}."

    def many_steps(self) -> str:
        return self.step(20)

    def next_number(self) -> str:
        self.num_draft_tokens = NUMS_DRAFT_TOKENS[
            (NUMS_DRAFT_TOKENS.index(self.num_draft_tokens) + 1) % len(NUMS_DRAFT_TOKENS)
        ]
        self.begin(self.prompt)
        return f"At most {self.num_draft_tokens} draft tokens a step. The text starts over."

    def next_source(self) -> str:
        self.source = SOURCES[(SOURCES.index(self.source) + 1) % len(SOURCES)]
        self.begin(self.prompt)
        return f"Draft tokens come from: {self.source}. The text starts over."

    def next_temperature(self) -> str:
        self.temperature = TEMPERATURES[(TEMPERATURES.index(self.temperature) + 1) % len(TEMPERATURES)]
        self.begin(self.prompt)
        return f"Temperature {self.temperature:g}, seed {SEED}. The text starts over."

    def next_text(self) -> str:
        texts = list(TEXTS.values())
        self.begin(texts[(texts.index(self.prompt) + 1) % len(texts)] if self.prompt in texts else texts[0])
        return "A different text. Where does it go on as it did before?"

    def typed(self, text: str) -> str:
        self.begin(text)
        return f"{self.seq.num_prompt_tokens} tokens. Which of its words will be drafted?"

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def proposer(self) -> Proposer | None:
        if self.source == NOBODY:
            return None
        if self.source == ITSELF and self._own_draft is None:
            self._own_draft = load_own_draft(self.llm)
        return self._own_draft if self.source == ITSELF else self._ngrams

    def begin(self, prompt: str) -> None:
        """The prompt is computed, which samples a token. Raises ValueError, and changes nothing, if it is too long."""
        params = SamplingParams(temperature=self.temperature, seed=SEED, max_tokens=MAX_TOKENS)
        engine = self.llm.engine
        request = engine.make_request(prompt, params, stream=True)
        engine.abort_requests(list(engine.requests.values()))
        self.llm.reset_prefix_cache()
        engine.enqueue([request])
        self.prompt, self.seq = prompt, request.samples[0].seq
        self.steps: list[Step] = []
        self.step()

    def piece(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id]).replace("\n", "⏎").replace(" ", "·")
