"""Pictures over HTTP: chats and responses, asked by OpenAI's own client."""

import base64
import io
import json
import re

import openai
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serving.http.live_frames import Drawing
from nanovllm.serving.http.options import ServeOptions
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night
from tests.servers import serving

A, B = picture(40, 40), picture(40, 40, 1)
SHORT = dict(model="tiny", temperature=0, max_tokens=6, extra_body={"ignore_eos": True})


def url_of(image) -> str:
    data = io.BytesIO()
    image.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def question(url: str, text: str = "what is the quick fox") -> list[dict]:
    part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return [{"role": "user", "content": [{"type": "text", "text": "look: "}, part, {"type": "text", "text": text}]}]


@pytest.fixture(scope="module", params=["smolvlm", by_night("qwen3_5")])
def folder(request, tmp_path_factory):
    return make_image_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder, ServeOptions(), dtype="float32", cpu_cache_bytes=1 << 22) as running:
        yield running


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=160, max_model_len=256)


def test_a_chat(server, llm):
    client, params = server.client(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for image in (A, B, A):
        whole = client.chat.completions.create(messages=question(url_of(image)), **SHORT)
        local = question("")
        local[0]["content"][1] = {"type": "image_pil", "image_pil": image}
        [expected] = llm.chat(local, params, use_tqdm=False)
        assert whole.choices[0].message.content == expected.outputs[0].text
        assert whole.usage.prompt_tokens == len(expected.prompt_token_ids)
        parts = client.chat.completions.create(messages=question(url_of(image)), stream=True, **SHORT)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == expected.outputs[0].text


def test_responses(server):
    client = server.client()
    parts = [{"type": "input_text", "text": "look: "}, {"type": "input_image", "image_url": url_of(A)}]
    options = dict(model="tiny", temperature=0, max_output_tokens=6, extra_body={"ignore_eos": True})
    first = client.responses.create(input=[{"role": "user", "content": parts}], **options)
    again = client.responses.create(input=[{"role": "user", "content": parts}], **options)
    assert first.output_text == again.output_text
    assert again.usage.input_tokens_details.cached_tokens > 0
    more = client.responses.create(input="and now?", previous_response_id=first.id, **options)
    assert more.usage.input_tokens > first.usage.input_tokens
    with pytest.raises(openai.BadRequestError, match="image_url"):
        parts = [{"type": "input_image", "file_id": "file-1"}]
        client.responses.create(input=[{"role": "user", "content": parts}], **options)


def test_a_picture_beside_instructions(server):
    """A user's picture is seen, whatever stands before it; one in another message is that client's mistake."""
    client, options = server.client(), dict(model="tiny", temperature=0, max_output_tokens=6)
    parts = [{"type": "input_text", "text": "look: "}, {"type": "input_image", "image_url": url_of(A)}]
    asked = dict(instructions="be brief", **options)
    for before in ([], [{"role": "developer", "content": "in French"}]):
        seen = client.responses.create(input=[*before, {"role": "user", "content": parts}], **asked)
        blind = client.responses.create(input=[*before, {"role": "user", "content": parts[:1]}], **asked)
        assert seen.usage.input_tokens > blind.usage.input_tokens + 4
        for role in ("system", "developer"):
            given = [*before, {"role": role, "content": parts}, {"role": "user", "content": "hi"}]
            with pytest.raises(openai.BadRequestError, match=f"images belong in messages of role user.*{role}"):
                client.responses.create(input=given, **asked)


def test_one_pixel_shares_nothing_after_it(server):
    client, other = server.client(), A.copy()
    other.putpixel((39, 39), (1, 2, 3))
    client.chat.completions.create(messages=question(url_of(A)), **SHORT)
    again = client.chat.completions.create(messages=question(url_of(A)), **SHORT)
    changed = client.chat.completions.create(messages=question(url_of(other)), **SHORT)
    assert changed.usage.prompt_tokens == again.usage.prompt_tokens
    body = json.dumps({"messages": question(url_of(other))}).encode()
    status, raw = server.send("/tokenize", body)
    tokens = json.loads(raw)["tokens"]
    assert status == 200 and len(tokens) == again.usage.prompt_tokens
    first = tokens.index(server.engine.model_config.images.image_token_id)
    found = changed.usage.prompt_tokens_details.cached_tokens
    assert found <= first < again.usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "url, said",
    [
        ("data:image/png;base64,AAAA", "no image of a known kind"),
        ("http://127.0.0.1/a.png", "not fetched from the network"),
        ("file:///etc/passwd", "not read for a client"),
        ("/etc/passwd", "not read for a client"),
    ],
)
def test_what_a_client_may_not_name(url, said, server):
    with pytest.raises(openai.BadRequestError, match=said):
        server.client().chat.completions.create(messages=question(url), **SHORT)
    answer = server.client().chat.completions.create(messages=question(url_of(A)), **SHORT)
    assert answer.choices[0].finish_reason == "length"


def test_a_users_words_are_no_images(server, llm):
    """Who writes the image token as text sends a text; so does a model that answers with it."""
    image_token_id = server.engine.model_config.images.image_token_id
    token, client = llm.get_tokenizer().convert_ids_to_tokens(image_token_id), server.client()
    num_placeholders = llm.engine.image_processor.prepare(A, {}).num_placeholders
    messages = question(url_of(A), f"what is {token}")
    messages += [{"role": "assistant", "content": f"{token} is a mark"}, {"role": "user", "content": f"{token}?"}]
    found = client.chat.completions.create(messages=messages, **SHORT)
    [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert found.choices[0].message.content == expected.outputs[0].text
    status, raw = server.send("/tokenize", json.dumps({"messages": messages}).encode())
    tokens = json.loads(raw)["tokens"]
    assert status == 200 and tokens == expected.prompt_token_ids
    assert found.usage.prompt_tokens == len(tokens) and tokens.count(image_token_id) == num_placeholders


def test_images_belong_to_users(server):
    messages = question(url_of(A))
    with pytest.raises(openai.BadRequestError, match="messages of role user"):
        server.client().chat.completions.create(messages=[messages[0] | {"role": "system"}, *messages], **SHORT)


def test_what_a_client_may_ask_of_the_processor(server):
    """Smaller pictures, and nothing that asks for more work."""
    client, most = server.client(), server.llm.engine.image_processor._processor.size
    name = "longest_edge"
    smaller = {"size": {name: most[name] // 2}}
    messages = question(url_of(A))
    for good in (smaller, {"size": {name: most[name]}}):
        options = SHORT | {"extra_body": {"ignore_eos": True, "mm_processor_kwargs": good}}
        assert client.chat.completions.create(messages=messages, **options).usage.completion_tokens == 6
    for bad in (
        {"size": {name: 10**9}},
        {"device": "cuda"},
        {"do_resize": False},
        {"size": {"depth": 3}},
        smaller | {"x": 1},
        5,
    ):
        options = SHORT | {"extra_body": {"mm_processor_kwargs": bad}}
        with pytest.raises(openai.BadRequestError, match="mm_processor_kwargs"):
            client.chat.completions.create(messages=messages, **options)


def test_the_page_marks_blocks_of_images(llm, monkeypatch):
    """A running request's, and those that stay cached: each names the images that it overlaps."""
    engine, drawing = llm.engine, Drawing(llm.engine)
    cells: dict[int, str] = {}
    told = []  # step by step: a table, its images, what the page shows

    def look() -> None:
        frame, _ = drawing.draw()
        cells.update(frame.cells)

    def on_step(output, requests) -> None:
        look()
        told.extend((list(seq.block_table), seq.mm_spans, named()) for seq in engine.scheduler.running)

    def named() -> dict[int, list[str]]:
        titles = {i: re.search(r'class="block [^"]* image" [^>]*title="([^"]*)"', html) for i, html in cells.items()}
        return {i: re.findall("image ([0-9a-f]{8})", found[1]) for i, found in titles.items() if found}

    llm.reset_prefix_cache()
    drawing.open()
    monkeypatch.setattr(engine, "on_step", on_step)
    content = [{"type": "image_pil", "image_pil": image} for image in (A, B)]
    llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    table, spans, shown = told[0]
    expected: dict[int, list[str]] = {}
    for start, length, content_hash in spans:
        for index in range(start // 4, (start + length - 1) // 4 + 1):
            expected.setdefault(table[index], []).append(content_hash[:8])
    assert len(spans) == 2 and shown == expected
    look()
    whole = {block_id for block_id in expected if engine.block_manager.blocks[block_id].block_hash}
    assert named() == {block_id: expected[block_id] for block_id in whole} and "cached" in cells[table[1]]
    llm.reset_prefix_cache()
    look()
    drawing.close()
    assert not named()
