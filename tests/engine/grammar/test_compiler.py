"""Grammars over published vocabularies: byte-level BPE, byte fallback, the demo's own."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from engine.errors import RequestRejectedError
from engine.grammar.compiler import MAX_SOURCE_BYTES, GrammarCompiler
from engine.protocol import Grammar
from tests.support.reference_data import LLAMA, located, reference
from tests.support.thorough import is_thorough

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ü": {"enum": ["ä ö", "日本", "👍 x"]},
        "n": {"type": "integer", "minimum": 0, "maximum": 99_999},
    },
    "required": ["name", "ü", "n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# Vocabularies, each with its end token.
VOCABULARIES = [
    ("demo", None),  # token 0
    ("tokenizers/byte-level", "<|endoftext|>"),
    (LLAMA, "</s>"),
    reference("tokenizers/gpt2", "<|endoftext|>"),
    reference("tokenizers/llama2", "</s>"),
    reference("tokenizers/qwen2.5", "<|endoftext|>", marks=[pytest.mark.slow]),
]


def compiler_for(folder: Path) -> tuple[GrammarCompiler, tokenizers.Tokenizer]:
    vocabulary = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    return GrammarCompiler(folder, vocabulary.get_vocab_size() + 64), vocabulary


def grammar(end: int, **kind: Any) -> Grammar:
    return Grammar(json.dumps({"grammars": [kind]}), (end,), "guided_json")


@pytest.mark.parametrize(("name", "end_token"), VOCABULARIES)
def test_random_allowed_tokens_are_valid_json(name: str, end_token: str | None) -> None:
    """Also if the model has more logits than the tokenizer has tokens."""
    folder = model_folder("demo") if name == "demo" else located(name)
    compiler, vocabulary = compiler_for(folder)
    end = vocabulary.token_to_id(end_token) if end_token else 0
    for seed in range(5 if is_thorough() else 2):
        rng = random.Random(seed)
        matcher = compiler.submit(grammar(end, json_schema=SCHEMA)).result()
        tokens: list[int] = []
        while not tokens or tokens[-1] != end:
            words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
            assert allowed.max() < vocabulary.get_vocab_size()
            tokens.append(int(rng.choice(allowed)))
            assert matcher.consume_token(tokens[-1])
        answer = json.loads(vocabulary.decode(tokens[:-1], skip_special_tokens=False))
        jsonschema.validate(answer, SCHEMA)
    compiler.close()


@pytest.mark.parametrize(
    "name",
    [
        "tokenizers/unigram",
        "tokenizers/wordpiece",
        reference("tokenizers/t5"),
        reference("tokenizers/bert-uncased"),
    ],
)
def test_vocabulary_that_llguidance_cannot_read_refuses_the_request(name: str) -> None:
    compiler, _ = compiler_for(located(name))
    with pytest.raises(RequestRejectedError, match=r"llguidance failed: .*decoder"):
        compiler.submit(grammar(1, json_schema=SCHEMA)).result()
    compiler.close()


def test_cache_is_bounded_and_forgets_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.grammar.compiler.CACHED_GRAMMARS", 3)
    compiler, _ = compiler_for(located(LLAMA))
    grammars = [grammar(2, json_schema={**SCHEMA, "title": str(n)}) for n in range(5)]
    for wanted in (*grammars[:3], grammars[0], *grammars[3:]):
        compiler.submit(wanted).result()
    assert list(compiler._cache) == [grammars[0], *grammars[3:]]
    assert compiler._cached_bytes == sum(len(g.source) for g in compiler._cache)
    monkeypatch.setattr("engine.grammar.compiler.CACHED_BYTES", 2 * len(grammars[0].source))
    compiler.submit(grammars[4]).result()
    assert len(compiler._cache) == 2
    compiler.close()


def lark_chain(length: int) -> dict[str, Any]:
    rules = [f"r{number:x}: r{number + 1:x}" for number in range(length)]
    return {"lark_grammar": "\n".join(["start: r0", *rules, f'r{length:x}: "x"'])}


def reference_chain(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"{number:x}": {"$ref": f"#/$defs/{number + 1:x}"} for number in range(length)
    }
    definitions[f"{length:x}"] = {"const": "x"}
    return {"json_schema": {"$ref": "#/$defs/0", "$defs": definitions}}


def nested_objects(length: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        f"{number:x}": {"required": ["a"], "properties": {"a": {"$ref": f"#/$defs/{number + 1:x}"}}}
        for number in range(length)
    }
    definitions[f"{length:x}"] = {"const": "x"}
    return {"json_schema": {"$ref": "#/$defs/0", "$defs": definitions}}


@pytest.mark.parametrize(
    ("kind", "bytes_per_level"),
    [
        (lark_chain, 16),
        (reference_chain, 36),
        pytest.param(nested_objects, 78, marks=pytest.mark.slow),
    ],
)
def test_deepest_grammar_of_the_largest_size_does_not_end_the_process(
    kind: Callable[[int], dict[str, Any]], bytes_per_level: int
) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    deepest = grammar(2, **kind(MAX_SOURCE_BYTES // bytes_per_level))
    assert MAX_SOURCE_BYTES * 0.8 < len(deepest.source) <= MAX_SOURCE_BYTES
    with contextlib.suppress(RequestRejectedError):
        compiler.submit(deepest).result().compute_bitmask()
    compiler.close()


def test_source_above_the_limit_is_refused() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    large = grammar(2, json_schema={"const": "x" * MAX_SOURCE_BYTES})
    with pytest.raises(RequestRejectedError, match=f"the limit is {MAX_SOURCE_BYTES}") as refusal:
        compiler.submit(large).result()
    assert refusal.value.param == "guided_json"
    compiler.close()
