"""Tools of Anthropic's API, and how they may be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

from server.api.anthropic.request_blocks import Block
from server.api.openai.schemas.fields import TEXT, having
from server.api.openai.schemas.structured import Schema
from server.api.openai.schemas.tools import MAX_TOOLS
from server.http.body import Part, Text, failure, small
from server.text.tools import NO_TOOLS, Tool, ToolMode, ToolUse, function_tool

FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
MODES: dict[str, ToolMode] = {
    "auto": "auto",
    "any": "required",
    "tool": "required",
    "none": "none",
}


class ToolDefinition(Block):
    """A function of the client. Tools that Anthropic defines or runs have other types."""

    type: Literal["custom"] | None = None
    name: FunctionName
    """Name of the function."""
    description: Text | None = None
    """The purpose of the function, for the model."""
    input_schema: Schema
    """JSON Schema of the arguments."""
    strict: bool | None = None
    """Hold the arguments to the schema."""

    @model_validator(mode="before")
    @classmethod
    def _of_the_client(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            message = f"tools of type {kind[:64]!r} are not supported, only those of the client"
            raise failure("unsupported", message, "type")
        return value

    def tool(self) -> Tool:
        return function_tool(self.name, self.description, self.input_schema, strict=self.strict)


Tools = Annotated[
    list[ToolDefinition],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    BeforeValidator(small),
]


class ToolChoice(Part):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [having(type={"enum": ["auto", "any", "none"]}), having(name=TEXT)]
        }
    )

    type: Literal["auto", "any", "tool", "none"]
    """`any` calls some tool, and `tool` the named one."""
    name: FunctionName | None = None
    """The tool to call."""
    disable_parallel_tool_use: bool | None = None
    """End the answer with its first call."""

    @model_validator(mode="after")
    def _tool_has_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise failure("invalid", "is required with the type tool", "name")
        return self


def check_choice(choice: ToolChoice, tools: Sequence[ToolDefinition]) -> None:
    """Check that the tools can be called as `choice` demands."""
    if MODES[choice.type] != "required":
        return
    if not tools:
        raise failure("invalid", f"{choice.type} needs tools", "tool_choice", "type")
    names = [tool.name for tool in tools]
    if choice.type == "tool" and choice.name not in names:
        raise failure("invalid", "is none of the tools", "tool_choice", "name")


def tool_use_of(tools: Sequence[ToolDefinition], choice: ToolChoice | None) -> ToolUse:
    """Return the tools of a request, independent of this API."""
    if not tools:
        return NO_TOOLS
    if choice is None:
        return ToolUse([definition.tool() for definition in tools])
    return ToolUse(
        tools=[definition.tool() for definition in tools],
        mode=MODES[choice.type],
        name=choice.name if choice.type == "tool" else None,
        allows_parallel=not choice.disable_parallel_tool_use,
    )
