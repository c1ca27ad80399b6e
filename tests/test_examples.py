"""Every example runs: the first on the demo checkpoint as users run it, the others in this process, which has torch.

Most take a tiny checkpoint; those whose answers have to make sense take the demo's.
What computes much is told to do so in float32: a processor without instructions for bfloat16 takes many times as long.
"""

import argparse
import importlib
import inspect
import io
import logging
import os
import random
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from nanovllm import LLM
from nanovllm.core.scheduler import Scheduler
from tests.checkpoints import edit, make_checkpoint
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu

ROOT = Path(__file__).parent.parent
PACKED = "compressed-tensors"
MODULES = ("damaged_tiers.py", "measuring.py", "reporting.py")
SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py") if path.name not in MODULES)
LOADING = [name for name in SCRIPTS if "model_or_demo(" in (ROOT / "examples" / name).read_text("utf-8")]
ANY_NUMBER = {"seed", "port", "delay_ms", "key_biases", "chapters"}  # all other numbers are counts, sizes, rates
NO_MODEL = "/no/such/model"
GIVEN = {  # where the model is not the only argument
    "bench_tiers.py": ("MODEL", "--parts", "restart"),
    "make_compressed.py": ("MODEL", "packed"),
    "make_gguf.py": ("MODEL", "model.gguf"),
    "retrieval.py": ("--embedder", "MODEL"),
}
VLLM_STAND_IN = """#!{python}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *of):
        pass
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def status_of(capsys, monkeypatch):
    """status_of(name, *args) -> the exit code of an example, and what it prints."""
    importlib.import_module("nanovllm.worker.model_runner")  # so that patches of it are seen, too
    monkeypatch.chdir(ROOT)

    def status_of(name: str, *args: str, stdin: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [name, *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        status, before = 0, functions_of_engine()
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except SystemExit as ends:
            status = ends.code or 0
        after = functions_of_engine()
        assert [name for name in before if after[name] is not before[name]] == []  # it was patched, and stayed so
        return status, capsys.readouterr().out

    logger = logging.getLogger("nanovllm")
    level = logger.level
    yield status_of
    logger.setLevel(level)  # some examples change it


def functions_of_engine() -> dict[tuple[str, ...], object]:
    """What the modules and classes of nanovllm that are loaded define, by name."""
    functions = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("nanovllm")]:
        for name, value in vars(module).items():
            if callable(value):
                functions[module.__name__, name] = value
            if isinstance(value, type) and value.__module__ == module.__name__:
                functions |= {(module.__name__, name, of): method for of, method in vars(value).items()}
    return functions


@pytest.fixture
def run(demo_checkpoint, status_of):
    def run(name: str, *args: str, stdin: str = "") -> str:
        status, out = status_of(name, *args, stdin=stdin)
        assert status == 0
        return out

    return run


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(status_of, name, monkeypatch):
    """It needs no package of an extra. From here on, a terminal of any encoding will do. A type checks every size."""
    parse_args, numbers = argparse.ArgumentParser.parse_args, set[str]()

    def noted(parser, *args):
        numbers.update(action.dest for action in parser._actions if action.type in (int, float))
        return parse_args(parser, *args)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", noted)
    for package in ("ray", "openai", "gguf", "playwright", "PIL", "vllm"):
        monkeypatch.setitem(sys.modules, package, None)
    status, out = status_of(name, "--help")
    first = (ROOT / "examples" / name).read_text("utf-8").splitlines()[0].removeprefix('"""')
    assert status == 0 and out.startswith(f"usage: {name} [-h]") and first in out
    assert sys.stdout.errors == "backslashreplace"
    assert numbers - ANY_NUMBER == set()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bench_throughput.py", ["--num-requests", "0"]),
        ("bench_throughput.py", ["--max-input", "16"]),
        ("bench_prefix_cache.py", ["--blocks", "9"]),
        ("bench_peers.py", ["--requests", "-1"]),
        ("bench_peers.py", ["--requests", "0", "--sampling"]),
        ("bench_serve.py", ["--loads", "0.5", "0"]),
        ("bench_serve.py", ["--vllm-python", "/no/such/python"]),
        ("bench_peers.py", ["--vllm-python", "/no/such/python"]),
        ("bench_hybrid.py", ["--vllm-python", "/no/such/python"]),
        ("bench_images.py", ["--vllm-python", "/no/such/python"]),
        ("bench_site.py", ["7", "99"]),
        ("gpu_report.py", ["--cpu", "--parts", "memory"]),
        ("perplexity.py", ["--text", "/no/such/text"]),
        ("make_compressed.py", ["demo", "packed", "--text", "/no/such/text"]),
        ("ask_a_picture.py", ["--picture", "/no/such/picture.png"]),
        ("ask_a_picture.py", ["--picture", "README.md"]),
        ("make_gguf.py", ["demo", "/no/such/model.gguf"]),
        ("bench_peers.py", ["--output", "/no/such/table.md"]),
        ("gpu_report.py", ["--cpu", "--out", "/no/such/report"]),
        ("bench_all.py", ["--page", "/no/such/page.md"]),
        ("ray_data_batch.py", ["-i", "/no/such/lines.jsonl", "-o", "out"]),
        ("bench_tiers.py", ["--gigabytes", "inf"]),
        ("bench_busy.py", ["--counts", "1", "0"]),
        ("bench_images.py", ["--picture", "1024x0"]),
        ("bench_images.py", ["--picture", "1024"]),
        ("simulate_cores.py", ["--rows", "0"]),
        ("simulate_cores.py", ["--keys", "1"]),
        ("tensor_parallel.py", ["--ranks", "two"]),
        ("tensor_parallel.py", ["--ranks", "1"]),
    ],
)
def test_arguments_that_make_no_sense(status_of, name, options):
    """They are refused before anything is loaded."""
    assert status_of(name, *options)[0] == 2


def test_files_to_read():
    """A pipe has no size and no name of its own, and is there all the same."""
    existing_file = importlib.import_module("measuring").existing_file
    assert existing_file(os.devnull) == Path(os.devnull)
    with pytest.raises(argparse.ArgumentTypeError, match="there is no file"):
        existing_file(str(ROOT))


@pytest.mark.parametrize(("name", "options"), [("perplexity.py", []), ("make_compressed.py", ["MODEL", "packed"])])
def test_a_file_that_is_no_text(status_of, tmp_path, checkpoint, name, options):
    (tmp_path / "text").write_bytes(b"\xff\xfe")
    options = [str(checkpoint()) if option == "MODEL" else option for option in options]
    status, _ = status_of(name, *options, "--text", str(tmp_path / "text"))
    assert status.startswith(f"{name}: {tmp_path / 'text'} is not UTF-8 text: ")


@pytest.mark.parametrize("name", [name for name in LOADING if not name.startswith("ray_")])
def test_no_such_model(status_of, name, tmp_path):
    """Nothing is there, or a folder without a checkpoint."""
    for model, said in (
        (NO_MODEL, f"model '{NO_MODEL}' does not exist; "),
        (str(tmp_path), f"{tmp_path} has no config"),
    ):
        options = [model if option == "MODEL" else option for option in GIVEN.get(name, ("MODEL",))]
        status, _ = status_of(name, *options)
        assert status.startswith(f"{name}: {said}")


@pytest.mark.parametrize(
    ("name", "options", "package", "to_install"),
    [
        ("ray_serve.py", [], "ray", '-e ".[ray-serve]"'),
        ("ray_data_batch.py", ["-i", "README.md", "-o", "out"], "ray", '-e ".[ray]"'),
        ("agents.py", ["MODEL", "--only", "openai"], "openai", '-e ".[clients,structured]"'),
        ("agents.py", ["--help"], "pydantic", '-e ".[clients,structured]"'),
        ("make_gguf.py", ["MODEL", "model.gguf"], "gguf", "gguf"),
        ("image_blocks.py", [], "PIL", '-e ".[images]"'),
        ("move_to_vllm.py", ["--engine", "vllm"], "vllm", "vllm"),
    ],
)
def test_a_package_is_missing(status_of, talkative, name, options, package, to_install, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    status, _ = status_of(name, *(talkative if option == "MODEL" else option for option in options))
    assert status == f"{name}: this needs {package}, which is not installed here: pip install {to_install}"


def measure_machine_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """profile_step.py asks little of the machine to find out how fast it is. Checkpoints are to be made before this."""
    monkeypatch.setattr("torch.ones", lambda *_: torch.zeros(1 << 20))
    monkeypatch.setattr("torch.randn", lambda *_: torch.zeros(64, 64))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("bench_hybrid.py", [], "is no hybrid model"),
        ("perplexity.py", ["--tokens", "128", "--window", "64", "--key-biases", "1"], "has biases of its own"),
        ("simulate_cores.py", ["--rows", "300", "--keys", "4", "--prompt", "0"], "300 requests do not fit"),
        ("profile_step.py", ["--batch", "300", "--context", "8", "--prompt", "8"], "300 requests do not fit"),
    ],
)
def test_what_cannot_be_measured(status_of, tmp_path, name, options, said, monkeypatch):
    """A line says so. 300 requests find room for far fewer in the pool."""
    model = make_checkpoint(tmp_path, "llama", attention_bias=True)
    made = LLM.__init__

    def with_small_pool(llm: LLM, *args: object, **options: object) -> None:
        made(llm, *args, **options, num_gpu_blocks_override=64)

    monkeypatch.setattr(LLM, "__init__", with_small_pool)
    monkeypatch.setattr("profile_step.NUM_STEPS", 1)
    measure_machine_quickly(monkeypatch)
    status, _ = status_of(name, str(model), *options)
    assert said in status


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("simulate_cores.py", ["--rows", "1", "3000", "--keys", "4", "--prompt", "0"]),
        ("profile_step.py", ["--batch", "3000", "--context", "8", "--prompt", "8"]),
    ],
)
def test_many_decodes_leave_room_for_prompts(status_of, checkpoint, name, options, monkeypatch):
    """Else prompts would wait without end in a pool that is nearly empty."""

    def made(llm: LLM, *_: object, max_num_batched_tokens: int, max_num_seqs: int, **others: object) -> None:
        raise SystemExit((max_num_seqs, max_num_batched_tokens - max_num_seqs))

    monkeypatch.setattr(LLM, "__init__", made)
    assert status_of(name, str(checkpoint()), *options)[0] == (3000, 3000)


@pytest.mark.parametrize("name", ["simulate_cores.py", "profile_step.py"])
def test_a_prompt_that_is_too_long_to_measure(status_of, checkpoint, name):
    assert status_of(name, str(checkpoint()), "--prompt", "2000")[0] == 2


def test_contexts_that_fit(run, tmp_path, monkeypatch):
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=1100)
    measure_machine_quickly(monkeypatch)
    out = run("profile_step.py", str(model), "--contexts")
    assert re.findall(r"^│ ([\d,]+) ", out, re.MULTILINE) == ["16", "1,000"]


@pytest.mark.nightly
def test_a_file_of_few_bits_that_cannot_be_written(status_of, tmp_path):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    status, _ = status_of("perplexity.py", str(model), "--quantization", "nearest")
    assert status == f"make_compressed.py: {model} is no directory with a config.json"


@pytest.mark.parametrize("script", ["make_compressed.py", "make_gguf.py"])
def test_weights_that_cannot_be_written_in_another_form(status_of, tmp_path, copy_of, script):
    """A line says so, and nothing is written: no file without tensors, and none with weights that lack their scales."""
    model, written = tmp_path / "model.gguf", tmp_path / "written"
    model.write_bytes(b"GGUF")
    assert status_of(script, str(model), str(written))[0] == f"{script}: {model} is no directory with a config.json"
    folder = copy_of("llama")
    edit(folder / "config.json", quantization_config={"quant_method": "fp8"})
    status, _ = status_of(script, str(folder), str(written))
    assert status.startswith(f"{script}: {folder} is quantized already, as its quantization_config says")
    edit(folder / "config.json", quantization_config=None)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    status, _ = status_of(script, str(folder), str(written))
    assert status.startswith(f"{script}: {folder} has no *.safetensors file") and not written.exists()


def test_two_servers_of_vllm_have_ports_of_their_own(tmp_path):
    """What answers on another port, such as a server that is left over, is measured by nobody."""
    vllm_server = importlib.import_module("bench_serve").vllm_server
    python = tmp_path / "python"
    python.write_text(VLLM_STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    with vllm_server(str(python), "model", "auto") as one, vllm_server(str(python), "model", "auto") as other:
        assert one != other
    with pytest.raises(SystemExit, match="exit code 1"), vllm_server("false", "model", "auto"):
        pass


@pytest.mark.parametrize("name", ["image_blocks.py", "prefix_cache_walkthrough.py", "trace_request.py"])
def test_on_a_narrow_terminal(status_of, checkpoint, name, monkeypatch):
    measuring = importlib.import_module("measuring")
    monkeypatch.setattr(measuring, "console", lambda: Console(width=60))
    status, out = status_of(name, *[str(checkpoint())] * (name == "trace_request.py"))
    assert status == 0 and max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize("num", [1, 4, 12])
def test_each_workload_has_as_many_requests_as_asked_for(num):
    workloads = importlib.import_module("bench_prefix_cache").workloads
    assert {name: len(make(random.Random(0))) for name, _, _, make in workloads(num)} == dict.fromkeys(
        ("chatbot", "multi-turn", "retrieval", "completion", "summaries", "random"), num
    )


def test_wrong_data_is_found_with_asserts_left_out(tmp_path):
    damaged_tiers = importlib.import_module("damaged_tiers")
    directory, [record] = damaged_tiers.opened(tmp_path / "cache", 1 << 20), damaged_tiers.chain(1)
    directory.put([(record, damaged_tiers.data_of(record)[::-1].copy())])
    with pytest.raises(damaged_tiers.WrongData):
        damaged_tiers.check_read(directory, [record])
    directory.close()


def test_bench_peers_where_every_engine_fails(status_of, checkpoint, monkeypatch):
    measuring = importlib.import_module("measuring")

    def in_child(*_):
        raise measuring.ChildFailed("out of memory")

    monkeypatch.setattr(measuring, "in_child", in_child)
    monkeypatch.setattr("profile_step.matmul_rate", lambda dtype: 1.0)
    status, out = status_of("bench_peers.py", str(checkpoint()), "--only", "nanovllm", "vLLM, eager")
    assert status == "no engine could be measured" and out.count("failed: out of memory") == 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_terminal_that_lacks_characters(status_of, monkeypatch, encoding):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    status, _ = status_of("prefix_cache_walkthrough.py")
    sys.stdout.flush()
    assert status == 0 and b"hash map: " in written.getvalue() and rb" \u2192 [0]" in written.getvalue()


@pytest.mark.parametrize("width", [40, 76])
def test_quickstart_on_a_narrow_terminal(width):
    metrics, answer = SimpleNamespace(ttft_s=0.1, tpot_s=0.01), SimpleNamespace(text=" It is Rope Walk.")
    output = SimpleNamespace(prompt_token_ids=[1] * 618, num_cached_tokens=592, metrics=metrics, outputs=[answer])
    console = Console(width=width, file=io.StringIO())
    importlib.import_module("quickstart").show(console, "Cold", ["What is the name?"], [output])
    shown = console.file.getvalue()
    assert "What is the name?" in shown and "It is Rope Walk." in shown and "…" not in shown
    assert [figure in shown for figure in ("618", "592", "100 ms")] == [True] * 3


def test_an_answer_is_no_markup():
    """A model may write what rich takes for a tag: one that opens, or one that closes what nobody has opened."""
    text = "[/INST] a[0] = b[i]"
    metrics, answer = SimpleNamespace(ttft_s=0.1, tpot_s=0.01), SimpleNamespace(text=text)
    output = SimpleNamespace(prompt_token_ids=[1], num_cached_tokens=0, metrics=metrics, outputs=[answer])
    quickstart, retrieval = (importlib.import_module(name) for name in ("quickstart", "retrieval"))
    console = Console(width=120, file=io.StringIO())
    quickstart.show(console, "Cold", [text], [output])
    retrieval.show(console, text, [(0.5, retrieval.Passage("ch04", text, text))], text)
    assert console.file.getvalue().count(text) == 6


def computed_of(out: str) -> list[int]:
    """Of how many prompt tokens the panel says that they were computed: cold, warm."""
    numbers = re.findall(r"([\d,]+) were computed", " ".join(out.split("│")).replace("\n", ""))
    return [int(number.replace(",", "")) for number in numbers]


def found_of(out: str) -> list[tuple[str, str]]:
    """A question's prompt tokens, and how many of them were found in the cache."""
    return re.findall(r"│ +(\d+) │ +(\d+) │ +[\d,]+ ms │", out)


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """Room for the tools, which are a token a letter here."""
    return str(make_checkpoint(tmp_path_factory.mktemp("talkative"), "llama", max_position_embeddings=4096))


@pytest.mark.parametrize("form", ["hermes", by_night("qwen3_coder")])
def test_agents(status_of, talkative, form):
    """openai's SDK; it says so itself if a call is not as it has to be. The others: serving/clients/test_agents.py."""
    pytest.importorskip("llguidance")
    status, out = status_of("agents.py", talkative, "--only", "openai", "--form", form)
    assert status == 0 and out.count("It is booked: 42.") == 2 and out.count("find_trains") == 2


@pytest.mark.nightly
def test_quickstart(processes, demo_in_float32):
    """As its user runs it."""
    status, out, err = processes.run(str(ROOT / "examples" / "quickstart.py"), str(demo_in_float32), cwd=ROOT)
    assert status == 0, err
    cold, warm = out.split("Second batch")
    assert "Rope Walk" in cold and "Old Dock" in warm
    computed = computed_of(out)
    assert len(computed) == 2 and computed[1] < computed[0] / 5
    shown = (ROOT / "README.md").read_text("utf-8")
    assert computed_of(shown) == computed and found_of(shown) and set(found_of(shown)) <= set(found_of(out))
    assert "times faster" in re.sub(r"[\s│]+", " ", out)


def test_image_blocks(status_of):
    """The table of the hashing example in vLLM's documentation, from a running engine."""
    status, out = status_of("image_blocks.py")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│")]
    blocks, results = rows[:4], rows[4:]
    assert "10 tokens" in out and "[1, 3, 7493, 1681, 1294, 1593, 3937, 9551, 10, 4]" in out
    assert [row[1] for row in blocks] == [
        "1, 3, 7493, 1681, 1294, 1593, 3937, 9551, 8 x <P>",
        "16 x <P>",
        "16 x <P>",
        "1 x <P>, 4",
    ]
    content = re.fullmatch(r"mm ([0-9a-f]{8}), starts at 8", blocks[0][2])[1]
    assert [row[2] for row in blocks] == [f"mm {content}, starts at {start}" for start in (8, -8, -24, -40)]
    assert all(re.fullmatch("[0-9a-f]{16}", row[3]) for row in blocks[:3]) and blocks[3][3] == "not full: none"
    assert [row[1:] for row in results] == [["0", "1"], ["48", "1"], ["0", "2"]] and status == 0
    chapter = (ROOT / "chapters" / "ch07_prefix_caching" / "README.md").read_text("utf-8")
    shown = re.findall(r"^```text\n(┃ .*?)^```$", chapter, re.MULTILINE | re.DOTALL)
    printed = [line for line in out.splitlines() if line.startswith(("┃", "│"))]
    assert "".join(shown).splitlines() == printed, "chapter 7 shows both tables"


@pytest.mark.nightly
def test_ask_a_picture(run):
    out = " ".join(run("ask_a_picture.py").split())
    assert "random weights" in out and out.endswith("The tower has run 1 time.")
    found = found_of(out)
    assert len(found) == 4 and found[0][1] == "0" and all(int(cached) > 300 for _, cached in found[1:])


def test_offline_inference(status_of, talkative):
    status, out = status_of("offline_inference.py", talkative)
    lines = out.splitlines()
    assert status == 0 and sum(" -> " in line for line in lines) == 3
    assert re.match(r"'The capital of France is' -> ['\"].", lines[0])


@pytest.mark.parametrize(("model", "known"), [("talkative", ""), by_night("demo_in_float32", "Paris")])
def test_chat(status_of, model, known, request):
    """In float32: in bfloat16 the first token's two best logits are equal on some processors."""
    path = str(request.getfixturevalue(model))
    status, out = status_of("chat.py", path, stdin="What is the capital of France?\nAnd of Italy?\n")
    cached = [int(n) for n in re.findall(r"(\d+) of them cached", out)]
    assert status == 0 and known in out and len(cached) == 2 and cached[0] == 0 and cached[1] >= 32


def test_move_to_vllm(status_of, talkative):
    status, out = status_of("move_to_vllm.py", talkative)
    cached = [tuple(map(int, pair)) for pair in re.findall(r"\((\d+) of (\d+) tokens cached", out)]
    assert status == 0 and len(cached) == 6 and min(cached)[0] == 0
    assert all(num_prompt - 16 <= num_cached < num_prompt for num_cached, num_prompt in cached[3:])
    assert re.search(r"one of three colours: (grey|red|green)\n", out)
    assert re.findall(r"^  sample (\d): ", out, re.MULTILINE) == ["0", "1", "2"]


@pytest.mark.parametrize("more", [[], by_night(["--quantization", PACKED])])
def test_bench_throughput(run, checkpoint, tmp_path, monkeypatch, more):
    model, greedy = make_checkpoint(tmp_path, "llama", vocab_size=49152), importlib.import_module("measuring").greedy
    monkeypatch.setattr("measuring.greedy", lambda num_output: greedy(min(num_output, 4)))
    out = run("bench_throughput.py", str(model), "--dtype", "float32")
    assert "32 requests, 4,217 prompt tokens" in out
    for name in ("start (import to ready)", "prefill", "decode", "output", "mean batch", "peak memory"):
        assert name in out
    short = (str(checkpoint()), "--num-requests", "2", "--max-output", "32")
    monkeypatch.setattr("nanovllm.files.system.peak_memory_bytes", lambda: 0)  # as on Windows
    out = run("bench_throughput.py", *short, *more)
    assert "2 requests" in out and "│ - MB resident, " in out


@pytest.fixture
def table_of(status_of):
    """table_of(name, *args) -> what is in an example's table, by the first cell of a row."""

    def table_of(name: str, *args: str) -> dict[str, list[str]]:
        status, out = status_of(name, *args)
        assert status == 0
        rows = [line.strip("│|").split("│" if "│" in line else "|") for line in out.splitlines() if line[:1] in "│|"]
        return {first.strip(): [cell.strip() for cell in rest] for first, *rest in rows}

    return table_of


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """wide(variant) -> a tiny checkpoint with room for the benchmarks' prompts. It has few words."""
    return lambda variant: str(make_checkpoint(tmp_path_factory.mktemp(variant), variant, max_position_embeddings=2048))


@pytest.mark.nightly
def test_bench_peers(table_of, short_demo, tmp_path):
    """Without vLLM and llama.cpp, the table says what would bring them."""
    written = tmp_path / "table.md"
    sizes = (str(short_demo), "--requests", "3", "--prompt", "40", "--stream", "8", "--repeats", "1")
    table = table_of("bench_peers.py", *sizes, "--output", str(written))
    assert all(float(cell.replace(",", "")) > 0 for cell in table["nanovllm"][:6])
    for name in (
        "nanovllm, int8",
        f"nanovllm, {PACKED}",
        "nanovllm, no C compiler",
        "transformers, padded batch",
        "transformers, one by one",
    ):
        assert table[name][0].endswith("x)"), name
    for name in ("vLLM, eager", f"vLLM, {PACKED}", "llama.cpp, Q8_0"):
        assert table[name][0].startswith("not here: pip install") or table[name][0].endswith("x)"), name
    assert written.read_text("utf-8").count("\n| ") == len(table) - 2
    sampled = table_of("bench_peers.py", *sizes, "--sampling", "--only", "nanovllm")["nanovllm"]
    assert sampled[0].endswith(" (100%)") and all(re.fullmatch(r"[\d,]+ \(\d+%\)", cell) for cell in sampled[:6])


@pytest.mark.nightly
def test_bench_hybrid(table_of, wide, monkeypatch):
    sizes = ("--parts", "engines", "--prompt", "40", "--repeats", "1")
    table = table_of("bench_hybrid.py", wide("qwen3.5"), *sizes, "--only", "nanovllm", "nanovllm, int8")
    for name in ("nanovllm", "nanovllm, int8"):
        assert re.match(r"\d+\.\d\d s; \d+\.\d\d s; [\d.]+ tokens/s; ", "; ".join(table[name]))
    num_prompt = 0  # tokens computed so far, which is the time: no step that is measured computes any

    def scheduled(scheduler, *args):
        nonlocal num_prompt
        output = schedule(scheduler, *args)
        num_prompt += sum(chunk.end - chunk.start for chunk in output.chunks if chunk.is_prefill)
        return output

    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", scheduled)
    monkeypatch.setattr("measuring.time", SimpleNamespace(perf_counter=lambda: float(num_prompt)))
    table = table_of("bench_hybrid.py", wide("qwen3.5"), "--parts", "length", "--lengths", "16", "40")
    assert table["16"] == table["40"] == ["0.0 ms"] * 4


@pytest.mark.nightly
def test_bench_experts(demo_checkpoint, monkeypatch, capsys):
    """Of the random checkpoint that it makes, here a small one. It has the demo model's tokenizer."""
    module = importlib.import_module("bench_experts")
    monkeypatch.setattr(module, "SIZES", module.SIZES | {"hidden_size": 64, "num_hidden_layers": 2})
    monkeypatch.setattr(module, "EXPERTS", module.EXPERTS | {"num_experts": 8, "moe_intermediate_size": 32})
    monkeypatch.setattr(module, "NUM_OUTPUT", 4)
    monkeypatch.setattr(sys, "argv", ["bench_experts.py", "--int8"])
    module.main()
    rows = re.findall(r"│ (nanovllm|transformers) \w+ +│ +([\d.]+) \(.*│ +([\d.]+) \(", capsys.readouterr().out)
    assert len(rows) >= 4 and any(name == "transformers" for name, *_ in rows)
    assert all(float(rate) > 0 for _, *rates in rows for rate in rates)


@pytest.mark.nightly
def test_bench_busy(table_of, wide):
    table = table_of("bench_busy.py", wide("llama"), "--runs", "1", "--counts", "1", "--loads", "one stream")
    assert set(table) == {"quiet", "1 x loop", "1 x matmul", "1 x engine"}
    assert all(re.fullmatch(r"\d+, \d+ \([\d.]+, [\d.]+\)", cells[0]) for cells in table.values())


@pytest.mark.nightly
def test_bench_all(status_of, tmp_path):
    """Each output comes below its command, and what else the page says stays; a command that fails says so."""
    missing = "python examples/nothing.py"
    block = "```bash\n{}\n```\n\n<!-- printed -->\nof another machine\n<!-- end -->\n"
    machine, help_of = "python examples/bench_all.py --machine", "python examples/bench_all.py --help"
    peers = "python examples/bench_peers.py --help --vllm-python PATH"
    page = tmp_path / "page.md"
    page.write_text("# Results\n\n" + "\nmore\n\n".join(map(block.format, (machine, help_of, missing, peers))), "utf-8")
    status, printed = status_of("bench_all.py", "--page", str(page), "--only", "machine", "nothing", "peers")
    assert status == 0 and printed.count(" s\n") == 3
    text = page.read_text("utf-8")
    assert text.startswith("# Results\n\n```bash\n") and text.count("\nmore\n") == 3
    found = dict(re.findall(r"```bash\n(.*?)\n```\n\n<!-- printed -->\n(.*?)\n<!-- end -->", text, re.DOTALL))
    assert list(found) == [machine, help_of, missing, peers]
    assert found[machine].startswith("|") and "| instructions" in found[machine]
    assert found[help_of] == "of another machine"
    assert re.fullmatch(r"```text\nfailed: .*nothing\.py.*\n```", found[missing])
    assert found[peers].startswith("```text\nusage: bench_peers.py") and found[peers].endswith("\n```")
    status, _ = status_of("bench_all.py", "--page", str(page), "--only", "everything")
    assert status == 2
    status, _ = status_of("bench_all.py", "--page", str(page), "--only", "nothing")
    assert status == "every command has failed"


@pytest.mark.nightly
def test_bench_start(table_of, checkpoint):
    table = table_of("bench_start.py", str(checkpoint()), "--rounds", "1", "--importtime")
    names = {"import torch", "these, and transformers' classes", "nanovllm generate"}
    assert names | {'a script: LLM(MODEL).generate("Once upon a time")', "transformers"} <= set(table)


def test_bench_serve_lets_all_its_requests_wait(status_of, checkpoint, monkeypatch):
    def running_server(*options: str) -> None:
        raise SystemExit(options[options.index("--max-waiting") + 1])

    monkeypatch.setattr("nanovllm.serving.http.load_generator.running_server", running_server)
    assert status_of("bench_serve.py", str(checkpoint()), "--num-requests", "300")[0] == "300"


@pytest.mark.nightly
def test_bench_serve(table_of, status_of, short_demo_in_float32):
    sizes = ("--num-requests", "3", "--rounds", "1", "--loads", "0.5", "--dtype", "float32")
    status, out = status_of("bench_serve.py", str(short_demo_in_float32), *sizes, "--page")
    assert status == 0 and re.match(r"4 pairs of 3 requests at once: with a page they take \d\.\d+ times", out)
    for more in ((), ("--sampling",)):
        [_, server, *figures] = table_of("bench_serve.py", str(short_demo_in_float32), *sizes, *more)["0.5"]
        assert server == "nanovllm" and all(float(figure.replace(",", "")) > 0 for figure in figures[:3])


@pytest.mark.nightly
def test_bench_speculative(table_of, short_demo_in_float32):
    table = table_of("bench_speculative.py", str(short_demo_in_float32), "--dtypes", "float32", "--rounds", "1")
    assert len(table) == 5
    for accepted, num_a_step, *rates, same in table.values():
        assert accepted.endswith(("%", "-")) and float(num_a_step) >= 1 and all(float(rate) > 0 for rate in rates)
        drawn, of = same.split(" of ")
        assert drawn == of, "draft tokens change nothing"


@pytest.mark.parametrize(("num_output", "shown"), [(9, ["8", "8", "1.00"]), (1, ["-", "-", "-"])])
def test_bench_speculative_counts_while_the_clock_runs(checkpoint, monkeypatch, capsys, num_output, shown):
    """From the first token on, which therefore does not count; of answers that are one token there is no rate."""
    module = importlib.import_module("bench_speculative")
    run, load = module.run, ([[5, 6, 7]], importlib.import_module("measuring").greedy(num_output))
    monkeypatch.setattr(module, "workloads", lambda llm: {"one": load})
    monkeypatch.setattr(module, "run", lambda *args: (float(num_output > 1), run(*args)[1]))
    made = LLM.__init__
    monkeypatch.setattr(LLM, "__init__", lambda llm, *args, **more: made(llm, *args, **more | {"max_model_len": 64}))
    module.measure(
        argparse.Namespace(model=str(checkpoint()), speculative=module.NGRAM, rounds=1, show=False), "float32"
    )
    [row] = [line.strip("│").split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│ one")]
    assert [cell.strip() for cell in row[3:6]] == shown


@pytest.mark.nightly
def test_bench_routing(status_of):
    status, out = status_of("bench_routing.py", "--size", "0.25", "--num-engines", "4", "6")
    assert status == 0
    routers, delay, changes = (
        [[cell.strip() for cell in line.split("│")[1:-1]] for line in part.splitlines() if line.startswith("│")]
        for part in re.split(r"^[23]\. ", out, flags=re.MULTILINE)
    )

    def number(text: str) -> float:
        return float(text.rstrip("%").replace(",", ""))

    workload, results = "", {}
    for name, num_engines, *figures in routers:
        if num_engines:
            computed, found, mean, p50, p99, _ = map(number, figures)
            results[workload, num_engines, name] = dict(computed=computed, found=found, mean=mean, p50=p50, p99=p99)
        else:
            workload = name
    assert len(results) == 4 * 2 * 4
    for (workload, num_engines, name), of in results.items():
        in_turn, ours = (results[workload, num_engines, each] for each in ("in turn", "by KV events"))
        if workload in ("conversations of many turns", "long documents"):
            assert ours["computed"] < 0.75 * in_turn["computed"] and ours["p50"] < in_turn["p50"]
        assert ours["computed"] <= in_turn["computed"], "never worse, whatever the workload"
        assert ours["mean"] <= in_turn["mean"] and ours["p99"] <= in_turn["p99"]
        assert of["found"] == 0 or workload != "nothing shared", name
    assert number(delay[0][1]) < number(delay[-2][1]) <= number(delay[-1][1]), "at once, never, in turn"
    assert [row[0] for row in changes] == ["none", "one joins", "one leaves", "one dies", "one dies, one joins"]
    for row in changes:
        not_answered, _, its_own, others = map(number, row[1:5])
        assert not_answered == others == 0 and (its_own > 0) == (row[0] not in ("none", "one joins"))
    assert [number(row[2]) > 0 for row in changes] == [False, False, False, True, True], "its clients ask again"
    status, _ = status_of("bench_routing.py", "--num-engines", "1")
    assert status == 2


def test_bench_routing_again(status_of):
    """In virtual time: another process, whose sets have another order, prints the same."""
    options = ("--size", "0.01", "--num-engines", "4")
    command = [sys.executable, str(ROOT / "examples" / "bench_routing.py"), *options]
    env = os.environ | {"PYTHONHASHSEED": "1"}
    again = subprocess.run(command, env=env, capture_output=True, check=True, encoding="utf-8").stdout
    assert status_of("bench_routing.py", *options) == (0, again)


def test_prefix_cache_walkthrough(run):
    out = run("prefix_cache_walkthrough.py")
    assert "request 2: blocks [0, 1, 2, 7, 8, 9, 4, 3], 12 tokens cached" in out
    queues = [
        [int(n) for n in line.split(":")[1].split() if n.isdigit()]
        for line in out.splitlines()
        if "queue, head" in line
    ]
    assert queues[-3:] == [[7, 8, 9, 4, 3, 2], [7, 8, 9, 4, 3, 2, 6, 5, 1, 0], [6, 5]]


def test_a_trace_on_python_310():
    """Its code objects have no qualified names."""
    module = importlib.import_module("trace_request")

    def frame(file: str, name: str, flags: int = 0) -> SimpleNamespace:
        path = str(module.PACKAGE / file)
        return SimpleNamespace(f_code=SimpleNamespace(co_filename=path, co_name=name, co_flags=flags))

    walk = module.Walk()
    for file, name in (("core/scheduler.py", "run"), ("worker/model_runner.py", "run"), ("worker/batch.py", "tensors")):
        walk.profile(frame(file, name), "call", None)
    walk.profile(frame("worker/batch.py", "inner", inspect.CO_NESTED), "call", None)
    before, (stage, calls) = walk.stages.items()
    assert before[0] == "before the first step" and stage.startswith("4. run: ")
    assert list(calls) == [("worker/model_runner.py", "run"), ("worker/batch.py", "tensors")]


@pytest.mark.nightly
def test_trace_request(run, checkpoint):
    """The walk goes in one direction: each stage of a step begins where the one before it has ended."""
    printed = run("trace_request.py", str(checkpoint()))
    stages = re.findall(r"(\d)\. (\w+):", printed)
    assert stages == [(str(n), name) for n, name in enumerate("poll draft schedule run update outputs".split(), 1)]
    walk = printed.split("2. draft")[1].split("4. run")[0]
    assert "Scheduler.schedule x4" in walk and "BlockManager.allocate_with_prefix" in walk
    assert "worker/" not in walk.replace("worker/model_runner.py  own_modes x4", "")  # which is around run()
    files = printed.split("files:\n")[1].split()
    assert files[0] == "llm.py" and len(files) == int(re.search(r"passed (\d+) files", printed)[1]) <= 30


@pytest.mark.nightly
def test_bench_prefix_cache(run, tmp_path):
    """Of a model with few words."""
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=2048)
    out = run("bench_prefix_cache.py", str(model), "--requests", "2", "--blocks", "50000")
    for name in ("chatbot", "multi-turn", "retrieval", "completion", "summaries", "random"):
        assert name in out
    assert "66,560 prompt tokens, 2,048 computed" in " ".join(out.split())
    assert 500 < int(re.search(r"Bookkeeping: ([\d,]+) bytes", out)[1].replace(",", "")) < 3000


@pytest.mark.nightly
def test_bench_tiers(run, wide):
    """Ten kills, and a small directory; damage and the rest are in tests/features/tiers."""
    sizes = ("--kills", "10", "--damages", "20", "--gigabytes", "0.03")
    out = run("bench_tiers.py", "--parts", "work", "harm", "size", *sizes)
    ratios = re.findall(r"│ +(\d\.\d\d) │ +(\d\.\d\d) │$", out, re.MULTILINE)
    assert len(ratios) == 10 and all(float(ratio) <= 1.1 for pair in ratios for ratio in pair)
    [(killed, read)] = re.findall(r"killed while writing │ +(\d+) │ +([\d,]+) │ +0 │ +0 │", out)
    assert killed == "10" and int(read.replace(",", "")) > 30
    [taken] = re.findall(r"index in memory +│ +(\d+) bytes a block", out)
    assert "blocks of 16 tokens" in out and 0 < int(taken) < 1000
    out = run("bench_tiers.py", wide("llama"), "--parts", "speed", "--runs", "1")
    assert len(re.findall(r"│ (?:quiet|beside a busy process) +│ +\d+ │ +\d+ │ +\d\.\d+ │", out)) == 2


@pytest.mark.nightly
def test_tensor_parallel(run, short_demo):
    out = run("tensor_parallel.py", str(short_demo))
    assert out.count("the same 24 tokens on 1 and 3 ranks") == 3
    assert "5 times 2,304" in out and out.count("16,384") == 3


def test_structured_output(status_of, talkative):
    """Random weights say nothing sensible; the right column is data all the same."""
    status, out = status_of("structured_output.py", talkative)
    assert status == 0
    assert all(name in out for name in ('{"cafe":', '{"steps":', '{"ship":', "The right column is data"))


def test_profile_step(run, checkpoint, monkeypatch):
    model = str(checkpoint())
    measure_machine_quickly(monkeypatch)
    out = run("profile_step.py", model, "--batch", "2", "--context", "16", "--prompt", "32")
    parts = re.findall(r"│ (scheduling|linear layers|attention|sampling|detokenizing, outputs) +│ +[\d.]+", out)
    assert len(parts) == 10, out  # of a prefill and of a decode


@pytest.mark.nightly
def test_structured_output_has_a_cost(run, checkpoint):
    pytest.importorskip("llguidance")
    assert re.search(
        r"a step of 32 sequences: [\d.]+ ms, with masks", run("structured_output.py", str(checkpoint()), "--cost")
    )


@pytest.mark.parametrize("variant", ["qwen3-moe", "qwen3.5", PACKED])
def test_profile_step_has_no_floors_of_other_models(status_of, checkpoint, tmp_path, variant):
    model = tmp_path / "packed" if variant == PACKED else checkpoint(variant)
    if variant == PACKED:
        status_of("make_compressed.py", str(checkpoint()), str(model), "--rounding", "nearest")
    status, _ = status_of("profile_step.py", str(model), "--context", "16", "--prompt", "32")
    assert status.startswith("on a CPU this measures dense models: ")


@pytest.mark.compiler
def test_simulate_cores(run, checkpoint):
    sizes = ("--threads", "3", "--rows", "1", "5", "--keys", "20", "--prompt", "40", "--dtype", "float32")
    out = run("simulate_cores.py", str(checkpoint()), *sizes)
    assert re.findall(r"(Decode|Prefill), (.*?) *\n", out) == [
        ("Decode", "1 row of 20 keys"),
        ("Decode", "1 row of 20 keys, 3 threads"),
        ("Decode", "5 rows of 20 keys"),
        ("Decode", "5 rows of 20 keys, 3 threads"),
        ("Prefill", "40 tokens"),
        ("Prefill", "40 tokens, 3 threads"),
    ]
    rows = re.findall(r"^│ +(\d+) │ +(\d+) │ +(\d+) │", out, re.MULTILINE)  # of the tables that compare threads
    assert [num_threads for num_threads, _, _ in rows] == ["1", "2", "3"] * 3
    assert all((barriers == "0") == (num_threads == "1") for num_threads, _, barriers in rows)


@pytest.mark.compiler
@pytest.mark.parametrize(
    "options", [["--compare"], by_night(["--quantization", "int8"]), by_night(["--enforce-eager"])]
)
def test_reproducible(status_of, tmp_path, options):
    """Ten ways, ten times the same bits; PyTorch's operations may have others, which the exit code then says."""
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=1024)
    status, out = status_of("reproducible.py", str(model), *options)
    ways = re.findall(r"│ +([0-9a-f]{16}) │ (yes|no) +│", out)
    assert len(ways) == 10
    assert status == any(same == "no" for _, same in ways) == (len({digest for digest, _ in ways}) > 1)
    assert status == 0 or options == ["--enforce-eager"]
    cached, preemptions = (
        re.findall(pattern, out) for pattern in (r"(\d+) tokens found cached", r"preemptions: (\d+)")
    )
    assert all(map(int, cached + preemptions)) and len(cached + preemptions) == 3
    if options == ["--compare"]:
        assert re.search(r"nanovllm +│ +0 of 32 │ +0 of 32 │ +0.0e\+00 │\n│ transformers +│ +\d+ of 32", out)


@pytest.mark.parametrize("is_default", [False, by_night(True)])
def test_perplexity(run, tmp_path, checkpoint, is_default):
    """By night of the default text, which is long, and of a published file's 4 bits, too."""
    (tmp_path / "text").write_text("What is a token? " * 8, "utf-8")
    more = ["gptq"] if is_default else ["--text", str(tmp_path / "text")]
    options = "--tokens 128 --window 64 --quantization none int8".split()
    out = run("perplexity.py", str(checkpoint()), *options, *more)
    rows = re.findall(r"│ (?:as they are|int8|gptq, a file of 4 bits) +│ +([\d.,]+)", out)
    as_they_are, *rounded = (float(x.replace(",", "")) for x in rows)
    near = [pytest.approx(as_they_are, rel=0.05), pytest.approx(as_they_are, rel=0.5)]
    assert rounded == near[: 1 + is_default]


def test_perplexity_of_a_text_that_ends_within_a_window(run, tmp_path, checkpoint):
    """The part of a window that is left over counts nowhere: neither in the sum nor in the number of tokens."""
    (tmp_path / "text").write_text("What is a token? " * 6, "utf-8")  # a token a letter: 102
    options = (str(checkpoint()), "--quantization", "none", "--text", str(tmp_path / "text"), "--window", "64")
    a_window, a_window_and_more = (run("perplexity.py", *options, "--tokens", num) for num in ("64", "128"))
    assert a_window == a_window_and_more and "63 tokens of " in a_window


@pytest.mark.parametrize("on_gpu_alone", [dict(optimizations=(), max_num_batched_tokens=64), by_night({})])
def test_perplexity_and_few_bits_on_a_gpu(run, tmp_path, checkpoint, monkeypatch, on_gpu_alone):
    """What is printed and what is written are a CPU's. Triton's interpreter computes for half a minute, so by night."""
    made = LLM.__init__

    def made_small(llm: LLM, *args: object, **options: object) -> None:
        made(llm, *args, **on_gpu_alone | options)

    (tmp_path / "text").write_text("What is a token? " * 8, "utf-8")
    options = ("--tokens", "128", "--text", str(tmp_path / "text"))
    measured = ("--window", "64", "--dtype", "float32")
    found = []
    for name, machine in (("cpu", nullcontext()), ("gpu", pretend_gpu())):
        packed = tmp_path / name
        if name == "gpu":
            monkeypatch.setattr(LLM, "__init__", made_small)
        with machine:
            run("make_compressed.py", str(checkpoint()), str(packed), *options)
            ways = () if name == "gpu" else ("--quantization", "none")  # a GPU computes with no others
            shown = run("perplexity.py", str(checkpoint()), *options, *measured, *ways)
        found.append((shown, load_file(packed / "model.safetensors")))
    (on_cpu, weights), (on_gpu, others) = found
    assert on_gpu == on_cpu and weights.keys() == others.keys()
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


@pytest.mark.nightly
def test_perplexity_of_shuffled_channels(run, checkpoint, monkeypatch):
    """The model computes the same function. Nothing is linked, which Windows allows only to some."""
    monkeypatch.delattr(os, "symlink")
    options = "--tokens 128 --window 64 --dtype float32 --quantization none nearest".split()
    outs = [run("perplexity.py", str(checkpoint()), *options, *more) for more in ((), ("--shuffle",))]
    plain, shuffled = (re.findall(r"│ as they are +│ +([\d.,]+)", out) for out in outs)
    assert len(plain) == 1 and shuffled == plain and outs[0] != outs[1]


@pytest.mark.parametrize("option", [["--shuffle"], ["--key-biases", "1"]])
def test_perplexity_of_shards_that_are_to_be_changed(status_of, tmp_path, option):
    model = make_checkpoint(tmp_path, "llama", shards=True)
    status, _ = status_of("perplexity.py", str(model), *option, "--tokens", "128", "--window", "64")
    assert status == f"{option[0]}: {model} has no model.safetensors; GGUF files and shards cannot be changed here"


@pytest.mark.nightly
def test_perplexity_of_keys_with_biases(run, checkpoint):
    """A bias that all keys have in common changes little, and rounding beside it much."""
    options = "--tokens 128 --window 64 --quantization none --kv-cache-dtype auto int8 --key-biases 0 300".split()
    out = run("perplexity.py", str(checkpoint()), *options)
    rows = re.findall(r"│ as they are(, key biases 300)?(, K/V int8)? +│ +([\d.,]+)", out)
    found = [float(number.replace(",", "")) for _, _, number in rows]
    assert len(found) == 4 and found[1] == pytest.approx(found[0], rel=0.01)
    assert found[2] == pytest.approx(found[0], rel=0.05) and abs(found[3] / found[2] - 1) > 0.05, found


def test_retrieval(status_of, talkative, monkeypatch):
    """The instruction that all passages begin with is computed once. The demo model is any model here."""
    monkeypatch.setattr("nanovllm.tools.demo_model.model_or_demo", lambda name: talkative)
    status, out = status_of("retrieval.py", "What is a token?", "--passages", "4", "--found", "1")
    assert status == 0 and "4 passages are vectors of 64 numbers" in out.replace("\n", " ")
    assert "was not trained for embeddings" in out and "the model's answer" in out and "ch0" in out
    assert int(re.search(r"([\d,]+) of\s+them found", out)[1].replace(",", "")) >= 3 * 128


def test_retrieval_measures_the_passages_alone(monkeypatch):
    """And not the questions whose mean is subtracted. The clock counts texts."""
    module, texts = importlib.import_module("retrieval"), []

    def embed(given: list[str], **_: object) -> list[SimpleNamespace]:
        texts.extend(given)
        return [SimpleNamespace(outputs=SimpleNamespace(embedding=[1.0, float(i)])) for i in range(len(given))]

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: len(texts)))
    passages = [module.Passage("ch04", f"title {i}", "text") for i in range(5)]
    retriever = module.Retriever(SimpleNamespace(embed=embed), passages, is_trained=False)
    assert retriever.seconds == 5 and len(texts) == 10


@pytest.mark.nightly
def test_bench_images(run):
    """Another Python's vLLM is not here, and it says so."""
    sizes = ("--shape", "tiny", "--picture", "64x48", "--repeats", "1")
    out = run("bench_images.py", *sizes, "--int8", "--transformers", "--vllm-python", sys.executable)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line.startswith("│ tiny")]
    engines, (ours, in_8_bits, theirs) = [row[1] for row in rows], rows[:3]
    assert engines[:3] == ["nanovllm", "nanovllm, tower in int8", "transformers"]
    assert ours[2] == in_8_bits[2] == theirs[2]
    assert "vLLM not here" in out or engines[3:] == ["vLLM"]
    assert "llama.cpp: not measured" in out
