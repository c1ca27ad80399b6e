"""The batch job over two Ray actors gives what one process gives."""

import json
import random
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest

from nanovllm.serving.openai.answer import CHAT
from nanovllm.tools import cli
from tests.jobs.lines import FOX, line

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason='no Ray here: pip install -e ".[ray]"')
SCRIPT = Path(__file__).parents[2] / "examples" / "ray_data_batch.py"


def read(paths) -> dict[int, dict]:
    """Records by line number, without what may differ: when it was written, and what the cache held just then."""
    records = {}
    for path in paths:
        for raw in path.read_text("ascii").splitlines():
            record = json.loads(raw)
            number = int(record.pop("id").rsplit("_", 1)[1])
            assert number not in records, "answered twice"
            records[number] = record
            if record["response"]:
                del record["response"]["request_id"], record["response"]["body"]["created"]
    return records


def num_cached(records: dict[int, dict]) -> int:
    usages = [r["response"]["body"]["usage"] for r in records.values() if r["response"]]
    return sum(usage.pop("prompt_tokens_details")["cached_tokens"] for usage in usages)


def test_two_actors_against_one_process(tmp_path, checkpoint, processes, monkeypatch, capsys):
    rng = random.Random(0)
    systems = [f"{i} {FOX} {FOX}" for i in range(4)]
    lines = []
    for number in range(120):
        messages = [{"role": "system", "content": rng.choice(systems)}, {"role": "user", "content": f"{number}"}]
        options = {"temperature": 0} if number % 2 else {"temperature": 1.0}  # no seed: it comes from the custom_id
        lines.append(line(f"é\u2028\x85{number}", CHAT, messages=messages, max_tokens=6, **options))
    lines[7], lines[30], lines[60], lines[90] = b"{nope", b"", lines[3], b"\xff"
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"\n".join(lines))
    common = ["-i", str(source), "--model", str(checkpoint()), "--max-model-len", "200"]
    assert cli.main(["run-batch", *common, "-o", str(tmp_path / "out.jsonl")]) == 1

    command = [str(SCRIPT), *common, "-o", str(tmp_path / "answers")]
    command += ["--num-engines", "2", "--kv-cache-memory-bytes", "2000000"]
    status, _, err = processes.run(*command)
    assert status == 0, err
    files = sorted((tmp_path / "answers").iterdir())
    assert len(files) == 2, "a file for each actor"
    found, expected = read(files), read([tmp_path / "out.jsonl"])
    cached, cached_by_one = num_cached(found), num_cached(expected)
    assert found == expected and len(found) == 119
    # The four system prompts lie beside each other: at most one of them is cut by the border between the actors.
    assert cached >= 0.9 * cached_by_one > 0

    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(SystemExit, match="2"):  # before Ray starts
        runpy.run_path(command[0], run_name="__main__")
    assert "must not exist" in capsys.readouterr().err
