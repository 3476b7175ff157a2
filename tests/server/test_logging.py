"""Logs: a record is a line, knows its request, and holds no prompt."""

from __future__ import annotations

import json
import logging

import pytest
import structlog

from server.config import ServerConfig
from server.logging import HANDLER, configure
from tests.server.fake_engine import FakeEngine
from tests.server.rig import serving


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
def test_no_value_breaks_a_line(capsys, form):
    configure(ServerConfig(log_format=form))
    structlog.get_logger("x").info("event", path=HOSTILE, listed=[HOSTILE])
    logging.getLogger("uvicorn.error").warning("said %s", HOSTILE)
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 2
    assert not {"\x1b", "\u2028", "\x85", "\x7f", "\r"} & set(text)


def test_levels(capsys):
    configure(ServerConfig(log_format="json", log_level="warning"))
    structlog.get_logger("x").info("quiet")
    structlog.get_logger("x").warning("loud")
    assert [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()] == ["loud"]


def test_chunks_are_not_logged_at_any_level(capsys):
    configure(ServerConfig(log_format="json", log_level="debug"))
    logging.getLogger("sse_starlette.sse").debug("chunk: secret")
    logging.getLogger("other").debug("shown")
    text = capsys.readouterr().err
    assert "secret" not in text
    assert "shown" in text


async def test_a_request_is_one_line_without_its_text(capsys, model, says):
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
