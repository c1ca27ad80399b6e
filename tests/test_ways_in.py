"""Every way in carries the whole prompt: each part of it reaches the sequences, or is refused by name."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.jobs.answer_lines import answer_lines
from nanovllm.sampling_params import BeamSearchParams
from nanovllm.serving.http.options import ServeOptions
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.servers import Running, serving
from tests.serving.http.test_images import url_of

OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=300, max_model_len=300, max_lora_rank=8)
OPTIONS |= dict(scheduling_policy="priority", enable_lora=True)
SHORT = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
A, NO_SPLIT = picture(60, 40), {"do_image_splitting": False}
TEXT, CHAT, RESPONSES = "two <image> gulls", "/v1/chat/completions", "/v1/responses"
PARTS = ("pictures", "processor options", "adapter", "salt", "priority")
OF_IMAGES = PARTS[:2]  # some ways in refuse these, and must name one of them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_image_checkpoint(tmp_path_factory.mktemp("model"), "smolvlm")


@pytest.fixture(scope="module")
def adapter(folder, tmp_path_factory) -> LoRARequest:
    import peft  # takes a second

    path = tmp_path_factory.mktemp("adapter")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=r".*text_model.*q_proj")).save_pretrained(path)
    return LoRARequest("mine", 1, str(path))


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(str(folder), **OPTIONS)


@pytest.fixture(scope="module")
def embedder(folder) -> LLM:
    return LLM(str(folder), runner="pooling", **OPTIONS)


@pytest.fixture(scope="module")
def server(folder, adapter) -> Iterator[Running]:
    with serving(folder, ServeOptions(), **OPTIONS) as running:
        running.engine.add_lora(adapter)
        yield running


@pytest.fixture(scope="module")
def embedding_server(folder, adapter) -> Iterator[Running]:
    with serving(folder, ServeOptions(), runner="pooling", **OPTIONS) as running:
        running.engine.add_lora(adapter)
        yield running


@contextmanager
def queued(engine: Any) -> Iterator[list[Sequence]]:
    """The sequences that are queued meanwhile."""
    found: list[Sequence] = []
    enqueue = engine.enqueue

    def noting(requests: list[Any]) -> list[str]:
        found.extend(sample.seq for request in requests for sample in request.samples)
        return enqueue(requests)

    engine.enqueue = noting
    try:
        yield found
    finally:
        del engine.enqueue


def prompt_with(part: str) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt": "two gulls"}
    if part in OF_IMAGES:
        prompt = {"prompt": TEXT, "multi_modal_data": {"image": A}}
    if part == "processor options":
        prompt["mm_processor_kwargs"] = NO_SPLIT
    if part == "salt":
        prompt["cache_salt"] = "a salt"
    return prompt


def call_with(part: str, adapter: LoRARequest) -> dict[str, Any]:
    return {"adapter": {"lora_request": adapter}, "priority": {"priority": 5}}.get(part, {})


def messages_with(part: str, image: Any) -> list[dict[str, Any]]:
    content: Any = [{"type": "text", "text": "two gulls"}]
    if part in OF_IMAGES:
        content.append({"type": "image_url", "image_url": {"url": image}})
    return [{"role": "user", "content": content}]


def fields_with(part: str) -> dict[str, Any]:
    """Of a body."""
    said = {"adapter": {"model": "mine"}, "priority": {"priority": 5}, "salt": {"cache_salt": "a salt"}}
    return said.get(part, {}) | ({"mm_processor_kwargs": NO_SPLIT} if part == "processor options" else {})


def chat(llm: LLM, part: str, adapter: LoRARequest) -> None:
    more = call_with(part, adapter) | {k: v for k, v in prompt_with(part).items() if k.startswith(("cache", "mm_"))}
    llm.chat(messages_with(part, url_of(A)), SHORT, use_tqdm=False, **more)


def enqueue(llm: LLM, part: str, adapter: LoRARequest) -> None:
    llm.enqueue([prompt_with(part)], SHORT, **call_with(part, adapter))
    llm.wait_for_completion(use_tqdm=False)


def beam_search(llm: LLM, part: str, adapter: LoRARequest) -> None:
    llm.beam_search([prompt_with(part)], BeamSearchParams(2, 3, ignore_eos=True), **call_with(part, adapter))


def of_prompt(method: str) -> Callable[[LLM, str, LoRARequest], None]:
    """A method that takes prompts, and arguments beside them."""

    def call(llm: LLM, part: str, adapter: LoRARequest) -> None:
        more: dict[str, Any] = {"pooling_task": "embed"} if method == "encode" else {}
        more |= {"sampling_params": SHORT} if method in ("generate", "stream") else {}
        more |= {} if method == "stream" else {"use_tqdm": False}
        list(getattr(llm, method)(prompt_with(part), **more, **call_with(part, adapter)))

    return call


GENERATING = {"generate": of_prompt("generate"), "stream": of_prompt("stream"), "chat": chat, "enqueue": enqueue}
GENERATING |= {"beam_search": beam_search}
POOLING = {"embed": of_prompt("embed"), "encode": of_prompt("encode")}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 2},
    RESPONSES: {"max_output_tokens": 16},
    "/v1/completions": {"prompt": "two gulls", "max_tokens": 2},
}
BODIES_OF_POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "two gulls"},
    "/pooling": {"input": ["two gulls"]},
    "/rerank": {"query": "two gulls", "documents": ["a boat"]},
    "/score": {"text_1": "two gulls", "text_2": "a boat"},
}


def body_of(url: str, part: str) -> dict[str, Any]:
    body = (BODIES | BODIES_OF_POOLING)[url] | fields_with(part)
    if url == CHAT:
        return body | {"messages": messages_with(part, url_of(A))}
    if url == RESPONSES:
        content: Any = [{"type": "input_text", "text": "two gulls"}]
        content += [{"type": "input_image", "image_url": url_of(A)}] if part in OF_IMAGES else []
        return body | {"input": [{"role": "user", "content": content}]}
    return body | ({"multi_modal_data": {"image": url_of(A)}} if part == "pictures" else {})


def check_refusal(part: str, message: str) -> None:
    assert part in OF_IMAGES, message
    assert "multi_modal_data" in message or "mm_processor_kwargs" in message


def check(part: str, sequences: list[Sequence], expected: Sequence) -> None:
    assert sequences, "nothing was queued, and nothing was refused"
    for seq in sequences:
        if part in OF_IMAGES:
            [image], [wanted] = seq.parts["images"].images, expected.parts["images"].images
            assert image.content_hash == wanted.content_hash
            assert [span.content_hash for span in seq.mm_spans] == [wanted.content_hash]
        elif part == "adapter":
            assert seq.parts["adapter"].request.lora_name == "mine" and seq.lora_id == expected.lora_id
        elif part == "salt":
            assert seq.cache_salt == "a salt"
        else:
            assert seq.priority == 5


def expected_of(llm: LLM, part: str, adapter: LoRARequest) -> Sequence:
    more = call_with(part, adapter)
    request = llm.engine.make_request(prompt_with(part), SHORT, more.get("lora_request"), more.get("priority"))
    return request.samples[0].seq


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("method", [*GENERATING, *POOLING])
def test_methods(method, part, llm, embedder, adapter):
    asked, call = (llm, GENERATING[method]) if method in GENERATING else (embedder, POOLING[method])
    with queued(asked.engine) as sequences:
        try:
            call(asked, part, adapter)
        except ValueError as error:
            assert method in POOLING, f"{method} refuses {part}: {error}"
            check_refusal(part, str(error))
            assert not sequences
            return
    check(part, sequences, expected_of(llm, part, adapter))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("url", [*BODIES, *BODIES_OF_POOLING])
def test_bodies(url, part, server, embedding_server, llm, adapter):
    asked = server if url in BODIES else embedding_server
    with queued(asked.engine) as sequences:
        status, raw = asked.send(url, json.dumps(body_of(url, part)).encode())
    if status != 200:
        assert status == 400 and url not in (CHAT, RESPONSES), raw
        return check_refusal(part, json.loads(raw)["error"]["message"])
    check(part, sequences, expected_of(llm, part, adapter))


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("url", [CHAT, "/v1/completions", *BODIES_OF_POOLING])
def test_lines_of_a_job(url, part, llm, embedder, adapter):
    asked = llm if url in BODIES else embedder
    asked.engine.add_lora(adapter)
    line = {"custom_id": "1", "method": "POST", "url": url, "body": body_of(url, part)}
    with queued(asked.engine) as sequences:
        names = ("tiny",) if part == "adapter" else ()
        [answer] = [a for some in answer_lines(asked, [(1, json.dumps(line).encode())], names) for a in some]
    if answer.body is None:
        assert url != CHAT, answer.error
        return check_refusal(part, answer.error)
    check(part, sequences, expected_of(llm, part, adapter))


@pytest.mark.parametrize("part", ["adapter", "priority"])
def test_score(part, embedder, llm, adapter):
    """Its texts have nothing beside them."""
    with queued(embedder.engine) as sequences:
        embedder.score("two gulls", ["a boat"], use_tqdm=False, **call_with(part, adapter))
    assert len(sequences) == 2
    check(part, sequences, expected_of(llm, part, adapter))


@pytest.mark.parametrize("part", PARTS)
def test_async_llm(part, server, embedding_server, llm, adapter):
    async def ask(running: Running, method: str, **more: Any) -> list[Any]:
        found = getattr(running.llm, method)(prompt_with(part), **more, **call_with(part, adapter))
        return [output async for output in found]

    for running, method, more in ((server, "generate", {"sampling_params": SHORT}), (embedding_server, "encode", {})):
        with queued(running.engine) as sequences:
            coroutine = ask(running, method, **more)
            try:
                asyncio.run_coroutine_threadsafe(coroutine, running.llm.thread.loop).result(60)
            except ValueError as error:
                assert method == "encode", error
                check_refusal(part, str(error))
                continue
        check(part, sequences, expected_of(llm, part, adapter))
