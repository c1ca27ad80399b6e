"""A question about a picture, and the second question about the same picture: where the time goes.

    python examples/bench_images.py [--shape smolvlm-256m] [--shape qwen3.5-0.8b] [--transformers]

Models of public shapes with random weights (none is fetched), the words of the demo model's tokenizer, one picture of
1,024 x 768 pixels. Of the first question: the image processor, the tower, the prefill, the first token. Of the second
one, which begins with the same picture: its first token. --transformers: the same first token there, in one process
with the engine gone.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from nanovllm import LLM, SamplingParams
from nanovllm.features.images.tower import Tower
from nanovllm.tools.demo_model import demo_model_path

TEXT_135M: dict[str, Any] = dict(
    model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, head_dim=64
)
TEXT_135M |= dict(num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192)
SIGLIP_512 = dict(image_size=512, patch_size=16, hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
TEXT_0_8B: dict[str, Any] = dict(
    hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, head_dim=256, rms_norm_eps=1e-6
)
TEXT_0_8B |= dict(num_attention_heads=8, num_key_value_heads=2, linear_num_key_heads=16, linear_num_value_heads=16)
TEXT_0_8B |= dict(max_position_embeddings=8192, hidden_act="silu", attn_output_gate=True)
TEXT_0_8B |= dict(
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10_000_000,
        partial_rotary_factor=0.25,
        mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)
VISION_0_8B = dict(depth=12, hidden_size=768, intermediate_size=3072, num_heads=12, out_hidden_size=1024)
VISION_0_8B |= dict(patch_size=16, spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=2304)
MEAN = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
GRID = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
# name -> (config.json, preprocessor_config.json, special tokens, the image token)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str], str]] = {
    "smolvlm-256m": (
        dict(
            architectures=["SmolVLMForConditionalGeneration"],
            model_type="smolvlm",
            text_config=TEXT_135M,
            vision_config=SIGLIP_512,
            scale_factor=4,
            tie_word_embeddings=True,
        ),
        dict(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}, do_image_splitting=True) | MEAN,
        ["<image>", "<fake_token_around_image>", "<global-img>", *GRID],
        "<image>",
    ),
    "qwen3.5-0.8b": (
        dict(
            architectures=["Qwen3_5ForConditionalGeneration"],
            model_type="qwen3_5",
            text_config=TEXT_0_8B,
            vision_config=VISION_0_8B,
            tie_word_embeddings=True,
        ),
        dict(size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16, merge_size=2) | MEAN,
        ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
        "<|image_pad|>",
    ),
}
QUESTIONS = ("What is in this picture?", "What is the weather like?", "How many people are there?")


def make_checkpoint(folder: Path, shape: str) -> Path:
    """config.json and a tokenizer; the weights are random (load_format="dummy")."""
    config, processor, tokens, image_token = SHAPES[shape]
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)
    text = config["text_config"] | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(image_token), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text} | ids), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    return folder


def picture(seed: int) -> Image.Image:
    generator = torch.Generator().manual_seed(seed)
    tiny = torch.randint(0, 256, (24, 32, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(tiny.numpy()).resize((1024, 768), Image.Resampling.BICUBIC)


class Clock:
    """How long the towers' forward passes have taken."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._run = Tower._run

    def __enter__(self) -> "Clock":
        def timed(tower: Tower, image: Any) -> torch.Tensor:
            started = time.perf_counter()
            features = self._run(tower, image)
            self.seconds += time.perf_counter() - started
            return features

        Tower._run = timed  # type: ignore[assignment, method-assign]
        return self

    def __exit__(self, *exception: object) -> None:
        Tower._run = self._run  # type: ignore[method-assign]


def measure(shape: str, repeats: int, with_transformers: bool, console: Console) -> list[str]:
    image_token = SHAPES[shape][3]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with tempfile.TemporaryDirectory() as name, Clock() as clock:
        folder = make_checkpoint(Path(name), shape)
        llm = LLM(str(folder), load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=2)

        def ask(image: Image.Image, question: str) -> tuple[float, int, int]:
            """(seconds until the first token, the image processor's included; prompt tokens; of them cached)"""
            started = time.perf_counter()
            prompt = {"prompt": f"{image_token}{question}", "multi_modal_data": {"image": image}}
            [output] = llm.generate(prompt, params, use_tqdm=False)
            assert output.metrics.first_token_time is not None
            seconds = output.metrics.first_token_time - started
            return seconds, len(output.prompt_token_ids), output.num_cached_tokens or 0

        ask(picture(0), QUESTIONS[0])  # reads the tower, touches memory
        rows = []
        for seed in range(1, repeats + 1):
            console.print(f"{shape}: picture {seed} of {repeats}", style="dim")
            clock.seconds = 0.0
            image = picture(seed)
            started = time.perf_counter()
            llm.engine.image_processor.prepare(image, {})
            processing = time.perf_counter() - started
            first, num_tokens, _ = ask(image, QUESTIONS[0])
            second, _, cached = ask(image, QUESTIONS[1 + seed % 2])
            rows.append((processing, clock.seconds, first + processing, second, num_tokens, cached))
        processing, tower, first, second, num_tokens, cached = map(statistics.median, zip(*rows, strict=True))
        theirs = "-"
        if with_transformers:
            ids = torch.tensor(
                [
                    llm.generate(
                        {"prompt": f"{image_token}{QUESTIONS[0]}", "multi_modal_data": {"image": picture(1)}},
                        params,
                        use_tqdm=False,
                    )[0].prompt_token_ids
                ]
            )
            inputs = llm.engine.image_processor.prepare(picture(1), {}).make_inputs()
            images = llm.engine.model_config.images
            del llm
            gc.collect()
            theirs = f"{transformers_seconds(folder, ids, inputs, images):.2f}"
        rest = first - processing - tower
        figures = [first, processing, tower, rest, second]
        return [shape, f"{num_tokens:.0f}", *(f"{x:.2f}" for x in figures), f"{second / first:.2f}", theirs]


def transformers_seconds(folder: Path, ids: torch.Tensor, inputs: dict[str, torch.Tensor], images: Any) -> float:
    """Until the first token, without the image processor: tower and prefill."""
    from transformers import AutoConfig

    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    more: dict[str, torch.Tensor] = {}
    if images.mrope_section:
        more["mm_token_type_ids"] = (ids == images.image_token_id).int()
    times = []
    for _ in range(2):
        started = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=ids, **inputs, **more, logits_to_keep=1)
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--transformers", action="store_true", help="measure transformers, too")
    args = parser.parse_args()
    disable_progress_bar()
    set_verbosity_error()
    console = Console(width=120)
    columns = ("first question", "processor", "tower", "prefill, rest", "second question", "second / first")
    table = Table("shape", "prompt tokens", *columns, "transformers", title="seconds until the first token")
    for shape in args.shape or SHAPES:
        table.add_row(*measure(shape, args.repeats, args.transformers, console))
    console.print(table)


if __name__ == "__main__":
    main()
