"""Rules for valid bodies that JSON Schema cannot express, for schemathesis (`SCHEMATHESIS_HOOKS`).

Each rule compares fields with each other or with the model. Invalid bodies stay as they are.
"""

from __future__ import annotations

from typing import Any

import schemathesis
from schemathesis import GenerationMode

MOST = 8  # tokens of an answer, so that thousands of answers end soon
MOST_TOOLS = 16  # more would not fit into the context
DIMENSIONS = 32  # of the encoder


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    if isinstance(case.body, dict) and case.meta.generation.mode == GenerationMode.POSITIVE:
        for rule in RULES:
            rule(case.body)
        if case.path == "/v1/responses":
            _response_is_consistent(case.body)
        if case.path == "/completion":
            _completion_is_consistent(case.body)
    if case.query and case.meta.generation.mode == GenerationMode.POSITIVE:
        case.query.pop("after", None)  # the id of an object that a case cannot know


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Leave out lists of ids or texts that schemathesis takes for lists with bad items."""
    if not isinstance(case.body, dict) or case.meta.generation.mode == GenerationMode.POSITIVE:
        return True
    prompts = [case.body.get(name) for name in ("input", "content", "prompt")]
    return not any(each in ([0], ["AAA"]) for each in prompts)


def _prompt_and_answer_fit_into_context(body: dict[str, Any]) -> None:
    if not {"messages", "prompt"} & set(body):
        return
    for name in ("max_tokens", "max_completion_tokens"):
        if body.get(name):
            body[name] = 1 + int(body[name]) % MOST
    if body.get("max_tokens") is None:
        body["max_tokens"] = MOST
    if "min_tokens" in body:
        body["min_tokens"] = 0  # at most max_tokens
    for name in ("tools", "functions"):
        if body.get(name):
            body[name] = body[name][:MOST_TOOLS]


def _logprobs_have_a_total_limit(body: dict[str, Any]) -> None:
    if body.get("prompt_logprobs") or body.get("echo"):
        body["n"] = 1


def _prompt_has_a_token(body: dict[str, Any]) -> None:
    """The demo's template renders nothing from an empty system message alone."""
    if any(message.get("role") == "user" for message in body.get("messages") or ()):
        return
    body.pop("add_generation_prompt", None)


def _only_a_text_can_be_continued(body: dict[str, Any]) -> None:
    last = (body.get("messages") or [{}])[-1]
    if body.get("continue_final_message") and (not last.get("content") or last.get("tool_calls")):
        body["continue_final_message"] = False


def _prefill_is_a_text(body: dict[str, Any]) -> None:
    """The answer of /v1/messages continues a last message of the assistant."""
    messages = body.get("messages") or [{}]
    has_blocks = any(isinstance(message.get("content"), list) for message in messages)
    if messages[-1].get("role") == "assistant" and has_blocks:
        messages.append({"role": "user", "content": "a"})


def _tool_choice_names_a_tool(body: dict[str, Any]) -> None:
    choice, tools = body.get("tool_choice"), body.get("tools")
    if isinstance(choice, dict) and choice.get("type") == "tool":
        choice["name"] = body["tools"][0]["name"]
    elif choice == "required" and not tools:
        del body["tool_choice"]
    elif isinstance(choice, dict) and choice.get("type") in ("function", "allowed_tools"):
        body["tool_choice"] = "auto"
    if isinstance(body.get("function_call"), dict):
        body["function_call"] = "auto"


def _lists_of_pairs_have_equal_lengths(body: dict[str, Any]) -> None:
    if isinstance(body.get("text_1"), list):
        body["text_1"] = body["text_1"][:1]


def _lengths_fit_the_encoder(body: dict[str, Any]) -> None:
    if body.get("dimensions"):
        body["dimensions"] = 1 + int(body["dimensions"]) % DIMENSIONS
    if (body.get("truncate_prompt_tokens") or 0) > 0:
        body["truncate_prompt_tokens"] = MOST
    if body.get("padding") == "max_length":  # the tokenizer has no padding token
        del body["padding"]
    for name in ("prompt_name", "instruction"):  # those of a checkpoint, and this one has none
        if {"input", "inputs"} & set(body):
            body.pop(name, None)
    if {"query", "text_1"} & set(body):  # scores of this encoder have no activation
        for name in ("raw_scores", "use_activation"):
            body.pop(name, None)
    given = body.get("input")
    if not isinstance(given, str) and "input" in body:
        body.pop("prompt", None)  # there may be token ids


def _vectors_fit_their_forms(body: dict[str, Any]) -> None:
    if body.get("output_dimension"):
        body["output_dimension"] = 8  # the signs of eight numbers fill a byte
    if {"texts", "inputs"} & set(body) and body.get("max_tokens"):
        body["max_tokens"] = None
    if body.get("encoding_format") == "bytes":
        body["encoding_format"] = "bytes_only"  # of any number of inputs


def _completion_is_consistent(body: dict[str, Any]) -> None:
    """Parameters of llama.cpp's /completion."""
    body["n_predict"] = MOST
    body["n_cmpl"] = 1
    body["repeat_last_n"] = -1
    if body.get("logit_bias"):
        body["logit_bias"] = {"0": 1}
    if body.get("grammar"):
        body["grammar"] = 'root ::= "a"'
    if body.get("json_schema"):
        body["json_schema"] = None if body.get("grammar") else {"type": "boolean"}


def _schemas_are_valid(body: dict[str, Any]) -> None:
    """Schemas, patterns and grammars are languages of their own."""
    for tool in body.get("tools") or ():
        if isinstance(tool.get("function"), dict):
            tool["function"]["parameters"] = {"type": "object"}
        if "input_schema" in tool:
            tool["input_schema"] = {"type": "object"}
    for function in body.get("functions") or ():
        function["parameters"] = {"type": "object"}
    format_, outputs = body.get("response_format"), body.get("structured_outputs")
    if isinstance(format_, dict) and format_.get("schema") is not None:
        format_["schema"] = {"type": "boolean"}
    if isinstance(format_, dict) and isinstance(format_.get("json_schema"), dict):
        format_["json_schema"]["schema"] = {"type": "boolean"}
    if isinstance(config := body.get("output_config"), dict) and config.get("format"):
        config["format"]["schema"] = {"type": "boolean"}
    if isinstance(outputs, dict):
        outputs.pop("whitespace_pattern", None)
        for name, valid in (("json", {"type": "null"}), ("regex", "a"), ("grammar", 'start: "a"')):
            if outputs.get(name) is not None:
                outputs[name] = valid
        if isinstance(format_, dict) and format_.get("type") != "text":
            del body["structured_outputs"]  # only one of both


def _response_is_consistent(body: dict[str, Any]) -> None:
    """A tool choice names one of the tools, a schema is a language, and an input has a message."""
    body["max_output_tokens"] = MOST
    if isinstance(body.get("input"), list):
        body["input"].append({"role": "user", "content": "a"})
    if body.get("tool_choice") not in ("none", "auto"):
        body.pop("tool_choice", None)
    text = body.get("text")
    format_ = text.get("format") if isinstance(text, dict) else None
    if isinstance(format_, dict) and "schema" in format_:
        format_["schema"] = {"type": "boolean"}


RULES = (
    _schemas_are_valid,
    _prompt_and_answer_fit_into_context,
    _prompt_has_a_token,
    _logprobs_have_a_total_limit,
    _only_a_text_can_be_continued,
    _prefill_is_a_text,
    _tool_choice_names_a_tool,
    _lists_of_pairs_have_equal_lengths,
    _lengths_fit_the_encoder,
    _vectors_fit_their_forms,
)
