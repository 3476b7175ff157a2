"""`samplers`: which samplers are applied, and in what order, as llama.cpp takes it.

llama.cpp applies exactly the samplers of the list, in its order. The engine has one order. A list
is taken if the engine's order draws from the same distribution, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from server.api.openai.schemas.sampling import SAMPLING_DEFAULTS
from server.generation.options import GenerationOptions
from server.http.body import failure
from server.http.errors import unsupported

SERVED = ("penalties", "temperature", "top_k", "top_p", "min_p")  # the engine's order
# Their switches are fields of the body, which are refused unless they are off.
OFF = ("dry", "top_n_sigma", "typ_p", "xtc", "adaptive_p")
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
NAMES = {name.replace("_", ""): name for name in (*SERVED, *OFF)}
SAMPLERS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "array", "items": {"type": "string"}, "maxItems": MOST},
        {"type": "string", "maxLength": MOST},
        {"type": "null"},
    ]
}
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")


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
    values = {name: _value(options, name, defaults) for name in SAMPLING_DEFAULTS}
    for name in ("temperature", "top_k", "top_p", "min_p"):
        if name not in names:
            values[name] = SAMPLING_DEFAULTS[name]
    if "penalties" not in names:
        values |= {name: SAMPLING_DEFAULTS[name] for name in PENALTIES}
    applied = [name for name in names if _changes(name, values)]
    _check_order(applied, values)
    if values["temperature"] > 0 and _comes_before("min_p", "temperature", applied):
        # p / p_max >= m before the temperature T is (p / p_max)^(1/T) >= m^(1/T) after it.
        values["min_p"] **= 1 / values["temperature"]
    del values["priority"]
    return replace(options, **values)


def _value(options: GenerationOptions, name: str, defaults: Mapping[str, Any]) -> Any:
    given = getattr(options, name)
    return defaults.get(name, SAMPLING_DEFAULTS[name]) if given is None else given


def _changes(name: str, values: Mapping[str, Any]) -> bool:
    """Return whether a sampler has an effect with these parameters."""
    if name in OFF:
        return False
    if name == "penalties":
        return any(values[penalty] != SAMPLING_DEFAULTS[penalty] for penalty in PENALTIES)
    if name == "top_k":
        return bool(values[name] > 0)
    return bool(values[name] != SAMPLING_DEFAULTS[name])


def _check_order(applied: Sequence[str], values: Mapping[str, Any]) -> None:
    """Raise a 400 ApiError if the engine's order of these samplers is another distribution.

    top-k and min-p keep a prefix of the ranking at every temperature. They commute with each
    other. With temperature 0 the most likely token remains after every cut. The repetition penalty
    multiplies logits, as the temperature does, while the other penalties add to them.
    """
    pairs = [(name, "penalties") for name in ("top_k", "top_p", "min_p")]
    temperature = values["temperature"]
    if temperature == 0 or values["presence_penalty"] or values["frequency_penalty"]:
        pairs.append(("temperature", "penalties"))
    if temperature > 0:
        pairs += [("top_p", "temperature"), ("top_p", "top_k"), ("min_p", "top_p")]
    for first, second in pairs:
        if _comes_before(first, second, applied):
            message = f"samplers: {first} before {second} is not supported. {_served()}."
            raise unsupported("samplers", message)


def _comes_before(first: str, second: str, names: Sequence[str]) -> bool:
    both = first in names and second in names
    return both and names.index(first) < names.index(second)
