"""Parts of lab 16: a notebook of fixed size, snapshots placed by hand, and a small hybrid model in the engine.

The model has random weights: what is shown is whether answers agree, not what they say.
"""

from collections.abc import Callable
from typing import Any

from rich.text import Text

HEIGHT, NUM_COLUMNS, LONGEST = 10, 64, 16_000  # of the curves, and the tokens at their right end


def draw_curves(curves: dict[str, Callable[[int], int]]) -> Text:
    """Megabytes against tokens, from 0 to LONGEST. Each name begins with its sign."""
    lengths = [LONGEST * column // (NUM_COLUMNS - 1) for column in range(NUM_COLUMNS)]
    top = max(curve(LONGEST) for curve in curves.values())
    rows = [[" "] * NUM_COLUMNS for _ in range(HEIGHT + 1)]
    for name, curve in curves.items():
        for column, length in enumerate(lengths):
            rows[HEIGHT - round(HEIGHT * curve(length) / top)][column] = name[0]
    labels = [f"{top * (HEIGHT - i) / HEIGHT / 1e6:>5.0f} |" if not i % 5 else "      |" for i in range(HEIGHT + 1)]
    drawn = [label + "".join(row) for label, row in zip(labels, rows, strict=True)]
    drawn.append("      +" + "-" * NUM_COLUMNS)
    drawn.append(f"       0    {'    '.join(curves)}".ljust(NUM_COLUMNS - 7) + f"{LONGEST:,} tokens")
    return Text("\n".join(line.rstrip() for line in drawn))


# -- the engine -------------------------------------------------------------------------------------------------------


OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 200}
PROMPT = [7 * i % 251 for i in range(61)]


def load_tiny(**options: Any) -> Any:
    from chapters.ch16_fixed_memory.checks_engine import hybrid_checkpoint
    from nanovllm import LLM

    return LLM(hybrid_checkpoint().name, **{**OPTIONS, **options})


def answer(llm: Any, prompt: list[int]) -> tuple[Any, int]:
    """The tokens with their logprobs, which have every bit of what was computed, and where the prompt began."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    [completion] = output.outputs
    return (completion.token_ids, completion.logprobs), output.num_cached_tokens
