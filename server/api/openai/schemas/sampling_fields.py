"""SamplingBody: the sampling parameters that the APIs share, with vLLM's extensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, Field, StringConstraints, Tag, create_model

from engine.protocol.sampling_parameters import DEFAULTS, PARAMETERS
from server.api.openai.schemas.fields import INT64, Between, OneOrMore, Priority
from server.http.body import Body, Part

MAX_STOPS = 32
Stop = Annotated[str, StringConstraints(min_length=1, max_length=4096)]
Stops = Annotated[
    Annotated[Stop, Tag("<one>")]
    | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS), Tag("<list>")],
    OneOrMore,
]
# The values of absent parameters, if the checkpoint has no defaults of its own.
SAMPLING_DEFAULTS: dict[str, Any] = {**DEFAULTS, "priority": 0}
BodyType = TypeVar("BodyType", bound=Body)


def with_parameters(names: Iterable[str]) -> Callable[[type[BodyType]], type[BodyType]]:
    """Return a decorator that gives a body the fields of these declared parameters."""

    def extended(kind: type[BodyType]) -> type[BodyType]:
        fields: dict[str, Any] = {name: _field(name) for name in names}
        return create_model(
            kind.__name__,
            __base__=kind,
            __module__=kind.__module__,
            __doc__=kind.__doc__,
            **fields,
        )

    return extended


def _field(name: str) -> tuple[Any, Any]:
    """Return the type and the pydantic field of a declared parameter."""
    parameter = PARAMETERS[name]
    least, most = parameter.least, parameter.most
    limited: Any = Annotated[float, Field(ge=least, le=most)]
    if isinstance(DEFAULTS[name], int):
        limited = Annotated[int, Between(int(least), int(most))]
    names = AliasChoices(name, *parameter.other_names) if parameter.other_names else None
    return limited | None, Field(None, description=parameter.meaning, validation_alias=names)


def given_parameters(body: Body) -> dict[str, float]:
    """Return the values of the declared parameters that a request sets."""
    values = {name: getattr(body, name, None) for name in PARAMETERS}
    return {name: value for name, value in values.items() if value is not None}


class CacheOptions(Part):
    """Options of OpenAI's prompt cache. Prefixes are always cached here, and for no set time."""

    mode: str | None = None
    """No effect."""
    ttl: str | None = None
    """No effect."""


@with_parameters(PARAMETERS)
class SamplingBody(Body):
    """A null field has the same meaning as an absent one."""

    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stop: Stops | None = None
    """Texts before which the answer ends."""
    seed: Annotated[int, Between(-INT64, INT64)] | None = None
    """Seed of the noise; −1 is the same as none: random."""
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
            "sampling": given_parameters(self),
            "ignore_eos": bool(self.ignore_eos),
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
        }
