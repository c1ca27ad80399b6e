"""What users of the five broken engines complain about: each function runs a session and says what was seen."""

from collections.abc import Iterator

from chapters.capstone.session import Session, text_alone


def secrets_by_the_clock() -> Iterator[str]:
    yield "Two companies share our server. Each sends a cache_salt of its own: neither should find the other's prompts."
    yield "The second company's engineer writes: 'I can read our competitor's price list, four tokens at a time.'"
    session = Session()
    secret = [7, 7, 7, 7, 31, 41, 59, 26]
    session.send(secret, 2, cache_salt="company A")
    session.run()
    for guess in ([7, 7, 7, 7, 1, 2, 3, 4], [7, 7, 7, 7, 31, 41, 59, 26]):
        seq = session.send([*guess, 0], 1, cache_salt="company B")
        session.run()
        yield f"  company B asks {guess}: {seq.num_cached_tokens} of 9 prompt tokens were in the cache: a faster answer"


def somebody_elses_text() -> Iterator[str]:
    yield "All our users have one system prompt. When it is busy, some get a text that they do not get at night."
    session = Session(num_blocks=12)
    system = list(range(16))
    short, long = session.send([*system, 50], 2), session.send([*system, 60], 14)
    for _ in range(4):
        session.step()
    session.send([*range(300, 320)], 3)
    try:
        session.run()
    except AssertionError as error:
        yield f"  then the server stopped: AssertionError: {error}"
    for name, seq in (("short", short), ("long", long)):
        got, alone = seq.generated_token_ids, text_alone(seq)
        at = next((i for i, (a, b) in enumerate(zip(got, alone, strict=False)) if a != b), None)
        what = f"different tokens than alone, from token {at} on" if at is not None else "as alone"
        yield f"  the {name} answer: {what}"


def the_last_in_line() -> Iterator[str]:
    yield "Eight users stream at once, with max_num_batched_tokens=8. One writes that no more tokens arrive."
    session = Session(budget=8)
    users = [session.send([100 * i, 1], 40) for i in range(8)]
    for _ in range(30):
        session.step()
    yield f"  tokens after 30 steps, by user: {', '.join(str(seq.num_generated_tokens) for seq in users)}"
    yield f"  tokens in the last step: {session.outputs[-1].num_tokens} of 8"


def memory_that_does_not_come_back() -> Iterator[str]:
    yield "Memory in use rises all day. At night, when nobody is there, it stays. On the third day nobody gets in."
    session = Session(num_blocks=64)
    for hour in range(1, 5):
        for i in range(3):
            session.send([hour, i, 1, 2, 3], 4)
            leaves = session.send([hour, i, 9, 8, 7], 40)
            session.step()
            session.step()
            session.leave(leaves)
            session.run()
        yield f"  hour {hour}: 3 answers complete, 3 clients left; {session.num_held} of 64 blocks still in use"


def sure_answers_fail() -> Iterator[str]:
    import torch

    from nanovllm.worker.sampler import logit_threshold

    yield "With top_p=0.9, answers that the model is sure of fail. Where it is unsure they have become duller."
    for probs in ([0.95, 0.03, 0.02], [0.5, 0.3, 0.15, 0.05]):
        scaled = torch.tensor([probs]).log()
        most = torch.tensor([len(probs)])
        threshold = logit_threshold(scaled, most, torch.tensor([0.9]), torch.tensor([0.0]))
        left = [p for p, is_left in zip(probs, (scaled >= threshold[:, None])[0].tolist(), strict=True) if is_left]
        yield f"  tokens with probabilities {probs}: {left or 'none'} left to draw from"


SYMPTOMS = {
    1: secrets_by_the_clock,
    2: somebody_elses_text,
    3: the_last_in_line,
    4: memory_that_does_not_come_back,
    5: sure_answers_fail,
}
