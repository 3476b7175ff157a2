"""Items of a request's input about tools: calls, their results, and tools themselves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import StringConstraints

from server.api.responses.contents import Json, Result, UnreadPart, input_parts
from server.api.responses.tools import AnyTool, ResponseHostedTool, Tools
from server.http.body import JsonObject, Part, Text

Id = Annotated[str, StringConstraints(max_length=256)]
CallId = Annotated[str, StringConstraints(min_length=1, max_length=256)]
CalledName = Annotated[str, StringConstraints(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class CallItem(Part):
    """A call that the model made, of a tool that may be in a namespace."""

    id: Id | None = None
    call_id: CallId
    """The id that a result answers."""
    name: CalledName
    """Name of the tool."""
    namespace: CalledName | None = None
    """The namespace that the tool is in."""
    status: Status | None = None

    def _stored(self, item_id: str, kind: str, **written: str) -> Json:
        item = {
            "id": self.id or item_id,
            "type": kind,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "name": self.name,
            **written,
        }
        return item if self.namespace is None else {**item, "namespace": self.namespace}


class FunctionCallItem(CallItem):
    """A call that the model made. `arguments` is JSON, unless the answer was cut."""

    type: Literal["function_call"]
    arguments: Text
    """JSON text."""

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type, arguments=self.arguments)


class CustomCallItem(CallItem):
    """A call of a custom tool that the model made."""

    type: Literal["custom_tool_call"]
    input: Text
    """The text that the model wrote."""

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type, input=self.input)


class OutputItem(Part):
    """The result of a call."""

    id: Id | None = None
    call_id: CallId
    """The call that this is the result of."""
    output: Result
    """The result as text. Images and files in it are left out."""
    status: Status | None = None

    @property
    def unread(self) -> list[str]:
        """The types of the parts that the model does not read."""
        parts = self.output if isinstance(self.output, list) else []
        return [f"input.output.{part.type}" for part in parts if isinstance(part, UnreadPart)]

    def _stored(self, item_id: str, kind: str) -> Json:
        is_text = isinstance(self.output, str)
        return {
            "id": self.id or item_id,
            "type": kind,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "output": self.output if is_text else input_parts(self.output),
        }


class FunctionCallOutputItem(OutputItem):
    type: Literal["function_call_output"]

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type)


class CustomCallOutputItem(OutputItem):
    type: Literal["custom_tool_call_output"]

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type)


# ---- searches --------------------------------------------------------------------------------


class SearchItem(Part):
    """A search for tools, or what it has found."""

    id: Id | None = None
    call_id: CallId | None = None
    """The id of the call."""
    execution: Literal["server", "client"] | None = None
    """Repeated."""
    status: Status | None = None

    def _stored(self, item_id: str, kind: str, **own: object) -> Json:
        return {
            "id": self.id or item_id,
            "type": kind,
            "status": self.status or "completed",
            "call_id": self.call_id,
            "execution": self.execution or "client",
            **own,
        }


class SearchCallItem(SearchItem):
    """A search for tools that the model has called."""

    type: Literal["tool_search_call"]
    arguments: JsonObject
    """The arguments of the call."""

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type, arguments=self.arguments)


class SearchOutputItem(SearchItem):
    """The tools that a search has found. The model can call them from then on."""

    type: Literal["tool_search_output"]
    tools: Tools
    """The tools."""

    def stored(self, item_id: str) -> Json:
        return self._stored(item_id, self.type, tools=echoed(self.tools))


class AdditionalToolsItem(Part):
    """Tools that the model can call, as those in `tools`."""

    type: Literal["additional_tools"]
    id: Id | None = None
    role: Literal["developer"]
    tools: Tools
    """The tools."""

    def stored(self, item_id: str) -> Json:
        return {
            "id": self.id or item_id,
            "type": self.type,
            "role": self.role,
            "tools": echoed(self.tools),
        }


def echoed(tools: list[AnyTool] | None) -> list[Json]:
    """Return tools as the API repeats them, without those that are left out."""
    return [tool.echo() for tool in tools or () if not isinstance(tool, ResponseHostedTool)]
