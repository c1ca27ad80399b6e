"""`nanovllm check-model`: how files are read, on one screen, whatever is wrong with them."""

import re
from shutil import copytree, ignore_patterns

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.files import system
from nanovllm.tools.check_model import NAME_WIDTH, shortened
from nanovllm.tools.cli import main
from nanovllm.worker.cpu import memory
from tests.checkpoints import edit, make_tokenizer
from tests.gguf_files import of_type, write_gguf

WORDS_OF = "{% for m in messages %}{{ m.role }}: {}\n{% endfor %}"


def rows_of(capsys) -> dict[str, str]:
    """{name: value} of what was printed; texts of several lines as one."""
    found, name = dict[str, str](), ""
    for line in capsys.readouterr().out.splitlines():
        head, rest = line[:NAME_WIDTH].strip(), line[NAME_WIDTH:].strip()
        name = head or name
        found[name] = f"{found[name]} {rest}" if name in found else rest
    return found


@pytest.fixture
def model(checkpoint, tmp_path):
    return copytree(checkpoint("llama"), tmp_path / "model")


def with_template(folder, template) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)


def test_a_checkpoint(checkpoint, capsys):
    assert main(["check-model", str(checkpoint("qwen3-moe"))]) == 0
    found = rows_of(capsys)
    assert found["architecture"] == "Qwen3MoeForCausalLM: 3 layers, 64 wide, 320 tokens"
    assert found["experts"] == "in 2 layers, 3 of 8 for a token"
    assert (found["dtype"], found["context"]) == ("float32", "512 tokens") and "in F32" in found["weights"]
    assert found["tokenizer"] == "BPE, 318 tokens, from tokenizer.json, tokenizer_config.json"
    assert found["pre-tokenizer"] == "ByteLevel" and found["BOS"] == "0 '<|bos|>' is not added to a prompt"
    assert found["end tokens"] == (
        "1 '<|eos|>' (config.json, generation_config.json, the tokenizer) 3 '<|im_end|>' (generation_config.json)"
    )
    assert found["content"] == "user: text, system: text, assistant: text, tool: not shown"
    assert found["tool format"] == "hermes" and found["developer"] == "told as system"
    assert found["tools"].startswith("not shown") and found["reasoning"] == "none is looked for in an answer"


def test_a_folder_without_weights(checkpoint, tmp_path, capsys):
    copytree(checkpoint(), tmp_path / "model", ignore=ignore_patterns("*.safetensors"))
    assert main(["check-model", str(tmp_path / "model")]) == 1
    assert "no *.safetensors file" in capsys.readouterr().out
    assert main(["check-model", str(tmp_path / "model"), "--load-format", "dummy"]) == 0


def test_a_gguf_file(checkpoint, tmp_path, capsys):
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf")
    assert main(["check-model", str(path)]) == 0
    found = rows_of(capsys)
    assert found["tokenizer"].endswith("from model.gguf")
    assert found["pre-tokenizer"].startswith("gpt-2 (tokenizer.ggml.pre, of a gpt2 vocabulary): ")
    assert "3 '<|im_end|>' (tokenizer.ggml.eot_token_id, its text)" in found["end tokens"]


def test_what_cannot_be_used_is_an_error_and_the_rest_is_read_all_the_same(model, capsys):
    edit(model / "config.json", hidden_act="gelu")
    (model / "tokenizer.json").write_text("{")
    assert main(["check-model", str(model)]) == 1
    found = rows_of(capsys)
    assert "hidden_act" in found["error"] and "the tokenizer in" in found["error"]
    edit(model / "config.json", hidden_act="silu", num_hidden_layers=3)
    make_tokenizer().save_pretrained(model)
    assert main(["check-model", str(model)]) == 1
    found = rows_of(capsys)
    assert "missing: model.layers.2" in found["error"] and found["content"].startswith("user: text")
    assert main(["check-model", str(model / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_warnings(checkpoint, tmp_path, capsys):
    model = copytree(checkpoint("llama-mha-tied"), tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    head = torch.zeros_like(weights["model.embed_tokens.weight"])
    save_file(weights | {"lm_head.weight": head}, model / "model.safetensors", {"format": "pt"})
    with_template(model, "{% for m in messages %}{% if m.role == 'user' %}{{ m.text }}{% endif %}{% endfor %}")
    assert main(["check-model", str(model)]) == 0
    found = rows_of(capsys)
    assert "two that differ: both are used" in found["warning"]
    assert "shows nothing of a user's words" in found["warning"] and found["content"] == "not shown"
    assert "does not show system messages" in found["warning"]
    with_template(model, "{{ bos_token }}{{ bos_token }}" + WORDS_OF.replace("{}", "{{ m.content }}"))
    main(["check-model", str(model)])
    assert "the chat template writes 2 BOS" in rows_of(capsys)["warning"]


def test_memory(demo_checkpoint, demo_gguf, monkeypatch, capsys):
    """What a start takes: tests/worker/cpu/test_start_memory.py."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(system, "available_bytes", lambda: 2_000_000_000)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000_000)
    assert main(["check-model", str(demo_checkpoint)]) == 0
    found = rows_of(capsys)
    assert found["memory"].startswith("bfloat16 0.8 GB, int8 0.7 GB, int4 0.6 GB")
    assert found["KV pool"].startswith("23.0 KB a token, at most 0.9 GB here")
    assert found["KV pool"].endswith("2.0 GB are available: it fits (bfloat16, int8, int4)")
    monkeypatch.setattr(system, "available_bytes", lambda: 850_000_000)
    assert main(["check-model", str(demo_checkpoint)]) == 0
    assert rows_of(capsys)["KV pool"].endswith("0.8 GB are available: it fits (int8, int4)")
    monkeypatch.setattr(system, "available_bytes", lambda: 300_000_000)
    assert main(["check-model", str(demo_gguf)]) == 0
    found = rows_of(capsys)
    assert found["memory"].startswith("as it is 0.6 GB") and found["KV pool"].endswith("available: it does not fit")


def test_formats_are_those_of_the_file(checkpoint, tmp_path, capsys):
    """And not what they become: an engine holds Q5_1 as int8."""

    def some(name: str, weight: np.ndarray) -> tuple[np.ndarray, str]:
        return of_type("Q5_1" if "q_proj" in name else "F16")(name, weight)

    assert main(["check-model", str(write_gguf(checkpoint(), tmp_path / "model.gguf", some))]) == 0
    found = rows_of(capsys)
    assert found["weights"].endswith("14 in F16, 5 in F32, 2 in Q5_1") and found["dtype"] == "bfloat16"
    assert "weights of type Q5_1 are unpacked and held as int8" in found["warning"]


def test_memory_of_states(checkpoint, monkeypatch, capsys):
    """As the engine divides it."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 2_000_000_000)
    model = str(checkpoint("qwen3.5"))
    assert main(["check-model", model]) == 0
    [(size, most)] = re.findall(r"([\d.]+) MB a sequence or snapshot, at most ([\d.]+) GB", rows_of(capsys)["states"])
    states = LLM(model).engine.model_runner.states
    assert float(size) == round(states.slot_bytes / 1e6, 1)
    assert float(most) == pytest.approx(states.slots.num_bytes / 1e9, abs=0.051)


def test_another_tokenizer_and_overrides(checkpoint, model, tmp_path, capsys):
    other = copytree(checkpoint("llama"), tmp_path / "other")
    with_template(other, None)
    for path in other.glob("*.jinja"):
        path.unlink()
    assert main(["check-model", str(model), "--tokenizer", str(other), "--hf-overrides", '{"eos_token_id": 7}']) == 0
    found = rows_of(capsys)
    assert found["chat template"] == "none: chats need chat_template"
    assert found["end tokens"].endswith("(hf_overrides)") and found["end tokens"].startswith("7 ")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content }}", "text"),
        ("{{ m.content[0].text }}", "one part"),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", "parts or one part"),
        (
            "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0]['text'] }}{% endif %}",
            "text or one part",
        ),
    ],
)
def test_what_content_has_to_be(model, capsys, content, expected):
    with_template(model, WORDS_OF.replace("{}", content))
    assert main(["check-model", str(model)]) == 0
    assert rows_of(capsys)["content"].startswith(f"user: {expected}, system: {expected}")


def test_steps_of_a_tokenizer():
    split = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated"}
    steps = {"type": "Sequence", "pretokenizers": [split, {"type": "ByteLevel"}]}
    assert shortened(steps) == r"Split '\\d', ByteLevel" and shortened({"type": "NFC"}) == "NFC"
