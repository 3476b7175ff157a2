"""Body of /v1/chat/completions: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

import contextlib
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    Tag,
    field_validator,
    model_validator,
)

from server.api.openai.schemas.fields import INTEGER, LIST, TRUE, Between, having, never, shape_of
from server.api.openai.schemas.generate import NOT_STREAMED, GenerateBody
from server.generation.chat_prompt import Chat
from server.http.body import Part, failure

MAX_PARTS = 4096  # limit of the messages, and of the text parts in all messages together


class TextPart(Part):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<one>")] | Annotated[list[TextPart], Field(fail_fast=True), Tag("<list>")],
    shape_of("a string or a list of text parts"),
]


class FunctionCall(Part):
    name: str
    arguments: str | dict[str, Any] = ""  # JSON text in OpenAI's API


class ToolCall(Part):
    """A call that the assistant made."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it: with the arguments as an object."""
        call = self.model_dump(exclude_none=True)
        arguments = self.function.arguments
        if isinstance(arguments, str):
            # If the model wrote invalid JSON, the template shows it as it was.
            with contextlib.suppress(orjson.JSONDecodeError):
                call["function"]["arguments"] = orjson.loads(arguments or "{}")
        return call


CONTENT = {"type": ["string", "array"]}
CALLS = LIST | {"minItems": 1}


class ChatMessage(Part):
    """One message. Other fields (audio, refusal, …) are ignored."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                having(content=CONTENT),
                having(role={"const": "assistant"}, tool_calls=CALLS),
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    reasoning_content: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for index, part in enumerate(value if isinstance(value, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise failure("unsupported", "only text parts are supported", index, "type")
        return value

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise failure("invalid", f"a message of role {self.role} needs content", "content")
        return self

    @property
    def text(self) -> str | None:
        """The text, with one line per text part as in vLLM. OpenAI does not document this.

        None: a message whose tool calls say it all. Templates distinguish it from an empty text.
        """
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content if self.content or self.tool_calls else ""

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        message: dict[str, Any] = {"role": self.role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return message


def _few_parts(value: Any) -> Any:
    """Limit the text parts of all messages: checking a million would stop every stream for 1 s."""
    messages = value if isinstance(value, list) else []
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_PARTS:
        raise failure("invalid", f"may have at most {MAX_PARTS} text parts in total, not {parts}")
    return value


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_PARTS),
    BeforeValidator(_few_parts),
]


class TemplateArguments(Part):
    """The template arguments of a request.

    Only known names with scalar values are allowed, because templates are code: CVE-2025-62426
    exploited arguments that were passed on unchecked.
    """

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None

    def given(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


ONE_ENDING = never(continue_final_message=TRUE, add_generation_prompt=TRUE)


def check_ending(body: Any) -> None:
    """Check that the prompt ends either with a new turn or inside the last message, not both."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "needs add_generation_prompt to be false, because it starts no new turn"
        raise failure("invalid", message, "continue_final_message")


class ChatBody(GenerateBody):
    OPERATION = "chat"
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = GenerateBody.UNSUPPORTED | {
        **dict.fromkeys(("tools", "functions", "documents"), ([],)),
        **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
        **dict.fromkeys(("audio", "prediction", "web_search_options", "chat_template"), ()),
        "moderation": (),
        "modalities": (["text"],),
        "echo": (False,),
        "best_of": (1,),
    }
    HINTS: ClassVar[dict[str, str]] = {
        "tools": " Turn off native function calling in the client (in Open WebUI: Legacy).",
    }

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                NOT_STREAMED,
                ONE_ENDING,
                {"anyOf": [having(logprobs=TRUE), never(top_logprobs=INTEGER | {"minimum": 1})]},
            ]
        }
    )

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Between(0, 20)] | None = None
    reasoning_effort: Annotated[str, StringConstraints(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateArguments | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        check_ending(self)
        if self.top_logprobs and not self.logprobs:
            raise failure("invalid", "needs logprobs to be true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def chat(self) -> Chat:
        """Return the conversation for the model's template. Takes long for a long body."""
        arguments: dict[str, Any] = {}
        if self.chat_template_kwargs is not None:
            arguments = self.chat_template_kwargs.given()
        if self.reasoning_effort is not None:
            arguments.setdefault("reasoning_effort", self.reasoning_effort)
        return Chat(
            messages=[message.for_template() for message in self.messages],
            arguments=arguments,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
        )
