"""Measure a student's engine: eight requests together, one by one, and the same in the course's engine."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from chapters.expect import Wrong
from chapters.nano_engine.checks import NanoBench
from chapters.nano_engine.steps import NANO
from chapters.submission import NotLoaded, describe, not_started
from nanovllm import LLM, SamplingParams

NUM_REQUESTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 32, 32


def measure(tell: Callable[..., None], file: str, model: str | None) -> dict[str, Any]:
    """In the process of a Run, so with one thread. Returns problem, or what was measured and the rows of a table."""
    checkpoint = NanoBench(model)  # a tiny one is there as long as this is
    path = checkpoint.model
    draw = Random(0)
    prompts = [[draw.randrange(10, 250) for _ in range(PROMPT_TOKENS)] for _ in range(3 * NUM_REQUESTS)]
    first, alone, together = (prompts[i::3] for i in range(3))  # each is new
    course = LLM(path, dtype="float32", max_model_len=128, num_gpu_blocks_override=128, block_size=16)
    wanted = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def by_the_course(some: list[list[int]]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in course.generate(some, wanted, False)]

    try:
        engine = NANO.submission(Path(file))
        nano = engine.LLM(path)
        params = engine.SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)

        def by_nano(some: list[list[int]]) -> list[list[int]]:
            answers = [answer["token_ids"] for answer in nano.generate(some, params)]
            found = [len(answer) for answer in answers]
            if found != [ANSWER_TOKENS] * len(some):
                raise Wrong(f"{len(some)} answers of {ANSWER_TOKENS} tokens were asked for (ignore_eos), found {found}")
            return answers

        by_nano(first)
        by_the_course(first)
        took = {
            "yours, one by one": seconds(lambda: [by_nano([prompt]) for prompt in alone]),
            f"yours, {NUM_REQUESTS} together": seconds(lambda: by_nano(together)),
            f"the course's, {NUM_REQUESTS} together": seconds(lambda: by_the_course(together)),
        }
    except (NotLoaded, Wrong) as error:
        return {"problem": str(error)}
    except Exception as error:  # the student's
        if unwritten := not_started(error):
            return {"problem": f"this engine is not finished ({unwritten}): python -m chapters nano check"}
        return {"problem": f"your engine led to {describe(error, file)}"}
    rows = [[engine, f"{NUM_REQUESTS * ANSWER_TOKENS / each:,.0f} (measured)"] for engine, each in took.items()]
    lines = [line for line in Path(file).read_text("utf-8").splitlines() if line.strip()]
    name = Path(path).name if model else "a tiny random model"
    work = f"{PROMPT_TOKENS}-token prompts, {ANSWER_TOKENS}-token answers"
    what = f"{name}, float32, one thread; {work}; {len(lines)} lines, docstrings included"
    return {"problem": "", "what": what, "rows": rows}


def seconds(work: Callable[[], Any]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun
