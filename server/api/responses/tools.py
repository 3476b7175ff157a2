"""The fields about tools of a Responses request."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StringConstraints, Tag

from server.api.openai.schemas.fields import by_type, never, tag_of_type
from server.api.openai.schemas.tools import MAX_TOOLS, GrammarDefinition, TextInput
from server.http.body import UNPRINTABLE, JsonObject, Part, Text, small
from server.text.tools import InputFormat, Tool, custom_tool, function_tool

Json = dict[str, Any]
CLIENTS = ("function", "custom", "namespace", "tool_search")  # the tools of a client
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
    defer_loading: bool | None = None
    """Hide the tool until a `tool_search` of the client has found it."""

    def tool(self, name: str) -> Tool:
        """Return the tool, under the name that the model sees."""
        return function_tool(name, self.description, self.parameters, strict=self.strict)

    def echo(self) -> Json:
        """Return the tool as the response repeats it."""
        return _without_null(self.model_dump(), "defer_loading")


class ResponseGrammarInput(GrammarDefinition):
    type: Literal["grammar"]


class ResponseCustomTool(Part):
    """A tool whose input is one text instead of arguments."""

    type: Literal["custom"]
    name: Name
    """Name of the tool."""
    description: Text | None = None
    """The purpose of the tool, for the model."""
    format: (
        Annotated[
            Annotated[TextInput, Tag("<text>")] | Annotated[ResponseGrammarInput, Tag("<grammar>")],
            by_type("text or grammar"),
        ]
        | None
    ) = None
    """The texts that the input may be; any, if it is left out."""
    defer_loading: bool | None = None
    """Hide the tool until a `tool_search` of the client has found it."""

    def tool(self, name: str) -> Tool:
        """Return the tool, under the name that the model sees."""
        format = self.format.input() if self.format else InputFormat()
        return custom_tool(name, self.description, format)

    def echo(self) -> Json:
        """Return the tool as the response repeats it."""
        return self.model_dump(exclude_none=True)


ClientTool = ResponseFunctionTool | ResponseCustomTool


class ResponseNamespace(Part):
    """Tools under a common name, which their calls repeat."""

    type: Literal["namespace"]
    name: Name
    """Name of the namespace."""
    description: Text | None = None
    """The purpose of its tools, for the model."""
    tools: Annotated[
        list[
            Annotated[
                Annotated[ResponseFunctionTool, Tag("<function>")]
                | Annotated[ResponseCustomTool, Tag("<custom>")],
                by_type("function or custom"),
            ]
        ],
        Field(fail_fast=True, max_length=MAX_TOOLS, min_length=1),
    ]
    """The tools."""

    def echo(self) -> Json:
        """Return the namespace as the response repeats it."""
        fields = {"type": self.type, "name": self.name, "description": self.description or ""}
        return {**fields, "tools": [tool.echo() for tool in self.tools]}


class ResponseToolSearch(Part):
    """Finds tools that are hidden: those with `defer_loading`."""

    type: Literal["tool_search"]
    execution: Literal["server", "client"] | None = None
    """`client`: the model calls the search. `server`: all tools are found from the beginning."""
    description: Text | None = None
    """The purpose of the search, for the model; of a client's."""
    parameters: JsonObject | None = None
    """JSON Schema of the arguments, an object; of a client's."""

    @property
    def is_called(self) -> bool:
        """Whether the model calls the search."""
        return self.execution == "client"

    def echo(self) -> Json:
        """Return the tool as the response repeats it."""
        return {"execution": "server", **self.model_dump(exclude_none=True)}


class ResponseHostedTool(Part):
    """A tool that OpenAI's servers run, such as web_search. It is left out here."""

    model_config = ConfigDict(json_schema_extra=never(type={"enum": list(CLIENTS)}))

    type: Annotated[str, StringConstraints(max_length=64)]

    def drop_unknown(self) -> list[str]:
        super().drop_unknown()
        return []  # the whole tool is named instead


def _without_null(fields: Json, name: str) -> Json:
    return {key: value for key, value in fields.items() if key != name or value is not None}


def _tool_tag(tool: Any) -> str:
    tag = tag_of_type(tool)
    if tag is None:
        return "<function>"
    return tag if tag[1:-1] in CLIENTS else "<hosted>"


AnyTool = Annotated[
    Annotated[ResponseFunctionTool, Tag("<function>")]
    | Annotated[ResponseCustomTool, Tag("<custom>")]
    | Annotated[ResponseNamespace, Tag("<namespace>")]
    | Annotated[ResponseToolSearch, Tag("<tool_search>")]
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


class ResponseNamedCustom(Part):
    type: Literal["custom"]
    name: Name
    """Name of the custom tool that the model must call."""


class ResponseToolReference(ResponseHostedTool):
    """An entry of allowed_tools; only the client's tools have a name."""

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
    | Annotated[ResponseNamedCustom, Tag("<custom>")]
    | Annotated[ResponseAllowedTools, Tag("<allowed_tools>")],
    Discriminator(
        _choice_tag,
        custom_error_type="unsupported",
        custom_error_message="must be none, auto, required, a function, a custom tool or "
        "allowed_tools; this server has no tools of its own",
    ),
]


def left_out(tools: Tools | None) -> list[str]:
    """Return the names of tools that this server cannot run, for the header of ignored fields."""
    names = []
    for tool in tools or ():
        if isinstance(tool, ResponseHostedTool):
            names.append("tools." + UNPRINTABLE.sub("_", tool.type))
    return list(dict.fromkeys(names))
