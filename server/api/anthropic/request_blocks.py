"""Messages of Anthropic's API and their content blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    model_validator,
)

from server.api.openai.schemas.fields import few_inside, having, never, shape_of
from server.http.body import MAX_PARTS, JsonObject, Part, Text, failure
from server.images.content import ImageBlock

MAX_BLOCKS = 4096  # limit of the messages, and of the blocks in all messages together
Name = Annotated[str, StringConstraints(max_length=256)]

USER_TYPES = ("text", "image", "tool_result")
ASSISTANT_TYPES = ("text", "thinking", "redacted_thinking", "tool_use")
ALL_TYPES = tuple(dict.fromkeys((*USER_TYPES, *ASSISTANT_TYPES)))
RESULT_TYPES = ("text", "image")
ROLE_TYPES = {"user": USER_TYPES, "assistant": ASSISTANT_TYPES, "system": ("text",)}


class Block(Part):
    """`cache_control` is accepted without effect, because the prefix cache needs no marks."""

    cache_control: JsonObject | None = None
    """No effect: prefixes are always cached."""


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    """The text."""
    citations: Annotated[list[JsonObject], Field(max_length=MAX_PARTS)] | None = None
    """No effect: the model does not see them."""


class ThinkingBlock(Block):
    """Thoughts of an earlier turn. The signature is not checked."""

    type: Literal["thinking"]
    thinking: Text
    """The thoughts."""
    signature: Text | None = None
    """Not checked."""


class RedactedThinkingBlock(Block):
    """Thoughts that only another provider can decrypt. Their `data` is ignored, and named so."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: Name
    """The id that a result answers."""
    name: Name
    """Name of the function."""
    input: JsonObject
    """The arguments."""
    caller: JsonObject | None = None
    """No effect: only the model calls functions here."""


def only(types: Sequence[str]) -> Callable[[Any], Any]:
    """Return a validator of contents that names the first block whose type is none of `types`."""

    def check(value: Any) -> Any:
        for index, block in enumerate(value if isinstance(value, list) else ()):
            kind = _type(block)
            if isinstance(kind, str) and kind not in types:
                known = ", ".join(types)
                message = f"blocks of type {kind[:64]!r} are not supported here, only {known}"
                raise failure("unsupported", message, index, "type")
        return value

    return check


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else getattr(block, "type", None)


Texts = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_BLOCKS), Tag("<list>")],
    shape_of("a string or a list of text blocks"),
    BeforeValidator(only(("text",))),
]


ResultContent = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[
        list[
            Annotated[
                Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
                Discriminator(
                    lambda block: _tag(block),
                    custom_error_type="invalid",
                    custom_error_message="a block is an object with a type",
                ),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_BLOCKS),
        Tag("<list>"),
    ],
    shape_of("a string or a list of text and image blocks"),
    BeforeValidator(only(RESULT_TYPES)),
]


class ToolResultBlock(Block):
    """The result of a call. An error is marked in the text, which is all that templates show."""

    type: Literal["tool_result"]
    tool_use_id: Name
    """The call that this is the result of."""
    content: ResultContent | None = None
    """The result. A model that takes no images reads that they were left out."""
    is_error: bool | None = None
    """The call failed; the model reads `Error: ` before the content."""


def _tag(block: Any) -> str | None:
    kind = _type(block)
    return f"<{kind}>" if isinstance(kind, str) else None


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _tag, custom_error_type="invalid", custom_error_message="a block is an object with a type"
    ),
]
Content = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[AnyBlock], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    shape_of("a string or a list of blocks"),
    BeforeValidator(only(ALL_TYPES)),
]


def _never_in(role: str) -> dict[str, Any]:
    """Return the JSON schema of messages without blocks that a message of `role` cannot have."""
    foreign = [kind for kind in ALL_TYPES if kind not in ROLE_TYPES[role]]
    block = having(type={"enum": foreign})
    return never(role={"const": role}, content={"type": "array", "contains": block})


class Message(Part):
    model_config = ConfigDict(json_schema_extra={"allOf": [_never_in(role) for role in ROLE_TYPES]})

    role: Literal["user", "assistant", "system"]
    """The writer of the message."""
    content: Content
    """Text, or blocks."""

    @model_validator(mode="after")
    def _blocks_of_its_role(self) -> Message:
        for index, block in enumerate(self.blocks):
            if block.type not in ROLE_TYPES[self.role]:
                message = f"a message of role {self.role} has no blocks of type {block.type}"
                raise failure("invalid", message, "content", index, "type")
        return self

    @property
    def blocks(self) -> Sequence[AnyBlock]:
        """The content as blocks. A string is one text block."""
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content


def _num_blocks(content: Any) -> int:
    """Return the number of blocks in a content, those inside blocks included."""
    total = 0
    for block in content if isinstance(content, list) else ():
        total += 1
        if isinstance(block, dict):
            total += _num_blocks(block.get("content"))
    return total


Messages = Annotated[
    list[Message],
    Field(fail_fast=True, min_length=1, max_length=MAX_BLOCKS),
    BeforeValidator(partial(few_inside, count=_num_blocks, most=MAX_BLOCKS, noun="blocks")),
]
