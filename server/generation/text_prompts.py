"""Which prompt of a checkpoint is put in front of a text, as a request asks."""

from __future__ import annotations

from engine.checkpoint.sentence import SentenceConfig
from server.http.errors import ApiError, invalid

# The form of a query with an instruction, as Qwen3-Embedding and E5-instruct have it.
TASK, QUERY = "Instruct: ", "\nQuery:"
# The prompts of Cohere's purposes of a text, unless there is one of the same name.
PURPOSES = {"search_query": "query", "search_document": "document"}


def named_prompt(sentence: SentenceConfig, name: str) -> str:
    """Return the prompt of a name. Raises a 400 ApiError if the checkpoint has none."""
    prompt = sentence.prompts.get(name)
    if prompt is None:
        raise _unknown("prompt_name", name, sentence)
    return prompt


def instruction_prompt(sentence: SentenceConfig, instruction: str) -> str:
    """Return the checkpoint's prompt of queries with another instruction in it.

    Raises a 400 ApiError if the prompt has no instruction.
    """
    prompt = sentence.prompts["query"]
    start, found, rest = prompt.partition(QUERY)
    if not found or not start.startswith(TASK):
        message = (
            f"The model's prompt of queries is {prompt!r:.200}, which has no instruction. Use "
            "prompt_name, or prompt with the whole text."
        )
        raise invalid("instruction", message)
    return TASK + instruction + found + rest


def purpose_prompt(sentence: SentenceConfig, purpose: str) -> str:
    """Return the prompt of one of Cohere's purposes.

    Raises a 400 ApiError if the checkpoint has prompts, but none for it.
    """
    if not any(sentence.prompts.values()):
        return ""
    for name in (purpose, PURPOSES.get(purpose, ""), purpose.capitalize()):
        if name in sentence.prompts:
            return sentence.prompts[name]
    raise _unknown("input_type", purpose, sentence)


def _unknown(param: str, name: str, sentence: SentenceConfig) -> ApiError:
    known = ", ".join(sentence.prompts)
    return invalid(param, f"The model has no prompt for {name!r:.200}; its prompts: {known}.")
