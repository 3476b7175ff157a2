"""A recorded answer as a request of /v1/completions that must repeat its tokens."""

from __future__ import annotations

from typing import Any

from engine.protocol.sampling_parameters import PARAMETERS
from server.replay.recorded import BANNED, RecordedAnswer, RecordedGrammar

Json = dict[str, Any]
# Seeds of -1 mean "random" to the API. The second of two choices has the first one's seed plus 1.
RANDOM_SEED = -1
# Fields of `structured_outputs` by kind of grammar. "lark" is the grammar of required tool calls.
GRAMMAR_FIELDS = {
    "json_schema": "json",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
    "lark": "grammar",
}


class CannotReplay(Exception):
    """/v1/completions cannot express this request; the text says which part."""


def replay_body(recorded: RecordedAnswer, vocab_size: int) -> Json:
    """Return the body that makes the same engine request. Raises CannotReplay.

    Every sampling parameter is given, so that no default of the checkpoint applies.
    """
    params = recorded.sampling
    length = len(recorded.tokens)
    # The engine does not know stop texts: an answer that the server cut ends by its length here.
    most = length if recorded.is_cut else params.max_tokens
    body: Json = {
        "prompt": recorded.encoder_prompt_ids or recorded.prompt_ids,
        "return_token_ids": True,
        "max_tokens": most,
        "min_tokens": min(params.min_tokens, most),
        **{name: getattr(params, name) for name in PARAMETERS},
        # The server adds what the checkpoint bans.
        "logit_bias": {str(token): bias for token, bias in params.logit_bias if bias != BANNED},
        "allowed_token_ids": list(params.allowed_token_ids),
        "bad_words": recorded.bad_words,
        # These are all that end the answer. Tokens beyond the vocabulary never come.
        "stop_token_ids": [token for token in params.stop_token_ids if token < vocab_size],
        "ignore_eos": True,
    }
    if params.logprobs >= 0:
        body["logprobs"] = params.logprobs
    if params.prompt_logprobs >= 0:
        body["prompt_logprobs"] = params.prompt_logprobs
    if params.seed == RANDOM_SEED:
        body |= {"seed": RANDOM_SEED - 1, "n": 2}
    else:
        body["seed"] = params.seed
    if recorded.grammar is not None and recorded.grammar.kind == "free":
        body["thinking_token_budget"] = recorded.grammar.thought_budget
    elif recorded.grammar is not None:
        body["structured_outputs"] = _structured_outputs(recorded.grammar)
    elif params.grammar is not None:
        raise CannotReplay("its grammar is recorded only as the engine's")
    return body


def _structured_outputs(grammar: RecordedGrammar) -> Json:
    """Return the field that asks for a grammar. Raises CannotReplay."""
    if grammar.around:
        raise CannotReplay(
            f"its {grammar.kind} grammar is within one of reasoning or tool calls, which "
            "/v1/completions cannot express"
        )
    if grammar.thought_budget is not None:
        raise CannotReplay("/v1/completions has no budget for thoughts next to a grammar")
    if grammar.kind not in GRAMMAR_FIELDS:
        raise CannotReplay(f"/v1/completions has no grammar of kind {grammar.kind}")
    if grammar.kind == "lark" and "::=" in str(grammar.value):
        raise CannotReplay("the server would read its Lark grammar as GBNF")
    field: Json = {GRAMMAR_FIELDS[grammar.kind]: grammar.value}
    if grammar.whitespace:
        field["whitespace_pattern"] = grammar.whitespace
    elif grammar.whitespace == "":
        field["disable_any_whitespace"] = True
    return field


def replayed_tokens(recorded: RecordedAnswer, answer: Json) -> list[int]:
    """Return the tokens of the choice that repeats `recorded`."""
    choice = (
        answer["choices"][-1] if recorded.sampling.seed == RANDOM_SEED else answer["choices"][0]
    )
    tokens: list[int] = choice["token_ids"]
    return tokens
