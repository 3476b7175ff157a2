"""The chat format of the demo model: ChatML with tools and thoughts, defined by its template.

No message of the training text has a special token.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

Message = dict[str, Any]

FOLDER = Path(__file__).parents[2] / "demo" / "model"
START = "<|im_start|>"
END = "<|im_end|>"
STOP = "<|endoftext|>"
THOUGHT_END = "</think>"
SPECIAL_TOKENS = (STOP, START, END)
# Splits a rendered conversation; every second piece is text of the assistant.
SPOKEN = re.compile(rf"(?<={re.escape(START)}assistant\n)(.*?{re.escape(END)})", re.DOTALL)
# A key of a JSON object, and the marks before it: all that a grammar can force.
KEY = re.compile(r'(?:(?<!\}),|[\[{ ])*"(?:[^"\\]|\\.)*":')


def dump(value: Any) -> str:
    """Return JSON as the template's `tojson` writes it: not escaped to ASCII, keys not sorted."""
    return json.dumps(value, ensure_ascii=False)


@cache
def template(folder: Path = FOLDER) -> Template:
    environment = Environment()
    environment.filters["tojson"] = dump
    source = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return environment.from_string(source)


def render_text(
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    prompt: bool = False,
    effort: str = "none",
) -> str:
    """Render a conversation. `prompt` adds the header of the assistant's next message."""
    return template().render(
        messages=messages, tools=tools, add_generation_prompt=prompt, reasoning_effort=effort
    )
