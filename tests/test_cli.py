"""The `nanovllm` command as its user runs it; run-batch and analyze have tests of their own."""

import os
import pty
import re
import subprocess
import sys
from contextlib import suppress

import pytest
from processes import LIMIT_S

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.tools import cli
from nanovllm.tools.bench import measure


@pytest.mark.parametrize("command", ["chat", "generate", "run-batch", "analyze", "bench"])
def test_help(command, capsys):
    """Every command is named by the overview; every flag says what it does."""
    for arguments in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as exit:
            cli.main(arguments)
        assert exit.value.code == 0
        printed = capsys.readouterr().out
        assert f"nanovllm {command} " in printed
    flags = re.findall(r"\n  (-.*)(?:\n {10,})?(.*)", printed)
    assert len(flags) >= 3 and all(re.search(r"\w{2}", first + second) for first, second in flags)


def test_light():
    """--help answers without torch."""
    code = """
import sys
from nanovllm.tools import cli
try:
    cli.main(["--help"])
except SystemExit:
    print("torch" in sys.modules)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.endswith("False\n")


def test_flags_become_options():
    arguments = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "-tp", "1", "--gpu-memory-utilization", "0.5"]
    arguments += ["--optimizations", "c_kernels", "--dtype", "float32", "--model", "m"]
    args = cli._parser().parse_args(["bench", *arguments])
    options = dict(max_num_seqs=3, enable_prefix_caching=False, gpu_memory_utilization=0.5, dtype="float32")
    expected = EngineConfig(model="m", **options, optimizations=["c_kernels"])
    assert cli._engine_config(args) == expected
    assert cli._engine_config(cli._parser().parse_args(["chat", "--model", "m"])) == EngineConfig(model="m")


def test_generate(checkpoint, llm, capsys, monkeypatch):
    options = ["--model", str(checkpoint()), "--num-gpu-blocks-override", "100"]
    prompt = "the quick brown fox"
    [expected] = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0))
    assert cli.main(["generate", prompt, "--max-tokens", "12", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.outputs[0].text + "\n", "greedy is the default"
    assert "prompt tokens, 0 of them cached" in printed.err
    [expected] = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=1.5, top_k=9))
    cli.main(["generate", prompt, "--max-tokens", "12", "--temperature", "1.5", "--top-k", "9", *options])
    assert len(capsys.readouterr().out) > 1
    for arguments, text in (
        ([""], "the prompt is empty"),
        (["x", "--top-p", "3"], "top_p must be"),
        (["x", "--block-size", "0"], "block_size must be"),
    ):
        assert cli.main(["generate", *arguments, *options]) == 2
        assert text in capsys.readouterr().err


def test_chat_in_a_terminal(checkpoint, processes):
    """A real terminal: an answer, a command that is not known, a new conversation, and out."""
    ours, theirs = pty.openpty()
    command = ["-m", "nanovllm.tools.cli", "chat", "--system", "Be brief.", "--model", str(checkpoint())]
    chat = processes.start(*command, "--temperature", "0", stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    screen = b""
    for text in (b"two gulls\n", b"/what\n", b"/reset\n", b"a red boat\n", b"/quit\n"):
        num_asked = screen.count(b"you")
        while screen.count(b"you") == num_asked:
            screen += os.read(ours, 4096)
        os.write(ours, text)
    with suppress(OSError):  # the other end is gone
        while chunk := os.read(ours, 4096):
            screen += chunk
    assert chat.wait(LIMIT_S) == 0
    shown = screen.decode(errors="replace")
    assert shown.count("/reset starts over") == 2
    found = re.findall(r"(\d+) prompt tokens, (\d+) of them cached", shown)
    assert len(found) == 2 and int(found[0][1]) == 0
    assert 0 < int(found[1][1]) < 32, "of the second conversation the system message alone was known"


def test_bench(checkpoint, capsys):
    options = ["--model", str(checkpoint()), "--num-gpu-blocks-override", "100"]
    arguments = ["bench", "--batch-sizes", "1", "3", "--input-len", "10", "--output-len", "4"]
    assert cli.main([*arguments, *options]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.count("│") == 7]
    assert [row.split("│")[1].strip() for row in rows] == ["1", "3"]
    assert any("█" * 16 in row for row in rows)
    assert cli.main(["bench", "--batch-sizes", "0", *options]) == 2
    assert "--batch-sizes must be a whole number between 1" in capsys.readouterr().err


def test_measure(llm):
    result = measure(llm, 3, 10, 5)
    assert 0 < result.ttft_s < result.latency_s and result.tpot_s > 0
    assert result.output_tokens_per_s == pytest.approx(3 * 5 / result.latency_s)
    assert llm.stats()["num_output_tokens"] == 15
