"""Which of a checkpoint's files has the chat template: the last word is transformers' own processor or tokenizer."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoTokenizer
from transformers.processing_utils import ProcessorMixin
from transformers.utils.chat_template_utils import render_jinja_template

from nanovllm import LLM
from nanovllm.tools.cli import main
from tests.checkpoints import CHAT_TEMPLATE, SMALL, edit
from tests.errors import expect
from tests.image_checkpoints import make_image_checkpoint
from tests.marks import by_night

USER = [{"role": "user", "content": "two gulls"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def write(folder, *places):
    """The checkpoint with templates in these places only: each begins with a word of its own."""
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for place in places:
        path, _, names = place.partition(": ")
        given = [{"name": name, "template": f"{path} {name} {CHAT_TEMPLATE}"} for name in names.split()]
        text = f"{path} {CHAT_TEMPLATE}"
        (folder / path).parent.mkdir(exist_ok=True)
        if path.endswith(".jinja"):
            (folder / path).write_text(text)
        else:
            (folder / path).touch()
            (folder / path).write_text((folder / path).read_text() or "{}")
            edit(folder / path, chat_template=given or text)
    return folder


# Where templates are -> the file whose is used, without a name.
OF_PROCESSORS = {
    ("chat_template.json",): "chat_template.json",
    ("tokenizer_config.json", "chat_template.json"): "chat_template.json",
    ("tokenizer_config.json", "processor_config.json"): "processor_config.json",
    ("chat_template.json", "processor_config.json"): "processor_config.json",
    ("chat_template.jinja", "processor_config.json"): "processor_config.json",
    ("chat_template.jinja", "chat_template.json"): "chat_template.json",
    ("tokenizer_config.json", "chat_template.jinja", "additional_chat_templates/rag.jinja"): "chat_template.jinja",
}
OF_TOKENIZERS = {
    ("tokenizer_config.json",): "tokenizer_config.json",
    ("tokenizer_config.json", "chat_template.json"): "tokenizer_config.json",
    ("tokenizer_config.json", "processor_config.json"): "tokenizer_config.json",
    ("tokenizer_config.json", "chat_template.jinja"): "chat_template.jinja",
    ("tokenizer_config.json: default rag",): "tokenizer_config.json",
}


def checked(capsys, folder) -> str:
    """What check-model says of the file."""
    assert main(["check-model", str(folder)]) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("chat template"))


@pytest.fixture(scope="module")
def with_images(tmp_path_factory) -> Callable[[str], Path]:
    """with_images(kind) -> a checkpoint, made once: to be copied."""
    return cache(lambda kind: make_image_checkpoint(tmp_path_factory.mktemp(kind), kind))


ONCE = next(iter(OF_PROCESSORS))  # by day, of the second kind


@pytest.mark.parametrize(
    ("kind", "places"),
    [
        *(("smolvlm", places) for places in OF_PROCESSORS),
        *(("qwen3_5", places) if places == ONCE else by_night("qwen3_5", places) for places in OF_PROCESSORS),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_of_a_model_that_sees_images(tmp_path, with_images, capsys, kind, places):
    folder = write(shutil.copytree(with_images(kind), tmp_path / "model"), *places)
    theirs = ProcessorMixin.get_processor_dict(folder)[0]["chat_template"]
    template = theirs["default"] if isinstance(theirs, dict) else theirs
    [right], _ = render_jinja_template([USER], chat_template=template, add_generation_prompt=True)
    assert right.startswith(OF_PROCESSORS[places])
    assert LLM(str(folder), **SMALL).chat_prompt(USER)["prompt"] == right
    assert OF_PROCESSORS[places] in checked(capsys, folder)


@pytest.mark.parametrize("places", OF_TOKENIZERS, ids=" ".join)
def test_of_a_model_of_text(copy_of, capsys, places):
    folder = write(copy_of("llama"), *places)
    right = AutoTokenizer.from_pretrained(folder).apply_chat_template(USER, tokenize=False, add_generation_prompt=True)
    assert right.startswith(OF_TOKENIZERS[places])
    assert LLM(str(folder), **SMALL).chat_prompt(USER)["prompt"] == right
    assert OF_TOKENIZERS[places] in checked(capsys, folder)


NAMED = {
    "a list": ("tokenizer_config.json: default rag tool_use",),
    "a folder": ("chat_template.jinja", *(f"additional_chat_templates/{name}.jinja" for name in ("rag", "tool_use"))),
    "no default": ("tokenizer_config.json: rag tool_use",),
}


@pytest.mark.parametrize("kind", ["text", "images"])
@pytest.mark.parametrize("where", NAMED)
def test_templates_that_have_names(copy_of, with_images, tmp_path, where, kind):
    folder = copy_of("llama") if kind == "text" else shutil.copytree(with_images("smolvlm"), tmp_path / "images")
    write(folder, *NAMED[where])
    ours, theirs = LLM(str(folder), **SMALL), AutoTokenizer.from_pretrained(folder)
    for options in ({}, {"tools": [TOOL]}, {"chat_template": "rag"}, {"chat_template": "rag", "tools": [TOOL]}):
        if where == "no default" and not options:
            expect("multiple chat templates with no default", ours.chat_prompt, USER)
            continue
        right = theirs.apply_chat_template(USER, tokenize=False, add_generation_prompt=True, **options)
        found = ours.chat_prompt(USER, **options)["prompt"]
        word = right.split("<|im_start|>")[0]
        assert found.startswith(word), "the template is the one that transformers chooses"
        assert found == right or "tools" in options, "ours describes tools to a template that leaves them out"


def test_a_list_of_templates_in_the_processors_file(tmp_path, with_images):
    """transformers reads the list and fails at it; it means what it means in a tokenizer's."""
    folder = write(shutil.copytree(with_images("smolvlm"), tmp_path / "model"), "processor_config.json: default rag")
    llm = LLM(str(folder), **SMALL)
    assert llm.chat_prompt(USER)["prompt"].startswith("processor_config.json default")
    assert llm.chat_prompt(USER, chat_template="rag")["prompt"].startswith("processor_config.json rag")


def test_files_that_transformers_refuses(tmp_path, with_images):
    folder = shutil.copytree(with_images("smolvlm"), tmp_path / "model")
    both = "chat_template.json", "additional_chat_templates/rag.jinja"
    expect("combines a legacy chat_template.json", LLM, str(write(shutil.copytree(folder, tmp_path / "both"), *both)))
    for content in ("{}", "{", json.dumps({"chat_template": [{"name": "x"}]})):
        (folder / "chat_template.json").write_text(content)
        expect(f"the chat template in {folder} cannot be read", LLM, str(folder), **SMALL)
