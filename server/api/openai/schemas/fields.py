"""Types of fields that several routes share.

Validation of a list stops at its first error. An error for each of a million bad items would take
half a minute and gigabytes of memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    StringConstraints,
)
from pydantic_core import CoreSchema, core_schema

from server.http.body import failure
from server.http.openapi import TOKEN_ID

INT32 = 2**31 - 1
INT64 = 2**63


def _whole(value: float) -> int:
    """Return an integer that was written with a point. Beyond 2^53 a float names several."""
    if not value.is_integer() or abs(value) > 2**53:
        raise ValueError
    return int(value)


@dataclass(frozen=True)
class Between:
    """An integer from `least` to `most`. 5.0 is the integer 5, as in JSON Schema.

    Python code runs only for numbers with a point, so that long lists of token ids are fast.
    """

    least: int
    most: int
    title: str | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        pointed = core_schema.float_schema(strict=True, allow_inf_nan=False)
        whole = core_schema.chain_schema(
            [pointed, core_schema.no_info_plain_validator_function(_whole)]
        )
        number = core_schema.union_schema(
            [core_schema.int_schema(strict=True), whole],
            mode="left_to_right",
            custom_error_type="int_type",
        )
        return core_schema.chain_schema(
            [number, core_schema.int_schema(ge=self.least, le=self.most)]
        )

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        named = {"title": self.title} if self.title else {}
        return {**named, "type": "integer", "minimum": self.least, "maximum": self.most}


TokenId = Annotated[int, Between(0, INT32, TOKEN_ID)]
Count = Annotated[int, Between(1, INT32)]
CountOrZero = Annotated[int, Between(0, INT32)]
Priority = Annotated[int, Between(-INT32, INT32)]
MAX_ALTERNATIVES = 20  # as in OpenAI's API, and by default in vLLM


def _not_all(value: Any) -> Any:
    """Refuse vLLM's -1, which means the whole vocabulary."""
    if value == -1:
        message = f"-1, the whole vocabulary, is not supported: at most {MAX_ALTERNATIVES}"
        raise failure("invalid", message)
    return value


Alternatives = Annotated[int, Between(0, MAX_ALTERNATIVES), BeforeValidator(_not_all)]
Effort = Annotated[str, StringConstraints(max_length=32)]  # such as "none" or "high"
TruncationSide = Literal["left", "right"]
MAX_TOKEN_IDS = 1 << 24  # of one prompt
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKEN_IDS)]


def few_inside(messages: Any, count: Callable[[Any], int], most: int, noun: str) -> Any:
    """Limit the parts of all messages: checking a million would stop every stream for a second.

    `count` counts the parts in a content.
    """
    items = messages if isinstance(messages, list) else []
    total = sum(count(item.get("content")) for item in items if isinstance(item, dict))
    if total > most:
        raise failure("invalid", f"may have at most {most} {noun} in total, not {total}")
    return messages


# ---- what JSON Schema says of several fields together -------------------------------------------

TRUE: dict[str, Any] = {"const": True}
INTEGER: dict[str, Any] = {"type": "integer"}
TEXT: dict[str, Any] = {"type": "string"}
LIST: dict[str, Any] = {"type": "array"}


def having(**fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of objects that have all these fields."""
    return {"properties": fields, "required": list(fields)}


def never(**fields: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of objects that do not have all these fields at once."""
    return {"not": having(**fields)}


# ---- unions --------------------------------------------------------------------------------------


def _shape(value: Any) -> str:
    """Return the union branch that fits the shape of `value`.

    Without a discriminator, a validation error would list the errors of every branch.
    """
    if not isinstance(value, list):
        return "<one>"
    first = value[0] if value else ""
    return {int: "<ids>", float: "<ids>", list: "<id lists>"}.get(type(first), "<list>")


def shape_of(allowed: str) -> Discriminator:
    """Return a discriminator for a union without some of the branches of `_shape`.

    `allowed` describes the branches of the union, for the error message.
    """
    return Discriminator(
        _shape, custom_error_type="shape_type", custom_error_message=f"Input should be {allowed}"
    )


def tag_of_type(value: Any) -> str | None:
    """Return the branch of a union that the member `type` of `value` names."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


def by_type(allowed: str) -> Discriminator:
    """Return a discriminator for a union of objects whose tags are their types, as `<type>`.

    `allowed` names the types, for the error message.
    """
    return Discriminator(
        tag_of_type,
        custom_error_type="unsupported",
        custom_error_message=f"`type` must be {allowed}",
    )


Shape = Discriminator(_shape)
OneOrMore = shape_of("a string or a list of strings")


def in_list(given: str | list[str] | list[int] | list[list[int]]) -> list[str] | list[list[int]]:
    """Return `given` as a list of prompts, where it may be a single text or its token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [given]
    return given
