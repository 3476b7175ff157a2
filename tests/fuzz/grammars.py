"""The target of grammars: schemas, expressions, choices, Lark, GBNF and structural tags."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.grammar.answers import FollowedAnswer
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.limits import ALL_BYTES
from engine.protocol.generate import GenerateRequest, Grammar, SamplingParams
from server.grammar.llguidance_grammar import grammar_of
from server.http.errors import ApiError
from server.text.wanted_grammar import WantedGrammar
from tests.fuzz.mutate import MAX_VALUES, has_more_values, mutate_bytes, mutate_json
from tests.fuzz.target import MAX_SECONDS, Check, Target

END = 257
TOKENS = 3  # that are followed
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 9, "pattern": "^[a-z]+$"},
        "b": {"type": ["integer", "null"], "minimum": 0, "multipleOf": 3},
        "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 4},
        "e": {"anyOf": [{"const": 1}, {"enum": ["x", "é"]}]},
        "f": {"type": "string", "format": "date-time"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"d": {"type": "object", "properties": {"e": {"$ref": "#/$defs/d"}}}},
}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
SEEDS: list[tuple[str, Any]] = [
    ("json_schema", SCHEMA),
    ("json_schema", {"type": "object"}),
    ("regex", r"(a|b)*[0-9]{2,5}\w+(é|\.)?"),
    ("regex", r"((a{1,50}){1,50}b)+"),
    ("choice", ["yes", "no", "é", "yes, but"]),
    ("lark", 'start: item+\nitem: /[a-c]+/ | "(" item ")"\n'),
    ("grammar", 'root ::= item+\nitem ::= [a-c]+ | "(" item ")"\n'),
    ("structural_tag", TAG),
    ("structural_tag", {"type": "structural_tag", "format": {"type": "json_schema",
                                                             "json_schema": SCHEMA}}),
]  # fmt: skip
WORDS = [
    *(b"(", b")", b"[", b"]", b"{1,9}", b"{9999}", b"*", b"+", b"?", b"|", b".", b"\\w", b"\\p{L}"),
    *(b"(?=a)", b"(?i)", b"::=", b": ", b"/", b'"', b"\n", b"start", b"root", b"%ignore ", b"&"),
    b"[^\\x00]",
]


def seeds() -> list[bytes]:
    return [json.dumps(each).encode() for each in SEEDS]


def mutate(random: Random, data: bytes) -> bytes:
    kind, value = json.loads(data)
    if isinstance(value, str) and random.random() < 0.95:
        changed = mutate_bytes(random, value.encode("utf-8", "replace"), WORDS)
        value = changed.decode("utf-8", "replace")
    else:
        changed_value = mutate_json(random, value)
        value = value if has_more_values(changed_value, MAX_VALUES) else changed_value
    try:
        return json.dumps([kind, value]).encode("utf-8", "replace")
    except (ValueError, RecursionError):  # too deep, or an integer of too many digits
        return data


def has_type_of_request(kind: str, value: Any) -> bool:
    """Whether the schema of a request admits the value."""
    match kind:
        case "json_schema" | "structural_tag":
            return isinstance(value, dict)
        case "choice":
            is_list = isinstance(value, list) and len(value) > 0
            return is_list and all(isinstance(each, str) for each in value)
    return isinstance(value, str)


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Check]:
    """Each grammar gives masks or a refusal, and the grammar of another tenant works on."""
    from tests.server.conftest import byte_tokenizer

    tokenizer = byte_tokenizer()
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    compiler = GrammarCompiler(folder, size)
    facts: Any = SimpleNamespace(eos_token_ids=[END], added_ids={})
    other = grammar_of(facts, WantedGrammar("regex", "regex", "[ab]+"))
    count = 0

    def begin(tenant: str, wanted: Grammar) -> FollowedAnswer:
        nonlocal count
        count += 1
        request = GenerateRequest(count, [], SamplingParams(1, grammar=wanted), 0.0)
        return FollowedAnswer(request, compiler.open(tenant, wanted, count))

    def settle(answer: FollowedAnswer) -> None:
        until = time.monotonic() + MAX_SECONDS
        while answer.allowed is None and answer.refusal is None:
            assert time.monotonic() < until, "no mask and no refusal"
            compiler.poll(1.0)
            for message in compiler.allowed:
                if message.answer == answer.request.id:
                    answer.take(message)
            compiler.allowed = []

    def follow(answer: FollowedAnswer, random: Random) -> None:
        for position in range(TOKENS):
            settle(answer)
            if answer.refusal is not None:
                return
            allowed = np.flatnonzero(
                np.unpackbits(np.frombuffer(answer.mask, np.uint8), bitorder="little")
            )
            assert len(allowed)
            assert allowed.max() < size
            token = int(random.choice(allowed))
            if token == END:
                return
            answer.accept(position, token)
            answer.sync()

    async def check(data: bytes) -> None:
        kind, value = json.loads(data)
        if b"\\ud" in data or not has_type_of_request(kind, value):
            return  # the body of a request has no lone surrogates
        with contextlib.suppress(ApiError):
            wanted = grammar_of(facts, WantedGrammar("guided", kind, value))
            answer = begin("", wanted)
            follow(answer, Random(data))
            compiler.close_answer(answer.process, answer.request.id)
        answer = begin("other", other)
        follow(answer, Random(data))
        assert answer.refusal is None, answer.refusal
        compiler.close_answer(answer.process, answer.request.id)
        assert compiler.num_bytes <= ALL_BYTES

    yield check
    compiler.close()


TARGET = Target("grammar", seeds, mutate, opened)
