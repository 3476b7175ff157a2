"""Decode the bytes of an image to a picture in mode RGB. Runs in the confined process only.

PNG, JPEG, WebP and GIF are read, and of an animation the first frame. The picture is turned as its
EXIF orientation says. Transparent parts become white, as transformers does for opened pictures
(`convert_to_rgb`); for data: URLs it drops the alpha channel and shows the colours below. Of 16
bits the high byte is kept, as Pillow does for colours; for grey, transformers clips at 255.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable

from PIL import Image, ImageChops, UnidentifiedImageError

MAX_PIXELS = 50_000_000  # such as 8660 x 5773; Pillow takes up to 4 bytes for each, and copies
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
READABLE = "Send a PNG, JPEG, WebP or GIF."
ORIENTATION = 0x0112  # EXIF tag
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# How other files begin, for the message.
OTHERS = {
    "an AVIF image": rb"....ftypavi[fs]",
    "a HEIC image": rb"....ftyp(?:heic|heix|hevc|mif1|msf1)",
    "a video": rb"....ftyp|\x1a\x45\xdf\xa3|RIFF....AVI ",
    "a JPEG XL image": rb"\xff\x0a|\0\0\0\x0cJXL ",
    "a JPEG 2000 image": rb"\xff\x4f\xff\x51|\0\0\0\x0cjP  ",
    "a TIFF image": rb"II\*\0|MM\0\*",
    "a BMP image": rb"BM",
    "an icon": rb"\0\0\x01\0",
    "a PDF": rb"%PDF",
    "an SVG image": rb"\s*(?:<\?xml[^>]*>\s*)?<svg",
    "an HTML page": rb"(?i:\s*<(?:!doctype html|html))",
    "a JSON text": rb"\s*[{\[]",
}
PNG_END = b"IEND\xaeB\x60\x82"  # a chunk without data, and its checksum
JPEG_END = b"\xff\xd9"


class PictureError(Exception):
    """The bytes are no picture that can be read. The client gets the text."""


def open_picture(data: bytes) -> Image.Image:
    """Return the picture in mode RGB. Raises PictureError, MemoryError."""
    if not data:
        raise PictureError("The image is empty.")
    Image.MAX_IMAGE_PIXELS = None  # `_check_size` says more than Pillow's warning
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _opened(data)


def _opened(data: bytes) -> Image.Image:
    _check_webp(data)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise PictureError(_unknown(data)) from None
    except MemoryError:
        raise
    except Exception as error:  # plugins raise many types
        raise PictureError(f"The image's header cannot be read: {_text(error)}.") from error
    _check_size(picture.width, picture.height)
    if not _is_whole(picture.format, data):
        raise PictureError("The image is cut off: its end is missing.")
    try:
        picture.load()
        turn = TURNS.get(_orientation(picture))
        rgb = to_rgb(picture)
        return rgb if turn is None else rgb.transpose(turn)
    except MemoryError:
        raise
    except Exception as error:
        raise PictureError(f"The image cannot be decoded: {_text(error)}.") from error


def _text(error: Exception) -> str:
    """Return an exception's text; Pillow's say what is wrong with the file."""
    return str(error).rstrip(".")[:200] or type(error).__name__


def _unknown(data: bytes) -> str:
    """Return what the bytes are, if they are neither of the four formats nor a whole header."""
    for kind, beginning in OTHERS.items():
        if re.match(beginning, data[:256], re.DOTALL):
            return f"The image is {kind}, which is not supported. {READABLE}"
    return f"The image is of an unknown format, or its beginning is damaged. {READABLE}"


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise PictureError(
            f"The image has {width} x {height} pixels; the limit is {MAX_PIXELS} in total."
        )
    if width < 1 or height < 1:
        raise PictureError(f"The image has {width} x {height} pixels.")


def _check_webp(data: bytes) -> None:
    """Check the size in the header of a WebP: opening one takes 8 bytes for each pixel."""
    if data[:4] != b"RIFF" or data[8:12] != b"WEBP" or len(data) < 30:
        return
    if int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise PictureError("The image is cut off: its end is missing.")
    match data[12:16]:
        case b"VP8X":
            width = int.from_bytes(data[24:27], "little") + 1
            height = int.from_bytes(data[27:30], "little") + 1
        case b"VP8L":
            bits = int.from_bytes(data[21:25], "little")
            width = (bits & 0x3FFF) + 1
            height = (bits >> 14 & 0x3FFF) + 1
        case _:
            width = int.from_bytes(data[26:28], "little") & 0x3FFF
            height = int.from_bytes(data[28:30], "little") & 0x3FFF
    _check_size(width, height)


def _is_whole(format_name: str | None, data: bytes) -> bool:
    """Return whether the end is there. Pillow loads a PNG and a JPEG without their last bytes."""
    if format_name == "PNG":
        return PNG_END in data
    if format_name in ("JPEG", "MPO"):
        return data.find(JPEG_END, _scan_start(data)) >= 0
    return True  # the decoders of WebP and GIF notice


def _scan_start(data: bytes) -> int:
    """Return where the first scan of a JPEG begins. A thumbnail before it has an end of its own."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        if data[at + 1] == 0xDA:
            break
        if data[at + 1] == 0xFF:  # padding
            at += 1
            continue
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at


def _orientation(picture: Image.Image) -> int:
    """Return 1 to 8; 1 if the EXIF data are damaged, because the pixels may still be right."""
    try:
        value = picture.getexif().get(ORIENTATION, 1)
    except MemoryError:
        raise
    except Exception:  # their parser raises many types
        return 1
    return value if isinstance(value, int) else 1


def to_rgb(picture: Image.Image) -> Image.Image:
    """Return a loaded picture of any mode in mode RGB."""
    if picture.mode.startswith("I"):  # 16 bits of grey
        picture = _eight_bits(picture)
    has_alpha = picture.mode in ("RGBA", "LA", "PA", "RGBa", "La")
    if not has_alpha and "transparency" not in picture.info:
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    picture = picture if picture.mode == "RGBA" else picture.convert("RGBA")
    white = Image.new("RGB", picture.size, "white")
    white.paste(picture, mask=picture)  # the same bytes as alpha_composite, and half its memory
    return white


def shrunk(picture: Image.Image, edge: int) -> Image.Image:
    """Return a picture in mode RGB whose longer side has at most `edge` pixels."""
    longest = max(picture.size)
    if longest <= edge:
        return picture
    width = max(1, round(picture.width * edge / longest))
    height = max(1, round(picture.height * edge / longest))
    narrow = picture.resize((width, picture.height), Image.Resampling.BICUBIC)
    return narrow.resize((width, height), Image.Resampling.BICUBIC)


def _eight_bits(picture: Image.Image) -> Image.Image:
    """Return the high bytes of grey with 16 bits, in mode L, or LA if one value is transparent."""
    words = picture if picture.mode == "I;16" else picture.convert("I;16")
    data = words.tobytes()  # little-endian
    high = Image.frombytes("L", picture.size, data, "raw", "L;16")
    transparent = picture.info.get("transparency")
    if not isinstance(transparent, int):
        return high
    low = Image.frombytes("L", picture.size, data, "raw", "L;16B")
    differs = ImageChops.lighter(
        high.point(_differs_from(transparent >> 8)), low.point(_differs_from(transparent & 0xFF))
    )
    return Image.merge("LA", (high, differs))


def _differs_from(value: int) -> Callable[[int], int]:
    return lambda byte: 0 if byte == value else 255
