"""SamplingBody: the sampling parameters that the APIs share, with vLLM's extensions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AliasChoices, Field, StringConstraints, Tag

from server.api.openai.schemas.fields import INT32, INT64, Between, OneOrMore, Priority
from server.http.body import Body

MAX_STOPS = 32
Penalty = Annotated[float, Field(ge=-2, le=2)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Stops = Annotated[
    Annotated[Stop, Tag("<one>")]
    | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), Tag("<list>")],
    OneOrMore,
]
# The values of absent parameters, if the checkpoint has no defaults of its own.
SAMPLING_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "priority": 0,
}


class SamplingBody(Body):
    """A null field has the same meaning as an absent one."""

    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stop: Stops | None = None
    """Texts before which the answer ends."""
    seed: Annotated[int, Between(-INT64, INT64)] | None = None
    """Seed of the noise; −1 is the same as none: random."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """0 always takes the most likely token."""
    top_p: Fraction | None = None
    """Keep the most likely tokens up to this probability, after temperature."""
    top_k: Annotated[int, Between(-1, INT32)] | None = None
    """Keep this many of the most likely tokens; 0 and −1 keep all."""
    min_p: Fraction | None = None
    """Drop tokens below this share of the most likely token's probability."""
    presence_penalty: Penalty | None = None
    """Subtracted once from the logit of each token in the answer."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit for each time it is in the answer."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    """Divides or multiplies the logits of tokens of prompt and answer; 1 is neutral."""
    ignore_eos: bool | None = None
    """Continue after the checkpoint's end tokens."""
    priority: Priority | None = None
    """A lower value is served earlier."""
    cache_salt: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Cached prefixes are shared only between requests with the same salt."""

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling_options(self) -> dict[str, Any]:
        """Return these fields as those of GenerationOptions."""
        return {
            "stream": bool(self.stream),
            "stop": self.stops,
            # The largest is allowed because a float, as in most JSON tools, cannot say 2^63 - 1.
            "seed": None if self.seed is None else min(self.seed, INT64 - 1),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "repetition_penalty": self.repetition_penalty,
            "ignore_eos": bool(self.ignore_eos),
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
        }
