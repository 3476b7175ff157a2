"""`penstock merge`: from flags or a file to a recipe, which `engine.weights.merge` follows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from server.settings import read_yaml


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
    ConfigError where both are given or neither. Whether it can be followed is told later."""
    given = {name: value for name, value in parameters.items() if value is not None}
    if file is not None:
        if models or weights or given or any((method, base_model, dtype)):
            raise ConfigError(f"All but --output stands in {file}: give no model or other flag.")
        return read_yaml(file)
    if method is None or not models:
        raise ConfigError("Give --recipe FILE, or --method and the models.")
    if method == "linear" and not weights:
        weights = [1.0] * len(models)
    if weights and len(weights) != len(models):
        raise ConfigError(f"{len(weights)} --weight for {len(models)} models; give one for each.")
    sources: list[dict[str, Any]] = [{"model": model} for model in models]
    for source, weight in zip(sources, weights, strict=False):
        source["parameters"] = {"weight": weight}
    if method in ("slerp", "liti"):
        base_model = base_model or models[0]
    document = {"merge_method": method, "models": sources, "base_model": base_model, "dtype": dtype}
    return document | ({"parameters": given} if given else {})
