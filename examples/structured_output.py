"""Facts from a text as data: whatever the model would rather say, each answer fits a JSON schema.

    python examples/structured_output.py [MODEL]          the quickstart's visitor guide, extracted
    python examples/structured_output.py [MODEL] --cost   ms for a step of 32 sequences, with masks and without

Needs llguidance: pip install -e ".[structured]". Prints a table: the answer in plain words, as JSON without a
schema, and as JSON with its schema (chapter 8).
"""

import json
import statistics
import time
from typing import Any

from measuring import arguments, progress
from quickstart import GUIDE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.tools.demo_model import model_or_demo

NUMBER = {"type": "integer", "minimum": 0, "maximum": 2100}
NAME = {"type": "string", "minLength": 1, "maxLength": 24}
LANGUAGE = {"type": "string", "pattern": "^[A-Z][a-z]{3,9}$"}


def record(**properties: Any) -> dict[str, Any]:
    """An object with exactly these properties, in this order."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


QUESTIONS = {
    "What is the name of the cafe?": record(cafe=NAME),
    "What languages does the audio guide speak?": record(
        languages={"type": "array", "items": LANGUAGE, "minItems": 1, "maxItems": 6}
    ),
    "How many steps does the tower have?": record(steps=NUMBER),
    "When was the fishing boat Clara built?": record(ship=NAME, year=NUMBER),
    "On which day of the week is the museum closed?": {"enum": ["Monday", "Tuesday", "Thursday", "Sunday"]},
}


def extract(llm: LLM, console: Console) -> None:
    """Ask in plain words first: a small model finds facts better than it writes JSON. Then ask for the same as JSON."""
    chats = [[{"role": "system", "content": GUIDE}, {"role": "user", "content": question}] for question in QUESTIONS]
    answers = [o.outputs[0].text for o in llm.chat(chats, SamplingParams(temperature=0, max_tokens=48, stop=["\n"]))]
    for chat, answer in zip(chats, answers, strict=True):
        chat += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Say that in JSON."}]

    free = SamplingParams(temperature=0, max_tokens=48)
    fitting = [free.clone() for _ in QUESTIONS]
    for params, schema in zip(fitting, QUESTIONS.values(), strict=True):
        params.max_tokens = 160  # more than the longest text that fits has tokens: an answer that is cut is not JSON
        params.structured_outputs = StructuredOutputsParams(json=schema, disable_any_whitespace=True)

    table = Table("answer in plain words", "as JSON, free", "as JSON, with its schema", show_lines=True)
    for answer, loose, tight in zip(answers, llm.chat(chats, free), llm.chat(chats, fitting), strict=True):
        data = json.loads(tight.outputs[0].text)  # never fails: see max_tokens
        texts = answer, loose.outputs[0].text, json.dumps(data, ensure_ascii=False)
        table.add_row(*map(escape, texts))
    console.print(table)
    console.print("The right column is data: each value fits its schema. Whether it is true is up to the model.")


def measure_cost(llm: LLM, console: Console) -> None:
    person = record(
        name=NAME, born=NUMBER, languages={"type": "array", "items": LANGUAGE, "minItems": 1, "maxItems": 6}
    )
    people = record(people={"type": "array", "items": person, "minItems": 100})
    prompts = [f"Person {i} as JSON:" for i in range(32)]

    def ms_a_step(structured_outputs: StructuredOutputsParams | None) -> float:
        params = SamplingParams(seed=3, max_tokens=32, ignore_eos=True, structured_outputs=structured_outputs)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - started) / 32 * 1000

    masked = StructuredOutputsParams(json=people)
    ms_a_step(masked), ms_a_step(None)
    pairs = [(ms_a_step(None), ms_a_step(masked)) for _ in progress(range(10), "measuring")]
    plain, with_masks = (statistics.median(column) for column in zip(*pairs, strict=True))
    share = statistics.median(slow / fast for fast, slow in pairs) - 1
    console.print(
        f"a step of 32 sequences: {plain:.1f} ms, with masks {with_masks:.1f} ms ({share:+.1%}, median of pairs)"
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cost", action="store_true", help="measure the masks' share of a step")
    args = parser.parse_args()
    llm = LLM(model_or_demo(args.model), max_num_seqs=32)
    (measure_cost if args.cost else extract)(llm, Console())


if __name__ == "__main__":
    main()
