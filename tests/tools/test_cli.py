"""The `nanovllm` command as its user runs it. run-batch and analyze have tests of their own; --help: without_torch."""

import json
import os
import signal
import subprocess
import sys
from typing import TextIO

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.checks.names import neutral_options
from nanovllm.config import EngineConfig
from nanovllm.serving.http.options import ServeOptions
from nanovllm.tools import cli
from nanovllm.tools.bench import measure, run_bench
from nanovllm.tools.chat import run_generate
from nanovllm.tools.flags import flag_of
from tests.checkpoints import SMALL
from tests.processes import LIMIT_S


def test_flags_become_options():
    arguments = ["--max-num-seqs", "3", "--no-enable-prefix-caching", "-tp", "1", "--gpu-memory-utilization", "0.5"]
    arguments += ["--optimizations", "c_kernels", "--dtype", "float32", "--model", "m"]
    args = cli._parser().parse_args(["bench", *arguments])
    options = dict(max_num_seqs=3, enable_prefix_caching=False, gpu_memory_utilization=0.5, dtype="float32")
    expected = EngineConfig(model="m", **options, optimizations=["c_kernels"])
    assert cli._engine_config(args) == expected
    assert cli._engine_config(cli._parser().parse_args(["chat", "--model", "m"])) == EngineConfig(model="m")
    ngram = ["-sc", '{"method": "ngram"}']
    dotted = ["-sc.method", "ngram", "--limit-mm-per-prompt.image=4", "--hf_overrides.text_config.rope_theta", "2e4"]
    for arguments, options in (
        (["-q", "int8", "-O3", "-O", "2", *ngram], dict(quantization="int8", speculative_config={"method": "ngram"})),
        (
            [*dotted, "--hf-overrides.text_config.x=a.b", "--hf-overrides.y", "null", "--seed", "-3"],
            dict(
                speculative_config={"method": "ngram"},
                limit_mm_per_prompt={"image": 4},
                hf_overrides={"text_config": {"rope_theta": 2e4, "x": "a.b"}, "y": None},
                seed=-3,
            ),
        ),
    ):
        args = cli._parser().parse_args(["serve", *arguments, "m"])
        assert cli._engine_config(args) == EngineConfig(model="m", **options)
    for wrong in (["--hf-overrides.a"], ["--unknown.a", "1"]):
        with pytest.raises(SystemExit):
            cli._parser().parse_args(["serve", "m", *wrong])


def test_generate(checkpoint, llm, capsys, monkeypatch):
    options = ["--model", str(checkpoint()), "--num-gpu-blocks-override", "100"]
    prompt = "the quick brown fox"
    [expected] = llm.generate(prompt, SamplingParams(max_tokens=12, temperature=0))
    assert cli.main(["generate", prompt, "--max-tokens", "12", *options]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected.outputs[0].text + "\n", "greedy is the default"
    assert "prompt tokens, 0 of them cached" in printed.err
    seeded = LLM(str(checkpoint()), **SMALL, seed=7)
    [expected] = seeded.generate(prompt, SamplingParams(max_tokens=12, temperature=1.5, top_k=9))
    sampled = ["--temperature", "1.5", "--top-k", "9", "--seed", "7"]
    assert cli.main(["generate", prompt, "--max-tokens", "12", *sampled, *options]) == 0
    assert capsys.readouterr().out == expected.outputs[0].text + "\n"
    for arguments, text in (
        ([""], "the prompt is empty"),
        (["x", "--top-p", "3"], "top_p must be"),
        (["x", "--block-size", "0"], "block_size must be"),
    ):
        assert cli.main(["generate", *arguments, *options]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--model", ""],
        ["chat", "--model", "m", "--system", ""],
        ["bench", "--dtype", "", "--model", "m"],
        ["analyze", "", "--model", "m"],
        ["run-batch", "-i", "", "-o", "o", "--model", "m"],
        ["run-batch", "-i", "i", "-o", "", "--model", "m"],
        ["run-batch", "-i", "i", "-o", "o", "--model", "m", "--served-model-name", "a", ""],
    ],
)
def test_empty_arguments(arguments, capsys):
    """A variable of the shell that is not set: never the default, least of all the demo model."""
    assert cli.main(arguments) == 2
    assert "is empty; is a variable of the shell not set?" in capsys.readouterr().err


def test_what_vllm_leaves_empty_may_be_empty():
    args = cli._parser().parse_args(["serve", "m", "--reasoning-parser", "", "--reasoning-parser-plugin", ""])
    cli._reject_empty(args)


def test_a_batch_takes_vllms_flags_where_they_change_nothing(tmp_path, capsys):
    command = ["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "--model", "m"]
    neutral = "--trust-remote-code --swap-space 4 --enable-chunked-prefill -pp 1 --reasoning-parser".split()
    assert cli.main([*command, *neutral, ""]) == 2
    assert "is not a file" in capsys.readouterr().err, "all were taken, and then the input was looked for"
    assert cli.main([*command, "--enable-metrics"]) == 2
    assert "run-batch takes 'enable_metrics' only as False (found True)" in capsys.readouterr().err


def test_a_server_has_one_model(capsys):
    assert cli._parser().parse_args(["serve", "a", "--model", "a"]).model == "a"
    for arguments in (["a", "--model", "b"], ["--model", "b", "a"], ["--model", "b", "--model", "a"]):
        with pytest.raises(SystemExit):
            cli._parser().parse_args(["serve", *arguments])
        assert "two models are named" in capsys.readouterr().err


def test_the_model_may_follow_a_flag_of_vllms():
    """Only a list takes several values: no flag swallows the model, in whose place the demo model would be served."""
    parse = cli._parser().parse_args
    for name, values in neutral_options(cli.SERVE).items():
        if name in ServeOptions.__dataclass_fields__ or any(isinstance(value, bool | list) for value in values):
            continue
        args = parse(["serve", flag_of(name), "4", "m"])
        assert args.model == "m" and getattr(args, name) == 4
    assert parse(["serve", "m", "--cudagraph-capture-sizes", "1", "2"]).cudagraph_capture_sizes == [1, 2]
    assert parse(["serve", "m", "--ignore-patterns", "a"]).ignore_patterns == "a"


@pytest.mark.parametrize("flag", ["--served-model-name", "--api-key", "--lora-modules", "--optimizations"])
def test_a_list_that_may_have_taken_the_model(flag, capsys):
    """The demo model would be served in its place."""
    assert cli.main(["serve", flag, "a", "Qwen/X"]) == 2
    assert f"{flag} has 2 values, and no model is named: write the model first, 'Qwen/X' if" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "chat, generate, run-batch, analyze and bench take --model"),
        ("chat", "sampling (default: 512 tokens;"),
        ("chat", "--max-tokens N most tokens to generate (default: 512)"),
        ("generate", "--max-tokens N most tokens to generate (default: 512)"),
        ("serve", "/v1/models, /v1/chat/completions, /v1/completions and /v1/responses; with --runner pooling"),
        ("run-batch", "with --runner pooling the urls are /v1/embeddings, /rerank, /score and /pooling."),
    ],
)
def test_help(command, said, capsys):
    with pytest.raises(SystemExit):
        cli._parser().parse_args([*command.split(), "--help"])
    assert said in " ".join(capsys.readouterr().out.split())


def test_an_answer_that_is_not_whole_says_so_to_the_shell(llm, monkeypatch, capsys):
    def interrupted(*args):
        yield next(stream(*args))
        raise KeyboardInterrupt

    stream = llm.stream
    monkeypatch.setattr(llm, "stream", interrupted)
    assert run_generate(llm, SamplingParams(max_tokens=5, ignore_eos=True), "the quick") == 130
    assert "(cut short)" in capsys.readouterr().out
    monkeypatch.undo()
    assert run_generate(llm, SamplingParams(max_tokens=5, ignore_eos=True), "the quick") == 0
    with torch.no_grad():
        llm.engine.model_runner.model.norm.weight.fill_(float("nan"))
    assert run_generate(llm, SamplingParams(max_tokens=5), "a red boat") == 1


MARKUP = "[/foo] [bold]b[/] :smile:"


def test_text_is_shown_as_it_is(checkpoint, tmp_path, capsys, monkeypatch):
    """What files and users say is not rich's markup, nor is a file's name."""
    model, folder = str(checkpoint()), tmp_path / MARKUP.replace("/", "")
    folder.mkdir()
    source, target = folder / "in", folder / "out[]"
    request = {"custom_id": MARKUP, "method": "POST", "url": "/v1/completions", "body": {"prompt": MARKUP}}
    source.write_text(json.dumps(request) + "\n" + json.dumps(MARKUP))
    assert cli.main(["run-batch", "-i", str(source), "-o", str(target), "--model", model]) == 1
    assert "out[]" in capsys.readouterr().out
    assert cli.main(["analyze", str(source), "--model", model]) == 0
    assert f"{source}:2: skipped" in capsys.readouterr().err
    assert cli.main(["generate", "x", "--model", f"/{MARKUP}"]) == 2
    assert f"'/{MARKUP}' does not exist" in capsys.readouterr().err
    said = [MARKUP * 20, MARKUP]
    monkeypatch.setattr("builtins.input", lambda prompt: said.pop() if said else "/quit")
    assert cli.main(["chat", "--system", MARKUP, "--model", model, "--max-model-len", "200", "--max-tokens", "2"]) == 0
    assert "max_model_len is 200" in capsys.readouterr().out.replace("\n", " ")


def closed_pipe() -> TextIO:
    """Writing to it fails, as it does when the program behind `|` has ended."""
    ours, theirs = os.pipe()
    os.close(ours)
    return os.fdopen(theirs, "w")


def full_disk() -> TextIO:
    return open("/dev/full", "w")


@pytest.mark.parametrize(
    ("command", "streams", "status", "said"),
    [
        ("run-batch", {"stdout": closed_pipe}, 0, ""),
        ("run-batch", {"stdout": closed_pipe, "stderr": closed_pipe}, 0, ""),
        ("run-batch", {"stdout": full_disk, "stderr": full_disk}, 0, ""),
        ("run-batch", {"stdin": lambda: None, "stdout": lambda: None, "stderr": lambda: None}, 0, ""),
        ("chat", {"stdin": lambda: None}, 0, ""),
        ("chat", {"stdin": lambda: None, "stdout": lambda: None, "stderr": lambda: None}, 0, ""),
        ("generate", {"stdin": lambda: None}, 2, "the prompt is empty: there is nothing to continue\n"),
        ("generate x", {"stdout": closed_pipe}, 128 + signal.SIGPIPE, ""),
        ("generate x", {"stdout": full_disk}, 2, "No space left on device\n"),
        ("generate x", {"stderr": closed_pipe}, 0, ""),
        ("analyze LOG", {"stdout": closed_pipe}, 128 + signal.SIGPIPE, ""),
        ("bench --input-len 9 --output-len 2 --batch-sizes 1", {"stdout": closed_pipe}, 128 + signal.SIGPIPE, ""),
    ],
)
def test_streams_that_are_closed(checkpoint, tmp_path, capsys, monkeypatch, command, streams, status, said):
    """Of a batch job the file is the result, of the others what they print. Python has None for a closed stream."""
    source, target = tmp_path / "in", tmp_path / "out"
    request = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 2}}
    source.write_text(json.dumps(request))
    files = ["-i", str(source), "-o", str(target)] if command == "run-batch" else []
    with monkeypatch.context() as patch:
        for name, open_stream in streams.items():
            patch.setattr(sys, name, open_stream())
        assert cli.main([*command.replace("LOG", str(source)).split(), *files, "--model", str(checkpoint())]) == status
        for name in streams:
            if stream := getattr(sys, name):
                stream.close()  # as the interpreter does at its end: nothing is left that it could not write
    printed = capsys.readouterr().err
    assert printed.endswith(said) if said else "nanovllm" not in printed
    assert not files or target.read_text().count("\n") == 1


@pytest.mark.nightly
def test_exit_code_of_a_process_whose_output_nobody_reads(checkpoint, processes, tmp_path):
    (tmp_path / "in").write_text("{nope")
    cli_call = 'set -o pipefail; "$0" -m nanovllm.tools.cli run-batch -i "$1/in" -o "$1/out" --model "$2" 2>&1 | true'
    command = ["bash", "-c", cli_call, sys.executable, str(tmp_path), str(checkpoint())]
    assert subprocess.run(command, timeout=LIMIT_S).returncode == 1 and (tmp_path / "out").exists()


def test_numbers_that_are_too_large(checkpoint, capsys):
    model = ["--model", str(checkpoint())]
    for arguments in (
        ["generate", "x", "--seed", f"1{'0' * 400}"],
        ["generate", "x", "--top-k", f"1{'0' * 400}"],
        ["bench", "--batch-sizes", "1", f"1{'0' * 400}"],
        ["bench", "--input-len", "60000"],
        ["analyze", __file__, "--block-size", f"1{'0' * 30}"],
    ):
        assert cli.main([*arguments, *model]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_bench(checkpoint, capsys):
    options = ["--model", str(checkpoint()), "--num-gpu-blocks-override", "100"]
    arguments = ["bench", "--batch-sizes", "1", "3", "--input-len", "10", "--output-len", "4"]
    assert cli.main([*arguments, *options]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.count("│") == 7]
    assert [row.split("│")[1].strip() for row in rows] == ["1", "3"]
    assert any("█" * 16 in row for row in rows)
    assert cli.main([*arguments, *options, "--speculative-config", '{"method": "ngram"}']) == 0
    shown = capsys.readouterr().out
    assert "drafts" in shown and sum(row.count("│") == 9 for row in shown.splitlines()) == 2
    assert cli.main([*arguments, *options, "--speculative-config", '{"method": "telepathy"}']) == 2
    assert "method must be one of ngram, draft_model, self, found 'telepathy'" in capsys.readouterr().err
    assert cli.main([*arguments[:-1], "1", *options]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.count("│") == 7]
    assert [row.split("│")[3].strip() for row in rows] == ["-", "-"], "no token came after the first one"
    assert cli.main(["bench", "--batch-sizes", "0", *options]) == 2
    assert "--batch-sizes must be a whole number between 1" in capsys.readouterr().err


def test_bench_of_a_batch_size_twice(llm):
    """The second is computed like the first, not found in the prefix cache."""
    stats = llm.engine.block_manager.stats
    hits = stats.hits
    assert run_bench(llm, [2, 3, 2, 2], 40, 2) == 0
    assert stats.hits == hits


def test_measure(llm):
    result = measure(llm, 3, 10, 5)
    assert 0 < result.ttft_s < result.latency_s and result.tpot_s > 0
    assert result.output_tokens_per_s == pytest.approx(3 * 5 / result.latency_s)
    assert llm.stats()["num_output_tokens"] == 15
