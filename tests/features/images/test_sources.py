"""Where pictures come from: everything that is no picture, or may not be looked at, is refused before it is decoded."""

import base64
import contextlib
import io
import json
import shutil
import socket
import ssl
import struct
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy
import pytest
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.features.images import fetching, sources
from nanovllm.features.images.sandboxed_images import strips
from nanovllm.features.images.sources import MAX_PIXELS, Sources
from nanovllm.tools.check_model import check_model
from tests.checkpoints import edit, make_checkpoint
from tests.image_checkpoints import make_image_checkpoint, picture
from tests.marks import by_night

TRUSTED = Sources(any_file=True)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def as_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png_of_size(width: int, height: int) -> bytes:
    """A PNG whose header promises that many pixels, with nothing behind it."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


RED = Image.new("RGB", (8, 6), (200, 30, 10))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
def test_files_urls_bytes_and_images_are_one(kind, tmp_path):
    data = encoded(RED, kind)
    path = tmp_path / "a picture.x"
    path.write_bytes(data)
    found = [TRUSTED.open(each) for each in (data, path, str(path), path.as_uri(), as_url(data))]
    assert {image.tobytes() for image in found} == {Image.open(io.BytesIO(data)).convert("RGB").tobytes()}


def composed(image: Image.Image) -> Image.Image:
    """An RGBA image on white, as transformers' convert_to_rgb makes it. Before 5.24 it may drop the transparency."""
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image).convert("RGB")


def test_forms_of_colour():
    """Palettes, CMYK, grey and one bit become RGB."""
    for image in (RED.convert("P"), RED.convert("CMYK"), RED.convert("L"), RED.convert("1"), RED.convert("RGBA")):
        assert TRUSTED.open(image).tobytes() == image.convert("RGB").tobytes()


@pytest.mark.parametrize("mode", ["RGBA", "LA", "La", "RGBa"])
def test_what_is_transparent_is_white(mode):
    """As transformers' processors make it, so a black logo does not drown in black."""
    logo = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    logo.putpixel((3, 3), (0, 0, 0, 255))
    found = TRUSTED.open(logo.convert("LA").convert(mode) if mode == "La" else logo.convert(mode))
    assert found.tobytes() == composed(logo).tobytes()
    assert found.getpixel((0, 0)) == (255, 255, 255) and found.getpixel((3, 3)) == (0, 0, 0)
    palette = RED.convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert TRUSTED.open(encoded(palette, "PNG")).getpixel((0, 0)) == (255, 255, 255)


def test_a_callers_image_stays_on_its_frame():
    blue = Image.new("RGB", RED.size, (0, 0, 255))
    image = Image.open(io.BytesIO(encoded(RED, "GIF", save_all=True, append_images=[blue])))
    for frame, color in ((0, RED), (1, blue)):
        image.seek(frame)
        with pytest.raises(ValueError, match="several frames"):
            TRUSTED.open(image)
        assert image.tell() == frame and image.convert("RGB").tobytes() == color.tobytes()


def test_a_file_with_a_million_frames_is_not_counted():
    data = encoded(RED, "GIF")
    frame = data[data.index(b",\0\0\0\0\x08\0\x06\0") : -1]
    data = data[:-1] + frame * 1_000_000 + b";"
    started = time.thread_time()
    with pytest.raises(ValueError, match="several frames"):
        TRUSTED.open(data)
    assert time.thread_time() - started < 1


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_upright(number, kind):
    """However the camera was held: Pillow's own function is the twin."""
    exif = Image.Exif()
    exif[0x0112] = number
    data = encoded(picture(30, 20), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    for found in (TRUSTED.open(data), Sources().open(data)):
        assert found.size == expected.size and found.tobytes() == expected.tobytes()


@pytest.fixture(scope="module")
def noise() -> Image.Image:
    """In two strips, the second of which is the shorter one."""
    image = Image.merge("RGBA", [Image.effect_noise((1201, 901), 90) for _ in range(4)])
    assert [bottom - top for top, bottom in strips(image.size)] == [873, 28]
    return image


@pytest.mark.parametrize("form", ["RGBA", "LA", "P", "RGB", "L"])
def test_strips_of_a_picture(form, noise):
    """What is transparent is made white a few rows at a time; in a sandbox, pictures travel so, too."""
    more = {"transparency": 7} if form in ("P", "L") else {"transparency": (7, 7, 7)} if form == "RGB" else {}
    data = encoded(noise.quantize(64) if form == "P" else noise.convert(form), "PNG", **more)
    opened = Image.open(io.BytesIO(data))
    expected = composed(opened.convert("RGBA"))
    for found in (TRUSTED.open(data), Sources().open(data), TRUSTED.open(opened)):
        assert found.mode == "RGB" and found.tobytes() == expected.tobytes()


DEEP = Image.fromarray(numpy.zeros((4, 4), dtype=numpy.uint16))
REFUSED = {
    "no image": (b"hello", "no image of a known kind"),
    "nothing": (b"", "no image of a known kind"),
    "a TIFF": (encoded(RED, "TIFF"), r"known kind \(PNG, JPEG, WEBP, GIF\).*; convert it"),
    "a BMP": (encoded(RED, "BMP"), "no image of a known kind"),
    "PostScript, which PIL gives to another program": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no image of a known kind"),
    "cut off": (encoded(picture(60, 60))[:-200], "is damaged"),
    "a bomb": (png_of_size(100_000, 100_000), f"may have {MAX_PIXELS:,}"),
    "a thread": (png_of_size(50_000, 10), "no side may be"),
    "more than 8 bits": (encoded(DEEP), "more than 8 bits"),
    "frames": (encoded(RED, "GIF", save_all=True, append_images=[RED.rotate(90), RED]), "several frames"),
    "a name that is too long": ("x" * 5000, "no file that can be read; an image in base64 begins with"),
    "a zero in its name": ("a\0.png", "no image file|no file that can be read|embedded null"),
    "neither": (7, "an image is a PIL image"),
    "an unknown scheme": ("ftp://example.com/a.png", "URL must be"),
    "no base64": ("data:image/png;base64,???", "no base64"),
    "a data: URL in other letters": ("data:image/png,abc", "looks like data:"),
    "no file": ("/nowhere/a.png", "there is no image file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    source, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        TRUSTED.open(source)


def test_every_cut_of_a_file():
    """A damaged file is an error, whatever byte is missing or wrong; never a crash."""
    files = [encoded(picture(20, 20), kind) for kind in ("JPEG", "PNG", "WEBP", "GIF")]
    assert all(TRUSTED.open(whole).size == (20, 20) for whole in files)
    cuts = [(file, end) for file in files for end in range(0, len(file), max(7, len(file) // 100))]
    for whole, end in cuts:
        for data in (whole[:end], whole[:end] + bytes([whole[end] ^ 0xFF]) + whole[end + 1 :]):
            try:
                assert TRUSTED.open(data).mode == "RGB"
            except ValueError as error:
                assert str(error)


def test_large_files_are_not_read(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "MAX_BYTES", 100)
    path = tmp_path / "large.png"
    path.write_bytes(bytes(101))
    for source in (bytes(101), path, as_url(bytes(140))):
        with pytest.raises(ValueError, match=r"may have|more than"):
            TRUSTED.open(source)


# -- what a client may name -------------------------------------------------------------------------------------------


def test_a_clients_files(tmp_path):
    inside, outside = tmp_path / "open" / "a.png", tmp_path / "secret.png"
    inside.parent.mkdir()
    inside.write_bytes(encoded(RED))
    outside.write_bytes(encoded(RED))
    (inside.parent / "link.png").symlink_to(outside)
    client = Sources(folder=inside.parent)
    assert client.open(inside.as_uri()).size == RED.size
    for path in (outside, inside.parent / ".." / "secret.png", inside.parent / "link.png"):
        for source in (str(path), f"file://{path}"):
            with pytest.raises(ValueError, match="outside the folder"):
                client.open(source)
            with pytest.raises(ValueError, match="not read for a client"):
                Sources().open(source)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = encoded(RED)
        if self.path == "/elsewhere.png":
            self.send_response(302)
            self.send_header("Location", "/red.png")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        if self.path == "/endless.png":
            body = bytes(1 << 20)
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def host():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()


PRIVATE = (
    *("127.0.0.1", "10.0.0.1", "192.168.1.1", "172.16.0.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "192.0.2.1"),
    *("192.0.0.9", "192.88.99.1", "198.18.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255"),
    *("[::1]", "[::]", "[fe80::1]", "[fd00::1]", "[ff02::1]"),
    # IPv4 addresses in IPv6: mapped, translated, compatible, NAT64, 6to4, Teredo, ISATAP
    *("[::ffff:10.0.0.1]", "[::ffff:8.8.8.8]", "[::ffff:0:10.0.0.1]", "[::127.0.0.1]", "[64:ff9b::7f00:1]"),
    *("[64:ff9b:1::a00:1]", "[64:ff9b:1:fff::1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[fe80::5efe:10.0.0.1]"),
    # site-local, documentation, segment routing, discarding, ORCHID, not given to anybody
    *("[fec0::1]", "[3fff::1]", "[3fff:fff::1]", "[2001:db8::1]", "[5f00::1]", "[100::1]", "[2001:20::1]", "[4000::1]"),
)
PUBLIC = ("8.8.8.8", "1.1.1.1", "2606:4700:4700::1111", "2a00:1450:4001::1", "2001:4860:4860::8888", "2400:cb00::1")


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address, monkeypatch):
    asked = []

    def connect(place, timeout):
        asked.append(place)
        raise OSError("planted")

    monkeypatch.setattr(socket, "create_connection", connect)
    url = f"http://[{address}]/a.png" if ":" in address else f"http://{address}/a.png"
    with pytest.raises(ValueError, match="planted"):
        Sources(domains=(address,)).open(url)
    assert asked == [(address, 80)]


def test_nothing_is_fetched_unless_it_is_allowed(host, monkeypatch):
    with pytest.raises(ValueError, match="not fetched from the network"):
        TRUSTED.open(f"{host}/red.png")
    with pytest.raises(ValueError, match=r"fetched from example\.com"):
        Sources(domains=("example.com",)).open(f"{host}/red.png")
    asked = []
    monkeypatch.setattr(socket, "create_connection", lambda *args, **more: asked.append(args))
    for address in (*PRIVATE, "localhost"):
        name = address.strip("[]")
        with pytest.raises(ValueError, match="private network"):
            Sources(domains=(name,)).open(f"http://{address}:80/red.png")
    assert not asked, "a connection was made"


def test_fetching(host, monkeypatch):
    """From an address that counts as public here."""
    monkeypatch.setattr(fetching, "_public_address", lambda host, port: "127.0.0.1")
    allowed = Sources(domains=("localhost",))
    assert allowed.open(f"{host}/red.png").tobytes() == RED.tobytes()
    with pytest.raises(ValueError, match="the host answers 302"):
        allowed.open(f"{host}/elsewhere.png")
    monkeypatch.setattr(fetching, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        allowed.open(f"{host}/endless.png")


@pytest.mark.parametrize(
    "place, named",
    [
        ("http://localhost", "localhost"),
        ("https://localhost", "localhost"),
        ("https://localhost:443", "localhost"),
        ("http://localhost:443", "localhost:443"),
        ("https://localhost:8443", "localhost:8443"),
    ],
)
def test_the_host_is_asked_by_its_name(place, named, monkeypatch):
    """With a port only where it is not the usual one of http or https."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(fetching, "_public_address", lambda host, port: "127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: ours)
    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", lambda context, plain, server_hostname: plain)
    with theirs:
        theirs.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")
        with pytest.raises(ValueError, match="the host answers 404"):
            Sources(domains=("localhost",)).open(f"{place}/red.png")
        assert f"\r\nHost: {named}\r\n".encode() in theirs.recv(4096)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_host_that_drips(scheme, monkeypatch):
    """An answer, or a TLS handshake, that comes byte by byte takes no longer than one that does not come."""
    monkeypatch.setattr(fetching, "_public_address", lambda host, port: "127.0.0.1")
    monkeypatch.setattr(fetching, "MAX_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                for byte in b"\x16\x03\x03\x40\x00" if scheme == "https" else b"HTTP/1.1 200 OK\r\nX-A: ":
                    peer.send(bytes([byte]))
                for _ in range(100):
                    time.sleep(0.1)
                    peer.send(b"a")

        threading.Thread(target=drip, daemon=True).start()
        started = time.monotonic()
        with pytest.raises(ValueError, match="could not be fetched"):
            Sources(domains=("localhost",)).open(f"{scheme}://localhost:{listener.getsockname()[1]}/red.png")
        assert time.monotonic() - started < 5


def test_time_for_a_name_is_time_for_an_image(monkeypatch):
    monkeypatch.setattr(fetching, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(fetching, "_public_address", lambda host, port: time.sleep(0.02) or "127.0.0.1")
    monkeypatch.setattr(socket, "create_connection", lambda *args, **more: pytest.fail("a connection was made"))
    with pytest.raises(ValueError, match=r"it took more than 0\.01 seconds"):
        Sources(domains=("localhost",)).open("http://localhost/red.png")


# -- from the front door ----------------------------------------------------------------------------------------------


def test_forms_of_data_urls():
    """As browsers and clients write them: escaped, in lines, with URL-safe letters, in capitals."""
    noise = picture(9, 9)
    plain = base64.b64encode(encoded(noise)).decode()
    safe = plain.replace("+", "-").replace("/", "_")
    lines = "\n".join(plain[i : i + 60] for i in range(0, len(plain), 60))
    escaped = plain.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    for url in (f"data:image/png;base64,{each}" for each in (plain, safe, lines, escaped)):
        for form in (url, url.replace("data:image/png;base64", "DATA:image/PNG;charset=x;BASE64"), f" {url}"):
            assert TRUSTED.open(form).tobytes() == noise.tobytes()
    with pytest.raises(ValueError, match="no base64"):
        TRUSTED.open("data:image/png;base64," + "%41" * 100)


PROCESSORS = [
    ("smolvlm", {"max_image_size": {"longest_edge": 64}}, "makes tiles of 64 x 64 pixels, and the tower takes 32 x 32"),
    ("smolvlm", {"max_image_size": {"longest_edge": 16}}, "makes tiles of 16 x 16"),
    ("qwen3_vl", {"merge_size": 4}, "do not fit the tower"),
    ("qwen3_vl", {"patch_size": 16}, "do not fit the tower"),
    ("qwen3_vl", {"temporal_patch_size": 1}, "do not fit the tower"),
    ("qwen3_vl", {"image_std": "x"}, "cannot be used"),
    ("qwen3_vl", {"image_std": [0, 0, 0]}, "not finite: see image_std"),
    ("smolvlm", {"rescale_factor": float("nan")}, "not finite: see image_std and rescale_factor"),
    ("qwen3_vl", {"merge_size": 0}, "cannot be used: the image processor fails: 'division by zero'"),
    ("qwen3_vl", {"size": {"shortest_edge": 0, "longest_edge": 0}}, "cannot be used: .* must contain 'shortest_edge'"),
    ("qwen3_vl", {"size": {"height": 32, "width": 32}}, "cannot be used: .* must contain 'shortest_edge'"),
    ("qwen3_vl", {"size": {"depth": 32}}, "cannot be read: .*set of keys"),
]


@pytest.mark.parametrize("kind, fields, said", PROCESSORS)
def test_a_processor_that_does_not_fit_its_tower(kind, fields, said, folder_of, tmp_path):
    """Each is an error of the prompt that has the picture: the others are answered."""
    folder = shutil.copytree(folder_of(kind), tmp_path / "model")
    edit(folder / "preprocessor_config.json", **fields)
    llm = LLM(str(folder), dtype="float32", max_model_len=200)
    mark = "<image>" if kind == "smolvlm" else IMAGE
    with pytest.raises(ValueError, match=said):
        llm.generate({"prompt": mark, "multi_modal_data": {"image": picture(60, 40)}}, use_tqdm=False)
    assert llm.generate("a text", use_tqdm=False)[0].finished


def test_the_tower_is_read_beside_others(tmp_path, monkeypatch):
    """PyTorch's default dtype is the whole process's: nothing may change it while requests run."""
    folder = make_image_checkpoint(tmp_path, "smolvlm")
    llm = LLM(str(folder), dtype="bfloat16", block_size=16, num_gpu_blocks_override=20, max_model_len=200)
    changes = []
    before = torch.set_default_dtype
    monkeypatch.setattr(torch, "set_default_dtype", lambda dtype: (changes.append(dtype), before(dtype)))
    assert llm.engine.image_processor is not None
    assert set(changes) <= {torch.float32}


TOWERS = [
    ("smolvlm", {"scale_factor": 0}, {}, "scale_factor must be a whole number"),
    ("smolvlm", {"scale_factor": 3}, {}, "scale_factor 3 must divide the 4 patches"),
    ("smolvlm", {}, {"num_attention_heads": 0}, "number of heads must be a whole number"),
    ("smolvlm", {}, {"num_attention_heads": 3}, "must be a multiple of 3 for 3 heads, found 32"),
    ("qwen3_5", {}, {"num_heads": 3}, "must be a multiple of 12 for 3 heads, found 32"),
    ("qwen3_5", {}, {"num_heads": 16}, "must be a multiple of 64 for 16 heads, found 32"),
    ("qwen3_5", {}, {"patch_size": 0}, "patch_size must be a whole number"),
    ("qwen3_5", {"image_token_id": 400}, {}, "image_token_id must be a whole number between 0 and 399"),
    ("smolvlm", {"image_token_id": -1}, {}, "image_token_id must be a whole number between 0 and 399"),
]


@pytest.mark.parametrize("kind, fields, vision, said", TOWERS)
def test_a_config_that_no_tower_can_have(kind, fields, vision, said, folder_of, tmp_path):
    """Where tensors would have the same shapes, or none could be made: said at the start, not within a step."""
    path = tmp_path / "config.json"
    shutil.copy(folder_of(kind) / path.name, path)
    edit(path, **fields, vision_config=json.loads(path.read_text())["vision_config"] | vision)
    with pytest.raises(ValueError, match=said):
        LLM(str(tmp_path))


def test_a_model_that_sees_none(tmp_path):
    llm = LLM(str(make_checkpoint(tmp_path, "llama")), block_size=4, num_gpu_blocks_override=50, max_model_len=100)
    with pytest.raises(ValueError, match="sees no images"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": RED}})
    with pytest.raises(ValueError, match="leave out tower_quantization and mm_processor_kwargs"):
        LLM(str(tmp_path), mm_processor_kwargs={"do_resize": False})
    with pytest.raises(ValueError, match="this model sees none"):
        llm.generate({"prompt": "a", "mm_processor_kwargs": {"do_resize": False}})
    with pytest.raises(ValueError, match="sees no images"):
        llm.chat([{"role": "user", "content": [{"type": "image_pil", "image_pil": RED}]}])


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_image_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_vl")
    options = dict(
        limit_mm_per_prompt={"image": {"count": 2, "width": 9}, "video": {"count": 0}},
        mm_processor_kwargs={"do_resize": True},
    )
    return LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=80, max_model_len=200, **options)


IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
BAD = {
    "too many": ({"prompt": IMAGE * 3, "multi_modal_data": {"image": [RED] * 3}}, "2 images"),
    "none in the prompt": ({"prompt": "a", "multi_modal_data": {"image": RED}}, "found 0 for 1"),
    "one too many in the prompt": ({"prompt": IMAGE * 2, "multi_modal_data": {"image": RED}}, "found 2 for 1"),
    "a video": ({"prompt": IMAGE, "multi_modal_data": {"video": RED}}, "multi_modal_data must be"),
    "an unknown option": (
        {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {"colour": 1}},
        "must be one of .*, size, .*, found 'colour'",
    ),
    **{
        f"an option that changes nothing: {name}": (
            {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {name: True}},
            f"must be one of .*, found '{name}'",
        )
        for name in ("do_center_crop", "do_pad", "device", "disable_grouping", "return_tensors")
    },
    "no size": (
        {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {"size": {"longest_edge": 0}}},
        "longest_edge of mm_processor_kwargs must be a whole number from 1",
    ),
    "a negative size": (
        {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {"max_pixels": -5}},
        "longest_edge of mm_processor_kwargs must be a whole number from 1",
    ),
    "numbers that are none": (
        {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {"rescale_factor": float("nan")}},
        "not finite",
    ),
    "patches of another size": (
        {"prompt": IMAGE, "multi_modal_data": {"image": RED}, "mm_processor_kwargs": {"merge_size": 1}},
        "do not fit the tower",
    ),
    "too long": (
        {
            "prompt": IMAGE,
            "multi_modal_data": {"image": picture(200, 200)},
            "mm_processor_kwargs": {"do_resize": False},
        },
        "the image processor fails: .*cannot reshape",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_prompts(name, llm):
    """Each is an error that says what is wrong, beside a good one, and nothing is computed."""
    prompt, said = BAD[name]
    good = {"prompt": f"{IMAGE} fox", "multi_modal_data": {"image": RED}}
    with pytest.raises(ValueError, match=said) as error:
        llm.generate([good, prompt], use_tqdm=False)
    assert "prompts[1]" in str(error.value) and not llm.engine.has_unfinished_requests()


def test_a_size_in_part_and_in_old_names(llm):
    """What it leaves out is the checkpoint's, and it is the same image by either name."""
    prompt = {"prompt": IMAGE, "multi_modal_data": {"image": picture(100, 60)}}
    found = []
    small = {"size": {"longest_edge": 1024}}, {"max_pixels": 1024}, {"size": {}, "max_pixels": 1024}
    for options in (*small, {"size": None, "do_convert_rgb": True}):
        request = llm.engine.make_request(prompt | {"mm_processor_kwargs": options}, SamplingParams())
        found.append(request.samples[0].seq.mm_spans)
    assert found[0] == found[1] == found[2] and found[0][0].length < found[3][0].length


def test_a_size_of_other_names(folder_of):
    """Height and width, which the checkpoint's own size does not have; but a client may only make that one smaller."""
    given = dict(dtype="float32", max_model_len=200, mm_processor_kwargs={"size": {"height": 64, "width": 32}})
    llm = LLM(str(folder_of("smolvlm")), **given)
    [output] = llm.generate({"prompt": "<image>", "multi_modal_data": {"image": picture(100, 60)}}, use_tqdm=False)
    assert output.finished
    with pytest.raises(ValueError, match="must be a dict of height, width, found"):
        llm.engine.image_processor.client_options({"size": {"longest_edge": 16}})
    with pytest.raises(ValueError, match="height of mm_processor_kwargs must be a whole number between 1 and 64"):
        llm.engine.image_processor.client_options({"size": {"height": 65}})


MISTAKEN = [
    ({"do_convert_rgb": False}, "found 'do_convert_rgb'"),
    ({"size": 5}, "size of mm_processor_kwargs must be a dict of longest_edge, shortest_edge"),
    ({"size": {"longest_edge": 0}}, "must be a whole number from 1"),
    ({"do_rescale": "no"}, "cannot be used: .*do_rescale"),
    ({"resample": 77}, "cannot be used: .*Unknown resampling filter"),
    ({"colour": 1}, "found 'colour'"),
]


@pytest.mark.parametrize("options, said", MISTAKEN)
def test_options_that_cannot_work(options, said, folder_of):
    """The mistake of who starts the engine is no image's. Where no image may come, nothing is read."""
    given = dict(max_model_len=200, mm_processor_kwargs=options)
    with pytest.raises(ValueError, match=said):
        LLM(str(folder_of("qwen3_vl")), **given)
    blind = LLM(str(folder_of("qwen3_vl")), **given, limit_mm_per_prompt={"image": 0})
    with pytest.raises(ValueError, match="may have 0 images, found 1; see limit_mm_per_prompt"):
        blind.generate({"prompt": IMAGE, "multi_modal_data": {"image": RED}}, use_tqdm=False)
    assert not blind.engine.model_runner.parts


def test_check_model(tmp_path):
    """It says that a model sees images, and what is wrong with a tower, without loading a weight."""
    folder = make_image_checkpoint(tmp_path / "whole", "smolvlm")
    report = check_model(EngineConfig(model=str(folder)))
    rows = dict(report.rows)
    assert rows["images"].startswith("SmolVLMForConditionalGeneration") and "million" in rows["tower"]
    assert rows["an image"] == "640 x 480 pixels become 20 placeholders" and not report.errors
    fields = (folder / "preprocessor_config.json").read_text()
    for broken, said in (("[]", "preprocessor_config"), (fields.replace("32", "16"), "makes tiles of 16 x 16")):
        (folder / "preprocessor_config.json").write_text(broken)
        [error] = check_model(EngineConfig(model=str(folder))).errors
        assert said in error
    (folder / "preprocessor_config.json").write_text(fields)
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    edit(folder / "config.json", vision_config=vision | {"intermediate_size": 56})
    [error] = check_model(EngineConfig(model=str(folder))).errors
    assert "the vision tower in" in error and "wrong shape" in error
    llm = LLM(str(folder), dtype="float32", block_size=4, num_gpu_blocks_override=50, max_model_len=100)
    with pytest.raises(ValueError, match="wrong shape"):
        llm.generate({"prompt": "<image>", "multi_modal_data": {"image": RED}})
    assert llm.generate("a text alone still works", use_tqdm=False)[0].finished


def test_overrides_of_a_config(tmp_path):
    """hf_overrides reach the tower's fields, too, and a mistake in them is seen."""
    folder = make_image_checkpoint(tmp_path, "qwen3_vl")
    options = dict(dtype="float32", block_size=4, num_gpu_blocks_override=50, max_model_len=100)
    images = LLM(str(folder), hf_overrides={"image_token_id": 7}, **options).engine.model_config.images
    assert images.image_token_id == 7
    found = LLM(str(folder), hf_overrides={"vision_config": {"intermediate_size": 56}}, **options)
    assert found.engine.model_config.images.config["vision_config"]["patch_size"] == 8
    with pytest.raises(ValueError, match="wrong shape"):
        found.generate({"prompt": IMAGE, "multi_modal_data": {"image": RED}})
    with pytest.raises(ValueError, match="hf_overrides: vision_config must be a dict"):
        LLM(str(folder), hf_overrides={"vision_config": 5}, **options)


@pytest.mark.parametrize("num_ranks", [1, by_night(2)])
def test_a_tower_with_numbers_that_are_none(tmp_path, num_ranks):
    """As of a language model: said when the tower is read, not in the middle of a step. Texts are answered, still."""
    folder = make_image_checkpoint(tmp_path, "smolvlm")
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if ".vision_model." in name)
    weights[name].view(-1)[0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    options = dict(block_size=4, num_gpu_blocks_override=50, max_model_len=100, tensor_parallel_size=num_ranks)
    llm = LLM(str(folder), dtype="float32", **options)
    for _ in range(2):
        with pytest.raises(ValueError, match="has numbers that are NaN"):
            llm.generate({"prompt": "<image>", "multi_modal_data": {"image": RED}})
        assert llm.generate("the quick", SamplingParams(max_tokens=2))[0].finished


def test_options_of_images():
    for options, said in (
        ({"limit_mm_per_prompt": {"audio": 1}}, "no \\['audio'\\]"),
        ({"limit_mm_per_prompt": {"video": {"num_frames": 9}}}, "no \\['video'\\]"),
        ({"limit_mm_per_prompt": {"image": {"cuont": 4}}}, "'image' may have count, .*, found \\['cuont'\\]"),
        ({"limit_mm_per_prompt": 3}, "must be a dict"),
        ({"mm_processor_kwargs": 3}, "must be a dict"),
        ({"allowed_local_media_path": "/nowhere"}, "no folder"),
        ({"allowed_media_domains": 3}, "allowed_media_domains"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=said):
            LLM("x", **options)
