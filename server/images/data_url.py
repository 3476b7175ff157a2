"""Read the bytes of an image from a `data:` URL (RFC 2397), or from bare base64.

Clients write such URLs by hand, so all that is unambiguous is accepted: any MIME type or none, no
`;base64`, line breaks, percent-encoding, the URL-safe alphabet, and missing padding. transformers
(`image_utils.load_image`) accepts fewer, but it skips characters that are not base64. They are
refused here, because a picture with a hole would be decoded.
"""

from __future__ import annotations

import binascii
import re
from urllib.parse import unquote

from server.images.errors import ImageError

MAX_IMAGE_BYTES = 20 << 20  # of an encoded image: a PNG of 3000x2000 noise has 18 MB
SCHEME = re.compile(r"data:", re.IGNORECASE)
NOT_BASE64 = re.compile(r"[^A-Za-z0-9+/]")
STANDARD = str.maketrans("-_", "+/", " \t\r\n\f\v")
MAX_HEADER = 1024  # characters before the comma: a MIME type and its parameters


def is_data_url(text: str) -> bool:
    return SCHEME.match(text) is not None


def image_bytes(text: str) -> bytes:
    """Return the bytes in a `data:` URL or bare base64. Raises ImageError."""
    if is_data_url(text):
        return base64_bytes(_payload(text))
    if "." in text:
        raise ImageError(
            f"{text[:40]!r} is neither a data: URL nor base64. Paths of files are not read; send "
            "the image's bytes in a data: URL."
        )
    return base64_bytes(text)


def base64_bytes(text: str) -> bytes:
    """Return the bytes that `text` encodes. Raises ImageError, which names the first bad place."""
    if "%" in text:
        text = unquote(text, errors="replace")
    digits = text.translate(STANDARD).rstrip("=")
    if not digits:
        raise ImageError("The image is empty: there is no base64 text.")
    if len(digits) * 3 // 4 > MAX_IMAGE_BYTES:
        raise ImageError(
            f"The image has {len(digits) * 3 // 4} bytes; the limit is {MAX_IMAGE_BYTES}."
        )
    if wrong := NOT_BASE64.search(digits):
        where = f"the character {wrong[0]!r} after {wrong.start()} others is not base64"
        raise ImageError(f"The image is not valid base64: {where}.")
    missing = -len(digits) % 4
    if missing == 3:  # one digit alone has six bits
        raise ImageError(
            f"The image is not valid base64: {len(digits)} characters encode no whole number of "
            "bytes, so it may have been cut."
        )
    return binascii.a2b_base64(digits + "=" * missing)


def _payload(url: str) -> str:
    """Return what follows the comma. A URL without one has a header and no data."""
    header, comma, payload = url.partition(",")
    if not comma:
        raise ImageError("The data: URL has no comma, so it has no data after its MIME type.")
    if len(header) > MAX_HEADER:
        raise ImageError(
            f"The data: URL has {len(header)} characters before its comma; the limit is "
            f"{MAX_HEADER}."
        )
    return payload
