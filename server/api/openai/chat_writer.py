"""Writer of chat.completion objects."""

from __future__ import annotations

from collections.abc import Sequence

from server.api.openai.logprobs import chat_logprobs
from server.api.openai.schemas.chat import ChatBody
from server.api.openai.writer import Json, OpenAIWriter, Part
from server.generation.events import ChoiceEvents, FinishReason, TokenWithLogprobs, ToolCallDelta
from server.generation.prepare import PreparedRequest
from server.text.tokenizer import Tokenizer


class ChatWriter(OpenAIWriter):
    """Writes chat.completion objects. The answer to a chat has one prompt."""

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        prepared: PreparedRequest,
        body: ChatBody,
        *,
        names_ids: bool = False,
    ) -> None:
        super().__init__(tokenizer, prepared, body, names_ids=names_ids)
        self._calls_functions = bool(body.functions)  # which OpenAI's API had before tools
        use = body.tool_use
        self._names_function = use.name is not None
        self._echo = body.echoed
        self._shows_reasoning = body.include_reasoning is not False
        self._may_call = bool(use.tools) and use.mode != "none"
        # The choices whose role is still to be given, and whether any was.
        self._unopened = set(range(prepared.num_choices))
        self._is_open = False

    def opening(self) -> bytes:
        """Return one chunk per choice, which gives its role. The first has the prompt's fields.

        Nothing if the choices may be calls: the content of that chunk is then null, which only
        their first parts show.
        """
        if self._may_call:
            return b""
        return b"".join(map(self._role_chunk, sorted(self._unopened)))

    def _first_chunk(self, index: int, part: Part) -> bytes:
        if index not in self._unopened:
            return b""
        is_text = bool(part.content.get("content"))
        is_empty_answer = part.finish_reason is not None
        return self._role_chunk(index, is_null=not (is_text or is_empty_answer))

    def _role_chunk(self, index: int, *, is_null: bool = False) -> bytes:
        content = self._opening_content()
        if is_null:
            content["content"] = self._echo or None
        fields = {} if self._is_open else self._prompt_fields(0)
        self._is_open = True
        self._unopened.remove(index)
        return self._chunk([self._delta_entry(index, Part(content))], **fields)

    def _whole_fields(self, answers: Sequence[ChoiceEvents]) -> Json:
        return self._prompt_fields(0, answers[0].events)

    def _opening_content(self) -> Json:
        return {"role": "assistant", "content": self._echo}

    def _text_content(self, text: str) -> Json:
        return {"content": text}

    def _closing_content(self) -> Json:
        return {}

    def _delta(self, content: Json) -> Json:
        return {"delta": content}

    def _reasoning_content(self, text: str) -> Json:
        if not self._shows_reasoning:
            return {}
        # The first name is DeepSeek's and most servers', the second vLLM's newer one.
        return {"reasoning_content": text, "reasoning": text}

    def _call_content(self, delta: ToolCallDelta) -> Json:
        if delta.is_custom:
            return {"tool_calls": [_custom_part(delta)]}
        function: Json = {"arguments": delta.arguments}
        if delta.id is not None:
            function = {"name": delta.name, **function}
        if self._calls_functions:
            return {"function_call": function}
        call: Json = {"index": delta.index}
        if delta.id is not None:
            call |= {"id": delta.id, "type": "function"}
        return {"tool_calls": [{**call, "function": function}]}

    def _message(self, content: Json) -> Json:
        message = {**content, "refusal": None}
        if "tool_calls" in content:
            message["tool_calls"] = whole_calls(content["tool_calls"])
        if "tool_calls" in content or "function_call" in content:
            message["content"] = content["content"] or None
        return {"message": message}

    def _finish_reason(self, reason: FinishReason) -> str:
        if reason != "tool_calls":
            return reason
        if (
            self._names_function
        ):  # OpenAI's API alone ends the call that a request names in this way
            return "stop"
        return "function_call" if self._calls_functions else reason

    def _logprobs(self, tokens: Sequence[TokenWithLogprobs]) -> Json:
        named = bool(self._prepared.options.logprob_token_ids)
        return chat_logprobs(self._tokenizer, tokens, self._token_name, lists_sampled=named)


def _custom_part(delta: ToolCallDelta) -> Json:
    """Return a part of a call of a custom tool, whose input is a text."""
    if delta.id is None:
        return {"index": delta.index, "custom": {"input": delta.arguments}}
    custom = {"name": delta.name, "input": delta.arguments}
    return {"index": delta.index, "id": delta.id, "type": "custom", "custom": custom}


def whole_calls(deltas: Sequence[Json]) -> list[Json]:
    """Return tool calls from their deltas. A whole answer has no indices."""
    calls: list[Json] = []
    for delta in deltas:
        kind = "custom" if "custom" in delta else "function"
        if "id" in delta:
            calls.append({"id": delta["id"], "type": delta["type"], kind: dict(delta[kind])})
        else:
            text = "input" if kind == "custom" else "arguments"
            calls[-1][kind][text] += delta[kind][text]
    return calls
