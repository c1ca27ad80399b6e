"""How the engine reads a checkpoint or a GGUF file: the report of `nanovllm check-model`. No weight is loaded.

Each part of the report is a function that gives rows (name, value). A part that cannot be read is an error in the
report, and the others are read all the same.
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.features.chat_template.files import file_of
from nanovllm.features.chat_template.messages import STRING, as_parts
from nanovllm.features.chat_template.reads import Reads, reads_of
from nanovllm.features.chat_template.renderer import render
from nanovllm.features.reasoning.think import Reasoning
from nanovllm.features.tool_calls.parse import format_of
from nanovllm.files.end_tokens import described
from nanovllm.files.hub import resolve_checkpoint, resolve_tokenizer
from nanovllm.files.tokenizer import TOKENIZER_FILES, load_tokenizer, with_eos
from nanovllm.prompts import tokenize
from nanovllm.tools.screen import Screen
from nanovllm.wings import use_processors_template

if TYPE_CHECKING:
    from nanovllm.files.tensor_files import WeightFiles

Rows = list[tuple[str, str]]
NAME_WIDTH = 15
PROGRAM_BYTES = 450_000_000  # beside weights, KV pool and activations: PyTorch, a tokenizer of 150,000 tokens
FEW_TOKENS = 4096  # for which there must be room
UNREADABLE = (ValueError, OSError, RuntimeError, MemoryError, ModuleNotFoundError)


@dataclass
class Report:
    """rows: what was found. warnings: what the engine says of it. errors: why it cannot be used."""

    rows: Rows = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def attempt(self, part: str, read: Callable[[], Any]) -> Any:
        """What read() gives; None, with an error in the report, if it fails."""
        try:
            return read()
        except UNREADABLE as error:
            self.errors.append(f"{part}: {error}")
            return None

    def add(self, part: str, read: Callable[[], Rows]) -> None:
        self.rows += self.attempt(part, read) or []


def run_check_model(config: EngineConfig) -> int:
    """0: the engine can use it, perhaps with warnings. 1: it cannot."""
    report = check_model(config)
    draw(report)
    return 1 if report.errors else 0


def check_model(config: EngineConfig) -> Report:
    """What the engine finds. config: its options count that choose files or say how they are read and how much fits.

    Raises ValueError or FileNotFoundError where there is no such model.
    """
    directory = resolve_checkpoint(config.model, config.revision, config.load_format)
    report = Report(rows=[("model", str(directory))])
    with warnings_in(report.warnings):
        model = report.attempt(
            "configuration",
            lambda: ModelConfig.from_directory(directory, config.hf_overrides, config.generation_config, config),
        )
        if model is not None:
            report.add("configuration", lambda: model_rows(model))
            report.add("weights", lambda: weight_rows(directory, model, config))
            if model.images is not None:
                report.add("images", lambda: tower_rows(directory, model))
        place = report.attempt(
            "tokenizer", lambda: resolve_tokenizer(config.tokenizer) if config.tokenizer else directory
        )
        tokenizer = None if place is None else report.attempt("tokenizer", lambda: load_tokenizer(place))
        if tokenizer is not None and model is not None:
            report.attempt("chat template", lambda: use_processors_template(tokenizer, place, model))
        if tokenizer is not None:
            report.add("tokenizer", lambda: tokenizer_rows(tokenizer, place))
        if tokenizer is not None and model is not None and model.images is not None:
            report.add("images", lambda: image_rows(directory, model, tokenizer, report.warnings))
        if tokenizer is not None and model is not None and model.pooling is None:
            report.add("end tokens", lambda: end_token_rows(model, tokenizer, directory, config.hf_overrides))
        if tokenizer is not None and (model is None or model.pooling is None):
            sees_images = model is not None and model.images is not None
            report.add("chat template", lambda: template_rows(tokenizer, place, sees_images, report.warnings))
    return report


@contextmanager
def warnings_in(found: list[str]) -> Iterator[None]:
    """What the engine warns of meanwhile is put into the list, and not written anywhere else."""
    logger = logging.getLogger("nanovllm")
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    propagates = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates


# -- the parts --------------------------------------------------------------------------------------------------------


def model_rows(model: ModelConfig) -> Rows:
    """Architecture, dtype, context, defaults of sampling."""
    sizes = f"{model.num_hidden_layers} layers, {model.hidden_size:,} wide, {model.vocab_size:,} tokens"
    tied = ", embeddings and output head are one matrix" if model.tie_word_embeddings else ""
    rows = [("architecture", f"{model.architecture}: {sizes}{tied}")]
    if model.expert_layers:
        experts = f"{model.num_experts_per_tok} of {model.num_experts} for a token"
        rows.append(("experts", f"in {len(model.expert_layers)} layers, {experts}"))
    if model.num_kv_layers != model.num_hidden_layers:
        rows.append(("hybrid", f"{model.num_kv_layers} layers with attention, the others keep a state of fixed size"))
    if model.windows:
        rows.append(("windows", f"{max(model.windows.values()):,} tokens at most, in {len(model.windows)} layers"))
    if model.images is not None:
        rows.append(
            ("images", f"{model.images.architecture}: a prompt may have some, token {model.images.image_token_id}")
        )
    if model.pooling is not None:
        rows.append(("pooling", f"{model.pooling.task}: it gives no text"))
    rows += [("dtype", model.dtype), ("context", f"{model.max_position_embeddings:,} tokens")]
    defaults = ", ".join(f"{name} {value}" for name, value in model.generation.items())
    return [*rows, ("sampling", defaults or "no defaults in the files")]


def tower_rows(directory: Path, model: ModelConfig) -> Rows:
    """What looks at images. Raises ValueError for files that are not this model's."""
    from nanovllm.features.images.tower import build_tower, check_tower

    assert model.images is not None
    places = dict(build_tower(model.images).named_parameters(prefix="model"))
    check_tower(directory, places, model.published)
    return [("tower", f"{sum(place.numel() for place in places.values()) / 1e6:,.1f} million")]


def image_rows(directory: Path, model: ModelConfig, tokenizer: Any, warnings: list[str]) -> Rows:
    """What an image becomes. Raises ValueError for an image processor that is not there, or does not fit the tower."""
    if find_spec("PIL") is None:
        warnings.append("images need Pillow: pip install 'nanovllm[images]'")
        return []
    from nanovllm.features.images.processor import ImageProcessor
    from nanovllm.features.images.sources import Sources, pil

    assert model.images is not None
    processor = ImageProcessor(directory, model.images, tokenizer, options={}, sources=Sources())
    image = processor.prepare(pil().new("RGB", (640, 480), (200, 30, 10)), {})
    return [("an image", f"640 x 480 pixels become {image.num_placeholders:,} placeholders")]


def weight_rows(directory: Path, model: ModelConfig, config: EngineConfig) -> Rows:
    """How the files hold the weights, and what memory they need.

    Raises ValueError for files that are not this model's.
    """
    import torch

    from nanovllm.files.tensor_files import WeightFiles, as_stored
    from nanovllm.worker.layers import building
    from nanovllm.worker.model import Decoder

    is_dummy = config.load_format == "dummy"
    model = model if is_dummy else as_stored(directory, model)
    with building(torch.float32, torch.device("meta")):
        decoder = Decoder(model)
    whole = dict(decoder.checkpoint_tensors())
    files = WeightFiles(directory, model, whole, is_dummy)
    numbers = sum(tensor.numel() for tensor in whole.values())
    stored = list(files.stored.values())
    if directory.is_file():  # what it holds, and not what the engine makes of that
        from nanovllm.files.gguf_file import GGUFFile

        stored = [tensor.type.name for tensor in GGUFFile(directory).tensors.values()]
    held = ", ".join(f"{count} in {name}" for name, count in Counter(stored).most_common())
    rows = [("weights", f"{numbers / 1e6:,.1f} million: {held}")]
    if files.are_published:
        linear = [name for _, names in decoder.linear_weights() for name in names]
        rows += published_rows(files, model.published, linear)
    return [*rows, *memory_rows(files, model, config)]


def published_rows(files: "WeightFiles", published: Any, linear: list[str]) -> Rows:
    """How others have quantized the weights, and which of linear layers they have left out."""
    from nanovllm.files.tensor_files import FLOAT_BYTES

    rows = [("quantized", str(published))]
    if published.activations:
        rows.append(("  activations", f"the files ask for {published.activations}"))
    left_out = [re.sub(r"\.\d+\.", ".*.", name) for name in linear if files.stored[name] in FLOAT_BYTES]
    told = [name if count == 1 else f"{name} ({count})" for name, count in Counter(left_out).items()]
    return [*rows, ("  left out", ", ".join(told) or "no linear layer")]


def memory_rows(files: "WeightFiles", model: ModelConfig, config: EngineConfig) -> Rows:
    """What an engine would take at most, and whether this machine has it."""
    import torch

    from nanovllm.files.system import available_bytes
    from nanovllm.worker.cpu.memory import free_bytes
    from nanovllm.worker.kv_cache import num_blocks_for_pool
    from nanovllm.worker.model_runner import DEFAULT_BLOCK_SIZE

    dtype = getattr(torch, model.dtype)
    if torch.cuda.is_available():
        return [
            ("memory", f"{files.weight_bytes(dtype, None, on_gpu=True) / 1e9:.1f} GB of the GPU's, and the KV pool")
        ]
    ways = {"as it is": None} if files.are_quantized else {model.dtype: None, "int8": "int8", "int4": "int4"}
    row_bytes = (3 * model.intermediate_size + 8 * model.hidden_size) * dtype.itemsize  # of one token in a step
    beside = PROGRAM_BYTES + config.max_num_batched_tokens * row_bytes
    needed = {way: files.weight_bytes(dtype, bits) + files.table_bytes(bits) + beside for way, bits in ways.items()}
    free = free_bytes(config.gpu_memory_utilization)
    states: Rows = []
    if model.hybrid is not None:
        from nanovllm.features.hybrid.state_pool import StatePool

        pool = StatePool(config, model, dtype, torch.device("cpu"), free)
        size = f"{pool.slot_bytes / 1e6:,.1f} MB a sequence or snapshot, at most {pool.slots.num_bytes / 1e9:.1f} GB"
        states.append(("states", f"{size} here"))
        free -= pool.slots.num_bytes
    num_blocks = num_blocks_for_pool(
        config,
        model,
        block_size=DEFAULT_BLOCK_SIZE,
        itemsize=dtype.itemsize,
        max_model_len=model.max_position_embeddings,
        free_bytes=free,
    )
    token_bytes = model.kv_bytes_per_token(dtype.itemsize)
    pool_bytes = num_blocks * DEFAULT_BLOCK_SIZE * token_bytes
    available = available_bytes()
    fitting = [way for way, num_bytes in needed.items() if num_bytes + token_bytes * FEW_TOKENS < available]
    verdict = f"it fits ({', '.join(fitting)})" if fitting else "it does not fit"
    each = ", ".join(f"{way} {num_bytes / 1e9:.1f} GB" for way, num_bytes in needed.items())
    return [
        ("memory", f"{each}, and what is used of the KV pool"),
        ("KV pool", f"{token_bytes / 1e3:,.1f} KB a token, at most {pool_bytes / 1e9:.1f} GB here"),
        *states,
        ("", f"{available / 1e9:.1f} GB are available: {verdict}"),
    ]


def tokenizer_rows(tokenizer: Any, place: Path) -> Rows:
    """Its kind, how it splits a text, and whether it begins one with a BOS."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    kind = type(tokenizer).__name__ if backend is None else type(backend.model).__name__
    found = place.name if place.is_file() else ", ".join(n for n in TOKENIZER_FILES if (place / n).is_file())
    rows = [("tokenizer", f"{kind}, {len(tokenizer):,} tokens, from {found}")]
    rows += [("  pre-tokenizer", pre_tokenizer_of(backend, place))]
    normalizer = getattr(backend, "normalizer", None)
    rows += [] if normalizer is None else [("  normalizer", shortened(json.loads(normalizer.__getstate__())))]
    return [*rows, ("  BOS", bos_rule(tokenizer))]


def pre_tokenizer_of(backend: Any, place: Path) -> str:
    """What a GGUF file calls it; and the steps that were made of it."""
    named = ""
    if place.is_file():
        from nanovllm.files.gguf_file import GGUFFile

        metadata = GGUFFile(place).metadata
        model, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
        named = f"{pre or 'not named'} (tokenizer.ggml.pre, of a {model} vocabulary): "
    steps = getattr(backend, "pre_tokenizer", None)
    if steps is None:
        return f"{named}none: a text is not split before it is merged"
    return named + shortened(json.loads(steps.__getstate__()))


def shortened(step: Any) -> str:
    """A tokenizer's step or steps, by their types and patterns."""
    steps = step.get("pretokenizers") or step.get("normalizers") or [step]
    texts = []
    for each in steps:
        pattern = each.get("pattern")
        text = next(iter(pattern.values())) if isinstance(pattern, dict) else ""
        texts.append(each["type"] + (f" {text!r}" if text else ""))
    return ", ".join(texts)


def bos_rule(tokenizer: Any) -> str:
    bos, text = tokenizer.bos_token_id, tokenizer.bos_token
    if bos is None:
        return "there is none"
    is_added = tokenize(tokenizer, "a")[:1] == [bos]
    return f"{bos} {text!r} is {'added to a prompt' if is_added else 'not added to a prompt'}"


def end_token_rows(model: ModelConfig, tokenizer: Any, directory: Path, overrides: dict[str, Any] | None) -> Rows:
    """Who names which. A warning where nobody does."""
    found = described(with_eos(model, tokenizer, directory, overrides).end_tokens, tokenizer)
    return [("end tokens", "\n".join(found) or "none")]


def template_rows(tokenizer: Any, place: Path, sees_images: bool, warnings: list[str]) -> Rows:
    """Where the chat template is, and what it reads and shows, by what it makes of short conversations.

    warnings: where it leaves something out, they say so.
    """
    if not tokenizer.chat_template:
        return [("chat template", "none: chats need chat_template")]
    template = tokenizer.get_chat_template(None, None)
    special = tokenizer.special_tokens_map
    reads = reads_of(template, special, {})
    if not reads.content.get("user"):
        warnings.append("the chat template shows nothing of a user's words, whether they are a text or parts of one")
    if not reads.content.get("system"):
        warnings.append("the chat template does not show system messages")
    prompt = rendered(template, special, reads)
    ids = tokenize(tokenizer, prompt, add_special_tokens=False)
    num_bos = next((i for i, token_id in enumerate(ids) if token_id != tokenizer.bos_token_id), len(ids))
    if num_bos > 1:
        warnings.append(f"the chat template writes {num_bos} BOS")
    found = file_of(template, place, sees_images)
    rows = [("chat template", f"{found}: {'begins with a BOS' if num_bos else 'writes no BOS'}")]
    if isinstance(tokenizer.chat_template, dict):
        rows.append(("  names", ", ".join(tokenizer.chat_template)))
    return [
        *rows,
        *((f"  {name}", value) for name, value in reads.describe().items()),
        ("  tool format", format_of(template, special)),
        ("  reasoning", reasoning_of(template, prompt)),
    ]


def rendered(template: str, special: dict[str, Any], reads: Reads) -> str:
    """The prompt of a chat of one word; "" where the template does not take it."""
    content: Any = "x" if STRING in reads.forms("user") else as_parts("x")
    try:
        options = special | {"tools": None, "add_generation_prompt": True}
        return render(template, [{"role": "user", "content": content}], options)
    except ValueError:
        return ""


def reasoning_of(template: str, prompt: str) -> str:
    found = Reasoning.of(None, template, prompt)
    if found is None:
        return "none is looked for in an answer"
    begins = "the prompt has opened it" if found.is_open else "an answer may begin with it"
    return f"{found.opening} ... {found.closing}; {begins}"


# -- on the screen ----------------------------------------------------------------------------------------------------


def draw(report: Report) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=NAME_WIDTH)
    table.add_column(overflow="fold")
    for name, value in report.rows:
        table.add_row(Text(name), Text(value))
    for title, texts in (("warning", report.warnings), ("error", report.errors)):
        for text in dict.fromkeys(texts):
            table.add_row(Text(title), Text(text))
    if not report.warnings and not report.errors:
        table.add_row(Text("warnings"), Text("none"))
    Screen().print(table)
