"""The defaults of sampling in a GGUF file, as settings of generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ConfigError
from engine.protocol.sampling_parameters import PARAMETERS

KEY = "general.sampling."
# The key's end -> the name in generation_config.json.
NAMES = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
HIGHEST = {"temp": 1e6}  # more than a request may have
# The values of other keys that have no effect.
NEUTRAL = {"xtc_probability": 0, "mirostat": 0}
# Settings of samplers, without effect if the sampler's own key has none.
PARTS = {
    "xtc_threshold": "xtc_probability",
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "penalty_last_n": "penalty_repeat",
}


def sampling_of(settings: Mapping[str, Any], vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Return settings of generation_config.json, and notes on what is not followed.

    Raises ConfigError for a value that is out of range.
    """
    given = {key.removeprefix(KEY): v for key, v in settings.items() if key.startswith(KEY)}
    found: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in NAMES:
            parameter = PARAMETERS[NAMES[name]]
            high = HIGHEST.get(name, parameter.most)
            found[NAMES[name]] = _number(name, value, parameter.least, high)
        elif value != NEUTRAL.get(name) and PARTS.get(name, name) in given:
            notes.append(f"{KEY}{name} {value!r:.40} is ignored")
    suppressed = settings.get("tokenizer.ggml.suppress_tokens")
    if isinstance(suppressed, list):  # llama.cpp leaves out ids that are no tokens
        found["suppress_tokens"] = [i for i in suppressed if type(i) is int and 0 <= i < vocab_size]
    return found, notes


def _number(name: str, value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not low <= value <= high:
        raise ConfigError(
            f"The GGUF file has {KEY}{name} = {value!r:.99}; it must be a number from {low:g} to "
            f"{high:g}."
        )
    number: float = value
    return number
