"""Write a checkpoint as a GGUF file: the same weights for another engine (chapter 12).

    python examples/make_gguf.py MODEL FILE.gguf [--type Q8_0]

--type: of the projections, the embedding table and the output head: F32, F16, BF16, Q8_0, Q4_0 or Q4_1; norms, biases
and what chooses experts are F32, as they always are in such files. A Llama's rows of q and k are put in the order that
llama.cpp's rotary embedding expects; hybrid_tensors() has what its converter changes of a hybrid model. The tokenizer
is not written: a benchmark sends token ids. Prints the file's size.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from measuring import arguments, file_to_write, needs, tensors_of

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.tools.demo_model import model_or_demo

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
ARCHITECTURES |= {"Qwen3_5ForCausalLM": "qwen35", "Qwen3_5ForConditionalGeneration": "qwen35"}
ARCHITECTURES |= {"Qwen3_5MoeForCausalLM": "qwen35moe", "Qwen3_5MoeForConditionalGeneration": "qwen35moe"}
ARCHITECTURES |= {"Qwen3NextForCausalLM": "qwen3next"}


def main() -> None:
    parser = arguments(__doc__, model=None)
    parser.add_argument("model", help="a checkpoint's directory, a hub id, or demo")
    parser.add_argument("file", type=file_to_write)
    parser.add_argument("--type", choices=TYPES, default="Q8_0")
    args = parser.parse_args()
    write_gguf(resolve_checkpoint(model_or_demo(args.model)), args.file, args.type)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:,.0f} MB")


def write_gguf(directory: Path, path: Path, type_name: str) -> None:
    """Write the checkpoint in a directory to a GGUF file, its matrices as type_name."""
    with needs("gguf"):
        import gguf

    tensors = ((name, tensor.float()) for name, tensor in tensors_of(directory))
    config = ModelConfig.from_directory(directory)
    if config.architecture not in ARCHITECTURES or config.windows or config.rope_scaling["rope_type"] != "default":
        raise SystemExit(f"{directory}: only {', '.join(ARCHITECTURES)}, no windows, no rotary scaling")
    architecture = ARCHITECTURES[config.architecture]
    writer = gguf.GGUFWriter(path, architecture)
    write_config(writer, config)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for name, tensor in tensors if config.hybrid is None else hybrid_tensors(tensors, config):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = to_llama_order(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = to_llama_order(tensor, config.num_key_value_heads)
        if (stored := names.get_name(name, (".weight", ".bias"))) is None:
            raise SystemExit(f"{directory}: {name} has no name in such files")
        is_small = (
            tensor.dim() == 1 or "conv1d" in name or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight"))
        )
        if tensor.dim() == 2 and len(tensor) == 1:
            tensor = tensor[0]  # as llama-quantize leaves out a first dimension of 1
        kind = gguf.GGMLQuantizationType["F32" if is_small else type_name]
        data = gguf.quants.quantize(tensor.contiguous().numpy(), kind)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def hybrid_tensors(
    tensors: Iterable[tuple[str, torch.Tensor]], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """What llama.cpp's converter makes of them.

    No vision tower; norms plus 1; -exp(A_log); all experts of a layer in one tensor. Of Qwen3.5 value head 0 of all key
    heads comes before value head 1 of any; of Qwen3-Next q, k and v of all heads come before z.
    """
    experts = defaultdict[str, dict[int, torch.Tensor]](dict)
    for name, tensor in tensors:
        name = name.replace("model.language_model.", "model.")
        if name.startswith(("mtp.", "model.visual.")):
            continue
        if found := re.match(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            experts[f"{found[1]}.{found[3]}.weight"][int(found[2])] = tensor
            continue
        if name.endswith(".A_log"):
            tensor = -tensor.exp()
        name = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith("norm.weight") and ".linear_attn.norm" not in name:
            tensor = tensor + 1
        if "conv1d" in name:
            tensor = tensor.squeeze(1)
        if ".linear_attn." in name and config.architecture.startswith("Qwen3_5"):
            tensor = values_by_turns(name.partition(".linear_attn.")[2], tensor, config)
        if ".in_proj_qkvz." in name:
            yield from split_by_key_head(name, tensor, config)
        elif name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half
        else:
            yield name + ".weight" * name.endswith("experts.down_proj"), tensor
    for name, parts in experts.items():
        yield name, torch.stack([parts[i] for i in range(len(parts))])


def values_by_turns(name: str, tensor: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    sizes = config.hybrid
    dim, width, begin = 0, 1, 0
    if name.startswith(("in_proj_qkv.", "conv1d")):
        width, begin = sizes.value_dim, 2 * sizes.key_size
    elif name.startswith(("in_proj_z", "out_proj")):
        dim, width = int(name.startswith("out_proj")), sizes.value_dim
    elif name.startswith("norm"):
        return tensor
    before, values = tensor.split((begin, tensor.shape[dim] - begin), dim)
    heads = values.unflatten(dim, (sizes.num_key_heads, -1, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat((before, heads), dim)


def split_by_key_head(name: str, tensor: torch.Tensor, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    sizes = config.hybrid
    values = sizes.value_size // sizes.num_key_heads
    by_head = tensor.unflatten(0, (sizes.num_key_heads, -1))
    q, k, v, z = (part.flatten(0, 1) for part in by_head.split((sizes.key_dim, sizes.key_dim, values, values), dim=1))
    yield name.replace("in_proj_qkvz", "in_proj_qkv"), torch.cat((q, k, v))
    yield name.replace("in_proj_qkvz", "in_proj_z"), z


def write_config(writer: "GGUFWriter", config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("none")
    if config.hybrid is not None:
        write_hybrid_config(writer, config)


def write_hybrid_config(writer: "GGUFWriter", config: ModelConfig) -> None:
    sizes = config.hybrid
    writer.add_ssm_conv_kernel(sizes.kernel_size)
    writer.add_ssm_state_size(sizes.key_dim)
    writer.add_ssm_group_count(sizes.num_key_heads)
    writer.add_ssm_time_step_rank(sizes.num_value_heads)
    writer.add_ssm_inner_size(sizes.value_size)
    interval = next(i + 1 for i in range(config.num_hidden_layers) if i not in sizes.linear_layers)
    if (
        any((i + 1) % interval == 0 for i in sizes.linear_layers)
        or config.num_kv_layers * interval < config.num_hidden_layers
    ):
        raise SystemExit("such files can only say that every n-th layer has attention")
    writer.add_full_attention_interval(interval)
    if config.architecture.startswith("Qwen3_5"):  # of positions in images; a text's three positions are one
        part = config.rotary_dim // 6
        writer.add_rope_dimension_sections([config.rotary_dim // 2 - 2 * part, part, part, 0])
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def to_llama_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k: llama.cpp turns neighbours where checkpoints turn number i of a head's two halves."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


if __name__ == "__main__":
    main()
