"""Items of a request's input, and their form in the store.

The stored form is the one that the API returns: messages have a list of parts, and every item has
an id.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)

from server.api.openai.schemas.chat import RefusalPart
from server.api.openai.schemas.fields import MAX_TOKEN_IDS, never, shape_of
from server.http.body import MAX_PARTS, JsonObject, Part, Text, failure

MAX_ITEMS = 4096  # limit of the items, and of the parts in all items together
Json = dict[str, Any]
Id = Annotated[str, StringConstraints(max_length=256)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]
TextKind = Literal["input_text", "output_text", "text"]
READABLE = ("input_text", "output_text", "text", "refusal")


def _kind(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


# ---- contents --------------------------------------------------------------------------------


class ResponseTextPart(Part):
    """A text of any role. Clients send the last two fields with answers that they send back."""

    type: TextKind
    text: Text
    annotations: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    logprobs: Annotated[list[JsonObject], Field(max_length=MAX_TOKEN_IDS)] | None = None


AnyPart = Annotated[
    Annotated[ResponseTextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    Discriminator(lambda part: "<refusal>" if _kind(part) == "refusal" else "<text>"),
]


def _readable(value: Any) -> Any:
    """Refuse images and files by the name of their field."""
    for index, part in enumerate(value if isinstance(value, list) else ()):
        kind = _kind(part)
        if isinstance(kind, str) and kind not in READABLE:
            raise failure("unsupported", "only text parts are supported", index, "type")
    return value


Content = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[AnyPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    shape_of("a string or a list of text parts"),
    BeforeValidator(_readable),
]


def _input_parts(content: Content) -> list[Json]:
    """Return the stored form of a content that the model reads and did not write."""
    if isinstance(content, str):
        return [{"type": "input_text", "text": content}]
    return [{"type": "input_text", "text": part.text} for part in content]


def _output_parts(content: Content) -> list[Json]:
    """Return the stored form of a content that the model wrote."""
    if isinstance(content, str):
        return [_output_text(content)]
    return [_output_part(part) for part in content]


def _output_part(part: AnyPart) -> Json:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    return _output_text(part.text, part.annotations or (), part.logprobs or ())


def _output_text(
    text: str, annotations: Sequence[Json] = (), logprobs: Sequence[Json] = ()
) -> Json:
    return {
        "type": "output_text",
        "text": text,
        "annotations": list(annotations),
        "logprobs": list(logprobs),
    }


# ---- items -----------------------------------------------------------------------------------


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

    def stored(self, item_id: str) -> Json:
        written = self.role == "assistant"
        return {
            "id": self.id or item_id,
            "type": "message",
            "status": self.status or "completed",
            "role": self.role,
            "content": _output_parts(self.content) if written else _input_parts(self.content),
        }


class FunctionCallItem(Part):
    """A call that the model made. `arguments` is JSON, unless the answer was cut."""

    type: Literal["function_call"]
    id: Id | None = None
    call_id: CallId
    """The id that a result answers."""
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)]
    """Name of the function."""
    arguments: Text
    """JSON text."""
    status: Status | None = None

    def stored(self, item_id: str) -> Json:
        return {
            "id": self.id or item_id,
            "type": "function_call",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            "arguments": self.arguments,
        }


class FunctionCallOutputItem(Part):
    type: Literal["function_call_output"]
    id: Id | None = None
    call_id: CallId
    """The call that this is the result of."""
    output: Content
    """The result as text."""
    status: Status | None = None

    def stored(self, item_id: str) -> Json:
        output: str | list[Json] = self.output if isinstance(self.output, str) else []
        if isinstance(self.output, list):
            output = _input_parts(self.output)
        return {
            "id": self.id or item_id,
            "type": "function_call_output",
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": output,
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


ContentItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem


def _item_tag(item: Any) -> str | None:
    """Return the branch of the union. OpenAI's clients leave out the type of two kinds."""
    kind = _kind(item)
    if isinstance(item, dict) and kind is None:
        is_reference = "id" in item and "role" not in item
        kind = "item_reference" if is_reference else "message"
    return f"<{kind}>" if isinstance(kind, str) else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ItemReference, Tag("<item_reference>")],
    Discriminator(
        _item_tag,
        custom_error_type="unsupported",
        custom_error_message="`type` must be message, function_call, function_call_output, "
        "reasoning or item_reference",
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
