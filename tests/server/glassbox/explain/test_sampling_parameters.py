"""Each declared parameter of sampling is in explanations, and in what the pages offer."""

from __future__ import annotations

import pytest

from engine.protocol.generate import CUT_CODES
from engine.protocol.sampling_parameters import CUT_NAMES, DEFAULTS, PARAMETERS
from tests.server.glassbox.explain.test_routes import answer_explain_requests
from tests.support.every_parameter import every_parameter, value_of
from tests.support.rig import Served

UI = {"x-penstock-ui": "1"}


@every_parameter
async def test_explanation_has_the_parameter(served: Served, name: str) -> None:
    answer_explain_requests(served.engine)
    body = {"prompt_ids": [1], "answer_ids": [7], "params": {name: value_of(name), "seed": 1}}
    response = await served.http.post("/ui/api/explain", json=body, headers=UI)
    assert response.status_code == 200, response.text
    explain = served.engine.requests[-1].explain
    assert explain is not None
    assert getattr(explain.params, name) == value_of(name)


@pytest.mark.parametrize("name", CUT_NAMES)
async def test_explanation_names_the_cut(served: Served, name: str) -> None:
    assert CUT_CODES.count(name) == 1
    answer_explain_requests(served.engine)
    body = {"prompt_ids": [1], "answer_ids": [7]}
    report = (await served.http.post("/ui/api/explain", json=body, headers=UI)).json()
    assert report["cuts"][CUT_CODES.index(name)] == name.replace("_", "-")


@every_parameter
async def test_pages_know_the_parameter(served: Served, name: str) -> None:
    hello = (await served.http.get("/ui/api/hello", headers=UI)).json()
    listed = {"name": name, "kind": PARAMETERS[name].kind, "default": DEFAULTS[name]}
    assert listed in hello["sampling"]
