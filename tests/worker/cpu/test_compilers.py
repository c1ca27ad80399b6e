"""Where there is no C compiler, PyPI's ziglang is one; and it compiles the kernels for systems that no test runs on."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.worker.cpu import compiler
from tests.emulators import ARM, EMULATORS, ZIG, build, compile_for, needs_zig, runner
from tests.marks import by_night
from tests.processes import LIMIT_S

MAC = "aarch64-macos"
TARGETS = ["x86_64-windows-gnu", "aarch64-windows-gnu", MAC, "x86_64-macos", ARM, "x86_64-linux-gnu"]
SIZES = ["-DHEAD_DIM=64", "-DGROUP=3", "-DTASK_ROWS=16"]
SOURCES = Path(compiler.__file__).parent
FEATURES = SOURCES.parents[1] / "features"
WINGS = [
    FEATURES / name
    for name in ("experts/experts.c", "hybrid/delta_rule.c", "lora/adapters.c", "quantization/quantized.c")
]


@needs_zig
@pytest.mark.parametrize("dtype", ["bf16", by_night("f32")])
@pytest.mark.parametrize("target", [MAC, *(by_night(target) for target in TARGETS if target != MAC)])
def test_the_kernels_compile_for_every_system(tmp_path, target, dtype):
    command = [*compile_for(target), *compiler.FLAGS, "-O0", "-Werror", f"-DTYPE_{dtype}", *SIZES, "-I", str(SOURCES)]
    for name in ("kernels.c", "heads.c", *WINGS):
        made = ["-c", str(SOURCES / name), "-o", str(tmp_path / "made.o")]
        done = subprocess.run([*command, *made], capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr


@needs_zig
@pytest.mark.parametrize("target", TARGETS)
def test_libraries_are_linked_for_every_system(tmp_path, target):
    """By the two commands of compile_library(). What ctypes looks up can be found, whatever a system hides."""
    if target == "aarch64-windows-gnu":
        pytest.skip("its C library, which ziglang compiles first, takes most of a minute")
    made = tmp_path / "pool.so"
    build(target, SOURCES / "pool.c", made, compiler.FLAGS, is_library=True)
    for name in (b"set_threads", b"parallel_for"):
        assert name in made.read_bytes()


@pytest.mark.ci
@pytest.mark.parametrize("target", [target for target in TARGETS if target in EMULATORS])
def test_the_pool_computes_every_item_once(tmp_path, target):
    run, program = runner(target, tmp_path.parent), tmp_path / "pool.exe"
    build(target, Path(__file__).with_name("pool.c"), program, ["-O2", "-pthread"])
    done = subprocess.run([*run, str(program)], capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["3", "helpers,", "0", "wrong"], done


@needs_zig
def test_without_cc_the_engine_computes_the_same_bits(checkpoint, tmp_path, monkeypatch, caplog):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3)
    prompts = ["the quick", "one two three four five six seven"]
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to compare with")
    expected = LLM(str(checkpoint())).generate(prompts, params)
    with pytest.MonkeyPatch.context() as hidden:
        folder = tmp_path / "bin"
        folder.mkdir()
        hidden.setenv("PATH", str(folder))
        hidden.setenv("ZIG_GLOBAL_CACHE_DIR", os.environ.get("ZIG_GLOBAL_CACHE_DIR", str(zig_cache())))
        hidden.setenv("XDG_CACHE_HOME", str(tmp_path))
        hidden.delenv("CC", raising=False)
        # -O3 takes clang twice as long, and the bits are the same.
        hidden.setattr(compiler, "COMPILE", [flag.replace("-O3", "-O1") for flag in compiler.COMPILE])
        assert compiler.find_compiler() == ZIG
        llm = LLM(str(checkpoint()))
    assert "C kernels are off" not in caplog.text and list((tmp_path / "nanovllm/kernels").glob("*.so"))
    for ours, theirs in zip(llm.generate(prompts, params), expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs


def zig_cache() -> Path:
    """Where ziglang keeps what it compiles once: not in the empty folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zig"


def test_a_message_names_what_can_be_installed(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.shutil, "which", lambda name: None)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    with pytest.raises(OSError, match=r'there is no C compiler .* pip install "nanovllm\[compiler\]"'):
        compiler.find_compiler()


@pytest.mark.parametrize("has_tools", [True, False])
def test_a_macs_cc_counts_only_with_apples_tools(monkeypatch, has_tools):
    """Without them /usr/bin/cc opens a window that asks to install them."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler.sys, "platform", "darwin")
    monkeypatch.setattr(compiler.shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(compiler, "find_spec", lambda name: True)
    monkeypatch.setattr(compiler, "_has_developer_tools", lambda: has_tools)
    assert compiler.find_compiler() == (["/usr/bin/cc"] if has_tools else ZIG)


def test_another_compiler_is_another_library(monkeypatch, tmp_path):
    """As an older one at the same place is: what it has made is not taken for the new one's."""
    cc, names = tmp_path / "cc", []
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for text in ("", "", "# newer"):
        script = f'#!/bin/sh\n{text}\nfor last; do [ "$before" = -o ] && echo made > "$last"; before=$last; done'
        cc.write_text(script, "utf-8")
        cc.chmod(0o755)
        os.utime(cc, ns=(len(text), len(text)))
        names.append(compiler.compile_library("pool.c", []).name)
    assert names[0] == names[1] != names[2]
