"""GenerationRecorder: records a generation in the step log, for the built-in pages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from server.generation.prepare import PreparedRequest
from server.glassbox.requests.step_log import OpenRequest, Recorder
from server.http.auth import UI_HEADER
from server.telemetry.observer import Begun, Closed, GenerationObserver, ObserverFactory


def generation_recorder(recorder: Recorder, *, serves_ui: bool) -> ObserverFactory:
    """Return the factory of the observers that record generations."""

    def make(prepared: PreparedRequest) -> GenerationObserver:
        is_wanted = serves_ui and UI_HEADER in prepared.headers
        return GenerationRecorder(recorder, prepared, is_wanted=is_wanted)

    return make


class GenerationRecorder(GenerationObserver):
    """Records a request that wants it, and any request that is sent while a lease is held."""

    def __init__(self, recorder: Recorder, prepared: PreparedRequest, *, is_wanted: bool) -> None:
        self._recorder = recorder
        self._prepared = prepared
        self._is_wanted = is_wanted
        self._opened: OpenRequest | None = None  # None: not recorded

    def submission(self) -> AbstractContextManager[None]:
        if self._is_wanted or self._recorder.is_leased:
            return self._recorder.lease()  # before the first step
        return nullcontext()

    def begun(self, begun: Begun) -> None:
        if not self._recorder.is_leased:  # as before `submission`
            return
        prepared = self._prepared
        ids = [request.id for request in begun.requests]
        self._opened = self._recorder.begin(
            prepared.request_id, prepared.tenant, prepared.arrival, ids
        )

    def closed(self, closed: Closed) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            self._recorder.end(opened, closed.at, closed.records, closed.reason)
