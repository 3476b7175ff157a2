"""Recording: the tokens of one request's choices, kept for --record until the request ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.protocol.generate import GenerateRequest
from server.fingerprint import fingerprint_settings
from server.generation.prepare import PreparedRequest
from server.replay.record_file import RecordFile
from server.replay.recorded import (
    REPLAY_HEADER,
    RecordedAnswer,
    RecordedGrammar,
    params_fields,
)
from server.state import VERSION, AppState
from server.telemetry.choice_record import ChoiceRecord
from server.telemetry.observer import Begun, Closed, GenerationObserver, ObserverFactory, Token


def answer_recorder(file: RecordFile, state: AppState) -> ObserverFactory:
    """Return the factory of the observers that write answers to `file`.

    Requests with parts of the model switched off cannot be repeated. Replays are no new answers.
    """

    def make(prepared: PreparedRequest) -> GenerationObserver | None:
        if REPLAY_HEADER in prepared.headers or prepared.ablation is not None:
            return None
        if prepared.images:  # a record holds tokens, and they do not say what a picture shows
            return None
        return Recording(file, prepared, state)

    return make


class Recording(GenerationObserver):
    """Collects the tokens of each choice, by its engine request.

    Only a request that ends well is written: an aborted or failed one has no whole answer.
    """

    def __init__(self, file: RecordFile, prepared: PreparedRequest, state: AppState) -> None:
        self._file = file
        self._prepared = prepared
        adapter = state.adapters.find(prepared.options.model)
        self._settings = fingerprint_settings(VERSION, state.loaded(), adapter)
        self._requests: Sequence[GenerateRequest] = ()
        self._tokens: dict[int, list[int]] = {}
        self._ended_by_engine: set[int] = set()

    def begun(self, begun: Begun) -> None:
        self._requests = begun.requests
        self._tokens = {request.id: [] for request in begun.requests}

    def token(self, token: Token) -> None:
        output = token.output
        self._tokens[output.id].append(output.token)
        if output.finish is not None:
            self._ended_by_engine.add(output.id)

    def closed(self, closed: Closed) -> None:
        if closed.reason is not None:
            return
        answers = []
        for request, record in zip(self._requests, closed.records, strict=True):
            if record.num_tokens:  # max_tokens: 0 has no answer
                answers.append(self._answer(request, record))
        self._file.add(answers)

    def _answer(self, request: GenerateRequest, record: ChoiceRecord) -> RecordedAnswer:
        prepared = self._prepared
        return RecordedAnswer(
            id=prepared.request_id,
            choice=record.index,
            created=int(time.time()),
            model=prepared.model,
            fingerprint=prepared.fingerprint,
            settings=self._settings,
            version=VERSION,
            prompt_ids=request.prompt,
            encoder_prompt_ids=request.encoder_prompt,
            params=params_fields(request.params),
            bad_words=list(prepared.options.bad_words),
            grammar=self._grammar(),
            tokens=self._tokens[request.id],
            finish=record.finish or "",
            is_cut=request.id not in self._ended_by_engine,
        )

    def _grammar(self) -> RecordedGrammar | None:
        wanted = self._prepared.options.grammar
        if wanted is None:
            return None
        return RecordedGrammar(
            wanted.kind,
            wanted.value,
            wanted.whitespace,
            wanted.around,
            self._prepared.options.thought_budget,
        )
