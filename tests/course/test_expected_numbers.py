"""Numbers that texts, checks and pictures have: they are the engine's, or those of our solutions, which a student's
edition lacks."""

import re
from collections import Counter

import torch

from chapters.ch06_prefill_decode import checks as checks_6
from chapters.ch06_prefill_decode.meter import PaperModel
from chapters.ch06_prefill_decode.pictures import demo_config
from chapters.ch06_prefill_decode.roofline import ONE_DECODE, decode_chunks, demo_decodes
from chapters.ch11_benchmarks import checks as checks_11
from chapters.course import find_chapter
from chapters.grading import Bench
from chapters.patching import replaced
from chapters.recording import Recording
from chapters.stage import Stage
from nanovllm.core.scheduler import Scheduler


def solution_of(number: int):
    return find_chapter(number).module("solution")


def test_what_is_found_in_reports():
    """The digests are of our numbers, and of those within half a percent."""
    faults = solution_of(11).audit()
    assert {report: set(found) for report, found in faults.items()} == {
        report: set(found) for report, found in checks_11.FOUND.items()
    }
    for report, found in faults.items():
        for key, number in found.items():
            assert checks_11.digest(report, key, checks_11.step_of(number)) == checks_11.FOUND[report][key]
            assert all(checks_11.is_found(report, key, number * factor) for factor in (0.9955, 1, 1.0045))
            assert not any(checks_11.is_found(report, key, number * factor) for factor in (-1, 0, 0.994, 1.006))


def test_costs_of_steps():
    """Of the pictures' decodes, and of random steps, which the lab counts in the engine's decoder."""
    step_cost = solution_of(6).step_cost
    for context in ONE_DECODE:
        for batch_size in (1, 5):
            expected = step_cost(demo_config(), 2, decode_chunks(batch_size, context))
            assert demo_decodes(batch_size, context) == expected
    for dtype in (torch.bfloat16, torch.float32):
        model = PaperModel(checks_6.SMALL, dtype)
        for sizes in list(checks_6.random_steps())[:20]:
            chunks = checks_6.make_chunks(sizes)
            assert model.cost(chunks) == step_cost(checks_6.SMALL, dtype.itemsize, chunks)


def test_budgets_of_steps(checkpoint):
    """The steps under which the check of token_budget has asked the model are those under our budgets."""
    bench, token_budget = Bench(str(checkpoint())), solution_of(6).token_budget

    def sizes_in(context) -> list[list[tuple[int, int]]]:
        sizes = []
        with context:
            schedule = Scheduler.schedule

            def watched(*arguments):
                output = schedule(*arguments)
                sizes.append([(chunk.start, chunk.end) for chunk in output.chunks])
                return output

            with replaced(Scheduler, "schedule", watched):
                bench.generate()
        return sizes

    for limit_s, steps in ((0.0501, checks_6.large_steps()), (0.001, checks_6.smallest_steps())):
        sizes = sizes_in(steps)
        assert len(sizes) > 10 and sizes == sizes_in(checks_6.use_budget(token_budget, limit_s))


def test_the_tail_of_a_vocabulary():
    """Chapter 8: so many tokens are at place 1,001 and after it."""
    text = " ".join((find_chapter(8).folder / "README.md").read_text("utf-8").split())
    found = re.search(r"9 of ([\d,]+) tokens left", text)
    assert f"there are {int(found[1].replace(',', '')) - 1000:,} of them" in text


def test_what_a_preempted_sequence_computes_again():
    """The worked example of chapter 5: C's positions that are computed twice are there, and as many as is said."""
    said = Recording(find_chapter(5).folder).says("The pool runs dry")
    num_blocks, block_size = map(int, re.search(r"(\d+) blocks of (\d+) tokens", said).groups())
    prompts = map(int, re.findall(r"\d+", re.search(r"prompts of ([\d, and]+) tokens", said)[1]))
    stage = Stage(num_blocks, block_size=block_size)
    for num_prompt_tokens, num_answer_tokens in zip(prompts, (4, 8, 8), strict=True):
        stage.add(num_prompt_tokens, num_answer_tokens)
    stage.run()
    computed: Counter[int] = Counter()
    for step in stage.steps:
        for chunk in step.chunks:
            computed.update(range(chunk.start, chunk.end) if chunk.seq is stage.seqs["C"] else ())
    again = [position for position, times in computed.items() if times == 2]
    assert stage.scheduler.num_preemptions == 1 and again == [4, 5]
    assert f"{len(again)} of them for the second time" in said
