"""A mixture of experts against transformers: a random Qwen3-MoE checkpoint of 1B weights, 8 of 64 experts per token.

    python examples/bench_experts.py              bf16, one request and eight at a time
    python examples/bench_experts.py --int8       the engine's weights in 8 bits, too
    python examples/bench_experts.py MODEL        another checkpoint that transformers reads, too

Both generate the same number of tokens from the same random prompts, greedily, three times; the best time counts.
transformers has several ways to compute experts; each is tried. Prints output tokens/s, and the multiple of
transformers' best rate (chapter 17).
"""

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from measuring import arguments, console, greedy, random_checkpoint, seconds, table, vocab_size_of
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from nanovllm import LLM
from nanovllm.tools.demo_model import model_or_demo

NUM_PROMPT, NUM_OUTPUT, NUM_RUNS = 32, 64, 3
EXPERTS: dict[str, Any] = dict(num_experts=64, num_experts_per_tok=8, moe_intermediate_size=384, norm_topk_prob=True)
SIZES: dict[str, Any] = dict(
    hidden_size=1024, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=4, head_dim=64
)
Generate = Callable[[list[list[int]]], Any]
IMPLEMENTATIONS = ("eager", "grouped_mm")  # "batched_mm" copies the weights for each row: minutes


def ours(folder: Path, quantization: str | None) -> Iterator[tuple[str, Generate]]:
    llm = LLM(
        str(folder), quantization=quantization, max_model_len=NUM_PROMPT + NUM_OUTPUT, enable_prefix_caching=False
    )
    params = greedy(NUM_OUTPUT)
    yield f"nanovllm {quantization or 'bf16'}", lambda prompts: llm.generate(prompts, params, use_tqdm=False)


def theirs(folder: Path) -> Iterator[tuple[str, Generate]]:
    options = dict(max_new_tokens=NUM_OUTPUT, min_new_tokens=NUM_OUTPUT, do_sample=False, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    for name in IMPLEMENTATIONS:
        with suppress(ValueError):  # another version of transformers
            model.set_experts_implementation(name)
            yield f"transformers {name}", lambda prompts: model.generate(torch.tensor(prompts), **options)


def tokens_per_s(run: Generate, batch_size: int, vocab_size: int) -> float:
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab_size) for _ in range(NUM_PROMPT)] for _ in range(batch_size)]
    run([prompt[:4] for prompt in prompts])  # what the first call prepares
    return batch_size * NUM_OUTPUT / min(seconds(run, prompts) for _ in range(NUM_RUNS))


def main() -> None:
    parser = arguments(__doc__, model="a checkpoint's directory (default: random weights)")
    parser.add_argument("--int8", action="store_true", help="the engine's weights in 8 bits, too")
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    sizes = (1, 8)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(model_or_demo(args.model) if args.model else name)
        if not args.model:
            config = Qwen3MoeConfig(
                vocab_size=49152, intermediate_size=3072, tie_word_embeddings=True, **SIZES, **EXPERTS
            )
            with console().status("making a random checkpoint"):
                random_checkpoint(folder, config)
        vocab_size = vocab_size_of(str(folder))
        engines = [ours(folder, None), *[ours(folder, "int8")] * args.int8, theirs(folder)]
        for engine in engines:
            for label, run in engine:
                with console().status(label):
                    found[label] = [tokens_per_s(run, size, vocab_size) for size in sizes]
    best = [max(row[i] for label, row in found.items() if "transformers" in label) for i in range(len(sizes))]
    rows = table("output tokens per second, prompts included", "", *(f"{size} at a time" for size in sizes))
    for label, row in found.items():
        rows.add_row(label, *(f"{x:.1f} ({x / y:.1f}x)" for x, y in zip(row, best, strict=True)))
    console().print(rows)


if __name__ == "__main__":
    main()
