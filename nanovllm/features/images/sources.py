"""From what a caller names to an image: PIL images, files, data: URLs and, where that is allowed, http(s) URLs.

What can be refused is refused before anything is read or decoded.
"""

import base64
import binascii
import io
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nanovllm.checks.sandbox import Sandbox, TooMuch
from nanovllm.checks.values import shorten

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 64_000_000  # of a prompt's images together
MAX_NAME = 1 << 14  # characters of a path or of a URL other than data:
LARGE_PIXELS = 8_000_000  # of a prompt's images together, which take a second of a processor and more
# Of a prompt's images together, in which their sizes are looked for: Pillow takes a second for each MB of some headers.
MAX_HEADER_BYTES = 256 << 10
# They decode what strangers send, one image at a time. Honest ones with all pixels that they may have take 3 s.
DECODER = "nanovllm.features.images.sandboxed_images"
DECODING, DECODING_LARGE = (Sandbox(DECODER, seconds=5, max_mb=768, niceness=5, packages=("PIL",)) for _ in range(2))
BAD_NAME = "is no file that can be read; an image in base64 begins with data:image/png;base64,"
# What base64 may have in a URL, in the place of its own letters and between them.
ESCAPES = {b"%2B": b"+", b"%2F": b"/", b"%3D": b"=", b"%2b": b"+", b"%2f": b"/", b"%3d": b"="}
URL_SAFE, SPACES = bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f"


class ClientImages(list[Any]):
    """What a client names as the images of a prompt. They are not opened yet, and will be with a client's rights."""

    @cached_property
    def are_large(self) -> bool:
        """By the headers of those that came with the request, or because these are too long to be read here.

        What has to be fetched is not looked at.
        """
        num_pixels, bytes_left = 0, MAX_HEADER_BYTES
        for source in filter(_is_data_url, self):
            num_more, num_bytes = _header_of(source, bytes_left)
            num_pixels += num_more
            bytes_left -= num_bytes
            if num_pixels > LARGE_PIXELS or bytes_left <= 0:
                return True
        return False


@dataclass(frozen=True)
class Sources:
    """Where images may come from. A client may name less than the person whose machine this is.

    any_file      every local file: the person's own images, which are decoded in this process
    folder        for a client, files below it (None: none)
    domains       hosts from which http(s) URLs are fetched; () for none
    sandbox       where a client's images are decoded
    """

    any_file: bool = False
    folder: Path | None = None
    domains: tuple[str, ...] = ()
    sandbox: Sandbox = DECODING

    def open(self, source: Any, max_pixels: int = MAX_PIXELS) -> "Image":
        """The RGB image that a PIL image, a path, bytes or a URL stands for. Raises ValueError."""
        if isinstance(source, pil().Image):
            from nanovllm.features.images.sandboxed_images import as_rgb

            return _named("the image", lambda: as_rgb(source, max_pixels))
        data, name = self._read(source)
        if len(data) > MAX_BYTES:
            raise ValueError(f"{name} has {len(data):,} bytes, an image may have {MAX_BYTES:,}")
        return _named(name, lambda: self._decoded(data, max_pixels))

    def _decoded(self, data: bytes, max_pixels: int) -> "Image":
        from nanovllm.features.images import sandboxed_images

        if self.any_file:
            return sandboxed_images.decoded(data, max_pixels)
        with tempfile.TemporaryDirectory() as folder:  # a pipe would have to carry megabytes as JSON
            source, target = Path(folder, "image"), Path(folder, "numbers")
            source.write_bytes(data)
            width, height = self.sandbox.ask(str(source), str(target), max_pixels)
            return sandboxed_images.read_numbers(str(target), (width, height))

    def _read(self, source: Any) -> tuple[bytes, str]:
        """(the file's bytes, what to call it in an error)."""
        if isinstance(source, bytes | bytearray):
            return bytes(source), "the image"
        if isinstance(source, Path):
            return self._read_file(source)
        if not isinstance(source, str) or not source:
            kinds = "a PIL image, bytes, a path, or a data:, file: or http(s): URL"
            raise ValueError(f"an image is {kinds}, found {type(source).__name__}")
        if _is_data_url(source):
            return _data_of(source.strip()), "the data: URL"
        if len(source) > MAX_NAME:
            raise ValueError(f"{shorten(source)} {BAD_NAME}")
        try:
            url = urlsplit(source if "://" in source[:16] else "")
        except ValueError as error:
            raise ValueError(f"{shorten(source)} is no URL: {error}") from None
        scheme = url.scheme.lower()
        if scheme in ("http", "https"):
            from nanovllm.features.images.fetching import fetch

            return fetch(source, self.domains), shorten(source)
        if scheme == "file":
            if url.netloc.lower() not in ("", "localhost"):
                raise ValueError(f"a file: URL names a file of this machine, file:///a.png; found {shorten(source)}")
            return self._read_file(Path(unquote(url.path)))
        if scheme:
            raise ValueError(f"an image's URL must be data:, file:, http: or https:, found {shorten(source)}")
        return self._read_file(Path(source))

    def _read_file(self, path: Path) -> tuple[bytes, str]:
        if not self.any_file and self.folder is None:
            raise ValueError("files of this machine are not read for a client; send the image as a data: URL")
        if "\0" in str(path):
            raise ValueError(f"{shorten(str(path))} {BAD_NAME}")
        try:
            folder = None if self.any_file else self.folder
            if folder is not None and not path.resolve().is_relative_to(folder.resolve()):
                raise ValueError("this file is outside the folder whose images a client may name")
            if not path.is_file():
                raise ValueError(f"there is no image file {shorten(str(path))}")
            if (size := path.stat().st_size) > MAX_BYTES:
                raise ValueError(f"{path} has {size:,} bytes, an image may have {MAX_BYTES:,}")
            return path.read_bytes(), str(path)
        except (OSError, RuntimeError):  # a name that is too long, a loop of links
            raise ValueError(f"{shorten(str(path))} {BAD_NAME}") from None


def pil() -> Any:
    """PIL.Image. Raises ValueError without Pillow."""
    try:
        import PIL.Image
    except ImportError:
        raise ValueError("images need Pillow: pip install 'nanovllm[images]'") from None
    return PIL.Image


def _named(name: str, decode: Callable[[], "Image"]) -> "Image":
    """decode(); the name comes before what is wrong."""
    try:
        return decode()
    except TooMuch as error:
        raise ValueError(f"{name} {error} to decode; make it smaller, or save it in another format") from None
    except ValueError as error:
        raise ValueError(f"{name} {error}") from None


def _is_data_url(source: Any) -> bool:
    return isinstance(source, str) and source[:32].lstrip()[:5].lower() == "data:"


def _header_of(url: str, num_bytes: int) -> tuple[int, int]:
    """(pixels of a data: URL's image, bytes that its header takes), of which no more than num_bytes are read.

    0 pixels where they are not known: the header has not ended by then, or something is wrong, which is found out when
    the image is opened.
    """
    num_chars = 4 * num_bytes // 3
    file = io.BytesIO()
    with suppress(Exception):
        from nanovllm.features.images.sandboxed_images import FORMATS

        file = io.BytesIO(_data_of(url, num_chars))
        width, height = _webp_size(file.read(30)) or pil().open(file, formats=FORMATS).size
        return width * height, file.tell()
    return 0, num_bytes if len(url) > num_chars else file.tell()


def _webp_size(start: bytes) -> tuple[int, int] | None:
    """A WebP file's width and height, if it is one, by its first 30 bytes: Pillow opens nothing but whole ones.

    developers.google.com/speed/webp/docs/riff_container
    """

    def number(first: int, end: int) -> int:
        return int.from_bytes(start[first:end], "little")

    kind = start[8:16]
    if kind == b"WEBPVP8X":
        return number(24, 27) + 1, number(27, 30) + 1
    if kind == b"WEBPVP8L":
        return (number(21, 25) & 0x3FFF) + 1, (number(21, 25) >> 14 & 0x3FFF) + 1
    if kind == b"WEBPVP8 ":
        return number(26, 28) & 0x3FFF, number(28, 30) & 0x3FFF
    return None


def _data_of(url: str, num_chars: int | None = None) -> bytes:
    """The bytes of base64 as it may be written: in lines, with escapes, with URL-safe letters.

    num_chars: only those that so many characters of the URL hold.
    """
    head, comma, body = url[:num_chars].partition(",")
    if not comma or not head[-20:].lower().endswith(";base64"):
        raise ValueError("a data: URL of an image looks like data:image/png;base64,...")
    if len(body) > 2 * MAX_BYTES:
        raise ValueError(f"the data: URL has more than {MAX_BYTES:,} bytes, which is what an image may have")
    try:
        plain = body.encode("ascii")
        for escape, letter in ESCAPES.items():
            plain = plain.replace(escape, letter)
        plain = plain.translate(URL_SAFE, SPACES)
        if num_chars is not None and len(url) > num_chars:  # an escape, or a group of four letters, may be cut
            plain = plain.partition(b"%")[0]
            plain = plain[: len(plain) // 4 * 4]
        return base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data: URL is no base64: {shorten(str(error))}") from None
