"""Decoding: modes, orientation, frames, and files that are refused."""

from __future__ import annotations

import base64
import io
import struct

import pytest
from PIL import Image, ImageChops, ImageOps
from transformers.image_transforms import convert_to_rgb
from transformers.image_utils import load_image

from server.images.data_url import image_bytes
from server.images.decode import MAX_PIXELS, PictureError, open_picture, shrunk
from tests.support import pictures
from tests.support.pictures import FILES, animated, file_of, flat_png, gradient, turned


def opened(data: bytes) -> Image.Image:
    picture = open_picture(data)
    assert picture.mode == "RGB"
    return picture


def largest_difference(one: Image.Image, other: Image.Image) -> int:
    assert one.size == other.size
    return max(high for _, high in ImageChops.difference(one, other).getextrema())  # type: ignore[misc]


# The reference does not turn pictures, and clips 16 bits. It refuses packed metadata, as we do.
DIFFERENT = ("turned", "16 bits", "packed")
LARGE = ("PNG, flat", "PNG, strip")
SAME = [name for name in FILES if not any(word in name for word in DIFFERENT)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in LARGE else []) for name in SAME],
)
def test_picture_is_that_of_transformers(name: str) -> None:
    """`convert_to_rgb` of an opened picture, with the same Pillow."""
    data = FILES[name]()
    reference = convert_to_rgb(Image.open(io.BytesIO(data)))
    assert opened(data).tobytes() == reference.tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("orientation", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
def test_picture_is_turned_as_its_orientation_says(kind: str, orientation: int) -> None:
    data = turned(kind, orientation)
    reference = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert reference is not None
    assert opened(data).tobytes() == reference.tobytes()
    is_upright = orientation not in (5, 6, 7, 8)
    assert (opened(data).width == pictures.WIDTH) == is_upright


def test_damaged_exif_data_leave_the_picture_as_it_is() -> None:
    data = file_of(gradient(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(40))
    assert opened(data).size == gradient().size


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animation_is_its_first_frame(kind: str) -> None:
    data = animated(kind)
    assert getattr(Image.open(io.BytesIO(data)), "n_frames", 1) == 3
    assert largest_difference(opened(data), gradient()) < 40


@pytest.mark.parametrize(
    ("mode", "pixel", "options", "expected"),
    [
        ("RGBA", (255, 0, 0, 0), {}, (255, 255, 255)),
        ("RGBA", (255, 0, 0, 128), {}, (255, 127, 127)),
        ("RGBA", (255, 0, 0, 255), {}, (255, 0, 0)),
        ("LA", (0, 0), {}, (255, 255, 255)),
        ("LA", (0, 255), {}, (0, 0, 0)),
        ("RGB", (1, 2, 3), {}, (1, 2, 3)),
        ("RGB", (1, 2, 3), {"transparency": (1, 2, 3)}, (255, 255, 255)),
        ("RGB", (1, 2, 3), {"transparency": (1, 2, 4)}, (1, 2, 3)),
        ("L", 7, {"transparency": 7}, (255, 255, 255)),
        ("L", 7, {}, (7, 7, 7)),
        ("1", 255, {}, (255, 255, 255)),
        ("P", 0, {"transparency": 0}, (255, 255, 255)),
        ("I;16", 0x8000, {}, (128, 128, 128)),
        ("I;16", 0x00C8, {}, (0, 0, 0)),
        ("I;16", 0xFFFF, {}, (255, 255, 255)),
        ("I;16", 0x1234, {"transparency": 0x1234}, (255, 255, 255)),
        ("I;16", 0x1234, {"transparency": 0x1235}, (0x12, 0x12, 0x12)),
        ("I;16", 0x1234, {"transparency": 0x1334}, (0x12, 0x12, 0x12)),
    ],
)
def test_pixel_of_every_mode_has_its_colour(
    mode: str, pixel: int | tuple[int, ...], options: dict[str, object], expected: tuple[int, ...]
) -> None:
    picture = Image.new(mode, (2, 1), pixel)  # type: ignore[arg-type]
    assert opened(file_of(picture, "PNG", **options)).getpixel((1, 0)) == expected


@pytest.mark.parametrize(
    ("mode", "pixel", "theirs", "ours"),
    [
        ("RGBA", (255, 0, 0, 128), (255, 0, 0), (255, 127, 127)),
        ("LA", (0, 0), (0, 0, 0), (255, 255, 255)),
        ("I;16", 0x8000, (255, 255, 255), (128, 128, 128)),
    ],
)
def test_data_url_differs_from_transformers_where_the_page_says_so(
    mode: str, pixel: int | tuple[int, ...], theirs: tuple[int, ...], ours: tuple[int, ...]
) -> None:
    data = file_of(Image.new(mode, (2, 1), pixel), "PNG")  # type: ignore[arg-type]
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    assert load_image(url).getpixel((0, 0)) == theirs
    assert opened(image_bytes(url)).getpixel((0, 0)) == ours


def test_red_of_a_cmyk_jpeg_stays_red() -> None:
    red = opened(file_of(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((4, 4))
    assert isinstance(red, tuple)
    assert red[0] > 230
    assert max(red[1:]) < 40


@pytest.mark.parametrize("name", ["PNG", "JPEG", "JPEG, thumbnail", "WebP", "GIF"])
def test_file_without_its_second_half_is_refused(name: str) -> None:
    data = FILES[name]()
    with pytest.raises(PictureError, match=r"cut off|(?i:truncated)"):
        open_picture(data[: len(data) // 2])


@pytest.mark.parametrize(
    ("name", "missing"), [("PNG", 13), ("PNG", 1), ("JPEG", 2), ("JPEG, thumbnail", 2), ("WebP", 1)]
)
def test_file_without_its_end_is_refused(name: str, missing: int) -> None:
    """Pillow loads the PNG without 13 bytes and the JPEG without two."""
    data = FILES[name]()
    with pytest.raises(PictureError, match="cut off: its end is missing"):
        open_picture(data[:-missing])


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WebP", "GIF"])
def test_bytes_behind_the_end_are_ignored(name: str) -> None:
    data = FILES[name]()
    assert opened(data + b"more" * 9).tobytes() == opened(data).tobytes()


@pytest.mark.parametrize(
    "kind", ["PNG", "GIF", "JPEG", "WebP lossy", "WebP lossless", "WebP extended"]
)
def test_size_in_the_header_is_refused_before_decoding(kind: str) -> None:
    data = pictures.resized_header(kind, 10_000, 9_000)
    with pytest.raises(PictureError, match=f"10000 x 9000 pixels; the limit is {MAX_PIXELS}"):
        open_picture(data)


def test_png_with_sides_of_31_bits_is_refused() -> None:
    with pytest.raises(PictureError, match="2147483647 x 2147483647 pixels"):
        open_picture(pictures.resized_header("PNG", 2**31 - 1, 2**31 - 1))


def test_frame_of_a_gif_beyond_its_canvas_counts() -> None:
    data = bytearray(file_of(gradient("P"), "GIF"))
    at = data.index(b"\x2c") + 1  # the position and size of the frame
    data[at : at + 8] = struct.pack("<HHHH", 0, 0, 60000, 60000)
    with pytest.raises(PictureError, match="60000 x 60000 pixels; the limit is"):
        open_picture(bytes(data))


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\0\0\0\x1cftypavif" + bytes(20), "an AVIF image"),
        (b"\0\0\0\x1cftypheic" + bytes(20), "a HEIC image"),
        (b"\0\0\0\x1cftypisom" + bytes(20), "a video"),
        (b"II*\0" + bytes(20), "a TIFF image"),
        (b"BM" + bytes(40), "a BMP image"),
        (b"%PDF-1.7\n", "a PDF"),
        (b'<?xml version="1.0"?>\n<svg xmlns="a"/>', "an SVG image"),
        (b"\n<!DOCTYPE html><p>", "an HTML page"),
        (b'{"error": "not found"}', "a JSON text"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "an unknown format|of an unknown format"),
        (b"hello", "of an unknown format"),
        (b"\x89PNG\r\n\x1a\n", "of an unknown format, or its beginning is damaged|header"),
        (b"", "empty"),
    ],
)
def test_file_of_another_kind_is_named(data: bytes, kind: str) -> None:
    with pytest.raises(PictureError, match=kind):
        open_picture(data)


def test_formats_that_pillow_knows_and_we_do_not_are_refused() -> None:
    for kind in ("BMP", "TIFF", "PPM", "TGA", "ICO", "PCX", "JPEG2000"):
        with pytest.raises(PictureError, match="Send a PNG, JPEG, WebP or GIF"):
            open_picture(file_of(gradient(), kind))


@pytest.mark.parametrize("name", ["PNG, packed text", "PNG, packed profile"])
def test_metadata_that_unpack_to_megabytes_end_in_a_picture_or_a_reason(name: str) -> None:
    try:
        assert opened(FILES[name]()).size == (9, 9)
    except PictureError as error:
        assert "Decompressed data too large" in str(error)  # noqa: PT017 - either may happen


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((512, 100), (512, 100)),
        ((1024, 512), (512, 256)),
        ((100, 2000), (26, 512)),
        ((1, 9000), (1, 512)),
    ],
)
def test_small_picture_keeps_its_proportions(
    size: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert shrunk(Image.new("RGB", size), 512).size == expected


def test_strip_is_decoded() -> None:
    assert opened(flat_png(100_000, 1)).size == (100_000, 1)
