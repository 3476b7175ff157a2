"""Prompts of a comparison: from a file of lines to the token ids of each model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.text.chat_template import TemplateError
from server.text.load_template import load_template
from server.text.load_tokenizer import load_tokenizer

Messages = list[dict[str, Any]]
MOST = 1000  # prompts in a file
FORMS = 'a text, or {"prompt": "…"}, or {"messages": [{"role": "user", "content": "…"}]}'


def read_prompts(file: Path) -> list[str | Messages]:
    """Return the prompts of `file`, one a line; empty lines are skipped. Raises ConfigError."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"Cannot read the prompts in {file}: {error}") from None
    found = [
        _prompt(line, f"{file}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not 0 < len(found) <= MOST:
        raise ConfigError(f"{file} has {len(found)} prompts; 1 to {MOST} are needed, one a line.")
    return found


def _prompt(line: str, where: str) -> str | Messages:
    if not line.lstrip().startswith("{"):
        return line
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON ({error}); a line is {FORMS}.") from None
    prompt, messages = found.get("prompt"), found.get("messages")
    if isinstance(prompt, str) and messages is None:
        return prompt
    is_chat = isinstance(messages, list) and messages and all(map(_is_message, messages))
    if prompt is None and is_chat:
        return list(messages)
    raise ConfigError(f"{where}: a line is {FORMS}.")


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and {"role", "content"} <= found.keys()


def shown(prompt: str | Messages) -> str:
    """Return the text that stands for a prompt: that of its last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


class Reader:
    """Turns prompts into the token ids of one model. A text is a chat if the model has chats."""

    def __init__(self, name: str, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)
        self._name = name
        self._template = load_template(folder, None)

    def ids(self, prompt: str | Messages) -> list[int]:
        """Return the token ids of a prompt. Raises ConfigError."""
        if self._template is None:
            if not isinstance(prompt, str):
                raise ConfigError(f"{self._name} has no chat template, so it reads no messages.")
            return self.tokenizer.encode(prompt) or list(self.tokenizer.document_start)
        messages = prompt
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        try:
            text = self._template.render(messages)
        except TemplateError as error:
            raise ConfigError(f"{self._name}'s chat template refuses a prompt: {error}") from None
        return self.tokenizer.encode(text, add_special_tokens=False)

    def close(self) -> None:
        if self._template is not None:
            self._template.close()


def have_same_tokens(readers: Sequence[Reader]) -> bool:
    """Whether every token id means the same to all models."""
    first, *others = [reader.tokenizer for reader in readers]
    ids = range(first.vocab_size)
    for other in others:
        if other.vocab_size != first.vocab_size:
            return False
        if any(first.vocabulary_entry(one) != other.vocabulary_entry(one) for one in ids):
            return False
    return True
