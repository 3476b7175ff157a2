"""The files of the pages: what is sent with them, and who gets them."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from server.glassbox.pages import page_files
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving
from tests.ui.vendor import FOLDER, PACKAGES, digest, sums

SECRET = "sk-of-the-pages"


async def test_root_leads_browsers_to_the_pages_and_tells_clients_where_things_are(
    served: Served,
) -> None:
    browser = await served.http.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert (browser.status_code, browser.headers["location"]) == (307, "ui/")
    client = await served.http.get("/")
    links = client.json()
    assert links.pop("name") == "penstock"
    for name, path in links.items():
        if name != "api":
            assert (await served.http.get(path)).status_code == 200, path
    assert (await served.http.get("/ui")).headers["location"] == "ui/"


@pytest.mark.parametrize("path", ["", "app.js", "app.css", "chat/page.js", "icon.svg"])
async def test_file_is_sent_compressed_with_its_policy_and_tag(served: Served, path: str) -> None:
    async with served.http.stream("GET", f"/ui/{path}") as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
    assert answer.headers["content-encoding"] == "gzip"
    assert gzip.decompress(raw) == page_files()[path or "index.html"].content
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    plain = await served.http.get(f"/ui/{path}", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == page_files()[path or "index.html"].content
    for refused in ("gzip;q=0", "br, gzip; q=0.0", "xgzip"):
        plain = await served.http.get(f"/ui/{path}", headers={"accept-encoding": refused})
        assert "content-encoding" not in plain.headers
    known = {"if-none-match": answer.headers["etag"]}
    again = await served.http.get(f"/ui/{path}", headers=known)
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path", ["nothing.js", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "vendor", "vendor/", "api"]
)
async def test_other_paths_are_not_found(served: Served, path: str) -> None:
    assert (await served.http.get(f"/ui/{path}")).status_code == 404


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
async def test_unknown_path_of_data_is_not_found_by_any_method(served: Served, method: str) -> None:
    for path in ("/ui/api/", "/ui/api/nothing", "/ui/api/hello/more"):
        answer = await served.http.request(method, path, headers={"x-penstock-ui": "1"})
        assert answer.status_code == 404, path


async def test_other_method_of_a_data_route_is_refused_with_its_methods(served: Served) -> None:
    for method, path, methods in (
        ("GET", "lens", "POST"),
        ("DELETE", "lens", "POST"),
        ("POST", "hello", "GET, HEAD"),
    ):
        answer = await served.http.request(method, f"/ui/api/{path}")
        assert (answer.status_code, answer.headers["allow"]) == (405, methods), (method, path)


async def test_files_need_no_key_and_the_data_does(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("Hi")), model, api_key=(SECRET,)) as served:
        assert (await served.http.get("/ui/app.js")).status_code == 200
        header = {"x-penstock-ui": "1"}
        assert (await served.http.get("/ui/api/hello", headers=header)).status_code == 401
        with_key = {"authorization": f"Bearer {SECRET}"}
        assert (await served.http.get("/ui/api/hello", headers=with_key)).status_code == 403
        hello = await served.http.get("/ui/api/hello", headers=header | with_key)
        assert hello.json()["role"] == "user"


async def test_foreign_host_gets_no_page(served: Served) -> None:
    for path in ("/", "/ui/", "/ui/app.js", "/ui/api/hello"):
        foreign = {"host": "evil.example", "x-penstock-ui": "1"}
        assert (await served.http.get(path, headers=foreign)).status_code == 400, path


async def test_without_ui_there_are_no_pages(model: Path, says: Callable[[str], Script]) -> None:
    async with serving(FakeEngine(says("Hi")), model, ui=False) as served:
        for path in ("/ui/", "/ui/app.js", "/ui/api/hello"):
            header = {"x-penstock-ui": "1"}
            assert (await served.http.get(path, headers=header)).status_code == 404, path
        root = await served.http.get("/", headers={"accept": "text/html"})
        assert "ui" not in root.json()


async def test_hello_has_the_facts_of_the_model(served: Served) -> None:
    hello = (await served.http.get("/ui/api/hello", headers={"x-penstock-ui": "1"})).json()
    assert hello["role"] == "admin"  # no keys, on the loopback address
    assert hello["ready"]["architecture"] == hello["model"]["architecture"] == "Fake"
    assert hello["stats"]["blocks_total"] >= 0
    assert hello["end_tokens"] == [257]
    assert hello["uneven"] is None


def test_vendored_files_have_their_hashes_and_no_others_are_there() -> None:
    found = {
        str(file.relative_to(FOLDER)): digest(file.read_bytes())
        for file in FOLDER.rglob("*")
        if file.is_file() and file.name != "SHA256SUMS"
    }
    assert found == sums()
    names = {name for _, files in PACKAGES.values() for name in files}
    assert names <= found.keys()
    assert hashlib.sha256(b"").hexdigest() not in found.values()


def test_no_file_is_longer_than_400_lines_and_none_builds_html() -> None:
    forbidden = (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "eval(",
        "new Function",
        "document.write",
    )
    for name, file in page_files().items():
        if name.startswith("vendor/"):
            continue
        text = file.content.decode()
        assert len(text.splitlines()) <= 400, name
        for word in forbidden:
            assert word not in text, (name, word)


def test_first_load_of_the_chat_is_small() -> None:
    """Compressed, the files that the browser loads before the first answer take 90 kB at most."""
    files = page_files()
    needed, open_names = set(), {"index.html", "app.js", "app.css", "chat/page.js", "chat/chat.css"}
    while open_names:
        name = open_names.pop()
        needed.add(name)
        open_names |= imports(name, files[name].content.decode()) - needed
    assert sum(len(files[name].compressed) for name in needed) <= 90_000
    assert {"vendor/preact.js", "vendor/marked.js", "chat/message.js"} <= needed
    assert "vendor/uplot.js" not in needed


def imports(name: str, source: str) -> set[str]:
    """Return the modules that a module imports statically, by their names below /ui/."""
    found = re.findall(r"""\bfrom\s*["'](\.[^"']+)["']""", source)
    folder = posixpath.dirname(name)
    return {posixpath.normpath(posixpath.join(folder, path)) for path in found}
