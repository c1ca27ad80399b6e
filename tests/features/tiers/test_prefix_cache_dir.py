"""An engine that finds what another one has computed: the same bits, never somebody else's, whatever becomes of it."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.tiers import directory, disk_store, fingerprint, segment
from nanovllm.features.tiers.directory import prepared, segments_in
from nanovllm.files.system import open_for_owner
from nanovllm.tools.cli import main
from nanovllm.worker.cpu import platform
from nanovllm.worker.cpu.threads import pytorch_threads
from nanovllm.worker.model_runner import ModelRunner
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.features.tiers.test_directory import ENV, check_budget, locked_elsewhere
from tests.processes import LIMIT_S

PROMPTS = [[*range(5, 106)], [*range(5, 65), *range(200, 260)], [*range(5, 105)]]
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)


def engine(checkpoint, path: Path | None, **options) -> LLM:
    kept = {} if path is None else {"prefix_cache_dir": path}
    return LLM(str(checkpoint), **SMALL | kept | options)


def answers(llm: LLM, prompts=PROMPTS, params=PARAMS, **options) -> list[tuple]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **options)
    llm.engine.scheduler.check_integrity()
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def cached(llm: LLM, prompts=PROMPTS, **options) -> list[int]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False, **options)
    return [output.num_cached_tokens for output in outputs]


def end(llm: LLM) -> None:
    """As when its process ends."""
    llm.engine.tiers.disk.close()


@pytest.mark.compiler
@pytest.mark.parametrize(
    "variant, options",
    [
        ("llama", {}),
        ("qwen2", {"dtype": "bfloat16"}),
        ("qwen3", {"kv_cache_dtype": "int8", "quantization": "int8"}),
        ("mistral-window", {"prefix_caching_hash_algo": "sha256"}),
        ("qwen3-moe", {}),
        ("qwen3.5", {"max_num_seqs": 4}),
        ("qwen3-next", {"max_num_seqs": 4, "max_num_batched_tokens": 48}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_same_bits_after_a_restart(checkpoint, tmp_path, variant, options):
    reference = answers(engine(checkpoint(variant), None, **options))
    llm = engine(checkpoint(variant), tmp_path / "cache", **options)
    assert answers(llm) == reference
    end(llm)
    again = engine(checkpoint(variant), tmp_path / "cache", **options)
    assert answers(again) == reference
    states = "state_cache_bytes" in options or variant in ("qwen3.5", "qwen3-next")
    found = again.stats()["tiers"]["disk"]
    assert found["hit_tokens"] > 100 and found["num_read"] >= 40 and found["num_dropped"] == 0
    end(again)
    third = engine(checkpoint(variant), tmp_path / "cache", **options)
    assert cached(third) == ([100, 116, 96] if states else [100, 119, 99]), "a full hit computes one token"
    end(third)


@pytest.mark.compiler
def test_keys_in_another_order_are_not_read(checkpoint, tmp_path, monkeypatch):
    """Without a compiler, the same options run PyTorch's operations, which keep keys in rows."""
    options = {"optimizations": ("c_kernels", "recorded_step")}
    first = engine(checkpoint(), tmp_path / "cache", **options)
    answers(first)
    end(first)
    monkeypatch.setattr(platform, "load_cpu_kernels", lambda *_, **__: None)
    reference = answers(engine(checkpoint(), None, **options))
    other = engine(checkpoint(), tmp_path / "cache", **options)
    assert answers(other) == reference
    end(other)


def replace_in_place(weights: Path) -> None:
    """By a file that `cp -p` brings: of another model, as large, and as old."""
    stat, data = weights.stat(), bytearray(weights.read_bytes())
    data[-200:] = bytes(200)
    weights.write_bytes(data)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)


@pytest.mark.compiler
def test_a_file_that_was_replaced_is_another_one_even_if_size_and_time_are_equal(copy_of, tmp_path):
    folder = copy_of("llama")
    first = engine(folder, tmp_path / "cache")
    answers(first)
    end(first)
    replace_in_place(folder / "model.safetensors")
    other = engine(folder, tmp_path / "cache")
    assert cached(other, PROMPTS[:1]) == [0]
    assert answers(other) == answers(engine(folder, None))
    end(other)


def test_a_file_that_is_replaced_while_it_is_loaded_keeps_nothing(copy_of, tmp_path, monkeypatch, caplog):
    folder, load = copy_of("llama"), ModelRunner.load

    def load_and_replace(runner, path):
        load(runner, path)
        replace_in_place(path / "model.safetensors")

    monkeypatch.setattr(ModelRunner, "load", load_and_replace)
    llm = engine(folder, tmp_path / "cache")
    assert "model.safetensors has changed since its weights were loaded" in caplog.text
    assert "disk" not in llm.stats()["tiers"]
    assert len(answers(llm)) == len(PROMPTS)


@pytest.mark.nightly
def test_ranks_keep_one_block(checkpoint, processes, tmp_path):
    options = SMALL | {"prefix_cache_dir": tmp_path / "cache"}
    llm = processes.llm(checkpoint(), 2, **options)
    reference = answers(llm)
    end(llm)
    again = processes.llm(checkpoint(), 2, **options)
    assert answers(again) == reference and again.stats()["tiers"]["disk"]["hit_tokens"] > 100
    end(again)


def test_the_key_holds_what_answers_depend_on(checkpoint, copy_of, tmp_path):
    """Whatever changes K/V finds nothing; what does not, finds all."""
    first = engine(checkpoint(), tmp_path / "cache")
    cached(first)
    end(first)
    for options in (
        {"dtype": "bfloat16"},
        {"quantization": "int8"},
        {"block_size": 8},
        {"hf_overrides": {"rope_theta": 1234.0}},
        {"hf_overrides": {"rms_norm_eps": 0.01}},
        {"enforce_eager": True},
    ):
        other = engine(checkpoint(), tmp_path / "cache", **options)
        assert cached(other, PROMPTS[:1]) == [0], options
        end(other)
    changed = copy_of("llama")
    weights = changed / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1  # one bit of one weight
    weights.write_bytes(data)
    other = engine(changed, tmp_path / "cache")
    assert cached(other, PROMPTS[:1]) == [0]
    end(other)
    for options in (
        {},
        {"seed": 7},
        {"max_num_batched_tokens": 16},
        {"prefix_caching_hash_algo": "sha256"},
        {"num_gpu_blocks_override": 80},
    ):
        with pytorch_threads(5):
            same = engine(checkpoint(), tmp_path / "cache", **options)
        assert cached(same, PROMPTS[:1]) == [100], options
        end(same)


def test_a_salt_is_a_secret(checkpoint, tmp_path):
    salted = [{"prompt_token_ids": PROMPTS[0], "cache_salt": "swordfish, of course"}]
    llm = engine(checkpoint(), tmp_path / "cache")
    assert cached(llm, salted) == [0]
    end(llm)
    for path in (tmp_path / "cache").iterdir():
        data = path.read_bytes()
        assert b"swordfish" not in data and "swordfish".encode("utf-16-le") not in data
    again = engine(checkpoint(), tmp_path / "cache")
    assert cached(again, PROMPTS[:1]) == [0]
    assert cached(again, [salted[0] | {"cache_salt": "swordfish"}]) == [0]
    assert cached(again, salted) == [100]
    end(again)


@pytest.mark.compiler
def test_an_adapter_is_known_by_its_content(checkpoint, tmp_path):
    """Its number is one of a process. Another adapter under the same number finds nothing."""
    from tests.features.lora.adapters import make_adapter

    base = checkpoint("llama-biases")
    paths = [str(make_adapter(tmp_path / f"a{i}", base, i, r=4, target_modules=["k_proj", "v_proj"])) for i in range(2)]
    llm = engine(base, tmp_path / "cache", enable_lora=True)
    reference = answers(llm, lora_request=LoRARequest("a", 1, paths[0]))
    end(llm)
    again = engine(base, tmp_path / "cache", enable_lora=True)
    assert cached(again, PROMPTS[:1]) == [0], "the base model's K/V is other K/V"
    assert cached(again, PROMPTS[:1], lora_request=LoRARequest("b", 1, paths[1])) == [0]
    assert answers(again, lora_request=LoRARequest("a", 9, paths[0])) == reference
    assert again.stats()["tiers"]["disk"]["hit_tokens"] > 100
    end(again)


@pytest.mark.compiler
def test_a_long_chain_comes_in_rounds(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "READ_BYTES", 7000)  # three blocks
    llm = engine(checkpoint(), tmp_path / "cache")
    reference = answers(llm)
    end(llm)
    again = engine(checkpoint(), tmp_path / "cache")
    assert answers(again) == reference
    assert again.stats()["tiers"]["disk"]["hit_tokens"] == 100 + 60
    end(again)


@pytest.mark.parametrize("variant", ["llama", "qwen3.5"])
def test_a_tight_pool_with_memory_below_it(checkpoint, variant):
    """Prompts that do not fit into the pool together: without a tier they are computed again, with one they are not."""
    prompts = [[stem, *range(10, 140)] for stem in range(200, 206)]
    options = {"num_gpu_blocks_override": 64, "max_num_seqs": 4}
    plain, tiered = (engine(checkpoint(variant), None, cpu_cache_bytes=n, **options) for n in (0, 8 << 20))
    reference = [answers(plain, prompts) for _ in range(2)]
    assert [answers(tiered, prompts) for _ in range(2)] == reference
    assert sum(cached(plain, prompts)) < 300 and sum(cached(tiered, prompts)) == 6 * 128
    assert 0 < tiered.stats()["tiers"]["memory"]["num_bytes"] <= 8 << 20
    assert tiered.reset_prefix_cache() and sum(cached(tiered, prompts)) > 0, "memory is asked, still"
    assert tiered.reset_prefix_cache(reset_connector=True) and cached(tiered, prompts[:1]) == [0]


def test_who_is_isolated_runs_while_others_wait_for_room(checkpoint):
    """A server isolates the suspects of a step that has failed: the others take no room from them."""
    llm = engine(checkpoint(), None, num_gpu_blocks_override=64, cpu_cache_bytes=1 << 20)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ids = [llm.engine.add_request(None, [stem, *range(10, 140)], params) for stem in range(200, 203)]
    llm.engine.step()
    llm.engine.isolate([llm.engine.requests[ids[-1]]])
    for _ in range(100):
        llm.engine.step()
    assert list(llm.engine.requests) == ids[:-1]
    llm.engine.isolate(None)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def test_memory_and_disk_together(checkpoint, tmp_path):
    prompts = [[stem, *range(10, 140)] for stem in range(200, 206)]
    options = {"num_gpu_blocks_override": 64, "cpu_cache_bytes": 70 * 2048}
    llm = engine(checkpoint(), tmp_path / "cache", **options)
    reference = answers(engine(checkpoint(), None), prompts)
    for _ in range(3):
        assert answers(llm, prompts) == reference
    tiers = llm.stats()["tiers"]
    assert tiers["memory"]["hit_tokens"] > 0 and tiers["disk"]["hit_tokens"] > 0
    assert tiers["memory"]["num_bytes"] <= 70 * 2048
    end(llm)


@pytest.mark.nightly
def test_killed_while_it_serves(checkpoint, tmp_path):
    """kill -9 of a process in the middle of its work: the next one answers right."""
    script = tmp_path / "serve.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from pathlib import Path
        from tests.features.tiers.test_prefix_cache_dir import *

        llm = engine(Path(sys.argv[1]), Path(sys.argv[2]))
        print("ready", flush=True)
        for i in range(10_000):
            answers(llm, [[i % 200, *PROMPTS[0]]] + PROMPTS)
            print(i, flush=True)
        """)
    )
    reference = answers(engine(checkpoint(), None))
    command = [sys.executable, str(script), str(checkpoint()), str(tmp_path / "cache")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENV)
    for _ in range(4):  # "ready", then three rounds
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    again = engine(checkpoint(), tmp_path / "cache")
    assert answers(again) == reference
    assert again.stats()["tiers"]["disk"]["hit_tokens"] > 0
    check_budget(again.engine.tiers.disk.directory)
    end(again)


def test_what_cannot_work_is_refused_before_the_weights_are_read(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "photo.jpg").write_text("")
    for options, text in (
        ({"prefix_cache_dir": tmp_path / "file"}, "is a file; name a directory"),
        ({"prefix_cache_dir": tmp_path / "full"}, "holds 'photo.jpg'"),
        ({"prefix_cache_dir": ""}, "prefix_cache_dir must be a directory"),
        ({"prefix_cache_dir": tmp_path / "file" / "below"}, "cannot be used"),
        ({"prefix_cache_dir": tmp_path / "new", "prefix_cache_bytes": "10k"}, "prefix_cache_bytes must be"),
        ({"cpu_cache_bytes": -1}, "cpu_cache_bytes must be"),
        ({"cpu_cache_bytes": "1g", "enable_prefix_caching": False}, "need enable_prefix_caching"),
        ({"cpu_cache_bytes": "1g", "kv_offloading_size": 1}, "leave one of them out"),
    ):
        with pytest.raises(ValueError, match=text):
            LLM(str(checkpoint()), **options)
    assert LLM(str(checkpoint()), kv_offloading_size=0.5, **SMALL).engine.config.cpu_cache_bytes == 1 << 29


def refused(path, flags):
    raise PermissionError(13, "Permission denied", path)


def test_a_directory_that_may_only_be_read(checkpoint, tmp_path, monkeypatch, caplog, capsys):
    """One warning; what is there is found, and nothing is written."""
    llm = engine(checkpoint(), tmp_path / "cache")
    cached(llm)
    end(llm)
    before = {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()}
    if os.getuid() == 0:  # whom no permission stops
        monkeypatch.setattr(directory, "open_for_owner", refused)
        monkeypatch.setattr(segment, "open_for_owner", refused)
    else:
        monkeypatch.setattr(Path, "chmod", lambda path, mode: None)
        os.chmod(tmp_path / "cache", 0o500)
        for path in before:
            os.chmod(path, 0o400)
    assert main(["cache", str(tmp_path / "cache")]) == 0 and " 40 " in capsys.readouterr().out
    reader = engine(checkpoint(), tmp_path / "cache")
    assert cached(reader) == [100, 119, 99] and cached(reader, [[300, *PROMPTS[0]]]) == [0]
    assert reader.reset_prefix_cache(reset_connector=True) and cached(reader, PROMPTS[:1]) == [0]
    end(reader)
    os.chmod(tmp_path / "cache", 0o700)
    assert {path: path.read_bytes() for path in (tmp_path / "cache").iterdir()} == before
    assert caplog.text.count("is read, and not written") == 1 and caplog.text.count("prefix cache:") == 1


@pytest.mark.parametrize("reads_only", [False, True])
def test_what_another_engine_writes_meanwhile_is_found(checkpoint, tmp_path, monkeypatch, reads_only):
    """By one that has asked for nothing yet, and whether it may write itself or not."""
    monkeypatch.setattr(disk_store, "SCAN_S", 0.01)
    writer = engine(checkpoint(), tmp_path / "cache")
    with monkeypatch.context() as patch:
        if reads_only:
            patch.setattr(directory, "open_for_owner", refused)
        reader = engine(checkpoint(), tmp_path / "cache")
    kept, seen = writer.engine.tiers.disk, reader.engine.tiers.disk
    assert seen.directory.is_writable is not reads_only
    for prompt in PROMPTS[:2]:
        cached(writer, [prompt])
        kept.flush()
        deadline = time.monotonic() + LIMIT_S
        while len(seen.directory) < len(kept.directory):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert cached(reader, PROMPTS[:2]) == [100, 119]
    end(reader)
    end(writer)


def test_a_digest_that_cannot_be_kept_is_no_reason_to_give_up(checkpoint, tmp_path, monkeypatch, caplog):
    """The disk is full, or another engine that starts at the same time writes its own."""
    with locked_elsewhere(prepared(tmp_path / "cache")):
        end(engine(checkpoint(), tmp_path / "cache"))

    def full(path, flags):
        if path.endswith(directory.NEW_DIGESTS):
            raise OSError(28, "No space left on device", path)
        return open_for_owner(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(directory, "open_for_owner", full)
        first = engine(checkpoint(), tmp_path / "cache")
        assert cached(first, PROMPTS[:1]) == [0]
        end(first)
        second = engine(checkpoint(), tmp_path / "cache")
        assert cached(second, PROMPTS[:1]) == [100]
        end(second)
    assert not caplog.text and not (tmp_path / "cache" / directory.DIGESTS).exists()
    end(engine(checkpoint(), tmp_path / "cache"))
    kept = (tmp_path / "cache" / directory.DIGESTS).stat().st_mtime_ns
    end(engine(checkpoint(), tmp_path / "cache"))
    assert (tmp_path / "cache" / directory.DIGESTS).stat().st_mtime_ns == kept, "one that is found is not written again"


def test_the_key_holds_the_code_that_makes_weights(tmp_path, monkeypatch):
    package = fingerprint.PACKAGE
    before = fingerprint.code_digest()
    copy = tmp_path / "nanovllm"
    for folder in fingerprint.COMPUTES:
        shutil.copytree(package / folder, copy / folder)
    monkeypatch.setattr(fingerprint, "PACKAGE", copy)
    assert fingerprint.code_digest() == before
    for name in ("files/gguf_weights.py", "files/tensor_files.py", "features/published/layouts.py", "worker/loader.py"):
        source = copy / name
        source.write_text(source.read_text("utf-8") + "\n", "utf-8")
        after = fingerprint.code_digest()
        assert after != before, name
        before = after


def test_the_command_shows_prunes_and_clears(checkpoint, tmp_path, capsys):
    path = str(tmp_path / "cache")
    llm = engine(checkpoint(), tmp_path / "cache")
    cached(llm)
    end(llm)
    assert main(["cache", path]) == 0
    shown = capsys.readouterr().out
    assert "blocks of 4" in shown and " 40 " in shown and "just now" in shown
    assert main(["cache", path, "--prune", "100k"]) == 0
    assert "records removed" in capsys.readouterr().out
    [left] = segments_in(tmp_path / "cache")
    left.with_suffix(".idx").unlink()  # as a process that is killed while it removes a segment
    assert main(["cache", path]) == 0 and "blocks" not in capsys.readouterr().out
    assert main(["cache", path, "--clear"]) == 0
    assert [file.name for file in (tmp_path / "cache").iterdir()] == [directory.LOCK]
    assert main(["cache", str(tmp_path / "none")]) == 2
    assert "is not a directory" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert main(["cache", str(tmp_path / "other"), "--clear"]) == 2
    assert (tmp_path / "other" / "thesis.txt").exists()


@pytest.mark.compiler
def test_requests_while_another_process_holds_the_lock(checkpoint, tmp_path):
    """They are answered, what is there is read, and what is new is written afterwards."""
    llm = engine(checkpoint(), tmp_path / "cache")
    reference = answers(llm)
    llm.engine.tiers.disk.flush()
    new = [[7, *range(270, 300)]]
    with locked_elsewhere(tmp_path / "cache"):
        llm.reset_prefix_cache()
        assert answers(llm) == reference and llm.stats()["tiers"]["disk"]["num_read"] > 0
        expected = answers(llm, new)
        again = engine(checkpoint(), tmp_path / "cache")
        assert answers(again) == reference and again.stats()["tiers"]["disk"]["num_read"] >= 40
    end(again)
    end(llm)
    third = engine(checkpoint(), tmp_path / "cache")
    assert answers(third, new) == expected and third.stats()["tiers"]["disk"]["hit_tokens"] > 0
    end(third)


def test_a_folder_with_files_of_others_is_refused(checkpoint, tmp_path):
    (tmp_path / "notes.seg").write_text("mine")
    expect("holds 'notes.seg'; name a directory of its own", engine, checkpoint(), tmp_path)
    assert (tmp_path / "notes.seg").read_text() == "mine"
