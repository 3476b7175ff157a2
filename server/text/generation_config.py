"""Settings of a checkpoint's generation_config.json: sampling defaults, tokens never to sample."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import ConfigError
from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS

# Fields of generation_config.json.
SAMPLING_DEFAULTS = {
    n: parameter for n, parameter in PARAMETERS.items() if parameter.in_checkpoints
}
LARGEST = {"temperature": sys.float_info.max}  # more than a request may have
# The values that Penstock's pages and `penstock chat` send if a checkpoint gives none. With the
# defaults of OpenAI, which the API keeps, small models draw tokens that they consider unlikely.
CLIENT_SAMPLING = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}
# Fields of transformers' GenerationConfig that change answers but that Penstock ignores. The value
# is the one that has no effect; null, [] and {} have no effect either.
NOT_FOLLOWED = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "exponential_decay_length_penalty": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1,
    "max_new_tokens": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0,
    "renormalize_logits": False,
    "sequence_bias": None,
    "stop_strings": None,
    "token_healing": False,
    "top_h": None,
    "watermarking_config": None,
}


def sampling_defaults(generation: dict[str, Any], folder: Path) -> dict[str, float | int]:
    """Return the sampling defaults that are set. Raises ConfigError if one is out of range."""
    defaults: dict[str, float | int] = {}
    for name, parameter in SAMPLING_DEFAULTS.items():
        kind, least = type(DEFAULTS[name]), parameter.least
        most = LARGEST.get(name, parameter.most)
        value = generation.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and least <= value <= most and value == kind(value)):
            raise ConfigError(
                f"{folder / 'generation_config.json'}: {name} must be a number of type "
                f"{kind.__name__} from {least} to {most:g}, not {value!r:.40}."
            )
        defaults[name] = kind(value)
    return defaults


def client_sampling(defaults: Mapping[str, float | int]) -> dict[str, float]:
    """Return the values that Penstock's own clients send, given the `defaults` of a checkpoint.

    Each value is decided for itself: one that the checkpoint gives is left to the server.
    """
    return {name: value for name, value in CLIENT_SAMPLING.items() if name not in defaults}


def not_followed(settings: dict[str, Any]) -> list[str]:
    """Return "name value" for each setting that would change answers but is ignored."""
    return [
        f"{name} {value!r:.40}"
        for name, value in settings.items()
        if name in NOT_FOLLOWED and value not in (None, [], {}, NOT_FOLLOWED[name])
    ]


def suppressed_ids(generation: dict[str, Any], folder: Path) -> tuple[int, ...]:
    """Return the sorted token ids in `bad_words_ids` and `suppress_tokens`.

    Raises ConfigError if an entry has several tokens, or if `forced_bos_token_id` is set.
    """
    given = [generation.get("bad_words_ids") or [], generation.get("suppress_tokens") or []]
    entries = [entry for value in given for entry in (value if type(value) is list else [value])]
    ids: list[Any] = [e[0] if type(e) is list and len(e) == 1 else e for e in entries]
    if any(type(i) is not int or i < 0 for i in ids):
        raise ConfigError(
            f"The generation settings in {folder} have entries of bad_words_ids or suppress_tokens "
            "that are not single token ids; longer sequences are not supported."
        )
    if (first := generation.get("forced_bos_token_id")) is not None:
        raise ConfigError(
            f"The generation settings in {folder} have forced_bos_token_id = {first!r}; forcing "
            "the first token of an answer is not supported."
        )
    return tuple(sorted(set(ids)))
