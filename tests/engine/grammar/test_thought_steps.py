"""Answers with a budget for thoughts: with others, preempted, ahead of the device, and drafted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.grammar.compiler import GrammarProcess
from engine.protocol.generate import Grammar
from engine.protocol.thoughts import ThoughtLimit, limited_source
from tests.server.conftest import EOS, byte_tokenizer
from tests.support.drafts import draft_from
from tests.support.driver import MODES, Driver, each, tiny_llama

TOKENIZER = byte_tokenizer()
CLOSE = tuple(TOKENIZER.encode("</think>", add_special_tokens=False).ids)
JSON_ANSWER = 'start: t /[0-9]{1,3}/\nt[suffix="</think>"]: /(?s:.*)/'
QUICK_MODES = {name: MODES[name] for name in ("synchronous", "late")}
SLOW_MODE = pytest.param(MODES["captured-late"], id="captured-late", marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 600 tokens, and a tokenizer of 258."""
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[*each(QUICK_MODES), SLOW_MODE])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def limited(budget: int, seed: int, lark: str = "") -> dict[str, Any]:
    """Return the parameters of an answer that begins within its thoughts."""
    limit = ThoughtLimit(
        budget=budget,
        is_open=True,
        opening="<think>",
        opens_first=True,
        closing="</think>",
        marks={},
        closing_tokens=CLOSE,
        end_tokens=(EOS,),
    )
    rest = json.dumps({"grammars": [{"lark_grammar": lark}]}) if lark else ""
    source = limited_source(msgspec.json.encode(limit).decode(), rest)
    grammar = Grammar(source, (EOS,), "thinking_token_budget")
    return {"temperature": 1.0, "seed": seed, "grammar": grammar, "stop_token_ids": (EOS,)}


def budget_of(number: int) -> int:
    return (0, 1, 16, 60)[number % 4]


def submitted(driver: Driver, count: int, lark: str = "") -> list[int]:
    return [driver.submit([n + 1], 80, **limited(budget_of(n), n, lark)) for n in range(count)]


def assert_closed(tokens: list[int], budget: int) -> None:
    """Check that the thoughts have the whole budget: random thoughts do not end themselves."""
    assert tuple(tokens[budget : budget + len(CLOSE)]) == CLOSE
    assert EOS not in tokens[:budget]


@pytest.mark.variants(1)
@pytest.mark.parametrize("lark", ["", JSON_ANSWER], ids=["free", "grammar"])
def test_thoughts_end_at_their_budget_and_free_answers_stay_the_same(
    folder: Path, mode: dict[str, Any], lark: str
) -> None:
    driver = Driver(folder, **mode)
    alone = [driver.submit([n], 40, seed=n, temperature=1.0) for n in range(4)]
    driver.run()
    ids = submitted(driver, 8, lark)
    twins = [driver.submit([n], 40, seed=n, temperature=1.0) for n in range(4)]
    driver.run()
    for number, request_id in enumerate(ids):
        tokens = driver.tokens(request_id)
        assert_closed(tokens, budget_of(number))
        answer = tokens[budget_of(number) + len(CLOSE) :]
        if lark:
            assert TOKENIZER.decode(answer).isdigit()
            assert driver.finish(request_id) == "stop"
        else:
            assert answer
    assert list(map(driver.tokens, twins)) == list(map(driver.tokens, alone))


@pytest.mark.variants(1)
def test_budget_does_not_depend_on_preemptions(folder: Path, mode: dict[str, Any]) -> None:
    answers = {}
    for blocks in (400, 22):
        config = {"block_size": 16, "enable_prefix_caching": False}
        size = blocks * 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, channels, bytes
        driver = Driver(folder, **mode, **config, kv_cache_memory_bytes=size)
        # They have one grammar, so that all begin when it is compiled.
        ids = [driver.submit([n + 1], 80, **limited(40, n)) for n in range(8)]
        driver.run()
        answers[blocks] = [driver.tokens(request_id) for request_id in ids]
        assert (driver.stats.preemptions > 0) == (blocks == 22)
    assert answers[22] == answers[400]
    for tokens in answers[22]:
        assert_closed(tokens, 40)


@pytest.mark.variants(1)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_drafts_do_not_change_where_thoughts_end(folder: Path, share: float) -> None:
    """Drafts of the known answer, some of them wrong; the closing mark is drafted anyway."""
    plain = Driver(folder, speculation="off")
    due = submitted(plain, 4)
    plain.run()
    driver = Driver(folder)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: plain.tokens(ids[request_id]), share)
    for number in range(4):
        [request_id] = [driver.submit([number + 1], 80, **limited(budget_of(number), number))]
        ids[request_id] = due[number]
        driver.run()
    for request_id, due_id in ids.items():
        assert driver.tokens(request_id) == plain.tokens(due_id)
    assert driver.stats.drafted_right > 30


def test_answer_that_is_cut_within_its_thoughts_ends_by_its_length(folder: Path) -> None:
    driver = Driver(folder)
    request_id = driver.submit([1], 10, **limited(16, 1))
    driver.run()
    assert driver.finish(request_id) == "length"
    assert len(driver.tokens(request_id)) == 10


@pytest.mark.variants(1)
@pytest.mark.parametrize("lark", ["", JSON_ANSWER], ids=["free", "grammar"])
def test_explanation_tells_the_forced_tokens(folder: Path, lark: str) -> None:
    driver = Driver(folder)
    params = limited(16, 3, lark)
    answered = driver.submit([1], 60, **params)
    driver.run()
    answer = driver.tokens(answered)
    explaining = driver.explain([1], answer, **params)
    driver.run()
    assert driver.drawn(explaining) == answer
    found = driver.explained[explaining].values()
    forced = sorted(token.index for token in found if token.is_forced)
    closing = range(16, 16 + len(CLOSE))
    if lark:
        forced = [index for index in forced if index in closing]  # the grammar has an end, too
    assert forced == list(closing)


OPENING, CLOSING = 1, 2  # tokens that are marks


def marked(seed: int, reach: int) -> dict[str, Any]:
    """Return the parameters of an answer that often opens and closes thoughts."""
    limit = ThoughtLimit(
        budget=25,
        is_open=bool(seed % 2),
        opening="\ufdd0",
        closing="\ufdd1",
        marks={"\ufdd0": OPENING, "\ufdd1": CLOSING},
        reach=reach,
        closing_tokens=(CLOSING,),
        reopening_tokens=(OPENING,),
        end_tokens=(EOS,),
    )
    source = limited_source(msgspec.json.encode(limit).decode(), "")
    bias = ((OPENING, 3.0), (CLOSING, 2.0))
    grammar = Grammar(source, (EOS,), "thinking_token_budget")
    return {"temperature": 1.0, "seed": seed, "grammar": grammar, "logit_bias": bias}


def num_thoughts(tokens: list[int], *, is_open: bool) -> int:
    count = 0
    for token in tokens:
        if token in (OPENING, CLOSING):
            is_open = token == OPENING if token == OPENING or is_open else is_open
        else:
            count += is_open
    return count


@pytest.mark.variants(1)
@pytest.mark.parametrize("drafts", [False, True])
def test_masks_that_hold_need_no_messages_and_change_no_token(
    folder: Path, mode: dict[str, Any], drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    send = GrammarProcess.send
    monkeypatch.setattr(
        GrammarProcess,
        "send",
        lambda process, message: (sent.append(message), send(process, message)),
    )
    answers, messages = {}, {}
    for reach in (-1, 0):
        driver = Driver(folder, **mode, **({} if drafts else {"speculation": "off"}))
        if drafts:
            known = dict(enumerate(answers[-1])) if reach == 0 else {}
            ids: dict[int, int] = {}
            draft_from(driver, lambda i, ids=ids, known=known: known.get(ids.get(i, -1), []), 0.3)
        sent.clear()
        submitted_ids = []
        for number in range(4):
            request_id = driver.submit([number + 1], 80, **marked(number, reach))
            if drafts:
                ids[request_id] = number
            submitted_ids.append(request_id)
        driver.run()
        found = [driver.tokens(request_id) for request_id in submitted_ids]
        answers[reach], messages[reach] = found, len(sent)
    assert answers[0] == answers[-1]
    assert messages[0] < messages[-1] / 2
    counts = [num_thoughts(t, is_open=bool(n % 2)) for n, t in enumerate(answers[0])]
    assert max(counts) == 25
    assert min(counts) < 25
