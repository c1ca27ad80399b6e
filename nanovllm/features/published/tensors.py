"""The tensors of a checkpoint that others quantized, each weight under its own name (chapter 12).

A file of GPTQ holds X.qweight, X.qzeros and X.scales, and the loader asks for X.weight. Here is a mapping in which it
finds that: everything after it, from the shares of ranks to the memory that is needed, is as for a GGUF file.
"""

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.checks.values import MAX_LISTED_ERRORS
from nanovllm.features.published.layouts import FLOAT8, LAYOUTS, PublishedWeight
from nanovllm.features.published.schemes import Published
from nanovllm.files.tensor_files import UNPACKED, WeightFiles

logger = logging.getLogger("nanovllm")

# Beside weights: scales of activations, which are rounded here as their own numbers ask for, and of K/V.
OF_ACTIVATIONS = re.compile(r".*[._](input|activation|output|weight_output)_(scale|zero_point|global_scale)")
OF_KV = re.compile(r".*\.(k|v|q|kv|prob|k_proj\.output|v_proj\.output)_(scale|zero_point)")


@dataclass(frozen=True)
class PublishedFile:
    """Looks like an open file that holds one weight."""

    weight: PublishedWeight

    def get_slice(self, name: str) -> PublishedWeight:
        return self.weight


def published_tensors(files: Mapping[str, Any], published: Published, directory: Path) -> dict[str, Any]:
    """{tensor name: the open file that holds it}, with weights of few bits in the place of what they are made of.

    Raises one ValueError that lists what does not fit together, by the tensors' names.
    """

    def find(name: str) -> Any:
        return files[name].get_slice(name) if name in files else None

    found, used, problems = dict[str, Any](), set[str](), list[str]()
    for name in files:
        layout = layout_of(name, find)
        if layout is None:
            continue
        weight_name, module = names_of(name)
        scheme = published.scheme_of(module)
        used.add(name)
        if scheme is None:
            problems.append(f"{name}: config.json says that {module} is not quantized")
        elif scheme.layout not in layout:
            problems.append(f"{name}: config.json says that {module} is stored as {scheme.layout}, {scheme}")
        else:
            try:
                weight = LAYOUTS[scheme.layout](name, scheme, find, published.unpacks)
            except ValueError as error:
                problems.append(str(error))
            else:
                found[weight_name] = PublishedFile(weight)
                used |= weight.used
    if problems:
        more = len(problems) - MAX_LISTED_ERRORS
        shown = "\n  ".join(problems[:MAX_LISTED_ERRORS] + [f"and {more} more"] * (more > 0))
        raise ValueError(f"the quantized weights in {directory} do not fit its configuration:\n  {shown}")
    return {name: file for name, file in files.items() if name not in used} | found


def layout_of(name: str, find: Any) -> Collection[str] | None:
    """The layouts whose codes may be in a tensor of this name. None: they are not in this one."""
    if name.endswith(".qweight"):
        return "gptq", "awq"
    if name.endswith("_packed"):
        return ("packed",)
    if name.endswith(("_scale_inv", "_zero_point")):
        return None
    dtype = find(name).get_dtype()
    if dtype in FLOAT8:
        return ("floats",)
    if dtype == "I8":
        return ("integers",)
    if find(f"{name}.quant_map") is not None:
        return ("bitsandbytes",)
    return None


def names_of(name: str) -> tuple[str, str]:
    """(the weight's own name, its module's), of the tensor with the codes."""
    if name.endswith(".qweight"):
        module = name.removesuffix(".qweight")
        return f"{module}.weight", module
    weight = name.removesuffix("_packed")
    return weight, weight.removesuffix(".weight")


def tensors_beside(files: Mapping[str, Any], whole: Collection[str], directory: Path) -> set[str]:
    """Names of those that the model does not need and may be there: scales of activations and, with a warning, of K/V;
    biases of a model without, if they are zero, for early packers wrote one beside every weight."""
    extra = [name for name in files if name not in whole]
    of_kv = [name for name in extra if OF_KV.fullmatch(name)]
    if of_kv:
        unused = f"{len(of_kv)} scales of K/V in the file ({of_kv[0]}, ...) are not used"
        logger.warning("%s: %s; K/V are held as kv_cache_dtype says", directory, unused)
    biases = {name for name in extra if name.endswith(".bias")}
    zero = {name for name in biases if not files[name].get_slice(name)[(slice(None),)].any()}
    return {*of_kv, *zero, *filter(OF_ACTIVATIONS.fullmatch, extra)}


def say_what_is_computed(files: WeightFiles, published: Published, rounded: list[str], dtype: torch.dtype) -> None:
    """On a CPU: the weights, the activations, and what is held otherwise than in the file.

    rounded: weights of ordinary numbers that become int8.
    """
    asked = f", where the file asks for {published.activations}" if published.activations else ""
    logger.info("%s: %s; activations are rounded to 8 bits in groups of 32%s", files.directory, published, asked)
    if rounded:
        few = rounded[0] if len(rounded) == 1 else f"{rounded[0]} and {len(rounded) - 1} more"
        logger.info("%s: in 16 or 32 bits in the files, and held as int8: %s", files.directory, few)
    unpacked = [name for name, stored in files.stored.items() if stored == UNPACKED]
    if unpacked:
        few = f"{len(unpacked)} weights ({unpacked[0]}, ...) are unpacked to {str(dtype).removeprefix('torch.')}"
        logger.warning("%s: %s: 8 bits with a float16 scale for 32 of them would lose too much", files.directory, few)
