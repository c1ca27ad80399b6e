"""Grading of `abort`: a scheduler from which clients leave, played and in the real engine."""

from collections.abc import Callable
from random import Random

from chapters.expect import expect, expect_sane
from chapters.grading import PROMPTS, Bench
from chapters.patching import our_engine
from chapters.stage import Stage, compare_with_ours
from nanovllm import SamplingParams
from nanovllm.core.sequence import SequenceStatus

Abort = Callable[..., None]


def expect_left(stage: Stage, name: str) -> None:
    seq = stage.seqs[name]
    expect(SequenceStatus.FINISHED, seq.status, f"{name} has left: its status")
    expect("abort", seq.finish_reason, f"{name} has left: its finish_reason")
    expect(False, seq.seq_id in stage.scheduler.seqs, f"{name} has left: is it in scheduler.seqs?")


def check_waiting(function: Abort, bench: Bench) -> None:
    """A sequence that waits leaves the queue, and the others keep their order"""
    stage = Stage(max_num_seqs=1)
    for _ in range(5):
        stage.add(6, 4)
    stage.step()
    stage.abort(stage.seqs["C"])
    expect("running: A; waiting: B D E", stage.describe_queues(), "C waited and has left")
    expect_left(stage, "C")
    expect_sane(stage.scheduler, "C, which waited, has left: ")
    stage.run()


def check_running(function: Abort, bench: Bench) -> None:
    """One that runs gives its seat and its blocks back, and the next step admits another"""
    stage = Stage(8, max_num_seqs=2)
    for _ in range(3):
        stage.add(14, 9)
    stage.step()
    stage.abort(stage.seqs["A"])
    expect("running: B; waiting: C", stage.describe_queues(), "A ran and has left")
    expect(4, len(stage.manager.free_blocks), "4 of the 8 blocks were A's: nobody else uses them, so they are free")
    expect_left(stage, "A")
    stage.expect_step("B 14..15, C 0..14", "C gets the seat and the blocks that A had")
    stage.run()


def check_shared(function: Abort, bench: Bench) -> None:
    """Blocks that others use stay theirs, and what is cached stays findable"""
    stage = Stage()
    beginning = list(range(1, 9))
    stage.add([*beginning, 50, 51], 9)
    stage.step()
    stage.add([*beginning, 60, 61, 62], 9)
    stage.step()
    stage.abort(stage.seqs["A"])
    shared = [stage.manager.blocks[i].ref_count for i in stage.seqs["B"].block_table]
    expect([1, 1, 1], shared, "A has left, B has three blocks, two of which A had, too: their reference counts")
    stage.abort(stage.seqs["B"])
    expect(len(stage.manager.blocks), len(stage.manager.free_blocks), "both have left: free blocks")
    stage.add([*beginning, 70], 3)
    stage.expect_step("C 8..9", "C begins as A and B did. Their blocks are free, but still found by hash: C finds two")
    stage.run()


def check_crossed(function: Abort, bench: Bench) -> None:
    """Several at once; ids that are unknown, given twice, or of a sequence that has ended"""
    stage = Stage(max_num_seqs=3)
    for num_answer_tokens in (2, 9, 9, 9, 9):
        stage.add(5, num_answer_tokens)
    stage.step()
    stage.step()
    ended, running, waiting = (stage.seqs[name] for name in "ABE")
    expect("stop", ended.finish_reason, "A has ended by EOS")
    stage.scheduler.abort(10**9, ended.seq_id, running.seq_id, waiting.seq_id, running.seq_id)
    expect("stop", ended.finish_reason, "A had ended before its client left: its finish_reason stays")
    expect("running: C; waiting: D", stage.describe_queues(), "B ran, E waited, and both have left")
    expect_left(stage, "B")
    expect_left(stage, "E")
    stage.scheduler.abort()
    stage.scheduler.abort(running.seq_id)
    expect_sane(stage.scheduler, "after several have left: ")
    stage.run()


def check_often(function: Abort, bench: Bench) -> None:
    """Many come, many leave, in a pool that is too small: no block and no seat is lost"""
    for seed in range(12):
        rng = Random(seed)
        stage = Stage(10, max_num_seqs=4, max_model_len=24)
        for _ in range(30):
            stage.add([1, 2, 3, 4, *rng.choices(range(5, 30), k=rng.randint(1, 12))], rng.randint(2, 8))
            for _ in range(rng.randint(0, 2)):
                if stage.has_unfinished():
                    stage.step()
            ids = [seq.seq_id for seq in stage.scheduler.seqs.values()]
            leaving = rng.sample(ids, k=min(len(ids), rng.choice([0, 0, 1, 3])))
            stage.scheduler.abort(*leaving)
            expect_sane(stage.scheduler, f"workload {seed}, after {len(leaving)} have left: ")
        stage.run()
    for seed in range(12):
        compare_with_ours(Stage(9, max_model_len=20), Stage(9, max_model_len=20), seed)


def check_engine(function: Abort, bench: Bench) -> None:
    """A real model: one client of four leaves, and the others get the tokens that they would have got"""
    with our_engine():
        ours = answers_beside_one_that_leaves(bench)
    bench.llm.reset_prefix_cache()
    for prompt, expected, got in zip(PROMPTS, ours, answers_beside_one_that_leaves(bench), strict=True):
        expect(expected, got, f"tokens of {prompt!r}, beside a client that left")
    manager = bench.llm.engine.block_manager
    expect(len(manager.blocks), len(manager.free_blocks), "all have ended or left: free blocks")
    bench.same_tokens()


def answers_beside_one_that_leaves(bench: Bench) -> list[list[int] | None]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    engine = bench.llm.engine
    ids = [engine.add_request(None, prompt, params) for prompt in [*PROMPTS, "Nobody will read this, because"]]
    found: dict[str, list[int]] = {}
    for number in range(40):
        if number == 4:
            engine.abort_request(ids[-1])
        if not engine.has_unfinished_requests():
            break
        found.update((output.request_id, output.outputs[0].token_ids) for output in engine.step())
    return [found.get(request_id) for request_id in ids[:-1]]


CHECKS = (check_waiting, check_running, check_shared, check_crossed, check_often, check_engine)
