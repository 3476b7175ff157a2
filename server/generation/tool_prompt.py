"""Tools for models whose chat template does not show them: in the system message, as Hermes does.

The format of calls and results is that of NousResearch's Hermes Function Calling, which many models
have seen in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.text import exact_json
from server.text.content_parts import joined
from server.text.tools import Tool

INSTRUCTIONS = """\
You can call functions. These are their signatures, as JSON in <tools></tools>:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object in <tool_call></tool_call>, one for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""

Message = dict[str, Any]


def with_tools_in_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages that need no support for tools from the template."""
    shown = [_in_text(message) for message in messages]
    definitions = [exact_json.text(tool.for_template, ensure_ascii=False) for tool in tools]
    instructions = INSTRUCTIONS.format(tools="\n".join(definitions))
    if shown and shown[0]["role"] in ("system", "developer"):
        first, *rest = shown
        return [{**first, "content": f"{joined(first['content'])}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *shown]


def functions_text(tools: Sequence[Tool]) -> str:
    """Return the tools as JSON, or "": the variable `functions` of Firefunction v2's model card."""
    if not tools:
        return ""
    definitions = [tool.for_template["function"] for tool in tools]
    return exact_json.text(definitions, ensure_ascii=False, indent=4)


def _in_text(message: Message) -> Message:
    """Return a message with its calls, or the result of a call, as text."""
    if message["role"] == "tool":
        result = f"<tool_response>\n{joined(message['content'])}\n</tool_response>"
        return {"role": "user", "content": result}
    calls = message.get("tool_calls")
    if not calls:
        return message
    parts = [joined(message["content"])] if message["content"] else []
    for call in calls:
        written = exact_json.text(call["function"], ensure_ascii=False)
        parts.append(f"<tool_call>\n{written}\n</tool_call>")
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(parts)}
