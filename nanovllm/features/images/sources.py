"""From what a caller names to a picture: PIL images, files, data: URLs and, where that is allowed, http(s) URLs.

Everything that can be checked is checked before anything is decoded: bytes, format, pixels, frames.
"""

import base64
import binascii
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from nanovllm.checks.values import shorten

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 32 << 20  # of a file
MAX_PIXELS = 64_000_000  # of a prompt's pictures together
MAX_SIDES = 200  # how much longer one side may be than the other, as Qwen's processors have it
# Formats that PIL reads without calling another program.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# Pictures of which convert("RGB") would make others without a word: their numbers go beyond 8 bits.
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")


class Pictures(tuple["Image", ...]):
    """Those of one prompt, which Sources has opened: upright, in RGB, within all bounds."""


@dataclass(frozen=True)
class Sources:
    """Where pictures may come from. A client may name less than the person whose machine this is.

    any_file      every local file, if there is no folder; otherwise only those below `folder` (None: none)
    domains       hosts from which http(s) URLs are fetched; () for none
    """

    any_file: bool = False
    folder: Path | None = None
    domains: tuple[str, ...] = ()

    def open(self, source: Any, max_pixels: int = MAX_PIXELS) -> "Image":
        """An RGB picture of a PIL image, a path, bytes or a URL. Raises ValueError."""
        image_class = pil().Image
        if isinstance(source, image_class):
            return checked(source, "the image", max_pixels)
        if isinstance(source, bytes | bytearray):
            return decoded(bytes(source), "the image", max_pixels)
        if isinstance(source, Path):
            return self._read(source, max_pixels)
        if not isinstance(source, str) or not source:
            kinds = "a PIL image, bytes, a path, or a data:, file: or http(s): URL"
            raise ValueError(f"an image is {kinds}, found {type(source).__name__}")
        source = source.strip() if source[:32].lstrip()[:5].lower() == "data:" else source
        if source[:5].lower() == "data:":
            return decoded(_data_of(source), "the data: URL", max_pixels)
        try:
            url = urlsplit(source if "://" in source[:16] else "")
        except ValueError as error:
            raise ValueError(f"{shorten(source)} is no URL: {error}") from None
        scheme = url.scheme.lower()
        if scheme in ("http", "https"):
            from nanovllm.features.images.fetching import fetch

            return decoded(fetch(source, self.domains), shorten(source), max_pixels)
        if scheme == "file":
            if url.netloc.lower() not in ("", "localhost"):
                raise ValueError(f"a file: URL names a file of this machine, file:///a.png; found {shorten(source)}")
            return self._read(Path(unquote(url.path)), max_pixels)
        if scheme:
            raise ValueError(f"an image's URL must be data:, file:, http: or https:, found {shorten(source)}")
        return self._read(Path(source), max_pixels)

    def _read(self, path: Path, max_pixels: int) -> "Image":
        if not self.any_file and self.folder is None:
            raise ValueError("files of this machine are not read for a client; send the image as a data: URL")
        hint = "an image in base64 begins with data:image/png;base64,"
        if "\0" in str(path):
            raise ValueError(f"{shorten(str(path))} is no file that can be read; {hint}")
        try:
            if self.folder is not None and not path.resolve().is_relative_to(self.folder.resolve()):
                raise ValueError("this file is outside the folder whose images a client may name")
            if not path.is_file():
                raise ValueError(f"there is no image file {shorten(str(path))}")
            if (size := path.stat().st_size) > MAX_BYTES:
                raise ValueError(f"{path} has {size:,} bytes, an image may have {MAX_BYTES:,}")
            data = path.read_bytes()
        except (OSError, RuntimeError):  # a name that is too long, a loop of links
            raise ValueError(f"{shorten(str(path))} is no file that can be read; {hint}") from None
        return decoded(data, str(path), max_pixels)


def pil() -> Any:
    """PIL.Image. Raises ValueError without Pillow."""
    try:
        import PIL.Image
    except ImportError:
        raise ValueError("images need Pillow: pip install 'nanovllm[images]'") from None
    return PIL.Image


def decoded(data: bytes, name: str, max_pixels: int) -> "Image":
    """The RGB picture that these bytes are a file of. name: for errors."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"{name} has {len(data):,} bytes, an image may have {MAX_BYTES:,}")
    try:
        image = pil().open(io.BytesIO(data), formats=FORMATS)
    except pil().DecompressionBombError:
        raise ValueError(f"{name} has too many pixels; a prompt's images may have {MAX_PIXELS:,} together") from None
    except Exception as error:
        known = ", ".join(FORMATS)
        raise ValueError(f"{name} is no image of a known kind ({known}): {type(error).__name__}") from None
    return checked(image, name, max_pixels)


def checked(image: "Image", name: str, max_pixels: int) -> "Image":
    """Upright and in RGB, decoded. Raises ValueError for what is too large, moves, or is damaged."""
    width, height = image.size
    if width * height > max_pixels:
        found = f"{name} has {width} x {height} pixels"
        raise ValueError(f"{found}; a prompt's images may have {MAX_PIXELS:,} together; make it smaller")
    if min(width, height) < 1 or max(width, height) > MAX_SIDES * min(width, height):
        raise ValueError(f"{name} has {width} x {height} pixels; no side may be {MAX_SIDES} times the other")
    if image.mode in DEEP_MODES:
        raise ValueError(f"{name} has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits first")
    try:
        moves = _has_frames(image)
        image.load()
        rgb = _on_white(image)
    except Exception as error:  # whatever a decoder says of a damaged file
        raise ValueError(f"{name} is damaged: {type(error).__name__}: {shorten(str(error))}") from None
    if moves:
        raise ValueError(f"{name} has several frames; send one of them as an image of its own")
    return rgb


def _has_frames(image: "Image") -> bool:
    """Is there a second one? They are not counted: a file may hold millions. A phone's MPO hides a thumbnail there."""
    if image.format == "MPO":
        return False
    try:
        image.seek(1)
    except EOFError:
        image.seek(0)
        return False
    return True


def _on_white(image: "Image") -> "Image":
    """Upright, in RGB; what is transparent shows white, as transformers' processors have it."""
    from PIL import ExifTags, ImageOps

    if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:  # otherwise it would be copied
        image = ImageOps.exif_transpose(image)
    if image.mode == "La":  # Pillow converts it to nothing else
        image = image.convert("LA")
    if image.mode.lower().endswith("a") or image.info.get("transparency") is not None:
        rgba = image.convert("RGBA")
        white = pil().new("RGBA", rgba.size, (255, 255, 255, 255))
        image = pil().alpha_composite(white, rgba)
    return image.convert("RGB")


def _data_of(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ValueError("a data: URL of an image looks like data:image/png;base64,...")
    if len(body) > 2 * MAX_BYTES:
        raise ValueError(f"the data: URL has more than {MAX_BYTES:,} bytes, which is what an image may have")
    for escape, letter in (("%2B", "+"), ("%2F", "/"), ("%3D", "="), ("%2b", "+"), ("%2f", "/"), ("%3d", "=")):
        body = body.replace(escape, letter)
    try:
        plain = "".join(body.split()).replace("-", "+").replace("_", "/")
        return base64.b64decode(plain, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the data: URL is no base64: {error}") from None
