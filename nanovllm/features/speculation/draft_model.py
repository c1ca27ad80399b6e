"""A draft model: a smaller one, or the same one in fewer bits, that proposes what the model will sample (chapter 13).

It generates a few tokens ahead, with weights and a KV cache of its own. It samples with the request's parameters and
its noise: where both models think alike, they draw the same token, at any temperature.
"""

import time
from collections import deque
from copy import copy
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import SchedulerOutput, next_chunk
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus
from nanovllm.features.speculation.choose import Proposer, Speculation
from nanovllm.features.speculation.ngrams import NgramProposer
from nanovllm.features.speculation.speculative_config import SpeculativeConfig
from nanovllm.features.speculation.step_times import NUM_TIMES
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.files.tensor_files import free_gpu_bytes
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.wings import make_block_manager
from nanovllm.worker.batch import round_up
from nanovllm.worker.model_runner import ModelRunner, ModelRunnerOutput
from nanovllm.worker.sampler import SamplingBatch

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine
    from nanovllm.features.logprobs.scores import Scores

KV_SHARE = 1 / 16  # of the memory that the KV pool may take, for the draft model's, and as much for its states
LARGEST_BLOCK_SIZE = 256  # of those that a platform chooses by itself: flash-attn's


def prepare(engine: "LLMEngine") -> Speculation | None:
    """See wings.BESIDE_AN_ENGINE."""
    return make_speculation(engine.config, engine.directory, engine.model_config, engine.tokenizer)


def attach(engine: "LLMEngine", speculation: Speculation) -> Speculation:
    return speculation


def make_speculation(
    config: EngineConfig, directory: Path, model_config: ModelConfig, tokenizer: Any
) -> Speculation | None:
    """What proposes draft tokens. Raises ValueError or FileNotFoundError for a draft model that cannot."""
    chosen = config.speculative_config
    if not isinstance(chosen, SpeculativeConfig):
        return None
    if chosen.prompt_lookup_max is not None and chosen.prompt_lookup_min is not None:
        proposer: Proposer = NgramProposer(chosen.prompt_lookup_max, chosen.prompt_lookup_min)
    else:
        proposer = load_draft_model(config, chosen, directory, model_config, tokenizer)
    return Speculation(proposer, chosen.num_speculative_tokens, config.max_num_logits)


def load_draft_model(
    config: EngineConfig, chosen: SpeculativeConfig, directory: Path, target: ModelConfig, tokenizer: Any
) -> "DraftModel":
    if chosen.model is None:
        model = target
        if model.is_quantized or chosen.quantization == config.round_to:
            raise ValueError(
                f"speculative_config: the model's weights are {config.round_to or 'quantized'} already; as its own "
                "draft model it needs fewer bits"
            )
    else:
        directory = resolve_checkpoint(chosen.model, chosen.revision)
        model = ModelConfig.from_directory(directory)
        check_vocabulary(load_tokenizer(directory).get_vocab(), tokenizer.get_vocab(), chosen.model)
    dtype = target.dtype if config.dtype == "auto" else config.dtype
    asked = chosen.max_model_len or config.max_model_len or model.default_max_model_len
    max_model_len = min(asked, model.most_positions)
    block_size = config.block_size or LARGEST_BLOCK_SIZE
    num_tokens = round_up(max_model_len, block_size) * config.max_num_seqs
    num_bytes = num_tokens * model.kv_bytes_per_token(getattr(torch, dtype).itemsize)
    if torch.cuda.is_available():
        free_bytes = free_gpu_bytes()
    else:
        from nanovllm.worker.cpu.memory import free_bytes as free_bytes_of_cpu

        free_bytes = free_bytes_of_cpu(config.gpu_memory_utilization)
    share = max(int(free_bytes * KV_SHARE), 1)
    draft_config = replace(
        config,
        model=str(directory),
        dtype=dtype,
        quantization=chosen.quantization,
        kv_cache_memory_bytes=min(num_bytes, share),
        num_gpu_blocks_override=None,
        max_model_len=None,
        tensor_parallel_size=1,
        enable_prefix_caching=True,
        state_cache_bytes=share if config.state_cache_bytes is None else min(config.state_cache_bytes, share),
        enable_lora=False,
        speculative_config=None,
    )
    # Its answers end where the target's do. Its length is a default here, which a small pool may lower.
    drafting = replace(model, end_tokens=target.end_tokens, max_position_embeddings=max_model_len)
    runner = DraftRunner(draft_config, drafting, target.vocab_size)
    runner.load(directory)
    pool = runner.prepare()
    manager = make_block_manager(pool)
    return DraftModel(
        runner,
        manager,
        config.max_num_batched_tokens,
        max_model_len=pool.max_model_len,
        vocab_size=min(model.vocab_size, target.vocab_size),
    )


def check_vocabulary(drafts: dict[str, int], ours: dict[str, int], name: str) -> None:
    if drafts == ours:
        return
    different = sorted(drafts.items() ^ ours.items(), key=lambda item: item[1])
    token_id = different[0][1]
    theirs, own = ([text for text, i in vocabulary.items() if i == token_id] for vocabulary in (drafts, ours))
    raise ValueError(
        f"speculative_config: the draft model {name!r} has another vocabulary: token {token_id} is "
        f"{(theirs or ['missing'])[0]!r} there and {(own or ['missing'])[0]!r} in the model; "
        'choose a draft model of the same family, or {"method": "ngram"}'
    )


class DraftRunner(ModelRunner):
    """Its logits are for the target's tokens, which a request's parameters and grammar name.

    Models of a family pad their vocabularies to different sizes.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, num_logits: int) -> None:
        super().__init__(config, model_config)
        self.num_logits = num_logits

    def _sample(
        self, logits: Tensor, sampling: SamplingBatch, prompt_scores: "list[Scores] | None" = None
    ) -> ModelRunnerOutput:
        if num_missing := self.num_logits - logits.shape[1]:  # less than 0: there are more, which are cut off
            logits = functional.pad(logits, (0, num_missing), value=-torch.inf)
        return super()._sample(logits, sampling, prompt_scores)


class DraftModel:
    """A Proposer (choose.py). K/V is kept from step to step: draft tokens that were accepted are not computed again.

    drafts   sequence -> its copy here, which is some draft tokens longer
    """

    first_acceptance = 0.9

    def __init__(
        self, runner: Any, manager: BlockManager, max_num_batched_tokens: int, max_model_len: int, vocab_size: int
    ) -> None:
        self.runner, self.manager, self.max_num_batched_tokens = runner, manager, max_num_batched_tokens
        self.max_model_len, self.vocab_size = max_model_len, vocab_size
        self.draft_s, self._times = 0.0, deque[float](maxlen=NUM_TIMES)
        self.drafts: dict[Sequence, Sequence] = {}
        self._is_torn = False

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        """It always has a proposal, as far as its positions go."""
        return [0 if len(seq.tokens) < self.max_model_len else None for seq in seqs]

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Draft tokens for each sequence; none for one that has no room here."""
        if self._is_torn:  # an exception has interrupted the last call, in whatever line
            self.drafts.clear()
            self.manager.clear()
        self._is_torn = True
        for seq in [seq for seq in self.drafts if seq.status in (SequenceStatus.WAITING, SequenceStatus.FINISHED)]:
            self.manager.free(self.drafts.pop(seq))
        lengths = {seq: len(seq.tokens) + num_tokens for seq, num_tokens in wanted}
        active = followed = [seq for seq in lengths if self.follow(seq, lengths[seq])]
        budget = self.max_num_batched_tokens
        while active:
            active = self.step(active, budget)
            active = [seq for seq in active if len(self.drafts[seq].tokens) < lengths[seq] and self.goes_on(seq)]
        self._is_torn = False
        proposals = [self.drafts[seq].tokens[len(seq.tokens) :] if seq in followed else [] for seq in lengths]
        return [list(takewhile(lambda token_id: NO_TOKEN < token_id < self.vocab_size, found)) for found in proposals]

    def follow(self, seq: Sequence, length: int) -> bool:
        """Bring the copy up to the sequence's tokens, with room for so many. False if that cannot be."""
        if length > self.max_model_len or max(seq.tokens) >= self.vocab_size:
            return False
        draft = self.drafts.get(seq)
        if draft is None:
            params = replace(seq.sampling_params, logprobs=None, logprob_token_ids=None, prompt_logprobs=None)
            draft = Sequence(seq.tokens[: seq.num_prompt_tokens], params, cache_salt=seq.cache_salt)
            draft.seed, draft.sample_index = seq.seed, seq.sample_index
            names = ("bad_words", "grammar", "prompt_ids")
            draft.parts = {name: copy(seq.parts[name]) for name in names if name in seq.parts}
        same = min(draft.num_computed_tokens, len(seq.tokens) - 1)
        while draft.tokens[:same] != seq.tokens[:same]:
            same -= 1
        draft.tokens, draft.num_computed_tokens = list(seq.tokens), same
        del draft.block_hashes[same // self.manager.block_size :]
        # A cached block is never written again. Or draft tokens are in a state, which cannot go back.
        state = draft.parts.get("state")
        is_behind = state is not None and same < state.num_tokens
        if is_behind or same < draft.num_registered_blocks * self.manager.block_size:
            self.manager.free(draft)
        if not draft.block_table and not self.manager.allocate_with_prefix(draft):
            return False
        self.drafts[seq] = draft
        return self.manager.append_slots(draft, length - draft.num_computed_tokens)

    def goes_on(self, seq: Sequence) -> bool:
        """Can anything follow the draft's newest token?"""
        draft = self.drafts[seq]
        if draft.tokens[-1] == NO_TOKEN:
            return False
        if any(part.check_stop(draft) is not None for part in draft.parts.values()):
            return False
        return draft.sampling_params.ignore_eos or draft.tokens[-1] not in self.runner.model_config.eos_token_ids

    def step(self, active: list[Sequence], budget: int) -> list[Sequence]:
        """One more token for the drafts of these sequences. Returns those that got it; others are still mid-prompt."""
        started, chunks = time.perf_counter(), []
        for seq in active:
            draft = self.drafts[seq]
            num_tokens = min(len(draft.tokens) - draft.num_computed_tokens, budget)
            if num_tokens > 0:
                chunks.append(next_chunk(draft, num_tokens, self.manager))
                if len(draft.tokens) == len(seq.tokens):  # all tokens are known yet: what is full may be cached
                    self.manager.register_prefix(draft)
            budget -= num_tokens
        num_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        result = self.runner.run(SchedulerOutput(chunks, [], num_tokens))
        for chunk, token_ids in zip(chunks, result.sampled_token_ids, strict=True):
            chunk.seq.tokens += token_ids
        if num_tokens <= 2 * len(active):  # no prompts: what a draft token costs
            self._times.append(time.perf_counter() - started)
            self.draft_s = median(self._times)
        sampling = [chunk.seq for chunk in chunks if chunk.reaches_end]
        return [seq for seq in active if self.drafts[seq] in sampling]
