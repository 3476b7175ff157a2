"""The registry: every name leads to a class that reads, or refuses, a config.json."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES, model_class


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_name_leads_to_a_class_that_reads_its_config(name: str) -> None:
    assert model_class({"architectures": ["Unknown", name]})[0] == name
    with pytest.raises(ConfigError):
        model_class({"architectures": [name]})[-1].read_config({})
