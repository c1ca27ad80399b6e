"""Analysis of a request log, and the command that prints it."""

import itertools
import json
import random
from functools import cache

import numpy as np
import pytest

from nanovllm import LLM
from nanovllm.jobs.answer_lines import answer_lines
from nanovllm.tools import cli
from nanovllm.tools.workload import Workload, hit_rates, parse_requests
from tests.checkpoints import make_tokenizer
from tests.marks import by_night


def make(requests, block_size=2) -> Workload:
    workload = Workload(block_size)
    for tokens in requests:
        workload.add(tokens)
    return workload


def test_report():
    workload = make([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [1, 2, 9, 9], [8, 8, 3, 4]])
    report = workload.report()
    assert (report.num_requests, report.num_tokens, report.num_blocks) == (4, 19, 9)
    assert (report.num_unique_blocks, report.num_shared_blocks, report.num_reusable_blocks) == (6, 2, 3)
    assert report.best_prefill_savings == 6 / 19 and report.mean_shared_prefix_tokens == 6 / 4
    assert report.working_set_blocks == 3 + 3


def test_salts_separate():
    workload = Workload(2)
    for salt in (None, "a", "a"):
        workload.add([1, 2], salt)
    assert workload.report().num_reusable_blocks == 1


def random_requests(rng: random.Random, num: int, max_blocks: int) -> list[list[int]]:
    return [[rng.randrange(3) for _ in range(rng.randint(1, max_blocks))] for _ in range(num)]


@pytest.mark.parametrize("seed", [*range(3), *map(by_night, range(3, 10))])
def test_policies_against_bounds(seed):
    workload = make(random_requests(random.Random(seed), 200, 8), block_size=1)
    report = workload.report()
    for size, lru, frequency, optimum in hit_rates(workload, workload.pool_sizes()):
        assert lru <= optimum and frequency <= optimum, f"pool of {size}"
    assert lru == frequency == optimum == report.num_reusable_blocks / report.num_blocks, "nothing is evicted any more"


@pytest.mark.parametrize("seed", range(15))
def test_optimum_equals_exhaustive_search(seed):
    rng = random.Random(seed)
    requests = [tuple(r) for r in random_requests(rng, 9, 2)]
    num_blocks = rng.choice([2, 3, 4])

    @cache
    def best(index: int, cached: frozenset) -> int:
        """Most hits from this request on; cached holds prefixes."""
        if index == len(requests):
            return 0
        chain = [requests[index][: i + 1] for i in range(len(requests[index]))]
        hits = next((i for i, block in enumerate(chain) if block not in cached), len(chain))
        others = cached - set(chain)
        keep = max(num_blocks - len(chain), 0)
        futures = (
            best(index + 1, frozenset(kept) | frozenset(chain))
            for count in range(min(keep, len(others)) + 1)
            for kept in itertools.combinations(sorted(others), count)
        )
        return hits + max(futures)

    workload = make([list(r) for r in requests], block_size=1)
    assert workload.optimal_hits(num_blocks) == best(0, frozenset())


def test_requests_that_break_something(tmp_path, checkpoint, capsys):
    """Each line is read or skipped, whatever it holds; a file in another encoding is refused whole."""
    lines = [b"[" * 99_999, b'{"a":' * 99_999, b'{"prompt": [5, 6]}', b'{"prompt": [-1, 9]}', b'{"prompt": [1e999]}']
    lines += [f'{{"prompt": [5, 1{"0" * 400}]}}'.encode(), b'{"prompt": "\\ud800"}', b"1" * 5000]
    log = tmp_path / "log"
    log.write_bytes(b"\n".join(lines))
    command = ["analyze", str(log), "--model", str(checkpoint()), "--block-size", "2"]
    assert cli.main(command) == 0
    printed = capsys.readouterr()
    assert (
        printed.err.count(": skipped: ") == len(printed.err.strip().splitlines()) == 7
        and "1 (7 lines skipped)" in printed.out
    )
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        log.write_text('{"prompt": "x"}', encoding=encoding)
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert f"is {encoding.upper()} text; convert it" in error and error.count("\n") == 1
    log.write_text('{"prompt": "x"}', encoding="utf-8-sig")
    assert cli.main(command) == 0


def test_prompts_are_those_of_a_batch_job(checkpoint):
    """Tools are the shared part of what an agent asks; several prompts of a line are several requests."""
    tokenizer = make_tokenizer()
    tool = {"type": "function", "function": {"name": "now", "description": "the quick brown fox " * 9}}
    asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    [(alone, _)], [(shown, _)] = (parse_requests(body, tokenizer) for body in (asked, asked | {"tools": [tool]}))
    llm = LLM(str(checkpoint()), num_gpu_blocks_override=64)
    raw = json.dumps(
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": asked | {"tools": [tool]}}
    )
    [[answer]] = [answers for answers in answer_lines(llm, [(1, raw.encode())]) if answers]
    assert len(alone) < len(shown) == answer.body["usage"]["prompt_tokens"]
    [first, second] = parse_requests({"prompt": ["the quick", [5, 6]], "cache_salt": "a"}, tokenizer)
    assert first == (tokenizer("the quick").input_ids, "a") and second == ([5, 6], "a")


def test_requests_of_strangers():
    """What no engine takes is a ValueError, and a program that comes with a chat is not run."""
    tokenizer = make_tokenizer()
    for token_id in (-1, 1 << 32, 1 << 70):
        with pytest.raises(ValueError, match="a token id of a prompt must be"):
            parse_requests({"prompt": [[5], [5, token_id]]}, tokenizer)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert parse_requests(chat | {"mm_processor_kwargs": {"size": 1}}, tokenizer) == parse_requests(chat, tokenizer)
    seen = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
    with pytest.raises(ValueError, match="prompts with images are not read here"):
        parse_requests(seen, tokenizer)
    own = chat | {"chat_template": "{{ messages[0].content }} hi"}
    assert parse_requests(own, tokenizer) == [(tokenizer("hi hi").input_ids, None)]
    for line in (own, {"body": own}):
        with pytest.raises(ValueError, match="a request may not bring one"):
            parse_requests(line, tokenizer, is_trusted=False)
    assert parse_requests(chat, tokenizer, is_trusted=False) == parse_requests(chat, tokenizer)


def test_numbers_of_numpy():
    requests = [list(np.array([1, 2, 3, 4])), list(np.array([1, 2, 3, 5]))]
    workload = make(requests, np.int64(2))
    assert workload.report() == make([[1, 2, 3, 4], [1, 2, 3, 5]]).report()
    assert workload.lru_hits(np.int64(4)) == 1


def test_command(tmp_path, checkpoint, capsys):
    chat = {"messages": [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]}
    lines = [
        json.dumps(chat),
        json.dumps({"custom_id": "1", "body": chat}),
        json.dumps({"prompt": "the quick brown fox", "cache_salt": "a"}),
        json.dumps({"prompt": [5, 6, 7]}),
        json.dumps({"prompt_token_ids": [5, 6, 7]}),
        "",
        "{not json",
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": [5, "x"]}),
        json.dumps({"messages": [{"role": "wizard", "content": "x"}]}),
        json.dumps({"text": "x"}),
        json.dumps([1, 2]),
        "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
    ]
    log = tmp_path / "requests.jsonl"
    log.write_text("\n".join(lines), encoding="latin-1")
    assert cli.main(["analyze", str(log), "--model", str(checkpoint()), "--block-size", "4"]) == 0
    printed = capsys.readouterr()
    skipped = [int(line.split(":")[1]) for line in printed.err.splitlines() if ": skipped: " in line]
    assert skipped == [7, 8, 9, 10, 11, 12, 13]
    assert "none of messages, prompt, prompt_token_ids" in printed.err and "unknown role wizard" in printed.err
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in printed.out.splitlines()
        if line.count("│") == 3
    }
    assert rows["requests"] == "5 (7 lines skipped)" and rows["shared by two requests or more"] != "0"
    assert "optimum" in printed.out and "█" in printed.out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no/such/file"], "is not a file"),
        (["{empty}"], "has no request that can be read"),
        (["{empty}", "--block-size", "0"], "--block-size must be a whole number between 1"),
        (["{empty}", "--model", "/no/model"], "does not exist"),
    ],
)
def test_command_errors(tmp_path, checkpoint, capsys, arguments, text):
    (tmp_path / "empty").write_text("\n")
    arguments = [a.replace("{empty}", str(tmp_path / "empty")) for a in arguments]
    if "--model" not in arguments:
        arguments += ["--model", str(checkpoint())]
    assert cli.main(["analyze", *arguments]) == 2
    assert text in capsys.readouterr().err
