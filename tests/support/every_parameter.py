"""The declared parameters of sampling as cases of tests."""

from __future__ import annotations

import pytest

from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS

every_parameter = pytest.mark.parametrize("name", PARAMETERS)


def value_of(name: str) -> float:
    """Return a value that is not the default."""
    parameter = PARAMETERS[name]
    value = type(DEFAULTS[name])(parameter.least + (parameter.most - parameter.least) / 4)
    assert value != DEFAULTS[name]
    return value
