"""JSON schemas, ours and published: random weights follow each, or it is refused with a reason."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from loadtest.micro.grammar_times import read_schemas
from tests.engine.grammar.test_matchers import TOKENIZER, constrained, text
from tests.support.driver import Driver, tiny_llama
from tests.support.reference_data import located, reference

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
# JSONSchemaBench's hard sets, and the parameters of BFCL's functions.
PUBLISHED = (
    "handwritten.jsonl", "synthesized100.jsonl", "simple_python.jsonl", "parallel.jsonl",
)  # fmt: skip
ANSWERS = 3
LONGEST = 4000  # tokens, and each is a byte
# Random weights hardly ever end a text or a list. With this bias they do.
ENDING = tuple((TOKENIZER.token_to_id(char), 3.0) for char in '"]}')
REASON = re.compile(
    r"Unimplemented keys: \[\"\w|Unsatisfiable schema|regex|not disjoint|oneOf|intersection|format"
    r"|\$ref|Pointer|multipleOf|type|enum|const|too (?:large|complex|many)|items"
)


@pytest.mark.parametrize(
    ("folder", "files", "least"),
    [
        ("own-structured-output", ("schemas.jsonl", "functions.jsonl"), 90),
        reference("structured-output", PUBLISHED, 300),
    ],
)
def test_answers_follow_each_schema_or_it_is_refused_by_its_keyword(
    tmp_path: Path, folder: str, files: tuple[str, ...], least: int
) -> None:
    schemas = read_schemas(located(folder) / name for name in files)
    model = tiny_llama(tmp_path / "tiny", max_position_embeddings=LONGEST + 8)
    TOKENIZER.save(str(model / "tokenizer.json"))
    driver = Driver(model, max_num_seqs=64)
    asked: dict[int, tuple[str, Any]] = {}
    for name, schema in schemas:
        if not isinstance(schema, dict):
            continue  # the server refuses it
        for seed in range(ANSWERS):
            params = constrained(seed, schema, logit_bias=ENDING)
            asked[driver.submit([1, 2, 3], LONGEST, **params)] = name, schema
    driver.run(max_turns=10**6)
    refused: dict[str, str] = {}
    followed, cut = 0, 0
    for request_id, (name, schema) in asked.items():
        if request_id in driver.rejected:
            refused[name] = driver.rejected[request_id].message
        elif driver.finish(request_id) == "length":
            cut += 1
        else:
            answer = json.loads(text(driver, request_id))
            kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
            errors = list(kind(schema).iter_errors(answer))
            assert not errors, (name, schema, answer, errors[:1])
            followed += 1
    print(f"{len(asked)} requests: {followed} follow, {cut} cut, {len(refused)} schemas refused")
    strange = {name: why for name, why in refused.items() if not REASON.search(why)}
    assert not strange
    assert cut <= len(asked) // 50
    assert followed > least
