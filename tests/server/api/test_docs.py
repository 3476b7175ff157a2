"""The page /docs, and that it takes everything from this server."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server.api.docs import FILES
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import serving


def addresses(page: str) -> list[str]:
    """Return the addresses that a page loads."""
    return re.findall(r"""(?:href|src)="([^"]+)"|url: '([^']+)'""", page)


async def test_page_loads_only_relative_addresses_that_are_served(served: Any) -> None:
    page = await served.http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    found = {"".join(match) for match in addresses(page.text)}
    assert found == {"openapi.json", *(f"docs/{name}" for name in FILES)}
    for address in found:
        answer = await served.http.get(f"/{address}")
        assert answer.status_code == 200, address
        assert len(answer.content) > 500, address


async def test_files_have_the_types_that_browsers_require(served: Any) -> None:
    kinds = {"swagger-ui.css": "text/css", "favicon.png": "image/png"}
    kinds["swagger-ui-bundle.js"] = "text/javascript"
    assert kinds.keys() == FILES
    for name, kind in kinds.items():
        answer = await served.http.get(f"/docs/{name}")
        assert answer.headers["content-type"].startswith(kind)


async def test_another_file_of_the_package_is_not_served(served: Any) -> None:
    for name in ("nothing.js", "redoc.standalone.js", "..%2f__init__.py"):
        assert (await served.http.get(f"/docs/{name}")).status_code == 404, name


async def test_page_needs_a_key_if_there_are_keys(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x")), model, api_key=["secret"]) as served:
        for path in ("/docs", "/docs/swagger-ui.css"):
            assert (await served.http.get(path)).status_code == 401
