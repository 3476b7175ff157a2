"""Our own small pictures as files of every kind, and damage to files that a seed decides."""

from __future__ import annotations

import io
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

from PIL import Image

WIDTH, HEIGHT = 61, 47  # no multiple of a block of JPEG, WebP or Adam7
ORIENTATION = 0x0112


def gradient(mode: str = "RGB", width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """Return a picture without symmetry: red grows to the right, green downwards."""
    ramp = Image.linear_gradient("L")  # black above, white below
    down = ramp.resize((width, height))
    right = ramp.rotate(90).resize((width, height))
    corner = Image.new("L", (width, height))
    corner.paste(255, (0, 0, max(1, width // 4), max(1, height // 3)))
    colours = Image.merge("RGB", (right, down, corner))
    if mode in ("RGBA", "LA"):
        colours = colours.convert(mode)
        colours.putalpha(down)
        return colours
    if mode == "I;16":
        grey = colours.convert("L")
        return Image.frombytes(mode, grey.size, b"".join(bytes((v, v)) for v in grey.tobytes()))
    if mode == "P":
        return colours.quantize(32)
    return colours.convert(mode)


def file_of(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def turned(kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return file_of(gradient(), kind, exif=exif)


def animated(kind: str) -> bytes:
    """Return a file whose first frame is the gradient, with two others behind it."""
    others = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "blue")]
    options = {"lossless": True} if kind == "WEBP" else {}
    return file_of(gradient(), kind, save_all=True, append_images=others, duration=50, **options)


def with_thumbnail() -> bytes:
    """Return a JPEG with a second JPEG inside its EXIF data."""
    small = file_of(gradient(width=16, height=12), "JPEG")
    segment = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + small
    whole = file_of(gradient(), "JPEG")
    header = b"\xff\xe1" + struct.pack(">H", len(segment) + 2) + segment
    return whole[:2] + header + whole[2:]


def chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of PNG."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, data: bytes, *chunks: bytes) -> bytes:
    """Return an RGB PNG with the compressed `data`, which may be of another size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    parts = (header, *chunks, chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def flat_png(width: int, height: int, *chunks: bytes) -> bytes:
    """Return a black PNG that takes about a thousandth of its pixels' bytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    packed = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    return png(width, height, packed, *chunks)


def resized_header(kind: str, width: int, height: int) -> bytes:
    """Return a file of `kind` whose header claims another size."""
    match kind:
        case "PNG":
            return png(width, height, zlib.compress(bytes(100)))
        case "GIF":
            data = bytearray(file_of(gradient("P"), "GIF"))
            data[6:10] = struct.pack("<HH", width, height)
        case "JPEG":
            data = bytearray(file_of(gradient(), "JPEG"))
            at = data.index(b"\xff\xc0") + 5
            data[at : at + 4] = struct.pack(">HH", height, width)
        case "WebP lossy":
            data = bytearray(file_of(gradient(), "WEBP"))
            data[26:30] = struct.pack("<HH", width, height)
        case "WebP lossless":
            data = bytearray(file_of(gradient(), "WEBP", lossless=True))
            bits = int.from_bytes(data[21:25], "little") & 0xF0000000
            data[21:25] = (bits | (width - 1) | (height - 1) << 14).to_bytes(4, "little")
        case "WebP extended":
            data = bytearray(animated("WEBP"))
            data[24:30] = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return bytes(data)


FILES: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: file_of(gradient(), "PNG"),
    "PNG, alpha": lambda: file_of(gradient("RGBA"), "PNG"),
    "PNG, grey and alpha": lambda: file_of(gradient("LA"), "PNG"),
    "PNG, palette": lambda: file_of(gradient("P"), "PNG"),
    "PNG, transparent palette": lambda: file_of(
        gradient("P"), "PNG", transparency=bytes(range(32))
    ),
    "PNG, 16 bits": lambda: file_of(gradient("I;16"), "PNG"),
    "PNG, 1 bit": lambda: file_of(gradient("1"), "PNG"),
    "PNG, animated": lambda: animated("PNG"),
    "PNG, metadata": lambda: flat_png(9, 9, *(chunk(b"tEXt", b"a\0" + b"b" * 900),) * 200),
    "PNG, packed text": lambda: flat_png(
        9, 9, chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(9 << 20)))
    ),
    "PNG, packed profile": lambda: flat_png(
        9, 9, chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(9 << 20)))
    ),
    "PNG, flat": lambda: flat_png(6000, 6000),
    "PNG, strip": lambda: flat_png(1_000_000, 2),
    "JPEG": lambda: file_of(gradient(), "JPEG"),
    "JPEG, progressive": lambda: file_of(gradient(), "JPEG", progressive=True),
    "JPEG, grey": lambda: file_of(gradient("L"), "JPEG"),
    "JPEG, CMYK": lambda: file_of(gradient("CMYK"), "JPEG"),
    "JPEG, turned": lambda: turned("JPEG", 6),
    "JPEG, thumbnail": with_thumbnail,
    "JPEG, metadata": lambda: file_of(gradient(), "JPEG", exif=b"Exif\0\0" + bytes(65000)),
    "JPEG, two pictures": lambda: file_of(
        gradient(), "MPO", save_all=True, append_images=[Image.new("RGB", (9, 9))]
    ),
    "WebP": lambda: file_of(gradient(), "WEBP"),
    "WebP, lossless": lambda: file_of(gradient(), "WEBP", lossless=True),
    "WebP, alpha": lambda: file_of(gradient("RGBA"), "WEBP"),
    "WebP, animated": lambda: animated("WEBP"),
    "WebP, turned": lambda: turned("WEBP", 3),
    "GIF": lambda: file_of(gradient("P"), "GIF"),
    "GIF, transparent": lambda: file_of(gradient("P"), "GIF", transparency=3),
    "GIF, animated": lambda: animated("GIF"),
}


def damaged(data: bytes, seed: int) -> bytes:
    """Return `data` with damage of one kind, which `seed` chooses, as it does the places."""
    chosen = random.Random(seed)
    file = bytearray(data)
    places = [chosen.randrange(len(file)) for _ in range(1 + chosen.randrange(8))]
    match seed % 6:
        case 0:  # single bits
            for at in places:
                file[at] ^= 1 << chosen.randrange(8)
        case 1:  # bytes of the header, which has sizes and types
            for at in places:
                file[at % 64 % len(file)] = chosen.randrange(256)
        case 2:
            del file[places[0] :]
        case 3:  # a part is missing
            del file[min(places) : min(places) + 1 + chosen.randrange(64)]
        case 4:  # a part comes twice
            start = min(places)
            file[start:start] = file[start : start + 1 + chosen.randrange(256)]
        case 5:
            for at in places:
                file[at : at + 4] = chosen.choice(
                    (b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff")
                )
    return resealed(bytes(file)) if seed % 2 else bytes(file)


def resealed(data: bytes) -> bytes:
    """Return a PNG whose chunks have right checksums, so that damage inside them is decoded."""
    if data[:4] != b"\x89PNG":
        return data
    file, at = bytearray(data), 8
    while at + 12 <= len(file):
        end = at + 8 + int.from_bytes(file[at : at + 4], "big")
        if end + 4 > len(file):
            break
        file[end : end + 4] = struct.pack(">I", zlib.crc32(file[at + 4 : end]))
        at = end + 4
    return bytes(file)
