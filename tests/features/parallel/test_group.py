"""A rank's share of a model: what it reads, and sizes that cannot be divided."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.files import tensor_files
from nanovllm.worker.loader import load_model
from tests.checkpoints import SIZES

CPU = torch.device("cpu")


class Recorder:
    """A safetensors file that counts the numbers read from it."""

    num_read = 0

    def __init__(self, file):
        self.keys, self.get_slice = file.keys, lambda name: RecordedSlice(file.get_slice(name))


class RecordedSlice:
    def __init__(self, part):
        self.part, self.get_shape, self.get_dtype = part, part.get_shape, part.get_dtype

    def __getitem__(self, share):
        tensor = self.part[share]
        Recorder.num_read += tensor.numel()
        return tensor


@pytest.mark.parametrize("variant", ["llama", "llama-biases", "qwen3"])
def test_each_rank_reads_its_share_and_together_they_have_all(checkpoint, variant, monkeypatch):
    folder = checkpoint(variant)
    config = ModelConfig.from_directory(folder)
    whole = dict(load_model(folder, config, torch.float32, CPU).checkpoint_tensors())
    monkeypatch.setattr(tensor_files, "open_file", lambda path, open=tensor_files.open_file: Recorder(open(path)))
    parts = []
    for rank in (0, 1):
        Recorder.num_read = 0
        parts.append(dict(load_model(folder, config, torch.float32, CPU, RankGroup(rank, 2)).checkpoint_tensors()))
        assert Recorder.num_read == sum(tensor.numel() for tensor in parts[rank].values())
    for name, tensor in whole.items():
        dim = next((d for d, n in enumerate(parts[0][name].shape) if n != tensor.shape[d]), None)
        assert (dim is None) == ("norm" in name or name.endswith(("o_proj.bias", "down_proj.bias"))), name
        if dim is None:
            assert torch.equal(parts[0][name], tensor) and torch.equal(parts[1][name], tensor)
        else:
            assert torch.equal(torch.cat([part[name] for part in parts], dim), tensor), name


def test_sizes_that_do_not_divide(checkpoint):
    with pytest.raises(ValueError, match=r"tensor_parallel_size=3 does not divide num_attention_heads=4.* 1, 2, 4"):
        LLM(str(checkpoint()), tensor_parallel_size=3)
    with pytest.raises(ValueError, match=f"=8 does not divide num_attention_heads={SIZES['num_attention_heads']};"):
        shard_config(ModelConfig.from_directory(checkpoint()), 8)
