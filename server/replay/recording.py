"""Recording: the tokens of one request's choices, kept for --record until the request ends."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.protocol.generate import GenerateRequest
from engine.protocol.outputs import TokenOutput
from server.generation.choice import Choice
from server.generation.prepare import PreparedRequest
from server.replay.record_file import RecordFile
from server.replay.recorded import (
    REPLAY_HEADER,
    RecordedAnswer,
    RecordedGrammar,
    params_fields,
)
from server.state import VERSION, AppState


def recording_of(state: AppState, prepared: PreparedRequest) -> Recording | None:
    """Return what keeps the tokens of a request for --record; None if it is not recorded.

    Requests with parts of the model switched off cannot be repeated. Replays are no new answers.
    """
    is_replay = REPLAY_HEADER in prepared.headers
    if state.record is None or is_replay or prepared.ablation is not None:
        return None
    return Recording(state.record, prepared, state)


class Recording:
    """Collects the tokens of each choice, by its engine request.

    Only a request that ends well is written: an aborted or failed one has no whole answer.
    """

    def __init__(self, file: RecordFile, prepared: PreparedRequest, state: AppState) -> None:
        self._file = file
        self._prepared = prepared
        adapter = state.adapters.find(prepared.options.model)
        self._settings = state.fingerprint_settings(adapter)
        self._requests: Sequence[GenerateRequest] = ()
        self._tokens: dict[int, list[int]] = {}
        self._ended_by_engine: set[int] = set()

    def begin(self, requests: Sequence[GenerateRequest]) -> None:
        """Remember what is sent to the engine, one request per choice."""
        self._requests = requests
        self._tokens = {request.id: [] for request in requests}

    def add(self, output: TokenOutput) -> None:
        self._tokens[output.id].append(output.token)
        if output.finish is not None:
            self._ended_by_engine.add(output.id)

    def write(self, choices: Sequence[Choice]) -> None:
        """Record the answers of a request whose choices are complete."""
        answers = []
        for request, choice in zip(self._requests, choices, strict=True):
            if not choice.drops_tokens:  # max_tokens: 0 has no answer
                answers.append(self._answer(request, choice))
        self._file.add(answers)

    def _answer(self, request: GenerateRequest, choice: Choice) -> RecordedAnswer:
        prepared = self._prepared
        return RecordedAnswer(
            id=prepared.request_id,
            choice=choice.index,
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
            finish=choice.finish or "",
            is_cut=request.id not in self._ended_by_engine,
        )

    def _grammar(self) -> RecordedGrammar | None:
        wanted = self._prepared.options.grammar
        if wanted is None:
            return None
        return RecordedGrammar(wanted.kind, wanted.value, wanted.whitespace, wanted.around)
