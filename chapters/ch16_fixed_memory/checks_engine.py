"""A small hybrid model in the real engine, whose layers compute with a student's function. Needs torch."""

import random
import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from chapters.ch13_guess_and_check.checks import Proposes
from chapters.ch13_guess_and_check.world import drafting, steps_watched
from chapters.ch16_fixed_memory.checks_chunk import DeltaChunk, Vector
from chapters.ch16_fixed_memory.checks_guesses import ReadGuesses
from chapters.ch16_fixed_memory.checks_plan import Plan
from chapters.ch17_experts.sparse import make_tokenizer
from chapters.expect import Wrong, expect
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.hybrid import delta_rule, hybrid_layers
from nanovllm.features.hybrid.batch_states import segments_of
from nanovllm.features.hybrid.hybrid_kernels import HybridKernels
from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet
from nanovllm.worker.batch import Batch

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,  # the last one attends
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # wide margins between logits
}
# Plain PyTorch, token by token. Chunks of a prompt go on where the last one ended.
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 3, "num_gpu_blocks_override": 64, "block_size": 4}
OPTIONS |= {"max_num_batched_tokens": 12, "enable_prefix_caching": False, "enforce_eager": True, "dtype": "float32"}
CACHED: dict[str, Any] = OPTIONS | {"enable_prefix_caching": True, "state_cache_bytes": 200_000}
PROMPTS = [random.Random(n).choices(range(256), k=n) for n in (3, 17, 9, 1)]
SHARED, STARTS = random.Random(0).choices(range(256), k=30), [0, 28, 28, 28, 36]  # where the prompts below begin
FORKED = [SHARED + [100 + n] * 7 for n in range(4)]
FORKED.append([*FORKED[3], 1, 2, 3])
NUM_TOKENS, NUM_DRAFT_TOKENS = 16, 3


@cache
def hybrid_checkpoint() -> tempfile.TemporaryDirectory:
    """A Qwen3.5 checkpoint with random weights in .name. The folder goes with this process."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer, folder = make_tokenizer(), tempfile.TemporaryDirectory(prefix="nanovllm-hybrid-")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
        config = Qwen3_5TextConfig(vocab_size=len(tokenizer), rope_parameters=rope, **SIZES)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.data.fill_(-4.0)  # random ones forget nearly all with every token
    model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder


PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@cache
def hybrid_engine() -> LLM:
    return LLM(hybrid_checkpoint().name, **OPTIONS)


def answers() -> list[list[int]]:
    try:
        outputs = hybrid_engine().generate(PROMPTS, PARAMS, use_tqdm=False)
    except BaseException:
        hybrid_engine.cache_clear()  # there are requests left in it
        raise
    return [output.outputs[0].token_ids for output in outputs]


expected_answers = cache(answers)


def compare(hint: str) -> None:
    for prompt, expected, got in zip(PROMPTS, expected_answers(), answers(), strict=True):
        expect(expected, got, f"the hybrid model answers a prompt of {len(prompt)} tokens with different tokens{hint}")


def answer_with_chunks(function: DeltaChunk) -> None:
    """Head by head, in the place of the loop over the rows."""
    our_rows = delta_rule.read_rows

    def read_rows(window: Tensor, gates: Tensor, state: Tensor | None, net: Any) -> tuple[Tensor, Tensor]:
        rows: list[tuple[Tensor, ...]] = []  # q, k, v, decay and beta of all heads

        def note(state: Tensor, *row: Tensor) -> tuple[Tensor, Tensor]:
            rows.append(row)
            return state, torch.zeros_like(row[2])

        with replaced(delta_rule, "write_and_read", note):
            outputs, state = our_rows(window, gates, state, net)
        of_heads = [torch.stack(parts, dim=1) for parts in zip(*rows, strict=True)]  # [value_heads, R, ...]
        found = [answer_one_head(function, *parts) for parts in zip(state, *of_heads, strict=True)]
        new_outputs, new_states = zip(*found, strict=True)
        return torch.stack(new_outputs, dim=1).to(outputs.dtype), torch.stack(new_states)

    expected_answers()
    with replaced(delta_rule, "read_rows", read_rows):
        compare("")


def answer_one_head(function: DeltaChunk, state: Tensor, *rows: Tensor) -> tuple[Tensor, Tensor]:
    """What the rows read [R, value_dim], and the state after them. rows: q, k, v, decay, beta."""

    def read(vectors: list[Vector]) -> list[Vector]:
        return (torch.tensor(vectors) @ state).tolist()

    outputs, left, lines = function(read, *(part.tolist() for part in rows))
    keys = rows[1]
    return torch.tensor(outputs), left * state + keys.T @ torch.tensor(lines)


def answer_with_plan(plan: Plan) -> None:
    """Prompts that part after their first 30 tokens, one after another; the last one continues another."""
    expected = [output.outputs[0] for output in hybrid_engine().generate(FORKED, PARAMS, use_tqdm=False)]
    llm = LLM(hybrid_checkpoint().name, **CACHED)
    for number, (prompt, answer, least) in enumerate(zip(FORKED, expected, STARTS, strict=True)):
        positions = dict.fromkeys(plan[number], True)
        with replaced(llm.engine.block_manager.snapshots, "policy", lambda *_, positions=positions: positions):
            [output] = llm.generate([prompt], PARAMS, use_tqdm=False)
        hint = (
            f"the hybrid model computes prompt {number + 1} of {len(FORKED)}, which share 30 tokens, blocks of 4, from"
        )
        if output.num_cached_tokens < least:
            raise Wrong(f"{hint} the wrong token on", expected=f"{least} or later", got=output.num_cached_tokens)
        expect(answer.token_ids, output.outputs[0].token_ids, f"{hint} token {output.num_cached_tokens} on: its answer")


class DraftedLayers:
    """delta_net of delta_rule.py, with a student's function in the place of what the engine does with segments.

    A state is what the convolution still sees and the matrices of all heads. Each layer has a memory for each sequence.
    """

    def __init__(self, function: ReadGuesses) -> None:
        self.function = function
        self.memories: dict[tuple[GatedDeltaNet, int], dict[str, Any]] = {}

    def delta_net(self, x: Tensor, net: GatedDeltaNet, state_layer: tuple[Tensor, ...], batch: Batch) -> Tensor:
        sizes = net.sizes
        inputs, z, gates = x.split((sizes.conv_size, sizes.value_size, 2 * sizes.num_value_heads), dim=1)

        def step(state: Any, row: tuple[Tensor, Tensor]) -> tuple[Any, Tensor]:
            window, matrices = state
            window = torch.cat((window, row[0][None]))
            outputs, matrices = delta_rule.read_rows(window, row[1][None].float(), matrices, net)
            return (window[1:], matrices), outputs[0]

        table = segments_of(batch)
        assert table is not None
        rows, outputs, segments = list(zip(inputs, gates, strict=True)), list[Tensor](), table.tolist()
        for number, (source, _, slot, _, num_accepted, first, num_known, are_drafts) in enumerate(segments):
            if are_drafts:
                continue
            if source < 0:  # before the first token
                nothing_seen = x.new_zeros(sizes.kernel_size - 1, sizes.conv_size)
                self.memories[net, slot] = {"state": (nothing_seen, None)}
            following = segments[number + 1] if number + 1 < len(segments) else [0]
            known_end = first + num_known
            end = known_end + following[-2] if following[-1] else known_end
            given = rows[first:known_end], rows[known_end:end]
            outputs += self.function(step, self.memories[net, slot], num_accepted, *given)
        return delta_rule.norm_and_gate(torch.stack(outputs), z, net)


def remembers() -> Callable[[Sequence, int], list[int]]:
    """Knows what is answered; one in four draft tokens is wrong."""
    known = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, expected_answers(), strict=True)}

    def draft_for(seq: Sequence, num_draft_tokens: int) -> list[int]:
        at = len(seq.tokens) - seq.num_prompt_tokens
        answer = known[tuple(seq.tokens[: seq.num_prompt_tokens])]
        places = range(at, min(at + num_draft_tokens, len(answer)))
        return [(answer[i] + (i % 4 == 3)) % 256 for i in places]

    return draft_for


def answer_with_drafts(function: ReadGuesses) -> None:
    proposer, of_layers = Proposes(remembers()), HybridKernels(delta_net=DraftedLayers(function).delta_net)
    with replaced(hybrid_layers, "kernels_for", lambda kernels: of_layers):
        compare(", without draft tokens")
        with drafting(hybrid_engine(), proposer, NUM_DRAFT_TOKENS), steps_watched(hybrid_engine()) as steps:
            compare(" with draft tokens: the state is not that of the tokens before")
    if not any(step.num_accepted for step in steps):
        raise Wrong("not one draft token was accepted, although three of four are right")
