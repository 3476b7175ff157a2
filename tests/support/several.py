"""Three tiny models of different kinds, and the bodies that they answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.sentence_folder import sentence_folder
from tests.support.tiny_bert import tiny_bert
from tests.support.tiny_gguf import write_tiny
from tests.support.tiny_tokenizer import write_tokenizer

CHATS = {"tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}"}


def three_models(folder: Path) -> Path:
    """Write a decoder as GGUF file, and an encoder; `demo-translate` is the third. Return a TOML
    file of all, which gives them small KV caches."""
    write_tiny(folder / "decoder.gguf", more=CHATS)
    bert = tiny_bert(folder / "bert")
    write_tokenizer(bert)
    sentence_folder(bert, folder / "encoder", {"pooling_mode_mean_tokens": True})
    tables = {
        "decoder": {"model": str(folder / "decoder.gguf"), "aliases": ["gpt-4o-mini"]},
        "encoder": {"model": str(folder / "encoder")},
        "translator": {"model": "demo-translate"},
    }
    lines = []
    for name, table in tables.items():
        lines.append(f"[models.{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
        lines += ["max-num-seqs = 8", ""]
    file = folder / "models.toml"
    file.write_text("\n".join(lines))
    return file


def asked(kind: str, number: int) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of one of many requests for a kind of model."""
    if kind == "encoder":
        return "/v1/embeddings", {"model": "encoder", "input": [f"text {number % 7}", "b"]}
    if kind == "translator":
        body = {"model": "translator", "prompt": f"hello {number % 7}", "temperature": 0}
        return "/v1/completions", body | {"max_tokens": 8}
    body = {
        "model": ("decoder", "gpt-4o-mini")[number % 2],
        "messages": [{"role": "user", "content": f"hello {number % 7}"}],
        "max_tokens": 5 + number % 9,
        "min_tokens": 5 + number % 9,
        "temperature": 0,
        "stream": number % 3 > 0,
    }
    return "/v1/chat/completions", body
