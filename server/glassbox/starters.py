"""The first prompts that the page Chat offers: those of the model, else some that fit its kind."""

from __future__ import annotations

from typing import Any

from server.generation.chat_prompt import has_own_tools
from server.generation.infill import infill_tokens
from server.glassbox.model.checkpoint import CheckpointFacts
from server.state import AppState

CHAT = (
    "What is the capital of France?",
    "Explain in two sentences how a water mill works.",
    "Write a short poem about a river.",
)
CODE = (
    "Write a Python function that reverses a list.",
    "Explain what a race condition is, with a short example.",
    "Write a SQL query that counts the orders of each customer.",
)
# A model without a chat template continues a text.
TEXT = ("The capital of France is", "Once upon a time, there was a river that", "Water boils at")
CODE_TEXT = ("def reverse(items):", "# Read a CSV file and print its first row\nimport csv\n")
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TOOL = {"prompt": "What is the weather in Oslo?", "tools": [WEATHER_TOOL]}


def starters(state: AppState, checkpoint: CheckpointFacts) -> list[dict[str, Any]]:
    """Return prompts, each `{prompt}` or `{prompt, tools}`.

    A model's own ones are those of starters.json in its folder. Without that file, the chat
    template and the vocabulary say what the model was trained for: chats, code, calls of tools.
    """
    knows_code = infill_tokens(state.tokenizer) is not None
    if checkpoint.starters:
        prompts = tuple(checkpoint.starters)
    elif state.template is None:
        prompts = CODE_TEXT if knows_code else TEXT
    else:
        prompts = CODE if knows_code else CHAT
    found: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
    if has_own_tools(state):
        found.append(TOOL)
    return found
