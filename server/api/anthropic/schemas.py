"""Bodies of /v1/messages and /v1/messages/count_tokens, as in Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from engine.protocol.sampling_parameters import PARAMETERS
from server.api.anthropic.conversation import template_messages
from server.api.anthropic.request_blocks import Messages, Texts
from server.api.anthropic.tools import ToolChoice, Tools, check_choice, tool_use_of
from server.api.openai.schemas.fields import INT32, Between, CountOrZero, Effort, having
from server.api.openai.schemas.sampling_fields import (
    MAX_STOPS,
    SAMPLING_DEFAULTS,
    Stop,
    given_parameters,
    with_parameters,
)
from server.api.openai.schemas.structured import Schema
from server.generation.chat_prompt import Chat
from server.generation.options import GenerationOptions
from server.generation.thinking import Thinking
from server.http.body import Body, Part
from server.text.wanted_grammar import WantedGrammar

FORCES_CALL = having(type={"enum": ["any", "tool"]})


class ThinkingConfig(Part):
    type: Literal["enabled", "disabled", "between_tools", "adaptive"]
    """`disabled` turns the thoughts off, and so does `between_tools`."""
    budget_tokens: Annotated[int, Between(0, INT32)] | None = None
    """Most tokens of the thoughts; then their closing mark is written."""
    display: Literal["summarized", "omitted"] | None = None
    """`omitted` leaves the text of the thoughts out; the signature holds it for the next turn."""


class DiagnosticsRequest(Part):
    previous_message_id: str | None = None
    """The message to compare with. Without it, the answer has no comparison."""


class OutputFormat(Part):
    type: Literal["json_schema"]
    value: Annotated[Schema, Field(alias="schema")]
    """The JSON Schema that the answer fits."""


class OutputConfig(Part):
    effort: Effort | None = None
    """How much the model thinks, if the chat template has levels."""
    format: OutputFormat | None = None
    """The answer is JSON that fits a schema."""


class CountTokensBody(Body):
    """The fields that make the prompt. A null field has the same meaning as an absent one."""

    ACCEPTED: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "inference_geo", "speed")
    )
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "mcp_servers": ([],),
        "container": (),
        "output_format": (),
    }
    HINTS: ClassVar[dict[str, str]] = {"output_format": " Use output_config.format."}
    DEFAULTS: ClassVar[dict[str, Any]] = SAMPLING_DEFAULTS

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                having(tools={"type": "array", "minItems": 1}),
                {"not": having(tool_choice=FORCES_CALL)},
            ]
        }
    )

    messages: Messages
    """The conversation. A last message of the assistant is continued."""
    system: Texts | None = None
    """The system message."""
    tools: Tools | None = None
    """Functions of the client that the model may call."""
    tool_choice: ToolChoice | None = None
    """Whether the model calls tools; `auto` if there are tools."""
    thinking: ThinkingConfig | None = None
    """Whether the model thinks, if the chat template can switch that."""
    output_config: OutputConfig | None = None
    """Effort and format of the answer."""

    @model_validator(mode="after")
    def _choice_fits_tools(self) -> CountTokensBody:
        if self.tool_choice is not None:
            check_choice(self.tool_choice, self.tools or ())
        return self

    def chat(self) -> Chat:
        """Return the conversation for the model's template. Takes long for a long body.

        As in Anthropic's API, the answer continues a last message of the assistant.
        """
        is_continued = self.messages[-1].role == "assistant"
        return Chat(
            messages=template_messages(self.system, self.messages),
            arguments={},
            thinking=self._thinking(),
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            tool_use=tool_use_of(self.tools or (), self.tool_choice),
        )

    def _thinking(self) -> Thinking:
        effort = self.output_config.effort if self.output_config else None
        if self.thinking is None:
            return Thinking(effort)
        is_on = self.thinking.type not in ("disabled", "between_tools")
        display = self.thinking.display
        is_shown = None if display is None else display == "summarized"
        return Thinking(effort, is_on, self.thinking.budget_tokens, is_shown)


@with_parameters([name for name, parameter in PARAMETERS.items() if parameter.in_messages])
class MessagesBody(CountTokensBody):
    max_tokens: CountOrZero
    """Most tokens of an answer, lowered to the room in the context; 0 only fills the cache."""
    diagnostics: DiagnosticsRequest | None = None
    """The answer says which cached tokens of an earlier message it could not use, and why."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is made."""
    stop_sequences: Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    """Texts before which the answer ends."""

    @property
    def compared_id(self) -> str | None:
        """The id of the message whose prompt is compared with that of this request."""
        return None if self.diagnostics is None else self.diagnostics.previous_message_id

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation, independent of the API."""
        return GenerationOptions(
            operation="chat",
            model=self.model,
            stream=bool(self.stream),
            max_tokens=self.max_tokens,
            stop=self.stop_sequences or (),
            sampling=given_parameters(self),
            grammar=self._grammar(),
            omits_thoughts=self.thinking is not None and self.thinking.display == "omitted",
        )

    def _grammar(self) -> WantedGrammar | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = self.output_config.format.value
        return WantedGrammar("output_config.format.schema", "json_schema", schema)
