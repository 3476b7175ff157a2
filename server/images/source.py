"""ImageSource: where a request says that the bytes of an image are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSource:
    """A `data:` URL or bare base64, or an http(s) address that has not been checked."""

    text: str
    is_address: bool = False
    is_small: bool = False  # OpenAI's detail "low"
