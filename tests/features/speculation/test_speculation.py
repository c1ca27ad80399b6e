"""Draft tokens change nothing but the time: however bad they are, the output is the one without them."""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chapters.ch13_guess_and_check.lab_parts import register_too_early
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import NO_TOKEN, Sequence
from nanovllm.features.speculation import ngrams
from nanovllm.features.speculation.choose import MIN_GAIN, Speculation, choose_num_draft_tokens
from nanovllm.features.speculation.ngrams import NgramIndex
from nanovllm.features.speculation.step_times import StepTimes
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker import model_runner, sampler
from tests.checkpoints import BOS, EOS, SIZES, make_checkpoint
from tests.core.by_hand import CacheModel, make, next_token, run, sequence
from tests.faults import plant, run_to_end
from tests.marks import by_night

VOCAB_SIZE = SIZES["vocab_size"]
NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=48, max_model_len=96, max_num_seqs=6)


# -- proposers --------------------------------------------------------------------------------------------------------


@dataclass
class Hostile:
    """Drafts right, wrong, and on and on: after EOS, after max_tokens. continuations: prompts and what followed."""

    continuations: list[list[int]]
    rng: random.Random
    first_acceptance, draft_s = 0.5, 0.0

    def kinds(self, seqs: list[Sequence]) -> list[int | None]:
        return [0] * len(seqs)

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.draft(seq.tokens, n) for seq, n in wanted]

    def draft(self, tokens: list[int], num_draft_tokens: int) -> list[int]:
        known = [c[len(tokens) :] for c in self.continuations if c[: len(tokens)] == tokens]
        right = [*(self.rng.choice(known) if known else []), EOS, *self.rng.choices(range(4, VOCAB_SIZE), k=20)]
        num_right = self.rng.choice([0, 1, 2, 3, 20])
        wrong = self.rng.choices([EOS, BOS, *range(4, 20)], k=20)
        return [*right[:num_right], *wrong][: num_draft_tokens + self.rng.choice([0, 0, 3])]


def reckless(proposer, rng: random.Random, most: int = 6) -> Speculation:
    """As many draft tokens as a sequence may have, whatever they cost and whether or not any of them can be used."""
    speculation = Speculation(proposer, most, max_rows=10**6)

    def choose(scheduler: Scheduler) -> dict[Sequence, int]:
        counts = {}
        for seq in [*scheduler.running, *scheduler.waiting]:
            room = scheduler.max_model_len - len(seq.tokens) - 1
            counts[seq] = max(0, min(rng.randrange(most + 1), room))
        return counts

    speculation.choose = choose
    return speculation


def test_no_draft_tokens_where_a_prompt_is_cut_to_one_token(monkeypatch):
    """Such a chunk looks like a decode, and its next token is known."""
    scheduler, model = make(long_prefill_token_threshold=1), CacheModel(4)
    prompts = [list(range(n, n + 6)) for n in (10, 30)]
    known = [list(prompt) for prompt in prompts]
    for tokens in known:
        while len(tokens) < 14:
            tokens.append(next_token(tokens))
    speculation = Speculation(Hostile(known, random.Random(0)), 3, max_rows=100)
    times = speculation.times
    monkeypatch.setattr(times, "plain", lambda num_rows: 1.0)
    monkeypatch.setattr(times, "with_drafts", lambda: lambda num_rows: 1.0)
    monkeypatch.setattr(times, "num_rows_to_try", lambda num_rows: 100)
    seqs = [sequence(prompt, max_tokens=8) for prompt in prompts]
    for seq in seqs:
        scheduler.add(seq)
    outputs = []
    while scheduler.has_unfinished():
        outputs.append(run(scheduler, model, speculation.propose(scheduler)))
    assert [seq.tokens for seq in seqs] == known
    assert not any(chunk.draft_token_ids for output in outputs[:5] for chunk in output.chunks)
    assert any(chunk.draft_token_ids for output in outputs[5:] for chunk in output.chunks)


# -- the whole engine --------------------------------------------------------------------------------------------------


def random_params(rng: random.Random) -> SamplingParams:
    """Any mixture of everything that a request may say."""
    options: dict = dict(max_tokens=rng.randint(1, 24), seed=rng.choice([None, rng.randrange(100)]), temperature=0.0)

    def maybe(chance: float, **more: object) -> None:
        if rng.random() < chance:
            options.update(more)

    maybe(0.6, temperature=rng.uniform(0.3, 1.3), top_p=rng.choice([1.0, 0.8]), top_k=rng.choice([0, 20]))
    maybe(0.2, min_p=0.05)
    maybe(0.4, repetition_penalty=rng.uniform(0.8, 1.4), frequency_penalty=rng.uniform(-1, 1.5))
    maybe(0.3, presence_penalty=rng.uniform(-1, 1))
    maybe(0.3, stop=rng.sample("abcdehilmnorstu ", k=2), include_stop_str_in_output=rng.random() < 0.5)
    maybe(0.3, stop_token_ids=rng.sample(range(4, VOCAB_SIZE), k=30))
    maybe(0.3, ignore_eos=True)
    maybe(0.4, min_tokens=rng.randint(1, options["max_tokens"]))
    maybe(0.4, logprobs=rng.randint(0, 3))
    maybe(0.2, prompt_logprobs=1)
    maybe(0.2, n=rng.randint(2, 3))
    maybe(0.2, logit_bias={rng.randrange(4, VOCAB_SIZE): rng.uniform(-5, 5)})
    maybe(0.2, bad_words=[rng.choice(["e", "o", "the", "qu"])])
    maybe(0.1, allowed_token_ids=rng.sample(range(4, VOCAB_SIZE), k=40))
    if "allowed_token_ids" not in options:
        patterns = ["[a-z]{3}[0-9]{2,9}", "(ab|ba)*x", "[a-c ]*"]
        maybe(0.15, structured_outputs=StructuredOutputsParams(regex=rng.choice(patterns)))
    return SamplingParams(**options)


def random_requests(rng: random.Random, num: int) -> list[tuple[list[int], SamplingParams]]:
    prefixes = [rng.choices(range(4, VOCAB_SIZE), k=20) for _ in range(3)]
    requests = []
    for _ in range(num):
        loop = rng.choices(range(4, VOCAB_SIZE), k=rng.randint(1, 4))
        prompt = rng.choice(prefixes)[: rng.randint(0, 20)] + loop * rng.randint(1, 5)
        requests.append((prompt, random_params(rng)))
    return requests


def generate(llm: LLM, requests: Iterable[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    outputs = llm.generate(*(list(each) for each in zip(*requests, strict=True)), use_tqdm=False)
    llm.engine.scheduler.check_integrity()
    return outputs


def assert_same(found: list[RequestOutput], expected: list[RequestOutput], tolerance: float = 0) -> None:
    """tolerance: of log-probabilities, where PyTorch computes, or another number of ranks."""
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.token_ids, x.text) == (y.token_ids, y.text), f"{a.prompt_token_ids}"
            assert (x.finish_reason, x.stop_reason) == (y.finish_reason, y.stop_reason)
            assert_same_logprobs(x.logprobs, y.logprobs, tolerance)
        assert_same_logprobs(a.prompt_logprobs, b.prompt_logprobs, tolerance)


def assert_same_logprobs(found: list | None, expected: list | None, tolerance: float) -> None:
    assert (found is None) == (expected is None)
    for a, b in zip(found or [], expected or [], strict=True):
        assert (a is None) == (b is None)
        # What a grammar forbids is at -inf: which of these tokens are among the top is anybody's guess.
        a, b = ({t: x for t, x in (each or {}).items() if x.logprob > -math.inf} for each in (a, b))
        assert list(a) == list(b)
        for x, y in zip(a.values(), b.values(), strict=True):
            assert abs(x.logprob - y.logprob) <= tolerance * (1 + abs(y.logprob))
            assert (x.rank, x.decoded_token) == (y.rank, y.decoded_token)


def hostile(llm: LLM, outputs: list[RequestOutput], seed: int) -> None:
    """Draft for this engine, knowing what it will say."""
    continuations = [o.prompt_token_ids + sample.token_ids for o in outputs for sample in o.outputs]
    llm.engine.wings["speculation"] = reckless(Hostile(continuations, random.Random(seed)), random.Random(seed))


SETTINGS = [  # pools and budgets from roomy to as tight as can be
    by_night(dict()),
    dict(block_size=1, num_gpu_blocks_override=100),
    dict(block_size=16, num_gpu_blocks_override=6, max_num_seqs=3),
    dict(num_gpu_blocks_override=24, max_num_batched_tokens=7),
    dict(enable_prefix_caching=False, num_gpu_blocks_override=30),
    dict(optimizations=(), max_num_batched_tokens=30),
]


@pytest.mark.compiler
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_random_requests_are_answered_as_without_draft_tokens(checkpoint, options):
    """25 for each engine, cold and again warm: a hostile proposer, then n-grams."""
    rng, tolerance = random.Random(str(options)), 1e-5 if "optimizations" in options else 0
    requests, options = random_requests(rng, 25), OPTIONS | options
    expected = generate(LLM(str(checkpoint()), **options), requests)
    llm = LLM(str(checkpoint()), **options)
    hostile(llm, expected, seed=1)
    for _ in ("cold", "warm"):
        found = generate(llm, requests)
        # Only a request's index differs, from which it gets its seed if it has none.
        llm.engine._next_index = 0
        assert_same(found, expected, tolerance)
    stats = llm.stats()
    assert 0 < stats["num_accepted_tokens"] < stats["num_draft_tokens"] * 0.9
    assert stats["num_output_tokens"] == 2 * sum(len(s.token_ids) for o in expected for s in o.outputs)
    metrics = [o.metrics for o in found]
    assert all(m.num_output_tokens == len(o.outputs[0].token_ids) for m, o in zip(metrics, found, strict=True))
    assert 0 < sum(m.num_accepted_tokens for m in metrics) < sum(m.num_draft_tokens for m in metrics)

    llm = LLM(str(checkpoint()), speculative_config=NGRAM, **options)
    llm.engine.wings["speculation"] = reckless(llm.engine.speculation.proposer, rng)
    assert_same(generate(llm, requests), expected, tolerance)
    assert llm.stats()["num_draft_tokens"] > 0


@pytest.mark.nightly
def test_three_ranks_give_the_same(tmp_path, processes):
    sizes = dict(num_attention_heads=3, num_key_value_heads=3, hidden_size=48, vocab_size=324)
    folder = make_checkpoint(tmp_path, "llama", **sizes)
    requests = random_requests(random.Random(5), 12)
    expected = generate(LLM(str(folder), **OPTIONS), requests)
    llm = processes.llm(folder, 3, **OPTIONS)
    together = generate(llm, requests)
    assert_same(together, expected, 1e-5)
    alone = []
    for i, request in enumerate(requests):
        llm.engine._next_index = i
        alone += generate(llm, [request])
    assert_same(alone, together)
    hostile(llm, expected, seed=2)
    llm.engine._next_index = 0
    assert_same(generate(llm, requests), together)
    assert llm.stats()["num_accepted_tokens"] > 30


def test_streams_show_only_what_holds(checkpoint):
    """Each output is a beginning of the answer; several tokens come at a time, and none after a stop string."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=0)
    [whole] = generate(LLM(str(checkpoint()), **OPTIONS), [([5, 6, 7], params)])
    text = whole.outputs[0].text
    stop = text[len(text) // 2 :][:3]
    [expected] = generate(LLM(str(checkpoint()), **OPTIONS), [([5, 6, 7], replace(params, stop=stop))])
    llm = LLM(str(checkpoint()), **OPTIONS)
    hostile(llm, [whole], seed=3)
    outputs = list(llm.stream([5, 6, 7], replace(params, stop=stop)))
    assert outputs[-1].outputs[0].text == expected.outputs[0].text == text[: text.index(stop)]
    assert outputs[-1].outputs[0].stop_reason == stop
    for output in outputs:
        [sample] = output.outputs
        assert expected.outputs[0].token_ids[: len(sample.token_ids)] == sample.token_ids
        assert expected.outputs[0].text.startswith(sample.text) and len(sample.logprobs) == len(sample.token_ids)
    assert 1 < outputs[-1].metrics.tokens_per_step == len(sample.token_ids) / len(outputs)


@pytest.mark.compiler
def test_failing_steps_and_aborts_leave_nothing_of_a_draft(checkpoint, monkeypatch):
    requests = random_requests(random.Random(7), 25)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    llm, rng = LLM(str(checkpoint()), **OPTIONS), random.Random(7)
    hostile(llm, expected, seed=4)
    engine = llm.engine

    runner = engine.model_runner
    for owner, name, after in ((engine, "update", True), (engine, "update", False), (runner, "run", True)):
        plant(monkeypatch, owner, name, lambda n: rng.random() < 0.1, InterruptedError, after=after)
    made = [engine.make_request(prompt, params) for prompt, params in requests]
    doomed = [engine.make_request([9, 8, 7], SamplingParams(max_tokens=50, ignore_eos=True)) for _ in range(3)]
    engine.enqueue([*made, *doomed])
    done, num_failures = {}, 0
    while engine.has_unfinished_requests():
        try:
            done.update((output.request_id, output) for output in engine.step())
        except InterruptedError:
            num_failures += 1
        if doomed and rng.random() < 0.1:
            engine.abort_request(doomed.pop().request_id)
        engine.scheduler.check_integrity()
    assert num_failures > 5
    assert_same([done[request.request_id] for request in made], expected)


def test_a_failed_step_is_not_counted(checkpoint, monkeypatch):
    """What a request says of its draft tokens is what the engine counted of steps that succeeded."""
    prompt, params = [5, 6, 7], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    expected = generate(LLM(str(checkpoint()), **OPTIONS), [(prompt, params)])
    llm, rng = LLM(str(checkpoint()), **OPTIONS), random.Random(3)
    hostile(llm, expected, seed=6)
    engine = llm.engine
    fault = plant(monkeypatch, engine, "update", lambda n: rng.random() < 0.3, InterruptedError, after=True)
    engine.add_request("x", prompt, params, stream=False)
    metrics, stats = run_to_end(engine, InterruptedError)["x"].metrics, engine.stats
    assert fault.num_failures > 2 and stats.num_accepted_tokens > 5
    for name in ("num_output_tokens", "num_draft_tokens", "num_accepted_tokens"):
        assert getattr(metrics, name) == getattr(stats, name), name


def test_each_token_of_a_prompt_is_counted_once(checkpoint):
    """Also in a chunk that ends a prompt with one token, which is a row of a prompt and has draft tokens."""
    llm = LLM(str(checkpoint()), **OPTIONS, max_num_batched_tokens=16, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    prompts = [[n, *[5, 6, 7] * 16] for n in range(8, 14)]  # 49 tokens
    expected = generate(LLM(str(checkpoint()), **OPTIONS), [(prompt, params) for prompt in prompts])
    hostile(llm, expected, seed=8)
    drafts: list[int] = []
    llm.engine.on_step = lambda output, requests: drafts.extend(
        len(chunk.draft_token_ids) for chunk in output.chunks if chunk.is_prefill
    )
    generate(llm, [(prompt, params) for prompt in prompts])
    stats = llm.stats()
    assert sum(drafts) > 0, "no draft tokens beside the end of a prompt: this test has tested nothing"
    assert stats["num_prefill_tokens"] == 6 * 49 and stats["num_decode_tokens"] == 6 * 5


# -- what others got wrong: each planted here, and seen ----------------------------------------------------------------


def seeds_mixed(monkeypatch):
    """The noise of a draft token's row is that of the sequence's next token."""
    noise, first = sampler.uniform_noise, {}

    def same_for_all_rows(seq):
        return noise(first.setdefault(id(seq.block_table), seq))

    def forget(*args):
        first.clear()
        return pack(*args)

    pack = model_runner.pack
    monkeypatch.setattr(model_runner, "pack", forget)
    monkeypatch.setattr(sampler, "uniform_noise", same_for_all_rows)


def drafts_not_in_penalties(monkeypatch):
    """Penalties, bad words, min_tokens and grammars see the sequence without its draft tokens."""
    monkeypatch.setattr(ScheduledChunk, "sampled_seqs", lambda chunk: [chunk.seq] * chunk.num_logits)


def wrong_row(monkeypatch):
    whole = model_runner.Batch.from_scheduler_output.__func__

    def shifted(cls, output, block_size):
        batch = whole(cls, output, block_size)
        return replace(batch, logits_rows=batch.logits_rows.roll(1))

    monkeypatch.setattr(model_runner.Batch, "from_scheduler_output", classmethod(shifted))


def one_too_many_taken(monkeypatch):
    """The token after the first wrong draft token is kept."""
    take = Scheduler.accept_tokens

    def late(self, chunk, token_ids):
        draft = [*chunk.draft_token_ids]
        for i, token_id in enumerate(draft):
            if token_ids[i] != token_id:
                draft[i] = token_ids[i]
                break
        take(self, replace(chunk, draft_token_ids=draft), token_ids)

    monkeypatch.setattr(Scheduler, "accept_tokens", late)


def rejected_kv_counts(monkeypatch):
    """Positions of rejected draft tokens count as computed: their K/V stays."""
    take = Scheduler.accept_tokens

    def kept(self, chunk, token_ids):
        take(self, chunk, token_ids)
        if chunk.draft_token_ids and chunk.seq.finish_reason is None:
            chunk.seq.num_computed_tokens = min(chunk.end, len(chunk.seq.tokens)) - 1 + bool(chunk.draft_token_ids)

    monkeypatch.setattr(Scheduler, "accept_tokens", kept)


def registered_too_early(monkeypatch):
    monkeypatch.setattr(Scheduler, "add_drafts", register_too_early)


def kept_after_the_stop(monkeypatch):
    """Draft tokens after a stop string stay in the output: the text is read when the whole run has been appended."""
    take = Scheduler.accept_tokens

    def late(self, chunk, token_ids):
        seq = chunk.seq
        checker, seq.stop_checker, known = seq.stop_checker, None, len(seq.tokens)
        take(self, chunk, token_ids)
        seq.stop_checker = checker
        if checker is not None and seq.finish_reason is None:
            found = checker.append(seq.tokens[known:])
            if found is not None:
                self.finish(seq, "stop", found)

    monkeypatch.setattr(Scheduler, "accept_tokens", late)


MISTAKES = [
    seeds_mixed,
    drafts_not_in_penalties,
    wrong_row,
    one_too_many_taken,
    rejected_kv_counts,
    registered_too_early,
    kept_after_the_stop,
]


@pytest.mark.compiler
@pytest.mark.nightly
@pytest.mark.parametrize("plant", MISTAKES)
def test_known_mistakes_are_seen(checkpoint, monkeypatch, plant):
    """The comparison that all of this rests on, with a mistake in the engine: it must fail, and nothing before it may.

    Only where a token counts as computed that is not, the engine itself finds no row for it.
    """
    rng = random.Random(11)
    requests = random_requests(rng, 12)
    grammar, stop = StructuredOutputsParams(regex="(ab|ba)*x"), list("aeioust")
    requests += [(prompt, SamplingParams(max_tokens=20, structured_outputs=grammar)) for prompt, _ in requests[:3]]
    requests += [(prompt, SamplingParams(max_tokens=20, stop=stop, temperature=0)) for prompt, _ in requests[:6]]
    expected = generate(LLM(str(checkpoint()), **OPTIONS), requests)
    llm = LLM(str(checkpoint()), **OPTIONS)
    hostile(llm, expected, seed=5)
    plant(monkeypatch)
    with pytest.raises(IndexError if plant is rejected_kv_counts else AssertionError):
        for _ in ("cold", "warm"):
            found = generate(llm, requests)
            llm.engine._next_index = 0
            assert_same(found, expected)


# -- the scheduler alone -----------------------------------------------------------------------------------------------


class SometimesRight:
    """Knows the rule by which tokens follow each other, and keeps to it with this probability."""

    draft_s = 0.0

    def __init__(self, rng: random.Random, acceptance: float):
        self.rng, self.acceptance = rng, acceptance

    def propose(self, wanted):
        found = []
        for seq, num_draft_tokens in wanted:
            tokens = list(seq.tokens)
            for _ in range(num_draft_tokens):
                tokens.append(next_token(tokens) if self.rng.random() < self.acceptance else 10_000)
            found.append(tokens[len(seq.tokens) :])
        return found


any_acceptance_any_pool = given(
    seed=st.integers(0, 2**32),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    acceptance=st.none() | st.floats(0, 1),
    max_num_seqs=st.sampled_from([1, 3, 8]),
    budget=st.sampled_from([1, 3, 7, 30]),
)


@settings(max_examples=25, deadline=None)
@any_acceptance_any_pool
def test_any_acceptance_any_pool_the_same_tokens(seed, block_size, acceptance, max_num_seqs, budget):
    """Tiny pools, budgets and block sizes, failing steps and aborts: every slot read holds what it should."""
    check_tokens(seed, block_size, acceptance, max_num_seqs, budget)


@pytest.mark.nightly
@settings(max_examples=1000, deadline=None)
@any_acceptance_any_pool
def test_any_acceptance_any_pool_at_length(seed, block_size, acceptance, max_num_seqs, budget):
    check_tokens(seed, block_size, acceptance, max_num_seqs, budget)


def check_tokens(seed: int, block_size: int, acceptance: float | None, max_num_seqs: int, budget: int) -> None:
    """acceptance: the share of draft tokens that are right; None: there are none."""
    rng = random.Random(seed)
    num_blocks = -(-40 // block_size) + rng.randrange(4)
    scheduler = make(num_blocks, block_size, max_model_len=40, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    speculation = None if acceptance is None else reckless(SometimesRight(rng, acceptance), rng)
    model, everything = CacheModel(block_size), []
    for _ in range(20):
        start = rng.randrange(3)
        seq = sequence(range(start, start + rng.randrange(1, 24)), max_tokens=rng.randrange(1, 14))
        everything.append(seq)
        scheduler.add(seq)
    for _ in range(3000):
        if not scheduler.has_unfinished():
            break
        drafts = {} if speculation is None else speculation.propose(scheduler)
        output = scheduler.schedule(drafts)
        scheduler.check_integrity()
        assert output.num_tokens == sum(c.end - c.start for c in output.chunks) <= budget
        what = rng.random()
        seqs = dict(scheduler.seqs)
        if what < 0.05:
            scheduler.restart(seqs.values())
        else:
            scheduler.update(output, model.execute(output))
            if what < 0.1:  # the step fails when the tokens are in already
                for chunk in output.chunks:
                    if chunk.reaches_end:
                        chunk.seq.truncate(chunk.known_end)
                scheduler.restart(seqs.values())
        if 0.1 < what < 0.13:
            scheduler.abort(rng.choice(everything).seq_id)
        scheduler.check_integrity()
    assert not scheduler.has_unfinished()
    for seq in everything:
        for position in range(seq.num_prompt_tokens, len(seq.tokens)):
            assert seq.tokens[position] == next_token(seq.tokens[:position])
        assert seq.finish_reason == "abort" or seq.num_generated_tokens == min(
            seq.sampling_params.max_tokens, 40 - seq.num_prompt_tokens
        )


def test_draft_tokens_yield_to_those_who_wait():
    """Neither the budget nor a block that somebody else may need goes to a draft; slots that are there anyway may."""
    scheduler = make(num_blocks=8, block_size=4, max_model_len=32, max_num_batched_tokens=8)
    speculation = reckless(SometimesRight(random.Random(0), 1.0), rng := random.Random(0))
    rng.randrange = lambda n: n - 1  # always the most
    model = CacheModel(4)
    first, second = sequence(range(5), max_tokens=20), sequence(range(50, 70), max_tokens=4)
    scheduler.add(first)
    output = run(scheduler, model, speculation.propose(scheduler))
    assert len(output.chunks[0].draft_token_ids) == 3 and len(first.tokens) == 9, "as many as the budget has room for"
    scheduler.add(second)  # its 20 tokens need all of the blocks that are left
    output = run(scheduler, model, speculation.propose(scheduler))
    counts = [(c.end - c.start, c.draft_token_ids) for c in output.chunks]
    assert counts == [(1, []), (7, [])], "the prompt gets the budget"
    third = sequence(range(80, 84))
    scheduler.add(third)
    while second in scheduler.running and third in scheduler.waiting:
        output = run(scheduler, model, speculation.propose(scheduler))
        for chunk in output.chunks:
            assert not chunk.draft_token_ids or chunk.end <= scheduler.block_manager.num_blocks_for(chunk.known_end) * 4
        scheduler.check_integrity()


# -- n-grams, and how many draft tokens --------------------------------------------------------------------------------


def search(tokens: list[int], longest: int, shortest: int, num_draft_tokens: int) -> list[int]:
    """The slow twin: look for the last n tokens everywhere, from the end on; then read on, into what was read."""
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:]:
                text = list(tokens)
                for i in range(num_draft_tokens):
                    text.append(text[start + n + i])
                return text[len(tokens) :]
    return []


def test_a_long_prompt_is_indexed_over_several_calls(monkeypatch):
    monkeypatch.setattr(ngrams, "AT_ONCE", 8)
    proposer, seq = ngrams.NgramProposer(3, 1), sequence([*range(10), *range(10)])
    other, short = sequence([*range(5), *range(5)]), sequence([1, 2, 1])
    kinds = [proposer.kinds([seq, other, short]) for _ in range(5)]
    # 3 + 5, 5 + 3, 8, 8, 1 tokens: a step's budget is one for all
    assert kinds == [[None, None, 1], [None, 3, 1], [None, 3, 1], [None, 3, 1], [3, 3, 1]]
    assert proposer.propose([(seq, 4)]) == [search(seq.tokens, 3, 1, 4)]


def test_a_prompt_that_is_scored_takes_no_draft_tokens():
    """It generates nothing, so its last chunk, of one token, has no place after it."""
    scheduler = make(max_num_batched_tokens=15, max_model_len=16)
    seq = sequence(range(16), max_tokens=0, prompt_logprobs=0)
    scheduler.add(seq)
    scheduler.schedule()
    output = scheduler.schedule({seq.seq_id: [7] * 4})
    assert [(chunk.start, chunk.end, chunk.draft_token_ids) for chunk in output.chunks] == [(15, 16, [])]
    scheduler.check_integrity()


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).filter(lambda x: x[0] >= x[1]),
    num_draft_tokens=st.integers(1, 8),
    step=st.integers(1, 5),
)
def test_the_index_finds_what_a_search_finds(tokens, lengths, num_draft_tokens, step):
    longest, shortest = lengths
    index = NgramIndex(range(longest, shortest - 1, -1))
    for end in [*range(1, len(tokens), step), len(tokens), len(tokens) // 2 + 1]:  # at last: a step has failed
        assert index.propose(tokens[:end], num_draft_tokens) == search(
            tokens[:end], longest, shortest, num_draft_tokens
        )


def test_the_index_reads_each_token_once():
    class Counted(list):
        num_read = 0

        def __getitem__(self, key):
            Counted.num_read += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
            return super().__getitem__(key)

    tokens, index = Counted(random.Random(0).choices(range(9), k=5000)), NgramIndex(range(4, 1, -1))
    index.propose(tokens, 5)
    Counted.num_read = 0
    for _ in range(100):
        tokens.append(3)
        index.propose(tokens, 5)
    assert Counted.num_read < 100 * 30, "a step reads the new token's n-grams and the draft, not the text"


@settings(max_examples=200, deadline=None)
@given(
    sequences=st.lists(st.tuples(st.floats(0.01, 0.99), st.integers(0, 3)), min_size=1, max_size=3),
    base=st.floats(0.1, 2.0),
    slope=st.floats(0.0, 1.0),
    draft_s=st.floats(0.0, 0.5),
    max_draft_tokens=st.integers(1, 6),
)
def test_chosen_numbers_make_the_most_tokens_a_second(sequences, base, slope, draft_s, max_draft_tokens):
    acceptances, limits = map(list, zip(*sequences, strict=True))

    step_s = [base + slope * (len(sequences) + n) for n in range(max_draft_tokens + 1)]

    def rate(counts) -> float:
        expected = [(1 - a ** (k + 1)) / (1 - a) for a, k in zip(acceptances, counts, strict=True)]
        seconds = step_s[sum(counts)] + max(counts) * draft_s
        return sum(expected) / seconds * (1 if any(counts) else MIN_GAIN)

    found = choose_num_draft_tokens(acceptances, limits, step_s, draft_s)
    all_counts = [c for c in product(*(range(n + 1) for n in limits)) if sum(c) <= max_draft_tokens]
    assert tuple(found) in all_counts and rate(found) == pytest.approx(max(map(rate, all_counts)))


def test_step_times_are_learned_and_forgotten():
    times = StepTimes()
    assert times.plain(1) is None
    times.add(30, 0.5, has_drafts=False)  # a prompt
    assert times.plain(1) is None and times.plain(40) == 0.5, "what is smaller than all that was measured is not known"
    for seconds in (0.9, 0.1, 0.1, 0.12, 0.1):  # one slow step does not count
        times.add(1, seconds, has_drafts=False)
    assert times.plain(1) == 0.1 and times.plain(11) == pytest.approx(0.1 + 0.4 * 10 / 29)
    assert times.with_drafts()(11) == times.plain(11), "as without draft tokens, while nothing else is known"
    times.add(5, 0.4, has_drafts=True)
    assert times.with_drafts()(5) == 0.4 and times.with_drafts()(3) == pytest.approx(0.25)
    assert times.plain(5) == pytest.approx(0.1 + 0.4 * 4 / 29), "steps with draft tokens count apart"
    for _ in range(200):
        times.add(1, 0.1, has_drafts=False)
    assert times.with_drafts()(5) == 0.1, "what is old is forgotten"


def decide(speculation: Speculation, num_seqs: int, seconds, hold) -> list[int]:
    """Draft tokens in each of 300 steps of a machine on which a step of n rows takes seconds(n)."""
    scheduler = make(num_blocks=10**4, block_size=16, max_model_len=4000, max_num_batched_tokens=4000, max_num_seqs=64)
    seqs, counts = [sequence([i], max_tokens=3000) for i in range(num_seqs)], []
    scheduler.running = seqs
    for _ in range(300):
        counted = speculation.choose(scheduler)
        chosen = [counted.get(seq, 0) for seq in seqs]
        speculation.times.add(num_seqs + sum(chosen), seconds(num_seqs + sum(chosen)), any(chosen))
        for seq, n in zip(seqs, chosen, strict=True):
            if seq in speculation._asked:
                for record in speculation._asked[seq]:
                    record.add(min(n, hold(n)), n)
        counts.append(sum(chosen))
    return counts


def test_draft_tokens_are_checked_where_they_pay():
    def of(num_seqs, seconds, hold):
        return decide(Speculation(Hostile([], random.Random(0)), 5, 1000), num_seqs, seconds, hold)

    def bytes_bound(n):
        return 10 + 0.2 * n

    def arithmetic_bound(n):
        return 1 + n

    rng = random.Random(0)
    counts = of(1, bytes_bound, hold=lambda n: n)
    assert counts.count(5) > 290, "all hold and a row costs little: the most, and at times none, to measure that"
    assert 5 < sum(of(1, bytes_bound, hold=lambda n: 0)) < 120, "they fail: it backs off, and tries again at times"
    assert 1 < sum(of(1, lambda n: 10 + 2 * n, hold=lambda n: 0)) < 25, "the more a draft token costs, the less often"
    most_hold = of(32, arithmetic_bound, hold=lambda n: next((i for i in range(n) if rng.random() > 0.6), n))
    assert sum(n > 0 for n in most_hold) < 10, "a row costs as much as it brings"
    assert sum(of(32, bytes_bound, hold=lambda n: n)[-100:]) > 100 * 32, "many rows, but the step waits for bytes"


@pytest.mark.parametrize(
    "sampled, kept, reason",
    [
        ([NO_TOKEN, 7, 8], [], "error"),
        ([7, NO_TOKEN, 9], [7], "error"),
        ([7, 8, NO_TOKEN], [7, 8], "error"),
        ([6, NO_TOKEN, NO_TOKEN], [6], None),  # after a draft token that is rejected
    ],
)
def test_a_row_without_a_token(sampled, kept, reason):
    """It ends its sequence, with the tokens before it, if the draft tokens before it are accepted."""
    limits = dict(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=16)
    scheduler, seqs = Scheduler(BlockManager(8, 4), **limits), [Sequence([1, 2, 3]), Sequence([4])]
    for seq in seqs:
        scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [[5], [5]])
    output = scheduler.schedule({seqs[0].seq_id: [7, 8]})
    ended = scheduler.update(output, [sampled, [5]])
    assert seqs[0].generated_token_ids == [5, *kept] and seqs[0].finish_reason == reason
    assert ended == [seqs[0]] * (reason is not None) and seqs[1].generated_token_ids == [5, 5]
    scheduler.check_integrity()
