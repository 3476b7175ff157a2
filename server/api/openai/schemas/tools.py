"""The fields about tools of a chat body."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from server.http.body import Part, failure
from server.text.parsers.tools import Tool, ToolMode, ToolUse

MAX_TOOLS = 1024
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


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
        function = self.function
        parameters = function.parameters or NO_PARAMETERS
        shown: dict[str, Any] = {"name": function.name}
        if function.description is not None:
            shown["description"] = function.description
        shown["parameters"] = parameters
        return Tool(
            name=function.name,
            parameters=parameters,
            for_template={"type": "function", "function": shown},
            is_strict=bool(function.strict),
        )


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
