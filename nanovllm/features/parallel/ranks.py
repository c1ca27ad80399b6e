"""Tensor parallelism: one model over several processes (chapter 9).

The driver keeps the scheduler and starts one process a rank. Each rank holds a share of the attention heads, of the
MLP's columns, of the vocabulary and of the KV cache, receives each step as packed arrays, and answers; rank 0's answer
has the sampled tokens. A group that has lost a rank cannot go on: the engine ends, and the error names the rank.

Nothing heavy is imported at the top: a rank that starts says that it is alive before it imports torch.
"""

import logging
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput

if TYPE_CHECKING:
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.worker.kv_cache import KVPool
    from nanovllm.worker.model_runner import ModelRunnerOutput

HEARTBEAT_S = 2.0
TIMEOUT_S = 20.0  # how long a rank may be silent
SENT_AT_ONCE = 32 << 10  # bytes that a socket takes though nobody reads
GRACE_S = 2.0  # after one rank has reported a lost peer: time for the others to report it, too


class ParallelRunner:
    """The driver's side: what ModelRunner does, by ranks in processes of their own.

    They are started without multiprocessing, which would run the caller's script once more in each of them.
    """

    _store: Any  # torch.distributed's TCPStore: where the ranks find each other

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        import torch

        from nanovllm.features.parallel.group import shard_config

        shard_config(model_config, config.tensor_parallel_size)  # refuses what cannot be divided
        if 0 < torch.cuda.device_count() < config.tensor_parallel_size:
            found = f"{torch.cuda.device_count()} GPUs"
            raise ValueError(f"tensor_parallel_size={config.tensor_parallel_size} needs as many GPUs, found {found}")
        self.config, self.model_config, self.size = config, model_config, config.tensor_parallel_size
        self._directory = Path()  # the checkpoint's, once the ranks have read it
        self._slots: dict[int, int] = {}  # as the ranks have them: what fails ends the engine
        self.part_counts: dict[str, dict[str, int]] = {}  # see ModelRunner; of all ranks
        self._asking = Lock()  # a tower is loaded by whoever brings the first image, beside the steps
        self._connections: list[Any] = []  # Connection; on Windows, PipeConnection
        self._processes: list[subprocess.Popen] = []
        self._end = weakref.finalize(self, _kill, self._processes, self._connections)  # at exit, too

    def load(self, directory: Path) -> None:
        """Start the ranks and wait until all have loaded their shares."""
        if sys.platform == "win32":
            raise ValueError("tensor_parallel_size needs Linux or macOS: ranks inherit their connections; leave it out")
        from torch.distributed import TCPStore

        from nanovllm.worker.cpu.threads import num_threads

        # The system chooses a free port.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        env = os.environ | {"OMP_NUM_THREADS": str(max(1, num_threads() // self.size))}
        # Set when Python has started: a types.py beside the script harms a rank no more than the script.
        paths = f"import sys; sys.path = {[path or os.getcwd() for path in sys.path]!r}"
        for rank in range(self.size):
            ours, theirs = Pipe()
            code = f"{paths}; from nanovllm.features.parallel.ranks import serve; serve({theirs.fileno()}, {rank})"
            command = [sys.executable, "-c", code]
            # In a session of its own, so that the terminal's Ctrl-C reaches the driver only.
            process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._processes.append(process)
            self._connections.append(ours)
            theirs.close()
        self._ask(self._store.port, self.config, self.model_config)
        self._directory = directory
        self._ask("load", directory)

    @property
    def measures_memory(self) -> bool:
        """See ModelRunner.measures_memory."""
        import torch

        return torch.cuda.is_available()

    def prepare(self, largest_image: "PromptImages | None" = None) -> "KVPool":
        """See ModelRunner.prepare."""
        pools = self._ask("prepare", largest_image)
        self.block_size = pools[0].block_size
        self.batch_invariant = self._ask("get", "batch_invariant")[0]
        self.kv_layout = ", ".join(self._ask("get", "kv_layout"))
        states = pools[0].states
        if states is not None:
            states = states._replace(num_bytes=sum(pool.states.num_bytes for pool in pools))
        return replace(pools[0], num_bytes=sum(pool.num_bytes for pool in pools), states=states)

    def load_part(self, name: str) -> None:
        """See ModelRunner.load_part. Only a tower comes this way, and each rank has the whole of it."""
        from nanovllm.features.images.tower import build_tower, check_tower

        if self.config.load_format != "dummy":  # before the ranks: whatever one of them raises ends the engine
            assert self.model_config.images is not None
            places = build_tower(self.model_config.images).named_parameters(prefix="model")
            check_tower(self._directory, dict(places), self.model_config.published)
        for problem in self._ask("load_part", name):
            if problem is not None:
                raise problem
        self._count_images()

    def _count_images(self) -> None:
        counts = [of_rank["tower"] for of_rank in self._ask("get", "part_counts")]
        self.part_counts["tower"] = counts[0] | {"tower_bytes": sum(each["tower_bytes"] for each in counts)}

    def run(self, output: SchedulerOutput) -> "ModelRunnerOutput":
        """See ModelRunner.run. Rank 0 answers."""
        from nanovllm.worker.model_runner import ModelRunnerOutput, pack

        if not output.chunks:
            return ModelRunnerOutput()
        batch, sampling = pack(output, self.block_size, self.model_config.eos_token_ids)
        adapters: Any = batch.parts.get("adapter")
        if adapters is not None:
            batch.parts["adapter"] = adapters.news(self._slots, self.config.max_loras)
        pending = None if sampling.processors is None else sampling.processors.pending
        result = self._ask("run_packed", batch, sampling, late=pending)[0]
        if "images" in batch.parts:
            self._count_images()
        return result

    def ask_data(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank has in its blocks, or is to have: RankRunner.data."""
        return self._ask("data", method, *arguments)

    def usage(self) -> list[dict[str, int]]:
        """Bytes of each rank: its weights, its KV pool, what it has sent through all-reduces so far."""
        return self._ask("usage")

    @property
    def has_ended(self) -> bool:
        """A rank was lost, or the engine was closed: nothing can be computed any more."""
        return not self._end.alive

    def _ask(self, *message: Any, late: Any = None) -> list[Any]:
        """Send all ranks a message and collect their answers. Whatever goes wrong here ends the engine.

        late: bits of grammars (masks.py), which rank 0 gets while the ranks compute.
        """
        with self._asking:
            if self.has_ended:
                raise RuntimeError("this engine has ended; build a new LLM")
            try:
                sending = self._send(self._connections, pickle.dumps(message))
                if late is not None:
                    self._send(self._connections[:1], pickle.dumps(late.wait()), after=sending)
                return self._collect()
            except BaseException:
                self._end()
                del self._store
                raise

    def _send(self, connections: list[Connection], data: bytes, after: Thread | None = None) -> Thread | None:
        """What a socket may not hold is sent in a thread: a rank that hangs reads nothing, and _collect() notices that.

        after: what is being sent before it.
        """

        def send() -> None:
            if after is not None:
                after.join()
            for connection in connections:
                with suppress(OSError):  # a rank that has died is found out by _collect()
                    connection.send_bytes(data)

        if after is None and len(data) <= SENT_AT_ONCE:
            send()
            return None
        thread = Thread(target=send, daemon=True)
        thread.start()
        return thread

    def _collect(self) -> list[Any]:
        """One answer of each rank, or an error that names the rank to blame."""
        answers: dict[int, Any] = {}
        lost: dict[int, str] = {}  # ranks whose operation failed because another rank did not take part
        heard = [time.monotonic()] * self.size
        while len(answers) < self.size:
            pending = [rank for rank in range(self.size) if rank not in answers and rank not in lost]
            if not pending:
                raise RuntimeError(f"the ranks lost each other: {lost}")
            for connection in wait([self._connections[rank] for rank in pending], timeout=0.5):
                rank = self._connections.index(connection)
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
        data = pickle.dumps((kind, content))
        try:
            with lock:
                connection.send_bytes(data)
        except OSError:
            os._exit(1)  # the driver has gone, and there is nobody to tell

    def receive() -> Any:
        return pickle.loads(connection.recv_bytes())

    def beat() -> None:
        while True:
            send("alive")
            time.sleep(HEARTBEAT_S)

    Thread(target=beat, daemon=True).start()
    from nanovllm.features.parallel.group import PeerError, RankGroup

    try:
        port, config, model_config = receive()
        if rank > 0:  # what rank 0 warns of holds for all
            logging.getLogger("nanovllm").setLevel(logging.ERROR)
        group = RankGroup(rank, config.tensor_parallel_size)
        group.join(port)
        from nanovllm.features.parallel.rank_runner import RankRunner

        runner = RankRunner(config, model_config, group, receive_bits=receive)
        send("done")
        while True:
            method, *arguments = receive()
            send("done", getattr(runner, method)(*arguments))
    except PeerError as error:
        send("lost", str(error))
    except BaseException as error:
        is_mistake = isinstance(error, ValueError | FileNotFoundError)
        send("failed", error if is_mistake else f"{type(error).__name__}: {error}")
    os._exit(0)
