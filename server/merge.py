"""`penstock merge`: from flags or a file to a recipe, which `engine.weights.merge` follows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.settings import read_yaml

# What each method takes; all of it is needed but linear's.
FLAGS = {"linear": {"weight", "normalize"}, "ema": {"decay"}, "slerp": {"t"}, "liti": {"t"}}
DTYPES = ("float32", "bfloat16", "float16")


def recipe_of(
    file: Path | None,
    models: Sequence[str],
    method: str | None,
    base_model: str | None,
    weights: Sequence[float],
    dtype: str | None,
    **parameters: float | bool | None,
) -> dict[str, Any]:
    """mergekit's document for the flags of the command line, or the one in `file`; raises
    ConfigError where both are given or neither, and naming a flag that does not fit the others.
    Whether a file can be followed is told later."""
    given = {name: value for name, value in parameters.items() if value is not None}
    if file is not None:
        if models or weights or given or any((method, base_model, dtype)):
            raise ConfigError(f"All but --output stands in {file}: give no model or other flag.")
        return read_yaml(file)
    if method is None or not models:
        raise ConfigError("Give --recipe FILE, or --method and the models.")
    _check(method, {**given, "weight": weights} if weights else given, dtype)
    if method in ("slerp", "liti"):
        base_model = base_model or models[0]
        named = dict.fromkeys([base_model, *models])
        if len(named) != 2:
            raise ConfigError(
                f"--method {method} takes two models, with the base model, not {', '.join(named)}."
            )
    elif len(models) < 2:
        raise ConfigError(f"--method {method} takes at least two models, not {models[0]} alone.")
    if method == "linear" and not weights:
        weights = [1.0] * len(models)
    if weights and len(weights) != len(models):
        raise ConfigError(f"{len(weights)} --weight for {len(models)} models; give one for each.")
    sources: list[dict[str, Any]] = [{"model": model} for model in models]
    for source, weight in zip(sources, weights, strict=False):
        source["parameters"] = {"weight": weight}
    document = {"merge_method": method, "models": sources, "base_model": base_model, "dtype": dtype}
    return document | ({"parameters": given} if given else {})


def _check(method: str, given: Mapping[str, Any], dtype: str | None) -> None:
    """Raises ConfigError where a flag is missing, not the method's, or not within its bounds."""
    if method not in FLAGS:
        raise ConfigError(f"--method: {method!r} is not one of {', '.join(FLAGS)}.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}.")
    if strange := sorted(given.keys() - FLAGS[method]):
        raise ConfigError(f"--{strange[0]} does not go with --method {method}.")
    for name in ("t", "decay"):
        if name in FLAGS[method] and name not in given:
            raise ConfigError(f"--method {method} needs --{name}, a number from 0 to 1.")
        if name in given and not 0 <= given[name] <= 1:
            raise ConfigError(f"--{name}: {given[name]} is not a number from 0 to 1.")
