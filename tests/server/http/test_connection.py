"""Malformed HTTP, offers of other protocols, and wrong paths."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from server.http.framing import MAX_HEAD_BYTES
from tests.support.rig import check_error_body

REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
NOT_HTTP: list[tuple[bytes, int, str]] = [
    (b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", 400, "not valid HTTP/1.1"),  # TLS on a plain port
    (b"GET /health HTTP/1.1\r\n\r\n", 400, "mandatory Host"),
    (REQUEST + b"Bad Name: x\r\n\r\n", 400, "not valid HTTP/1.1"),
    (REQUEST + b"Content-Length: 1, 2\r\n\r\n", 400, "not valid HTTP/1.1"),
    (REQUEST + b"X: " + b"x" * (2 * MAX_HEAD_BYTES), 431, f"than {MAX_HEAD_BYTES} bytes"),
    (
        REQUEST
        + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n",
        400,
        "not valid HTTP/1.1",
    ),
]


@pytest.mark.parametrize(("data", "status", "words"), NOT_HTTP)
async def test_malformed_http_returns_openai_style_error(served, data, status, words, caplog):
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(data)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    lines = head.decode().split("\r\n")
    assert lines[0].startswith(f"HTTP/1.1 {status} ")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    assert headers["content-length"] == str(len(body))
    assert headers["connection"] == "close"
    assert {"x-request-id", "openai-version", "openai-processing-ms"} <= set(headers)
    check_error_body(json.loads(body), status)
    error = json.loads(body)["error"]
    assert words in error["message"]
    assert (await served.complete()).status_code == 200  # other requests are unaffected
    told = [record.msg for record in caplog.records if "Invalid HTTP" in str(record.msg)]
    told += [r.msg for r in caplog.records if headers["x-request-id"] in str(r.msg)]
    assert [record["code"] for record in told] == [error["code"]]
    assert await served.metric("rejects_total", code=error["code"]) == 1
    assert await served.metric("http_requests_total", status="200") == 1
    ended = {s: await served.metric("http_requests_total", status=str(s)) for s in (400, 431, 499)}
    assert sum(ended.values()) == 1, "counted once, as refused or as cut off"


async def test_malformed_request_on_kept_connection_gets_new_request_id(served, caplog):
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
    first = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    writer.write(b"GARBAGE\r\n\r\n")
    rest = (await asyncio.wait_for(reader.read(), 10)).decode().lower()
    writer.close()
    ids = [re.search(r"x-request-id: (\w+)", answer)[1] for answer in (first, rest)]
    logged = [
        record.msg["request_id"]
        for record in caplog.records
        if isinstance(record.msg, dict) and record.msg.get("event") == "request"
    ]
    assert logged == ids
    assert len(set(ids)) == 2


async def test_http2_upgrade_request_is_served_without_warning(served, caplog):
    headers = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": ""}
    response = await served.http.get("/v1/models", headers=headers)
    assert response.status_code == 200
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def test_unknown_path_returns_404_with_suggestion(served):
    for path, hint in (
        ("/load_lora_adapter", "did you mean /v1/load_lora_adapter?"),
        ("/v1/v1/models", "did you mean /v1/models? The client's base URL must end in /v1."),
        ("/v1//models", "did you mean /v1/models?"),
        ("/v1/completions/", "did you mean /v1/completions?"),
        ("/v1/health", "did you mean /health?"),
        ("/responses/compact", "did you mean /v1/responses/compact?"),
        ("/v1/images/generations", "Not Found. GET /openapi.json"),
    ):
        response = await served.http.post(path, json={})
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (404, "not_found")
        assert hint in error["message"]
