"""The request logs are what their script makes, and public logs become lines of the same columns."""

import csv
import json
import random

import pytest

from chapters.data import convert, make
from chapters.data.make import Request

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.9799600,374,44
2023-11-16 18:17:03.2319566,396,109
"""
AZURE_2024 = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"


def test_the_files_are_what_the_script_makes(tmp_path):
    make.main(tmp_path)
    assert {file.name for file in make.FOLDER.glob("*.csv")} == {file.name for file in tmp_path.iterdir()}
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (make.FOLDER / file.name).read_bytes(), "python -m chapters.data.make"
    assert sum(file.stat().st_size for file in make.FOLDER.iterdir() if file.is_file()) < 300_000


@pytest.mark.parametrize("name", make.LOGS)
def test_a_log_is_in_order_and_makes_sense(name):
    with (make.FOLDER / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == make.NUM_REQUESTS
    times = [float(line["arrival_s"]) for line in lines]
    assert times == sorted(times) and times[0] >= 0
    for line in lines:
        assert 0 <= int(line["prefix_tokens"]) <= int(line["prompt_tokens"]) and int(line["output_tokens"]) > 0
        assert bool(line["prefix_id"]) == bool(int(line["prefix_tokens"])) and line["user"]


def test_conversations_grow():
    turns: dict[str, Request] = {}
    for turn in sorted(make.conversations()):
        if before := turns.get(turn.prefix_id):
            assert turn.prompt_tokens > before.prompt_tokens + before.output_tokens
        turns[turn.prefix_id] = turn
    assert 50 < len(turns) < make.NUM_REQUESTS / 2


def test_azure(tmp_path):
    (tmp_path / "azure.csv").write_text(AZURE, "utf-8")
    convert.write(convert.azure(tmp_path / "azure.csv"), tmp_path / "ours.csv")
    assert (tmp_path / "ours.csv").read_text("utf-8").splitlines() == [
        ",".join(Request._fields),
        "0.000,396,109,,0,",
        "1.748,374,44,,0,",
    ]
    (tmp_path / "azure.csv").write_text(AZURE_2024, "utf-8")
    assert list(convert.azure(tmp_path / "azure.csv")) == [Request(0.0, 2162, 5)]
    (tmp_path / "azure.csv").write_text(AZURE.replace("2023-11-16", "yesterday"), "utf-8")
    with pytest.raises(ValueError, match="yesterday"):
        list(convert.azure(tmp_path / "azure.csv"))


def mooncake(path, *requests: tuple[int, int, list[int]]) -> list[Request]:
    names = ("timestamp", "input_length", "hash_ids")
    lines = [json.dumps({**dict(zip(names, request, strict=True)), "output_length": 9}) for request in requests]
    path.write_text("\n".join(lines), "utf-8")
    return list(convert.mooncake(path))


def test_mooncake(tmp_path):
    """Three turns of a conversation, one that forks off after the first block, and a stranger."""
    found = mooncake(
        tmp_path / "mooncake.jsonl",
        (3000, 900, [1, 2]),
        (4500, 1500, [1, 2, 3]),
        (5000, 2000, [1, 2, 3, 4]),
        (6000, 1100, [1, 8, 9]),
        (7000, 1100, [1, 8, 10]),
        (7500, 600, [11, 12]),
    )
    prefixes = [(request.prefix_id, request.prefix_tokens) for request in found]
    assert prefixes == [("text1", 900), ("text1", 1500), ("text1", 1536), ("text8", 1024), ("text8", 1024), ("", 0)]
    assert [request.arrival_s for request in found] == [0, 1.5, 2, 3, 4, 4.5]
    assert found[1] == Request(1.5, 1500, 9, "text1", 1500)


def test_what_has_one_name_begins_alike(tmp_path):
    """Of random trees of blocks: two lines with one prefix_id share as much as the shorter prefix says."""
    rng = random.Random(0)
    for _ in range(20):
        chains: list[list[int]] = [[1]]
        for new in range(100, 140):
            beginning = rng.choice(chains)[: rng.randint(1, 5)]
            chains.append([*beginning, new, *rng.sample(range(1000 * new, 1000 * new + 50), 1)])
        found = mooncake(tmp_path / "tree.jsonl", *((0, convert.BLOCK * len(chain), chain) for chain in chains))
        for request, chain in zip(found, chains, strict=True):
            for other, others in zip(found, chains, strict=True):
                if request.prefix_id == other.prefix_id != "":
                    shared = min(request.prefix_tokens, other.prefix_tokens) // convert.BLOCK
                    assert chain[:shared] == others[:shared]
