"""examples/simulate_cores.py: the chunks it computes are those of cpu/pool.c, and its steps give the same tokens."""

import random

import pytest

from examples.simulate_cores import PTR, WORK, Engine, Job, Observer, chunks_of, deal
from nanovllm import SamplingParams
from nanovllm.worker.c_calls import INT
from nanovllm.worker.cpu import threads


class RealPool(Observer):
    """Lets cpu/pool.c compute the jobs, and notes the chunks that it makes of them."""

    def parallel_for(self, work, args, num_items, min_chunk):
        chunks = []

        def compute(args, first, end):
            chunks.append((first, end))
            work(args, first, end)

        threads.load_pool().parallel_for(WORK(compute), PTR(args), INT(num_items), INT(min_chunk))
        self.step.append((Job(self.kind, num_items, min_chunk, tuple(sorted(chunks))), [0.0] * len(chunks)))
        self.kind += ", then"


@pytest.fixture
def engine(checkpoint):
    try:
        return Engine(str(checkpoint("llama")), dtype="float32", enable_prefix_caching=False, max_num_seqs=16)
    except SystemExit:
        pytest.skip("no C compiler")


@pytest.mark.compiler
@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_simulated_jobs_of_a_step_are_those_of_the_pool(engine, monkeypatch, num_threads):
    """Of a decode that is replayed, of one with keys in two parts, and of a prompt, which is computed call by call."""
    monkeypatch.setattr(threads, "num_threads", lambda: num_threads)
    loads = [engine.decoding(5, 20), engine.decoding(1, 300), engine.prefilling(100)]
    for load in loads:
        with load as step:
            simulated = engine.observe(step, num_threads)
            observer = RealPool(engine, num_threads)
            with observer.watching():
                step()
        assert [job for job, _ in simulated] == [job for job, _ in observer.step]
        kinds = {job.kind for job, _ in simulated}
        assert {"add_rms_norm", "gated linear 64 to 96", "rotary_and_write", "paged_attention"} < kinds
        assert ("paged_attention, then" in kinds) == (load is loads[1])


@pytest.mark.compiler
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_watched_steps_give_the_same_tokens(engine, num_threads):
    prompts = [[5] * 300, [6, 7, 8]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2)

    def answers() -> list:
        outputs = [output.outputs[0] for output in engine.llm.generate(prompts, params, use_tqdm=False)]
        return [(output.token_ids, output.logprobs) for output in outputs]

    expected = answers()
    observer = Observer(engine, num_threads)
    with observer.watching():
        assert answers() == expected
    num_jobs = len(observer.step)
    assert answers() == expected and len(observer.step) == num_jobs > 0  # the pool is back


@pytest.mark.compiler
def test_chunks_are_those_of_the_pool():
    try:
        pool = threads.load_pool()
    except OSError:
        pytest.skip("no C compiler")
    rng, found = random.Random(0), []
    work = WORK(lambda _, first, end: found.append((first, end)))
    try:
        for num_threads in (1, 2, 5, 16):
            pool.set_threads(num_threads, None)
            for _ in range(40):
                num_items, min_chunk = rng.randrange(1, 200), rng.choice([1, 1, 2, 3, 20, 100])
                found.clear()
                pool.parallel_for(work, None, INT(num_items), INT(min_chunk))
                assert tuple(sorted(found)) == chunks_of(num_items, min_chunk, num_threads)
    finally:
        pool.set_threads(threads.num_threads(), None)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_each_item_has_one_thread(num_threads):
    rng = random.Random(num_threads)
    for num_items in (1, 2, 7, 16, 18, 1000):
        for min_chunk in (1, 5, 29):
            chunks = chunks_of(num_items, min_chunk, num_threads)
            assert [item for first, end in chunks for item in range(first, end)] == list(range(num_items))
            times = [rng.random() for _ in chunks]
            schedule = deal(Job("", num_items, min_chunk, chunks), times, num_threads)
            assert sum(schedule.num_items) == num_items and sum(schedule.seconds) == pytest.approx(sum(times))
            slowest_alone = max(times)
            assert max(schedule.seconds) <= sum(times) / num_threads + slowest_alone + 1e-9


def test_whichever_thread_is_free_first_claims_the_next_chunk():
    job = Job("", 5, 1, tuple((i, i + 1) for i in range(5)))
    schedule = deal(job, [4.0, 1.0, 1.0, 1.0, 5.0], 2)  # the fifth begins when the other four have taken 3 and 4
    assert schedule.seconds == [4.0, 8.0] and schedule.num_items == [1, 4]
