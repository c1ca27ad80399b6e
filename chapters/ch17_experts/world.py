"""The object that the lab of chapter 17 plays with: a small model with experts, and the text that it reads."""

from torch import Tensor

from chapters.ch17_experts.sparse import loads_of, shares_of, visits_of
from chapters.ch17_experts.tell import NUMS_RANKS, texts_of_all_kinds
from nanovllm import LLM

MAX_TEXT = 300


class World:
    layer: int
    num_ranks: int

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.texts = list(texts_of_all_kinds(120).values())
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.layer, self.num_ranks = 0, NUMS_RANKS[0]
        self.read(self.texts[0])
        return "Sums. l shows the next layer, k a different kind of text; the field takes a text of your own."

    def next_layer(self) -> str:
        self.layer = (self.layer + 1) % len(self.visits)
        return f"Layer {self.layer}."

    def next_kind(self) -> str:
        at = self.texts.index(self.text) + 1 if self.text in self.texts else 0
        self.read(self.texts[at % len(self.texts)])
        return "Another kind of text. Which experts does it visit?"

    def next_ranks(self) -> str:
        self.num_ranks = NUMS_RANKS[(NUMS_RANKS.index(self.num_ranks) + 1) % len(NUMS_RANKS)]
        return f"Experts spread over {self.num_ranks} ranks, neighbors together."

    def typed(self, text: str) -> str:
        """Raises ValueError, with all as it was, for a text of no tokens."""
        self.read(text[:MAX_TEXT])
        num_met = int((self.shares[self.layer] > 0).sum())
        return f"{len(self.text)} letters meet {num_met} experts of layer {self.layer}."

    # -- what there is ----------------------------------------------------------------------------------------------

    def read(self, text: str) -> None:
        self.visits = visits_of(self.llm, [text])
        self.text = text

    @property
    def shares(self) -> Tensor:
        return shares_of(self.visits)

    @property
    def loads(self) -> Tensor:
        """Of the pairs of each layer, the share that each rank gets [num_layers, num_ranks]."""
        return loads_of(self.shares, self.num_ranks)
