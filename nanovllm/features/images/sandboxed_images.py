"""The file of an image -> its RGB numbers.

checks/sandbox_process.py runs answer() for an image that a stranger has sent: a file of some kilobytes can take
gigabytes and minutes. What the person at this machine names is decoded in this process, by the same functions.
"""

import io
from pathlib import Path

from PIL import ExifTags, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

# Those that OpenAI's API takes. A file in another can ask for any memory (TIFF's tiles), call another program
# (PostScript), or is read by Python, number after number (BMP and PPM have such forms).
PLUGINS = (PngImagePlugin, JpegImagePlugin, WebPImagePlugin, GifImagePlugin)  # imported before an image comes
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS_OF = {"WEBP": 48_000_000}  # its decoder takes 16 bytes a pixel, the others' at most 8
MAX_SIDES = 200  # how much longer one side may be than the other, as Qwen's processors have it
STRIP_PIXELS = 1 << 20  # so many are converted, written and read at a time
# Images of which convert("RGB") would make others without a word: their numbers go beyond 8 bits.
DEEP_MODES = ("I", "F", "I;16", "I;16L", "I;16B", "I;16N")
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}  # by Exif's number of how the camera was held


def answer(source: str, target: str, max_pixels: int) -> tuple[int, int]:
    """Decode the file `source`, and write its numbers into the file `target`, row after row. Returns its size."""
    image = decoded(Path(source).read_bytes(), max_pixels)
    with open(target, "wb") as file:
        for top, bottom in strips(image.size):
            file.write(image.crop((0, top, image.width, bottom)).tobytes())
    return image.size


def read_numbers(target: str, size: tuple[int, int]) -> Image.Image:
    """The image that answer() has written."""
    image = Image.new("RGB", size)
    with open(target, "rb") as file:
        for top, bottom in strips(size):
            shape = size[0], bottom - top
            image.paste(Image.frombytes("RGB", shape, file.read(3 * shape[0] * shape[1])), (0, top))
    return image


def decoded(data: bytes, max_pixels: int) -> Image.Image:
    """The image that these bytes are the file of, upright and in RGB. Raises ValueError: what is wrong with it."""
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        raise ValueError(f"has too many pixels; it may have {max_pixels:,} in its prompt") from None
    except Exception as error:
        known = ", ".join(FORMATS)
        raise ValueError(f"is no image of a known kind ({known}): {type(error).__name__}; convert it") from None
    most = MAX_PIXELS_OF.get(str(image.format), max_pixels)
    return as_rgb(image, min(most, max_pixels))


def as_rgb(image: Image.Image, max_pixels: int) -> Image.Image:
    """An image upright and in RGB. Raises ValueError for what is too large, moves, or is damaged.

    All that its header says is checked before anything is decoded.
    """
    width, height = image.size
    if width * height > max_pixels:
        raise ValueError(f"has {width} x {height} pixels; it may have {max_pixels:,} in its prompt; make it smaller")
    if min(width, height) < 1 or max(width, height) > MAX_SIDES * min(width, height):
        raise ValueError(f"has {width} x {height} pixels; no side may be {MAX_SIDES} times the other")
    if image.mode in DEEP_MODES:
        raise ValueError(f"has more than 8 bits a channel (mode {image.mode}); convert it to 8 bits first")
    try:
        moves = has_frames(image)
        if not moves:
            image.load()
            turned = UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            rgb = on_white(image)
            return rgb if turned is None else rgb.transpose(turned)
    except Exception as error:  # whatever a decoder says of a damaged file
        raise ValueError(f"is damaged: {type(error).__name__}: {str(error)[:80]}") from None
    raise ValueError("has several frames; send one of them as an image of its own")


def has_frames(image: Image.Image) -> bool:
    """Is there a second one? They are not counted: a file may hold millions. A phone's MPO hides a thumbnail there."""
    if image.format == "MPO":
        return False
    before = image.tell()
    try:
        image.seek(1)
    except EOFError:
        return False
    finally:
        image.seek(before)  # a caller's image stays where it was
    return True


def on_white(image: Image.Image) -> Image.Image:
    """In RGB; what is transparent shows white, as transformers' processors have it."""
    is_transparent = image.mode.lower().endswith("a") or image.info.get("transparency") is not None
    if not is_transparent:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    for top, bottom in strips(image.size):
        part = image.crop((0, top, image.width, bottom))
        if part.mode == "La":  # Pillow converts it to nothing else
            part = part.convert("LA")
        part = part.convert("RGBA")
        white = Image.new("RGBA", part.size, (255, 255, 255, 255))
        rgb.paste(Image.alpha_composite(white, part).convert("RGB"), (0, top))
    return rgb


def strips(size: tuple[int, int]) -> list[tuple[int, int]]:
    """(first row, row after the last) of each."""
    width, height = size
    num_rows = max(1, STRIP_PIXELS // width)
    return [(top, min(top + num_rows, height)) for top in range(0, height, num_rows)]
