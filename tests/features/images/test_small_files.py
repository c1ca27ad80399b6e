"""Small files and long names that would take much: refused before the work, or bounded, and texts do not wait."""

import base64
import json
import random
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from nanovllm import LLM, SamplingParams
from nanovllm.checks.sandbox import Sandbox
from nanovllm.features.images import processor, sources
from nanovllm.features.images.sources import MAX_BYTES, ClientImages, Sources
from nanovllm.serving.http.options import ServeOptions
from tests.faults import plant
from tests.features.images.test_hostile import ORIENTED, png
from tests.features.images.test_sources import as_url, encoded
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night
from tests.servers import PATIENCE_S, Running, serving
from tests.serving.http.test_images import question, url_of

CHAT = "/v1/chat/completions"
TEXT = {"messages": [{"role": "user", "content": "two gulls"}], "max_tokens": 2}
SIDE = 5000  # of pictures that are large


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_image_checkpoint(tmp_path_factory.mktemp("model"), "smolvlm")


@pytest.fixture
def server(folder):
    with serving(folder, ServeOptions(), dtype="float32", max_model_len=400) as running:
        yield running


def send(server: Running, url: str, path: str = CHAT) -> tuple[int, dict]:
    status, raw = server.send(path, json.dumps({"messages": question(url), "max_tokens": 2}).encode())
    return status, json.loads(raw)


def large(kind: str, mode: str, **options: object) -> bytes:
    return encoded(Image.new(mode, (SIDE, SIDE)), kind, **options)


PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def interlaced() -> bytes:
    """With all pixels transparent."""
    head = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 6, 0, 0, 1)
    rows = b""
    for x, y, dx, dy in PASSES:
        width, height = -(-(SIDE - x) // dx), -(-(SIDE - y) // dy)
        rows += bytes((1 + 4 * width) * height)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    sealed = (struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


LARGE = {
    "PNG": lambda: large("PNG", "RGBA"),
    "PNG with a transparent colour": lambda: large("PNG", "RGB", transparency=(1, 2, 3)),
    "PNG in two colours": lambda: png(SIDE, SIDE, 1, 0, bytes((SIDE // 8 + 1) * SIDE)),
    "interlaced PNG": interlaced,
    "GIF": lambda: large("GIF", "P", transparency=0),
    "WEBP": lambda: large("WEBP", "RGBA", lossless=True),
    "lossy WEBP": lambda: large("WEBP", "RGB"),
    "JPEG": lambda: large("JPEG", "RGB"),
    "progressive JPEG": lambda: large("JPEG", "RGB", progressive=True),
    "JPEG in four colours": lambda: large("JPEG", "CMYK"),
    "turned": lambda: large("JPEG", "RGB", exif=ORIENTED),
}
BY_DAY = "GIF", "JPEG in four colours", "turned"  # made white, converted, turned: each copies a picture in its own way
# Prints by how many bytes a pixel memory has grown at its peak.
PEAK = """
import io, resource, sys
from nanovllm.features.images.sandboxed_images import decoded
from PIL import Image
data = sys.stdin.buffer.read()
kib = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
decoded(open(sys.argv[1], "rb").read(), 64_000_000)
before = kib()
size = decoded(data, 64_000_000).size
print((kib() - before) * 1024 / size[0] / size[1])
"""


@pytest.mark.parametrize("name", [name if name in BY_DAY else by_night(name) for name in LARGE])
@pytest.mark.skipif(sys.platform != "linux", reason="reads ru_maxrss in KiB")
def test_memory_of_a_large_picture(name, tmp_path):
    small = tmp_path / "small"
    small.write_bytes(encoded(picture(20, 20), "WEBP"))
    command = [sys.executable, "-c", PEAK, str(small)]
    found = subprocess.run(command, input=LARGE[name](), capture_output=True, check=True).stdout
    assert float(found) < (17 if "WEBP" in name else 12.5)


def test_pictures_of_strangers_are_decoded_in_another_process(folder, monkeypatch):
    """Whatever they bring, chats, responses and /tokenize, HTTP and batch jobs; the person's own in this one."""
    asked = []
    ask = Sandbox.ask
    monkeypatch.setattr(Sandbox, "ask", lambda self, *question: (asked.append(self), ask(self, *question))[1])
    LLM(str(folder), dtype="float32", max_model_len=400).chat(question(url_of(picture(40, 40))), use_tqdm=False)
    assert sources.DECODING not in asked
    with serving(folder, ServeOptions(), dtype="float32", max_model_len=400) as server:
        for number, path in enumerate((CHAT, "/tokenize"), start=1):
            assert send(server, url_of(picture(40, 40)), path)[0] == 200
            assert asked.count(sources.DECODING) == number
        part = {"type": "input_image", "image_url": url_of(picture(40, 40))}
        body = {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 16}
        assert server.send("/v1/responses", json.dumps(body).encode())[0] == 200
        assert asked.count(sources.DECODING) == 3


@pytest.mark.parametrize("limits", [dict(seconds=0.05, max_mb=768), dict(seconds=5, max_mb=50)], ids=str)
def test_a_picture_that_takes_too_much(limits, server, monkeypatch):
    """It is an error of its request. The next picture is decoded."""
    monkeypatch.setattr(processor, "DECODING_LARGE", Sandbox(sources.DECODER, **limits))
    hard = "data:image/png;base64," + base64.b64encode(LARGE["PNG"]()).decode()
    for _ in range(2):
        status, answer = send(server, hard)
        assert status == 400 and "the data: URL takes more than" in answer["error"]["message"]
        assert send(server, url_of(picture(40, 40)))[0] == 200


@pytest.mark.parametrize("are_large", [True, False])
def test_texts_do_not_wait_for_pictures(are_large, server, monkeypatch):
    """While more pictures are being decoded than there are threads for, chats and counts of tokens are answered.

    Nor do pictures of an ordinary size wait for large ones.
    """
    assert send(server, url_of(picture(40, 40)))[0] == 200
    goes_on, entered = threading.Event(), []
    kinds = {
        "small": (sources.DECODING, picture(40, 40)),
        "large": (sources.DECODING_LARGE, Image.new("RGB", (3000, 3000))),
    }
    if are_large:
        del kinds["small"]
    for sandbox, _ in kinds.values():
        ask = sandbox.ask

        def slow(*question: object, ask: Callable[..., object] = ask) -> object:
            entered.append(question)
            assert goes_on.wait(PATIENCE_S)
            return ask(*question)

        monkeypatch.setattr(sandbox, "ask", slow)
    with ThreadPoolExecutor(16) as pool:
        urls = [url_of(image) for _, image in kinds.values()]
        pictures = [pool.submit(send, server, url, CHAT) for url in urls * 5]
        counts = [pool.submit(send, server, url, "/tokenize") for url in urls * 2]
        server.until(lambda: len(entered) == (1 if are_large else 3))
        time.sleep(0.1)
        if are_large:
            assert [send(server, url_of(picture(40, 40)), path)[0] for path in (CHAT, "/tokenize")] == [200, 200]
        for path in (CHAT, "/v1/completions", "/tokenize", "/v1/responses"):
            body = {"prompt": "two gulls"} if path == "/v1/completions" else TEXT
            body = {"input": "two gulls"} if path == "/v1/responses" else body
            assert server.send(path, json.dumps(body).encode())[0] == 200
        assert not any(each.done() for each in (*pictures, *counts))
        goes_on.set()
        assert {each.result(PATIENCE_S)[0] for each in (*pictures, *counts)} == {200}


NOISE = Image.frombytes("RGB", (700, 701), random.Random(0).randbytes(700 * 701 * 3))  # its files are long


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in ("PNG", "GIF")),
        ("JPEG", {"quality": 100}),
        *(("WEBP", options) for options in ({"quality": 100}, {"lossless": True}, {"exif": ORIENTED})),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),  # an Exif's str() differs in each process
)
def test_a_pictures_size_is_found_at_its_beginning(kind, options, monkeypatch):
    """However its base64 is written."""
    data = encoded(NOISE, kind, **options)
    url = as_url(data)
    assert len(data) > sources.MAX_HEADER_BYTES or "exif" in options
    for limit in (700 * 701 - 1, 700 * 701):
        monkeypatch.setattr(sources, "LARGE_PIXELS", limit)
        lines = "\n".join(url[i : i + 77] for i in range(0, len(url), 77))
        for written in (url, lines, " " + url.replace("+", "%2B").replace("/", "_")):
            assert ClientImages([written]).are_large == (limit < 700 * 701)


def test_a_picture_with_a_long_header_counts_as_large(server):
    """Pillow takes a second of the server's process for each MB of some. It is decoded as others are."""

    def padded(num_bytes: int, filling: bytes = b"\xff") -> str:
        photo = encoded(picture(40, 40), "JPEG")
        return as_url(photo[:2] + filling * (num_bytes // len(filling)) + photo[2:])

    for filling in (b"\xff", b"\xff\xe0\0\2"):
        assert ClientImages([padded(300_000, filling)]).are_large
    assert not ClientImages([padded(100_000)]).are_large
    assert ClientImages([padded(100_000)] * 3).are_large
    assert send(server, padded(300_000))[0] == 200


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen3_5"])
def test_a_picture_for_which_a_prompt_has_no_room(kind, tmp_path, monkeypatch):
    """It is not processed: its placeholders are known from its size. Where they fit, they are as many."""
    folder = make_image_checkpoint(tmp_path, kind)
    llm = LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=100, max_model_len=40)
    processor = llm.engine.image_processor
    sizes = [(8, 8), (17, 90), (90, 17), (100, 100), (333, 40), (1, 150), (500, 700)]
    for size in sizes:
        for options in ({}, {"size": {"shortest_edge": 256, "longest_edge": 2000}}):
            made = processor.prepare(picture(*size), options)
            assert processor._least_placeholders(picture(*size), options) == made.num_placeholders
    plant(monkeypatch, type(processor), "_process", lambda number: True, AssertionError("it is processed"))
    prompt = {"prompt": "<|vision_start|><|image_pad|><|vision_end|>", "multi_modal_data": {"image": picture(500, 701)}}
    with pytest.raises(ValueError, match=r"the prompt has \d+ tokens with its images, and at most 39 fit"):
        llm.generate(prompt, use_tqdm=False)


def test_mistakes_beside_a_picture_are_found_first(folder, monkeypatch):
    llm = LLM(str(folder), dtype="float32", max_model_len=400)
    plant(monkeypatch, Sources, "open", lambda number: True, AssertionError("it is opened"))
    for text, params, more in (
        ("<image>", SamplingParams(stop_token_ids=[5000]), {}),
        ("<image>", SamplingParams(), {"priority": 3}),
        ("<image>", SamplingParams(), {"lora_request": "x"}),
        ("<image> <image>", SamplingParams(), {}),
        ("<image>" + " two" * 500, SamplingParams(), {}),
    ):
        prompt = {"prompt": text, "multi_modal_data": {"image": picture(9, 9)}}
        with pytest.raises(ValueError):
            llm.generate(prompt, params, use_tqdm=False, **more)


# -- what is refused before the work -----------------------------------------------------------------------------------

NAMES = {  # made when they are needed: they are 285 MB together
    "escapes in a file: URL": lambda: "file:///" + "%41" * 8_000_000,
    "a long path": lambda: "/" + "a/" * 10_000_000,
    "a long address": lambda: "http://localhost/" + "%41" * 8_000_000,
    "an unknown scheme": lambda: "ftp://a/" + "x" * 20_000_000,
    "base64 without its beginning": lambda: "A" * 20_000_000,
    "a data: URL without a comma": lambda: "data:image/png;base64" + "A" * 20_000_000,
    "no base64": lambda: "data:image/png;base64," + "aé" * 10_000_000,
    "base64 in words": lambda: "data:image/png;base64," + "QUFB ab " * 5_000_000,
    "escapes in base64": lambda: "data:image/png;base64," + "%2B" * 10_000_000,
    "a file that is too large": lambda: "data:image/png;base64," + "A" * (2 * MAX_BYTES),
}


@pytest.mark.parametrize("name", NAMES)
def test_long_names(name):
    """A few copies are made of them, and no object for each word or letter."""
    long = NAMES[name]()
    started = time.thread_time()
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as error:
            Sources(domains=("localhost",)).open(long)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(error.value)) < 400
    assert peak < 6 * len(long)
    assert time.thread_time() - started < 5
