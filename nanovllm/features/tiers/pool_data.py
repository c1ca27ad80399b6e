"""What lies in the pool's blocks and in slots of states, as bytes (core/tiers/store.py, BlockData)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class PoolData:
    """The blocks of a ModelRunner: one process has all of them.

    NumPy copies on a CPU: PyTorch would wake its threads for it.
    """

    def __init__(self, runner: Any) -> None:
        data, states = runner.kv_cache.data, runner.states
        self.pieces: Tensor = data.flatten(0, 1).flatten(2).view(torch.uint8)  # [2 * layers, blocks, bytes]
        self.on_cpu = data.device.type == "cpu"
        self.block_bytes = self.pieces.shape[0] * self.pieces.shape[2]
        self.state_parts: list[Tensor] = []  # each [slots, bytes]
        if states is not None:
            self.state_parts = [part.flatten(1).view(torch.uint8) for part in (states.states, states.windows)]
        self.state_bytes = sum(part.shape[1] for part in self.state_parts)

    def read(self, block_ids: list[int]) -> list[np.ndarray]:
        """An array of block_bytes for each block."""
        if not self.on_cpu:
            return [*self.pieces[:, block_ids].transpose(0, 1).contiguous().cpu().numpy().reshape(len(block_ids), -1)]
        # A copy each: malloc keeps what is freed of this size, and a large one would be new pages every time.
        pieces = self.pieces.numpy()
        return [pieces[:, block_id].flatten() for block_id in block_ids]

    def write(self, block_ids: list[int], data: list[np.ndarray]) -> None:
        shape = self.pieces.shape[::2]
        if not self.on_cpu:
            given = torch.from_numpy(np.stack(data)).view(len(data), *shape).to(self.pieces.device)
            self.pieces[:, block_ids] = given.transpose(0, 1)
            return
        pieces = self.pieces.numpy()
        for block_id, block_data in zip(block_ids, data, strict=True):
            pieces[:, block_id] = block_data.reshape(shape)

    def read_state(self, slot: int) -> np.ndarray:
        return torch.cat([part[slot] for part in self.state_parts]).cpu().numpy()

    def write_state(self, slot: int, data: np.ndarray) -> None:
        given = torch.from_numpy(data.copy()).split([part.shape[1] for part in self.state_parts])
        for part, value in zip(self.state_parts, given, strict=True):
            part[slot] = value.to(part.device)


class RankData(PoolData):
    """The blocks of one rank. What it is given to write are the shares of all ranks, one after another."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.group = runner.group

    def sizes(self) -> tuple[int, int]:
        return self.block_bytes, self.state_bytes

    def write(self, block_ids: list[int], data: list[np.ndarray]) -> None:
        super().write(block_ids, [self.own(block_data) for block_data in data])

    def write_state(self, slot: int, data: np.ndarray) -> None:
        super().write_state(slot, self.own(data))

    def own(self, data: np.ndarray) -> np.ndarray:
        return data.reshape(self.group.size, -1)[self.group.rank]


class RanksData:
    """The blocks of a ParallelRunner: each rank has a share of every block, and they are kept one after another."""

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        sizes = runner.ask_data("sizes")
        self.block_bytes, self.state_bytes = (sum(rank_sizes) for rank_sizes in zip(*sizes, strict=True))

    def read(self, block_ids: list[int]) -> list[np.ndarray]:
        return [np.concatenate(shares) for shares in zip(*self.runner.ask_data("read", block_ids), strict=True)]

    def write(self, block_ids: list[int], data: list[np.ndarray]) -> None:
        self.runner.ask_data("write", block_ids, data)

    def read_state(self, slot: int) -> np.ndarray:
        return np.concatenate(self.runner.ask_data("read_state", slot))

    def write_state(self, slot: int, data: np.ndarray) -> None:
        self.runner.ask_data("write_state", slot, data)
