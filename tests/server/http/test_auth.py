"""API keys: every path except the probes needs a key, however the path is written."""

from __future__ import annotations

import asyncio
import hmac
import re

import pytest

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.key_file import read_limited_keys
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")


@pytest.fixture
async def locked(model, says):
    async with serving(FakeEngine(says("x")), model, api_key=("alpha", "beta")) as served:
        yield served


async def raw_status(served, method: str, path: str, host: str = "localhost") -> int:
    reader, writer = await asyncio.open_connection(*served.address)
    head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}".encode())
    status = (await reader.read(-1)).split(b" ", 2)[1]
    writer.close()
    return int(status)


def routed_paths(routes) -> set[str]:
    paths = {route.path for route in routes if hasattr(route, "path")}
    included = [route.original_router for route in routes if hasattr(route, "original_router")]
    return paths.union(*(routed_paths(router.routes) for router in included))


async def test_every_route_and_method_without_key_returns_401(locked):
    paths = {re.sub(r"\{.*?\}", "x", path) for path in routed_paths(locked.app.routes)}
    assert {"/metrics", "/tokenize", "/v1/models/x", "/openapi.json"} <= paths
    odd = {f"{path}/" for path in paths} | {f"/{path}" for path in paths}
    odd |= {path.replace("v1", "%761") for path in paths} | {
        "/health/../metrics",
        "/ready;/metrics",
    }
    odd |= {"/health%2f..%2fmetrics", "//health", "/unknown", "/HEALTH", "/health/metrics"}
    for path in sorted((paths | odd) - {"/health", "/ping", "/ready"}):
        is_page = path in ("/", "/ui") or (path.startswith("/ui/") and "/ui/api/" not in path)
        for method in METHODS:
            status = await raw_status(locked, method, path)
            assert status in ((200, 307, 404, 405) if is_page else (401,)), (method, path)


@pytest.mark.parametrize("host", ["/health", "x/health?", "localhost/health", "evil.example"])
async def test_forged_host_header_does_not_bypass_key(locked, host):
    assert await raw_status(locked, "GET", "/v1/models", host) in (400, 401)


async def test_probes_without_key_return_200(locked):
    for path in ("/health", "/ping", "/ready"):
        assert (await locked.http.get(path)).status_code == 200
        assert (await locked.http.head(path)).status_code == 200


KEYS = {
    "Bearer alpha": 200,
    "bearer beta": 200,
    "Bearer alph": 401,
    "Bearer alphabeta": 401,
    "Basic alpha": 401,
    "alpha": 401,
    "Bearer": 401,
    "Bearer \xe9": 401,
}


async def test_authorization_header_needs_bearer_scheme_and_valid_key(locked):
    for header, status in KEYS.items():
        headers = {"authorization": header.encode("latin-1")}
        response = await locked.http.get("/v1/models", headers=headers)
        assert response.status_code == status, header
        if status == 401:
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"


async def test_refused_metrics_scrape_is_not_counted(locked):
    for path in ("/metrics", "/v1/models"):
        assert (await locked.http.get(path)).status_code == 401
    locked.http.headers["authorization"] = "Bearer alpha"
    assert await locked.metric("rejects_total", code="invalid_api_key") == 1
    assert await locked.metric("http_requests_total", status="401") == 1


async def test_key_check_that_matches_first_key_compares_all_keys(locked, monkeypatch):
    compared = []

    def spy(left, right):
        compared.append(right)
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", spy)
    response = await locked.http.get("/v1/models", headers={"authorization": "Bearer alpha"})
    assert response.status_code == 200
    assert len(compared) == 2


async def test_non_ascii_key_matches_only_its_utf8_bytes(model, says):
    async with serving(FakeEngine(says("x")), model, api_key=("schlüssel",)) as served:
        for sent, status in (("schlüssel".encode(), 200), ("schlüssel".encode("latin-1"), 401)):
            headers = {"authorization": b"Bearer " + sent}
            assert (await served.http.get("/v1/models", headers=headers)).status_code == status


@pytest.mark.parametrize("key", ["clefà", "à", "àclef"])
async def test_key_with_the_byte_of_a_no_break_space_is_accepted(model, says, key):
    """UTF-8 of "à" ends in A0, which latin-1 reads as a space."""
    async with serving(FakeEngine(says("x")), model, api_key=(key,)) as served:
        for sent, status in ((key, 200), (key + "\u00a0", 401), ("\u00a0" + key, 401)):
            headers = {"authorization": b"Bearer " + sent.encode()}
            assert (await served.http.get("/v1/models", headers=headers)).status_code == status


async def test_requests_with_different_keys_get_different_cache_salts(locked):
    for key in ("alpha", "beta", "alpha"):
        headers = {"authorization": f"Bearer {key}"}
        await locked.http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
        salted = {"prompt": "x", "cache_salt": "s"}
        await locked.http.post("/v1/completions", json=salted, headers=headers)
    salts = [request.salt for request in locked.engine.requests]
    assert salts[:2] == salts[4:]
    assert len(set(salts)) == 4, "one for each key, with and without a salt"


def keys_of(config):
    return [key.text for key in read_limited_keys(config)]


def test_read_keys_reads_file_and_rejects_invalid_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n one \ntwo\n")
    assert keys_of(ServerConfig(api_key=("zero",), api_key_file=str(file))) == [
        "zero",
        "one",
        "two",
    ]
    file.write_bytes("\ufeffschlüssel\r\n".encode())
    assert keys_of(ServerConfig(api_key_file=str(file))) == ["schlüssel"]
    file.write_text("# ours\n\nsk-a  # Alice\n")
    with pytest.raises(ConfigError, match=r"keys, line 3: an API key must not"):
        keys_of(ServerConfig(api_key_file=str(file)))
    for key in ("b c", ""):
        with pytest.raises(ConfigError, match=r"--api-key, key 2: an API key must not"):
            keys_of(ServerConfig(api_key=("a", key)))
    file.write_text("# none\n")
    with pytest.raises(ConfigError, match="no API key"):
        keys_of(ServerConfig(api_key_file=str(file)))
    with pytest.raises(ConfigError, match="missing"):
        keys_of(ServerConfig(api_key_file=str(tmp_path / "missing")))


PROXIED = [
    {"x-forwarded-for": "192.0.2.1"},
    {"X-Forwarded-Host": "llm.example"},
    {"forwarded": "for=192.0.2.1;proto=https"},
    {"x-real-ip": "192.0.2.1"},
    {"via": "1.1 proxy"},
]


@pytest.mark.parametrize("header", PROXIED)
async def test_proxied_client_of_a_server_without_keys_is_remote(model, says, header):
    async with serving(FakeEngine(says("x")), model) as served:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            refused = await served.http.post(path, json={}, headers=header)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                403, "admin_key_required",
            )  # fmt: skip
        answer = await served.http.post("/v1/completions", json={"prompt": "x"}, headers=header)
        assert answer.status_code == 200


async def test_proxied_client_with_an_admin_key_is_an_admin(model, says, tmp_path):
    (tmp_path / "admins").write_text("mighty\n")
    config = {"admin_key_file": str(tmp_path / "admins")}
    async with serving(FakeEngine(says("x")), model, "mighty", **config) as served:
        body, headers = {"lora_name": "a"}, {"x-forwarded-for": "192.0.2.1"}
        answer = await served.http.post("/v1/unload_lora_adapter", json=body, headers=headers)
        assert answer.status_code == 404, "an admin's request is read"


@pytest.mark.parametrize("label", ["", "a,b", "x" * 65, "ä"])
def test_key_file_with_invalid_label_raises(tmp_path, label):
    (tmp_path / "keys").write_text(f"sk-a label={label}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: label must be"):
        keys_of(ServerConfig(api_key_file=str(tmp_path / "keys")))


def test_key_file_with_a_repeated_key_raises(tmp_path):
    (tmp_path / "keys").write_text("sk-a label=one\nsk-b\nsk-a requests_per_minute=1\n")
    with pytest.raises(ConfigError, match=r"line 3 repeats the key of .*line 1"):
        keys_of(ServerConfig(api_key_file=str(tmp_path / "keys")))
