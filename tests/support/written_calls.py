"""Write tool calls as the models of each format do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.text.parsers.formats import (
    AnyCallFormat,
    CallFormat,
    ChannelFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)

Called = tuple[str, dict[str, Any]]


def written(format: AnyCallFormat, called: Sequence[Called]) -> str:
    """Return the text of the calls."""
    if isinstance(format, ChannelFormat):
        return f"{format.end}{format.start}assistant".join(_message(format, *c) for c in called)
    calls = [_call(format, index, *call) for index, call in enumerate(called)]
    body = format.body
    if isinstance(body, PythonCall) or (isinstance(body, JsonCall) and body.is_list):
        text = f"[{', '.join(calls)}]"
    else:
        text = format.separator.join(calls)
    return f"{format.section_open}{text}{format.section_close}"


def _message(format: ChannelFormat, name: str, arguments: dict[str, Any]) -> str:
    header = f"{format.channel}commentary to=functions.{name} {format.constrain}json"
    return f"{header}{format.message}{json.dumps(arguments)}"


def _call(format: CallFormat, index: int, name: str, arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments)
    match format.body:
        case JsonCall(name=""):
            inside = json.dumps({name: arguments})
        case JsonCall() as body:
            call_id = {body.id: str(index)} if body.id else {}
            inside = json.dumps({**call_id, body.name: name, body.arguments: arguments})
        case NamedCall() as body:
            shown = body.written.replace("{name}", name).replace("{index}", str(index))
            inside = f"{shown}{body.separator}{text}"
        case TaggedCall() as body:
            inside = name + body.name_end
            for key, value in arguments.items():
                is_text = isinstance(value, str)
                key_close = body.key_close
                if body.json_key_close and not is_text:
                    key_close = body.json_key_close
                shown = value if is_text else json.dumps(value)
                inside += f"{body.key_open}{key}{key_close}{body.value_open}{shown}"
                inside += body.value_close
        case LinesCall() as lines:
            inside = name + lines.name_end
            for key, value in arguments.items():
                shown = value if isinstance(value, str) else json.dumps(value)
                inside += f"{key}{lines.key_end} {shown}{lines.line_end}"
        case PythonCall():
            inside = f"{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
        case GemmaCall(quote=quote):
            pairs = ",".join(f"{k}:{_gemma(v, quote)}" for k, v in arguments.items())
            inside = f"{name}{{{pairs}}}"
    return f"{format.open}{inside}{format.close}"


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma(v, quote)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_gemma(item, quote) for item in value) + "]"
    return json.dumps(value)
