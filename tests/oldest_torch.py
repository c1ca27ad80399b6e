"""The oldest torch that pyproject.toml admits runs the engine: python tests/oldest_torch.py

It is installed into a new environment, with the newest of all else that the package needs. Where it cannot be had, or
where the disk has no room for it (wheels for Linux bring CUDA), this says so and is no failure. Exit code: 1 if it
failed. With --here: what is run there, with the torch that is installed.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from every_python import call

ROOT = Path(__file__).parent.parent
ROOM_BYTES = 12e9
PATIENCE_S = 1200  # for gigabytes, or a busy machine
PROMPT, NUM_TOKENS = [5, 6, 7, 8, 9, 10], 12


def main() -> int:
    if sys.argv[1:] == ["--here"]:
        answer_as_transformers()
        return 0
    oldest, *others = packages()
    outcome = try_out(oldest, others)
    print(f"{oldest}: {outcome}", flush=True)
    return int(outcome.startswith("failed"))


def packages() -> list[str]:
    """torch, the oldest one, and what else the package needs."""
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    torch, *others = re.findall(r'^ +"(.*?)"', listed[1], re.MULTILINE)
    lower = re.fullmatch(r"torch>=([0-9.]+),<[0-9.]+", torch)
    assert lower is not None, torch
    return [f"torch=={lower[1]}.*", *others]


def try_out(oldest: str, others: list[str]) -> str:
    """What became of it: "passed", "skipped: ..." or "failed: ..."."""
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < ROOM_BYTES:
            return f"skipped: it takes up to {ROOM_BYTES / 1e9:.0f} GB of {folder}, which has not as much"
        code, said = call(sys.executable, "-m", "venv", folder)
        if code:
            return f"skipped: this Python makes no environment ({said})"
        own = str(Path(folder, "bin", "python"))
        install = (own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        code, said = call(*install, oldest, *others, timeout_s=PATIENCE_S)
        if code:
            return f"skipped: it cannot be installed here ({said})"
        os.environ["PYTHONPATH"] = str(ROOT)
        code, said = call(own, str(Path(__file__)), "--here", last_line=False, timeout_s=PATIENCE_S)
        return f"failed: {said}" if code else "passed"


def answer_as_transformers() -> None:
    """Greedy answers are transformers' in float32; sampled ones, and those of fewer bits, can be repeated."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm import LLM, SamplingParams
    from tests.checkpoints import make_checkpoint

    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True)

    def answers(llm: LLM) -> list[list[int]]:
        outputs = llm.generate([PROMPT, PROMPT], [greedy, drawn], use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    for variant in ("llama", "qwen3-moe", "qwen3.5"):
        with tempfile.TemporaryDirectory() as folder:
            path = make_checkpoint(Path(folder), variant)
            llm = LLM(str(path), dtype="float32", max_model_len=64)
            token_ids = answers(llm)[0]
            model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
            with torch.inference_mode():
                logits = model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1]
            assert token_ids == logits.argmax(-1).tolist(), variant
            for options in ({}, {"quantization": "int8"}, {"quantization": "int4"}, {"dtype": "bfloat16"}):
                llm = LLM(str(path), max_model_len=64, **options)
                assert answers(llm) == answers(llm), (variant, options)


if __name__ == "__main__":
    sys.exit(main())
