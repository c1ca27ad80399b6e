"""What fewer bits cost: perplexity of a model with its weights as they are, in int8 and in int4 (chapter 12).

    python examples/perplexity.py [MODEL] [--quantization none int8 int4 nearest gptq] [--tokens 8192] [--shuffle]
    python examples/perplexity.py --quantization none --kv-cache-dtype auto int8 [--key-biases 0 30 100]

Perplexity is exp(mean of -log p(token | the tokens before it in its window)): the model is as uncertain as among that
many equally likely tokens. Windows do not overlap, and the first token of each is not counted
(https://huggingface.co/docs/transformers/perplexity). The engine's own forward pass and kernels compute it.

The default text is Python's language reference, as it comes with every Python for help(). Compare figures of the same
text and window only: a different version of Python has a different text.

nearest and gptq: published files of 4 bits, as make_compressed.py writes them.

--shuffle: the demo model's weights were made from 4-bit ones, so int4 recovers these and costs less than elsewhere.
This option gives the model's channels a different order. The model computes the same function, but different numbers
share a scale.

--key-biases: some models have large biases in their keys, Qwen2's among them, and the demo has none. This option adds a
bias to one number of each key, in the pair that is rotated most slowly. The scores of a query change by nearly
the same amount, so the model computes nearly the same function. But in int8 the other numbers of a key share its scale.
"""

import json
import math
import shutil
import sys
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from measuring import arguments, compress_beside, existing_file, positive, table, text_of
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.tools.demo_model import model_or_demo
from nanovllm.worker.batch import Batch

console = Console(highlight=False)

WAYS = ["none", "int8", "int4", "nearest", "gptq"]
PUBLISHED = WAYS[3:]
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")  # how files of weights end


def main() -> None:
    parser = arguments(__doc__, model="directory, GGUF file or hub id (default: the demo checkpoint)")
    ways = WAYS[: 1 if torch.cuda.is_available() else 3]  # a GPU computes with no int8 and int4
    parser.add_argument("--quantization", nargs="+", choices=WAYS, default=ways, help=f"(default: {' '.join(ways)})")
    parser.add_argument("--kv-cache-dtype", nargs="+", choices=("auto", "int8"), default=["auto"])
    parser.add_argument("--text", type=existing_file, help="a text file (default: Python's language reference)")
    parser.add_argument("--tokens", type=positive, default=8192, help="at most (default: 8192)")
    parser.add_argument("--window", type=positive, default=512, help="tokens of a window (default: 512)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--shuffle", action="store_true", help="a checkpoint's directory, its channels in another order"
    )
    parser.add_argument("--key-biases", type=float, nargs="+", default=[0.0], help="of a Llama checkpoint's directory")
    args = parser.parse_args()
    if not 2 <= args.window <= args.tokens:
        parser.error(f"a window has 2 tokens or more and at most --tokens, found {args.window} and {args.tokens}")
    text = text_of(args.text)
    source = args.text or f"the language reference of Python {sys.version_info.major}.{sys.version_info.minor}"

    with TemporaryDirectory() as folder:
        model = model_or_demo(args.model)
        if args.shuffle:
            model = str(shuffled(directory_of(model, "--shuffle"), Path(folder, "shuffled")))
        rows = table("", "weights", "perplexity", "more than the first", "MB", "of the first's")
        first: tuple[float, float] | None = None
        models = {
            size: model if size == 0 else str(biased(directory_of(model, "--key-biases"), Path(folder), size))
            for size in args.key_biases
        }
        for size, quantization, kv_cache_dtype in product(models, args.quantization, args.kv_cache_dtype):
            options = dict(dtype=args.dtype, kv_cache_dtype=kv_cache_dtype, max_model_len=args.window, max_num_seqs=1)
            path = models[size]
            if quantization in PUBLISHED:
                packed = Path(folder, f"{quantization}-{size:g}")
                path = str(packed) if packed.exists() else compress_beside(path, packed, quantization)
            elif quantization != "none":
                options["quantization"] = quantization
            llm = LLM(path, **options)
            windows = windows_of(llm.get_tokenizer()(text)["input_ids"], args.tokens, args.window)
            value, weights_mb = perplexity(llm, windows), llm.engine.model_runner.weight_bytes / 1e6
            first = first or (value, weights_mb)
            dtype = str(llm.engine.model_runner.dtype).removeprefix("torch.")
            rows.title = (
                f"{len(windows) * (args.window - 1):,} tokens of {source}, windows of {args.window}, in {dtype}"
            )
            compared = f"{value / first[0] - 1:+.2%}", f"{weights_mb:,.0f}", f"{weights_mb / first[1]:.3f}"
            name = "as they are" if quantization == "none" else quantization
            name += ", a file of 4 bits" if quantization in PUBLISHED else ""
            name += f", key biases {size:g}" if size else ""
            name += ", K/V int8" if kv_cache_dtype == "int8" else ""
            rows.add_row(name, f"{value:.3f}", *compared)
            del llm
    console.print(rows)


def windows_of(token_ids: list[int], num_tokens: int, size: int) -> torch.Tensor:
    """[number of windows, size]: whole windows only, of num_tokens tokens at most."""
    if len(token_ids) < size:
        raise SystemExit(f"the text has {len(token_ids)} tokens; a window needs {size} (--window)")
    num_windows = min(num_tokens, len(token_ids)) // size
    return torch.tensor(token_ids[: num_windows * size]).view(num_windows, size)


@torch.inference_mode()
def perplexity(llm: LLM, windows: torch.Tensor) -> float:
    """Each window is one step, as if a prompt were computed, but with logits of all its rows."""
    runner = llm.engine.model_runner
    total = 0.0
    for tokens in track(windows, f"{llm.engine.config.round_to or runner.dtype}", console=console, transient=True):
        logits = runner.model.logits(runner.forward(batch_of(tokens, runner.block_size).to(runner.device)))
        logprobs = logits.float().log_softmax(-1)
        total -= logprobs.gather(1, tokens[1:, None].to(logits.device)).double().sum().item()
    return math.exp(total / (len(windows) * (len(windows[0]) - 1)))


def batch_of(tokens: torch.Tensor, block_size: int) -> Batch:
    """One sequence in the pool's first blocks, in the CPU's memory."""
    size = len(tokens)
    positions = torch.arange(size)
    return Batch(
        input_ids=tokens,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=torch.tensor([0, size], dtype=torch.int32),
        seqlens_k=torch.tensor([size], dtype=torch.int32),
        block_tables=torch.arange(-(-size // block_size), dtype=torch.int32)[None],
        logits_rows=positions[:-1],
        max_query_len=size,
        max_key_len=size,
    )


def directory_of(model: str, option: str) -> Path:
    """Where the model's config.json and model.safetensors are. Ends the script if it has no such files."""
    directory = resolve_checkpoint(model)
    if not (directory / "model.safetensors").is_file():
        sys.exit(f"{option}: {model} has no model.safetensors; GGUF files and shards cannot be changed here")
    return directory


def shuffled(directory: Path, folder: Path) -> Path:
    """A checkpoint of one file that computes the same, with different neighbours along every input dimension."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)

    def order(size: int) -> torch.Tensor:
        return torch.randperm(size, generator=generator)

    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = weights["model.layers.0.self_attn.v_proj.weight"].shape[0] // num_kv_heads
    hidden = order(config["hidden_size"])
    for i in range(config["num_hidden_layers"]):
        inner = order(config["intermediate_size"])
        values = torch.stack([order(head_dim) + head_dim * head for head in range(num_kv_heads)])
        # Query heads of a group read the same values: their outputs have that group's order.
        group = num_heads // num_kv_heads
        outputs = torch.cat([values[h // group] + head_dim * (h - h // group) for h in range(num_heads)])
        rows = {"gate": inner, "up": inner, "v": values.flatten(), "o": hidden, "down": hidden}
        columns = {"q": hidden, "k": hidden, "v": hidden, "gate": hidden, "up": hidden, "o": outputs, "down": inner}
        for name in [name for name in weights if name.startswith(f"model.layers.{i}.") and "_proj." in name]:
            kind = name.split(".")[-2].removesuffix("_proj")
            weights[name] = weights[name][rows[kind]] if kind in rows else weights[name]
            weights[name] = weights[name][:, columns[kind]] if weights[name].dim() == 2 else weights[name]
    for name in weights:
        if name.endswith(("layernorm.weight", "model.norm.weight")):
            weights[name] = weights[name][hidden]
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:, hidden]
    return written(folder, directory, config, weights)


def biased(directory: Path, folder: Path, size: float) -> Path:
    """A Llama checkpoint of one file whose keys have a bias in one number of the pair that is rotated most slowly."""
    config = json.loads((directory / "config.json").read_text("utf-8")) | {"attention_bias": True}
    weights = load_file(directory / "model.safetensors")
    if any(name.endswith("_proj.bias") for name in weights):
        sys.exit(f"--key-biases: {directory} has biases of its own")
    for i in range(config["num_hidden_layers"]):
        for kind in ("q", "k", "v", "o"):
            weight = weights[f"model.layers.{i}.self_attn.{kind}_proj.weight"]
            bias = weights[f"model.layers.{i}.self_attn.{kind}_proj.bias"] = weight.new_zeros(len(weight))
            if kind == "k":
                heads = bias.view(config["num_key_value_heads"], -1)
                heads[:, heads.shape[1] // 2 - 1] = size
    return written(folder / f"biased-{size:g}", directory, config, weights)


def written(folder: Path, directory: Path, config: dict, weights: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with these weights, and the other files of the directory, such as the tokenizer's."""
    folder.mkdir()
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    for path in directory.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and path.name != "config.json":
            shutil.copy(path, folder)
    return folder


if __name__ == "__main__":
    main()
