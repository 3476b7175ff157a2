"""`docs/api.md`, which `penstock api` writes from the OpenAPI document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from fastapi import FastAPI
from pydantic import Field

from server.api_page import api_page
from server.app import PATHS, api_document
from server.http.body import Body, Part
from server.http.boundary import RESPONSE_HEADERS
from server.http.openapi import body_schema
from server.http.openapi_app import OpenApiApp
from server.http.operations import operations, resolved
from tests.support.rig import Served

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"


class Inner(Part):
    size: int
    """Size of it."""


class FirstBody(Body):
    first: Annotated[list[Inner], Field(max_length=3)]
    """The first one."""
    a: int | None = None
    b: int | None = None
    c: int | None = None


class SecondBody(FirstBody):
    UNSUPPORTED: ClassVar[dict[str, Any]] = {"magic": (False,)}
    DEFAULTS: ClassVar[dict[str, Any]] = {"second": 7}

    second: int | None = None
    """The | second one."""


def page_of(*bodies: type[Body]) -> str:
    app: FastAPI = OpenApiApp(keyed=False, vocab_size=lambda: None, title="x", version="1")

    def route() -> None:
        """Do it. Then end."""

    for number, body in enumerate(bodies):
        app.post(f"/r{number}", openapi_extra=body_schema(body))(route)
    return api_page(app.openapi(), {"x-a": "the a"})


def test_api_page_is_up_to_date() -> None:
    page = api_page(api_document(), RESPONSE_HEADERS)
    assert PAGE.read_text(encoding="utf-8") == page, "run `penstock api > docs/api.md`"


def test_api_page_has_every_route_and_parameter() -> None:
    page = PAGE.read_text(encoding="utf-8")
    document = api_document()
    names = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    for path in {p.replace(":path", "") for p in PATHS} & document["paths"].keys():
        assert f"{path}`" in page
    for operation in operations(document):
        assert operation.parameters.keys() <= set(names)


def test_parameters_of_every_route_have_a_description() -> None:
    missing = [
        f"{operation.path}: {name}"
        for operation in operations(api_document())
        for name, schema in operation.parameters.items()
        if not schema.get("description")
    ]
    assert missing == []


def test_links_of_api_page_have_their_headings() -> None:
    page = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^##+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    targets = re.findall(r"\]\(#([^)]*)\)", page)
    assert targets
    assert set(targets) <= anchors


def test_parameters_of_two_routes_are_listed_once() -> None:
    page = page_of(FirstBody, SecondBody)
    assert "## Parameters of `/r0` and `/r1`" in page
    assert page.count("| `first` | list of [Inner](#inner) | up to 3 items | required |") == 1
    assert page.count("(#parameters-of-r0-and-r1)") == 2
    assert (
        "| `second` | integer |  | `7` | The \\| second one. |" in page.partition("## POST /r1")[2]
    )
    assert "Not supported: `magic` (except `false`)." in page
    assert "### Inner" in page


def test_routes_with_equal_bodies_refer_to_the_first() -> None:
    page = page_of(FirstBody, FirstBody)
    assert "The body is that of `/r0`." in page.partition("## POST /r1")[2]


@pytest.mark.parametrize("name", ["Error", "FirstBody"])
def test_api_page_omits_schemas_that_no_parameter_has(name: str) -> None:
    assert f"### {name}" not in page_of(FirstBody)


def test_operations_resolve_a_body_that_is_a_reference() -> None:
    schema = {"properties": {"a": {"type": "string"}}, "required": ["a"]}
    document: dict[str, Any] = {
        "components": {"schemas": {"A": schema, "B": {"$ref": "#/components/schemas/A"}}},
    }
    assert resolved(document, {"$ref": "#/components/schemas/B"}) == schema


async def test_response_headers_of_the_page_are_those_of_responses(served: Served) -> None:
    answer = await served.chat(unknown=1, max_tokens=10**6)
    own = {name for name in answer.headers if name.startswith(("x-", "openai-"))}
    assert own <= RESPONSE_HEADERS.keys()
    assert {"x-ignored-params", "x-adjusted-params"} <= own
