"""Logs: each record is one line with its request's id, and contains no prompt."""

from __future__ import annotations

import hashlib
import json
import logging
import random

import pytest
import structlog

from engine.protocol.failure import RemoteTraceback
from server.config import ServerConfig
from server.telemetry.logging import HANDLER, configure
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.rig import eventually, serving


@pytest.fixture(autouse=True)
def _restore():
    root = logging.getLogger()
    level = root.level
    yield
    root.handlers = [handler for handler in root.handlers if handler.name != HANDLER]
    root.setLevel(level)
    structlog.reset_defaults()


HOSTILE = "a\r\nb\x1b[31mc\u2028d\x85e\x7f"


@pytest.mark.parametrize("form", ["json", "console"])
def test_log_value_with_control_characters_stays_on_one_line(capsys, form):
    configure(ServerConfig(log_format=form))
    structlog.get_logger("x").info("event", path=HOSTILE, listed=[HOSTILE])
    logging.getLogger("uvicorn.error").warning("said %s", HOSTILE)
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 2
    assert not {"\x1b", "\u2028", "\x85", "\x7f", "\r"} & set(text)


def test_log_exception_is_part_of_its_record(capsys):
    """Also for the engine's exceptions, which arrive as text from another process."""
    configure(ServerConfig(log_format="json"))
    traceback = "Traceback (most recent call last):\n  File ...\nKeyError: 7"
    error = RemoteTraceback(traceback)
    logging.getLogger("engine.client").error("the engine failed", exc_info=error)
    (line,) = capsys.readouterr().err.splitlines()
    record = json.loads(line)
    assert (record["event"], record["level"]) == ("the engine failed", "error")
    assert record["exception"].endswith(traceback)


def test_log_exception_on_a_console_has_no_control_characters(capsys):
    configure(ServerConfig(log_format="console"))
    logging.getLogger("engine").error("failed", exc_info=RemoteTraceback(f"one\n{HOSTILE}"))
    text = capsys.readouterr().err
    assert "one\n" in text
    assert not {"\x1b", "\u2028", "\x85", "\x7f", "\r"} & set(text)


def test_log_level_hides_lower_levels(capsys):
    configure(ServerConfig(log_format="json", log_level="warning"))
    structlog.get_logger("x").info("quiet")
    structlog.get_logger("x").warning("loud")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_log_of_sse_chunks_is_off_even_at_debug_level(capsys):
    configure(ServerConfig(log_format="json", log_level="debug"))
    logging.getLogger("sse_starlette.sse").debug("chunk: secret")
    logging.getLogger("other").debug("shown")
    text = capsys.readouterr().err
    assert "secret" not in text
    assert "shown" in text


async def test_access_log_request_is_one_line_without_its_text(capsys, model, says):
    headers = {"x-request-id": "mine"}
    body = {"prompt": "TOPSECRET", "stream": True, "foo": 1}
    async with serving(FakeEngine(says("wörld")), model) as served:
        await served.http.post("/v1/completions", json=body, headers=headers)
        await served.http.get("/health")
    text = capsys.readouterr().err
    assert "TOPSECRET" not in text
    assert "wörld" not in text
    records = [json.loads(line) for line in text.splitlines()]
    access = [record for record in records if record["logger"] == "server.access"]
    first = {"method": "POST", "path": "/v1/completions", "status": 200, "request_id": "mine"}
    assert first.items() <= access[0].items()
    assert access[0]["level"] == "info"
    assert access[1]["level"] == "debug"  # probes come every few seconds
    assert any(record.get("fields") == ["foo"] for record in records)


def access(text: str) -> list[dict[str, object]]:
    records = [json.loads(line) for line in text.splitlines()]
    return [r for r in records if r["logger"] == "server.access" and r["level"] == "info"]


async def test_access_log_sample_0_keeps_failed_requests_only(capsys, model, says):
    engine = FakeEngine(says("x"))
    async with serving(engine, model, access_log_sample=0.0) as served:
        for _ in range(5):
            await served.complete()
            await served.complete(temperature=9)
        engine.script = lambda request: [NOT_FINITE]
        await served.complete()
        engine.overloaded = True
        await served.complete()
    statuses = [record["status"] for record in access(capsys.readouterr().err)]
    assert statuses == [400] * 5 + [500, 503]


async def test_access_log_sample_keeps_the_configured_share(capsys, model, says):
    random.seed(7)
    async with serving(FakeEngine(says("x")), model, access_log_sample=0.25) as served:
        for _ in range(200):
            await served.http.get("/version")
    # Of 200 requests at 0.25, the count leaves the range of 26 to 76 once in 40 000 runs.
    assert 26 <= len(access(capsys.readouterr().err)) <= 76


async def test_access_log_disabled_logs_no_request(capsys, model, says):
    async with serving(FakeEngine(says("x")), model, access_log=False) as served:
        await served.complete(temperature=9)
    assert access(capsys.readouterr().err) == []


async def test_access_log_has_model_tokens_times_and_client(capsys, model, says):
    async with serving(FakeEngine(says("wörld")), model) as served:
        name = served.app.state.penstock.names[0]
        headers = {"x-forwarded-for": "203.0.113.7, 10.0.0.1\x1b[31m"}
        body = {"prompt": "abc", "stream": True}
        await served.http.post("/v1/completions", json=body, headers=headers)
        await served.http.get("/v1/models")
    generated, listed = access(capsys.readouterr().err)
    assert generated["model"] == name
    assert generated["prompt_tokens"] > 0
    assert generated["output_tokens"] > 0
    assert generated["cached_tokens"] == 0
    assert 0 <= generated["ttft_ms"] <= generated["ms"]
    assert generated["finish_reason"] == "stop"
    assert generated["client"] == "127.0.0.1"
    assert generated["forwarded_for"].startswith("203.0.113.7, 10.0.0.1")
    assert "\x1b" not in generated["forwarded_for"]
    assert "key" not in generated
    assert not {"model", "prompt_tokens", "output_tokens", "finish_reason"} & listed.keys()


async def test_access_log_of_several_choices_has_each_finish_reason_once(capsys, model, says):
    async with serving(FakeEngine(says("abcdef")), model) as served:
        await served.complete(n=3, max_tokens=1)
        await served.complete(prompt=["a", "b"])
        await served.complete(prompt="a " * 5000)
    cut, both, refused = access(capsys.readouterr().err)
    assert (cut["finish_reason"], cut["output_tokens"]) == ("length", 3)
    assert both["finish_reason"] == "stop"
    assert refused["status"] == 400
    assert "output_tokens" not in refused


async def test_access_log_of_an_aborted_stream_says_why(capsys, model):
    engine = FakeEngine(lambda request: [65] * 200)
    engine.delay = 0.01
    async with serving(engine, model) as served:
        stream = await served.openai.completions.create(
            model=served.app.state.penstock.names[0], prompt="x", stream=True, max_tokens=200
        )
        await anext(aiter(stream))
        await stream.close()
        await eventually(lambda: engine.aborted, "the engine knows")
    (record,) = access(capsys.readouterr().err)
    assert (record["status"], record["finish_reason"]) == (499, "disconnect")
    assert 0 < record["output_tokens"] < 200


async def test_access_log_names_keys_by_label_or_digest(capsys, model, says, tmp_path):
    (tmp_path / "keys").write_text("sk-alice label=alice\nsk-bob\n")
    async with serving(FakeEngine(says("x")), model, api_key_file=str(tmp_path / "keys")) as served:
        for key in ("sk-alice", "sk-bob", "sk-eve"):
            headers = {"authorization": f"Bearer {key}"}
            await served.http.get("/v1/models", headers=headers)
    text = capsys.readouterr().err
    assert "sk-" not in text
    digest = hashlib.sha256(b"sk-bob").hexdigest()
    assert [record.get("key") for record in access(text)] == ["alice", digest[:8], None]


async def test_access_log_of_embeddings_has_model_and_prompt_tokens(capsys, model):
    async with serving(FakeEncoder(lambda r: []), model) as served:
        await served.http.post("/v1/embeddings", json={"input": ["a", "b"]})
    (record,) = access(capsys.readouterr().err)
    assert record["prompt_tokens"] > 0
    assert "output_tokens" not in record
