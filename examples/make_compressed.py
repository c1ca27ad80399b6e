"""Write a checkpoint in 4 bits, as llm-compressor does: compressed-tensors, pack-quantized (chapter 12).

    python examples/make_compressed.py MODEL FOLDER [--rounding gptq] [--group-size 32]

Each projection of each layer is rounded to whole numbers from -8 to 7, with a scale for each group of inputs; all other
tensors are copied. The folder can be given to nanovllm, vLLM and transformers. Prints its size.

--rounding nearest: every weight becomes the nearest multiple of its group's scale. gptq (https://arxiv.org/abs/2210.17323):
a text goes through the model first. Then inputs are rounded one after another, and what the output loses by one
of them is made up for, as well as can be, by those that are still to be rounded.
"""

import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
from measuring import arguments, existing_file, positive, tensors_of, text_of
from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.tools.demo_model import model_or_demo
from nanovllm.worker.layers import Linear

LANGUAGE_MODEL = re.compile(r"^model\.(language_model|text_model)\.")  # in checkpoints that see images
PROJECTION = re.compile(r"model\.layers\.\d+\..*_proj\.weight")
LOW, HIGH = -8, 7
DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it: GPTQ's "percdamp"
WINDOW = 256


def main() -> None:
    parser = arguments(__doc__, model=None)
    parser.add_argument("model", help="a checkpoint's directory, a hub id, or demo")
    parser.add_argument("folder", type=Path, help="to be made")
    parser.add_argument("--rounding", choices=("nearest", "gptq"), default="gptq")
    parser.add_argument("--group-size", type=positive, default=32, help="inputs that share a scale (default: 32)")
    parser.add_argument("--text", type=existing_file, help="what gptq reads (default: Python's language reference)")
    parser.add_argument("--tokens", type=positive, default=8192, help="of that text (default: 8192)")
    args = parser.parse_args()
    directory = resolve_checkpoint(model_or_demo(args.model))
    if args.folder.exists():
        parser.error(f"{args.folder} exists")
    tensors, text = tensors_of(directory), text_of(args.text)
    hessians = measure_hessians(directory, text, args.tokens) if args.rounding == "gptq" else {}
    write_compressed(directory, tensors, args.folder, args.group_size, hessians)
    size = sum(path.stat().st_size for path in args.folder.iterdir())
    print(f"{args.folder}: {size / 1e6:,.0f} MB")


def write_compressed(
    directory: Path, given: Iterable[tuple[str, Tensor]], folder: Path, group_size: int, hessians: dict[str, Tensor]
) -> None:
    """given: the directory's tensors. hessians: of the weights that gptq() rounds, by name.

    All others go to the nearest codes.
    """
    tensors: dict[str, Tensor] = {}
    ignored = ["lm_head"]
    num_packed = num_kept = 0
    for name, tensor in track(list(given), "rounding", transient=True):
        module = name.removesuffix(".weight")
        in_text_model = LANGUAGE_MODEL.sub("model.", name)  # as the engine calls it
        is_projection = PROJECTION.fullmatch(in_text_model) is not None
        if not is_projection or tensor.shape[1] % group_size:
            num_kept += is_projection
            tensors[name] = tensor
            if tensor.dim() == 2 and module != "lm_head":  # a linear layer, or a table that nobody would round
                ignored.append(module)
            continue
        num_packed += 1
        weight, hessian = tensor.float(), hessians.get(in_text_model)
        codes, scales = nearest(weight, group_size) if hessian is None else gptq(weight, hessian, group_size)
        tensors[f"{module}.weight_packed"] = pack(codes)
        tensors[f"{module}.weight_scale"] = scales
        tensors[f"{module}.weight_shape"] = torch.tensor(tensor.shape)
    if num_kept:
        print(f"{num_kept} projections stay as they are: {group_size} does not divide their inputs")
    if num_packed == 0:
        raise SystemExit(f"nothing is written: {directory} has no projection that can be rounded")
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for path in directory.iterdir():
        if path.is_file() and not path.name.endswith((".safetensors", ".safetensors.index.json")):
            shutil.copy(path, folder)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group_size}
    config = json.loads((directory / "config.json").read_text("utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2), "utf-8")


def nearest(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Codes [n, k] from -8 to 7, and scales [n, k / group_size] in bfloat16, of a weight [n, k]."""
    groups = weight.unflatten(1, (-1, group_size))
    scales = scale_of(groups)
    return codes_of(groups, scales[..., None]).flatten(1), scales


def gptq(weight: Tensor, hessian: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The same, chosen by what comes out. hessian: [k, k], products of the inputs, summed over the tokens of a text."""
    weight, k = weight.clone(), weight.shape[1]
    # Row i of this factor says how later inputs make up for an error at i, once those before it are settled.
    damped = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(k)
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True).float()
    codes, errors, scales = torch.empty_like(weight), torch.empty(len(weight), group_size), list[Tensor]()
    for start in range(0, k, group_size):
        end = start + group_size
        scale = scale_of(weight[:, start:end])
        for i in range(start, end):
            codes[:, i] = codes_of(weight[:, i], scale)
            errors[:, i - start] = error = (weight[:, i] - codes[:, i] * scale.float()) / inverse[i, i]
            weight[:, i + 1 : end] -= torch.outer(error, inverse[i, i + 1 : end])
        weight[:, end:] -= errors @ inverse[start:end, end:]  # all that the group owes to later ones, at once
        scales.append(scale)
    return codes, torch.stack(scales, dim=1)


def scale_of(groups: Tensor) -> Tensor:
    """Of groups along the last dimension: bfloat16."""
    return (groups.abs().amax(-1) / ((HIGH - LOW) / 2)).bfloat16()


def codes_of(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers / scales.float().clamp_min(torch.finfo(torch.bfloat16).tiny)).round().clamp(LOW, HIGH)


def pack(codes: Tensor) -> Tensor:
    """Whole numbers from -8 to 7, [n, k], 8 in an int32: plus 8, and the first one in the lowest 4 bits."""
    codes = (codes - LOW).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8))
    return (codes[:, ::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


@torch.inference_mode()
def measure_hessians(directory: Path, text: str, num_tokens: int) -> dict[str, Tensor]:
    """{name of a weight: X^T X, [k, k]}: X has what goes into it, a row for each token of the text."""
    options = {"optimizations": ("reordered_weights", "c_kernels")}  # no recorded step, which would call no hook
    llm = LLM(str(directory), dtype="float32", enable_prefix_caching=False, max_model_len=WINDOW + 1, **options)
    hessians = defaultdict[Linear, Tensor](lambda: torch.zeros(()))

    def add(linear: Linear, args: tuple[Tensor, ...]) -> None:
        hessians[linear] = hessians[linear] + args[0].T @ args[0]

    names_of = llm.engine.model_runner.model.linear_weights()
    names_of = [(linear, names) for linear, names in names_of if all(map(PROJECTION.fullmatch, names))]
    for linear, _ in names_of:
        linear.register_forward_pre_hook(add)
    token_ids = llm.get_tokenizer()(text)["input_ids"][-num_tokens:]
    for window in track(torch.tensor(token_ids).split(WINDOW), "reading", transient=True):
        llm.generate(window.tolist(), SamplingParams(max_tokens=1), use_tqdm=False)
    read = {linear: hessian.cpu() for linear, hessian in hessians.items()}  # the rounding is done there, on any machine
    return {name: read[linear] for linear, names in names_of for name in names if linear in read}


if __name__ == "__main__":
    main()
