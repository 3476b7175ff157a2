"""The tools of a request, independent of the API that it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

ToolMode = Literal["none", "auto", "required"]
HELD = """\
The input is the last thing in the answer, as it is: without quotes and without escapes.
It matches this {kind}:
{definition}"""
InputSyntax = Literal["text", "lark", "regex"]
INPUT = "input"  # the one argument of a custom tool, in the call that the model writes
MAX_CALLS = 64  # of one answer, because a model that repeats itself would call until the limit


@dataclass(frozen=True)
class InputFormat:
    """The texts that the input of a custom tool may be. "text": any."""

    syntax: InputSyntax = "text"
    definition: str = ""  # a Lark grammar, or a regular expression of Rust's regex crate


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any]  # JSON schema of its arguments
    for_template: dict[str, Any]  # the whole definition, as OpenAI's chat API has it
    is_strict: bool = False  # calls are held to `parameters` also if the model may decide
    # Of a custom tool, whose call is one text instead of arguments. None: a function.
    input: InputFormat | None = None

    @property
    def input_is_held(self) -> bool:
        """Whether a grammar holds the input of this custom tool."""
        return self.input is not None and self.input.syntax != "text"


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, *, strict: bool | None
) -> Tool:
    """Return the tool of a function, as every API describes one."""
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    if parameters:
        schema = parameters
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = schema
    shown = {"type": "function", "function": function}
    return Tool(name, schema, for_template=shown, is_strict=bool(strict))


def custom_tool(name: str, description: str | None, format: InputFormat) -> Tool:
    """Return a tool whose input is one text. The model sees a function with that one argument."""
    parts = [description] if description else []
    shown: dict[str, Any] = {"type": "string"}
    if format.syntax != "text":
        kind = "Lark grammar" if format.syntax == "lark" else "regular expression"
        parts.append(HELD.format(kind=kind, definition=format.definition))
    schema = {"type": "object", "properties": {INPUT: shown}, "required": [INPUT]}
    held = format.syntax != "text"
    tool = function_tool(name, "\n\n".join(parts) or None, schema, strict=held)
    return dataclasses.replace(tool, input=format)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and how they may be called."""

    tools: Sequence[Tool] = ()
    # "none": the model does not see the tools. "auto": it decides. "required": it makes a call.
    mode: ToolMode = "auto"
    name: str | None = None  # the one tool that must be called; `mode` is then "required"
    allows_parallel: bool = True  # several calls in one answer
    param: str = "tools"  # names the field of the tools in error messages
    choice_param: str = "tool_choice"

    @property
    def most_calls(self) -> int:
        """The number of calls after which an answer ends."""
        return MAX_CALLS if self.allows_parallel and self.name is None else 1


NO_TOOLS = ToolUse()
