"""The input and output of `engine.offline.compare.command`."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig


class Comparison(msgspec.Struct, frozen=True):
    """Models to compare: the first with each of the others.

    `prompts` has for each model the token ids of each prompt; they are the same for models with the
    same tokens. `end_ids` has each model's tokens that end an answer.
    """

    models: list[EngineConfig]
    prompts: list[list[list[int]]]
    end_ids: list[list[int]]
    same_tokens: bool  # whether the ids mean the same, without which distributions have no distance
    max_tokens: int
    temperature: float
    seed: int


class TokenDistance(msgspec.Struct, frozen=True):
    """How far two models are apart where one of them has written a token.

    `kl` is the Kullback-Leibler divergence of the other model's distribution from that of the
    writer, sum p log2(p / q), in bits; None if it is infinite, or no number. `own` and `other` are
    the probabilities of the token, and `best` is the token that the other model finds most likely.
    """

    token: int
    kl: float | None
    own: float | None  # None: no number
    other: float | None
    best: int


class Answered(msgspec.Struct, frozen=True, tag="answered"):
    """The answer of one model to one prompt."""

    model: int
    prompt: int
    tokens: list[int]
    finish: str


class Compared(msgspec.Struct, frozen=True, tag="compared"):
    """Distances of the first model and another one, along an answer of `writer`."""

    model: int  # the other one
    writer: int
    prompt: int
    tokens: list[TokenDistance]


class Working(msgspec.Struct, frozen=True, tag="working"):
    """The work that begins now."""

    text: str


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The comparison ends here; the text says why and what to do."""

    text: str


Report = Answered | Compared | Working | Failed
