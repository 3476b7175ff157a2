"""The check of a batch's input, and the lines that are sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.routing import Route

from server.app import ROUTERS
from server.batch import lines
from server.batch.lines import (
    ENDPOINTS,
    LARGE,
    MAX_PROBLEMS,
    check_input,
    parse_line,
    read_lines,
    with_priority,
)

MOST = 1 << 20
# These POST routes are no part of a batch.
OTHERS = {"/tokenize", "/detokenize", "/rerank", "/score", "/v1/files", "/v1/batches"}
OTHERS |= {"/v1/messages/count_tokens", "/v1/chat/completions/render", "/v1/responses/compact"}
OTHERS |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
# Other servers' APIs, whose answers have no place in OpenAI's format of batches.
OTHERS |= {"/completion", "/infill", "/embedding", "/apply-template", "/pooling", "/v2/embed"}
OTHERS |= {"/v2/rerank", "/v1/embed", "/embed"}
OTHERS |= {"/invocations", "/predict", "/ping", "/v1/chat/completions/input_tokens"}
OTHERS |= {"/v1/systemone"}
# Other names of routes.
OTHERS |= {"/chat/completions", "/completions", "/embeddings", "/responses"}
OTHERS |= {"/chat/completions/input_tokens", "/classify", "/v1/responses/input_tokens"}


def raw(custom_id: str, body: Any = None) -> bytes:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions"}
    return orjson.dumps(line | {"body": {} if body is None else body})


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_bytes(content)
    return path


def test_endpoints_are_all_routes_with_a_body() -> None:
    routes = [route for router in ROUTERS for route in router.routes]
    posted = {r.path for r in routes if isinstance(r, Route) and "POST" in (r.methods or ())}
    of_api = {path for path in posted if "{" not in path and not path.startswith(("/ui/", "/api/"))}
    assert of_api - OTHERS == set(ENDPOINTS)


def test_input_with_blank_lines_bom_and_crlf_is_read(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + raw("a") + b"\r\n\r\n  \n" + raw("b")
    path = write(tmp_path, content)
    found = check_input(path, ENDPOINTS, MOST)
    assert (found.custom_ids, found.problems) == ({"a", "b"}, [])
    assert [line.custom_id for line in read_lines(path, {"a"}, MOST)] == ["b"]


def test_input_with_many_bad_lines_stops_at_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, b"{\n" * 1000)
    problems = check_input(path, ENDPOINTS, MOST).problems
    assert [problem.line for problem in problems] == list(range(1, MAX_PROBLEMS + 1))


def test_input_with_too_many_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 2)
    path = write(tmp_path, b"\n".join(map(raw, "abc")))
    [problem] = check_input(path, ENDPOINTS, MOST).problems
    assert (problem.code, problem.line) == ("too_many_lines", 3)


def test_long_line_is_one_problem_and_does_not_shift_the_others(tmp_path: Path) -> None:
    long = b"x" * (3 * LARGE)
    path = write(tmp_path, long + b"\n" + raw("a") + b"\n{\n")
    found = check_input(path, ENDPOINTS, LARGE)
    assert [(each.code, each.line) for each in found.problems] == [
        ("line_too_long", 1),
        ("invalid_json_line", 3),
    ]
    assert found.custom_ids == {"a"}


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        ({}, {"priority": 7}),
        ({"a": 1}, {"a": 1, "priority": 7}),
        ({"priority": 3}, {"priority": 3}),
        ({"priority": None}, {"priority": 7}),
        ({"a": {"priority": 3}}, {"a": {"priority": 3}, "priority": 7}),
    ],
)
def test_priority_is_added_unless_the_body_names_one(body: Any, sent: Any) -> None:
    assert orjson.loads(with_priority(parse_line(raw("a", body)), 7)) == sent
