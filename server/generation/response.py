"""The response of a generation: a stream, or the whole answer at once."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.generation.best_of import best_answers, with_candidates
from server.generation.events import Timings
from server.generation.generation import Generation
from server.generation.prepare import PreparedRequest
from server.generation.sse import StreamedResponse
from server.generation.writer import Writer, format_events
from server.http.disconnect import cancel_on_disconnect
from server.state import AppState


def respond(state: AppState, prepared: PreparedRequest, writer: Writer) -> Response:
    """Return the response that submits the request as soon as it is called.

    No other task runs between the return from a route and the call of its response. So a queue
    place that the route has reserved is not lost in between.
    """
    generation = Generation(state, with_candidates(prepared))
    if prepared.options.stream:
        return StreamedResponse(state, generation, writer)
    return WholeResponse(prepared.without_pixels, generation, writer)


class WholeResponse(Response):
    """A response with the whole answer; it is sent when all choices are complete."""

    media_type = "application/json"

    def __init__(self, prepared: PreparedRequest, generation: Generation, writer: Writer) -> None:
        self._prepared = prepared
        self._generation = generation
        self._writer = writer
        super().__init__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the generation, then send its answer. Raises before anything is sent."""
        prepared = self._prepared
        with self._generation as generation:
            candidates = await cancel_on_disconnect(receive, generation.collect())
            answers = best_answers(prepared, candidates, generation.scores())
            usage = generation.final_usage()
            timings = generation.timings()
            self.body = await format_events(
                prepared.options, answers, lambda: self._writer.whole(answers, usage)
            )
        self.init_headers({**prepared.notes, "server-timing": server_timing(timings)})
        await super().__call__(scope, receive, send)


def server_timing(timings: Timings) -> str:
    """Return the phases of a request in the format of the Server-Timing header (W3C)."""
    phases = {
        "queue": timings.queue_ms,
        "prefill": timings.prompt_ms,
        "decode": timings.generation_ms,
    }
    return ", ".join([f"{name};dur={duration:.1f}" for name, duration in phases.items()])
