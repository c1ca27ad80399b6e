"""AsyncLLM: the engine in a thread of its own. Who leaves, what fails, and that a slow reader slows nobody."""

import asyncio
import atexit
import threading
import weakref
from types import SimpleNamespace

import pytest

from nanovllm import LLM, PoolingParams, SamplingParams
from nanovllm.serving import async_llm
from nanovllm.serving.async_llm import NUM_PREPARING_THREADS, AsyncLLM, Overloaded, wait_for
from nanovllm.serving.engine_thread import EngineDied, StepFailed
from tests.checkpoints import SMALL
from tests.faults import plant

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)  # where set_pace() holds it as long as need be
PROMPTS = ["the quick brown fox", "two gulls", [5, 6, 7], {"prompt": "a red boat", "cache_salt": "mine"}]


@pytest.fixture
def make(checkpoint):
    """make(**options) -> AsyncLLM; each is shut down, and must hold nothing then."""
    made = []

    def get(**options) -> AsyncLLM:
        made.append(AsyncLLM(str(checkpoint()), **SMALL | options))
        return made[-1]

    yield get
    for llm in made:
        llm.shutdown()
        llm.shutdown()  # twice is fine
        if llm.thread.error is None:
            llm.engine.scheduler.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name == "engine"]


def finish(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def held(llm: AsyncLLM) -> int:
    return (await llm.stats())["kv_pool"]["num_referenced_blocks"]


async def until(llm: AsyncLLM, name: str, least: int) -> None:
    """Wait until this count of the engine is that large."""
    while (await llm.stats())[name] < least:
        await asyncio.sleep(0.001)


async def last_of(stream):
    outputs = [output async for output in stream]
    return outputs[-1] if outputs else None


def test_a_second_event_loop_is_refused(make):
    llm = make()
    assert finish(last_of(llm.generate("two gulls", SamplingParams(max_tokens=2), "a")))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="belongs to one event loop"):
            finish(last_of(llm.generate("two gulls", SamplingParams(max_tokens=2), "b")))
    assert llm._num_entering == 0


def test_a_system_without_threads_keeps_no_place(make, monkeypatch):
    async def work(llm: AsyncLLM) -> None:
        await llm.stats()  # the engine's thread begins
        with monkeypatch.context() as patch:
            plant(patch, async_llm.Worker, "start", range(1, 2 * NUM_PREPARING_THREADS + 1))
            for _ in range(2 * NUM_PREPARING_THREADS):
                with pytest.raises(RuntimeError):
                    await last_of(llm.generate("two gulls", SamplingParams(max_tokens=2), "a"))
        assert await last_of(llm.generate("two gulls", SamplingParams(max_tokens=2), "a"))

    llm = make()
    finish(work(llm))


@pytest.mark.skipif(not hasattr(atexit, "_ncallbacks"), reason="this Python does not count them")
def test_a_long_life_registers_no_more_at_exit(make):
    """Python keeps a place for each function that was ever registered: a server would slow down with every request."""

    async def work(llm: AsyncLLM) -> None:
        await llm.stats()
        num_registered = atexit._ncallbacks()
        for _ in range(3):
            await llm.prepare(lambda: None)
        assert atexit._ncallbacks() == num_registered

    finish(work(make()))


def test_encode(make, checkpoint):
    """The one output of a prompt; what is refused, is before the queue."""
    expected = LLM(str(checkpoint()), runner="pooling", **SMALL).embed(PROMPTS, use_tqdm=False)
    llm = make(runner="pooling")

    async def run():
        outputs = await asyncio.gather(*(last_of(llm.encode(prompt)) for prompt in PROMPTS))
        assert [o.outputs.data.tolist() for o in outputs] == [o.outputs.embedding for o in expected]
        cut = await last_of(
            llm.encode([5, 6, 7], PoolingParams(use_activation=False), "mine", truncate_prompt_tokens=2)
        )
        assert (cut.request_id, cut.prompt_token_ids, cut.finished) == ("mine", [5, 6], True)
        with pytest.raises(ValueError, match="samples no tokens"):
            await last_of(llm.generate("x"))
        with pytest.raises(ValueError, match="truncation_side must be one of"):
            await last_of(llm.encode("x", tokenization_kwargs={"truncation_side": "up"}))
        leaving = asyncio.create_task(last_of(llm.encode("x")))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert await held(llm) == 0

    finish(run())


def test_same_outputs_as_generate(make, checkpoint):
    """Greedy and sampled, alone and in company, whole words as they grow."""
    params = [SamplingParams(max_tokens=12, temperature=t, seed=7, n=n, logprobs=2) for t, n in ((0, 1), (0.9, 2))]
    jobs = [(prompt, p) for prompt in PROMPTS for p in params]
    expected = [LLM(str(checkpoint()), **SMALL).generate(*job, use_tqdm=False)[0] for job in jobs]
    llm = make()

    async def one(prompt, p):
        texts, output = [""], None
        async for output in llm.generate(prompt, p):
            assert output.outputs[0].text.startswith(texts[-1])
            texts.append(output.outputs[0].text)
        assert output.finished
        return output

    async def all_at_once():
        return await asyncio.gather(*(one(*job) for job in jobs))

    for found, wanted in zip(finish(all_at_once()), expected, strict=True):
        assert [(s.text, s.token_ids, s.finish_reason) for s in found.outputs] == [
            (s.text, s.token_ids, s.finish_reason) for s in wanted.outputs
        ]


def wait_for_event(is_done: asyncio.Event):
    return wait_for(is_done.wait(), 60)


def drain_until(is_done: asyncio.Event):
    """Wait for the one request of an engine, which ends with the event."""

    async def call(function):
        left = function()
        if not isinstance(left, list):
            await is_done.wait()
            return False
        return left

    request = SimpleNamespace(request_id="a")
    llm = SimpleNamespace(engine=SimpleNamespace(requests={"a": request}), call=call)
    return AsyncLLM.wait_for_requests_to_drain(llm, 60)


@pytest.mark.parametrize("wait", [wait_for_event, drain_until])
@pytest.mark.parametrize("num_turns", range(5))
def test_a_cancellation_is_never_lost(wait, num_turns):
    """In whatever turn of the event loop it comes, before the work is done or with it."""

    async def run():
        is_done = asyncio.Event()
        waiting = asyncio.create_task(wait(is_done))
        await asyncio.sleep(0.01)
        is_done.set()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        is_cancelled = waiting.cancel()
        await asyncio.wait({waiting})
        assert waiting.cancelled() == is_cancelled

    finish(run())


def test_who_leaves_frees_blocks_before_the_next_step(make):
    """However a reader leaves: by break, by cancelling, while it waits, while it has not begun."""
    llm = make()

    async def run():
        async for output in llm.generate("two gulls", LONG):
            if len(output.outputs[0].token_ids) >= 3:  # a slow reader finds only the newest output
                llm.thread.set_pace(0)
                break
        num_steps = (await llm.stats())["num_steps"]
        await asyncio.sleep(0)  # the generator is closed by its event loop
        assert await held(llm) == 0

        readers = [asyncio.create_task(last_of(llm.generate(prompt, LONG))) for prompt in PROMPTS]
        await until(llm, "num_waiting", len(PROMPTS))
        llm.thread.set_pace(1)
        await until(llm, "num_steps", num_steps + 1)
        assert await held(llm) > 0
        for reader in readers:
            reader.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*readers, return_exceptions=True)
        )
        stats = await llm.stats()
        assert stats["num_running"] == stats["num_waiting"] == await held(llm) == 0
        assert stats["num_steps"] == num_steps + 1 and not llm.thread.readers

        never_begun = llm.generate("two gulls", LONG)
        await never_begun.aclose()
        cancelled_early = asyncio.create_task(last_of(llm.generate("two gulls", LONG)))
        await asyncio.sleep(0)
        cancelled_early.cancel()
        await asyncio.gather(cancelled_early, return_exceptions=True)
        llm.thread.set_pace()
        assert (await last_of(llm.generate("two gulls", SamplingParams(max_tokens=2)))).finished
        assert await held(llm) == 0 and not llm.thread.readers and llm._num_entering == 0

    finish(run())


def test_a_slow_reader_slows_nobody_and_misses_nothing(make):
    llm = make()

    async def run():
        slow = llm.generate("two gulls", LONG)
        llm.thread.set_pace(50)
        first = await anext(slow)
        llm.thread.set_pace()
        quick = await last_of(llm.generate("the quick brown fox", LONG))  # all its steps while the slow one sleeps
        second = await anext(slow)
        assert len(quick.outputs[0].token_ids) == 200
        assert len(second.outputs[0].token_ids) > 100 > len(first.outputs[0].token_ids), "outputs are not queued"
        return await last_of(slow) or second

    assert len(finish(run()).outputs[0].token_ids) == 200


def test_abort_and_timeout(make):
    llm = make()

    async def run():
        outputs = []
        llm.thread.set_pace(2)
        async for output in llm.generate("two gulls", LONG, "mine"):
            outputs.append(output)
            if len(outputs) == 1:
                await llm.abort("mine")
        assert outputs[-1].finished and outputs[-1].outputs[0].finish_reason == "abort"
        assert outputs[-1].request_id == "mine"
        await llm.abort("nobody")
        llm.thread.set_pace(0)
        with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
            await last_of(llm.generate("two gulls", LONG, timeout_s=0.05))
        assert (await llm.stats())["num_waiting"] == 0

    finish(run())


def test_a_deadline_counts_from_the_arrival(make, monkeypatch):
    """Tokenizing counts; and who asks for something all the time leaves time for steps."""
    llm = make()
    goes_on = threading.Event()
    made = llm.engine.make_request

    def slow(*args, **options):
        goes_on.wait(60)
        return made(*args, **options)

    async def run():
        monkeypatch.setattr(llm.engine, "make_request", slow)
        with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
            await last_of(llm.generate("two gulls", LONG, timeout_s=0.05))
        goes_on.set()

        def again() -> None:
            if not done.is_set():
                llm.thread.ask(again)

        done = asyncio.Event()
        llm.thread.start(asyncio.get_running_loop())
        llm.thread.ask(again)
        assert len((await last_of(llm.generate("two gulls", LONG))).outputs[0].token_ids) == 200
        done.set()

    finish(run())


def test_bad_requests_and_a_full_queue(make):
    llm = make(max_waiting=2)

    async def run():
        with pytest.raises(ValueError, match="prompt"):
            await last_of(llm.generate(7, SHORT))
        llm.thread.set_pace(0)
        tasks = [asyncio.create_task(last_of(llm.generate("two gulls", SHORT, name))) for name in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 sequences wait already"):
            await last_of(llm.generate("two gulls", SHORT))
        await until(llm, "num_waiting", 2)
        llm.thread.set_pace(1)
        await until(llm, "num_running", 2)
        with pytest.raises(ValueError, match="'a' is already in use"):
            await last_of(llm.generate("two gulls", SHORT, "a"))
        llm.thread.set_pace()
        assert [len(output.outputs[0].token_ids) for output in await asyncio.gather(*tasks)] == [20, 20]

    finish(run())


def test_a_sequence_waits_once(make, monkeypatch):
    """Also while the engine's thread has queued it and the event loop has not heard of that yet."""
    llm = make(max_waiting=2)
    goes_on, tell = threading.Event(), llm.thread.tell

    def slow(*args) -> None:
        goes_on.wait(60)
        tell(*args)

    async def run():
        monkeypatch.setattr(llm.thread, "tell", slow)
        llm.thread.set_pace(0)
        tasks = [asyncio.create_task(last_of(llm.generate("two gulls", SHORT)))]
        while not llm.engine.scheduler.waiting:
            await asyncio.sleep(0.001)
        tasks.append(asyncio.create_task(last_of(llm.generate("a red boat", SHORT))))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="2 sequences wait already"):
            await last_of(llm.generate("two gulls", SHORT))
        llm.thread.set_pace()
        goes_on.set()
        assert [len(output.outputs[0].token_ids) for output in await asyncio.gather(*tasks)] == [20, 20]

    finish(run())


def test_priorities(make):
    llm = make(max_num_seqs=1, scheduling_policy="priority")
    order: list[int] = []
    llm.engine.on_step = lambda output, progressed: order.extend(chunk.seq.tokens[0] for chunk in output.chunks)

    async def ask() -> None:
        await llm.stats()
        llm.thread.set_pace(steps_left=0)
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        readers = [
            asyncio.create_task(last_of(llm.generate([token, 5], params, priority=priority)))
            for token, priority in ((11, 2), (12, None), (13, -1))
        ]
        await until(llm, "num_waiting", 3)
        llm.thread.set_pace()
        await asyncio.gather(*readers)

    finish(ask())
    assert list(dict.fromkeys(order)) == [13, 12, 11]


@pytest.mark.parametrize("where", ["model_runner.run", "scheduler.schedule", "update"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_a_step_that_fails_once(make, monkeypatch, where, max_num_seqs):
    """It is the doing of the request that was alone in it; if there were several, all are computed again."""
    llm = make()
    *owner, name = where.split(".")

    async def run():
        llm.thread.set_pace(0)
        llm.engine.scheduler.max_num_seqs = max_num_seqs
        tasks = []
        for prompt in ("two gulls", "a red boat"):
            tasks.append(asyncio.create_task(last_of(llm.generate(prompt, SHORT))))
            await until(llm, "num_waiting", len(tasks))  # prompts are tokenized beside each other
        broken = getattr(llm.engine, owner[0]) if owner else llm.engine
        plant(monkeypatch, broken, name, [1], ArithmeticError("planted"))
        llm.thread.set_pace()
        first, second = await asyncio.gather(*tasks, return_exceptions=True)
        if max_num_seqs == 1 and name != "schedule":
            assert isinstance(first, StepFailed) and "planted" in str(first)
        else:
            assert len(first.outputs[0].token_ids) == 20
        assert len(second.outputs[0].token_ids) == 20
        assert (await last_of(llm.generate("two gulls", SHORT))).finished
        assert await held(llm) == 0

    finish(run())


def test_a_dead_engine_answers_everybody(make, monkeypatch):
    llm, told = make(), []

    async def run():
        llm.thread.on_death = lambda: told.append(True)
        llm.thread.set_pace(0)
        task = asyncio.create_task(last_of(llm.generate("two gulls", LONG)))
        await until(llm, "num_waiting", 1)
        plant(monkeypatch, llm.engine, "has_unfinished_requests", lambda n: True, MemoryError("planted"))
        llm.thread.set_pace()
        with pytest.raises(EngineDied, match="planted"):
            await task
        with pytest.raises(EngineDied, match="planted"):
            await last_of(llm.generate("two gulls", LONG))
        with pytest.raises(EngineDied):
            await llm.check_health()
        assert (await llm.stats())["num_running"] == 0, "what needs no step is answered still"

    finish(run())
    assert told


def test_a_function_that_kills_the_engine_keeps_no_answer_back(make, monkeypatch):
    """What was asked together with it is answered as what is asked later."""
    llm, gate = make(), threading.Event()

    async def run():
        await llm.stats()
        plant(monkeypatch, llm.engine, "abort_requests", lambda n: True, MemoryError("planted"))
        llm.thread.ask(gate.wait)  # the thread finds the next two together
        llm.thread.ask(lambda: llm.thread.forget([]))
        task = asyncio.create_task(llm.stats())
        await asyncio.sleep(0)
        gate.set()
        assert (await asyncio.wait_for(task, 20))["num_running"] == 0
        with pytest.raises(EngineDied, match="planted"):
            await llm.check_health()

    finish(run())


def test_shutdown_ends_who_still_reads(make):
    llm = make()

    async def run():
        reader = llm.generate("two gulls", LONG)
        await anext(reader)
        await asyncio.to_thread(llm.shutdown)
        with pytest.raises(EngineDied, match="shut down"):
            await last_of(reader)
        with pytest.raises(EngineDied, match="shut down"):
            await last_of(llm.generate("two gulls", LONG))

    finish(run())


def test_it_is_freed(checkpoint):
    """A class of thirty builds it again and again in one process."""
    llm = AsyncLLM(str(checkpoint()), **SMALL)
    finish(last_of(llm.generate("two gulls", SamplingParams(max_tokens=2))))
    llm.shutdown()
    for thread in threading.enumerate():
        if thread.name == "prepare":  # its work is done, and it may not have let go of it
            thread.join(60)
    gone = weakref.ref(llm)
    del llm
    assert gone() is None
