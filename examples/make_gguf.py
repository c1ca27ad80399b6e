"""Write a checkpoint as a GGUF file: the same weights for another engine (chapter 12).

    python examples/make_gguf.py MODEL FILE.gguf [--type Q8_0]

--type: of the projections, the embedding table and the output head: F32, F16, BF16, Q8_0, Q4_0 or Q4_1; norms and
biases are F32, as they always are in such files. A Llama's rows of q and k are put in the order that llama.cpp's rotary
embedding expects. The tokenizer is not written: a benchmark sends token ids. Prints the file's size.
"""

import argparse
from pathlib import Path

import gguf
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors import safe_open

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.hub import resolve_checkpoint

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="checkpoint directory")
    parser.add_argument("file", type=Path)
    parser.add_argument("--type", choices=TYPES, default="Q8_0")
    args = parser.parse_args()
    write_gguf(resolve_checkpoint(args.model), args.file, args.type)
    print(f"{args.file}: {args.file.stat().st_size / 1e6:,.0f} MB")


def write_gguf(directory: Path, path: Path, type_name: str) -> None:
    """Write the checkpoint in a directory to a GGUF file, its matrices as type_name."""
    config = ModelConfig.from_directory(directory)
    if config.architecture not in ARCHITECTURES or config.windows or config.rope_scaling["rope_type"] != "default":
        raise SystemExit(f"{directory}: only {', '.join(ARCHITECTURES)}, no windows, no rotary scaling")
    architecture = ARCHITECTURES[config.architecture]
    writer = GGUFWriter(path, architecture)
    write_config(writer, config)
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                if name == "lm_head.weight" and config.tie_word_embeddings:
                    continue
                tensor = tensors.get_tensor(name).float()
                if architecture == "llama" and ".q_proj." in name:
                    tensor = to_llama_order(tensor, config.num_attention_heads)
                if architecture == "llama" and ".k_proj." in name:
                    tensor = to_llama_order(tensor, config.num_key_value_heads)
                kind = GGMLQuantizationType[type_name if tensor.dim() == 2 else "F32"]
                data = gguf.quants.quantize(tensor.numpy(), kind)
                writer.add_tensor(str(names.get_name(name, (".weight", ".bias"))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: GGUFWriter, config: ModelConfig) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("none")


def to_llama_order(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of q or k: llama.cpp turns neighbours where checkpoints turn number i of a head's two halves."""
    return tensor.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2)


if __name__ == "__main__":
    main()
