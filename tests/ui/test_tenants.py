"""A client sees nothing of another: every byte that its browser receives is searched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import playwright.sync_api as playwright
import pytest

from tests.support.serve import Server, serving
from tests.ui.data_routes import address_of, data_routes
from tests.ui.listed_pages import page_ids
from tests.ui.recording_proxy import RecordingProxy, recording

pytestmark = pytest.mark.ui
A, B, ADMIN = "sk-tenant-a-0001", "sk-tenant-b-0002", "sk-admin-0003"
CANARY = "The zebra Quixotl hides 7 violet lanterns under Xyzzybrook"
UI = {"x-penstock-ui": "1"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("keys")
    (folder / "keys").write_text(f"{A}\n{B}\n")
    (folder / "admin").write_text(f"{ADMIN}\n")
    keys = ("--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin"))
    with serving("demo", *keys) as server:
        yield server


@pytest.fixture
def proxy(locked: Server) -> Iterator[RecordingProxy]:
    with recording(locked.address) as found:
        yield found


def as_client(key: str) -> dict[str, str]:
    return {**UI, "authorization": f"Bearer {key}"}


@pytest.fixture
def traffic_of_a(locked: Server) -> Iterator[list[list[int]]]:
    """A's requests, which run until the test ends; the ids of their prompts and answers."""
    ids: list[list[int]] = []
    done = threading.Event()

    def talk() -> None:
        with httpx2.Client(base_url=locked.base_url, timeout=60, headers=as_client(A)) as http:
            place = 0
            while not done.is_set():
                place += 1
                message = {"role": "user", "content": f"{CANARY} {place}"}
                body = {"messages": [message], "max_tokens": 60, "return_token_ids": True}
                headers = {"x-request-id": f"secret-of-a-{place}"}
                answer = http.post("/v1/chat/completions", json=body, headers=headers).json()
                ids.append(answer["prompt_token_ids"])
                ids.append(answer["choices"][0]["token_ids"])

    thread = threading.Thread(target=talk)
    thread.start()
    while len(ids) < 2:
        assert thread.is_alive()
    yield ids
    done.set()
    thread.join()


def with_key(page: Any, key: str) -> None:
    page.get_by_label("API key").last.fill(key)
    page.get_by_role("button", name="Use this key").click()
    playwright.expect(page.get_by_role("dialog", name="API key")).to_have_count(0)


def visit_all(page: Any, base: str) -> None:
    """Look at every page and drawer for a while."""
    page.get_by_role("textbox", name="Message").fill("Hello!")
    page.keyboard.press("Enter")
    answer = page.locator(".message").last
    playwright.expect(answer.locator(".figures")).to_contain_text("queue")
    for button in ("Why these tokens", "Why this time"):
        answer.get_by_role("button", name=button).click()
        page.wait_for_timeout(700)
        page.keyboard.press("Escape")
    for name in page_ids():
        page.goto(f"{base}/ui/#/{name}")
        page.wait_for_timeout(1500)


def test_pages_of_one_client_receive_nothing_of_another(
    open_page: Callable[..., Any],
    proxy: RecordingProxy,
    traffic_of_a: list[list[int]],
) -> None:
    page = open_page(f"{proxy.url}/ui/")
    with_key(page, B)  # the browser reports the 401 before
    page.wait_for_selector(".welcome")
    visit_all(page, proxy.url)
    received = bytes(proxy.received)
    assert len(received) > 100_000
    assert b'"delta":{"content":' in received  # the search finds what B may see
    for secret in (CANARY, "Quixotl", "Xyzzybrook", "secret-of-a", A):
        assert secret.encode() not in received, secret
    for ids in list(traffic_of_a):
        own = ids[12:]  # the template's first tokens are the same for all
        if len(own) >= 8:  # fewer may occur by chance
            assert ",".join(map(str, own)).encode() not in received.replace(b" ", b"")
    page.faults.clear()  # what B is refused is an error line of the browser


def test_admin_sees_that_the_others_run(locked: Server, traffic_of_a: list[list[int]]) -> None:
    """The same requests are found with an admin key, so the test above could have found them."""
    found = httpx2.get(f"{locked.base_url}/ui/api/requests", headers=as_client(ADMIN)).json()
    assert any(one["id"].startswith("secret-of-a") for one in found["requests"])
    own = httpx2.get(f"{locked.base_url}/ui/api/requests", headers=as_client(B)).json()
    assert not any(one["id"].startswith("secret-of-a") for one in own["requests"])


@pytest.mark.parametrize(("method", "path"), data_routes(), ids=str)
def test_route_refuses_strangers(locked: Server, method: str, path: str) -> None:
    url = locked.base_url + address_of(path)
    key = {"authorization": f"Bearer {B}"}
    foreign = {**UI, **key, "host": "evil.example"}
    http = httpx2.Client(timeout=60)  # the process that reads the model's structure imports torch
    assert http.request(method, url, headers=UI).status_code == 401
    assert http.request(method, url, headers=foreign).status_code == 400
    assert http.request(method, url, headers=key).status_code == 403
    origin = {**UI, **key, "origin": "https://evil.example"}
    preflight = {"origin": "https://evil.example", "access-control-request-method": method}
    preflight["access-control-request-headers"] = "x-penstock-ui"
    refused = http.options(url, headers=preflight)
    assert "access-control-allow-origin" not in refused.headers
    body = {} if method == "POST" else None
    with http.stream(method, url, headers=origin, json=body) as answer:
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("method", "path"), data_routes(), ids=str)
def test_route_is_off_with_the_pages(method: str, path: str, without_pages: Server) -> None:
    url = without_pages.base_url + address_of(path)
    assert httpx2.request(method, url, headers=UI).status_code == 404


@pytest.fixture(scope="module")
def without_pages() -> Iterator[Server]:
    with serving("demo", "--no-ui") as server:
        yield server
