"""Twenty questions, answered greedily with the weights as they are, in int8, in int4, and in int4 once more after the
dimensions of the model were renumbered, which changes no answer of the original.

    python -m chapters.ch12_fewer_bits.questions [MODEL]
"""

import argparse
import shutil
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from safetensors.torch import save_file

from chapters.ch12_fewer_bits.rounding import Model
from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Japan?",
    "Which planet is the largest?",
    "Who wrote Romeo and Juliet?",
    "How many legs does a spider have?",
    "What is 7 plus 5?",
    "What is the opposite of hot?",
    "Which gas do plants take in?",
    "What do bees make?",
    "What is the boiling point of water?",
    "How many days does a week have?",
    "Which ocean is the largest?",
    "What color is a ripe banana?",
    "Who painted the Mona Lisa?",
    "What is the freezing point of water?",
    "Which animal barks?",
    "What is the plural of mouse?",
    "In which country are the pyramids of Giza?",
    "What is the chemical symbol of gold?",
    "Which season follows winter?",
)


def answers(model: str, quantization: str | None, params: SamplingParams) -> list[str]:
    llm = LLM(model, quantization=quantization, max_model_len=128, max_num_seqs=len(QUESTIONS))
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    return [" ".join(output.outputs[0].text.split()) for output in outputs]


def save_shuffled(model: str, folder: Path) -> None:
    """The checkpoint with its dimensions renumbered: a different file, the same function."""
    for path in Path(model).iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copy(path, folder / path.name)
    llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=32, num_gpu_blocks_override=4, block_size=16)
    shuffled = Model(llm)
    shuffled.shuffle()
    dtype = getattr(torch, llm.engine.model_config.dtype)
    tensors = {name: x.to(dtype).contiguous() for name, x in shuffled.decoder.checkpoint_tensors()}
    save_file(tensors, folder / "model.safetensors")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="checkpoint directory (default: the demo model)")
    parser.add_argument("--max-tokens", type=int, default=8)
    args = parser.parse_args(argv)
    if args.max_tokens < 1:
        parser.error(f"--max-tokens must be 1 or more, found {args.max_tokens}")
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    model = model_or_demo(args.model)
    with tempfile.TemporaryDirectory() as folder:
        save_shuffled(model, Path(folder))
        columns = {
            "as it is": answers(model, None, params),
            "int8": answers(model, "int8", params),
            "int4": answers(model, "int4", params),
            "int4, shuffled": answers(folder, "int4", params),
        }
    first, *others = columns.values()
    lines = [f"| question | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for question, original, *rest in zip(QUESTIONS, first, *others, strict=True):
        cells = ("=" if answer == original else answer for answer in rest)
        lines.append(f"| {' | '.join((question, original, *cells))} |")
    counts = [f"{sum(map(str.__eq__, first, columns[name]))} in {name}" for name in list(columns)[1:]]
    lines.append(f"\nOf {len(QUESTIONS)} answers, this many are the same: {', '.join(counts)}.")
    console = Console()
    console.print(Markdown("\n".join(lines))) if console.is_terminal else print("\n".join(lines))


if __name__ == "__main__":
    main()
