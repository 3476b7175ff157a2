"""Each declared parameter of sampling is recorded and repeated, and an option of `explain`."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from engine.protocol.generate import SamplingParams
from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from server.cli.main import app
from server.replay.recorded import params_fields, params_of
from server.replay.request import replay_body
from tests.server.replay.test_recorded import answer
from tests.support.every_parameter import every_parameter, value_of
from tests.support.fake_engine import INFO
from tests.support.recorded import written_record
from tests.support.rig import Served


@every_parameter
async def test_replay_repeats_the_parameter(
    recording: Served, record_file: Path, name: str
) -> None:
    """The record and the body that repeats it have the value, not the checkpoint's default."""
    for value in (value_of(name), DEFAULTS[name]):
        first = len(recording.engine.requests)
        assert (await recording.complete(**{name: value})).status_code == 200
        lines = 1 + first // 2
        recorded = (await written_record(record_file, lines))[lines]
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
def test_command_explain_has_an_option_for_the_parameter(
    capfd: pytest.CaptureFixture[str], name: str
) -> None:
    option = "--" + name.replace("_", "-")
    wrong = PARAMETERS[name].most + 1
    result = CliRunner().invoke(app, ["explain", "Hi", option, str(wrong)])
    assert result.exit_code == 2
    assert f"'{option}': Input should be " in capfd.readouterr().err
