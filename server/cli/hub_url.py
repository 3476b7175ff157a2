"""The address of a model's page on huggingface.co, pasted where ORG/NAME is expected."""

from __future__ import annotations

import re

from engine.checkpoint.folder import NO_GGUF
from engine.errors import ConfigError

HUB_URL = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/"
    r"(?P<name>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?/?(?:[?#].*)?"
)
OTHER_PAGES = ("datasets", "spaces", "docs", "papers", "collections", "blog")


def from_url(model: str) -> tuple[str, str | None]:
    """Return ORG/NAME and the revision, if any, of a URL; any other text is returned unchanged.

    Raises ConfigError for the URL of a GGUF file or of something that is not a model.
    """
    match = HUB_URL.fullmatch(model.strip())
    if match is None:
        return model, None
    if (match["path"] or "").lower().endswith(".gguf"):
        raise ConfigError(f"{model}: {NO_GGUF}")
    if match["name"].partition("/")[0] in OTHER_PAGES:
        raise ConfigError(f"{model} is not the page of a model; give ORG/NAME.")
    return match["name"], match["revision"]
