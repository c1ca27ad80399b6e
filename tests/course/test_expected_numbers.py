"""Numbers that texts, checks and pictures have: they are the engine's, or those of our solutions, which a student's
edition lacks."""

import re
from collections import Counter

import pytest
import torch

from chapters.ch06_prefill_decode import checks as checks_6
from chapters.ch06_prefill_decode.meter import PaperModel
from chapters.ch06_prefill_decode.pictures import demo_config
from chapters.ch06_prefill_decode.roofline import ONE_DECODE, decode_chunks, demo_decodes
from chapters.ch10_optimization_stack.tiles import rows_read
from chapters.ch11_benchmarks import checks as checks_11
from chapters.course import find_chapter
from chapters.grading import Bench
from chapters.patching import replaced
from chapters.recording import Recording, quoted_sheet
from chapters.sheet import Sheet
from chapters.stage import Stage
from nanovllm import LLM
from nanovllm.core.scheduler import Scheduler
from nanovllm.features.speculation.choose import choose_num_draft_tokens
from nanovllm.worker.cpu.c_kernels import FEW_ROWS


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


def words_of(number: int) -> str:
    """A chapter's text, on one line."""
    return " ".join((find_chapter(number).folder / "README.md").read_text("utf-8").split())


def test_the_tail_of_a_vocabulary():
    """Chapter 8: so many tokens are at place 1,001 and after it."""
    found = re.search(r"9 of ([\d,]+) tokens left", words_of(8))
    assert f"there are {int(found[1].replace(',', '')) - 1000:,} of them" in words_of(8)


def test_rows_that_a_tile_of_queries_saves():
    """Chapter 10's lab prints both numbers; the text says their ratio."""
    assert round(rows_read("(d)", 256) / rows_read("(e)", 256)) == 15
    assert "tiles of sixteen queries read a fifteenth as many rows" in words_of(10)


def test_what_the_optimizations_save():
    """Chapter 10's text speaks of differences between rows of its tables, and of what reading the weights takes."""
    folder, text = find_chapter(10).folder, words_of(10)
    steps = quoted_sheet(folder, "one after another", "1 decode, ms")
    names = [row[0].strip() for row in steps.rows]
    one, many = steps.column("1 decode, ms"), steps.column("16 decodes, ms")
    saved = {name: (one[i] - one[i + 1], many[i] - many[i + 1]) for i, name in enumerate(names[1:])}
    assert f"attention saves {saved['C: attention'][0]:.1f} ms where its bytes promised 0.4" in text
    assert f"rotary + write saves {saved['C: rotary + write'][0]:.1f} ms" in text
    assert max(saved, key=lambda name: saved[name][1]) == "C: attention"
    assert max(saved["C: add + norm"]) < 2 and "worth less than two milliseconds in the decodes above" in text

    operations = quoted_sheet(folder, "one after another", "operations")
    fewer = {row[0].strip(): row[2].strip() for row in operations.rows}
    assert f"{fewer['C: attention']} and {fewer['C: rotary + write']} operations" in text
    assert f"The {fewer['C: matrix products']} of the products' row" in text
    counts = operations.column("operations")
    assert round(5 * (1 - counts[-1] / counts[0])) == 4 and "removed about four fifths of them" in text

    rate = float(re.search(r"together read (\d+) GB/s", text)[1])
    megabytes = float(re.search(r"matrix products │ ([\d.]+) -> ", text)[1])
    said = f"At {rate:.0f} GB/s it takes {megabytes / rate:.0f} ms to read all {megabytes:.0f} MB"
    assert f"{said}, and the plain step of one decode took {one[0]:.0f} ms" in text


@pytest.mark.compiler
def test_calls_of_a_step(demo_checkpoint):
    """Chapter 10: the C functions that a layer calls, and the loops of a decode step, each of which is one call."""
    recorded_step = LLM(str(demo_checkpoint), max_model_len=64).engine.model_runner.recorded_steps
    num_calls, num_layers = len(recorded_step.recorded), len(recorded_step.model.layers)
    assert num_calls // num_layers == 8 and "A layer of this engine makes eight calls to C functions" in words_of(10)
    assert num_calls > 240 and "A decode step of the demo model has more than 240 such loops" in words_of(10)


def in_text(*columns: str) -> Sheet:
    return quoted_sheet(find_chapter(13).folder, *columns)


def in_recording(*columns: str) -> Sheet:
    told = Recording(find_chapter(13).folder).told
    return next(Sheet(**what) for kind, what in told if kind == "table" and {*columns} <= {*what["columns"]})


@pytest.mark.parametrize("sheet_of", [in_text, in_recording])
def test_how_many_draft_tokens_the_engine_takes(sheet_of):
    """Chapter 13's table follows from its step times, for each number of draft tokens and in the last column."""
    times, table = sheet_of("rows", "ms"), sheet_of("a", "takes")
    ms_of = dict(zip(times.column("rows"), times.column("ms"), strict=True))
    step_s = [ms_of[rows] / 1e3 for rows in range(1, 10)]
    numbers = [int(name.removeprefix("k = ")) for name in table.columns if name.startswith("k = ")]
    for a, row, takes in zip(table.column("a"), table.rows, table.column("takes"), strict=True):
        rates = [sum(a**j for j in range(k + 1)) / step_s[k] for k in numbers]
        assert [float(cell) for cell in row[1:-2]] == pytest.approx(rates, abs=0.51 + 0.002 * max(rates))
        assert [takes] == choose_num_draft_tokens([a], [8], step_s)
    assert table.column("takes")[0] == 0, "one in ten is less than what noise may hide (MIN_GAIN)"


def test_what_draft_tokens_cost_and_gain():
    """Chapter 13's text beside its tables: a row beside 31 others, the first row's best, the last table's ratios."""
    text, times = words_of(13), in_text("rows", "ms")
    ms_of = dict(zip(times.column("rows"), times.column("ms"), strict=True))
    more, share = (ms_of[32] - ms_of[16]) / 16, ms_of[32] / 32
    assert f"each further row adds {more:.1f} ms, while each of the 32 rows takes {share:.1f} ms on average" in text
    assert 0.75 < more / share < 0.8
    assert f"with a probability above {more:.1f} / {share:.1f}, which is more than three quarters" in text
    assert ms_of[2] < 1.1 * ms_of[1] and ms_of[3] > 1.2 * ms_of[1] and "from the third row on" in text
    assert ms_of[9] == pytest.approx(ms_of[16], rel=0.1) and FEW_ROWS == 9 and "Up to nine rows of a sequence" in text
    assert ms_of[3] == pytest.approx(ms_of[4], rel=0.05), "a step with two draft tokens takes as long as one with three"

    rates = in_text("a", "takes")
    none, one, *_ = rates.rows[0][1:]
    assert f"one draft token would give {one} tokens a second instead of {none}" in text
    decided = in_text("drafted", "ms with")
    quotation, story, crowd = zip(decided.column("ms without"), decided.column("ms with"), strict=True)
    assert round(3 * quotation[1] / quotation[0]) == 1 and "the quotation takes a third of the time" in text
    assert story[1] < story[0] and crowd[0] == crowd[1] and "gain nothing and lose nothing" in text


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
