"""Items of a request's input, and their form in the store.

The stored form is the one that the API returns: messages have a list of parts, and every item has
an id.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from server.api.openai.schemas.fields import never, shape_of
from server.api.responses.contents import (
    Content,
    Json,
    input_parts,
    kind_of,
    output_parts,
)
from server.api.responses.tool_items import (
    AdditionalToolsItem,
    CustomCallItem,
    CustomCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    Id,
    SearchCallItem,
    SearchOutputItem,
    Status,
)
from server.http.body import MAX_PARTS, Part, Text, failure
from server.images.content import ResponseImagePart

MAX_ITEMS = 4096  # limit of the items, and of the parts in all items together


class MessageItem(Part):
    """A message of any role. Without `type` it is OpenAI's EasyInputMessage."""

    type: Literal["message"] | None = None
    id: Id | None = None
    """Id of the item."""
    role: Literal["user", "assistant", "system", "developer"]
    """`developer` is read as `system`."""
    content: Content
    """Text, or parts of text."""
    status: Status | None = None
    phase: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Kept, but not read."""

    @model_validator(mode="after")
    def _only_users_show_images(self) -> Self:
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, ResponseImagePart) and self.role != "user":
                message = f"images are read in messages of role user, not {self.role}"
                raise failure("invalid", message, "content", index, "type")
        return self

    def stored(self, item_id: str) -> Json:
        written = self.role == "assistant"
        return {
            "id": self.id or item_id,
            "type": "message",
            "status": self.status or "completed",
            "role": self.role,
            "content": output_parts(self.content) if written else input_parts(self.content),
        }


class SummaryText(Part):
    type: Literal["summary_text"]
    text: Text


class ReasoningText(Part):
    type: Literal["reasoning_text"]
    text: Text


class ReasoningItem(Part):
    """The thoughts of the model. `encrypted_content` of another server is kept but not read."""

    type: Literal["reasoning"]
    id: Id | None = None
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    """Kept, but not read."""
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_PARTS)] | None = (
        None
    )
    """The thoughts."""
    encrypted_content: Text | None = None
    """Kept, but not read."""
    status: Status | None = None

    def stored(self, item_id: str) -> Json:
        item: Json = {
            "id": self.id or item_id,
            "type": "reasoning",
            "status": self.status or "completed",
            "summary": [{"type": part.type, "text": part.text} for part in self.summary or ()],
            "content": [{"type": part.type, "text": part.text} for part in self.content or ()],
        }
        if self.encrypted_content is not None:
            item["encrypted_content"] = self.encrypted_content
        return item


class ItemReference(Part):
    """An item of a stored response, by its id."""

    model_config = ConfigDict(json_schema_extra=never(role={}))

    type: Literal["item_reference"] | None = None
    id: Id
    """Id of the item."""


def _item_tag(item: Any) -> str | None:
    """Return the branch of the union. OpenAI's clients leave out the type of two kinds."""
    kind = kind_of(item)
    if isinstance(item, dict) and kind is None:
        is_reference = "id" in item and "role" not in item
        kind = "item_reference" if is_reference else "message"
    return f"<{kind}>" if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CustomCallOutputItem, Tag("<custom_tool_call_output>")]
    | Annotated[SearchCallItem, Tag("<tool_search_call>")]
    | Annotated[SearchOutputItem, Tag("<tool_search_output>")]
    | Annotated[AdditionalToolsItem, Tag("<additional_tools>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _item_tag,
        custom_error_type="unsupported",
        custom_error_message="`type` must be message, reasoning, item_reference, "
        "additional_tools, or the call or the output of a function, a custom tool or a tool_search",
    ),
]


def _few_parts(value: Any) -> Any:
    """Limit the parts of all items: checking a million would stop every stream for 1 s."""
    items = value if isinstance(value, list) else []
    members = [item.values() for item in items[: MAX_ITEMS + 1] if isinstance(item, dict)]
    lists = [member for values in members for member in values if isinstance(member, list)]
    parts = sum(map(len, lists))
    if parts > MAX_ITEMS:
        raise failure("invalid", f"may have at most {MAX_ITEMS} parts in total, not {parts}")
    return value


InputItems = Annotated[
    list[InputItem], Field(fail_fast=True, min_length=1, max_length=MAX_ITEMS), Tag("<list>")
]
Input = Annotated[
    Annotated[Text, Tag("<one>")] | InputItems,
    shape_of("a string or a list of items"),
    BeforeValidator(_few_parts),
]
