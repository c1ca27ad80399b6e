"""Parts of lab 8: the next-token distribution of a real model, reshaped by hand and sampled by the engine's sampler.

Everything runs in float32, so that the numbers come out the same on every machine.
"""

import re
from typing import Any

import torch
from torch import Tensor

from chapters.ch08_sampling.company import generate_in_order, preemptions_watched
from chapters.ch08_sampling.masking import CAPITAL
from chapters.ch08_sampling.sliders import DOOR, World
from chapters.player import actions
from chapters.recording import Recording
from nanovllm import LLM, SamplingParams
from nanovllm.worker import sampler
from nanovllm.worker.sampler import SamplingBatch

SHARP, OPEN = CAPITAL, "Once upon a time there was a"
OTHERS = (OPEN, SHARP, "My favourite colour is", "The opposite of hot is", "The weather today is", "I", "In the end")
SEED, NUM_TOKENS = 7, 20


def load_world(load: Any) -> World:
    """A pool of 24 blocks of 8: eight requests with up to 28 tokens each do not fit, and some are preempted."""
    return World(load(dtype="float32", max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=24, block_size=8))


ACTIONS = actions(
    "down|slider|select, left|less|less, right|more|more, up||select_previous, minus||less, "
    "plus,equals_sign||more, s|sample|draw, p|preset|preset, r|reset|reset"
)


# -- the same request in different company ----------------------------------------------------------------------------


def one_generator(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What the engine does not do: all rows draw from one stream of random numbers, torch's global one."""
    return torch.multinomial((logits / batch.temperature[:, None]).softmax(-1), 1).squeeze(1)


def run_in_company(llm: LLM, before: int, after: int) -> tuple[list[int], int]:
    """Generate for DOOR with SEED. before, after: how many other requests come before it in the batch, and after it.

    Returns its tokens, and how often it was preempted.
    """
    prompts = [*OTHERS[:before], DOOR, *OTHERS[before : before + after]]
    seeds = [100 + i if prompt != DOOR else SEED for i, prompt in enumerate(prompts)]
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=NUM_TOKENS, ignore_eos=True) for s in seeds]
    with preemptions_watched() as preempted:
        outputs = generate_in_order(llm, prompts, params)
    return outputs[before].outputs[0].token_ids, sum(seq.seed == SEED for seq in preempted)


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: where 1,024 candidates are enough they take less time
    than sorting, and C takes the least; masks are ready when the logits come."""
    [sheet] = recorded.sheets("The border, sorted or not")
    for row in sheet.rows:
        in_order, candidates, in_c = (float(cell) for cell in row[3:6])
        is_enough = int(row[2].replace(",", "")) < sampler.NUM_CANDIDATES
        if in_c > candidates or candidates > (0.5 if is_enough else 1.5) * in_order:
            raise ValueError(f"{row[0]!r} took {in_order} ms sorted, {candidates} with candidates, {in_c} in C")
    ready = re.search(r"(\d+) of (\d+) were ready", recorded.says("Where a mask comes from: a JSON schema"))
    if ready is None or int(ready[1]) < 0.9 * int(ready[2]):
        raise ValueError(ready[0] if ready else "no mask was watched: llguidance is not installed")
