"""What a repaired engine has to do. The checks are the same for all files: a repair that breaks another thing fails."""

from collections.abc import Callable

from chapters.capstone.session import Session, crowd, text_alone
from chapters.expect import ensure, expect, expect_sane


def texts() -> None:
    """everybody gets the text that they get alone"""
    for seed in range(3):
        for num_blocks in (24, 64):
            session = Session(num_blocks)
            crowd(session, seed)
            session.run()
            for number, seq in enumerate(session.seqs):
                expect(
                    text_alone(seq),
                    seq.generated_token_ids,
                    f"request {number} of a crowd gets a different text than alone",
                )


def tenants() -> None:
    """tenants find their own prompts in the cache, and nobody else's"""
    session, prompt = Session(), [*range(12), 99]
    found = []
    for salt in (None, "a", "b", "a", None):
        seq = session.send(prompt, 1, cache_salt=salt)
        session.run()
        found.append(seq.num_cached_tokens)
    expect([0, 0, 0, 12, 12], found, "tokens found in the cache, for the salts None, a, b, a, None")


def adapters() -> None:
    """adapters find their own prompts in the cache, and compute the text of no other"""
    session, prompt = Session(), [*range(12), 99]
    found = []
    for lora_id in (None, 1, 2, 1):
        seq = session.send(prompt, 3, lora_id=lora_id)
        session.run()
        found.append(seq.num_cached_tokens)
        expect(
            text_alone(seq), seq.generated_token_ids, f"with the adapter {lora_id}, the text is different than alone"
        )
    expect([0, 0, 0, 12], found, "tokens found in the cache, for the adapters None, 1, 2, 1")


def budget() -> None:
    """a step has no more tokens than its budget, and uses it"""
    for first, then in ((1, 1), (4, 4), (8, 3)):  # the last is lowered on the way: more run than it has tokens
        session = Session(budget=first)
        for i in range(4):
            session.send([100 * i, 1], 12)
        while session.scheduler.has_unfinished() and len(session.outputs) < 200:
            scheduler, number = session.scheduler, len(session.outputs)
            most = scheduler.max_num_batched_tokens = first if number < 5 else then
            sizes = [chunk.end - chunk.start for chunk in session.step().chunks]
            ensure(sum(sizes) <= most, f"step {number} computes more tokens than its budget of {most}", got=sizes)
            ensure(min(sizes, default=1) > 0, f"step {number} has a chunk without tokens", got=sizes)
        answers = [seq.num_generated_tokens for seq in session.seqs]
        expect([12] * 4, answers, f"tokens of the four answers, with a budget of {first}, later {then}, a step")


def everybody_moves() -> None:
    """while the budget lasts, everybody who runs gets a token in every step"""
    for most in (2, 5, 8):
        session = Session(budget=most)
        users = [session.send([100 * i], 30) for i in range(most)]
        for _ in range(20):
            session.step()
        counts = [seq.num_generated_tokens for seq in users]
        ensure(max(counts) - min(counts) <= 1, f"{most} users, a budget of {most}: tokens after 20 steps", got=counts)


def memory() -> None:
    """clients that leave give back what they alone have held, running or waiting, and no more"""
    session = Session(num_blocks=32, max_num_seqs=4)
    seqs = [session.send([*range(8), i], 20) for i in range(6)]  # the last two wait
    for _ in range(3):
        session.step()
    for seq in (seqs[0], seqs[5], seqs[0]):
        session.leave(seq)
        expect_sane(session.scheduler, "after a client has left, ")
    session.run()
    expect(0, session.num_held, "blocks in use when all have ended")
    for seq in seqs[1:5]:
        expect(text_alone(seq), seq.generated_token_ids, "a client has left, and somebody else's text has changed")
    again = session.send([*range(8), 77], 1)
    session.run()
    expect(8, again.num_cached_tokens, "prompt tokens found in the cache after clients had left")


def invariants() -> None:
    """all invariants hold after every step, with clients that leave and a pool that is too small"""
    for seed in range(4):
        session = Session(num_blocks=24)
        crowd(session, seed, leaving=True)
        for _ in range(400):
            expect_sane(session.scheduler)
            if not session.scheduler.has_unfinished():
                break
            session.step()
        expect(0, session.num_held, "blocks in use when all have ended")


def kept(probs: list[float], top_p: float, top_k: int = 0, min_p: float = 0.0) -> list[float]:
    """By hand, one token after another."""
    left = [p for p in probs if p >= min_p * probs[0]][: top_k or len(probs)]
    total, result = 0.0, []
    for p in left:
        if total >= top_p * sum(left) and top_p < 1:
            break
        result.append(p)
        total += p
    return result


def compare_top_p(rows: list[tuple[list[float], float, int, float]]) -> None:
    import torch

    from nanovllm.worker.sampler import logit_threshold

    for probs, top_p, top_k, min_p in rows:
        scaled = torch.tensor([probs], dtype=torch.float64).log()
        options = torch.tensor([top_k or len(probs)]), torch.tensor([top_p], dtype=torch.float64)
        threshold = logit_threshold(scaled, *options, torch.tensor([min_p], dtype=torch.float64))
        got = [p for p, is_left in zip(probs, (scaled >= threshold[:, None])[0].tolist(), strict=True) if is_left]
        what = f"probabilities {probs}, top_p={top_p}, top_k={top_k}, min_p={min_p}: what is left"
        expect(kept(probs, top_p, top_k, min_p), got, what)


def sure() -> None:
    """the most probable token is always left"""
    compare_top_p([([0.95, 0.03, 0.02], p, 0, 0.0) for p in (0.1, 0.5, 0.9)])


def unsure() -> None:
    """top_p keeps the fewest tokens that reach it, the one that crosses it included"""
    compare_top_p([([0.4, 0.3, 0.2, 0.1], p, 0, 0.0) for p in (0.35, 0.45, 0.69, 0.71, 0.95, 1.0)])


def together() -> None:
    """top_p keeps a share of what top_k and min_p leave"""
    compare_top_p([([0.4, 0.3, 0.2, 0.1], 0.55, k, m) for k in (0, 1, 2, 3) for m in (0.0, 0.6)])


CORE: tuple[Callable[[], None], ...] = texts, tenants, adapters, budget, everybody_moves, memory, invariants
BATTERIES = {1: CORE, 2: CORE, 3: CORE, 4: CORE, 5: (sure, unsure, together)}
