"""Case: a session in a few lines of text, in which a fault can be seen. It is data: nothing of it is run as code.

    blocks 12                 the memory; also: budget 8 (tokens of a step), seats 4. Blocks have 4 tokens
    send ada 3: 1 2 3 4 5     the request ada: this prompt, and an answer of 3 tokens. salt=x or lora=1 before the colon
    step                      step 4: four of them
    leave ada                 its client goes
    run                       until all have ended

For engine 5 a line is a row of probabilities and what cuts it:   probs 0.5 0.3 0.2 top_p 0.6 top_k 2 min_p 0.1
"""

from typing import Any

from chapters.capstone.session import Session

MOST_TOKENS, MOST_STEPS = 200, 200


def read_case(text: str) -> list[list[str]]:
    """The words of each line; empty lines and what follows a # are left out."""
    lines = [line.split("#")[0].replace(":", " : ").split() for line in text.splitlines()]
    return [line for line in lines if line]


def see(lines: list[list[str]]) -> list[str]:
    """What users and whoever watches the memory see, line by line. Raises ValueError for what is no case."""
    if lines and lines[0][0] == "probs":
        return [_left(line) for line in lines]
    sizes = {"blocks": 64, "budget": 64, "seats": 16}
    while lines and lines[0][0] in sizes:
        sizes[lines[0][0]] = _number(lines[0][1:], 1, 1000)
        lines = lines[1:]
    session = Session(sizes["blocks"], 4, sizes["seats"], sizes["budget"])
    names: dict[str, Any] = {}
    seen: list[str] = []
    for line in lines:
        try:
            _do(line, session, names)
        except AssertionError as error:
            return [*seen, f"{' '.join(line)}: the engine stops: {error}"]
        got = [f"{name} {seq.num_cached_tokens} cached, {seq.generated_token_ids}" for name, seq in names.items()]
        seen.append(f"{' '.join(line)}: {session.num_held} blocks in use; {'; '.join(got)}")
    return seen


def _do(line: list[str], session: Session, names: dict[str, Any]) -> None:
    what, *words = line
    if what == "send" and ":" in words[2:]:
        (name, count, *options), prompt = words[: words.index(":")], words[words.index(":") + 1 :]
        keys = dict(option.split("=", 1) for option in options if "=" in option)
        if len(keys) != len(options) or keys.keys() - {"salt", "lora"} or name in names:
            raise ValueError(f"cannot read: {' '.join(line)}")
        lora = _number([keys["lora"]], 1, 99) if "lora" in keys else None
        if len(prompt) > MOST_TOKENS:
            raise ValueError(f"a prompt has at most {MOST_TOKENS} tokens, found {len(prompt)}")
        tokens = [_number([word], 0, 10**6) for word in prompt]
        names[name] = session.send(tokens, _number([count], 1, 100), cache_salt=keys.get("salt"), lora_id=lora)
    elif what == "step":
        for _ in range(_number(words or ["1"], 1, MOST_STEPS)):
            session.step()
    elif what == "run" and not words:
        session.run(MOST_STEPS)
    elif what == "leave" and len(words) == 1 and words[0] in names:
        session.leave(names[words[0]])
    else:
        raise ValueError(f"cannot read: {' '.join(line)}")


def _left(line: list[str]) -> str:
    """What top_p and its companions leave of a row of probabilities."""
    import torch

    from nanovllm.worker.sampler import logit_threshold

    options = {"top_p": 1.0, "top_k": 0.0, "min_p": 0.0}
    at = next((i for i, word in enumerate(line) if word in options), len(line))
    probs = [float(word) for word in line[1:at]]
    names, values = line[at::2], line[at + 1 :: 2]
    if len(names) != len(values) or not options.keys() >= set(names):
        raise ValueError(f"cannot read: {' '.join(line)}")
    for name, value in zip(names, values, strict=True):
        options[name] = float(value)
    if not probs or min(probs) <= 0 or sorted(probs, reverse=True) != probs:
        raise ValueError(f"probabilities are above 0, the largest first: {' '.join(line)}")
    scaled, top_k = torch.tensor([probs], dtype=torch.float64).log(), int(options["top_k"]) or len(probs)
    top_p, min_p = (torch.tensor([options[name]], dtype=torch.float64) for name in ("top_p", "min_p"))
    threshold = logit_threshold(scaled, torch.tensor([top_k]), top_p, min_p)
    left = [p for p, is_left in zip(probs, (scaled >= threshold[:, None])[0].tolist(), strict=True) if is_left]
    return f"{' '.join(line)}: {left} left"


def _number(words: list[str], least: int, most: int) -> int:
    if len(words) != 1 or not words[0].isdigit() or not least <= int(words[0]) <= most:
        raise ValueError(f"a whole number from {least} to {most:,} is missing, found {' '.join(words) or 'nothing'}")
    return int(words[0])
