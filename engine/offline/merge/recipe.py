"""Merge recipes in the vocabulary of mergekit's YAML files, with one struct per method.

A key that a method does not know is refused: ignoring it would suggest that it had an effect.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

Fraction = Annotated[float, Meta(ge=0, le=1)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Weight(Strict, frozen=True):
    weight: float


class Normalize(Strict, frozen=True):
    normalize: bool = True


class Decay(Strict, frozen=True):
    decay: Fraction


class Factor(Strict, frozen=True):
    t: Fraction


class Nothing(Strict, frozen=True):
    pass


class Source(Strict, frozen=True):
    model: str
    parameters: Nothing = Nothing()


class WeightedSource(Strict, frozen=True):
    model: str
    parameters: Weight


class Common(Strict, tag_field="merge_method", kw_only=True, frozen=True):
    base_model: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # None: as stored


class Linear(Common, tag="linear", kw_only=True, frozen=True):
    models: Annotated[tuple[WeightedSource, ...], Meta(min_length=2)]
    parameters: Normalize = Normalize()


class Ema(Common, tag="ema", kw_only=True, frozen=True):
    models: Annotated[tuple[Source, ...], Meta(min_length=2)]  # in the order of training
    parameters: Decay


class Slerp(Common, tag="slerp", kw_only=True, frozen=True):
    base_model: str
    models: tuple[Source, ...]  # the other model; as in mergekit, the base may be repeated
    parameters: Factor


class Liti(Common, tag="liti", kw_only=True, frozen=True):
    base_model: str  # the initial model
    models: tuple[Source, ...]
    parameters: Factor


class Lora(Common, tag="lora", kw_only=True, frozen=True):
    """Not a method of mergekit: an adapter is folded into its base model."""

    base_model: str
    adapter: str  # a PEFT folder


Recipe = Linear | Ema | Slerp | Liti | Lora


def parse(document: Any) -> Recipe:
    """Parse a recipe from plain data. Raises ConfigError naming the key or value at fault."""
    try:
        recipe: Recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as error:
        methods = " (linear, ema, slerp, liti or lora)" if "merge_method" in str(error) else ""
        raise ConfigError(f"The recipe cannot be followed: {error}{methods}.") from error
    if isinstance(recipe, Linear):
        weights = [source.parameters.weight for source in recipe.models]
        if not math.isfinite(sum(weights)) or (recipe.parameters.normalize and not sum(weights)):
            raise ConfigError(
                f"The weights {weights} must be finite and must not sum to 0 if normalised; "
                "`normalize: false` uses them as given."
            )
    elif isinstance(recipe, Slerp | Liti) and len(inputs(recipe)) != 2:
        raise ConfigError(f"base_model and models must name two models, not {inputs(recipe)}.")
    return recipe


def inputs(recipe: Recipe) -> list[str]:
    """Return the models that are summed, in the order of their shares."""
    if isinstance(recipe, Lora):
        return [recipe.base_model]
    names = [source.model for source in recipe.models]
    if isinstance(recipe, Linear | Ema):
        return names
    return [recipe.base_model, *(name for name in names if name != recipe.base_model)]


def template(recipe: Recipe) -> str:
    """Return the model whose config, tokenizer, dtypes and file layout the result has."""
    if isinstance(recipe, Lora):
        return recipe.base_model
    return recipe.base_model or recipe.models[0].model
