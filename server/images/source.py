"""ImageSource: where a request says that the bytes of an image are."""

from __future__ import annotations

import re
from dataclasses import dataclass

from server.images.data_url import is_data_url
from server.images.errors import ImageError

SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31}):")


@dataclass(frozen=True)
class ImageSource:
    """A `data:` URL or bare base64, or an http(s) address that has not been checked."""

    text: str
    is_address: bool = False
    is_small: bool = False  # OpenAI's detail "low"


def source_of(url: str, detail: str | None = None) -> ImageSource:
    """Return the source that a URL means: data, bare base64, or an http(s) address.

    Raises ImageError for other schemes, such as `file:`.
    """
    is_small = detail == "low"
    scheme = SCHEME.match(url)
    if scheme is None:
        return ImageSource(url, is_small=is_small)
    if is_data_url(url.lstrip()):
        return ImageSource(url.lstrip(), is_small=is_small)
    if scheme[1].lower() in ("http", "https"):
        return ImageSource(url.strip(), is_address=True, is_small=is_small)
    raise ImageError(f"{scheme[1]}: is not supported; send a data: URL")
