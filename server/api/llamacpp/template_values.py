"""Chats as llama.cpp reads them: with template variables of its own, and continued answers."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any

from server.api.openai.schemas.chat import ChatBody
from server.generation.chat_prompt import Chat, template_of
from server.generation.thinking import BUDGET, SWITCHES
from server.http.errors import invalid
from server.state import AppState


def own_chat(state: AppState, body: ChatBody) -> Chat:
    """Return the conversation of a body as llama.cpp reads it. Raises a 400 ApiError.

    The answer continues a final message of the assistant, unless the body says how it begins.
    """
    chat = with_template_values(state, body.chat())
    says = body.continue_final_message is not None or body.add_generation_prompt is not None
    if says or chat.messages[-1]["role"] != "assistant":
        return chat
    if [message["role"] for message in chat.messages[-2:]] == ["assistant", "assistant"]:
        message = "The last two messages are the assistant's; the answer can continue only one."
        raise invalid("messages", message)
    return replace(chat, add_generation_prompt=False, continue_final_message=True)


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
