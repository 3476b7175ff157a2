"""Read the query of a GET request, and report every ignored parameter."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict
from starlette.requests import Request

from server.http.body import MAX_LISTED, MAX_NAME, UNPRINTABLE, failure, ignored_header

DIGITS = re.compile(r"-?[0-9]{1,10}")


class Query(BaseModel):
    """The parameters of a query. A parameter that is given twice has its last value."""

    model_config = ConfigDict(frozen=True, extra="ignore", str_max_length=MAX_NAME)


QueryType = TypeVar("QueryType", bound=Query)


def _number(value: Any) -> Any:
    """Return the number in a text of digits; pydantic would also accept 5.0 or 1_0."""
    if not isinstance(value, str):
        return value
    if not DIGITS.fullmatch(value):
        raise failure("invalid", "must be a whole number")
    return int(value)


WHOLE = BeforeValidator(_number)  # must follow the bounds, or the schema lacks them


def read_query(request: Request, kind: type[QueryType]) -> tuple[QueryType, dict[str, str]]:
    """Return the query, and the response header that names its ignored parameters.

    Raises pydantic.ValidationError, which the error table turns into a 400.
    """
    given = dict(request.query_params)
    unknown = [name for name in given if name not in kind.model_fields][:MAX_LISTED]
    names = [UNPRINTABLE.sub("_", name[:64]) or "_" for name in unknown]
    return kind.model_validate(given), ignored_header(names)


def query_schema(kind: type[Query]) -> dict[str, Any]:
    """Return the `openapi_extra` of an operation that reads this query.

    A field that may be None is a parameter that may be left out.
    """
    parameters = []
    for name, field in kind.model_json_schema()["properties"].items():
        given = [kind for kind in field.get("anyOf", []) if kind != {"type": "null"}]
        schema = given[0] if given else field
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    return {"parameters": parameters}
