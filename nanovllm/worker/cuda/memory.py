"""Memory on a GPU: what is left for the KV pool (chapter 3)."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.batch import cdiv
from nanovllm.worker.sampler import SamplingBatch, sample

if TYPE_CHECKING:
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.worker.model_runner import ModelRunner


@torch.inference_mode()
def free_bytes(runner: "ModelRunner", largest_image: "PromptImages | None", record_steps: Callable[[], object]) -> int:
    """What the KV pool may take: gpu_memory_utilization of the GPU, less weights, the largest step and the graphs.

    Step and graphs are measured by running and recording them, with a KV cache of one block. largest_image: which a
    prompt may have, if the model sees images. record_steps: returns the graphs, None if there are none.
    """
    config, model = runner.config, runner.model
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_tokens = min(config.max_num_batched_tokens, runner.max_model_len)
    seq = Sequence([0] * num_tokens, SamplingParams(top_p=0.9))
    if largest_image is not None:
        seq.parts["images"] = largest_image
    seq.block_table = [0] * cdiv(num_tokens, runner.block_size)
    starts = range(0, config.max_num_batched_tokens, num_tokens)
    ends = [min(num_tokens, config.max_num_batched_tokens - start) for start in starts]
    chunks = [ScheduledChunk(seq, 0, end, 0) for end in ends]
    runner.run(SchedulerOutput(chunks, [], config.max_num_batched_tokens))
    num_rows = config.max_num_logits
    hidden = torch.zeros(num_rows, model.config.hidden_size, dtype=runner.dtype, device=runner.device)
    logits = model.logits(hidden)
    if len(logits) > 0:  # of several ranks only the first gets logits, and samples
        sample(logits, SamplingBatch.from_sequences([seq] * num_rows))
    del hidden, logits
    step_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    left = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes
    graphs = record_steps()
    if graphs is not None:
        left -= free - torch.cuda.mem_get_info()[0]
        del graphs
        torch.cuda.empty_cache()
    return left
