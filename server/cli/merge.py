"""`penstock merge`: build a recipe for `engine.offline.merge.merge` from flags or a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.settings import read_yaml

# The parameters of each method. All are required, except those of linear.
FLAGS = {
    "linear": {"weight", "normalize"},
    "ema": {"decay"},
    "slerp": {"t"},
    "liti": {"t"},
    "lora": set[str](),
}
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
    """Return a recipe in mergekit's format, from `file` or from the flags.

    Raises ConfigError if both or neither are given, or if a flag does not fit the others. The
    contents of a file are validated later, by `engine.offline.merge.recipe`.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    if file is not None:
        if models or weights or given or any((method, base_model, dtype)):
            raise ConfigError(
                f"--recipe {file} allows no other flag than --output, and no MODEL; remove them."
            )
        return read_yaml(file)
    if method is None or not models:
        raise ConfigError("Give --recipe FILE, or --method and the models.")
    _check(method, {**given, "weight": weights} if weights else given, dtype)
    if method == "lora":
        return _lora(models, base_model, dtype)
    if method in ("slerp", "liti"):
        base_model = base_model or models[0]
        named = dict.fromkeys([base_model, *models])
        if len(named) != 2:
            raise ConfigError(
                f"--method {method} merges two models, including the base model; "
                f"given: {', '.join(named)}."
            )
    elif len(models) < 2:
        raise ConfigError(f"--method {method} needs at least two models; given: {models[0]}.")
    if method == "linear" and not weights:
        weights = [1.0] * len(models)
    if weights and len(weights) != len(models):
        raise ConfigError(
            f"--weight: {len(weights)} given for {len(models)} models; give one per model."
        )
    sources: list[dict[str, Any]] = [{"model": model} for model in models]
    for source, weight in zip(sources, weights, strict=False):
        source["parameters"] = {"weight": weight}
    document = {"merge_method": method, "models": sources, "base_model": base_model, "dtype": dtype}
    return document | ({"parameters": given} if given else {})


def _lora(models: Sequence[str], base_model: str | None, dtype: str | None) -> dict[str, Any]:
    """Return the recipe that folds an adapter into a base model. Raises ConfigError."""
    named = [*([base_model] if base_model else []), *models]
    if len(named) != 2:
        raise ConfigError(
            "--method lora folds one adapter into its base model: give the base model, then the "
            f"adapter's folder; given: {', '.join(named)}."
        )
    base, adapter = named
    return {"merge_method": "lora", "base_model": base, "adapter": adapter, "dtype": dtype}


def _check(method: str, given: Mapping[str, Any], dtype: str | None) -> None:
    """Raise ConfigError if a flag is missing, is not the method's, or is out of bounds."""
    if method not in FLAGS:
        raise ConfigError(f"--method: {method!r} is not one of {', '.join(FLAGS)}.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}.")
    if strange := sorted(given.keys() - FLAGS[method]):
        raise ConfigError(f"--{strange[0]} cannot be used with --method {method}.")
    for name in ("t", "decay"):
        if name in FLAGS[method] and name not in given:
            raise ConfigError(f"--method {method} needs --{name}, a number from 0 to 1.")
        if name in given and not 0 <= given[name] <= 1:
            raise ConfigError(f"--{name}: {given[name]} is not a number from 0 to 1.")
