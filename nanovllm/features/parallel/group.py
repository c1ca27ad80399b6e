"""RankGroup: this rank's place among those that share a model, and which part of it is its own (chapter 9).

The split is that of Megatron-LM (arXiv:1909.08053).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.parallel_layers import ParallelDecoder

# How long a rank waits for the others inside an operation. On GPUs, one may compile Triton's kernels meanwhile.
OPERATION_TIMEOUT_S = {"gloo": 20.0, "nccl": 300.0}
EXPERT_SIZES = "moe_intermediate_size", "shared_expert_intermediate_size"
SHARDED_SIZES = "num_attention_heads", "intermediate_size", *EXPERT_SIZES, "vocab_size"


class PeerError(RuntimeError):
    """An operation of the group failed: another rank is to blame."""


@dataclass
class RankGroup:
    """This rank's place among those that share a model. In a group of one, every operation returns its input.

    num_reduced_bytes: that went through all_reduce(); not those of a CUDA graph's replays, which call nothing here
    """

    rank: int = 0
    size: int = 1
    num_reduced_bytes: int = 0

    def join(self, port: int) -> None:
        """Meet the other ranks at the driver's store."""
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(self.rank)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            backend = "nccl" if on_gpu else "gloo"
            limit = timedelta(seconds=OPERATION_TIMEOUT_S[backend])
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        except RuntimeError as error:
            raise PeerError(str(error).splitlines()[0]) from error

    def share(self, whole_size: int, size: int) -> slice:
        """This rank's part, `size` indices, of a dimension. With fewer parts than ranks, neighbors share one."""
        start = self.rank * (whole_size // size) // self.size * size
        return slice(start, start + size)

    def shares(self, whole: Mapping[str, Tensor], ours: Mapping[str, Tensor]) -> dict[str, tuple[slice, ...]]:
        """This rank's part of every tensor, given all whole ones and those that it has places for."""
        sizes = {name: zip(whole[name].shape, place.shape, strict=True) for name, place in ours.items()}
        return {name: tuple(self.share(*pair) for pair in pairs) for name, pairs in sizes.items()}

    def make_decoder(self, config: ModelConfig) -> "ParallelDecoder":
        """This rank's share of the model. config: of the whole model."""
        return ParallelDecoder(shard_config(config, self.size), self)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            self.num_reduced_bytes += x.nbytes
            self._add_up(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Rank 0 gets [R, size * n] of every rank's [R, n], the others nothing: [0, n]."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size, *x.shape) if self.rank == 0 else None
        self._together("gather", x.contiguous(), None if out is None else list(out))
        return x[:0] if out is None else out.transpose(0, 1).flatten(1)

    def smallest(self, number: int, device: torch.device) -> int:
        """The smallest of the ranks' numbers. device: the one whose tensors the ranks exchange."""
        if self.size == 1:
            return number
        tensor = torch.tensor([number], device=device, dtype=torch.int64)
        self._together("all_reduce", tensor, dist.ReduceOp.MIN)
        return int(tensor)

    def _add_up(self, x: Tensor) -> None:
        """On a CPU in the order of ranks: gloo adds up each part of x in another one, so a row's place would matter."""
        if x.device.type != "cpu":
            self._together("all_reduce", x)
            return
        parts = x.new_empty(self.size, *x.shape)
        self._together("all_gather", list(parts), x)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        x.copy_(total)

    def _together(self, operation: str, *args: object) -> None:
        try:
            getattr(dist, operation)(*args)
        except RuntimeError as error:
            raise PeerError(str(error).splitlines()[0]) from error


def shard_config(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes of one rank's share. Where there are fewer KV heads than ranks, each rank has a copy of one.

    Raises ValueError, with the numbers that would do, if something cannot be divided by `size`.
    """

    def undivided(n: int) -> list[str]:
        names = [name for name in SHARDED_SIZES if getattr(config, name) % n]
        num_kv_heads = config.num_key_value_heads
        names += ["num_key_value_heads"] * bool(num_kv_heads % n and n % num_kv_heads)
        return names + ["linear_num_key_heads"] * bool(config.hybrid and config.hybrid.num_key_heads % n)

    if names := undivided(size):
        found = vars(config) | {"linear_num_key_heads": config.hybrid and config.hybrid.num_key_heads}
        sizes = " and ".join(f"{name}={found[name]}" for name in names)
        fitting = ", ".join(str(n) for n in range(1, config.num_attention_heads + 1) if not undivided(n))
        raise ValueError(f"tensor_parallel_size={size} does not divide {sizes}; possible for this model: {fitting}")
    shares = {name: getattr(config, name) // size for name in SHARDED_SIZES}
    hybrid = None if config.hybrid is None else config.hybrid.share(size)
    return replace(config, **shares, num_key_value_heads=max(1, config.num_key_value_heads // size), hybrid=hybrid)
