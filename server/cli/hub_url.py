"""The address of a model's page on huggingface.co, pasted where ORG/NAME is expected."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import NamedTuple

from engine.checkpoint.gguf.parts import is_gguf
from engine.errors import ConfigError

HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?/?(?:[?#].*)?"
)
OTHER_PAGES = ("datasets", "spaces", "docs", "papers", "collections", "blog")


class HubAddress(NamedTuple):
    """ORG/NAME from a URL, and the revision and GGUF file if it names them."""

    name: str
    revision: str | None = None
    gguf_file: str | None = None


def from_url(model: str) -> HubAddress:
    """Return what a URL names; any other text is returned unchanged, as the name.

    Raises ConfigError for the URL of something that is not a model.
    """
    match = HUB_URL.fullmatch(model.strip())
    if match is None:
        return HubAddress(model)
    if match["name"].partition("/")[0] in OTHER_PAGES:
        raise ConfigError(f"{model} is not the page of a model; give ORG/NAME.")
    path = PurePosixPath((match["path"] or "").lstrip("/"))
    return HubAddress(match["name"], match["revision"], str(path) if is_gguf(path) else None)
