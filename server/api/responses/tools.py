"""The tools of a Responses request, and which of them the model may or must call."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

from server.api.openai.schemas.fields import never, tag_of_type
from server.api.openai.schemas.tools import MAX_TOOLS, allowed_tools
from server.http.body import UNPRINTABLE, JsonObject, Part, Text, failure, small
from server.text.tools import Tool, ToolUse, function_tool

Json = dict[str, Any]
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9_.-]+$")]


class ResponseFunctionTool(Part):
    """A function of the client. Unlike in the chat API, its members are not in an inner object."""

    type: Literal["function"]
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

    def echo(self) -> Json:
        """Return the tool as the response repeats it."""
        return self.model_dump()


class ResponseHostedTool(Part):
    """A tool that OpenAI's servers run, such as web_search. It is left out here."""

    model_config = ConfigDict(json_schema_extra=never(type={"const": "function"}))

    type: Annotated[str, StringConstraints(max_length=64)]

    def drop_unknown(self) -> list[str]:
        super().drop_unknown()
        return []  # the whole tool is named instead


def _tool_tag(tool: Any) -> str:
    tag = tag_of_type(tool)
    return "<function>" if tag in (None, "<function>") else "<hosted>"


AnyTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("<function>")]
    | Annotated[ResponseHostedTool, Tag("<hosted>")],
    Discriminator(_tool_tag),
]
Tools = Annotated[
    list[AnyTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    BeforeValidator(small),
]


class ResponseNamedFunction(Part):
    type: Literal["function"]
    name: Name
    """Name of the function that the model must call."""


class ResponseToolReference(ResponseHostedTool):
    """An entry of allowed_tools; only functions have a name."""

    model_config = ConfigDict(json_schema_extra=None)

    name: Annotated[str, StringConstraints(max_length=128)] | None = None


class ResponseAllowedTools(Part):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    """Whether the model must call one of them."""
    tools: Annotated[list[ResponseToolReference], Field(fail_fast=True, max_length=MAX_TOOLS)]
    """The tools that the model sees."""


def _choice_tag(choice: Any) -> str | None:
    return "<mode>" if isinstance(choice, str) else tag_of_type(choice)


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[ResponseNamedFunction, Tag("<function>")]
    | Annotated[ResponseAllowedTools, Tag("<allowed_tools>")],
    Discriminator(
        _choice_tag,
        custom_error_type="unsupported",
        custom_error_message="must be none, auto, required, a function or allowed_tools; this "
        "server has no tools of its own",
    ),
]


def functions_of(tools: Tools | None) -> list[ResponseFunctionTool]:
    """Return the tools that the model is offered."""
    return [tool for tool in tools or () if isinstance(tool, ResponseFunctionTool)]


def left_out(tools: Tools | None) -> list[str]:
    """Return the names of tools that this server cannot run, for the header of ignored fields."""
    names = []
    for tool in tools or ():
        if isinstance(tool, ResponseHostedTool):
            names.append("tools." + UNPRINTABLE.sub("_", tool.type))
    return list(dict.fromkeys(names))


def tool_use(tools: Tools | None, choice: ToolChoice | None, *, parallel: bool) -> ToolUse:
    """Return the tools of a request as the generation reads them.

    Raises a validation error if `choice` needs a function that `tools` does not have.
    """
    offered = [function.tool() for function in functions_of(tools)]
    match choice:
        case ResponseNamedFunction():
            if choice.name not in [tool.name for tool in offered]:
                message = "is not the name of a function in tools"
                raise failure("invalid", message, "tool_choice", "name")
            use = ToolUse(offered, "required", choice.name, parallel)
        case ResponseAllowedTools():
            path = ("tool_choice", "tools")
            allowed = allowed_tools(offered, _functions_in(choice), path, ("name",))
            use = ToolUse(allowed, choice.mode, None, parallel)
        case _:
            use = ToolUse(offered, choice or "auto", None, parallel)
    if use.mode == "required" and not use.tools:
        raise failure("invalid", "needs a function in tools", "tool_choice")
    return use


def _functions_in(choice: ResponseAllowedTools) -> dict[int, str | None]:
    """Return the names of the functions that allowed_tools has, by their places."""
    return {
        place: entry.name for place, entry in enumerate(choice.tools) if entry.type == "function"
    }
