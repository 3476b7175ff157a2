"""The parameters of sampling that requests set: one declaration of each.

Bodies, documents, records, replays, explanations, commands and pages have a parameter by its
declaration (docs/adding-a-sampling-parameter.md). Its type and default are those of its field in
SamplingParams. With the default it has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from engine.protocol.generate import SamplingParams


@dataclass(frozen=True)
class Parameter:
    """A number of SamplingParams as requests set it."""

    name: str
    kind: Literal["temperature", "cut", "penalty"]  # a draft model does without penalties
    least: float
    most: float
    meaning: str  # one sentence
    in_checkpoints: bool = False  # generation_config.json may have it, and is then the default
    in_messages: bool = False  # Anthropic's API has it
    keeps_likeliest: bool = False  # of a cut: it never drops the most likely token
    other_names: tuple[str, ...] = ()  # in requests

    @property
    def default(self) -> float:
        """The value without effect; its type is the parameter's."""
        value: float = getattr(SamplingParams(max_tokens=1), self.name)
        return value


# Cuts are in the order of application.
_DECLARED = (
    Parameter(
        name="temperature",
        kind="temperature",
        least=0,
        most=2,
        meaning="0 always takes the most likely token.",
        in_checkpoints=True,
        in_messages=True,
    ),
    Parameter(
        name="top_n_sigma",
        kind="cut",
        least=-1,
        most=100,
        meaning="Keep logits up to this many standard deviations below the highest; 0 keeps all.",
        keeps_likeliest=True,
    ),
    Parameter(
        name="top_k",
        kind="cut",
        least=-1,
        most=2**31 - 1,
        meaning="Keep this many of the most likely tokens; 0 and −1 keep all.",
        in_checkpoints=True,
        in_messages=True,
        keeps_likeliest=True,
    ),
    Parameter(
        name="typical_p",
        kind="cut",
        least=0,
        most=1,
        meaning="Keep the tokens of nearly average information up to this probability.",
        in_checkpoints=True,
        other_names=("typ_p",),
    ),
    Parameter(
        name="top_p",
        kind="cut",
        least=0,
        most=1,
        meaning="Keep the most likely tokens up to this probability, after temperature.",
        in_checkpoints=True,
        in_messages=True,
        keeps_likeliest=True,
    ),
    Parameter(
        name="min_p",
        kind="cut",
        least=0,
        most=1,
        meaning="Drop tokens below this share of the most likely token's probability.",
        in_checkpoints=True,
        keeps_likeliest=True,
    ),
    Parameter(
        name="presence_penalty",
        kind="penalty",
        least=-2,
        most=2,
        meaning="Subtracted once from the logit of each token in the answer.",
    ),
    Parameter(
        name="frequency_penalty",
        kind="penalty",
        least=-2,
        most=2,
        meaning="Subtracted from a token's logit for each time it is in the answer.",
    ),
    Parameter(
        name="repetition_penalty",
        kind="penalty",
        least=0.01,
        most=100,
        meaning="Divides or multiplies the logits of tokens of prompt and answer; 1 is neutral.",
        in_checkpoints=True,
        other_names=("repeat_penalty",),
    ),
)
PARAMETERS: Mapping[str, Parameter] = {each.name: each for each in _DECLARED}
DEFAULTS: Mapping[str, float] = {each.name: each.default for each in _DECLARED}
CUT_NAMES = tuple([each.name for each in _DECLARED if each.kind == "cut"])
