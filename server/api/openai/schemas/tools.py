"""The fields about tools of a chat body."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
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

from server.api.openai.schemas.fields import by_type, having, tag_of_type
from server.http.body import JsonObject, LongName, Part, Text, failure, small
from server.text import exact_json
from server.text.tools import (
    INPUT,
    InputFormat,
    Tool,
    ToolMode,
    ToolUse,
    custom_tool,
    function_tool,
)

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
    function: FunctionDefinition
    """The function."""

    def tool(self) -> Tool:
        return self.function.tool()


class GrammarDefinition(Part):
    syntax: Literal["lark", "regex"]
    """`lark`: llguidance's dialect. `regex`: an expression of Rust's regex crate."""
    definition: Text
    """The grammar, or the expression that the whole input matches."""

    def input(self) -> InputFormat:
        return InputFormat(self.syntax, self.definition)


class TextInput(Part):
    type: Literal["text"]
    """Any text."""

    def input(self) -> InputFormat:
        return InputFormat()


class GrammarInput(Part):
    type: Literal["grammar"]
    grammar: GrammarDefinition
    """The grammar that the input matches."""

    def input(self) -> InputFormat:
        return self.grammar.input()


class CustomDefinition(Part):
    name: Name
    """Name of the tool."""
    description: Text | None = None
    """The purpose of the tool, for the model."""
    format: (
        Annotated[
            Annotated[TextInput, Tag("<text>")] | Annotated[GrammarInput, Tag("<grammar>")],
            by_type("text or grammar"),
        ]
        | None
    ) = None
    """The texts that the input may be; any, if it is left out."""


class CustomTool(Part):
    """A tool whose input is one text instead of arguments."""

    type: Literal["custom"]
    custom: CustomDefinition
    """The tool."""

    def tool(self) -> Tool:
        given = self.custom
        format = given.format.input() if given.format else InputFormat()
        return custom_tool(given.name, given.description, format)


def _known_only(value: Any) -> Any:
    """Refuse tools that OpenAI's own servers run, by their type."""
    for index, tool in enumerate(value if isinstance(value, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in ("function", "custom"):
            message = f"{kind[:64]!r} is no tool of the client: only function and custom tools are"
            raise failure("unsupported", message, index, "type")
    return value


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")],
    Discriminator(lambda tool: _branch(tool)),
]
Tools = Annotated[
    list[AnyTool],
    Field(fail_fast=True, max_length=MAX_TOOLS),
    BeforeValidator(_known_only),
    BeforeValidator(small),
]


class FunctionName(Part):
    name: Name
    """Name of the function that the model must call."""


class NamedFunction(Part):
    type: Literal["function"]
    function: FunctionName
    """The function that the model must call."""

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustom(Part):
    type: Literal["custom"]
    custom: FunctionName
    """The custom tool that the model must call."""

    @property
    def name(self) -> str:
        return self.custom.name


def _branch(value: Any) -> str:
    """Return the branch of a tool, or of an object that names one; functions are the default."""
    return "<custom>" if tag_of_type(value) == "<custom>" else "<function>"


NamedChoice = Annotated[
    Annotated[NamedFunction, Tag("<function>")] | Annotated[NamedCustom, Tag("<custom>")],
    Discriminator(_branch),
]


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
    tag = tag_of_type(value)
    return {"<allowed_tools>": "<allowed>", "<custom>": "<custom>"}.get(tag or "", "<named>")


ToolChoice = Annotated[
    Annotated[ToolMode, Tag("<mode>")]
    | Annotated[NamedFunction, Tag("<named>")]
    | Annotated[NamedCustom, Tag("<custom>")]
    | Annotated[AllowedChoice, Tag("<allowed>")],
    Discriminator(_shape),
]


def tool_use(
    tools: list[FunctionTool | CustomTool] | None,
    choice: ToolMode | NamedFunction | NamedCustom | AllowedChoice | None,
    *,
    parallel: bool,
) -> ToolUse:
    """Return the tools of a request as the generation reads them.

    Raises a validation error if `choice` allows a function that `tools` does not have.
    """
    given = [tool.tool() for tool in tools or ()]
    match choice:
        case NamedFunction() | NamedCustom():
            kinds = {tool.name: tool.input is not None for tool in given}
            if kinds.get(choice.name, choice.type == "custom") != (choice.type == "custom"):
                message = f"is the name of a tool that is not of type {choice.type}"
                raise failure("invalid", message, "tool_choice", choice.type, "name")
            return ToolUse(given, "required", choice.name, allows_parallel=parallel)
        case AllowedChoice(allowed_tools=allowed):
            names: dict[tuple[str | int, ...], str | None] = {}
            for place, entry in enumerate(allowed.tools):
                path = ("tool_choice", "allowed_tools", "tools", place, entry.type, "name")
                names[path] = entry.name
            shown = allowed_tools(given, names)
            return ToolUse(shown, allowed.mode, allows_parallel=parallel)
    return ToolUse(given, choice or "auto", allows_parallel=parallel)


def allowed_tools(
    offered: Sequence[Tool], names: Mapping[tuple[str | int, ...], str | None]
) -> list[Tool]:
    """Return the tools that `allowed_tools` names; the model does not see the others.

    `names` are by their paths in the body. Raises a validation error for one that no tool has.
    """
    known = {tool.name for tool in offered}
    for path, name in names.items():
        if name not in known:
            raise failure("invalid", "is not the name of a function in tools", *path)
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


OBJECT = {"type": "object"}


def _arguments_tag(arguments: Any) -> str:
    return "<object>" if isinstance(arguments, dict) else "<text>"


class FunctionCall(Part):
    name: str
    """Name of the function."""
    arguments: Annotated[
        Annotated[Text, Tag("<text>")] | Annotated[JsonObject, Tag("<object>")],
        Discriminator(_arguments_tag),
    ] = ""  # JSON text in OpenAI's API
    """A JSON object, or its text."""


class CustomCall(Part):
    name: str
    """Name of the custom tool."""
    input: Text
    """The text that the model wrote."""


class ToolCall(Part):
    """A call that the assistant made: of a function, or of a custom tool."""

    model_config = ConfigDict(
        json_schema_extra={
            "if": having(type={"const": "custom"}),
            "then": having(custom=OBJECT),
            "else": having(function=OBJECT),
        }
    )

    id: LongName | None = None
    """The id that a tool's message answers with `tool_call_id`."""
    type: Literal["function", "custom"] | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> ToolCall:
        kind = self.type or "function"
        if getattr(self, kind) is None:
            raise failure("invalid", "is required", kind)
        return self

    @property
    def called(self) -> FunctionCall:
        """The call as that of a function, as chat templates read it."""
        if self.type == "custom" and self.custom is not None:
            return FunctionCall(name=self.custom.name, arguments={INPUT: self.custom.input})
        assert self.function is not None
        return self.function

    def for_template(self) -> dict[str, Any]:
        """Return the call as chat templates read it: with the arguments as an object."""
        called = self.called
        arguments: Any = called.arguments
        if isinstance(arguments, str):
            # If the model wrote invalid JSON, the template shows it as it was.
            with contextlib.suppress(json.JSONDecodeError):
                arguments = exact_json.loads(arguments or "{}")
        call: dict[str, Any] = {} if self.id is None else {"id": self.id}
        if self.type is not None:
            call["type"] = "function"
        return {**call, "function": {"name": called.name, "arguments": arguments}}
