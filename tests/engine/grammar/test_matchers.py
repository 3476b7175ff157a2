"""Answers that follow a grammar: alone, with others, preempted, ahead of the device, and cut."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.protocol.generate import Grammar
from engine.protocol.lens import LensRequest
from engine.protocol.outputs import StepOutputs
from tests.server.conftest import EOS, byte_tokenizer
from tests.support.drafts import draft_from
from tests.support.driver import MODES, Driver, LateRunner, each, tiny_llama

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
# Masks reach a late step in the same way, captured or not.
SLOW_MODE = pytest.param(MODES["late"], id="late", marks=pytest.mark.slow)
QUICK_MODES = {name: MODES[name] for name in ("synchronous", "captured-late")}
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 600 tokens, and a tokenizer of 258: the others are never allowed."""
    folder = tiny_llama(tmp_path_factory.mktemp("tiny"))
    TOKENIZER.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=[*each(QUICK_MODES), SLOW_MODE])
def mode(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture(scope="module")
def driver(folder: Path, mode: dict[str, Any]) -> Driver:
    return Driver(folder, **mode)


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "driver" in request.fixturenames:
        assert not request.getfixturevalue("driver").runner.matchers._states


def grammar(**kind: Any) -> Grammar:
    return Grammar(json.dumps({"grammars": [kind]}), (EOS,), "response_format")


def constrained(seed: int, schema: Any = PERSON, **more: Any) -> dict[str, Any]:
    wanted = {"grammar": grammar(json_schema=schema), "stop_token_ids": (EOS,)}
    return {"temperature": 1.0, "seed": seed, **wanted, **more}


def text(driver: Driver, request_id: int) -> str:
    return TOKENIZER.decode(driver.tokens(request_id))


def prompt(number: int) -> list[int]:
    return [(7 * number + i) % 256 for i in range(1 + number % 9)]


@pytest.mark.variants(1)
def test_answers_are_valid_and_free_ones_stay_the_same(folder: Path, driver: Driver) -> None:
    """Six of twelve requests follow a grammar; the others sample what they sample alone."""
    free = {"temperature": 1.0, "stop_token_ids": (EOS,)}
    alone = [driver.submit(prompt(n), 40, seed=n, **free) for n in range(6)]
    driver.run()
    ids, twins = [], []
    for n in range(6):
        ids.append(driver.submit(prompt(n), 200, **constrained(n)))
        twins.append(driver.submit(prompt(n), 40, seed=n, **free))
    driver.run()
    answers = [json.loads(text(driver, request_id)) for request_id in ids]
    assert len(set(map(str, answers))) > 1
    for answer, request_id in zip(answers, ids, strict=True):
        jsonschema.validate(answer, PERSON)
        assert driver.finish(request_id) == "stop"
        assert driver.tokens(request_id)[-1] == EOS
    assert list(map(driver.tokens, twins)) == list(map(driver.tokens, alone))


@pytest.mark.variants(1)
def test_answer_does_not_depend_on_preemptions(folder: Path, mode: dict[str, Any]) -> None:
    """A preempted sequence samples its lost tokens again, so its matcher goes back."""
    answers = {}
    for blocks in (400, 22):
        config = {"block_size": 16, "enable_prefix_caching": False}
        size = blocks * 16 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, channels, bytes
        driver = Driver(folder, **mode, **config, kv_cache_memory_bytes=size)
        ids = [driver.submit(prompt(n), 120, **constrained(n)) for n in range(8)]
        driver.run()
        answers[blocks] = [driver.tokens(request_id) for request_id in ids]
        assert (driver.stats.preemptions > 0) == (blocks == 22)
    assert answers[22] == answers[400]


@pytest.mark.variants(2)
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_drafts_change_no_answer_that_follows_a_grammar(
    folder: Path, mode: dict[str, Any], share: float
) -> None:
    """Forced tokens and drafts of the known answer, some of them wrong or forbidden."""
    plain = Driver(folder, **mode, speculation="off")
    due = [plain.submit(prompt(n), 120, **constrained(n)) for n in range(3)]
    plain.run()
    driver = Driver(folder, **mode)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: plain.tokens(ids[request_id]), share)
    for together in (1, 2):
        for first in range(0, 3, together):
            for n in range(first, min(first + together, 3)):
                ids[driver.submit(prompt(n), 120, **constrained(n))] = due[n]
            driver.run()
    for request_id, due_id in ids.items():
        assert driver.tokens(request_id) == plain.tokens(due_id)
        assert driver.finish(request_id) == plain.finish(due_id)
    if not mode.get("depth"):  # with a token in flight, a grammar cannot judge a draft
        assert driver.stats.drafted_right > 30


def test_draft_model_changes_no_answer_that_follows_a_grammar(folder: Path) -> None:
    """The draft model ignores grammars, so its drafts end where a grammar forbids them."""
    found = []
    for fields in ({"speculation": "off"}, {"speculative_model": str(folder)}):
        driver = Driver(folder, **fields)
        ids = [driver.submit(prompt(n), 120, **constrained(n)) for n in range(3)]
        driver.run()
        found.append([driver.tokens(number) for number in ids])
    assert found[0] == found[1]
    assert driver.stats.drafted


def test_forced_tokens_are_drafted(folder: Path) -> None:
    """The names of the properties are no choice, so they cost no steps of their own."""
    driver = Driver(folder)
    schema = {"const": {"a_long_name_of_a_property": "and its only value"}}
    request_id = driver.submit(prompt(1), 120, **constrained(1, schema))
    driver.run()
    assert json.loads(text(driver, request_id)) == schema["const"]
    assert driver.stats.step < len(driver.tokens(request_id)) / 2


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ({"min_tokens": 5}, "b"),
        ({"logit_bias": ((TOKENIZER.token_to_id("b"), float("-inf")),)}, "b"),
        ({"logprobs": 2}, "b"),
        ({"repetition_penalty": 2.0, "frequency_penalty": 2.0}, "b"),
        ({"temperature": 0.0}, "b"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_grammar_wins_over_what_would_forbid_its_only_answer(
    driver: Driver, more: dict[str, Any], answer: str
) -> None:
    wanted = {"grammar": grammar(lark='start: "b"'), "stop_token_ids": (EOS,)}
    wanted["grammar"] = grammar(lark_grammar='start: "b"')
    request_id = driver.submit([1, 2], 9, **{"temperature": 1.0, **wanted, **more})
    driver.run()
    assert text(driver, request_id) == answer
    if "logprobs" in more:
        first = driver.outputs[request_id][0].logprobs
        assert first is not None
        assert first.logprob < -2, "the model's own distribution, not the masked one"
        assert len(first.top) == 2


def test_ended_answer_may_be_cut_by_max_tokens(driver: Driver) -> None:
    request_id = driver.submit([1], 5, **constrained(3))
    driver.run()
    assert driver.finish(request_id) == "length"
    assert text(driver, request_id).startswith('{"nam')


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"].'),
        ({"json_schema": {"type": "nonsense"}}, "Invalid type: nonsense."),
        ({"lark_grammar": "start: other"}, "unknown name"),
        ({"lark_grammar": "start: /(?=x)/"}, "look-around"),
    ],
    ids=["keyword", "type", "rule", "pattern"],
)
def test_grammar_that_cannot_be_followed_is_refused(
    driver: Driver, kind: dict[str, Any], reason: str
) -> None:
    good = driver.submit([1], 100, **constrained(1))
    bad = driver.submit([1], 100, temperature=1.0, grammar=grammar(**kind))
    driver.run()
    refusal = driver.rejected[bad]
    assert (refusal.code, refusal.param) == ("invalid_grammar", "response_format")
    assert reason in refusal.message
    assert "\n" not in refusal.message
    jsonschema.validate(json.loads(text(driver, good)), PERSON)


def test_grammar_for_model_without_tokenizer_is_refused(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    bad = driver.submit([1], 9, **constrained(1))
    driver.run()
    assert "tokenizer.json" in driver.rejected[bad].message


def test_abort_while_compiling_and_while_running_forgets_the_matcher(driver: Driver) -> None:
    ids = [driver.submit([1], 100, **constrained(n)) for n in range(3)]
    driver.abort(ids[0])
    driver.turn(4)
    driver.abort(ids[1])
    driver.run()
    jsonschema.validate(json.loads(text(driver, ids[2])), PERSON)
    assert driver.finish(ids[0]) is None


@pytest.fixture
def faulty(mode: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A driver whose grammars have the faults that their titles name."""
    monkeypatch.setattr("engine.grammar.connection.MODULE", "tests.support.faulty_grammars")
    return Driver(folder, **mode)


@pytest.mark.parametrize(
    ("title", "reason"),
    [
        ("breaks", "token"),
        ("panics", "llguidance failed: index out of bounds"),
        ("crashes", "it is nested too deeply"),
        ("spins", "it took more than 0.5 s of CPU time"),
        ("grows", "it took more than 64 MiB of memory"),
    ],
)
@pytest.mark.variants(1)
def test_grammar_over_a_limit_refuses_only_that_request(
    faulty: Driver, monkeypatch: pytest.MonkeyPatch, title: str, reason: str
) -> None:
    bad = faulty.submit([1], 100, **constrained(1, {**PERSON, "title": title}))
    good = faulty.submit([1], 100, **constrained(2))
    faulty.run()
    refusals = {key: refusal.message for key, refusal in faulty.rejected.items()}
    if isinstance(faulty.core.runner, LateRunner) and not refusals:
        assert faulty.finish(bad) == "length"  # its last token was computed and retired at once
    else:
        assert list(refusals) == [bad]
        assert reason in refusals[bad]
    jsonschema.validate(json.loads(text(faulty, good)), PERSON)


def test_grammar_behind_a_long_queue_is_refused_to_be_sent_later(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.grammar.limits.QUEUE_S", -1.0)
    late = driver.submit([1], 9, **constrained(1, {**PERSON, "title": "late"}))
    driver.run()
    assert driver.rejected[late].code == "server_overloaded"


def test_same_grammar_has_one_process(driver: Driver) -> None:
    compiler = driver.runner.matchers.compiler
    schema = {**PERSON, "title": "once"}
    before = compiler._count
    ids = [driver.submit([1], 100, **constrained(n, schema)) for n in range(4)]
    driver.run()
    ids.append(driver.submit([1], 100, **constrained(4, schema)))
    driver.run()
    assert compiler._count == before + 1
    for request_id in ids:
        jsonschema.validate(json.loads(text(driver, request_id)), PERSON)


def test_slow_grammar_sits_out_steps_of_the_others(faulty: Driver) -> None:
    """Its masks take 0.3 s each. Others need many steps meanwhile, and wait for none of them."""
    slow = faulty.submit([1], 40, **constrained(1, {**PERSON, "title": "sleeps"}))
    while slow not in faulty.admissions:
        faulty.turn()
    others = [faulty.submit([n], 40, seed=n, temperature=1.0) for n in range(3)]
    others.append(faulty.submit([1], 40, **constrained(2)))
    while not all(map(faulty.finish, others)):
        faulty.turn()
    assert faulty.finish(slow) is None
    num_tokens = len(faulty.tokens(slow))
    assert num_tokens < 40
    while len(faulty.tokens(slow)) == num_tokens:
        faulty.turn()
    faulty.abort(slow)
    faulty.run()


def test_engine_with_only_a_slow_grammar_reads_messages_and_gives_signs_of_life(
    faulty: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while it compiles; the client would take a silent engine for a hung one."""
    monkeypatch.setattr("engine.core.SIGN_S", 0.02)
    slow = faulty.submit([1], 3, **constrained(1, {**PERSON, "title": "dozes"}))
    signs = [0, 0]
    while not faulty.finish(slow):
        sent = len(faulty.sent)
        faulty.turn()
        outputs = [m for m in faulty.sent[sent:] if isinstance(m, StepOutputs) and not m.tokens]
        signs[slow in faulty.admissions] += len(outputs)
    assert min(signs) > 3
    free = faulty.submit([1], 3)
    slow = faulty.submit([1], 3, **constrained(1, {**PERSON, "title": "dozes", "type": "object"}))
    while not faulty.finish(free):
        faulty.turn()
    assert faulty.finish(slow) is None
    faulty.run()


def test_lens_during_a_slow_grammar_leaves_the_signs_of_life(
    faulty: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The running sequence waits for its mask, so that there is no step, but pieces of a lens."""
    slow = faulty.submit([1], 10, **constrained(1, {**PERSON, "title": "dozes"}))
    while slow not in faulty.admissions:
        faulty.turn()
    monkeypatch.setattr("engine.core.SIGN_S", 0.02)
    lens = LensRequest(10**6, list(range(1, 40)))
    faulty.inbox.append(lens)
    sent = len(faulty.sent)
    monkeypatch.setattr(faulty.inspectors.lenses, "look", lambda request: endless())
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        faulty.turn()
    assert not faulty.finish(slow)
    signs = [m for m in faulty.sent[sent:] if isinstance(m, StepOutputs) and not m.tokens]
    assert len(signs) > 3
    faulty.abort(lens.id)
    faulty.abort(slow)
    faulty.run()


def endless() -> Iterator[None]:
    while True:
        time.sleep(0.002)
        yield None
