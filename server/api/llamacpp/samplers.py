"""`samplers`: which samplers are applied, and in what order, as llama.cpp takes it.

llama.cpp applies exactly the samplers of the list, in its order. The engine has one order. A list
is taken if the engine's order draws from the same distribution, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from engine.protocol.sampling_parameters import CUT_NAMES, DEFAULTS, PARAMETERS
from server.generation.options import GenerationOptions
from server.http.body import failure
from server.http.errors import unsupported

RENAMED = {"repetition_penalty": "repeat_penalty"}  # in llama.cpp's answers
FIELDS = {"typ_p": "typical_p"}  # of samplers with another name than their parameter's
MOST = 32  # names of a list
ALIASES = {"nucleus": "top_p", "temp": "temperature", "typ": "typ_p", "typical_p": "typ_p"}
LETTERS = {
    "e": "penalties",
    "t": "temperature",
    "k": "top_k",
    "p": "top_p",
    "m": "min_p",
    "d": "dry",
    "s": "top_n_sigma",
    "y": "typ_p",
    "x": "xtc",
    "a": "adaptive_p",
}
# By parameter. A cut that llama.cpp does not have is listed by its own name.
SAMPLERS = {name: name for name in CUT_NAMES}
SAMPLERS |= {FIELDS.get(name, name): name for name in LETTERS.values()}
NAMES = {name.replace("_", ""): name for name in SAMPLERS.values()}
# In the engine's order. The switches of the others are fields of the body, which are refused unless
# they are off.
SERVED = ("penalties", "temperature", *[SAMPLERS[name] for name in CUT_NAMES])
SAMPLERS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"type": "string"}, "maxItems": MOST},
        {"type": "string", "maxLength": MOST},
        {"type": "null"},
    ]
}
PENALTIES = [name for name, parameter in PARAMETERS.items() if parameter.kind == "penalty"]
KEEP_LIKELIEST = [SAMPLERS[name] for name in CUT_NAMES if PARAMETERS[name].keeps_likeliest]
# Pairs of samplers that draw from the same distribution in either order.
COMMUTING = {("top_n_sigma", "temperature"), ("top_k", "temperature"), ("min_p", "top_k")}
COMMUTING |= {("min_p", "temperature")}  # if the parameter is converted


def sampler_names(value: Any) -> tuple[str, ...] | None:
    """Return the canonical names of a list of names, or of a string of llama.cpp's letters.

    Raises a validation error for a name that is unknown or listed twice.
    """
    if value is None:
        return None
    if isinstance(value, str):
        given = list(value)
        named = [LETTERS.get(letter) for letter in given]
    elif isinstance(value, list) and all(isinstance(name, str) for name in value):
        given = value
        named = [_canonical(name) for name in given]
    else:
        raise failure("invalid", "must be a list of names, or a string of letters")
    if len(given) > MOST:
        raise failure("invalid", f"may have at most {MOST} entries, not {len(given)}")
    names: list[str] = []
    for raw, name in zip(given, named, strict=True):
        if name is None:
            raise failure("unsupported", f"has {raw[:32]!r}, which is not served. {_served()}")
        if name in names:
            raise failure("unsupported", f"has {name} twice, which is not served. {_served()}")
        names.append(name)
    return tuple(names)


def _canonical(name: str) -> str | None:
    name = name.lower()
    return ALIASES.get(name) or NAMES.get(name.replace("_", "").replace("-", ""))


def _served() -> str:
    return f"The served order is {', '.join(SERVED)}"


def with_samplers(
    options: GenerationOptions, names: Sequence[str], defaults: Mapping[str, Any]
) -> GenerationOptions:
    """Return the options with the samplers that are not listed switched off.

    `defaults` are the checkpoint's. Raises a 400 ApiError if the order of the others draws from
    another distribution than the engine's order does.
    """
    values = {**DEFAULTS, **defaults, **options.sampling}
    for name in DEFAULTS:
        if _sampler_of(name) not in names:
            values[name] = DEFAULTS[name]
    changed = {_sampler_of(name) for name in DEFAULTS if _has_effect(name, values[name])}
    applied = [name for name in names if name in changed]
    _check_order(applied, values)
    if values["temperature"] > 0 and _comes_before("min_p", "temperature", applied):
        # p / p_max >= m before the temperature T is (p / p_max)^(1/T) >= m^(1/T) after it.
        values["min_p"] **= 1 / values["temperature"]
    return replace(options, sampling=values)


def _sampler_of(name: str) -> str:
    """Return the sampler that a parameter belongs to."""
    return "penalties" if name in PENALTIES else SAMPLERS.get(name, name)


def _has_effect(name: str, value: float) -> bool:
    is_off = value == DEFAULTS[name] or (name in ("top_k", "top_n_sigma") and value <= 0)
    return not is_off


def _check_order(applied: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise a 400 ApiError if the engine's order of these samplers is another distribution.

    top-k and min-p keep a prefix of the ranking at every temperature. They commute with each
    other. With temperature 0 the most likely token remains after these and top-p. The repetition
    penalty multiplies logits, as the temperature does, while the other penalties add to them.
    """
    commuting = set(COMMUTING)
    if values["temperature"] == 0:
        commuting |= set(product(KEEP_LIKELIEST, ("temperature", *KEEP_LIKELIEST)))
    elif not (values["presence_penalty"] or values["frequency_penalty"]):
        commuting.add(("temperature", "penalties"))
    for second, first in combinations(SERVED, 2):  # in the engine's order
        if _comes_before(first, second, applied) and (first, second) not in commuting:
            message = f"samplers: {first} before {second} is not supported. {_served()}."
            raise unsupported("samplers", message)


def _comes_before(first: str, second: str, names: Sequence[str]) -> bool:
    both = first in names and second in names
    return both and names.index(first) < names.index(second)
