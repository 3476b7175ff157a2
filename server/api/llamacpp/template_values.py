"""Variables that llama.cpp gives every chat template by itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from server.generation.chat_prompt import Chat, template_of
from server.generation.thinking import BUDGET, SWITCHES
from server.state import AppState


def with_template_values(state: AppState, chat: Chat) -> Chat:
    """Return the chat with today's date, and with thoughts on unless it turns them off.

    The request's own arguments come first. Variables that the template does not read are left out.
    """
    template = template_of(state, chat)
    if template is None:
        return chat
    now = datetime.now().astimezone()
    values: dict[str, Any] = {
        "date_string": now.strftime("%d %b %Y"),
        "datetime": now.strftime("%b %d %Y"),
    }
    says = chat.thinking.turns_on is not None or state.config.reasoning != "auto"
    if not says and not any(name in chat.arguments for name in (*SWITCHES, BUDGET)):
        values["enable_thinking"] = True
    read = {name: value for name, value in values.items() if name in template.variables}
    return replace(chat, arguments=read | chat.arguments)
