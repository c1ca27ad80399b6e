"""One model over several processes: who holds what, what they tell each other, and that the tokens stay the same.

    python examples/tensor_parallel.py [MODEL] [--ranks 3]

Without a GPU the ranks are processes that share this machine's cores, so nothing gets faster here: it shows how it
works. The demo checkpoint has 9 query heads over 3 KV heads, so it can be split over 3 ranks. Prints what each rank
holds and sends, and the tokens that come out of one rank and of several (chapter 9).
"""

import logging

from measuring import arguments, positive
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.features.parallel.group import shard_config
from nanovllm.tools.demo_model import model_or_demo

PROMPTS = ["The capital of France is", "To make a cup of tea, first", "Two plus two is"]
NUM_TOKENS = 24
console = Console(highlight=False)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=positive, default=3)
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error("--ranks must be 2 or more")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    model = model_or_demo(args.model)

    # float32, so that the order in which the ranks' parts are added cannot tip the choice of a token.
    options = dict(dtype="float32", max_model_len=256, max_num_seqs=len(PROMPTS))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = LLM(model, **options).generate(PROMPTS, params, use_tqdm=False)
    llm = LLM(model, tensor_parallel_size=args.ranks, **options)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)

    config = llm.engine.model_config
    local = shard_config(config, args.ranks)
    table = Table(title=f"{args.ranks} ranks, each a process", title_justify="left")
    columns = ("rank", "query heads", "KV heads", "MLP columns", "words", "MB of weights", "MB of KV", "MB sent")
    for name in columns:
        table.add_column(name, justify="right")
    usages = llm.engine.model_runner.usage()
    for rank, usage in enumerate(usages):
        sizes = local.num_attention_heads, local.num_key_value_heads, local.intermediate_size, local.vocab_size
        shares = (f"{size:,}" for size in sizes)
        table.add_row(
            str(rank), *shares, *(f"{usage[key] / 1e6:.1f}" for key in ("weights", "kv_cache", "all_reduced"))
        )
    sizes = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size, config.vocab_size
    table.add_section()
    table.add_row("model", *(f"{size:,}" for size in sizes))
    console.print(table)

    num_steps = llm.engine.stats.num_steps
    num_reduces = 2 * config.num_hidden_layers + 1
    row_bytes = config.hidden_size * 4
    console.print(
        f"{num_steps} steps; {usages[0]['all_reduced'] / num_steps:,.0f} bytes all-reduced in a step on average: "
        f"{num_reduces} times {row_bytes:,}\nfor each token of the batch: after the embedding, twice in each layer.\n"
    )
    for output, reference in zip(outputs, expected, strict=True):
        same = output.outputs[0].token_ids == reference.outputs[0].token_ids
        console.print(
            f"{'the same' if same else 'OTHER'} {NUM_TOKENS} tokens on 1 and {args.ranks} ranks:\n  {shown(output)}"
        )
    if any(o.outputs[0].token_ids != e.outputs[0].token_ids for o, e in zip(outputs, expected, strict=True)):
        raise SystemExit("the ranks computed something else")


def shown(output: RequestOutput) -> str:
    return escape(repr(f"{output.prompt}{output.outputs[0].text}"))


if __name__ == "__main__":
    main()
