"""Page: a part of a long list, as OpenAI's API pages it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.http.errors import invalid

MOST, USUAL = 100, 20  # items of a page
# The query parameters, for the OpenAPI document.
PAGE: list[dict[str, Any]] = [
    {
        "name": "limit",
        "in": "query",
        "schema": {"type": "integer", "minimum": 1, "maximum": MOST, "default": USUAL},
    },
    {
        "name": "order",
        "in": "query",
        "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"},
    },
    {
        "name": "after",
        "in": "query",
        "schema": {"type": "string"},
        "description": "The id of the item before the page.",
    },
]


@dataclass(frozen=True)
class Page:
    limit: int
    is_latest_first: bool
    after: str | None  # id of the item before the page

    def of(self, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the page of a list. Raises a 400 ApiError if `after` is none of its items."""
        ordered = list(reversed(items)) if self.is_latest_first else list(items)
        if self.after is not None:
            ids = [item["id"] for item in ordered]
            if self.after not in ids:
                raise invalid("after", "after is not the id of an item of this list.")
            ordered = ordered[ids.index(self.after) + 1 :]
        data = ordered[: self.limit]
        return {
            "object": "list",
            "data": data,
            "first_id": data[0]["id"] if data else "",
            "last_id": data[-1]["id"] if data else "",
            "has_more": len(ordered) > self.limit,
        }


def read_page(query: Mapping[str, str]) -> Page:
    """Return the page that a query asks for. Raises a 400 ApiError."""
    limit = query.get("limit", str(USUAL))
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 4 and 1 <= int(limit) <= MOST):
        raise invalid("limit", f"limit must be an integer from 1 to {MOST}.")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    return Page(int(limit), order == "desc", query.get("after"))
