"""Memory on a GPU: what is left for the KV pool (chapter 3)."""

from collections.abc import Callable

import torch


def free_bytes(utilization: float, run_largest_step: Callable[[], None], record_graphs: Callable | None) -> int:
    """What the KV pool may take: `utilization` of the GPU's memory, less weights, the largest step and the graphs.

    Step and graphs are measured by running and recording them; None: there are no graphs.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_largest_step()
    step_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    left = int(total * utilization) - (total - free) - step_bytes
    if record_graphs is not None:
        graphs = record_graphs()
        left -= free - torch.cuda.mem_get_info()[0]
        del graphs
        torch.cuda.empty_cache()
    return left
