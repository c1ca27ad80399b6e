"""The wings: what one may do, and who does it, in the order in which they act (chapters/add_a_wing.md).

Every wing is a folder, and every wing can be deleted: a Llama generates the same tokens without any of them. So no file
of the heart imports one at its top. Who stands beside an engine and who reads a request is in the tables below. What is
asked for in one place only is loaded there, by name: a method of vLLM's API, an option, a part of a model, what the
sampler needs. If a folder is gone, all of that is a MissingWing, which names it.

What a wing keeps, and where:

    beside a sequence       SequencePart, in core/sequence.py
    in a step's batch       BatchPart, in worker/batch.py; the sequence's part makes it
    beside the weights      ModelPart, in worker/model.py
    beside the engine       Wing, or something that is made on demand
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.block_manager import BlockManager, broadcast
from nanovllm.core.scheduler import Scheduler, SchedulerOutput

if TYPE_CHECKING:
    from nanovllm.calls import Turns
    from nanovllm.engine import LLMEngine
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.prompts import Asked


class Wing:
    """What stands beside an engine. Each method does nothing unless a wing says otherwise.

    One that also has on_event(event) hears what happens to blocks (BlockManager.on_event).
    """

    def begin_step(self, scheduler: Scheduler) -> None:
        """A step begins. Its work has not been chosen."""

    def propose(self, scheduler: Scheduler) -> dict[int, list[int]]:
        """{seq_id: draft tokens} that the step is to check."""
        return {}

    def after_schedule(self, output: SchedulerOutput) -> None:
        """The step's work has been chosen, and nothing of it computed."""

    def observe(self, output: SchedulerOutput) -> None:
        """The step has been computed, and its sequences have their tokens."""

    def reset(self) -> None:
        """The prefix cache has been emptied, and what is kept outside the pool is to go, too."""


# Beside an engine, if its options ask for it: a module with prepare(engine), which checks options before any weight is
# read, and attach(engine, prepared), which makes the Wing once there is a KV pool. prepared: what prepare() returned.
BESIDE_AN_ENGINE = {
    "speculation": ("features.speculation.draft_model", lambda config: config.speculative_config is not None),
    "tiers": ("features.tiers.make", lambda config: config.prefix_cache_dir is not None or config.cpu_cache_bytes > 0),
    "images": (
        "features.images.requests",
        lambda config: config.tower_quantization is not None or bool(config.mm_processor_kwargs),
    ),
    "block_times": ("features.cache_reports.block_times", lambda config: config.kv_cache_metrics),
    # The last one: those who follow events may look at what the others have noted.
    "kv_events": (
        "features.cache_reports.kv_events",
        lambda config: config.kv_events_config is not None and config.kv_events_config.enable_kv_cache_events,
    ),
}

# Made when it is first asked for, as an attribute of the engine: a module with make(engine).
ON_DEMAND = {
    "known_adapters": "features.lora.registry",
    "grammars": "features.grammar.grammar",
    "image_processor": "features.images.requests",
}

# Beside the weights, once they are needed: a module with make_part(model_runner), which makes the ModelPart.
PARTS = {"adapters": "features.lora.slots", "tower": "features.images.tower"}

# Reads its part of a request: a module with read(engine, asked), which raises ValueError. The most work comes last.
READERS = {
    "features.lora.registry": lambda engine, asked: asked.lora_request is not None,
    "features.logits_processors.requests": lambda engine, asked: (
        asked.params.bad_words
        or asked.params.repetition_penalty != 1.0
        or asked.params.logits_processors
        or engine.config.logits_processors
    ),
    "features.images.requests": lambda engine, asked: asked.image_keys,
}


def prepare(engine: "LLMEngine") -> dict[str, Any]:
    """{name of each Wing that the engine's options ask for: what its prepare() returns}. Raises ValueError."""
    wanted = {name: module for name, (module, is_wanted) in BESIDE_AN_ENGINE.items() if is_wanted(engine.config)}
    return {name: load(module).prepare(engine) for name, module in wanted.items()}


def attach(engine: "LLMEngine", prepared: dict[str, Any]) -> None:
    """Fill engine.wings, in the order of the table. Those that have on_event hear what the block manager does."""
    for name, before in prepared.items():
        engine.wings[name] = load(BESIDE_AN_ENGINE[name][0]).attach(engine, before)
    listeners = [getattr(wing, "on_event", None) for wing in engine.wings.values()]
    engine.block_manager.on_event = broadcast(*listeners)


def read_request(engine: "LLMEngine", asked: "Asked") -> None:
    """Let each wing check its part of a request, and add to it what its sequences will carry. Raises ValueError."""
    for module, is_asked in READERS.items():
        if is_asked(engine, asked):
            load(module).read(engine, asked)


# -- asked for in one place each ------------------------------------------------------------------------------------


def for_this_gpu(model_config: ModelConfig, config: EngineConfig, directory: Path) -> ModelConfig:
    """The configuration; if there is a GPU, with a dtype that it computes in."""
    import torch  # whoever reads a mere configuration needs none

    if not torch.cuda.is_available():
        return model_config
    return load("worker.cuda.dtypes").with_dtype(model_config, config, directory)


def make_runner(config: EngineConfig, model_config: ModelConfig) -> Any:
    """The model runner, or the one object that stands for those of several processes."""
    if config.tensor_parallel_size > 1:
        return load("features.parallel.ranks").ParallelRunner(config, model_config)
    from nanovllm.worker.model_runner import ModelRunner

    return ModelRunner(config, model_config)


def make_turns(engine: "LLMEngine") -> "Turns":
    """When calls of an LLM may use its engine."""
    if not (PACKAGE / "features/callers").exists():
        from nanovllm.calls import Turns

        return Turns()
    return load("features.callers.shared_turns").SharedTurns(engine)


def make_block_manager(pool: Any, **options: Any) -> BlockManager:
    """pool: the KVPool that a model runner has prepared. options: of BlockManager."""
    snapshots = None
    if pool.states is not None:
        snapshots = load("core.snapshots.cache").SnapshotCache(
            max_running=pool.states.max_running,
            max_snapshots=pool.states.max_snapshots,
            state_class=load("features.hybrid.batch_states").PackedState,
        )
    return BlockManager(pool.num_blocks, pool.block_size, snapshots=snapshots, **options)


def use_processors_template(tokenizer: Any, place: Path, model_config: ModelConfig) -> None:
    """A model that sees images is used with a processor, whose chat template comes before its tokenizer's."""
    if model_config.images is not None:
        load("features.chat_template.files").take_processors_template(tokenizer, place)


def largest_image(engine: "LLMEngine") -> "PromptImages | None":
    """For the step by which a GPU's memory is measured, if the model sees images."""
    if engine.model_config.images is None or not engine.model_runner.measures_memory:
        return None
    return load("features.images.requests").largest_image(engine)


# -- a folder that is gone ------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parent
# Beside those in features/.
FOLDERS = ("serving", "jobs", "tools", "compat", "core/tiers", "core/snapshots", "worker/cuda")


class MissingWing(ModuleNotFoundError, ValueError):
    """Something asks for a wing that has been deleted."""


def load(module: str) -> ModuleType:
    """A module of a wing, named from within this package. Raises MissingWing, as any import of it (see below)."""
    return import_module(f"nanovllm.{module}")


class _MissingWings:
    """Asked where Python finds no module: is it one of a wing that is gone?"""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        first, _, rest = name.partition(".")
        if first != PACKAGE.name:
            return None
        parts = rest.split(".")
        folder = "/".join(parts[:2]) if parts[0] in ("features", "core", "worker") else parts[0]
        is_wing = folder in FOLDERS or folder.startswith("features")
        if is_wing and not (PACKAGE / folder).exists():
            what = f"this needs nanovllm/{folder}/, which is not there"
            raise MissingWing(f"{what}: put that folder back, or leave out what asks for it", name=name)
        return None


sys.meta_path.append(_MissingWings)
