"""The exam: numbers of its own for each seed, answers that a slow calculation agrees with, faults that are real."""

import math
import re
import subprocess
import sys
from fractions import Fraction

import pytest

from chapters.__main__ import main
from chapters.course import TITLES
from chapters.teaching.exam_paper import as_html, as_markdown, draw_paper
from chapters.teaching.questions import all_questions, faulty
from chapters.teaching.questions.bank import KINDS, Draw, request
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from tests.course.course_text import ROOT

BANK = all_questions()
SEEDS = 50
RECORDED = [4, 2, 8, 5, 3, 1, 6, 9, 7, 0]


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"(?<![\w.])-?\d[\d,]*(?![\w.]*\d)", text)]


def test_the_bank():
    chapters = [entry.chapter for entry in BANK.values()]
    assert len(BANK) == 60 and sum(not entry.is_fixed for entry in BANK.values()) >= 40
    assert all(3 <= chapters.count(number) <= 6 for number in TITLES) and chapters == sorted(chapters)
    assert all(chapters.count(number) < chapters.count(7) for number in TITLES if number != 7)
    assert {entry.kind for entry in BANK.values()} == {*KINDS}


@pytest.mark.parametrize("entry", BANK.values(), ids=BANK)
def test_a_question(entry):
    """With many seeds it can be asked, its numbers are its own, and the same text never has two answers."""
    answers: dict[str, str] = {}
    for seed in range(SEEDS if not entry.is_fixed else 2):
        question = entry.drawn(str(seed))
        assert 3 <= question.points <= 6 and "{" not in question.text.replace("```python", "")
        assert answers.setdefault(question.text, question.answer) == question.answer
        assert question.answer not in question.text
    assert len(answers) == 1 if entry.is_fixed else len(answers) > 8


# -- slow calculations, from the printed text alone -------------------------------------------------------------------


def attention(text: str) -> str:
    """By hand, as the question says: the powers that it gives, and weights of two decimals, which add up to 1."""
    q = [int(n) for n in re.search(r"q = \[(.*?)\]", text)[1].split(",")]
    rows = re.findall(r"\| \d \| \[(.*?)\] \| (\d) \|", text)
    scores = [sum(a * int(b) for a, b in zip(q, key.split(","), strict=True)) // 2 for key, _ in rows]
    powers = [(1, 2.72, 7.39)[score] for score in scores]
    w = [f"{power / sum(powers):.2f}" for power in powers]
    assert sum(map(Fraction, w)) == 1
    mix = sum(float(weight) * int(value) for weight, (_, value) in zip(w, rows, strict=True))
    return f"{w[0]}, {w[1]} and {w[2]}, the output is {mix:.1f}"


def slots(size: int, a: int, b: int, c: int, start: int, last: int) -> str:
    """As the engine's Batch has them, which this question does not use."""
    seq = Sequence([0] * 40)
    seq.block_table = [a, b, c]
    output = SchedulerOutput([ScheduledChunk(seq, start, last + 1, start)], [], last + 1 - start)
    return str(Batch.from_scheduler_output(output, size).slot_mapping.tolist())


def steps(text: str) -> str:
    """One token after the other, until the budget is used up."""
    budget = numbers(text)[0]
    rows = [[*map(int, row)] for row in re.findall(r"\| [ABC] \| (\d+) \| (\d+) \|", text)]
    left, made, lines = [prompt for prompt, _ in rows], [0, 0, 0], []
    while any(m < limit for m, (_, limit) in zip(made, rows, strict=True)):
        room, now = budget, [0, 0, 0]
        for i in range(3):
            while room and left[i] and made[i] < rows[i][1]:
                room, left[i], now[i] = room - 1, left[i] - 1, now[i] + 1
        for i in range(3):
            if now[i] and not left[i]:
                made[i], left[i] = made[i] + 1, 1
        lines.append(f"| {len(lines) + 1} | {' | '.join(str(n or '-') for n in now)} |")
    return "\n".join(lines)


def filters(text: str) -> str:
    probs = [Fraction(p) for p in re.search(r"\| (0\.\d.*) \|", text)[1].split(" | ")]
    min_p, top_k, top_p = (Fraction(n) for n in re.findall(r"_[pk]=([\d.]+)`", text))
    first = [p for p in probs if p >= min_p * probs[0]]
    second = first[: int(top_k)]
    third = next(second[:n] for n in range(1, 7) if sum(second[:n]) >= top_p * sum(second))
    said = [f"{', '.join('ABCDEF'[: len(kept) - 1])} and {'ABCDEF'[len(kept) - 1]}" for kept in (first, second, third)]
    return f"min_p {said[0]}; after top_k {said[1]}; after top_p {said[2]}. A: {probs[0] / sum(third)}"


def found_prefixes(text: str) -> str:
    before: set[str] = set()
    rows = []
    for name, prompt in re.findall(r"\| ([ABC]) \| `(\w+)` \|", text):
        full = [prompt[:end] for end in range(4, len(prompt) + 1, 4)]
        hits = sum(beginning in before for beginning in full)
        rows.append(f"| {name} | {hits} | {len(prompt) - 4 * hits} |")
        before |= {*full}
    return "\n".join(rows) + f"\n\n(b) {len(before)}"


def drafts(text: str) -> str:
    tokens = [int(n) for n in re.search(r"tokens ([\d, ]+) so far", text)[1].split(",")]
    said = []
    for n in (3, 2):
        at = max(i for i in range(len(tokens) - n) if tokens[i : i + n] == tokens[-n:]) + n
        longer = list(tokens)
        for i in range(4):  # what it proposes may be what it goes on from
            longer.append(longer[at + i])
        said.append(longer[-4:])
    return f"(a) {said[0]} (b) {said[1]}"


def snapshots(*found: int) -> str:
    length, shared = found[-2:]
    blocks = (length - 1) // 16
    places = {blocks, *(2**i for i in range(4, 12) if 2**i <= blocks)}
    places |= {blocks >> i << i for i in range(4, 12) if blocks >> i}
    begins = max(place for place in places if 16 * place <= shared)
    *first, last = (str(16 * place) for place in sorted(places))
    return f"{', '.join(first)} and {last} (b) {shared // 16 * 16} are found, it begins after {16 * begins}"


def preempted(blocks: int, size: int, a: int, b: int, _: int) -> str:
    step = next(n for n in range(2, 99) if -(-(a + n - 1) // size) - (-(b + n - 1) // size) > blocks)
    return f"step {step}, B. (b) {step - 1} (c) {b + step - 1}"


def experts(count: int, megabytes: int, chosen: int, num_rows: int, *_: int) -> str:
    """Every way in which the rows can miss an expert, for each expert."""
    missed = Fraction(count - chosen, count)
    met = sum(1 - math.prod([missed] * num_rows) for _ in range(count))
    return f"(a) {missed**num_rows} (b) {float(met):g}, {float(met) * megabytes:g} MB"


def room(layers: int, heads: int, kv_heads: int, head_dim: int, gigabytes: int, *rest: int) -> str:
    per_token = 2 * layers * kv_heads * head_dim * 2
    return f"{per_token:,} bytes a token, {gigabytes * 10**9 // (per_token * rest[-1])} "


def rank(layers: int, heads: int, kv_heads: int, head_dim: int, ranks: int, gigabytes: int, *rest: int) -> str:
    share = 2 * layers * kv_heads * head_dim * 2 // ranks
    return f"(a) {share:,} (b) {gigabytes * 10**9 // share:,}"


def after_failure(prompt: int, done: int, size: int, budget: int) -> str:
    length = prompt + done
    found = length // size * size
    return f"{length} tokens for A, {length - found or 1} for B"


def step_of_machine(billions: int, bandwidth: int, teraflops: int, limit_ms: int) -> str:
    reading_ms, most = 2 * billions * 1000 // bandwidth, limit_ms * teraflops * 1000 // (2 * billions) // 1000
    return f"(a) {reading_ms} ms (b) {most:,} (c) {teraflops * 1000 // bandwidth}"


def shared_beginning(users: int, shared: int, own: int, size: int) -> str:
    computed = shared + own + (users - 1) * (shared % size + own)
    return f"{computed} with, {users * (shared + own)} without"


def replicas(num_blocks: int, size: int, *table: int) -> str:
    costs = [table[i + 1] + size * (num_blocks - table[i + 2]) for i in (0, 3, 6)]
    return f"(b) {costs.index(min(costs))}: {costs[0]}, {costs[1]} and {costs[2]} tokens"


FROM_TEXT = {
    "attention_on_paper": attention,
    "steps_within_a_budget": steps,
    "hits_block_by_block": found_prefixes,
    "filter_after_filter": filters,
    "drafts_from_the_text": drafts,
}
FROM_NUMBERS = {  # all whole numbers of the text, in their order
    "forgetful_loop": lambda p, n: f"sends {sum(range(p, p + n))} tokens, the engine {p + n - 1}.",
    "head_out_of_range": lambda heads, kv, first, head, *_: (
        f"right is {head // (heads // kv)}. (b) For query head {kv * kv}."
    ),
    "room_for_texts": room,
    "rows_and_logits": lambda a, m, b, n, _: f"(a) {max(m, n)} (b) {a + b + m + n - 2} (c) {m + n}",
    "after_a_failure": after_failure,
    "slots_of_a_chunk": slots,
    "empty_slots": lambda a, b, c, longest, size: (
        f"{3 * longest - a - b - c}. Paged: {-a % size + -b % size + -c % size}."
    ),
    "who_is_preempted": preempted,
    "what_fits_into_a_step": step_of_machine,
    "a_shared_beginning": shared_beginning,
    "memory_of_a_rank": rank,
    "which_replica": replicas,
    "where_a_hybrid_begins": snapshots,
    "experts_met_by_chance": experts,
}


@pytest.mark.parametrize("name", [*FROM_TEXT, *FROM_NUMBERS])
def test_a_slow_calculation_agrees(name):
    for seed in range(20):
        question = BANK[name].drawn(f"slow {seed}")
        text = question.text
        slow = FROM_TEXT[name](text) if name in FROM_TEXT else FROM_NUMBERS[name](*numbers(text))
        assert slow in question.answer, (text, slow)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_the_faults_are_real():
    """Each faulty function differs from the engine as the solution says, and what the solution proposes does not."""
    sizes = [(n, size) for n in range(1, 65) for size in (4, 8, 16)]
    assert {n % size for n, size in sizes if faulty.num_blocks_for(n, size) != -(-n // size)} == {0}
    heads = [faulty.kv_head_of(head, 24, 3) for head in range(24)]
    assert heads != [head // (24 // 3) for head in range(24)] and max(heads) > 2
    for seed in range(SEEDS):
        assert "(b) `[]`: no token is left" in BANK["nucleus_without_its_edge"].drawn(str(seed)).answer
    assert faulty.keep_top_p([0.5, 0.3, 0.2], 0.4) == [] and faulty.keep_top_p([0.5, 0.3, 0.2], 0.7) == [0.5]


def test_the_overtaken_starve():
    """Whenever a small request ends, another one has come: the large one is never admitted."""
    manager, large = BlockManager(4, 4, enable_prefix_caching=False), request(15, 9)
    waiting, running = [request(8, 9), large], []
    for _ in range(50):
        running += faulty.admit(waiting, manager)
        assert large in waiting
        waiting.append(request(8, 9))
        if len(running) > 1:
            manager.free(running.pop(0))


def test_hits_that_are_counted_twice_break_the_allocation():
    manager, seq = BlockManager(4, 4), request(8, 9)
    manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = 8
    manager.register_prefix(seq)
    manager.free(seq)
    again = request(20, 9)  # two hits and three fresh blocks, of which there are two
    assert faulty.can_allocate(manager, again) and not manager.can_allocate(again)
    for name in again.block_hashes[:2]:
        [block] = manager.hash_to_block[name].values()
        manager.free_blocks.remove(block)
    manager.take_fresh_blocks(again, 2)
    with pytest.raises(AssertionError, match="the free queue is empty"):
        manager.take_fresh_blocks(again, 1)


# -- papers -----------------------------------------------------------------------------------------------------------


def test_a_paper():
    paper = draw_paper("monday", [*TITLES], 12)
    assert len({entry.name for entry, _ in paper.asked}) == 12
    assert len({entry.chapter for entry, _ in paper.asked}) == 12
    assert {entry.chapter for entry, _ in draw_paper("monday", [7], 6).asked} == {7}
    for write in (as_markdown, as_html):
        student, teacher = write(paper, False), write(paper, True)
        assert f"{paper.points} points" in student and f"{paper.minutes} minutes" in student
        assert student != write(draw_paper("tuesday", [*TITLES], 12), False)
        for entry, question in paper.asked:
            assert entry.name in teacher and entry.name not in student
            if write is as_markdown:
                assert question.answer in teacher and question.answer not in student and question.text in student
    assert as_html(paper, False).count("<hr />") == paper.points + 12 and "<hr />" not in as_html(paper, True)


def test_a_seed_means_the_same_paper_for_ever():
    """In another process, whose hashes are salted otherwise, and without torch; chance is that of every Python."""
    assert Draw("for ever").some(range(10), 10) == RECORDED
    code = """import sys
sys.modules["torch"] = None
from chapters.teaching.exam_paper import as_markdown, draw_paper
sys.stdout.buffer.write(as_markdown(draw_paper("for ever", list(range(1, 18)), 60), True).encode())"""
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout
    assert found.decode() == as_markdown(draw_paper("for ever", [*TITLES], 60), True)


def test_the_command(tmp_path, capsys):
    assert main(["exam", "--out", str(tmp_path), "--chapters", "1", "7", "--questions", "4", "--solutions"]) == 0
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"exam.md", "exam.html", "solutions.md", "solutions.html"}
    assert "4 questions, " in capsys.readouterr().out
    before = (tmp_path / "exam.md").read_text("utf-8")
    assert main(["exam", "--out", str(tmp_path), "--seed", "another"]) == 2
    assert "solutions.md is there: add --solutions" in capsys.readouterr().err
    assert (tmp_path / "exam.md").read_text("utf-8") == before, "the marking scheme beside it is still its own"
    assert main(["exam", "--out", str(tmp_path), "--chapters", "7", "--questions", "7"]) == 2
    assert "--questions must be from 1 to 6, found 7" in capsys.readouterr().err
