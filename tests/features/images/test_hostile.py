"""What a client may send that is no picture, and pictures that are odd: an answer or an error that says why, always."""

import base64
import json
import struct
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file

from nanovllm.features.images.tower import Tower
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import make_checkpoint
from tests.features.images.test_sources import encoded, png_of_size
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.servers import Running, serving
from tests.serving.http.test_images import question, url_of

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
A = picture(40, 40)
ORIENTED = Image.Exif()
ORIENTED[0x0112] = 6


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *more: tuple[bytes, bytes]) -> bytes:
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = [(b"IHDR", head), *more, (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    sealed = (struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


BOMB_OF_TEXT = (b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000), 1))
SEVERAL = dict(save_all=True, append_images=[picture(40, 40, 1), picture(40, 40, 2)])
PICTURES = {
    "CMYK": encoded(A.convert("CMYK"), "JPEG"),
    "a palette with one transparent colour": encoded(A.convert("P"), "PNG", transparency=0),
    "a palette with degrees of transparency": encoded(A.convert("P"), "PNG", transparency=bytes(range(256))),
    "16 bits of each colour": png(8, 8, 16, 2, b"".join(b"\0" + bytes(range(48)) for _ in range(8))),
    "one bit": encoded(A.convert("1")),
    "turned": encoded(A, "JPEG", exif=ORIENTED),
    "a broken note of how it is turned": encoded(A, "JPEG", exif=b"Exif\0\0garbage"),
    "one pixel": encoded(picture(1, 1)),
    "a line": encoded(picture(1, 200)),
}
DAMAGED = {
    "nothing": (b"", "no image of a known kind"),
    "no pixels": (png_of_size(0, 5), "no image of a known kind"),
    "more pixels than there are numbers": (png_of_size(2**31 - 1, 2**31 - 1), "too many pixels"),
    "a page of one bit": (png(9000, 9000, 1, 0, bytes(1126 * 9000)), "9000 x 9000 pixels"),
    "a thread": (encoded(Image.new("RGB", (1, 10_000))), "no side may be 200 times the other"),
    "a note that unpacks to 100 MB": (png(4, 4, 8, 2, bytes(52), BOMB_OF_TEXT), "no image of a known kind"),
    "half a PNG": (encoded(A)[:100], "is damaged"),
    "half a JPEG": (encoded(A, "JPEG")[:-50], "is damaged"),
    "half a WEBP": (encoded(A, "WEBP")[:-20], "no image of a known kind"),
    "half a GIF": (encoded(A.convert("P"), "GIF")[:-100], "is damaged"),
    "a GIF that moves": (encoded(A.convert("P"), "GIF", **SEVERAL), "several frames"),
    "a WEBP that moves": (encoded(A, "WEBP", **SEVERAL), "several frames"),
    "a PNG that moves": (encoded(A, "PNG", **SEVERAL), "several frames"),
    "16 bits of grey": (encoded(Image.fromarray(numpy.zeros((9, 9), numpy.uint16))), "more than 8 bits"),
    "a TIFF": (encoded(A, "TIFF"), "no image of a known kind"),
    "PPM in letters, which Python reads": (b"P3 2 2 255\n" + b"7 " * 12, "no image of a known kind"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image of a known kind"),
    "PDF": (encoded(A, "PDF"), "no image of a known kind"),
}
PLAIN = base64.b64encode(encoded(A)).decode()
URLS = [
    ("data:text/html;base64," + PLAIN, None),
    ("data:;base64," + PLAIN, None),
    ("data:image/png;name=a;charset=utf-8;base64, " + PLAIN, None),
    ("data:image/png;base64," + PLAIN.rstrip("="), "no base64|None"),
    ("data:image/svg+xml,<svg/>", "looks like data:"),
    ("data:image/png,%89PNG%0D%0A", "looks like data:"),
    ("data:image/png;base64,\0AAA", "no base64"),
    ("data:image/png;base64,\ud800", "no base64"),
    ("data:", "looks like data:"),
    ("", "an image is"),
    ("file:///etc/passwd", "not read for a client"),
    ("FILE://LOCALHOST/etc/passwd", "not read for a client"),
    ("file://elsewhere/etc/passwd", "names a file of this machine"),
    ("../../etc/passwd", "not read for a client"),
    ("/tmp/\0a", "not read for a client"),
    ("http://127.0.0.1/", "not fetched from the network"),
    ("http://2130706433/", "not fetched from the network"),
    ("http://[::1", "is no URL: Invalid IPv6 URL"),
    ("ftp://a/b.png", "URL must be data:"),
    ("blob:http://a/b", "URL must be data:"),
    (5, "found int"),
    (True, "found bool"),
    (["x"], "found list"),
    ({"url": {"url": "x"}}, "found dict"),
    (None, "has its image under"),
    ({"url": None}, "has its image under"),
]


@pytest.fixture(scope="module", params=["smolvlm", "qwen3_5"])
def server(request, tmp_path_factory):
    folder = make_image_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    with serving(folder, ServeOptions(), dtype="float32", max_model_len=400) as running:
        yield running


def ask(server: Running, messages: list[dict], **body: object) -> tuple[int, str]:
    """(status, text of the answer or of the error)"""
    status, raw = server.send(CHAT, json.dumps({"messages": messages, "max_tokens": 2} | body).encode())
    answer = json.loads(raw)
    return status, answer["error"]["message"] if "error" in answer else answer["choices"][0]["message"]["content"]


def assert_alive(server: Running) -> None:
    assert ask(server, question(url_of(A)))[0] == 200


@pytest.mark.parametrize("name", PICTURES)
def test_odd_pictures(name, server):
    assert ask(server, question("data:;base64," + base64.b64encode(PICTURES[name]).decode()))[0] == 200


@pytest.mark.parametrize("name", DAMAGED)
def test_what_is_no_picture(name, server):
    data, said = DAMAGED[name]
    status, error = ask(server, question("data:image/png;base64," + base64.b64encode(data).decode()))
    assert status == 400 and said in error
    assert_alive(server)


def test_urls(server):
    for url, said in URLS:
        messages = question("")
        messages[0]["content"][1] = {"type": "image_url", "image_url": url if isinstance(url, dict) else {"url": url}}
        status, error = ask(server, messages)
        if said is None:
            assert status == 200, url
        elif status != 200 or "None" not in said:
            assert status == 400 and said in error, url


PART = {"type": "image_url", "image_url": {"url": url_of(A)}}
MESSAGES = [
    (
        [{"role": "user", "content": [PART]}, {"role": "assistant", "content": [PART]}],
        "belong in messages of role user",
    ),
    ([{"role": "user", "content": "a"}, {"role": "tool", "tool_call_id": "x", "content": [PART]}], "of role tool"),
    ([{"role": "system", "content": [PART]}, {"role": "user", "content": "b"}], "of role system"),
    ([{"role": "developer", "content": [PART]}, {"role": "user", "content": "b"}], "of role developer"),
    ([{"role": "user", "content": [PART] * 17}], "16 images, found 17"),
    ([{"role": "user", "content": [{"type": "image", "path": "/etc/passwd"}]}], "not read for a client"),
    ([{"role": "user", "content": [{"type": "image_pil", "image_pil": "/etc/passwd"}]}], "not read for a client"),
    ([{"role": "user", "content": [PART | {"type": "video_url"}]}], "is of type image_url"),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], "reads no other"),
    ([{"role": "user", "content": [{"type": "text", "text": "a", "image_url": "x"}]}], "is of type image_url"),
    ([{"role": "user", "content": [{"image_url": {"url": "x"}}]}], "is of type image_url"),
    ([{"role": "user", "content": [{"type": "image", "image": "x", "image_url": "y"}]}], "has one image, found 2"),
    ([{"role": "user", "content": "a", "images": [url_of(A)]}], "images are parts of its content"),
]


def test_fields_that_are_null(server):
    """As clients write objects with optional fields."""
    text = {"type": "text", "text": "a", "image_url": None}
    shown = {"type": "image_url", "image_url": {"url": url_of(A), "detail": None}, "image": None, "text": None}
    assert ask(server, [{"role": "user", "content": [text, shown], "images": None}])[0] == 200


@pytest.mark.parametrize("number", range(len(MESSAGES)))
def test_where_images_may_be(number, server):
    """None is left out without a word."""
    messages, said = MESSAGES[number]
    status, error = ask(server, messages)
    assert status == 400 and said in error


def test_options_that_are_none(server):
    for options in ({"size": None}, {"size": 5}, {"size": {"longest_edge": True}}, {"size": {"longest_edge": 1.5}}):
        assert ask(server, question(url_of(A)), mm_processor_kwargs=options)[0] == 400
    for options in ({"size": {"longest_edge": 1}}, {"size": {}}, {}, None):
        assert ask(server, question(url_of(A)), mm_processor_kwargs=options)[0] == 200


SMALL_SIZES = [{"size": {"shortest_edge": 256, "longest_edge": 1024}}, {"max_pixels": 1024}]


@pytest.mark.parametrize("options", SMALL_SIZES)
def test_no_client_lifts_a_limit_of_the_server(options, folder_of):
    """Its options take the place of the checkpoint's, and a client's are smaller than these."""
    small = dict(dtype="float32", max_model_len=400, mm_processor_kwargs=options)
    with serving(folder_of("qwen3_5"), ServeOptions(), **small) as server:

        def num_tokens(options: dict | None) -> int:
            body = {"messages": question(url_of(picture(128, 128))), "mm_processor_kwargs": options}
            status, raw = server.send("/tokenize", json.dumps(body).encode())
            assert status == 200
            return len(json.loads(raw)["tokens"])

        most = num_tokens(None)
        assert num_tokens({"size": {}}) == num_tokens({"size": {"longest_edge": 1024}}) == most
        assert num_tokens({"size": {"longest_edge": 512}}) == most - 3
        for asked, limit in (
            ({"longest_edge": 1025}, 1024),
            ({"longest_edge": 16384}, 1024),
            ({"shortest_edge": 257}, 256),
        ):
            status, error = ask(server, question(url_of(A)), mm_processor_kwargs={"size": asked})
            assert status == 400 and f"between 1 and {limit}, found" in error


def test_no_client_splits_images_where_the_server_does_not(folder_of):
    unsplit = {"mm_processor_kwargs": {"do_image_splitting": False}}
    with serving(folder_of("smolvlm"), ServeOptions(), dtype="float32", max_model_len=400, **unsplit) as server:
        assert ask(server, question(url_of(A)), **unsplit)[0] == 200
        status, error = ask(server, question(url_of(A)), mm_processor_kwargs={"do_image_splitting": True})
        assert status == 400 and "images are not split here" in error


# -- files of the server, and where they are ---------------------------------------------------------------------------


def test_a_folder_that_clients_may_name(tmp_path):
    folder, media = make_image_checkpoint(tmp_path / "model", "smolvlm"), tmp_path / "media"
    media.mkdir()
    (tmp_path / "secret.png").write_bytes(encoded(A))
    (media / "a.png").write_bytes(encoded(A))
    (media / "link.png").symlink_to(tmp_path / "secret.png")
    (media / "loop.png").symlink_to(media / "loop.png")
    with serving(folder, ServeOptions(), dtype="float32", allowed_local_media_path=str(media)) as server:
        for good in (f"{media}/a.png", f"file://{media}/a%2Epng", f"file://localhost{media}/./a.png"):
            assert ask(server, question(good))[0] == 200
        for bad, said in (
            (f"{media}/../secret.png", "outside the folder"),
            (f"file://{media}/%2E%2E/secret.png", "outside the folder"),
            (f"{media}/link.png", "outside the folder"),
            (f"{media}/loop.png", "no file that can be read|outside the folder|there is no image file"),
            (f"file://elsewhere{media}/a.png", "names a file of this machine"),
            (f"file://{media}/a.png%00", "no file that can be read"),
            (str(media), "there is no image file"),
            ("/etc/passwd", "outside the folder"),
        ):
            status, error = ask(server, question(bad))
            assert status == 400 and any(each in error for each in said.split("|")), bad


def without_processor(folder: Path) -> None:
    (folder / "preprocessor_config.json").unlink()


def without_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights.pop(next(name for name in weights if ".vision_model." in name))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("damage", [without_processor, without_a_tensor])
def test_a_client_is_not_told_where_a_broken_checkpoint_is(damage, tmp_path, caplog):
    folder = make_image_checkpoint(tmp_path / "model", "smolvlm")
    damage(folder)
    with serving(folder, ServeOptions(), dtype="float32") as server:
        for more in ({}, {"mm_processor_kwargs": {"size": {"longest_edge": 8}}}):
            status, error = ask(server, question(url_of(A)), **more)
            assert status == 400 and error == "no images can be looked at here; the log says why"
        assert str(folder) in caplog.text
        assert ask(server, [{"role": "user", "content": "a text"}])[0] == 200


def test_a_model_that_sees_none(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "llama")
    with serving(folder, ServeOptions()) as server:
        for body in (
            {"messages": question(url_of(A))},
            {"messages": question("x"), "mm_processor_kwargs": {"size": {}}},
        ):
            status, error = ask(server, **body)
            assert status == 400 and "this model sees no images" in error
        text = [{"role": "user", "content": "a"}]
        status, error = ask(server, text, mm_processor_kwargs={"size": {"longest_edge": 8}})
        assert status == 400 and "this model sees none" in error and str(tmp_path) not in error


def test_first_pictures_that_come_at_once(tmp_path, monkeypatch):
    """One tower is read, and all are answered."""
    folder, made = make_image_checkpoint(tmp_path / "model", "smolvlm"), []
    begin = Tower.__init__
    monkeypatch.setattr(
        Tower, "__init__", lambda self, *a, **b: (made.append(threading.get_ident()), begin(self, *a, **b))[1]
    )
    with serving(folder, ServeOptions(), dtype="float32") as server, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: ask(server, question(url_of(picture(40, 40, seed))))[0], range(8)))
    assert found == [200] * 8 and len(made) == 1
