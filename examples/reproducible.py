"""The same question in ten ways, and one answer: a row's bits depend on nothing but the row (chapter 10).

    python examples/reproducible.py [MODEL] [--dtype float32] [--quantization int8] [--enforce-eager] [--compare]

One question about a long text: alone, in company, in chunks, cached, preempted, drafted, and so on. A digest covers all
tokens of the answer and the log probabilities of the five best tokens at each of them, to the last bit. Prints a digest
for each way. The exit code is 1 if one differs from the first.

The engine promises this where its C kernels compute, on a CPU. --enforce-eager: PyTorch computes, and promises nothing.
--compare: how many tokens and bits of the answer change between alone and in a batch of eight, here, in transformers,
and in vLLM if this Python has it.
"""

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import xxhash
from measuring import arguments, table
from quickstart import FIRST_QUESTIONS, GUIDE, MORE_QUESTIONS
from rich.console import Console
from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

MAX_GUIDE, MAX_LEN = 640, 800  # tokens of the text, and of a sequence
NUM_OUTPUT, NUM_LOGPROBS = 32, 5
CHUNK = 64  # tokens of a step, where the prompt is cut
NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
PARAMS: dict[str, Any] = dict(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, logprobs=NUM_LOGPROBS)

Way = tuple[str, str, list[str]]  # its name, what happened, a digest for each sample
Answer = tuple[list[int], list[float]]  # tokens, and the log probability of each


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or float16")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--enforce-eager", action="store_true", help="plain PyTorch, which promises nothing")
    parser.add_argument("--compare", action="store_true", help="the same in transformers, and in vLLM if it is there")
    args = parser.parse_args()
    console, progress, model = Console(), Console(stderr=True), model_or_demo(args.model)

    def load(**options: Any) -> LLM:
        weights = dict(dtype=args.dtype, quantization=args.quantization, enforce_eager=args.enforce_eager)
        return LLM(model, **dict(max_model_len=MAX_LEN, max_num_seqs=8) | weights | options)

    found = Table(title="One question, ten ways", title_justify="left")
    for name in ("way", "what happened", "digest", "same"):
        found.add_column(name, no_wrap=True)
    first, all_same = "", True
    for way, happened, digests in ways(load, progress):
        first = first or digests[0]
        same = all(digest == first for digest in digests)
        all_same = all_same and same
        found.add_row(way, happened, "\n".join(dict.fromkeys(digests)), "yes" if same else "[bold red]no[/]")
    console.print(found)
    if args.compare:
        compare(model, load, console, progress)
    sys.exit(0 if all_same else 1)


def prompts_of(llm: Any) -> list[list[int]]:
    """Eight questions about the text as token ids. The first is the one that is asked in ten ways."""
    encode = llm.get_tokenizer().encode
    text, questions = encode(GUIDE)[:MAX_GUIDE], MORE_QUESTIONS + FIRST_QUESTIONS
    return [text + encode(f"\nVisitor: {q}\nGuide:", add_special_tokens=False) for q in questions]


def ways(load: Callable[..., LLM], progress: Console) -> Iterator[Way]:
    """Three engines: with room for all, with little room, and one that drafts."""
    with progress.status("an engine with room for everything"):
        llm = load()
        question, *others = prompts_of(llm)
        [alone] = ask(llm, [question])
        yield "alone", f"{len(question)} tokens in one step", [digest(alone)]
        [again] = ask(llm, [question], empty=False)
        yield "asked again", f"{again.num_cached_tokens} tokens found cached", [digest(again)]
        yield "the first of eight", "8 rows in a step", [digest(ask(llm, [question, *others])[0])]
        last = ask(llm, [*others, question])[-1]
        yield "the last of eight", f"{last.num_cached_tokens} tokens found cached", [digest(last)]
        [samples] = ask(llm, [question], n=3)
        yield "n=3", "three samples, one prompt", [digest(samples, i) for i in range(3)]
        num_threads = torch.get_num_threads()
        with one_thread():
            yield "one thread", f"instead of {num_threads}", [digest(ask(llm, [question])[0])]
        with busy_processes(num_threads):
            yield "a busy machine", f"{num_threads} endless loops beside it", [digest(ask(llm, [question])[0])]
        del llm
    with progress.status("an engine with little room"):
        length = len(question) + NUM_OUTPUT
        pool = {"block_size": 16, "num_gpu_blocks_override": -(-length // 16) + 5}
        llm = load(max_model_len=length, max_num_batched_tokens=CHUNK, **pool)
        [chunked] = ask(llm, [question])
        yield f"steps of {CHUNK} tokens", f"the prompt in {-(-len(question) // CHUNK)} chunks", [digest(chunked)]
        # Requests without a salt come first. The later one is preempted when both have grown.
        given: list[Any] = [
            others[0][:64],
            {"prompt_token_ids": question, "cache_salt": "none of these blocks is known"},
        ]
        params = [SamplingParams(**PARAMS | {"max_tokens": 64}), SamplingParams(**PARAMS)]
        preempted = llm.generate(given, params, use_tqdm=False)[1]
        happened = f"preemptions: {llm.stats()['num_preemptions']}"
        yield "not enough memory", happened, [digest(preempted)]
        del llm
    with progress.status("an engine that drafts"):
        llm = load(speculative_config=NGRAM)
        [drafted], stats = ask(llm, [question]), llm.stats()
        happened = f"{stats['num_accepted_tokens']} of {stats['num_draft_tokens']} draft tokens accepted"
        yield "with draft tokens", happened, [digest(drafted)]


def ask(llm: Any, prompts: list[list[int]], params: Any = SamplingParams, empty: bool = True, n: int = 1) -> list[Any]:
    """With `empty`, begin without cached blocks."""
    if empty:
        llm.reset_prefix_cache()
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(given, params(**PARAMS, n=n), use_tqdm=False)


def digest(output: Any, sample: int = 0) -> str:
    """A digest of tokens and log probabilities, bit by bit."""
    hashed, completion = xxhash.xxh64(), output.outputs[sample]
    for token_id, entries in zip(completion.token_ids, completion.logprobs, strict=True):
        hashed.update(struct.pack("<q", token_id))
        for candidate, entry in sorted(entries.items()):
            hashed.update(struct.pack("<qd", candidate, entry.logprob))
    return hashed.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- other engines -----------------------------------------------------------------------------------------------------


def compare(model: str, load: Callable[..., LLM], console: Console, progress: Console) -> None:
    llm = load()
    prompts, dtype = prompts_of(llm), str(llm.engine.model_runner.dtype).removeprefix("torch.")
    engines = {
        "nanovllm": lambda: from_llm(llm, SamplingParams),
        "transformers": lambda: from_transformers(model, dtype),
    }
    if find_spec("vllm"):
        engines["vLLM"] = lambda: from_vllm(model, dtype)
    title = f"The question alone and the last of {len(prompts)}: what changes"
    rows = table(title, "engine", "tokens", "log probabilities of equal tokens", "by at most")
    for name, make in engines.items():
        with progress.status(f"{name}, alone and in a batch"):
            answer = make()
            rows.add_row(name, *changes(answer(prompts[:1]), answer(prompts[1:] + prompts[:1])))
    console.print(rows)


def changes(alone: Answer, in_batch: Answer) -> tuple[str, str, str]:
    """How many tokens, how many log probabilities before the first of them, and by how much."""
    differ = [a != b for a, b in zip(alone[0], in_batch[0], strict=True)]
    num_equal = [*differ, True].index(True)
    gaps = [abs(a - b) for a, b in zip(alone[1][:num_equal], in_batch[1][:num_equal], strict=True)]
    changed = f"{sum(gap > 0 for gap in gaps)} of {num_equal}"
    return f"{sum(differ)} of {len(differ)}", changed, f"{max(gaps, default=0.0):.1e}"


def from_llm(llm: Any, params: type) -> Callable[[list[list[int]]], Answer]:
    """The answer of an LLM to the last prompt. vLLM's interface and ours are the same."""

    def answer(prompts: list[list[int]]) -> Answer:
        completion = ask(llm, prompts, params)[-1].outputs[0]
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return list(completion.token_ids), [entries[token_id].logprob for token_id, entries in pairs]

    return answer


def from_vllm(model: str, dtype: str) -> Callable[[list[list[int]]], Answer]:
    from vllm import LLM as VllmLLM
    from vllm import SamplingParams as VllmParams

    return from_llm(VllmLLM(model, dtype=dtype, max_model_len=MAX_LEN, gpu_memory_utilization=0.5), VllmParams)


def from_transformers(model: str, dtype: str) -> Callable[[list[list[int]]], Answer]:
    """A batch is padded on the left."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def answer(prompts: list[list[int]]) -> Answer:
        length = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        limits = dict(max_new_tokens=NUM_OUTPUT, min_new_tokens=NUM_OUTPUT, do_sample=False, pad_token_id=0)
        found = network.generate(
            input_ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **limits
        )
        token_ids = found.sequences[-1, length:].tolist()
        rows = [logits[-1].float().log_softmax(-1) for logits in found.logits]
        return token_ids, [row[token_id].item() for row, token_id in zip(rows, token_ids, strict=True)]

    return answer


if __name__ == "__main__":
    main()
