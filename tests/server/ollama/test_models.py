"""The routes about models: what is listed, and what is refused with what to do instead."""

from __future__ import annotations

from datetime import datetime

import pytest

from tests.server.ollama.conftest import ask, lines_of
from tests.server.ollama.shapes import ERROR, PS, SHOW, TAGS, check_shape
from tests.support.rig import Served


async def test_version_is_digits_that_clients_compare(served: Served) -> None:
    """Codex refuses one below 0.13.4, and Open WebUI reads three numbers."""
    answer = (await served.http.get("/api/version")).json()
    assert tuple(map(int, answer["version"].split("."))) >= (0, 13, 4)
    assert answer["penstock"] == (await served.http.get("/version")).json()["version"]


async def test_tags_and_ps_list_the_model_under_its_literal_name(served: Served) -> None:
    tags = (await served.http.get("/api/tags")).json()
    running = (await served.http.get("/api/ps")).json()
    check_shape(tags, TAGS)
    check_shape(running, PS)
    [listed], [loaded] = tags["models"], running["models"]
    assert listed["name"] == listed["model"] == loaded["name"] == "tiny"
    assert listed["digest"] == loaded["digest"]
    assert len(listed["digest"]) == 64
    assert loaded["context_length"] == 512
    for time in (listed["modified_at"], loaded["expires_at"]):
        assert datetime.fromisoformat(time).tzinfo is not None


async def test_show_describes_the_model(served: Served, hermes: Served) -> None:
    for fields in ({"model": "tiny"}, {"name": "tiny:latest"}, {"model": "tiny", "verbose": True}):
        shown = await ask(served, "/api/show", **fields)
        assert "x-ignored-params" not in shown.headers
    answer = shown.json()
    check_shape(answer, SHOW)
    family = answer["model_info"]["general.architecture"]
    assert answer["model_info"][f"{family}.context_length"] == 512
    assert answer["capabilities"] == ["completion"]
    parameters = dict(line.split() for line in answer["parameters"].splitlines())
    assert (parameters["num_ctx"], parameters["temperature"]) == ("512", "0.6")
    thinking = (await ask(hermes, "/api/show", model="tiny")).json()
    assert thinking["capabilities"] == ["completion", "tools", "thinking"]
    assert (await ask(served, "/api/show", model="other")).status_code == 404


async def test_pull_of_the_served_model_succeeds(served: Served) -> None:
    lines = lines_of(await ask(served, "/api/pull", model="tiny:latest"))
    assert lines[-1] == {"status": "success"}
    assert (await ask(served, "/api/pull", name="tiny", stream=False)).json() == lines[-1]


@pytest.mark.parametrize(
    ("method", "path", "advice"),
    [
        ("POST", "/api/pull", "penstock pull"),
        ("DELETE", "/api/delete", "penstock list"),
        ("POST", "/api/create", "--served-model-name"),
        ("POST", "/api/copy", "--served-model-name"),
        ("POST", "/api/push", "--served-model-name"),
    ],
)
async def test_change_of_models_is_refused_with_what_to_do_instead(
    served: Served, method: str, path: str, advice: str
) -> None:
    response = await served.http.request(method, path, json={"model": "other"})
    assert response.status_code == 400
    check_shape(response.json(), ERROR)
    assert advice in response.json()["error"]


async def test_models_before_loading_are_503(served: Served) -> None:
    served.engine.state, served.engine.info = "loading", None
    for path in ("/api/tags", "/api/ps"):
        response = await served.http.get(path)
        assert response.status_code == 503
        check_shape(response.json(), ERROR)
        assert response.headers["retry-after"]
