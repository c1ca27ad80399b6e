"""What draft tokens gain: the same requests with and without them, on texts that do and do not repeat themselves.

    python examples/bench_speculative.py [MODEL] [--dtypes bfloat16 int8] [--rounds 5] [--show]
    python examples/bench_speculative.py --speculative '{"method": "self", "quantization": "int4"}'

Four workloads of one stream, greedy: quoting from a document, editing code, JSON records with fixed keys, open chat.
And 32 requests of 64 random tokens, EOS ignored. Each round runs every workload without draft tokens and with them, one
right after the other; speed-up is the median of the rounds' ratios. Times are from the first token on. Prints a table
for each dtype, and whether the outputs are the same (chapter 13).
"""

import argparse
import json
import random
import statistics
from dataclasses import replace
from functools import partial

from measuring import arguments, console, greedy, in_turn, median_ratio, positive, table
from quickstart import GUIDE

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

NGRAM = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
CODE = """\
def read_scores(path):
    scores = {}
    with open(path) as file:
        for line in file:
            name, score = line.split(",")
            scores[name.strip()] = int(score)
    return scores


def best_players(scores, count):
    ranked = sorted(scores.items(), key=lambda item: item[1], reverse=True)
    return [name for name, score in ranked[:count]]


def write_report(scores, path):
    with open(path, "w") as file:
        for name in best_players(scores, 10):
            file.write(f"{name}: {scores[name]}\\n")
"""
RECORDS = [
    {"name": "Ada Lovelace", "born": 1815, "country": "England", "field": "mathematics", "alive": False},
    {"name": "Alan Turing", "born": 1912, "country": "England", "field": "computer science", "alive": False},
    {"name": "Marie Curie", "born": 1867, "country": "France", "field": "physics", "alive": False},
    {"name": "Grace Hopper", "born": 1906, "country": "United States", "field": "computer science", "alive": False},
]
EDIT = "Rewrite this Python file. Add a docstring to each function and change nothing else."
QUESTIONS = [
    "Tell me a short story about a lighthouse keeper and a storm.",
    "Why is the sky blue?",
    "How do I make a good cup of tea?",
    "What should I see in Lisbon in one day?",
]


def workloads(llm: LLM) -> dict[str, tuple[list, SamplingParams]]:
    """name -> prompts and their parameters."""

    def asked(question: str) -> dict:
        return llm.chat_prompt([{"role": "user", "content": question}])

    chat = SamplingParams(temperature=0, max_tokens=200)
    rng, vocab_size = random.Random(0), llm.engine.model_config.vocab_size
    records = ",\n".join(json.dumps(record, indent=1) for record in RECORDS)
    return {
        "quoting": ([asked(f"{GUIDE}\n\nRepeat the text above word for word.")], chat),
        "editing code": ([asked(f"{EDIT}\n\n```python\n{CODE}```")], chat),
        "JSON records": ([f"[\n{records},\n{{\n"], replace(chat, ignore_eos=True)),
        "open chat": ([asked(question) for question in QUESTIONS], chat),
        "32 random prompts": ([rng.choices(range(100, vocab_size), k=64) for _ in range(32)], greedy(48)),
    }


def run(llm: LLM, name: str, prompts: list, params: SamplingParams) -> tuple[float, list[RequestOutput]]:
    """Seconds from first tokens to last, and outputs; one stream at a time, except for the random prompts."""
    batches, seconds, outputs = [prompts] if name.startswith("32") else [[prompt] for prompt in prompts], 0.0, []
    for batch in batches:
        outputs += (found := llm.generate(batch, params, use_tqdm=False))
        first, last = (max(getattr(o.metrics, f"{x}_token_time") for o in found) for x in ("first", "last"))
        seconds += last - first
    return seconds, outputs


def rates(seconds: dict[str, list[float]], num_tokens: int) -> list[str]:
    """Tokens a second of each way, and the speed-up; "-" where every answer is a single token, which takes no time."""
    if not all(each for of in seconds.values() for each in of):
        return ["-"] * 3
    medians = [statistics.median(num_tokens / each for each in of) for of in seconds.values()]
    speed_up = median_ratio(seconds["without"], seconds["with"])
    return [*(f"{rate:.0f}" for rate in medians), f"{speed_up:.2f}"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--speculative", type=json.loads, default=NGRAM, metavar="JSON", help="a speculative_config")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "int8"], help="float32, bfloat16, int8, int4")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--show", action="store_true", help="print the texts, too")
    args = parser.parse_args()
    for dtype in args.dtypes:
        measure(args, dtype)


def measure(args: argparse.Namespace, dtype: str) -> None:
    weights = {"quantization": dtype} if dtype.startswith("int") else {"dtype": dtype}
    options = dict(max_model_len=1024, max_num_seqs=32, **weights)
    model = model_or_demo(args.model)
    plain, drafting = LLM(model, **options), LLM(model, speculative_config=args.speculative, **options)
    names = "", "drafts\naccepted", "tokens\na step", "tokens/s\nwithout", "\nwith", "speed-\nup", "same\noutput"
    rows = table(f"{dtype}, {json.dumps(args.speculative)}", *names)
    for name, load in workloads(plain).items():
        ways = {"without": partial(run, plain, name, *load), "with": partial(run, drafting, name, *load)}
        in_turn(ways, 1, f"{dtype}: {name}, warming up")
        before = replace(drafting.engine.stats)
        found = in_turn(ways, args.rounds, f"{dtype}: {name}")
        gained = drafting.engine.stats - before
        seconds = {way: [s for s, _ in runs] for way, runs in found.items()}
        expected, outputs = (runs[-1][1] for runs in found.values())
        num_tokens = sum(len(o.outputs[0].token_ids) - 1 for o in outputs)  # while the clock runs
        same = [a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(expected, outputs, strict=True)]
        accepted = gained.acceptance_rate
        rows.add_row(
            name,
            "-" if accepted is None else f"{accepted:.0%}",
            f"{gained.tokens_per_step:.2f}",
            *rates(seconds, num_tokens),
            f"{sum(same)} of {len(same)}",
        )
        if args.show:
            console().print(outputs[0].outputs[0].text, markup=False)
    console().print(rows)


if __name__ == "__main__":
    main()
