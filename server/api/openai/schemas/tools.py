"""The fields about tools of a chat body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from server.http.body import Part, failure
from server.text.parsers.tools import Tool, ToolMode, ToolUse, function_tool

MAX_TOOLS = 1024
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]


class FunctionDefinition(Part):
    name: Name
    """Name of the function."""
    description: str | None = None
    """The purpose of the function, for the model."""
    parameters: dict[str, Any] | None = None
    """JSON Schema of the arguments, an object."""
    strict: bool | None = None
    """Hold the arguments to the schema."""


class FunctionTool(Part):
    type: Literal["function"]
    """Only functions."""
    function: FunctionDefinition
    """The function."""

    def tool(self) -> Tool:
        given = self.function
        return function_tool(given.name, given.description, given.parameters, strict=given.strict)


def _functions_only(value: Any) -> Any:
    """Refuse tools that OpenAI's own servers run, by their type."""
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise failure("unsupported", "only function tools are supported", index, "type")
    return value


Tools = Annotated[
    list[FunctionTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    BeforeValidator(_functions_only),
]


class FunctionName(Part):
    name: Name
    """Name of the function that the model must call."""


class NamedChoice(Part):
    type: Literal["function"]
    """Only functions."""
    function: FunctionName
    """The function that the model must call."""


def _shape(value: Any) -> str:
    return "<mode>" if isinstance(value, str) else "<named>"


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")] | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(_shape),
]


def tool_use(
    tools: list[FunctionTool] | None, choice: ToolMode | NamedChoice | None, *, parallel: bool
) -> ToolUse:
    given = [tool.tool() for tool in tools or ()]
    if isinstance(choice, NamedChoice):
        return ToolUse(given, "required", choice.function.name, allows_parallel=parallel)
    return ToolUse(given, choice or "auto", allows_parallel=parallel)
