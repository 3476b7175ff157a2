"""Body of POST /v1/responses: OpenAI's fields, and the sampling parameters of the chat API."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)

from server.api.openai.schemas.chat import TemplateArguments
from server.api.openai.schemas.fields import (
    INT32,
    Alternatives,
    Between,
    Count,
    Effort,
    by_type,
)
from server.api.openai.schemas.sampling_fields import (
    SAMPLING_DEFAULTS,
    SamplingBody,
    given_parameters,
)
from server.api.openai.schemas.structured import ANY_OBJECT, Schema, TextFormat
from server.api.responses.items import Input
from server.api.responses.offered import Offered, ToolsInItems, offered
from server.api.responses.tool_items import (
    AdditionalToolsItem,
    OutputItem,
    SearchOutputItem,
    echoed,
)
from server.api.responses.tools import AnyTool, ToolChoice, Tools, left_out
from server.generation.chat_prompt import Chat
from server.generation.options import GenerationOptions
from server.generation.thinking import Thinking
from server.http.body import Part, Text, few
from server.text.wanted_grammar import WantedGrammar

MAX_METADATA = 16
LOGPROBS = "message.output_text.logprobs"
# All but logprobs belong to tools of OpenAI's servers, or ask for what the items always contain.
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Metadata = Annotated[
    dict[
        Annotated[str, StringConstraints(max_length=64)],
        Annotated[str, StringConstraints(max_length=512)],
    ],
    BeforeValidator(partial(few, most=MAX_METADATA, noun="pairs")),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
            "maxProperties": MAX_METADATA,
        }
    ),
]


class ResponseJsonObject(Part):
    type: Literal["json_object"]


class ResponseJsonSchema(Part):
    """`strict` changes nothing: the answer always follows the schema."""

    type: Literal["json_schema"]
    name: str
    """Repeated in the response."""
    description: Text | None = None
    """Repeated in the response."""
    strict: bool | None = None
    """No effect."""
    value: Annotated[Schema, Field(alias="schema")]
    """The JSON Schema that the text fits."""


Format = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[ResponseJsonObject, Tag("<json_object>")]
    | Annotated[ResponseJsonSchema, Tag("<json_schema>")],
    by_type("text, json_object or json_schema"),
]


class ResponseText(Part):
    format: Format | None = None
    """Text, a JSON object, or JSON that fits a schema."""
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect."""


class ResponseReasoning(Part):
    effort: Effort | None = None
    """How much the model thinks; `none` and `minimal` turn thoughts off if the template can."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: the response has the thoughts themselves."""


class ResponseStreamOptions(Part):
    include_obfuscation: bool | None = None
    """No effect."""


class ResponsesBody(SamplingBody):
    """A null field has the same meaning as an absent one."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        ("service_tier", "prompt_cache_retention", "prompt_cache_options")
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "truncation": ("disabled",),
        **dict.fromkeys(("conversation", "prompt", "moderation"), ()),
    }
    HINTS: ClassVar[dict[str, str]] = {
        "background": " Set stream to true instead.",
        "conversation": " Use previous_response_id instead.",
    }
    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS | {
        "store": True,
        "top_logprobs": 0,
        "parallel_tool_calls": True,
    }

    input: Input
    """A text, or the items that the model answers."""
    instructions: Text | None = None
    """A system message before the input. The next response does not inherit it."""
    previous_response_id: Annotated[str, StringConstraints(max_length=256)] | None = None
    """A stored response whose conversation the input continues."""
    store: bool | None = None
    """Keep the response, so that a later one can continue it."""
    stream_options: ResponseStreamOptions | None = None
    """Options of a stream."""
    include: Annotated[list[Include], Field(fail_fast=True, max_length=64)] | None = None
    """More to return; only logprobs have an effect."""
    top_logprobs: Alternatives | None = None
    """Alternatives per token; above 0 also returns the logprobs."""
    max_output_tokens: Count | None = None
    """Most tokens of an answer. More than the context has room for is lowered to that."""
    max_tool_calls: Annotated[int, Between(0, INT32)] | None = None
    """Most calls of tools that a server runs. This server runs none."""
    text: ResponseText | None = None
    """Format of the text."""
    reasoning: ResponseReasoning | None = None
    """How the model thinks."""
    tools: Tools | None = None
    """Tools that the model may call. Those that OpenAI's servers run are left out."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls tools. An object names one, or those that it may call."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in one answer; otherwise it ends with the first."""
    metadata: Metadata | None = None
    """Texts that the response repeats."""
    user: str | None = None
    """Repeated in the response."""
    safety_identifier: str | None = None
    """Repeated in the response."""
    prompt_cache_key: str | None = None
    """Repeated in the response."""
    chat_template_kwargs: TemplateArguments | None = None
    """Variables of the chat template; 16 KiB of JSON at most."""

    @model_validator(mode="after")
    def _tools_are_consistent(self) -> ResponsesBody:
        if self.previous_response_id is None:  # otherwise earlier items may have more tools
            self.offered()
        return self

    def offered(self, more: ToolsInItems | None = None) -> Offered:
        """Return the tools that the model sees. `more` are those of all items of a conversation.

        Raises a validation error as `offered.offered` does.
        """
        more = more or self._tools_in_input()
        tools = [*(self.tools or ()), *more.added]
        parallel = self.parallel_tool_calls is not False
        return offered(tools, more.found, self.tool_choice, parallel=parallel)

    def _tools_in_input(self) -> ToolsInItems:
        added: list[AnyTool] = []
        found: list[AnyTool] = []
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, AdditionalToolsItem):
                added += item.tools
            elif isinstance(item, SearchOutputItem):
                found += item.tools
        return ToolsInItems(added, found)

    @property
    def ignored(self) -> list[str]:
        """Names of fields without effect: the unknown ones, and known ones that are not applied."""
        names = [*super().ignored, *left_out(self.tools)]
        for item in self.input if isinstance(self.input, list) else ():
            if isinstance(item, OutputItem):
                names += item.unread
            elif isinstance(item, AdditionalToolsItem | SearchOutputItem):
                names += [f"input.{name}" for name in left_out(item.tools)]
        names = list(dict.fromkeys(names))
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            names.append("text.verbosity")
        if self.reasoning is not None and self.reasoning.summary is not None:
            names.append("reasoning.summary")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            names.append("stream_options.include_obfuscation")
        return names

    @property
    def num_logprobs(self) -> int:
        """The number of alternatives per token; -1: no logprobs. As in SamplingParams."""
        if self.top_logprobs or LOGPROBS in (self.include or ()):
            return self.top_logprobs or 0
        return -1

    def chat(self, messages: list[dict[str, Any]], tools: Offered | None = None) -> Chat:
        """Return the conversation for the model's template; `tools` are its own by default."""
        return Chat(
            messages=messages,
            arguments=dict(self.chat_template_kwargs or {}),
            thinking=Thinking(self.reasoning.effort if self.reasoning else None),
            tool_use=(tools or self.offered()).use,
        )

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        return GenerationOptions(
            operation="chat",
            **self.sampling_options(),
            model=self.model,
            max_tokens=self.max_output_tokens,
            grammar=self._grammar(),
            num_logprobs=self.num_logprobs,
        )

    def _grammar(self) -> WantedGrammar | None:
        match self.text.format if self.text else None:
            case ResponseJsonObject():
                return WantedGrammar("text.format", "json_schema", ANY_OBJECT)
            case ResponseJsonSchema(value=schema):
                return WantedGrammar("text.format.schema", "json_schema", schema)
        return None

    def echo(self) -> dict[str, Any]:
        """Return the fields of the request that the response repeats."""
        sampling = SAMPLING_DEFAULTS | given_parameters(self)
        choice: Any = self.tool_choice or "auto"
        if isinstance(choice, Part):
            choice = choice.model_dump(exclude_none=True)
        fields = {
            "instructions": self.instructions,
            "previous_response_id": self.previous_response_id,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "presence_penalty": sampling["presence_penalty"],
            "frequency_penalty": sampling["frequency_penalty"],
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "reasoning": self._reasoning_echo(),
            "text": self._text_echo(),
            "tools": echoed(self.tools),
            "tool_choice": choice,
            "top_logprobs": self.top_logprobs or 0,
        }
        if self.user is not None:
            fields["user"] = self.user
        return fields

    def _reasoning_echo(self) -> dict[str, Any]:
        effort = self.reasoning.effort if self.reasoning else None
        return {"effort": effort, "summary": None}

    def _text_echo(self) -> dict[str, Any]:
        echo: dict[str, Any] = {"format": {"type": "text"}, "verbosity": "medium"}
        if self.text is None:
            return echo
        if self.text.format is not None:
            echo["format"] = self.text.format.model_dump(by_alias=True, exclude_none=True)
        if self.text.verbosity is not None:
            echo["verbosity"] = self.text.verbosity
        return echo
