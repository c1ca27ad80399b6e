"""What pictures take of memory: while their requests wait, in bodies, and beside the KV pool."""

import gc
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.images import sources
from nanovllm.features.images.recent import Recent
from nanovllm.jobs import answer_lines
from nanovllm.serving import async_llm
from nanovllm.serving.http import serve
from nanovllm.serving.http.options import ServeOptions
from tests.image_checkpoints import KINDS, picture
from tests.marks import by_night
from tests.pretend_gpu import pretend_gpu
from tests.servers import PATIENCE_S, serving
from tests.serving.http.test_images import question, url_of

CHAT = "/v1/chat/completions"
OPTIONS = dict(dtype="float32", block_size=4, num_gpu_blocks_override=400, max_model_len=400)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def num_pixels_of_towers() -> int:
    """Tensors in this process that are what some image processor has made for a tower."""
    gc.collect()
    return sum(type(each) is dict and "pixel_values" in each for each in gc.get_objects())


@pytest.mark.parametrize("kind", ["smolvlm", *(by_night(kind) for kind in KINDS if kind != "smolvlm")])
def test_requests_that_wait_hold_pictures_and_no_floats(kind, folder_of):
    """The answers are those of a processor that keeps all it has made."""
    mark = "<image>" if kind in ("idefics3", "smolvlm") else "<|vision_start|><|image_pad|><|vision_end|>"
    prompts = [
        {"prompt": f"the quick {mark} fox", "multi_modal_data": {"image": picture(60, 40, seed)}} for seed in range(6)
    ]
    llm = LLM(str(folder_of(kind)), **OPTIONS)
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]
    del llm
    llm = LLM(str(folder_of(kind)), **OPTIONS, max_num_batched_tokens=16)
    llm.engine.image_processor._prepared.max_bytes = 0  # which keeps the newest
    before = num_pixels_of_towers()
    requests = [llm.engine.make_request(prompt, GREEDY) for prompt in prompts]
    assert num_pixels_of_towers() <= before + 1
    assert [request.num_held_bytes for request in requests] == [60 * 40 * 3] * 6
    assert llm.calls.complete(requests, use_tqdm=False) and num_pixels_of_towers() <= before + 1
    assert [request.output().outputs[0].token_ids for request in requests] == expected
    assert llm.stats()["images"]["tower_runs"] == 6


def test_pictures_of_requests_are_bounded(folder_of, monkeypatch):
    """A request that comes to too many waits nowhere: 429. Once the others are answered, the next one is taken."""
    monkeypatch.setattr(async_llm, "MAX_IMAGE_BYTES", 40 * 40 * 3 * 3 - 1)
    with serving(folder_of("smolvlm"), ServeOptions(), dtype="float32") as server, ThreadPoolExecutor(4) as pool:
        body = {"messages": question(url_of(picture(40, 40))), "max_tokens": 2}
        server.llm.thread.set_pace(0)
        answers = []
        for number in range(1, 4):
            answers.append(pool.submit(server.send, CHAT, json.dumps(body).encode()))
            server.until(lambda number=number: len(server.engine.scheduler.waiting) == number)
        status, raw, headers = server.exchange(CHAT, json.dumps(body).encode())
        assert status == 429 and headers["retry-after"] == "1" and b"images of other requests take 14,400" in raw
        text = {"messages": [{"role": "user", "content": "no picture"}], "max_tokens": 2}
        assert server.send("/tokenize", json.dumps({"messages": text["messages"]}).encode())[0] == 200
        server.llm.thread.set_pace()
        assert [answer.result(PATIENCE_S)[0] for answer in answers] == [200] * 3
        assert server.send(CHAT, json.dumps(body).encode())[0] == 200


def test_bodies_of_requests_are_bounded(folder_of, monkeypatch):
    monkeypatch.setattr(serve, "MAX_BODIES_BYTES", 100_000)
    options = ServeOptions(max_body_bytes=100_000)
    with serving(folder_of("smolvlm"), options, dtype="float32") as server, ThreadPoolExecutor(4) as pool:
        body = {"messages": question(url_of(picture(40, 40))), "max_tokens": 2, "user": "x" * 60_000}
        server.llm.thread.set_pace(0)
        first = pool.submit(server.send, CHAT, json.dumps(body).encode())
        server.until(lambda: server.engine.scheduler.waiting)
        status, raw = server.send(CHAT, json.dumps(body).encode())
        assert status == 429 and b"try again later" in raw
        small = body | {"user": "x"}
        second = pool.submit(server.send, CHAT, json.dumps(small).encode())
        server.until(lambda: len(server.engine.scheduler.waiting) == 2)
        server.llm.thread.set_pace()
        assert (first.result(PATIENCE_S)[0], second.result(PATIENCE_S)[0]) == (200, 200)
        assert server.send(CHAT, json.dumps(body).encode())[0] == 200


def test_bodies_of_work_in_the_background_are_bounded(folder_of, monkeypatch):
    monkeypatch.setattr(serve, "MAX_BODIES_BYTES", 100_000)
    with serving(folder_of("smolvlm"), ServeOptions(max_body_bytes=100_000), dtype="float32") as server:
        parts = [{"type": "input_image", "image_url": url_of(picture(40, 40))}]
        body = {"input": [{"role": "user", "content": parts}], "max_output_tokens": 2, "background": True}
        raw = json.dumps(body | {"user": "x" * 60_000}).encode()
        server.llm.thread.set_pace(0)
        status, answer = server.send("/v1/responses", raw)
        assert status == 200 and json.loads(answer)["status"] in ("queued", "in_progress")
        assert server.send("/v1/responses", raw)[0] == 429
        server.llm.thread.set_pace()
        ends, raw = time.monotonic() + PATIENCE_S, raw.replace(b'"background": true', b'"background": false')
        while server.send("/v1/responses", raw)[0] == 429:  # until the first one's work is done
            assert time.monotonic() < ends
            time.sleep(0.01)


def test_a_batch_job_opens_few_pictures_at_a_time(folder_of, monkeypatch):
    monkeypatch.setattr(answer_lines, "WINDOW_IMAGE_BYTES", 40 * 40 * 3 * 2)
    llm = LLM(str(folder_of("smolvlm")), **OPTIONS | {"max_num_seqs": 2})
    most = 0

    def lines():
        nonlocal most
        for number in range(1, 16):
            body = {"messages": question(url_of(picture(40, 40, number))), "max_tokens": 2}
            line = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
            yield number, json.dumps(line).encode()
            most = max(most, sum(request.num_held_bytes for request in llm.engine.requests.values()))

    answers = [answer for some in answer_lines.answer_lines(llm, lines()) for answer in some]
    assert len(answers) == 15 and all(answer.body for answer in answers)
    assert most <= 40 * 40 * 3 * 6


def test_a_picture_is_opened_once(folder_of, monkeypatch):
    """By a chat here, and by one over HTTP."""
    opened = []
    read = sources.Sources._read
    monkeypatch.setattr(sources.Sources, "_read", lambda self, source: (opened.append(source), read(self, source))[1])
    llm = LLM(str(folder_of("smolvlm")), **OPTIONS)
    llm.chat(question(url_of(picture(40, 40))), GREEDY, use_tqdm=False)
    assert len(opened) == 1
    with serving(folder_of("smolvlm"), ServeOptions(), dtype="float32") as server:
        body = {"messages": question(url_of(picture(40, 40))), "max_tokens": 2}
        assert server.send(CHAT, json.dumps(body).encode())[0] == 200
        assert len(opened) == 2
        assert server.send("/tokenize", json.dumps({"messages": body["messages"]}).encode())[0] == 200
        assert len(opened) == 3


# -- on a GPU, where the KV pool gets what is left ---------------------------------------------------------------------

POOL = dict(dtype="float32", block_size=4, max_model_len=400, max_num_seqs=2, max_num_batched_tokens=100)


@pytest.mark.parametrize("kind", [by_night("smolvlm"), "qwen3_vl"])
def test_the_tower_is_counted_before_the_pool_has_its_size(kind, folder_of):
    """Weights, the largest picture on its way through it, and what is kept of pictures: they fit beside the pool."""
    mark = "<image>" if kind == "smolvlm" else "<|vision_start|><|image_pad|><|vision_end|>"
    with pretend_gpu(total_bytes=1 << 25) as gpu, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recent, "max_bytes", 1 << 20)
        options = POOL | dict(optimizations=(), max_num_seqs=512, gpu_memory_utilization=0.5)
        blind = LLM(str(folder_of(kind)), **options, limit_mm_per_prompt={"image": 0})
        assert "tower" not in blind.engine.model_runner.parts
        num_bytes = blind.engine.kv_pool.num_bytes
        del blind
        gc.collect()
        torch.cuda.empty_cache()
        llm = LLM(str(folder_of(kind)), **options)
        tower = llm.engine.model_runner.parts["tower"]
        assert num_bytes - llm.engine.kv_pool.num_bytes >= tower.num_bytes + (1 << 20)
        assert llm.stats()["images"]["tower_runs"] == 0
        torch.cuda.reset_peak_memory_stats()
        prompts = [
            {"prompt": f"the quick {mark}", "multi_modal_data": {"image": picture(1200, 1200, seed)}}
            for seed in range(4)
        ]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert all(output.finished for output in outputs) and tower.num_runs == 4
        assert torch.cuda.max_memory_allocated() <= gpu.total_bytes // 2


def test_a_tower_that_is_read_while_a_step_goes_over_the_parts(folder_of):
    """A server opens images in threads of their own."""
    llm = LLM(str(folder_of("smolvlm")), **OPTIONS)
    parts = iter(llm.engine.model_runner.parts.values())
    prompt = {"prompt": "<image>", "multi_modal_data": {"image": picture(9, 9)}}
    llm.generate(prompt, GREEDY, use_tqdm=False)
    assert not list(parts) and llm.engine.model_runner.parts


def test_a_tower_of_8_bits_is_refused_on_a_gpu_before_weights_are_read(folder_of, tmp_path):
    folder = shutil.copytree(folder_of("smolvlm"), tmp_path / "model")
    (folder / "model.safetensors").unlink()
    with pretend_gpu(), pytest.raises(ValueError, match="tower_quantization needs the C kernels of a CPU"):
        LLM(str(folder), **POOL, optimizations=(), tower_quantization="int8")


def test_a_gpu_without_a_processor_of_images_answers_texts(folder_of, tmp_path, caplog):
    folder = shutil.copytree(folder_of("smolvlm"), tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    with pretend_gpu(), caplog.at_level("WARNING"):
        llm = LLM(str(folder), **POOL, optimizations=())
        assert "No memory is kept free for images" in caplog.text
        assert llm.generate("the quick", GREEDY, use_tqdm=False)[0].finished
        with pytest.raises(ValueError, match="preprocessor_config"):
            llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(9, 9)}}, GREEDY)


@pytest.mark.nightly
def test_ranks_with_gpus_have_their_towers_before_their_pools(folder_of, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("from tests.pretend_gpu import be_a_rank; be_a_rank()")
    for path in (Path(__file__).parents[3], tmp_path):
        monkeypatch.syspath_prepend(path)
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    prompt = {"prompt": f"the quick {mark}", "multi_modal_data": {"image": picture(60, 40)}}
    options = POOL | dict(optimizations=(), num_gpu_blocks_override=200)
    [expected] = LLM(str(folder_of("qwen3_vl")), **options).generate(prompt, GREEDY, use_tqdm=False)
    with pretend_gpu(num_gpus=2):
        llm = LLM(str(folder_of("qwen3_vl")), **options, tensor_parallel_size=2)
        assert all(usage["tower"] > 0 for usage in llm.engine.model_runner.usage())
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
