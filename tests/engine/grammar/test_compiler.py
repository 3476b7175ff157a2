"""Grammars over published vocabularies: byte-level BPE, byte fallback, the demo's own."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import tokenizers

from engine.checkpoint.folder import model_folder
from engine.grammar import compiler as compiling
from engine.grammar import limits
from engine.grammar.answers import FollowedAnswer
from engine.grammar.compiler import GrammarCompiler, GrammarProcess
from engine.grammar.limits import MAX_SOURCE_BYTES
from engine.grammar.messages import Ended
from engine.protocol.generate import GenerateRequest, Grammar, SamplingParams
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


def opened(compiler: GrammarCompiler, wanted: Grammar, number: int = 1) -> FollowedAnswer:
    """Compile a grammar and begin an answer; return it once its first mask is known."""
    request = GenerateRequest(number, [], SamplingParams(1, grammar=wanted), 0.0)
    answer = FollowedAnswer(request, compiler.open("", wanted, number))
    return settled(compiler, answer)


def settled(compiler: GrammarCompiler, answer: FollowedAnswer) -> FollowedAnswer:
    """Wait for the mask behind the last token, or for a refusal."""
    while answer.allowed is None and answer.refusal is None:
        compiler.poll(1.0)
        for message in compiler.allowed:
            if message.answer == answer.request.id:
                answer.take(message)
        compiler.allowed = []
    return answer


def refusal_of(compiler: GrammarCompiler, wanted: Grammar) -> str:
    refusal = opened(compiler, wanted).refusal
    assert refusal is not None
    assert refusal.param == "guided_json"
    return refusal.message


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
        followed = opened(compiler, grammar(end, json_schema=SCHEMA), seed)
        tokens: list[int] = []
        while not tokens or tokens[-1] != end:
            words = np.frombuffer(settled(compiler, followed).mask, np.uint8)
            allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
            assert allowed.max() < vocabulary.get_vocab_size()
            tokens.append(int(rng.choice(allowed)))
            followed.accept(len(tokens) - 1, tokens[-1])
            followed.sync()
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
    refusal = refusal_of(compiler, grammar(1, json_schema=SCHEMA))
    assert re.search(r"llguidance failed: .*decoder", refusal)
    compiler.close()


def held(compiler: GrammarCompiler) -> list[GrammarProcess]:
    return [process for process in compiler._processes.values() if not process.kill_reason]


def test_idle_processes_are_few_and_the_oldest_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "IDLE_PROCESSES", 2)
    compiler, _ = compiler_for(located(LLAMA))
    grammars = [grammar(2, json_schema={**SCHEMA, "title": str(n)}) for n in range(3)]
    for number, wanted in enumerate((*grammars[:2], grammars[0], grammars[2])):
        answer = opened(compiler, wanted, number)
        compiler.close_answer(answer.process, number)
    assert [process.grammar for process in held(compiler)] == [grammars[0], grammars[2]]
    compiler.close()


def test_memory_of_a_grammar_is_what_its_process_holds() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    small = opened(compiler, grammar(2, json_schema=SCHEMA), 1)
    large = opened(compiler, grammar(2, json_schema={"const": "x" * 40_000}), 2)
    assert 2 << 20 < small.process.num_bytes < 12 << 20
    assert large.process.num_bytes > small.process.num_bytes + (6 << 20)
    both = small.process.num_bytes + large.process.num_bytes
    assert compiler.num_bytes == both + compiler._forker_bytes
    compiler.close()


@pytest.mark.parametrize("is_nested", [False, True])
def test_grammar_that_takes_too_much_memory_is_refused_with_the_limit(is_nested: bool) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    schema: dict[str, Any] = {"const": "x" * 510_000}
    if is_nested:
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        schema["x-guidance"] = {"whitespace_flexible": False}
    wanted = grammar(2, json_schema=schema)
    answer = opened(compiler, wanted)
    for position in range(12):
        if answer.refusal is None:
            words = np.frombuffer(answer.mask, np.uint8)
            allowed = np.flatnonzero(np.unpackbits(words, bitorder="little"))
            answer.accept(position, int(allowed[-1]))
            answer.sync()
            settled(compiler, answer)
    assert answer.refusal is not None
    assert re.search(r"more than (64 MiB of memory|[0-9.]+ s)", answer.refusal.message)
    compiler.close()


def process_of(compiler: GrammarCompiler, tenant: str, number: int) -> GrammarProcess:
    wanted = grammar(2, json_schema={**SCHEMA, "title": f"{tenant} {number}"})
    return compiler.open(tenant, wanted, 100 * number + len(tenant))


def is_quiet(process: GrammarProcess) -> bool:
    """Return whether a process is compiled and has answered all messages."""
    assert process.connection is not None
    return process.is_compiled and not process.connection.num_awaited


def test_tenants_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """One grammar of a tenant compiles at a time, and the other tenant's does not wait."""
    compiler, _ = compiler_for(located(LLAMA))
    many = [process_of(compiler, "a", number) for number in range(3)]
    other = process_of(compiler, "bb", 0)
    assert [process.connection is not None for process in (*many, other)] == [
        True,
        False,
        False,
        True,
    ]
    while not all(process.is_compiled for process in (*many, other)):
        compiler.poll(1.0)
        compiling_now = [p for p in many if p.connection is not None and not p.is_compiled]
        assert len(compiling_now) <= 1
    monkeypatch.setattr(limits, "MOST_COMPILING", 1)
    rest = [process_of(compiler, "a", number) for number in range(3, 5)]
    last = process_of(compiler, "bb", 1)
    while not all(process.is_compiled for process in (*rest, last)):
        compiler.poll(1.0)
        assert last.connection is not None or rest[1].connection is None, "it is not a's turn"
    compiler.close()


def test_tenant_over_its_share_loses_its_largest_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    first, second, other = (
        process_of(compiler, *given) for given in (("a", 0), ("a", 1), ("bb", 0))
    )
    while second.connection is None or not all(map(is_quiet, (first, second, other))):
        compiler.poll(1.0)
    second.num_bytes = limits.TENANT_BYTES
    other.num_bytes = limits.TENANT_BYTES
    while second.refusal is None:
        compiler.poll(1.0)
    assert "grammars of one API key took more than 192 MiB" in second.refusal.message
    assert (first.refusal, other.refusal) == (None, None)
    assert held(compiler) == [first, other]
    compiler.close()


def test_grammar_waits_for_memory_until_an_idle_one_has_ended() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    first = process_of(compiler, "a", 0)
    while not is_quiet(first):
        compiler.poll(1.0)
    first.num_bytes = limits.TENANT_BYTES
    second = process_of(compiler, "a", 1)
    assert second.connection is None
    compiler.close_answer(first, 1)
    while not second.is_compiled:
        compiler.poll(1.0)
    assert first.refusal is not None
    compiler.close()


def test_aborted_compilation_ends_its_process() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    process = process_of(compiler, "a", 0)
    queued = process_of(compiler, "a", 1)
    compiler.close_answer(queued, 101)
    compiler.close_answer(process, 1)
    assert not held(compiler)
    while compiler.is_busy:
        compiler.poll(1.0)
    assert queued.connection is None
    compiler.close()


def test_grammar_without_an_answer_in_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    process = process_of(compiler, "a", 0)
    monkeypatch.setattr(limits, "CALL_S", 0.0)
    answer = 1
    while process.refusal is None:  # the answer may come before the look at the clock
        compiler.open("a", process.grammar, answer)
        compiler.poll(0.0)
        answer += 1
    assert "it took more than 0 s" in process.refusal.message
    compiler.close()


def test_end_of_the_forker_ends_grammars_and_the_next_one_starts_it() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    process = process_of(compiler, "a", 0)
    assert compiler._forker is not None
    compiler._forker._process.kill()
    while process.refusal is None:
        compiler.poll(1.0)
    assert opened(compiler, grammar(2, json_schema=SCHEMA)).refusal is None
    compiler.close()


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (limits.NO_MEMORY_STATUS, "64 MiB of memory"),
        (-6, "64 MiB of memory"),
        (-11, "a stack of 32 MiB"),
        (-27, "2 s of CPU time"),
        (-4, "status -4"),
    ],
)
def test_end_of_a_process_is_named(status: int, reason: str) -> None:
    compiler, _ = compiler_for(located(LLAMA))
    process = process_of(compiler, "a", 0)
    compiler._take_end(Ended(process.number, status))
    assert process.refusal is not None
    assert reason in process.refusal.message
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
    opened(compiler, deepest)
    assert opened(compiler, grammar(2, json_schema=SCHEMA), 2).refusal is None
    compiler.close()


def test_source_above_the_limit_is_refused() -> None:
    compiler, _ = compiler_for(located(LLAMA))
    large = grammar(2, json_schema={"const": "x" * MAX_SOURCE_BYTES})
    assert f"the limit is {MAX_SOURCE_BYTES}" in refusal_of(compiler, large)
    compiler.close()
