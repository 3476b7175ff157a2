"""Replay recorded answers alone and in random company, and find the first token that differs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from server.replay.client import Json, Refused, ReplayClient
from server.replay.recorded import RecordedAnswer
from server.replay.request import CannotReplay, replay_body, replayed_tokens

AROUND = 12  # tokens before a difference whose text is shown
ALONE = 0  # the round of requests that are sent one at a time


class CannotVerify(Exception):
    """The server cannot repeat any of the recorded answers; the text says why."""


@dataclass(frozen=True)
class Plan:
    """How the answers are replayed: alone, then `rounds` times with `concurrency` at a time."""

    rounds: int
    seed: int  # of the random orders
    concurrency: int


@dataclass(frozen=True)
class Difference:
    """The first token of a replayed answer that is not the recorded one.

    A token is None where an answer has ended. `company` are the lines that were in flight at some
    time while this one was.
    """

    line: int
    round: int  # ALONE, or from 1
    index: int  # of the token in the answer
    expected: int | None
    got: int | None
    before: str  # text of the tokens before the difference
    expected_text: str
    got_text: str
    company: tuple[int, ...] = ()


@dataclass
class Report:
    """The result of a verification so far. Lines are those of the file, from 1."""

    total: int
    batch_invariant: bool = True  # as the server says
    sent: int = 0  # replays with an answer, over all rounds
    differences: dict[int, Difference] = field(default_factory=dict)  # the first of each line
    refusals: dict[int, str] = field(default_factory=dict)  # lines that cannot be replayed: why

    @property
    def equal(self) -> int:
        return self.total - len(self.differences) - len(self.refusals)


@dataclass(frozen=True)
class _Replay:
    """One recorded answer and the request that must repeat it."""

    line: int
    recorded: RecordedAnswer
    body: Json


class Verification:
    """Replays the answers of one file. `seen` is called after each replay."""

    def __init__(
        self,
        api: ReplayClient,
        answers: Mapping[int, RecordedAnswer],
        plan: Plan,
        seen: Callable[[Report], None] = lambda report: None,
    ) -> None:
        self.report = Report(len(answers))
        self._api = api
        self._answers = answers
        self._plan = plan
        self._seen = seen
        self._company: dict[int, set[int]] = {}  # of each line in flight

    async def run(self) -> Report:
        """Run all rounds. Raises CannotVerify, Refused or ServerAway."""
        replays = await self._prepared()
        for replay in replays:
            await self._send(replay, ALONE)
        replays = [replay for replay in replays if replay.line not in self.report.refusals]
        order = random.Random(self._plan.seed)
        for number in range(1, self._plan.rounds + 1):
            order.shuffle(replays)
            await self._round(replays, number)
        return self.report

    async def _prepared(self) -> list[_Replay]:
        """Return what can be replayed on this server. Raises CannotVerify if nothing can."""
        model = await self._api.model()
        if model.kind == "encoder":
            raise CannotVerify(f"{model.name} makes embeddings and no tokens.")
        facts = await self._api.get("/capabilities")
        self.report.batch_invariant = bool(facts.get("batch_invariant"))
        served = _served_fingerprint(facts)
        replays = []
        for line, recorded in self._answers.items():
            try:
                _check_fingerprint(recorded, served)
                replays.append(_Replay(line, recorded, replay_body(recorded, model.vocab_size)))
            except CannotReplay as reason:
                self.report.refusals[line] = f"{reason}."
        if not replays:
            first = next(iter(self.report.refusals.values()))
            raise CannotVerify(f"{model.name} cannot repeat any recorded answer: {first}")
        return replays

    async def _round(self, replays: Sequence[_Replay], number: int) -> None:
        """Send all replays in this order, as many at a time as planned."""
        waiting = iter(replays)

        async def work() -> None:
            for replay in waiting:
                await self._send(replay, number)

        workers = [asyncio.create_task(work()) for _ in range(self._plan.concurrency)]
        try:
            await asyncio.gather(*workers)  # raises the first exception as it is
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _send(self, replay: _Replay, number: int) -> None:
        report = self.report
        for line, others in self._company.items():
            if line != replay.line:
                others.add(replay.line)
        self._company[replay.line] = self._company.keys() - {replay.line}
        try:
            answer = await self._api.post("/v1/completions", replay.body)
        except Refused as error:
            if replay.line not in report.differences:
                report.refusals[replay.line] = str(error)
            return
        finally:
            company = self._company.pop(replay.line)
        report.sent += 1
        tokens = replayed_tokens(replay.recorded, answer)
        if tokens != replay.recorded.tokens and replay.line not in report.differences:
            found = await self._difference(replay, tokens, number, sorted(company))
            report.differences[replay.line] = found
        self._seen(report)

    async def _difference(
        self, replay: _Replay, tokens: list[int], number: int, company: Sequence[int]
    ) -> Difference:
        recorded = replay.recorded.tokens
        index = first_difference(recorded, tokens)
        expected, got = _token_at(recorded, index), _token_at(tokens, index)
        return Difference(
            line=replay.line,
            round=number,
            index=index,
            expected=expected,
            got=got,
            before=await self._api.text_of(recorded[max(0, index - AROUND) : index]),
            expected_text=await self._api.text_of([] if expected is None else [expected]),
            got_text=await self._api.text_of([] if got is None else [got]),
            company=tuple(company),
        )


def first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the index at which two lists part; the shorter length if none of its tokens differ."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _token_at(tokens: Sequence[int], index: int) -> int | None:
    return tokens[index] if index < len(tokens) else None


@dataclass(frozen=True)
class _ServedFingerprint:
    """The `system_fingerprint` of a server's answers, and what it is made from."""

    value: str
    settings: Mapping[str, str]


def _served_fingerprint(capabilities: Json) -> _ServedFingerprint:
    """Return the fingerprint in the answer of /capabilities. Raises Refused."""
    try:
        found = capabilities["system_fingerprint"]
        return _ServedFingerprint(found["value"], dict(found["settings"]))
    except (LookupError, TypeError, ValueError):
        raise Refused("/capabilities names no fingerprint; is the server older?") from None


def _check_fingerprint(recorded: RecordedAnswer, served: _ServedFingerprint) -> None:
    """Raise CannotReplay if another model, version or number format made the answer."""
    if recorded.fingerprint == served.value:
        return
    differences = different_settings(recorded.settings, served.settings)
    if not recorded.settings:
        differences = [f"the record names no settings; {recorded.model}, {recorded.version}"]
    raise CannotReplay(
        f"it was recorded with the fingerprint {recorded.fingerprint}, and the server has "
        f"{served.value} ({'; '.join(differences)})"
    )


def different_settings(recorded: Mapping[str, str], served: Mapping[str, str]) -> list[str]:
    """Return one text for each setting that differs, such as `dtype: float32, now bfloat16`.

    A setting that only one of both has is "none" on the other.
    """
    names = [*served, *(name for name in recorded if name not in served)]
    return [
        f"{name}: {recorded.get(name, 'none')}, now {served.get(name, 'none')}"
        for name in names
        if recorded.get(name) != served.get(name)
    ]
