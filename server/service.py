"""Service: what every route works with, made once by `create_app`."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from engine.client import EngineClient
from engine.errors import EngineUnavailableError
from engine.protocol import Ready
from server.chat_template import ChatTemplate
from server.config import ServerConfig
from server.errors import ApiError, to_api_error
from server.metrics import Metrics
from server.tokenizer import Tokenizer


@dataclass(frozen=True)
class Service:
    config: ServerConfig
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate | None
    metrics: Metrics
    names: tuple[str, ...]  # the names of the one model; the first is the canonical one
    created: int  # Unix seconds

    def model_name(self, asked: str | None) -> str:
        """The name to answer with; raises a 404 where the model is not the one served."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            message = f"The model {asked[:128]!r} does not exist; served here: {served}."
            raise ApiError(404, "model_not_found", message, param="model")
        return asked

    def loaded(self) -> Ready:
        """Facts of the model; raises EngineUnavailableError before it is loaded and after the
        engine's death: readiness probes ask /v1/models."""
        info, state = self.client.info, self.client.state
        if info is None or state == "dead":
            raise EngineUnavailableError(state, f"The engine is {state}.")
        return info

    def longest(self) -> int:
        """Most tokens one sequence may have; the KV cache always holds so many."""
        return self.loaded().max_model_len

    def api_error(self, error: Exception) -> ApiError:
        """What the client is told about any exception at all."""
        return to_api_error(error, draining=self.client.state == "draining")


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
