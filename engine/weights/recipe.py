"""What to merge and how, in the vocabulary of mergekit's YAML files: one struct for each method.

A word that a method does not know is refused: one that changed nothing would deceive.
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
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of the result; default: kept


class Linear(Common, tag="linear", kw_only=True, frozen=True):
    models: Annotated[tuple[WeightedSource, ...], Meta(min_length=2)]
    parameters: Normalize = Normalize()


class Ema(Common, tag="ema", kw_only=True, frozen=True):
    models: Annotated[tuple[Source, ...], Meta(min_length=2)]  # in the order of training
    parameters: Decay


class Slerp(Common, tag="slerp", kw_only=True, frozen=True):
    base_model: str
    models: tuple[Source, ...]  # one, or as mergekit has it that and the base
    parameters: Factor


class Liti(Common, tag="liti", kw_only=True, frozen=True):
    base_model: str  # the initial model
    models: tuple[Source, ...]
    parameters: Factor


Recipe = Linear | Ema | Slerp | Liti


def parse(document: Any) -> Recipe:
    """A recipe from plain data; raises ConfigError naming the word that cannot be followed."""
    try:
        recipe: Recipe = msgspec.convert(document, Recipe)
    except msgspec.ValidationError as error:
        methods = " (linear, ema, slerp or liti)" if "merge_method" in str(error) else ""
        raise ConfigError(f"The recipe cannot be followed: {error}{methods}.") from error
    if isinstance(recipe, Linear):
        weights = [source.parameters.weight for source in recipe.models]
        if not math.isfinite(sum(weights)) or (recipe.parameters.normalize and not sum(weights)):
            raise ConfigError(
                f"The weights {weights} must be finite and, to be normalised, not sum to 0; "
                "`normalize: false` takes them as they are."
            )
    elif isinstance(recipe, Slerp | Liti) and len(inputs(recipe)) != 2:
        raise ConfigError(f"base_model and models must name two models, not {inputs(recipe)}.")
    return recipe


def inputs(recipe: Recipe) -> list[str]:
    """The models that are added up, in the order of their shares."""
    names = [source.model for source in recipe.models]
    if isinstance(recipe, Linear | Ema):
        return names
    return [recipe.base_model, *(name for name in names if name != recipe.base_model)]


def template(recipe: Recipe) -> str:
    """The model whose config, tokenizer, dtypes and files the result has."""
    return recipe.base_model or recipe.models[0].model
