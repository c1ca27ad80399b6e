"""First look: answer questions in a batch, then ask more about the same text and see what the engine need not repeat.

    python examples/quickstart.py            on the demo checkpoint (fetched once)
    python examples/quickstart.py MODEL      on any local checkpoint directory or hub id

Prints a table of answers for each batch, with the prompt tokens that were found in the cache and the time to the first
token, and then what happened.
"""

import logging
import time

from measuring import arguments
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.tools.demo_model import model_or_demo

GUIDE = """You answer visitors of the Harbour Museum in one short sentence. This is the visitor guide.
Opening hours: the museum is open from Tuesday to Sunday, 10 in the morning to 6 in the evening. On Thursdays it stays
open until 9. It is closed on Mondays, on 1 January and on 25 December. The last entry is 45 minutes before closing.
Tickets: adults pay 12 euros, students and pensioners pay 8 euros, children under 12 enter free. A family ticket for two
adults and up to three children costs 26 euros. On the first Sunday of every month entry is free for everybody. Tickets
are sold at the desk and at the machine in the courtyard, which takes cards only.
The building: the museum stands in a former rope factory built in 1871. The long hall on the ground floor, where ropes
of 300 metres were once twisted, now shows the ships. The first floor tells the story of the harbour and of the people
who worked in it. The second floor holds maps and instruments, and the tower has a view over the docks and the river.
There is a lift to every floor but not to the tower, which has 112 steps.
The ships: the largest is the fishing boat Clara, built in 1904 and in use until 1962. Beside her lie the pilot cutter
Storm Petrel of 1888, the river ferry Number Five of 1931, and a dugout canoe that is about 2,000 years old and was
found in 1959 when the new lock was dug. The Clara may be boarded; the other ships may not be touched.
Tours: a guided tour starts every day at 11 and at 3 at the foot of the tower and takes one hour. It is included in the
ticket. Tours for school classes must be booked two weeks ahead by telephone. The audio guide costs 4 euros and speaks
English, French, German, Polish and Turkish.
Food: the cafe Rope Walk in the courtyard serves soup, sandwiches and cake from 11 to 5. Food and drink are not allowed
in the exhibition. There are picnic tables at the quay, and a drinking fountain beside the cloakroom.
Practical things: large bags go into the cloakroom, which is free. Photographs are welcome, without flash. Dogs have to
stay outside, except guide dogs. Wheelchairs can be borrowed at the desk. The nearest tram stop is Old Dock, line 4,
five minutes on foot; there is no car park. The shop sells books, model ships and real rope, and closes with the museum.
"""
FIRST_QUESTIONS = [
    "What is the name of the cafe?",
    "What languages does the audio guide speak?",
    "How many steps does the tower have?",
    "How much do adults pay?",
]
MORE_QUESTIONS = [
    "Which tram stop is the nearest?",
    "When was the Clara built?",
    "How old is the dugout canoe?",
    "On which days is the museum closed?",
]


def main() -> None:
    args = arguments(__doc__).parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for noisy in ("httpx", "transformers"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    console = Console()
    started = time.perf_counter()
    model = model_or_demo(args.model)
    llm = LLM(model)
    console.print(f"Loaded {escape(str(model))} in {time.perf_counter() - started:.1f} s.\n")

    cold, cold_s, cold_computed = ask(llm, FIRST_QUESTIONS)
    show(console, "First batch: the engine has never seen the visitor guide (cold)", FIRST_QUESTIONS, cold)
    warm, warm_s, warm_computed = ask(llm, MORE_QUESTIONS)
    show(console, "Second batch: other questions about the same guide (warm)", MORE_QUESTIONS, warm)

    num_cold, num_warm = (sum(len(o.prompt_token_ids) for o in batch) for batch in (cold, warm))
    cold_ttft_s, warm_ttft_s = mean_ttft_s(cold), mean_ttft_s(warm)
    console.print(
        Panel(
            f"Every prompt is the same long guide and then a question. Before a model can write its first word it must "
            f"compute a key and a value vector, in every layer, for each token it has read. The engine keeps them in "
            f"blocks of {llm.engine.block_manager.block_size} tokens, the [bold]KV cache[/], and finds them again when "
            f"a prompt begins with the same tokens.\n\n"
            f"[bold]Cold[/]: {num_cold:,} prompt tokens came in, [bold]{cold_computed:,}[/] were computed. One request "
            f"computed the guide; the others, in the same batch, shared its blocks.\n"
            f"[bold]Warm[/]: {num_warm:,} prompt tokens came in, [bold]{warm_computed:,}[/] were computed: the "
            f"questions alone.\n\n"
            f"The mean time to the first token went from [bold]{cold_ttft_s * 1e3:,.0f} ms[/] to "
            f"[bold]{warm_ttft_s * 1e3:,.0f} ms[/]: {cold_ttft_s / warm_ttft_s:.1f} times faster; the whole batch took "
            f"{cold_s:.1f} s cold and {warm_s:.1f} s warm. The answers would be the same without the cache. Only the "
            f"waiting is gone. (If an answer is wrong, that is the model: the demo model is very small.)",
            title="What happened",
        )
    )


def ask(llm: LLM, questions: list[str]) -> tuple[list[RequestOutput], float, int]:
    """Answers, seconds, and how many prompt tokens the engine had to compute for them."""
    conversations = [[{"role": "system", "content": GUIDE}, {"role": "user", "content": q}] for q in questions]
    # llm.chat() would do both. The first template that is rendered starts a process, which is not the cache's fault.
    prompts = [llm.chat_prompt(conversation) for conversation in conversations]
    started, computed = time.perf_counter(), llm.stats()["num_prefill_tokens"]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32))
    return outputs, time.perf_counter() - started, llm.stats()["num_prefill_tokens"] - computed


def mean_ttft_s(outputs: list[RequestOutput]) -> float:
    return sum(output.metrics.ttft_s or 0.0 for output in outputs) / len(outputs)


def show(console: Console, title: str, questions: list[str], outputs: list[RequestOutput]) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", expand=True)
    table.add_column("question and answer", ratio=1)
    names = "prompt\ntokens", "found in\ncache", "first token\nafter", "tokens/s\nafter that"
    has_room = console.width >= 70  # otherwise, figures stand below the answers
    for name in names if has_room else ():
        table.add_column(name, justify="right")
    for question, output in zip(questions, outputs, strict=True):
        metrics = output.metrics
        color = "green" if output.num_cached_tokens else "yellow"
        said = f"{escape(question)}\n[cyan]{escape(output.outputs[0].text.strip())}[/]"
        figures = (
            f"{len(output.prompt_token_ids):,}",
            f"[{color}]{output.num_cached_tokens:,}[/]",
            f"{(metrics.ttft_s or 0.0) * 1e3:,.0f} ms",
            f"{1 / metrics.tpot_s:.0f}" if metrics.tpot_s else "-",
        )
        if has_room:
            table.add_row(said, *figures)
        else:
            lines = (f"{' '.join(name.split())}: {figure}" for name, figure in zip(names, figures, strict=True))
            table.add_row("\n".join([said, *lines]), end_section=True)
    console.print(table)
    console.print()


if __name__ == "__main__":
    main()
