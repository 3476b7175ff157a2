"""The part of config.json that says how a checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from engine.errors import ConfigError

Settings = Mapping[str, Any]


def refuse(key: str, value: Any, method: str, supported: str) -> ConfigError:
    """Return the error for a setting that is not served."""
    return ConfigError(
        f"config.json has {key} = {value!r:.99} for weights quantised with {method}; supported: "
        f"{supported}."
    )


def choice(settings: Settings, key: str, method: str, supported: Collection[Any]) -> Any:
    """Return a setting. Raises ConfigError if its value is not among the supported ones."""
    value = settings.get(key)
    if not any(type(value) is type(known) and value == known for known in supported):
        raise refuse(key, value, method, ", ".join(map(str, supported)))
    return value


def group_size(settings: Settings, method: str) -> int | None:
    """Return the number of inputs that share a scale; None if all inputs of an output do."""
    size = settings.get("group_size")
    if size in (None, -1):
        return None
    if type(size) is not int or size < 1:
        raise refuse("group_size", size, method, "-1, or a number above 0")
    return size


def block_size(settings: Settings, key: str, method: str) -> tuple[int, int] | None:
    """Return (outputs, inputs) of a block with one scale; None if there are no blocks."""
    sizes = settings.get(key)
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in sizes):
        raise refuse(key, sizes, method, "a list of two numbers above 0")
    return sizes[0], sizes[1]


def format_of(settings: Settings, keys: Collection[str], default: str) -> str:
    """Return the layout that a checkpoint names under one of `keys`, in lower case."""
    found = next((settings[key] for key in keys if settings.get(key) is not None), default)
    return str(found).lower()
