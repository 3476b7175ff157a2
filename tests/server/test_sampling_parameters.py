"""Each declared parameter of sampling is in every API. The wings' tests have the same for them.

Nothing here names a parameter: the cases come from the declaration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from engine.runner.draft_model import _draft_params
from server.text.generation_config import sampling_defaults
from tests.support.every_parameter import every_parameter, value_of
from tests.support.rig import Served
from tests.support.served_paths import served_paths

MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    **{path: {"prompt": "Hi"} for path in served_paths("/completion")},
}


def paths_of(name: str) -> list[str]:
    return [path for path in BODIES if path != "/v1/messages" or PARAMETERS[name].in_messages]


async def send(served: Served, path: str, **fields: Any) -> Any:
    return await served.http.post(path, json={**BODIES[path], **fields})


@every_parameter
async def test_parameter_of_every_api_reaches_the_engine(served: Served, name: str) -> None:
    for path in paths_of(name):
        for key in (name, *PARAMETERS[name].other_names):
            if key != name and path == "/v1/messages":
                continue
            response = await send(served, path, **{key: value_of(name)})
            assert response.status_code == 200, response.text
            assert "x-ignored-params" not in response.headers
            assert getattr(served.engine.requests[-1].params, name) == value_of(name)


@every_parameter
async def test_parameter_out_of_range_is_refused_by_name(served: Served, name: str) -> None:
    parameter = PARAMETERS[name]
    for path in paths_of(name):
        for wrong in (parameter.least - 0.5, parameter.most + 1, "1", [], True):
            response = await send(served, path, **{name: wrong})
            assert response.status_code == 400, (path, wrong)
            error = response.json()["error"]
            assert name in (error["message"] if path == "/v1/messages" else error["param"])
    assert not served.engine.requests


@every_parameter
@pytest.mark.variants(4)
async def test_parameter_is_described_to_clients(served: Served, name: str) -> None:
    parameter = PARAMETERS[name]
    routes = (await served.http.get("/capabilities")).json()["routes"]
    described = {route["path"]: route.get("parameters", {}) for route in routes}
    for path in paths_of(name):
        schema = described[path][name]
        assert schema["description"] == parameter.meaning
        assert (schema["minimum"], schema["maximum"]) == (parameter.least, parameter.most)
        assert "default" in schema


@every_parameter
def test_draft_model_draws_with_all_but_penalties(name: str) -> None:
    drafted = _draft_params(msgspec.structs.replace(SamplingParams(9), **{name: value_of(name)}))
    is_kept = PARAMETERS[name].kind != "penalty"
    assert getattr(drafted, name) == (value_of(name) if is_kept else DEFAULTS[name])


@every_parameter
def test_default_of_a_checkpoint_is_read(tmp_path: Path, name: str) -> None:
    found = sampling_defaults({name: value_of(name)}, tmp_path)
    assert found == ({name: value_of(name)} if PARAMETERS[name].in_checkpoints else {})
