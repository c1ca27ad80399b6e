"""start_profile() and stop_profile(): a trace of what PyTorch does, for chrome://tracing or Perfetto.

Only what PyTorch sees is in it: with the C kernels most of a step on a CPU is a gap. LLM(enforce_eager=True) shows all.
examples/profile_step.py tells the parts of a step from each other without a trace.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import names_checked
from nanovllm.checks.values import check_choice, shorten

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine


@names_checked("ProfilerConfig")
@dataclass(frozen=True)
class ProfilerConfig:
    """LLM(profiler_config=...). torch_profiler_dir: where traces are written; it is made."""

    profiler: str = "torch"
    torch_profiler_dir: str = ""

    def __post_init__(self) -> None:
        check_choice("profiler", self.profiler, ("torch",))
        if not isinstance(self.torch_profiler_dir, str) or not self.torch_profiler_dir:
            raise ValueError(f"torch_profiler_dir must be a directory, found {shorten(self.torch_profiler_dir)}")


class Profile:
    """One recording, from its making to stop()."""

    def __init__(self, directory: Path, name: str) -> None:
        from torch.profiler import profile

        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / name
        self._recording: Any = profile()
        self._recording.start()

    @classmethod
    def of(cls, engine: "LLMEngine", prefix: str | None) -> "Profile":
        """Raises ValueError."""
        config = engine.config
        where: ProfilerConfig | None = config.profiler_config  # pyrefly: ignore[bad-assignment]
        if where is None:
            example = 'profiler_config={"profiler": "torch", "torch_profiler_dir": "./profile"}'
            raise ValueError(f"start_profile() needs to know where its trace goes: LLM({example})")
        if config.tensor_parallel_size > 1:
            raise ValueError(f"a profile is of one process; tensor_parallel_size is {config.tensor_parallel_size}")
        if prefix is not None and (not isinstance(prefix, str) or Path(prefix).name != prefix):
            raise ValueError(f"profile_prefix must be the beginning of a file's name, found {shorten(prefix)}")
        name = f"{prefix or 'rank0'}.{time.time_ns()}.pt.trace.json"
        return cls(Path(where.torch_profiler_dir), name)

    def stop(self) -> None:
        self._recording.stop()
        self._recording.export_chrome_trace(str(self.path))
