"""The shapes of the answers in Ollama's documentation (docs/api.md): fields and their types.

A field with a `?` may be missing.
"""

from __future__ import annotations

from typing import Any

DURATIONS = {
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
    "prompt_eval_duration": int,
    "eval_count": int,
    "eval_duration": int,
}
HEAD = {"model": str, "created_at": str, "done": bool}
CALL = {"id?": str, "function": {"index?": int, "name": str, "arguments": dict}}
MESSAGE = {"role": str, "content": str, "thinking?": str, "tool_calls?": [CALL]}
TOKEN = {"token": str, "logprob": float, "bytes?": list}
LOGPROBS = [{**TOKEN, "top_logprobs?": [TOKEN]}]
CHAT_PART = {**HEAD, "message": MESSAGE, "logprobs?": LOGPROBS}
CHAT_END = {**CHAT_PART, "done_reason": str, **DURATIONS}
GENERATE_PART = {**HEAD, "response": str, "thinking?": str, "logprobs?": LOGPROBS}
GENERATE_END = {**GENERATE_PART, "done_reason": str, **DURATIONS}
LOADED = {"done_reason": str}
DETAILS = {
    "parent_model": str,
    "format": str,
    "family": str,
    "families": [str],
    "parameter_size": str,
    "quantization_level": str,
}
LISTED = {
    "name": str,
    "model": str,
    "modified_at": str,
    "size": int,
    "digest": str,
    "details": DETAILS,
}
TAGS = {"models": [LISTED]}
RUNNING = {name: kind for name, kind in LISTED.items() if name != "modified_at"}
RUNNING |= {"expires_at": str, "size_vram": int, "context_length": int}
PS = {"models": [RUNNING]}
SHOW = {
    "modelfile": str,
    "parameters": str,
    "template": str,
    "license": str,
    "details": DETAILS,
    "model_info": dict,
    "capabilities": [str],
    "modified_at": str,
}
EMBED = {
    "model": str,
    "embeddings": [[float]],
    "total_duration": int,
    "load_duration": int,
    "prompt_eval_count": int,
}
EMBEDDINGS = {"embedding": [float]}
ERROR = {"error": str}


def check_shape(value: Any, shape: Any, path: str = "") -> None:
    """Check that a value has exactly the fields of a shape, with their types."""
    if isinstance(shape, list):
        assert isinstance(value, list), path
        for place, each in enumerate(value):
            check_shape(each, shape[0], f"{path}.{place}")
    elif isinstance(shape, dict):
        assert isinstance(value, dict), path
        needed = {name for name in shape if not name.endswith("?")}
        assert needed <= value.keys(), (path, needed - value.keys())
        fields = {name.rstrip("?"): kind for name, kind in shape.items()}
        assert value.keys() <= fields.keys(), (path, value.keys() - fields.keys())
        for name, each in value.items():
            check_shape(each, fields[name], f"{path}.{name}")
    else:
        assert isinstance(value, shape), (path, value)
        assert shape is bool or not isinstance(value, bool), path
