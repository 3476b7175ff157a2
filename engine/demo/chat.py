"""The chat format of the demo model: ChatML, once as a jinja template and once as a Python
renderer.

The template is what a server reads from tokenizer_config.json; the renderer is what training
uses, because it also says which stretches are the model's own words. A test holds the two equal.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

START, END, STOP = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPECIAL_TOKENS = (STOP, START, END)

TOOLS_BEFORE = "You can call these tools:\n<tools>"
TOOLS_AFTER = (
    '</tools>\nTo call one, write\n<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
)

CHAT_TEMPLATE = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if system or tools %}
    {{- '<|im_start|>system\n' + system }}
    {%- if tools %}
        {{- '\n\n' if system }}
        {{- 'You can call these tools:\n<tools>' }}
        {%- for tool in tools %}
            {{- '\n' + (tool | tojson) }}
        {%- endfor %}
        {{- '\n</tools>\nTo call one, write\n' }}
        {{- '<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>' }}
    {%- endif %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function or call %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + function.name + '", "arguments": ' }}
            {%- set arguments = function.arguments %}
            {{- arguments if arguments is string else arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".strip()


def dump(value: Any) -> str:
    """JSON as the template's `tojson` writes it: letters kept, keys in their order."""
    return json.dumps(value, ensure_ascii=False)


def system_text(system: str, tools: list[dict[str, Any]]) -> str:
    """The system block's text, tools listed after the caller's own words."""
    if not tools:
        return system
    listed = "\n".join([TOOLS_BEFORE, *map(dump, tools), TOOLS_AFTER])
    return f"{system}\n\n{listed}" if system else listed


def message_text(message: Message) -> str:
    """One message's text; tool calls follow the content."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or call
        arguments = function["arguments"]
        arguments = arguments if isinstance(arguments, str) else dump(arguments)
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'
        )
    return "\n".join(parts)


def render(
    messages: list[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False
) -> list[tuple[str, bool]]:
    """Pieces (text, learned) of a conversation; `learned` marks what the assistant itself writes.

    `prompt` adds the header after which the assistant speaks.
    """
    first = messages[0]["role"] == "system"
    system = system_text(messages[0]["content"] if first else "", tools or [])
    pieces = [(f"{START}system\n{system}{END}\n", False)] if system else []
    for message in messages[first:]:
        spoken = message["role"] == "assistant"
        pieces.append((f"{START}{message['role']}\n", False))
        pieces.append((message_text(message) + END, spoken))
        pieces.append(("\n", False))
    return [*pieces, (f"{START}assistant\n", False)] if prompt else pieces


def render_text(
    messages: list[Message], tools: list[dict[str, Any]] | None = None, prompt: bool = False
) -> str:
    return "".join(text for text, _ in render(messages, tools, prompt))
