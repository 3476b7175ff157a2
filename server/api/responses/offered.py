"""The tools that a conversation offers to the model, and what their calls are in this API.

Tools come from the request, from its `additional_tools` items, and from what a search has found.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from server.api.openai.schemas.tools import allowed_tools
from server.api.responses.tools import (
    AnyTool,
    ClientTool,
    ResponseAllowedTools,
    ResponseCustomTool,
    ResponseHostedTool,
    ResponseNamedCustom,
    ResponseNamedFunction,
    ResponseNamespace,
    ResponseToolSearch,
    ToolChoice,
    Tools,
)
from server.http.body import failure
from server.text.tools import Tool, ToolUse, function_tool

Json = dict[str, Any]
Kind = Literal["function", "custom", "tool_search"]
SEARCH = "tool_search"
TOOLS: TypeAdapter[list[AnyTool]] = TypeAdapter(Tools)
SEARCH_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
}
SEARCH_DESCRIPTION = "Find more tools. The tools that are found can be called from then on."


@dataclass(frozen=True)
class Called:
    """The meaning of a name that the model calls, in this API."""

    kind: Kind = "function"
    name: str = ""
    namespace: str | None = None


@dataclass(frozen=True)
class ToolsInItems:
    """The tools of items: of `additional_tools`, and those that searches have found."""

    added: Sequence[AnyTool]
    found: Sequence[AnyTool]


@dataclass(frozen=True)
class Offered:
    """The tools that the model sees, and their meanings by the names that it sees."""

    use: ToolUse
    called: Mapping[str, Called]


def visible_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees; templates know no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def names_of(tools: Iterable[Json]) -> Iterator[str]:
    """Yield the visible names of stored tools."""
    for tool in tools:
        if tool["type"] == "namespace":
            yield from (visible_name(inner["name"], tool["name"]) for inner in tool["tools"])
        elif tool["type"] != SEARCH:
            yield tool["name"]


def tools_in(items: Iterable[Json]) -> ToolsInItems:
    """Return the tools of stored items."""
    added: list[AnyTool] = []
    found: list[AnyTool] = []
    for item in items:
        if item["type"] == "additional_tools":
            added += TOOLS.validate_python(item["tools"])
        elif item["type"] == "tool_search_output":
            found += TOOLS.validate_python(item["tools"])
    return ToolsInItems(added, found)


def offered(
    tools: Iterable[AnyTool], found: Iterable[AnyTool], choice: ToolChoice | None, *, parallel: bool
) -> Offered:
    """Return the tools of a conversation. `found` are those of its searches.

    Raises a validation error if `choice` needs a tool that there is not, or if two different tools
    have the same name for the model.
    """
    given = list(tools)
    search = next((t for t in given if isinstance(t, ResponseToolSearch) and t.is_called), None)
    names = _Names()
    hidden: list[str] = []
    for tool, namespace in _each(given):
        if search is not None and tool.defer_loading:
            hidden.append(visible_name(tool.name, namespace))
        else:
            names.add(tool, namespace)
    for tool, namespace in _each(found):
        names.add(tool, namespace)
    if search is not None:
        hidden = [name for name in hidden if name not in names.called]
        names.add_search(search, _searchable(given, hidden))
    visible = list(names.tools.values())
    return Offered(_use(visible, names.called, choice, parallel=parallel), names.called)


def _each(tools: Iterable[AnyTool]) -> Iterator[tuple[ClientTool, str | None]]:
    """Yield the functions and custom tools, with their namespaces."""
    for tool in tools:
        if isinstance(tool, ResponseNamespace):
            for inner in tool.tools:
                yield inner, tool.name
        elif not isinstance(tool, ResponseToolSearch | ResponseHostedTool):
            yield tool, None


class _Names:
    """The visible tools by name. A tool that is given again replaces itself."""

    def __init__(self) -> None:
        self.tools: dict[str, Tool] = {}
        self.called: dict[str, Called] = {}

    def add(self, tool: ClientTool, namespace: str | None) -> None:
        kind: Kind = "custom" if isinstance(tool, ResponseCustomTool) else "function"
        called = Called(kind, tool.name, namespace)
        name = visible_name(tool.name, namespace)
        self._add(tool.tool(name), called)

    def add_search(self, search: ResponseToolSearch, searchable: str) -> None:
        description = f"{search.description or SEARCH_DESCRIPTION}{searchable}"
        parameters = search.parameters or SEARCH_PARAMETERS
        tool = function_tool(SEARCH, description, parameters, strict=None)
        self._add(tool, Called("tool_search", SEARCH))

    def _add(self, tool: Tool, called: Called) -> None:
        before = self.called.get(tool.name, called)
        if (before.namespace, before.kind == SEARCH) != (called.namespace, called.kind == SEARCH):
            message = f"has two tools that the model would know as {tool.name!r}"
            raise failure("invalid", message, "tools")
        self.tools[tool.name] = tool
        self.called[tool.name] = called


def _searchable(tools: Iterable[AnyTool], hidden: list[str]) -> str:
    """Return what the model reads of the tools that a search can find."""
    lines = []
    for tool in tools:
        if isinstance(tool, ResponseNamespace) and tool.description:
            inner = [visible_name(each.name, tool.name) for each in tool.tools]
            if not set(inner).isdisjoint(hidden):
                lines.append(f"{tool.name}: {tool.description}")
    if not hidden:
        return ""
    return "\n\nTools that it can find: " + "\n".join([json.dumps(hidden)[1:-1], *lines])


def _use(
    tools: list[Tool], called: Mapping[str, Called], choice: ToolChoice | None, *, parallel: bool
) -> ToolUse:
    match choice:
        case ResponseNamedFunction() | ResponseNamedCustom():
            name = _named(called, choice.type, choice.name)
            if name is None:
                noun = "function" if choice.type == "function" else "custom tool"
                message = f"is not the name of a {noun} in tools"
                raise failure("invalid", message, "tool_choice", "name")
            use = ToolUse(tools, "required", name, parallel)
        case ResponseAllowedTools():
            use = ToolUse(_allowed(tools, called, choice), choice.mode, None, parallel)
        case _:
            use = ToolUse(tools, choice or "auto", None, parallel)
    if use.mode == "required" and not use.tools:
        raise failure("invalid", "needs a function in tools", "tool_choice")
    return use


def _named(called: Mapping[str, Called], kind: str, name: str | None) -> str | None:
    """Return the visible name of a tool: of one without a namespace, or of the only one in any."""
    found = [shown for shown, c in called.items() if (c.kind, c.name) == (kind, name)]
    return name if name in found else found[0] if len(found) == 1 else None


def _allowed(
    tools: list[Tool], called: Mapping[str, Called], choice: ResponseAllowedTools
) -> list[Tool]:
    names: dict[tuple[str | int, ...], str | None] = {}
    for place, entry in enumerate(choice.tools):
        path: tuple[str | int, ...] = ("tool_choice", "tools", place, "name")
        match entry.type:
            case "function" | "custom":
                names[path] = _named(called, entry.type, entry.name)
            case "tool_search" if SEARCH in called:
                names[path] = SEARCH
            case "namespace":
                inside = [shown for shown, c in called.items() if c.namespace == entry.name]
                for shown in inside:
                    names[*path, shown] = shown
                if not inside:
                    names[path] = None
    return allowed_tools(tools, names)
