"""The lists that the browser tests go through have each page and each route of the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.glassbox.pages import page_files
from tests.ui.data_routes import ADDRESSES, address_of, data_routes
from tests.ui.listed_pages import ListedPage, listed_pages, page_ids, pages_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "pages.md"
ENTRY = '{ id: "keys", title: "Keys", key: "k", load: () => import("./keys/page.js") }'
KEYS = ListedPage("keys", "Keys", "k", "keys/page.js")


def test_pages_are_those_of_the_list_and_not_the_drawers() -> None:
    ids = page_ids()
    assert ids[0] == "chat"
    assert {"engine", "model", "compare"} <= set(ids)
    assert "inspector" not in ids
    assert pages_of(f"export const pages = [\n  {ENTRY},\n];\nconst a = [{{ id: 1 }}];\n") == [KEYS]
    lines = ENTRY.replace(", ", ",\n    ")
    assert pages_of(f"export const pages = [\n  {lines},\n  {ENTRY},\n];\n") == [KEYS, KEYS]


@pytest.mark.parametrize("field", ["id", "title", "key", "load"])
def test_entry_of_another_form_is_an_error(field: str) -> None:
    entry = ENTRY.replace(f"{field}: ", f"{field}: other ?? ")
    with pytest.raises(ValueError, match=r"An entry of pages\.js is not"):
        pages_of(f"export const pages = [\n  {entry},\n];\n")


def test_pages_js_without_a_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no list"):
        pages_of("export const other = [];\n")


def test_each_page_has_an_id_a_letter_and_a_file() -> None:
    pages = listed_pages()
    for name in ("id", "title", "key"):
        assert len({getattr(page, name) for page in pages}) == len(pages), name
    for page in pages:
        assert len(page.key) == 1
        assert page.module in page_files(), page


def test_each_page_is_in_the_document_of_the_pages() -> None:
    text = DOCUMENT.read_text()
    keys = ", ".join(f"`g {page.key}`" for page in listed_pages())
    titles = ", ".join(page.title for page in listed_pages())
    assert f"| {keys} | open {titles} |" in text, "docs/pages.md lists the keys of all pages"
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    described = {title.strip() for row in rows for title in row.split(",")}
    assert {page.title for page in listed_pages()} <= described, "docs/pages.md has a row for each"


def test_routes_are_those_of_the_data_and_not_the_files() -> None:
    routes = data_routes()
    assert {("GET", "/ui/api/hello"), ("POST", "/ui/api/ablate")} <= set(routes)
    assert all(path.startswith("/ui/api/") for _, path in routes)
    assert len(set(routes)) == len(routes)


def test_each_route_has_an_address() -> None:
    paths = {path for _, path in data_routes()}
    for path in paths:
        assert "{" not in address_of(path)
    assert set(ADDRESSES) <= paths, "an address without a route"


def test_route_with_unknown_parameters_says_what_to_add() -> None:
    with pytest.raises(LookupError, match=r"/ui/api/new/\{name\} .*: add it, .* to ADDRESSES in"):
        address_of("/ui/api/new/{name}")
