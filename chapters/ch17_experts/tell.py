"""What the lab of chapter 17 tells: who is visited, what a grouped product saves, memory and time of a large model."""

import random
import tempfile
from pathlib import Path

import torch

from chapters.ch06_prefill_decode.lab import read_rate
from chapters.ch17_experts import large
from chapters.ch17_experts.chance import expected_met
from chapters.ch17_experts.drawing import draw_visits
from chapters.ch17_experts.sparse import KINDS, NUM_STEPS, busiest_rank, shares_of, text_of, visits_of
from chapters.draw import make_table
from chapters.story import Story, busy
from nanovllm import LLM
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.quantization.formats import BYTES_PER_NUMBER

TEXT_LEN = 240
NUMS_RANKS = (2, 4, 8)
READ_RATE = 100e9  # bytes a second that a laptop reads from memory
BYTES = {"bf16": 2.0, "int8": BYTES_PER_NUMBER["Q8_0"], "int4": BYTES_PER_NUMBER["int4"]}


def texts_of_all_kinds(length: int = TEXT_LEN) -> dict[str, str]:
    rng = random.Random(1)
    return {kind: text_of(kind, length, rng) for kind in KINDS}


def tell_visits(story: Story, llm: LLM) -> dict[str, torch.Tensor]:
    """Returns the shares of each kind of text."""
    story.part("Which experts a text visits")
    config = llm.engine.model_config
    story.say(
        f"A model of {config.num_hidden_layers} layers with {config.num_experts} experts each, of which a token meets "
        f"{config.num_experts_per_tok}. It was trained just now, for {NUM_STEPS} steps, on sums, prose and code, "
        "letter by letter. Here are three texts of these kinds, which it has not seen:"
    )
    texts = texts_of_all_kinds()
    table = make_table("kind", "begins", first=8)
    table.columns[1].justify = "left"
    for kind, text in texts.items():
        table.add_row(kind, text[:60])
    story.show(table)
    story.say("What percentage of the choices of all tokens of a text fell on each expert?")
    visits = {kind: visits_of(llm, [text]) for kind, text in texts.items()}
    shares = {kind: shares_of(found) for kind, found in visits.items()}
    story.show(draw_visits(shares))
    story.say(
        "These are the same choices in the first layer and in the last, by kind of character, in all three texts:"
    )
    letters, chosen = "".join(texts.values()), torch.cat(list(visits.values()), dim=1)
    ends = (0, len(chosen) - 1)
    found = {name: shares_of(chosen[list(ends)][:, rows]) for name, rows in rows_of(letters).items()}
    story.show(draw_visits(found, ends))
    concentration = ", ".join(f"{name} {100 * top_two(share[0]):.0f} %" for name, share in found.items())
    story.say("How many of its choices in the first layer does each kind give to the two experts that it chooses most?")
    story.say(f"{concentration}", measured=True)
    return shares


def top_two(shares: torch.Tensor) -> float:
    """The share of all choices that the two most popular experts get together. shares: [num_experts]."""
    return float(shares.topk(2).values.sum())


def rows_of(letters: str) -> dict[str, list[int]]:
    """The rows of digits, letters, spaces and of what is left."""
    kinds = {"digits": str.isdigit, "letters": str.isalpha, "spaces": str.isspace}
    found = {name: [i for i, letter in enumerate(letters) if is_kind(letter)] for name, is_kind in kinds.items()}
    return found | {"signs": sorted(set(range(len(letters))) - {i for rows in found.values() for i in rows})}


def tell_balance(story: Story, llm: LLM, shares: dict[str, torch.Tensor]) -> None:
    story.part("Who waits for a popular expert")
    story.say(
        "If the experts of each layer are spread over ranks, neighbors together, all ranks wait for the one with the "
        "most rows. The table shows the time of a step as a multiple of what it would be if all ranks had equally many "
        "rows; the last column is this engine, in which every rank holds a slice of every expert."
    )
    batches = {f"{kind} only": share for kind, share in shares.items()}
    batches["all three"] = shares_of(visits_of(llm, list(texts_of_all_kinds().values())))
    table = make_table("a batch of", *(f"{n} ranks" for n in NUMS_RANKS), "slices", "", width=9, first=12)
    for name, found in batches.items():
        table.add_row(name, *(f"{busiest_rank(found, n):.2f}" for n in NUMS_RANKS), "1.00", "(measured)")
    story.show(table)


def tell_products(story: Story) -> None:
    story.part("One batch, many weights")
    num_experts, num_chosen, mib = large.NUM_EXPERTS, large.NUM_CHOSEN, large.IN_SIZE * large.OUT_SIZE * 2 / 2**20
    story.say(
        f"{num_experts} experts of {large.IN_SIZE} x {large.OUT_SIZE} numbers in bf16, {mib:g} MiB each. Each row "
        f"meets {num_chosen} of them, at random. The table shows milliseconds on one core: if every row is multiplied "
        "by itself; if the rows of an expert are multiplied together, expert after expert; and in one pass of the "
        "engine's kernel."
    )
    from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
    from nanovllm.worker.kernels import TORCH_KERNELS

    kernels = load_cpu_kernels(large_config(), torch.bfloat16) or TORCH_KERNELS
    nums_rows = (1, 2, 4, 8, 16, 32, 64, 128)
    table = make_table("rows", "pairs", "met", "expected", *large.WAYS, "ms a row", "", width=8, first=5)
    for num_rows, (num_met, best) in zip(nums_rows, large.time_products(kernels, nums_rows, 6), strict=True):
        numbers = num_rows * num_chosen, num_met, expected_met(num_rows, num_experts, num_chosen)
        times = (f"{1e3 * seconds:.1f}" for seconds in best.values())
        counts = (f"{number:.0f}" for number in (num_rows, *numbers))
        table.add_row(*counts, *times, f"{1e3 * best['one pass'] / num_rows:.2f}", "(measured)")
    story.show(table)


def large_config() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(large.QWEN3_30B_A3B, "utf-8")
        return ModelConfig.from_directory(Path(folder))


def tell_large(story: Story) -> None:
    story.part("What memory holds, and what a token reads")
    config, sizes = large_config(), large.sizes_of(large_config())
    story.say(
        f"Qwen3-30B-A3B: {config.num_hidden_layers} layers, {config.num_experts} experts each, of which a token meets "
        f"{config.num_experts_per_tok}. The table shows billions of weights, and the GB (10^9 bytes) that they take."
    )
    experts = sizes.num_layers * sizes.num_experts * sizes.expert
    chosen = sizes.num_layers * sizes.num_chosen * sizes.expert
    table = make_table("", "weights", *BYTES, width=8, first=40)
    for name, number in (
        ("all: what memory holds", sizes.total),
        ("  experts", experts),
        ("  attention, norms, routers, output", sizes.shared),
        ("  embedding", sizes.embedding),
        ("a token meets", sizes.shared + chosen + sizes.embedding),
        ("  8 experts a layer", chosen),
        ("  reads: without the embedding", sizes.shared + chosen),
    ):
        table.add_row(name, f"{number / 1e9:.2f}", *(f"{number * b / 1e9:.2f}" for b in BYTES.values()))
    story.show(table)
    with busy("measuring how fast this machine reads"):
        rate = read_rate(torch.device("cpu"))
    story.say(
        "Suppose that a step takes only as long as reading its weights, on a machine that reads "
        f"{READ_RATE / 1e9:.0f} GB/s. The next table shows the experts that n rows meet in a layer, the billions of "
        "weights that a step reads, and the tokens a second of all rows together; the last column is a dense model "
        "with as many weights."
    )
    story.say(
        f"This machine reads {rate / 1e9:.1f} GB/s from memory, with the threads that it has: multiply by "
        f"{rate / READ_RATE:.2f}.",
        measured=True,
    )
    table = make_table("rows", "met", "weights", *BYTES, "dense, int4", width=9, first=5)
    for num_rows in (1, 2, 4, 8, 16, 32, 64, 256):
        numbers, dense = sizes.met(num_rows), sizes.total - sizes.embedding
        met = f"{expected_met(num_rows, sizes.num_experts, sizes.num_chosen):.0f}", f"{numbers / 1e9:.1f}"
        read = [*(numbers * b for b in BYTES.values()), dense * BYTES["int4"]]
        table.add_row(str(num_rows), *met, *(f"{num_rows * READ_RATE / size:.1f}" for size in read))
    story.show(table)
