"""Files of --record: parameters survive the way through JSON, and a wrong line is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.protocol.generate import Grammar, SamplingParams
from server.replay.recorded import (
    RecordedAnswer,
    RecordedGrammar,
    RecordError,
    params_fields,
    params_of,
    read_record,
)

PARAMS = SamplingParams(
    max_tokens=5,
    temperature=0.1 + 0.2,
    logit_bias=((3, 1.5), (7, float("-inf"))),
    allowed_token_ids=(1, 2),
    seed=-(2**63),
    stop_token_ids=(2,),
    grammar=Grammar("source", (2, 3), "response_format"),
    banned_sequences=((1, 2), (3,)),
)


def answer(**fields: Any) -> RecordedAnswer:
    given: dict[str, Any] = {
        "id": "req_1",
        "choice": 0,
        "created": 1,
        "model": "demo",
        "fingerprint": "fp_1",
        "version": "0.1.0",
        "prompt_ids": [1, 2],
        "params": params_fields(SamplingParams(max_tokens=3)),
        "tokens": [4, 5, 6],
        "finish": "length",
    }
    return RecordedAnswer(**given | fields)


def line_of(**fields: Any) -> str:
    return msgspec.json.encode(answer(**fields)).decode()


def written(folder: Path, *lines: str) -> Path:
    file = folder / "record.jsonl"
    file.write_text("\n".join(lines))
    return file


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(max_tokens=1)])
def test_params_through_json_are_the_same(params: SamplingParams) -> None:
    assert params_of(json.loads(json.dumps(params_fields(params)))) == params


def test_recorded_answers_through_the_file_are_the_same(tmp_path: Path) -> None:
    grammar = RecordedGrammar("choice", ["a", "b"], None, "")
    given = answer(grammar=grammar, is_cut=True, bad_words=["x"], encoder_prompt_ids=[9])
    text = msgspec.json.encode(given).decode()
    found = read_record(written(tmp_path, line_of(), "", text, ""))
    assert {line: msgspec.json.encode(each).decode() for line, each in found.items()} == {
        1: line_of(),
        3: text,
    }


def without(name: str) -> str:
    fields = json.loads(line_of())
    del fields[name]
    return json.dumps(fields)


def with_params(**changed: Any) -> str:
    return line_of(params=params_fields(SamplingParams(max_tokens=3)) | changed)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"record": 1, "id"', "line 2"),
        ("[]", "line 2"),
        ("\x00", "line 2"),
        ('{"custom_id": "a", "method": "POST"}', "line 2"),
        (line_of().replace('"record":1', '"record":2'), "record"),
        (without("tokens"), "tokens"),
        (without("params"), "params"),
        (line_of(tokens=["a"]), "tokens"),
        (line_of(tokens=[]), "has no tokens"),
        (line_of(prompt_ids=[]), "has no tokens"),
        (with_params(max_tokens="many"), "int"),
        (with_params(logit_bias=[[1]]), "line 2"),
        (with_params(beams=4), "beams"),
        (line_of(params={"max_tokens": 3}), "top_k"),
        ("[" * 100_000, "line 2"),
    ],
)
def test_wrong_line_is_refused_with_its_number(tmp_path: Path, line: str, reason: str) -> None:
    file = written(tmp_path, line_of(), line, line_of())
    with pytest.raises(RecordError, match=r"line 2 .*") as error:
        read_record(file)
    assert reason in str(error.value)
    assert str(file) in str(error.value)


def test_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        read_record(tmp_path / "none")
    with pytest.raises(RecordError, match="cannot be read: Is a directory"):
        read_record(tmp_path)
    with pytest.raises(RecordError, match="no recorded answers"):
        read_record(written(tmp_path, "", " "))
