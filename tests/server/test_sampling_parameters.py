"""Each declared parameter of sampling is everywhere: APIs, records, replays, explanations, pages.

Nothing here names a parameter: the cases come from the declaration.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from engine.protocol.generate import CUT_CODES, SamplingParams
from engine.protocol.sampling_parameters import CUT_NAMES, DEFAULTS, PARAMETERS
from engine.runner.draft_model import _draft_params
from server.api.llamacpp.samplers import RENAMED
from server.cli.main import app
from server.replay.recorded import params_fields, params_of, read_record
from server.replay.request import replay_body
from server.text.generation_config import sampling_defaults
from tests.server.glassbox.explain.test_routes import answer_explain_requests
from tests.server.replay.test_recorded import answer
from tests.support.fake_engine import INFO
from tests.support.rig import Served, eventually

UI = {"x-penstock-ui": "1"}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/completion": {"prompt": "Hi"},
}
every_parameter = pytest.mark.parametrize("name", PARAMETERS)


def value_of(name: str) -> float:
    """Return a value that is not the default."""
    parameter = PARAMETERS[name]
    value = type(DEFAULTS[name])(parameter.least + (parameter.most - parameter.least) / 4)
    assert value != DEFAULTS[name]
    return value


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
async def test_parameter_is_described_to_clients_and_pages(served: Served, name: str) -> None:
    parameter = PARAMETERS[name]
    routes = (await served.http.get("/capabilities")).json()["routes"]
    described = {route["path"]: route.get("parameters", {}) for route in routes}
    for path in paths_of(name):
        schema = described[path][name]
        assert schema["description"] == parameter.meaning
        assert (schema["minimum"], schema["maximum"]) == (parameter.least, parameter.most)
        assert "default" in schema
    hello = (await served.http.get("/ui/api/hello", headers=UI)).json()
    listed = {"name": name, "kind": parameter.kind, "default": DEFAULTS[name]}
    assert listed in hello["sampling"]


@every_parameter
async def test_settings_of_llama_cpp_have_the_parameter(served: Served, name: str) -> None:
    settings = (await send(served, "/completion", **{name: value_of(name)})).json()
    shown = RENAMED.get(name, name)
    assert settings["generation_settings"][shown] == value_of(name)
    defaults = (await served.http.get("/props")).json()["default_generation_settings"]
    assert shown in defaults["params"]


@every_parameter
async def test_replay_repeats_the_parameter(
    recording: Served, record_file: Path, name: str
) -> None:
    """The record and the body that repeats it have the value, not the checkpoint's default."""
    for value in (value_of(name), DEFAULTS[name]):
        first = len(recording.engine.requests)
        assert (await recording.complete(**{name: value})).status_code == 200
        lines = 1 + first // 2
        await eventually(lambda: record_file.read_text().count("\n") == lines, "recorded")  # noqa: B023
        recorded = read_record(record_file)[lines]
        body = replay_body(recorded, INFO.vocab_size)
        replay = {"x-penstock-replay": "1"}
        response = await recording.http.post("/v1/completions", json=body, headers=replay)
        assert response.status_code == 200, response.text
        params = [request.params for request in recording.engine.requests[first:]]
        assert getattr(params[0], name) == value
        assert params[0] == params[1]


@every_parameter
def test_record_of_a_version_without_the_parameter_is_read(name: str) -> None:
    fields = params_fields(SamplingParams(max_tokens=3))
    del fields[name]
    assert answer(params=fields).sampling == SamplingParams(max_tokens=3)
    with pytest.raises(msgspec.ValidationError, match="seed"):
        params_of({key: value for key, value in fields.items() if key != "seed"})


@every_parameter
async def test_explanation_has_the_parameter(served: Served, name: str) -> None:
    answer_explain_requests(served.engine)
    body = {"prompt_ids": [1], "answer_ids": [7], "params": {name: value_of(name), "seed": 1}}
    response = await served.http.post("/ui/api/explain", json=body, headers=UI)
    assert response.status_code == 200, response.text
    explain = served.engine.requests[-1].explain
    assert explain is not None
    assert getattr(explain.params, name) == value_of(name)


@every_parameter
def test_command_explain_has_an_option_for_the_parameter(
    capfd: pytest.CaptureFixture[str], name: str
) -> None:
    option = "--" + name.replace("_", "-")
    wrong = PARAMETERS[name].most + 1
    result = CliRunner().invoke(app, ["explain", "Hi", option, str(wrong)])
    assert result.exit_code == 2
    assert f"'{option}': Input should be " in capfd.readouterr().err


@pytest.mark.parametrize("name", CUT_NAMES)
async def test_explanation_names_the_cut(served: Served, name: str) -> None:
    assert CUT_CODES.count(name) == 1
    answer_explain_requests(served.engine)
    body = {"prompt_ids": [1], "answer_ids": [7]}
    report = (await served.http.post("/ui/api/explain", json=body, headers=UI)).json()
    assert report["cuts"][CUT_CODES.index(name)] == name.replace("_", "-")


@every_parameter
def test_draft_model_draws_with_all_but_penalties(name: str) -> None:
    drafted = _draft_params(msgspec.structs.replace(SamplingParams(9), **{name: value_of(name)}))
    is_kept = PARAMETERS[name].kind != "penalty"
    assert getattr(drafted, name) == (value_of(name) if is_kept else DEFAULTS[name])


@every_parameter
def test_default_of_a_checkpoint_is_read(tmp_path: Path, name: str) -> None:
    found = sampling_defaults({name: value_of(name)}, tmp_path)
    assert found == ({name: value_of(name)} if PARAMETERS[name].in_checkpoints else {})
