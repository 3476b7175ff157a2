"""Measure in this process how long grammars take to compile and their masks to compute."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from loadtest.errors import BenchError
from loadtest.program import read_lines
from server.text.wanted_grammar import JSON_OPTIONS

TOKENS = 64  # of an answer
TYPES = {"dict": "object", "float": "number", "tuple": "array", "bool": "boolean"}


@dataclass(frozen=True)
class GrammarTimes:
    """Durations in seconds: of each schema's compilation, and of each token's mask."""

    compile: list[float]
    mask: list[float]
    refused: int


def read_schemas(files: Iterable[Path]) -> list[tuple[str, Any]]:
    """Return the named schemas of JSON lines: of JSONSchemaBench, or of BFCL's functions."""
    found = []
    for file in files:
        for row in read_lines(file):
            if "schema" in row:
                found.append((row.get("name", file.name), row["schema"]))
            for function in row.get("function", ()):
                found.append((function["name"], as_json_schema(function["parameters"])))
    return found


def as_json_schema(node: Any) -> Any:
    """BFCL names types as Python does."""
    if isinstance(node, list):
        return [as_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    made = {key: as_json_schema(value) for key, value in node.items()}
    if isinstance(node.get("type"), str):
        made["type"] = TYPES.get(node["type"], node["type"])
    if made.get("type") == "any":
        del made["type"]
    return {key: value for key, value in made.items() if key not in ("optional", "default")}


def measure(folder: Path, end_token: int, schemas: Iterable[Any]) -> GrammarTimes:
    """Compile each schema and follow it along random allowed tokens, all in this process.

    Schemas that are no objects are refused, as the server does. `folder` has the
    vocabulary's tokenizer.json.
    """
    if not (folder / "tokenizer.json").is_file():
        raise BenchError(f"{folder} has no tokenizer.json.")
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocab_size = vocabulary.get_vocab_size()
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=[end_token])
    times = GrammarTimes([], [], 0)
    refused = 0
    for number, schema in enumerate(schemas):
        if not isinstance(schema, dict):
            refused += 1
            continue
        source = _source(schema)
        began = time.perf_counter()
        matcher = LLMatcher(tokenizer, source, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()
        times.compile.append(time.perf_counter() - began)
        if matcher.is_error():
            refused += 1
            continue
        times.mask.extend(_mask_times(matcher, vocab_size, end_token, random.Random(number)))
    return GrammarTimes(times.compile, times.mask, refused)


def _source(schema: dict[str, Any]) -> str:
    source = {"grammars": [{"json_schema": {"x-guidance": JSON_OPTIONS, **schema}}]}
    return orjson.dumps(source).decode()


def _mask_times(matcher: Any, vocab_size: int, end_token: int, rng: random.Random) -> list[float]:
    from llguidance.numpy import fill_next_token_bitmask

    words = np.zeros((1, -(-vocab_size // 32)), np.int32)
    times = []
    for _ in range(TOKENS):
        began = time.perf_counter()
        fill_next_token_bitmask(matcher, words, 0)
        times.append(time.perf_counter() - began)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        token = int(rng.choice(np.flatnonzero(bits)))
        if token == end_token or not matcher.consume_token(token):
            break
    return times
