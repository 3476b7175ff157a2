"""Turn: the input of a response, together with the conversation that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic_core import PydanticCustomError

from server.api.responses.contents import Json
from server.api.responses.conversation import messages_of
from server.api.responses.ids import input_item_id, response_of
from server.api.responses.items import Input, ItemReference, MessageItem
from server.api.responses.offered import Offered, tools_in
from server.api.responses.schemas import ResponsesBody
from server.api.responses.store import ResponseStore, StoredResponse
from server.http.errors import ApiError, invalid
from server.text import exact_json


@dataclass(frozen=True)
class Turn:
    """The input of a response."""

    items: list[Json]  # of the request itself, in their stored form
    messages: list[Json]  # of the whole conversation, as chat templates read them
    tools: Offered  # of the whole conversation


class StoredItems:
    """The items of a tenant's stored responses. Each response is parsed once."""

    def __init__(self, store: ResponseStore, tenant: str) -> None:
        self._store = store
        self._tenant = tenant
        self._items: dict[str, dict[str, Json]] = {}  # by response id, then by item id

    def find(self, item_id: str) -> Json | None:
        """Return the item of this id, or None if it is not stored."""
        response_id = response_of(item_id)
        if response_id is None:
            return None
        if response_id not in self._items:
            stored = self._store.get(self._tenant, response_id)
            items = all_items([stored]) if stored else []
            self._items[response_id] = {item["id"]: item for item in items}
        return self._items[response_id].get(item_id)


def input_items(conversation: Sequence[StoredResponse]) -> list[Json]:
    """Return the whole input of the last response: all items but those of its own output."""
    *earlier, last = conversation
    own: list[Json] = exact_json.loads(last.input_items)
    return all_items(earlier) + own


def all_items(conversation: Sequence[StoredResponse]) -> list[Json]:
    """Return the items of responses, inputs and outputs in the order of the conversation."""
    items: list[Json] = []
    for response in conversation:
        items += exact_json.loads(response.input_items)
        items += exact_json.loads(response.body)["output"]
    return items


def read_turn(
    body: ResponsesBody,
    response_id: str,
    conversation: Sequence[StoredResponse],
    stored: StoredItems,
) -> Turn:
    """Return the input of a response.

    Raises a 404 ApiError if a referenced item is not stored, and a 400 if there is no message.
    """
    items = _own_items(body.input, response_id, stored)
    every = all_items(conversation) + items
    messages = messages_of(every, body.instructions)
    if not messages:
        raise invalid("input", "The input has no message.")
    return Turn(items, messages, _offered(body, every))


def _offered(body: ResponsesBody, items: Sequence[Json]) -> Offered:
    """Return the tools of a conversation. Raises a 400 ApiError as `body.offered` does."""
    try:
        return body.offered(tools_in(items))
    except PydanticCustomError as error:
        context = error.context or {}
        param = ".".join(map(str, context["path"]))
        raise invalid(param, f"{param} {context['message']}") from None


def _own_items(given: Input, response_id: str, stored: StoredItems) -> list[Json]:
    """Return the items of a request in their stored form."""
    if isinstance(given, str):
        given = [MessageItem(role="user", content=given)]
    items = []
    for place, item in enumerate(given):
        if isinstance(item, ItemReference):
            items.append(_referenced(item, place, stored))
        else:
            kind = item.type or "message"
            items.append(item.stored(input_item_id(response_id, kind, place)))
    return items


def _referenced(reference: ItemReference, place: int, stored: StoredItems) -> Json:
    item = stored.find(reference.id)
    if item is None:
        message = (
            f"Item with id {reference.id[:128]!r} not found: stored responses are dropped when "
            "there are many. Send the items themselves, with store: false."
        )
        raise ApiError(404, "item_not_found", message, param=f"input.{place}.id")
    return item
