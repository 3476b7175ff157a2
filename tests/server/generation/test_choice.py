"""Choice: tokens to events. They are merged until taken, and no cut changes the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.generate import TokenLogprobs
from engine.protocol.outputs import TokenOutput
from server.generation.choice import Choice
from server.generation.events import (
    ChoiceEvents,
    Finish,
    PromptLogprobs,
    TextDelta,
    TokenWithLogprobs,
)
from server.generation.options import GenerationOptions
from server.generation.prompts import Echo
from server.text.load_tokenizer import load_tokenizer
from server.text.tokenizer import Tokenizer
from tests.server.conftest import EOS
from tests.support.prepared import prepared_request

PROMPT = [64, 65]
LOGPROBS = TokenLogprobs(-0.5)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


def outputs(ids: Sequence[int], **first: Any) -> list[TokenOutput]:
    """Return the engine's outputs for these tokens. `first` are fields of the first one."""
    found = [TokenOutput(1, token, logprobs=LOGPROBS) for token in ids]
    found[0] = TokenOutput(1, ids[0], logprobs=LOGPROBS, **first)
    found[-1] = TokenOutput(1, ids[-1], "stop" if ids[-1] == EOS else "length", LOGPROBS)
    return found


def text_of(updates: Sequence[ChoiceEvents]) -> str:
    deltas = [event for update in updates for event in update.events]
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def test_take_merges_all_tokens_since_the_last_call(tokenizer: Tokenizer, encode: Any) -> None:
    choice = Choice(tokenizer, prepared_request(PROMPT), 0)
    first, second, third, last = outputs([*encode("abc"), EOS])
    choice.add(first)
    choice.add(second)
    a, b = encode("ab")
    logprobs = [TokenWithLogprobs(a, LOGPROBS, 0), TokenWithLogprobs(b, LOGPROBS, 1)]
    assert choice.take() == ChoiceEvents(0, [TextDelta("ab", [a, b], logprobs)])
    assert choice.add(third) is None
    assert choice.add(last) == "stop"
    (c,) = encode("c")
    delta = TextDelta("c", [c, EOS], [TokenWithLogprobs(c, LOGPROBS, 2)])
    assert choice.take() == ChoiceEvents(0, [delta, Finish("stop")])
    assert choice.num_tokens == 4


def test_add_late_line_break_ends_the_answer_with_all_its_text(
    tokenizer: Tokenizer, encode: Any
) -> None:
    options = GenerationOptions(
        operation="text_completion", model=None, last_line_after=2.0, stop=["\n\nb"]
    )
    prepared = replace(prepared_request(PROMPT), options=options)
    choice = Choice(tokenizer, prepared, 0)
    tokens = [TokenOutput(1, token) for token in encode("a\n\nc\n")]
    elapsed = [0.0, 1.0, 3.0, 3.0, 4.0]
    ends = [choice.add(token, at) for token, at in zip(tokens, elapsed, strict=True)]
    # The third token is held back, because a stop string may begin with it.
    assert ends[:3] == [None, None, None]
    assert ends[3] == "length"
    assert text_of([choice.take()]) == "a\n\nc"


def test_take_unfinished_character_gives_its_tokens_and_no_text(
    tokenizer: Tokenizer, encode: Any
) -> None:
    choice = Choice(tokenizer, prepared_request(PROMPT), 0)
    half, other = encode("ö")
    choice.add(TokenOutput(1, half))
    assert choice.take().events == [TextDelta("", [half], [])]
    choice.add(TokenOutput(1, other))
    assert choice.take().events == [TextDelta("ö", [other], [])]


def test_take_orders_prompt_logprobs_text_finish(tokenizer: Tokenizer, encode: Any) -> None:
    request = prepared_request(PROMPT, prompt_logprobs=0)
    choice = Choice(tokenizer, request, 0)
    (token,) = encode("a")
    choice.add(TokenOutput(1, token, "length", prompt_logprobs=(LOGPROBS,)))
    kinds = [type(event) for event in choice.take().events]
    assert kinds == [PromptLogprobs, TextDelta, Finish]


def test_prompt_logprobs_come_once_and_only_if_requested(tokenizer: Tokenizer, encode: Any) -> None:
    for fields, expected in (({}, 0), ({"prompt_logprobs": 0}, 1)):
        choice = Choice(tokenizer, prepared_request(PROMPT, **fields), 0)
        events = []
        for output in outputs(encode("abc"), prompt_logprobs=(LOGPROBS,)):
            choice.add(output)
            events += choice.take().events
        assert sum(isinstance(event, PromptLogprobs) for event in events) == expected


def test_prompt_logprobs_of_later_choices_come_only_in_streams(tokenizer: Tokenizer) -> None:
    fields: dict[str, Any] = {"n": 2, "echo": True, "logprobs": 0}
    whole = prepared_request(PROMPT, [66], **fields)
    stream = prepared_request(PROMPT, [66], **fields, stream=True)
    assert [whole.computes_prompt_logprobs(index) for index in range(4)] == [True, False] * 2
    assert [stream.computes_prompt_logprobs(index) for index in range(4)] == [True] * 4


def test_echo_comes_before_the_text_and_counts_in_offsets(
    tokenizer: Tokenizer, encode: Any
) -> None:
    echoes = [Echo("other", []), Echo("ab", [])]
    choice = Choice(tokenizer, prepared_request(PROMPT, PROMPT, echoes=echoes), 1)
    assert choice.prompt == 1
    choice.add(outputs(encode("cd"))[0])
    (delta,) = choice.take().events
    assert isinstance(delta, TextDelta)
    assert delta.text == "abc"
    assert delta.logprobs[0].offset == 2


def test_max_tokens_0_drops_the_generated_token(tokenizer: Tokenizer, encode: Any) -> None:
    request = prepared_request(PROMPT, max_tokens=0, echoes=[Echo("ab", [])])
    choice = Choice(tokenizer, request, 0)
    assert choice.add(TokenOutput(1, encode("x")[0])) == "length"
    assert choice.take().events == [TextDelta("ab", [], []), Finish("length")]
    assert choice.num_tokens == 0


@pytest.mark.parametrize(
    ("fields", "text", "finish"),
    [
        ({}, "Hello wörld! sto", Finish("stop")),
        ({"stop": "o w"}, "Hell", Finish("stop", "o w")),
        ({"stop": ["r", "o w"]}, "Hell", Finish("stop", "o w")),
        (
            {"stop": "o w", "include_stop_str_in_output": True},
            "Hello w",
            Finish("stop", "o w"),
        ),
        ({"stop": ["stop"]}, "Hello wörld! sto", Finish("stop")),
        ({"stop": "l", "min_tokens": 5}, "Hello wör", Finish("stop", "l")),
    ],
)
def test_text_and_finish_do_not_depend_on_when_events_are_taken(
    tokenizer: Tokenizer, encode: Callable[[str], list[int]], fields: Any, text: str, finish: Finish
) -> None:
    ids = [*encode("Hello wörld! sto"), EOS]
    for seed in range(20):
        rng = random.Random(seed)
        choice = Choice(tokenizer, prepared_request(PROMPT, **fields), 0)
        updates = []
        for output in outputs(ids):
            ended = choice.add(output)
            if ended or rng.random() < 0.4:
                updates.append(choice.take())
            if ended:
                break
        assert text_of(updates) == text
        finishes = [e for update in updates for e in update.events if isinstance(e, Finish)]
        assert finishes == [finish]
        assert updates[-1].events[-1] == finishes[0]


def test_flush_at_the_token_limit_shows_unfinished_character(
    tokenizer: Tokenizer, encode: Any
) -> None:
    choice = Choice(tokenizer, prepared_request(PROMPT), 0)
    half, _ = encode("ö")
    assert choice.add(TokenOutput(1, half, "length")) == "length"
    assert choice.take().events == [TextDelta("\ufffd", [half], []), Finish("length")]
