"""The registry: every name leads to a class that reads, or refuses, a config.json."""

from __future__ import annotations

import pytest

from engine.errors import ConfigError
from engine.models.base import positive
from engine.models.registry import ARCHITECTURES, model_class


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_name_leads_to_a_class_that_reads_its_config(name: str) -> None:
    assert model_class({"architectures": ["Unknown", name]})[0] == name
    with pytest.raises(ConfigError):
        model_class({"architectures": [name]})[-1].read_config({})


@pytest.mark.parametrize("size", [0, -1, 2**31, 10**24, 1.0, float("inf"), True, "5", [5]])
def test_a_size_is_one_that_a_tensor_can_have(size: object) -> None:
    assert positive({"hidden_size": 2**31 - 1}, "hidden_size") == 2**31 - 1
    with pytest.raises(ConfigError, match=r"hidden_size = .* above 0 and below"):
        positive({"hidden_size": size}, "hidden_size")
