"""Body of /v1/chat/completions: OpenAI's fields and vLLM's extensions."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StringConstraints,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from server.api.openai.schemas.fields import (
    INTEGER,
    TRUE,
    Alternatives,
    Effort,
    few_inside,
    having,
    never,
    shape_of,
)
from server.api.openai.schemas.generate import SHARED_RULES, GenerateBody
from server.api.openai.schemas.tools import (
    FunctionCall,
    FunctionChoice,
    FunctionName,
    Functions,
    ToolCall,
    ToolChoice,
    Tools,
    function_use,
    tool_use,
)
from server.generation.chat_prompt import Chat
from server.generation.thinking import Thinking
from server.http.body import Part, Text, failure, few, picture_url
from server.text import exact_json
from server.text.content_parts import image_part, joined, text_part
from server.text.tools import NO_TOOLS, ToolUse

MAX_PARTS = 4096  # limit of the messages, and of the text parts in all messages together


class TextPart(Part):
    type: Literal["text"]
    text: Text


class RefusalPart(Part):
    """A refusal of the assistant, which the model reads as its text."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


DETAILS = ("auto", "low", "high", "original")
IMAGE_OBJECT = {
    "type": "object",
    "properties": {
        "url": {"type": "string", "description": "A `data:` URL, or an address of a host."},
        "detail": {
            "enum": [*DETAILS, None],
            "description": "`low` shrinks the picture to 512 pixels a side; others do nothing.",
        },
    },
    "required": ["url"],
}


def _image_object(value: Any) -> Any:
    """Read the object of an image as its URL and detail; a string is the URL alone."""
    if isinstance(value, str):
        return picture_url(value), None
    if not isinstance(value, dict):
        raise failure("invalid", "must be an object or a string")
    url, detail = value.get("url"), value.get("detail")
    if not isinstance(url, str):
        raise failure("invalid", "must be a string", "url")
    if detail is not None and detail not in DETAILS:
        raise failure("invalid", f"must be one of {', '.join(DETAILS)}", "detail")
    return picture_url(url, "url"), detail


class ImagePart(Part):
    """A picture. Some clients send the URL alone in place of the object."""

    type: Literal["image_url"]
    image_url: Annotated[
        tuple[Text, Text | None],
        BeforeValidator(_image_object),
        WithJsonSchema({"anyOf": [{"type": "string"}, IMAGE_OBJECT]}),
    ]
    """The image: an object with `url`, or the URL alone."""

    @property
    def part(self) -> dict[str, Any]:
        """The image as part of a content."""
        return image_part(*self.image_url, "messages.content.image_url")


PART_TYPES = ("text", "refusal", "image_url")
PART_TAGS = {"refusal": "<refusal>", "image_url": "<image>"}
AnyPart = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")],
    Discriminator(lambda part: PART_TAGS.get(_kind(part), "<text>")),
]
Content = Annotated[
    Annotated[Text, Tag("<one>")]
    | Annotated[list[AnyPart], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    shape_of("a string or a list of parts"),
]


def _kind(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else getattr(part, "type", None)


CONTENT = {"type": ["string", "array"]}


class ChatMessage(Part):
    """One message. Other fields (audio, refusal, …) are ignored."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [having(content=CONTENT), having(role={"const": "assistant"})]}
    )

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    """`developer` is read as `system`, and `function` as `tool`."""
    content: Content | None = None
    """May be missing only from an assistant's message."""
    name: Annotated[str, StringConstraints(max_length=256)] | None = None
    """Passed to the chat template."""
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=128)] | None = None
    """The calls that the assistant made."""
    tool_call_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The call that a tool's message answers."""
    function_call: FunctionCall | None = None
    """A call, in OpenAI's API before tools."""
    reasoning_content: Text | None = None
    """The assistant's thoughts before its answer, if the template reads them."""
    reasoning: Text | None = None
    """vLLM's newer name of `reasoning_content`, which takes precedence."""

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        for index, part in enumerate(value if isinstance(value, list) else ()):
            kind = _kind(part)
            if isinstance(kind, str) and kind not in PART_TYPES:
                known = "only parts of type text and image_url are supported"
                raise failure("unsupported", known, index, "type")
        return value

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise failure("invalid", f"a message of role {self.role} needs content", "content")
        if self.role in ("user", "tool", "function"):
            return self
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, ImagePart):
                message = f"images are read in messages of role user and tool, not {self.role}"
                raise failure("invalid", message, "content", index, "type")
        return self

    @property
    def readable(self) -> str | list[dict[str, Any]] | None:
        """The content as chat templates read it: a text, or parts. Images are not read yet.

        None: a message whose tool calls say it all. Templates distinguish it from an empty text.
        """
        if isinstance(self.content, list):
            parts = [
                part.part if isinstance(part, ImagePart) else text_part(part.text)
                for part in self.content
            ]
            return parts or ""
        return self.content if self.content or self.calls else ""

    @property
    def calls(self) -> list[ToolCall]:
        if self.tool_calls or self.function_call is None:
            return self.tool_calls or []
        return [ToolCall(type="function", function=self.function_call)]

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates read it."""
        role = "tool" if self.role == "function" else self.role
        message: dict[str, Any] = {"role": role, "content": self.readable}
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        given = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": thoughts,
        }
        message |= {name: value for name, value in given.items() if value is not None}
        if self.calls:
            message["tool_calls"] = [call.for_template() for call in self.calls]
        return message


def _num_parts(content: Any) -> int:
    return len(content) if isinstance(content, list) else 0


Messages = Annotated[
    list[ChatMessage],
    Field(fail_fast=True, min_length=1, max_length=MAX_PARTS),
    BeforeValidator(partial(few_inside, count=_num_parts, most=MAX_PARTS, noun="text parts")),
]


MAX_ARGUMENTS, MAX_ARGUMENT_BYTES = 64, 16384
RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "chat_template", "bos_token", "eos_token", "pad_token", "unk_token"),
    )
)
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Check the template arguments of a request. The template's limits bound what they can do.

    Names that the server sets are refused: CVE-2025-62426 exploited arguments that replaced them.
    """
    for name in given:
        if name in RESERVED:
            raise failure("unsupported", "is set by other fields of the request", name)
        if not NAME.fullmatch(name):
            raise failure("invalid", "has a member whose name is not that of a variable")
    if len(exact_json.dumps(given)) > MAX_ARGUMENT_BYTES:
        raise failure("invalid", f"may have at most {MAX_ARGUMENT_BYTES} bytes of JSON")
    return {name: value for name, value in given.items() if value is not None}


TemplateArguments = Annotated[
    Annotated[
        dict[str, Any],
        BeforeValidator(partial(few, most=MAX_ARGUMENTS)),
        AfterValidator(_arguments),
    ],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": f"^{NAME.pattern}$", "not": {"enum": sorted(RESERVED)}},
            "maxProperties": MAX_ARGUMENTS,
        }
    ),
]
ONE_ENDING = never(continue_final_message=TRUE, add_generation_prompt=TRUE)


FILLED_LIST: dict[str, Any] = {"type": "array", "minItems": 1}


def check_ending(body: Any) -> None:
    """Check that the prompt ends either with a new turn or inside the last message, not both."""
    if body.continue_final_message and body.add_generation_prompt:
        message = "needs add_generation_prompt to be false, because it starts no new turn"
        raise failure("invalid", message, "continue_final_message")


class ChatBody(GenerateBody):
    OPERATION = "chat"
    ACCEPTED: ClassVar[frozenset[str]] = GenerateBody.ACCEPTED | {"prediction"}  # only saves time
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = GenerateBody.UNSUPPORTED | {
        "documents": ([],),
        **dict.fromkeys(("audio", "web_search_options", "chat_template"), ()),
        "moderation": (),
        "modalities": (["text"],),
    }
    DEFAULTS: ClassVar[dict[str, Any]] = GenerateBody.DEFAULTS | {
        "top_logprobs": 0,
        "parallel_tool_calls": True,
        "include_reasoning": True,
        "add_generation_prompt": True,
    }
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                *SHARED_RULES,
                ONE_ENDING,
                never(functions=FILLED_LIST, tools=FILLED_LIST),
                never(functions=FILLED_LIST, tool_choice={"not": {"enum": [None, "auto"]}}),
                {"anyOf": [having(logprobs=TRUE), never(top_logprobs=INTEGER | {"minimum": 1})]},
            ]
        }
    )

    messages: Messages
    """The conversation; text only."""
    logprobs: bool | None = None
    """Return the logprob of each token."""
    top_logprobs: Alternatives | None = None
    """Alternatives per token; needs `logprobs`."""
    tools: Tools | None = None
    """Functions that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls tools; `auto` if there are tools. An object names one, or some."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer, up to 64; otherwise it ends with the first."""
    functions: Functions | None = None
    """Functions as in OpenAI's API before tools; the answer has one `function_call`."""
    function_call: FunctionChoice | None = None
    """The `tool_choice` of `functions`."""
    reasoning_effort: Effort | None = None
    """How much the model thinks; `none` and `minimal` turn thoughts off if the template can."""
    include_reasoning: bool | None = None
    """`false` leaves the thoughts out of the answer; `usage` still counts them."""
    echo: bool | None = None
    """Begin the answer with the last message, if that is the assistant's or is continued."""
    add_generation_prompt: bool | None = None
    """Open the turn of the answer."""
    continue_final_message: bool | None = None
    """Continue the last message, a text without tool calls, instead of a new turn."""
    chat_template_kwargs: TemplateArguments | None = None
    """Variables of the chat template; 16 KiB of JSON at most."""

    _tool_use: ToolUse = PrivateAttr(NO_TOOLS)

    @model_validator(mode="after")
    def _tools_are_consistent(self) -> ChatBody:
        if self.tools and self.functions:
            raise failure("invalid", "cannot be combined with tools", "functions")
        if self.functions and self.tool_choice not in (None, "auto"):
            raise failure("invalid", "is for tools; functions have function_call", "tool_choice")
        if self.functions or isinstance(self.function_call, FunctionName):
            self._tool_use = function_use(self.functions or [], self.function_call)
        else:
            parallel = self.parallel_tool_calls is not False
            self._tool_use = tool_use(self.tools, self.tool_choice, parallel=parallel)
        return self

    @model_validator(mode="after")
    def _consistent(self) -> ChatBody:
        check_ending(self)
        if self.top_logprobs and not self.logprobs:
            raise failure("invalid", "needs logprobs to be true", "top_logprobs")
        return self

    @property
    def echoed(self) -> str:
        """The text that the answer begins with, as in vLLM."""
        last = self.messages[-1]
        is_of_answer = last.role == "assistant" or self.add_generation_prompt is False
        return joined(last.readable) if self.echo and is_of_answer else ""

    @property
    def tool_use(self) -> ToolUse:
        return self._tool_use

    @property
    def num_logprobs(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def chat(self) -> Chat:
        """Return the conversation for the model's template. Takes long for a long body."""
        return Chat(
            messages=[message.for_template() for message in self.messages],
            arguments=dict(self.chat_template_kwargs or {}),
            thinking=Thinking(
                self.reasoning_effort,
                budget=self.thought_budget,
                budget_param="thinking_token_budget",
            ),
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            tool_use=self._tool_use,
        )
