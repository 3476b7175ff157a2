"""Forms of a model that is compared: `demo:float32` or `demo:bfloat16:int4`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError

FORMS = {
    "float32": "dtype",
    "bfloat16": "dtype",
    "int8": "quantization",
    "int4": "quantization",
    "fp8": "quantization",
}


def config_of(given: str) -> EngineConfig:
    """Return the configuration of a model with forms behind its name, each after a colon.

    A folder or file of this very name comes first. Raises ConfigError for two forms of one kind.
    """
    name = given
    fields: dict[str, str] = {}
    while not Path(name).exists():
        rest, colon, form = name.rpartition(":")
        if not (rest and colon and form in FORMS):
            break
        field = FORMS[form]
        if field in fields:
            raise ConfigError(f"{given} names two forms of {field}: {form}, {fields[field]}.")
        name, fields[field] = rest, form
    return msgspec.convert({"model": name, **fields}, EngineConfig)
