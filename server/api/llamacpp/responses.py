"""POST /responses, llama.cpp's path of OpenAI's responses, with progress and timings in streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from fastapi import APIRouter
from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from server.api.llamacpp.progress import check_progress, progress_of
from server.api.llamacpp.schemas import check_progress_is_streamed
from server.api.openai.timings import timing_fields
from server.api.receive import admit_and_read
from server.api.responses.open_call import Json
from server.api.responses.routes import respond_to
from server.api.responses.schemas import ResponsesBody
from server.api.responses.writer import ResponsesWriter
from server.generation.events import ChoiceEvents, Timings
from server.generation.options import GenerationOptions
from server.state import state_of

router = APIRouter()
ENDS = ("response.completed", "response.incomplete")


class LlamaResponsesBody(ResponsesBody):
    """A request for a response by llama.cpp's own path."""

    timings_per_token: bool | None = None
    """Return `timings` with each part of the answer, too; of a stream."""
    return_progress: bool | None = None
    """Report each step that computes a part of the prompt in `prompt_progress`; of a stream."""

    @model_validator(mode="after")
    def _progress_is_streamed(self) -> Self:
        check_progress_is_streamed(self.return_progress, self.stream)
        return self

    def options(self) -> GenerationOptions:
        """Return the parameters of the generation. llama.cpp's streams end with timings."""
        return replace(
            super().options(),
            timings=True,
            timings_per_token=bool(self.timings_per_token),
            prompt_progress=bool(self.return_progress),
        )


class LlamaResponsesWriter(ResponsesWriter):
    """Deltas have the timings so far if the request wants them; the last event has them all."""

    _timings: Timings | None = None  # the latest ones

    def chunks(self, update: ChoiceEvents) -> bytes:
        self._timings = update.timings or self._timings
        with_timings = self._prepared.options.timings_per_token
        events = b""
        for progress in progress_of(update, with_timings=with_timings):
            response = {"id": self._id, "object": "response", "status": "in_progress"}
            event = {"type": "response.in_progress", "response": response}
            events += self._event(event | progress)
        return events or super().chunks(update)

    def _event(self, event: Json) -> bytes:
        kind = event["type"]
        per_token = self._prepared.options.timings_per_token and kind.endswith(".delta")
        if self._timings is not None and (per_token or kind in ENDS):
            event = {**event, "timings": timing_fields(self._timings)}
        return super()._event(event)


@router.post("/responses", include_in_schema=False)
async def create_response(request: Request) -> Response:
    """A response to an input, with llama.cpp's additions to its stream."""
    body = await admit_and_read(request, LlamaResponsesBody, "generate")
    check_progress(state_of(request), body.return_progress)
    return await respond_to(request, body, LlamaResponsesWriter)
