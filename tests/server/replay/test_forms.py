"""MODEL:FORM of `penstock compare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import ConfigError
from server.replay.forms import config_of


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("demo", ("demo", "auto", None)),
        ("demo:float32", ("demo", "float32", None)),
        ("demo:int4", ("demo", "auto", "int4")),
        ("demo:bfloat16:fp8", ("demo", "bfloat16", "fp8")),
        ("demo:int8:float32", ("demo", "float32", "int8")),
        ("demo:int3", ("demo:int3", "auto", None)),  # no form, so it belongs to the name
        (":int4", (":int4", "auto", None)),
    ],
)
def test_config_of_a_model_with_forms_has_them(
    given: str, expected: tuple[str, str, str | None]
) -> None:
    config = config_of(given)
    assert (config.model, config.dtype, config.quantization) == expected


def test_config_of_a_folder_with_the_name_of_a_form_is_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model:int4").mkdir()
    assert config_of(f"{tmp_path}/model:int4").model == f"{tmp_path}/model:int4"
    forms = config_of(f"{tmp_path}/model:int4:float32")
    assert (forms.model, forms.dtype) == (f"{tmp_path}/model:int4", "float32")


@pytest.mark.parametrize("given", ["demo:int4:int8", "demo:float32:int4:bfloat16"])
def test_config_of_two_forms_of_a_kind_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="two forms"):
        config_of(given)
