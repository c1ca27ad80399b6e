"""Tensor parallelism: one model over several processes (chapter 9; Megatron-LM, arXiv:1909.08053).

The driver keeps the scheduler and starts one process a rank. Each rank holds a share of the attention heads, of the
MLP's columns, of the vocabulary and of the KV cache, receives each step as packed arrays, and answers; rank 0's answer
has the sampled tokens. A group that has lost a rank cannot go on: the engine ends, and the error names the rank.

Nothing heavy is imported at the top: a rank that starts says that it is alive before it imports torch.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from nanovllm.config import EngineConfig, ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

HEARTBEAT_S = 2.0
TIMEOUT_S = 20.0  # how long a rank may be silent, and how long the others wait for it inside an operation
GRACE_S = 2.0  # in which everybody who waited for a rank that hangs has said so
SHARDED_SIZES = ("num_attention_heads", "intermediate_size", "vocab_size")


class PeerError(RuntimeError):
    """An operation of the group failed: another rank is to blame."""


@dataclass
class Group:
    """This rank's place among those that share a model. Alone, every operation returns its input."""

    rank: int = 0
    size: int = 1
    num_reduced_bytes: int = 0

    def join(self, port: int) -> None:
        """Meet the other ranks at the driver's store."""
        import torch
        import torch.distributed as dist

        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(self.rank)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            backend, limit = "nccl" if on_gpu else "gloo", timedelta(seconds=TIMEOUT_S)
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=limit)
        except RuntimeError as error:
            raise PeerError(str(error).splitlines()[0]) from error

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over all ranks, in place."""
        if self.size > 1:
            self.num_reduced_bytes += x.nbytes
            self._together("all_reduce", x)
        return x

    def gather(self, x: "Tensor") -> "Tensor":
        """Rank 0 gets [R, size * n] of every rank's [R, n]; the others get their own back."""
        if self.size == 1:
            return x
        out = x.new_empty(self.size, *x.shape) if self.rank == 0 else None
        self._together("gather", x.contiguous(), None if out is None else list(out))
        return x if out is None else out.transpose(0, 1).flatten(1)

    def smallest(self, number: int) -> int:
        """The smallest of the ranks' numbers."""
        if self.size == 1:
            return number
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        tensor = torch.tensor([-number], device=device)
        self._together("all_reduce", tensor, torch.distributed.ReduceOp.MAX)
        return -int(tensor)

    def _together(self, operation: str, *args: Any) -> None:
        import torch.distributed

        try:
            getattr(torch.distributed, operation)(*args)
        except RuntimeError as error:
            raise PeerError(str(error).splitlines()[0]) from error


def shard(config: ModelConfig, size: int) -> ModelConfig:
    """The sizes of one rank's share. Where there are fewer KV heads than ranks, each rank has a copy of one.

    Raises ValueError, with the numbers that would do, if something cannot be divided by `size`.
    """

    def undivided(n: int) -> list[str]:
        names = [name for name in SHARDED_SIZES if getattr(config, name) % n]
        num_kv_heads = config.num_key_value_heads
        return names + ["num_key_value_heads"] * bool(num_kv_heads % n and n % num_kv_heads)

    if names := undivided(size):
        sizes = " and ".join(f"{name}={getattr(config, name)}" for name in names)
        fitting = ", ".join(str(n) for n in range(1, config.num_attention_heads + 1) if not undivided(n))
        raise ValueError(f"tensor_parallel_size={size} does not divide {sizes}; possible for this model: {fitting}")
    shares = {name: getattr(config, name) // size for name in SHARDED_SIZES}
    return replace(config, **shares, num_key_value_heads=max(1, config.num_key_value_heads // size))


class ParallelRunner:
    """The driver's side: what ModelRunner does, by ranks in processes of their own.

    They are started without multiprocessing, which would run the caller's script once more in each of them.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        import torch

        shard(model_config, config.tensor_parallel_size)  # refuses what cannot be divided
        if 0 < torch.cuda.device_count() < config.tensor_parallel_size:
            found = f"{torch.cuda.device_count()} GPUs"
            raise ValueError(f"tensor_parallel_size={config.tensor_parallel_size} needs as many GPUs, found {found}")
        self.config, self.model_config, self.size = config, model_config, config.tensor_parallel_size
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen] = []
        self._end = weakref.finalize(self, _kill, self._processes, self._connections)  # at exit, too

    def load(self, directory: Path) -> None:
        """Start the ranks and wait until all have loaded their shares."""
        from torch.distributed import TCPStore

        # Where the ranks find each other; the system chooses a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": str(max(1, num_cores // self.size)),
        }
        for rank in range(self.size):
            ours, theirs = Pipe()
            code = f"from nanovllm.worker.parallel import serve; serve({theirs.fileno()}, {rank})"
            command = [sys.executable, "-c", code]
            # In a session of its own, so that the terminal's Ctrl-C reaches the driver only.
            process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._processes.append(process)
            self._connections.append(ours)
            theirs.close()
        self._ask(self._store.port, self.config, self.model_config)
        self._ask("load", directory)

    def prepare(self) -> None:
        """See ModelRunner.prepare."""
        pools = self._ask("prepare")
        self.num_blocks, self.block_size, self.max_model_len, _ = pools[0]
        self.kv_cache_bytes = sum(pool[-1] for pool in pools)

    def run(self, *work: Any) -> Any:
        """See ModelRunner.run."""
        return self._ask("run", *work)[0]

    def usage(self) -> list[dict[str, int]]:
        """See ModelRunner.usage; one a rank."""
        return self._ask("usage")

    def _ask(self, *message: Any) -> list[Any]:
        """Send all ranks a message and collect their answers. Whatever goes wrong here ends the engine."""
        if not self._end.alive:
            raise RuntimeError("this engine has ended; build a new LLM")
        try:
            data = pickle.dumps(message)
            for connection in self._connections:
                with suppress(OSError):  # a rank that has died is found out below
                    connection.send_bytes(data)
            return self._collect()
        except BaseException:
            self._end()
            del self._store
            raise

    def _collect(self) -> list[Any]:
        """One answer of each rank, or an error that names the rank to blame."""
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}  # ranks that have waited in vain for another one
        heard = [time.monotonic()] * self.size
        while len(answers) < self.size:
            pending = [rank for rank in range(self.size) if rank not in answers and rank not in lost]
            if not pending:
                raise RuntimeError(f"the ranks lost each other: {lost}")
            for connection in wait([self._connections[rank] for rank in pending], timeout=0.5):
                rank = self._connections.index(connection)  # type: ignore[arg-type]
                heard[rank] = time.monotonic()
                try:
                    kind, content = pickle.loads(self._connections[rank].recv_bytes())
                except (EOFError, OSError):
                    with suppress(subprocess.TimeoutExpired):
                        self._processes[rank].wait(timeout=1)
                    raise RuntimeError(f"rank {rank} died, exit code {self._processes[rank].returncode}") from None
                if kind == "failed":
                    is_mistake = isinstance(content, ValueError | FileNotFoundError)
                    raise content if is_mistake else RuntimeError(f"rank {rank} failed: {content}")
                if kind != "alive":
                    (answers if kind == "done" else lost)[rank] = content
            for rank in pending:
                in_vain = lost and time.monotonic() - max(heard[r] for r in lost) > GRACE_S
                silent = time.monotonic() - heard[rank] > TIMEOUT_S
                if (in_vain or silent) and rank not in answers and rank not in lost:
                    raise RuntimeError(f"rank {rank} hangs: {TIMEOUT_S:.0f} s without an answer")
        return [answers[rank] for rank in range(self.size)]


def _kill(processes: list[subprocess.Popen], connections: list[Connection]) -> None:
    for process in processes:
        process.kill()
    for process, connection in zip(processes, connections, strict=True):
        process.wait()
        connection.close()


def serve(fd: int, rank: int) -> None:
    """A rank's whole life: make a ModelRunner, then call the methods that the driver asks for. fd: its connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    connection, lock = Connection(fd), Lock()

    def send(kind: str, content: Any = None) -> None:
        with lock:
            connection.send_bytes(pickle.dumps((kind, content)))

    def beat() -> None:
        while True:
            try:
                send("alive")
            except OSError:
                os._exit(1)  # the driver has gone
            time.sleep(HEARTBEAT_S)

    Thread(target=beat, daemon=True).start()
    try:
        port, config, model_config = pickle.loads(connection.recv_bytes())
        group = Group(rank, config.tensor_parallel_size)
        group.join(port)
        from nanovllm.worker.model_runner import ModelRunner

        runner = ModelRunner(config, model_config, group)
        send("done")
        while True:
            method, *arguments = pickle.loads(connection.recv_bytes())
            send("done", getattr(runner, method)(*arguments))
    except PeerError as error:
        send("lost", str(error))
    except BaseException as error:
        is_mistake = isinstance(error, ValueError | FileNotFoundError)
        send("failed", error if is_mistake else f"{type(error).__name__}: {error}")
    os._exit(0)
