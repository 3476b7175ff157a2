"""Messages about an answer: those to the process of its grammar, and those that count."""

from __future__ import annotations

import struct
from pathlib import Path

from engine.grammar.answers import FollowedAnswer, ReplayedAnswer
from engine.grammar.compiler import GrammarCompiler, GrammarProcess
from engine.grammar.matchers import Matchers
from engine.grammar.messages import Advance, Allowed, Try
from engine.protocol.generate import Explain, GenerateRequest, Grammar, SamplingParams

GRAMMAR = Grammar("{}", (0,), "schema")


class SilentProcess(GrammarProcess):
    """Keeps the messages to it."""

    def __init__(self) -> None:
        super().__init__(1, "", GRAMMAR)
        self.sent: list[Advance | Try] = []

    def send(self, message: Advance | Try) -> None:
        self.sent.append(message)


def followed() -> tuple[FollowedAnswer, SilentProcess]:
    process = SilentProcess()
    params = SamplingParams(9, grammar=GRAMMAR)
    answer = FollowedAnswer(GenerateRequest(7, [1, 2, 3], params, 0.0), process)
    answer.take(allowed(0))
    return answer, process


def replayed(length: int, per_step: int) -> tuple[ReplayedAnswer, SilentProcess]:
    process = SilentProcess()
    tokens = list(range(100, 100 + length))
    explain = Explain(tokens, SamplingParams(9, grammar=GRAMMAR), 1, per_step)
    request = GenerateRequest(7, [1, *tokens[:-1]], SamplingParams(1), 0.0, explain=explain)
    answer = ReplayedAnswer(request, process)
    answer.take(allowed(0))
    return answer, process


def allowed(serial: int, *masks: bytes, problem: str = "") -> Allowed:
    return Allowed(7, serial, list(masks) or [b"%d" % serial], [], problem, 0, 0.0)


def test_answer_takes_each_position_once() -> None:
    answer, process = followed()
    for position, token in ((3, 10), (3, 11), (5, 12), (4, -1), (4, 13)):
        answer.accept(position, token)
    answer.sync()
    answer.sync()
    assert process.sent == [Advance(7, 1, 0, [10, 13])]
    assert answer.num_tokens == 5
    assert (answer.knows(5), answer.knows(6)) == (True, False)


def test_answer_that_goes_back_sends_what_has_changed() -> None:
    answer, process = followed()
    for position in range(3, 7):
        answer.accept(position, 10 + position)
    answer.sync()
    answer.move_to(5)
    answer.accept(5, 99)
    answer.sync()
    assert process.sent[1:] == [Advance(7, 2, 2, [99])]
    answer.move_to(3)
    answer.sync()
    assert process.sent[2:] == [Advance(7, 3, 3, [])]


def test_only_the_message_to_the_last_question_counts() -> None:
    answer, _ = followed()
    assert answer.mask == b"0"
    answer.accept(3, 10)
    answer.sync()
    assert answer.allowed is None
    answer.accept(4, 11)
    answer.sync()
    answer.take(allowed(1))
    assert answer.allowed is None
    answer.take(allowed(2))
    assert answer.mask == b"2"


def test_masks_of_a_draft_do_not_change_the_mask_of_the_answer() -> None:
    answer, process = followed()
    answer.try_draft([5, 6])
    assert process.sent == [Try(7, 1, [5, 6])]
    assert answer.is_trying
    answer.take(allowed(1, b"a", b"b"))
    assert (answer.mask, answer.draft_masks, answer.is_trying) == (b"0", [b"a", b"b"], False)
    answer.try_draft([5])
    answer.give_up_draft()
    answer.take(allowed(2, b"c"))
    assert (answer.mask, answer.draft_masks) == (b"0", [])


def test_problem_of_the_grammar_refuses_the_request() -> None:
    answer, _ = followed()
    assert answer.refusal is None
    answer.take(allowed(0, problem="too many items\nstate: 1"))
    assert answer.refusal is not None
    assert answer.refusal.message == "The answer cannot be held to this grammar: too many items."
    assert answer.refusal.param == "schema"


def test_masks_of_a_past_answer_are_requested_one_step_ahead() -> None:
    answer, process = replayed(7, per_step=3)
    answer.take(allowed(1, b"a", b"b", b"c", b"d"))
    assert [answer.mask_before(index) for index in range(4)] == [b"a", b"b", b"c", b"d"]
    assert answer.covers(range(4))
    assert not answer.covers(range(5))
    answer.request_masks(3)
    answer.take(allowed(2, b"d", b"e", b"f", b"g"))
    assert answer.mask_before(4) == b"e"
    answer.request_masks(6)
    answer.request_masks(7)
    assert process.sent == [
        Advance(7, 1, 0, [100, 101, 102], each=True),
        Advance(7, 2, 0, [103, 104, 105], each=True),
        Advance(7, 3, 0, [106], each=True),
    ]


def test_masks_of_a_past_answer_are_requested_again_after_a_preemption() -> None:
    answer, process = replayed(7, per_step=3)
    answer.request_masks(3)
    assert not answer.covers(range(1, 3))
    answer.request_masks(1)
    assert process.sent[-1] == Advance(7, 3, 5, [101, 102, 103], each=True)
    answer.take(allowed(3, b"b", b"c", b"d", b"e"))
    assert answer.mask_before(2) == b"c"


def test_grammar_that_cannot_go_on_allows_only_its_end_token() -> None:
    grammar = Grammar("{}", (37,), "schema")
    request = GenerateRequest(7, [1], SamplingParams(9, grammar=grammar), 0.0)
    answer = FollowedAnswer(request, SilentProcess())
    words = Matchers(GrammarCompiler(Path(), 70), 70)._row(b"", answer)
    assert words.tolist() == [0, 1 << 5, 0]


def test_replay_returns_masks_and_requests_those_of_the_next_step() -> None:
    answer, process = replayed(7, per_step=3)
    masks = [struct.pack("<3i", index, 0, 0) for index in range(4)]
    answer.take(allowed(1, *masks))
    matchers = Matchers(GrammarCompiler(Path(), 70), 70)
    matchers._replays[7] = answer
    found = matchers.replay(7, [], range(1, 3))
    assert found is not None
    assert found[:, 0].tolist() == [1, 2]
    assert process.sent[-1] == Advance(7, 2, 0, [103, 104, 105], each=True)
    assert matchers.replay(8, [], range(1)) is None
