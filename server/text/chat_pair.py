"""ChatPair: two texts as messages of the roles query and document, by a chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.text.chat_template import ChatTemplate, TemplateError

ROLES = ("query", "document")
# Texts in place of the query's and the document's. Templates that trim them are refused.
MARKS = (" \ue000q\ue001 ", " \ue000d\ue001 ")


@dataclass(frozen=True)
class ChatPair:
    """The text around two texts. If it `is_swapped`, the document comes first."""

    before: str
    between: str
    after: str
    is_swapped: bool = False

    def text(self, query: str, document: str) -> str:
        first, second = (document, query) if self.is_swapped else (query, document)
        return f"{self.before}{first}{self.between}{second}{self.after}"


def read_chat_pair(
    template: ChatTemplate, folder: Path, prompt: str, options: Mapping[str, Any]
) -> ChatPair:
    """Return the text that a template writes around two texts, with a prompt as system message.

    `options` are variables of the template.
    Raises ConfigError if it does not write each text once and unchanged.
    """
    for in_parts in (False, True):
        text = _rendered(template, prompt, options, in_parts=in_parts)
        if [text.count(mark) for mark in MARKS] == [1, 1]:
            first, second = sorted(MARKS, key=text.index)
            before, rest = text.split(first)
            between, after = rest.split(second)
            return ChatPair(before, between, after, is_swapped=first == MARKS[1])
    raise ConfigError(
        f"The chat template in {folder} does not write the messages of the roles query and "
        "document unchanged and once each, so it cannot join pairs of texts."
    )


def _rendered(
    template: ChatTemplate, prompt: str, options: Mapping[str, Any], *, in_parts: bool
) -> str:
    """Return the text of a pair of marks, or "" if the template fails."""
    said = [("system", prompt)] if prompt else []
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}
        for role, text in [*said, *zip(ROLES, MARKS, strict=True)]
    ]
    try:
        return template.render(messages, **{"add_generation_prompt": False, **options})
    except TemplateError:
        return ""
