"""--lora-modules: adapters that a batch job's lines and a server's clients choose by name."""

import json
import shutil

import openai
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.features.lora.cli_modules import read_modules
from nanovllm.tools import cli
from tests.checkpoints import edit, make_tokenizer
from tests.errors import expect
from tests.features.lora.adapters import ATTENTION, make_adapter
from tests.jobs.lines import FOX, line
from tests.servers import serving

GREEDY = dict(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def modules(checkpoint, tmp_path_factory) -> list[str]:
    folder, base = tmp_path_factory.mktemp("adapters"), checkpoint()
    paths = [make_adapter(folder / name, base, i, r=4, target_modules=ATTENTION) for i, name in enumerate(("a", "b"))]
    return [f"{path.name}={path}" for path in paths]


@pytest.fixture(scope="module")
def texts(checkpoint, modules) -> dict[str | None, str]:
    """What each adapter, and none, make of the same prompt."""
    llm = LLM(str(checkpoint()), enable_lora=True, max_model_len=128)
    requests = [LoRARequest(name, i, path) for i, (name, _, path) in enumerate((m.partition("=") for m in modules), 1)]
    chosen = [None, *requests]
    outputs = llm.generate([FOX] * 3, SamplingParams(**GREEDY), lora_request=chosen)
    found = {lora and lora.lora_name: o.outputs[0].text for lora, o in zip(chosen, outputs, strict=True)}
    assert len(set(found.values())) == 3
    return found


def test_a_batch_job_chooses_by_model(checkpoint, modules, texts, tmp_path, capsys):
    base, source, target = checkpoint(), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = ["b", base.name, "a", "a", None, "c"]
    lines = [line(f"{i}", prompt=FOX, **GREEDY, **({"model": name} if name else {})) for i, name in enumerate(names)]
    source.write_bytes(b"\n".join(lines))
    command = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(base), "--max-model-len", "128"]
    assert cli.main([*command, "--lora-modules", *modules]) == 1
    records = sorted(map(json.loads, target.read_text().splitlines()), key=lambda record: int(record["custom_id"]))
    for name, record in zip(names[:-1], records, strict=False):
        body = record["response"]["body"]
        assert body["choices"][0]["text"] == texts[name if name in texts else None]
        assert body["model"] == (name or base.name)
    message = records[-1]["error"]["message"]
    assert "body.model is 'c'" in message and ", with adapter a, with adapter b: leave body.model out" in message
    capsys.readouterr()
    assert cli.main(command) == 2  # the same job, answered without adapters, would be another one
    assert "holds answers to another model, or with other options" in capsys.readouterr().err


def test_an_adapter_that_changed_is_another_job(checkpoint, modules, tmp_path, capsys):
    base, source, target = checkpoint(), tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    folder = tmp_path / "adapter"
    shutil.copytree(modules[0].partition("=")[2], folder)
    source.write_bytes(line("1", prompt=FOX, model="x", **GREEDY))
    command = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(base), "--max-model-len", "128"]
    command += ["--lora-modules", f"x={folder}"]
    assert cli.main(command) == 0
    edit(folder / "adapter_config.json", lora_alpha=1)
    capsys.readouterr()
    assert cli.main(command) == 2
    assert "holds answers to another model, or with other options" in capsys.readouterr().err


def test_a_server_has_models_beside_its_own(checkpoint, modules, texts):
    adapters = {name: path for name, _, path in (module.partition("=") for module in modules)}
    with serving(checkpoint(), enable_lora=True) as server:
        for i, (name, path) in enumerate(adapters.items(), 1):
            server.llm.engine.known_adapters.check(LoRARequest(name, i, path))
        client = server.client()
        assert [model.id for model in client.models.list()][-2:] == ["a", "b"]
        assert client.models.retrieve("b").id == "b"
        for name in ("a", "b", "tiny"):
            answer = client.completions.create(
                model=name, prompt=FOX, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
            )
            assert answer.model == name and answer.choices[0].text == texts.get(name, texts[None])
        with pytest.raises(openai.NotFoundError, match=r"body\.model is 'c'"):
            client.completions.create(model="c", prompt=FOX)
        server.assert_at_rest()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a"], "PATH}, found 'a'"),
        (["=p"], "takes NAME=PATH"),
        (["a="], "takes NAME=PATH"),
        (['{"name": "a=b", "path": 3}'], 'takes NAME=PATH, or {"name": NAME, "path": PATH}, found'),
        (['{"name": "a=b", "path": "nowhere/at/all"}'], "adapter 'a=b': 'nowhere/at/all' is neither"),
        (["{"], "takes NAME=PATH"),
        (["llama=p"], "'llama' is taken already"),
        (["a=nowhere/at/all"], "adapter 'a': 'nowhere/at/all' is neither a directory nor a hub id"),
    ],
)
def test_modules_that_cannot_be(checkpoint, texts, message):
    expect(message, read_modules, texts, EngineConfig(str(checkpoint())), ["llama"])


def test_modules_are_read_before_the_model(checkpoint, modules):
    config, adapters = read_modules(modules, EngineConfig(str(checkpoint())), ["llama"])
    assert config.enable_lora and [(a.lora_name, a.lora_int_id) for a in adapters] == [("a", 1), ("b", 2)]
    expect("'a' is taken already", read_modules, [modules[0]] * 2, EngineConfig(str(checkpoint())), [])
    expect("max_lora_rank is 2", read_modules, modules, EngineConfig(str(checkpoint()), max_lora_rank=2), [])
    assert read_modules([], config, []) == (config, [])


@pytest.mark.parametrize("made_for", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_an_output_head(checkpoint, tmp_path, made_for):
    """Such a one makes no tokens. It is read for what the engine's configuration asks of it."""
    base = tmp_path / "base"
    made_for.from_pretrained(checkpoint("qwen3"), dtype=torch.float32).save_pretrained(base)
    make_tokenizer().save_pretrained(base)
    adapter = make_adapter(tmp_path / "adapter", base, made_for=made_for, r=4, target_modules=ATTENTION)
    config, [request] = read_modules([f"one={adapter}"], EngineConfig(str(base), runner="pooling"), ["tiny"])
    assert (config.enable_lora, config.runner, request.lora_name) == (True, "pooling", "one")
    generates = EngineConfig(str(base), runner="generate")
    expect("so it cannot generate", read_modules, [f"one={adapter}"], generates, ["tiny"])


def test_generation_config_is_read_where_the_engine_reads_it(checkpoint, modules, tmp_path):
    base = shutil.copytree(checkpoint(), tmp_path / "base")
    (base / "generation_config.json").write_text("{")
    expect("generation_config.json cannot be read", read_modules, modules, EngineConfig(str(base)), ["tiny"])
    (tmp_path / "generation_config.json").write_text("{}")
    config, _ = read_modules(modules, EngineConfig(str(base), generation_config=str(tmp_path)), ["tiny"])
    assert config.enable_lora
