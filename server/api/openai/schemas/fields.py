"""Types of fields that several routes share.

Validation of a list stops at its first error. An error for each of a million bad items would take
half a minute and gigabytes of memory.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field

INT32 = 2**31 - 1
INT64 = 2**63
TokenId = Annotated[int, Field(ge=0, le=INT32)]
Count = Annotated[int, Field(ge=1, le=INT32)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


def _shape(value: Any) -> str:
    """Return the union branch that fits the shape of `value`.

    Without a discriminator, a validation error would list the errors of every branch.
    """
    if not isinstance(value, list):
        return "<one>"
    first = value[0] if value else ""
    return {int: "<ids>", list: "<id lists>"}.get(type(first), "<list>")


def shape_of(allowed: str) -> Discriminator:
    """Return a discriminator for a union without some of the branches of `_shape`.

    `allowed` describes the branches of the union, for the error message.
    """
    return Discriminator(
        _shape, custom_error_type="shape_type", custom_error_message=f"Input should be {allowed}"
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
