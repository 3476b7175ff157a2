"""The fields about tools of a chat body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, StringConstraints, Tag

from server.http.body import JsonObject, Part, Text, failure, small
from server.text.tools import Tool, ToolMode, ToolUse, function_tool

MAX_TOOLS = 1024
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:/-]{1,256}$")]


class FunctionDefinition(Part):
    name: Name
    """Name of the function."""
    description: Text | None = None
    """The purpose of the function, for the model."""
    parameters: JsonObject | None = None
    """JSON Schema of the arguments, an object."""
    strict: bool | None = None
    """Hold the arguments to the schema."""

    def tool(self) -> Tool:
        return function_tool(self.name, self.description, self.parameters, strict=self.strict)


class FunctionTool(Part):
    type: Literal["function"]
    """Only functions."""
    function: FunctionDefinition
    """The function."""

    def tool(self) -> Tool:
        return self.function.tool()


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
    BeforeValidator(small),
]


class FunctionName(Part):
    name: Name
    """Name of the function that the model must call."""


class NamedChoice(Part):
    type: Literal["function"]
    """Only functions."""
    function: FunctionName
    """The function that the model must call."""


class AllowedTools(Part):
    mode: Literal["auto", "required"]
    """Whether the model must call one of them."""
    tools: Annotated[list[NamedChoice], Field(fail_fast=True, max_length=MAX_TOOLS)]
    """The tools that the model sees."""


class AllowedChoice(Part):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
    """Some of the tools, and whether the model must call one of them."""


def _shape(value: Any) -> str:
    if isinstance(value, str):
        return "<mode>"
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<allowed>" if kind == "allowed_tools" else "<named>"


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")]
    | Annotated[NamedChoice, Tag("<named>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(_shape),
]


def tool_use(
    tools: list[FunctionTool] | None,
    choice: ToolMode | NamedChoice | AllowedChoice | None,
    *,
    parallel: bool,
) -> ToolUse:
    """Return the tools of a request as the generation reads them.

    Raises a validation error if `choice` allows a function that `tools` does not have.
    """
    given = [tool.tool() for tool in tools or ()]
    match choice:
        case NamedChoice():
            return ToolUse(given, "required", choice.function.name, allows_parallel=parallel)
        case AllowedChoice(allowed_tools=allowed):
            names = [entry.function.name for entry in allowed.tools]
            path = ("tool_choice", "allowed_tools", "tools")
            shown = allowed_tools(given, dict(enumerate(names)), path, ("function", "name"))
            return ToolUse(shown, allowed.mode, allows_parallel=parallel)
    return ToolUse(given, choice or "auto", allows_parallel=parallel)


def allowed_tools(
    offered: Sequence[Tool],
    names: Mapping[int, str | None],
    path: Sequence[str],
    member: Sequence[str],
) -> list[Tool]:
    """Return the tools that `allowed_tools` names; the model does not see the others.

    `names` are by their places in the list at `path`, each in a member of its entry. Raises a
    validation error for a name that no tool has.
    """
    known = {tool.name for tool in offered}
    for place, name in names.items():
        if name not in known:
            message = "is not the name of a function in tools"
            raise failure("invalid", message, *path, place, *member)
    wanted = set(names.values())
    return [tool for tool in offered if tool.name in wanted]


# ---- functions, which OpenAI's API had before tools ----------------------------------------------


Functions = Annotated[
    list[FunctionDefinition],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    BeforeValidator(small),
]
FunctionMode = Literal["none", "auto"]
FunctionChoice = Annotated[
    Annotated[FunctionMode, Tag("<mode>")] | Annotated[FunctionName, Tag("<named>")],
    Discriminator(_shape),
]


def function_use(functions: Functions, choice: FunctionMode | FunctionName | None) -> ToolUse:
    """Return the functions of a request as tools. An answer calls one of them at most."""
    mode: ToolMode = choice if isinstance(choice, str) else "auto"
    name = None
    if isinstance(choice, FunctionName):
        mode, name = "required", choice.name
    return ToolUse(
        [function.tool() for function in functions],
        mode,
        name,
        allows_parallel=False,
        param="functions",
        choice_param="function_call",
    )
