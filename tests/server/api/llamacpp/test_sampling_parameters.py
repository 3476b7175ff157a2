"""Each declared parameter of sampling is in llama.cpp's settings."""

from __future__ import annotations

from server.api.llamacpp.samplers import RENAMED
from tests.support.every_parameter import every_parameter, value_of
from tests.support.rig import Served


@every_parameter
async def test_settings_of_llama_cpp_have_the_parameter(served: Served, name: str) -> None:
    settings = (
        await served.http.post("/completion", json={"prompt": "Hi", name: value_of(name)})
    ).json()
    shown = RENAMED.get(name, name)
    assert settings["generation_settings"][shown] == value_of(name)
    defaults = (await served.http.get("/props")).json()["default_generation_settings"]
    assert shown in defaults["params"]
